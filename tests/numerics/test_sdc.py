"""A run stops when replicas differ or when gradients do not come out twice, and says which device and which array."""

import dataclasses
import itertools
import json
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.cli import main
from spmd.errors import ConfigError, DataCorruptionError
from spmd.gradients.base import value_and_grad
from spmd.resilience.sdc import DeterminismCheck, ReplicaCheck
from spmd.run.load_config import load_config
from spmd.run.run_config import SDCConfig
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.loop import fit
from spmd.training.state import init_state
from spmd.training.step import TrainStep, make_train_step
from tests import tiny
from tests.faults import with_flip
from tests.programs import ROOT
from tests.train_runs import write_tiny

BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=4)
SIZES = {"data": 4, "tensor": 2}
PATH = "params/layers/mlp/down_proj/kernel"


def placed(plan):
    return [place_batch(plan, batch) for batch in BATCHES]


def damaged(step, plan, *, after):
    """The step, whose state has one bit flipped on device 5 after so many of them."""
    count = itertools.count(1)

    def run(state, batch):
        state, metrics = step(state, batch)
        if next(count) == after:
            with jax.transfer_guard("allow"):
                state = with_flip(state, PATH, plan.mesh.devices.flat[5], element=17, bit=12)
        return state, metrics

    return run


@pytest.mark.soak
def test_a_run_with_equal_replicas_is_left_alone():
    """The control: checked after each step, it comes to its end."""
    plan = tiny.plan(**SIZES)
    step = make_train_step(plan, tiny.loss_fn())
    assert (
        int(
            fit(
                init_state(plan), step, placed(plan), steps=4, hooks=[ReplicaCheck(plan, every=1)]
            ).step
        )
        == 4
    )


def test_a_run_stops_at_the_first_check_after_a_flip():
    """After step 3 it is flipped, after step 4 it is looked at; the step has summed gradients over `data` by then."""
    plan = tiny.plan(**SIZES)
    step = damaged(make_train_step(plan, tiny.loss_fn()), plan, after=3)
    with pytest.raises(DataCorruptionError, match="after step 4") as caught:
        fit(init_state(plan), step, placed(plan), steps=4, hooks=[ReplicaCheck(plan, every=2)])
    assert PATH in {problem.where for problem in caught.value.problems}
    assert "device 5 (process 0) holds other bits than the other replicas" in str(caught.value)


def test_never_means_never():
    """0 asks for nothing, compiles nothing and looks at nothing."""
    check = ReplicaCheck(tiny.plan(**SIZES), every=0)
    assert not any(check.wants_state(step) for step in range(10))
    assert "digest" not in vars(check)


def test_gradients_that_come_out_twice_pass():
    """The same bits, after any step, with a key of its own."""
    plan = tiny.plan(**SIZES)
    state, probe = init_state(plan), placed(plan)[0]
    check = DeterminismCheck(plan, value_and_grad(tiny.loss_fn()), probe, every=2)
    assert [check.wants_state(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    check.on_state(2, state)
    assert int(init_state(plan).step) == 0
    assert not state.params["norm"]["scale"].is_deleted()


def unsteady(grad_fn, mesh, device):
    """A gradient function that adds one unit in the last place on one device every second time that it runs."""
    calls = itertools.count()

    def noise(place):
        return np.float32(next(calls) % 2 if place == device else 0)

    def spoil(x):
        place = jnp.int32(0)
        for axis, size in mesh.shape.items():
            place = place * size + jax.lax.axis_index(axis)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        odd = jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), place).astype(
            jnp.uint32
        )
        return jax.lax.bitcast_convert_type(bits.at[0].add(odd), x.dtype)

    def wrong(params, carry, batch, key):
        gradients, sums, carry = grad_fn(params, carry, batch, key)
        scale = gradients["norm"]["scale"]
        spoilt = jax.shard_map(spoil, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(
            scale
        )
        return {**gradients, "norm": {"scale": spoilt}}, sums, carry

    return wrong


def test_a_gradient_that_differs_the_second_time_is_found():
    """The array and the device, of one bit."""
    plan = tiny.plan(**SIZES)
    grad_fn = unsteady(value_and_grad(tiny.loss_fn()), plan.mesh, device=6)
    check = DeterminismCheck(plan, grad_fn, placed(plan)[0], every=1)
    with pytest.raises(DataCorruptionError, match="are not reproducible after step 3") as caught:
        check.on_state(3, init_state(plan))
    (problem,) = caught.value.problems
    assert problem.where == "norm/scale"
    assert "device 6 (process 0)" in problem.what


class ReadsWrongly(DeterminismCheck):
    """A device that reads one bit of a parameter wrongly every second time, in the half of the width that it uses."""

    reads = itertools.count()

    def digests(self, state):
        if next(self.reads) % 2:
            state = with_flip(
                state, "params/norm/scale", self.plan.mesh.devices.flat[5], element=19, bit=22
            )
        return super().digests(state)


def test_a_device_that_reads_wrongly_reaches_all():
    """The sum of gradients carries it to every replica; then all devices are named together."""
    plan = tiny.plan(**SIZES)
    check = ReadsWrongly(plan, value_and_grad(tiny.loss_fn()), placed(plan)[0], every=1)
    with pytest.raises(DataCorruptionError) as caught:
        check.on_state(1, init_state(plan))
    differing = {problem.where: problem.what for problem in caught.value.problems}
    assert "on all 8 devices" in differing["norm/scale"]


def test_intervals_are_checked_with_the_config():
    """A negative one is refused by its field."""
    with pytest.raises(ConfigError, match=r"sdc_checks.replicas_every: is -1"):
        dataclasses.replace(load_config("demo"), sdc_checks=SDCConfig(replicas_every=-1))
    assert load_config("demo").sdc_checks == SDCConfig(0, 0)


CHECKED = ("--sdc-checks.replicas-every", "2", "--sdc-checks.repeat-every", "2")


def train(config, out, *flags):
    """The exit code of `spmd train` of 4 steps, and the steps of the checkpoints that it left."""
    arguments = [
        config,
        "--out",
        out,
        "--devices",
        8,
        "--mesh.data",
        4,
        "--steps",
        4,
        "--checkpoint-every",
        2,
        *flags,
    ]
    with pytest.raises(SystemExit) as caught:
        main(["train", *map(str, arguments)])
    return caught.value.code, sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.soak
def test_a_healthy_run_is_checked_and_ends(tmp_path):
    """Both checks take time, which is counted as theirs; without flags there is none."""

    def checking(*flags):
        out = tmp_path / f"run-{len(flags)}"
        assert train(write_tiny(tmp_path), out, *flags) == (0, ["2", "4"])
        return json.loads((out / "goodput.jsonl").read_text().splitlines()[-1])["seconds"]["check"]

    assert checking(*CHECKED) > 0
    assert checking() == 0


@pytest.mark.parametrize(
    ("flags", "expected"), [(CHECKED, (2, ["2"])), ((), (0, ["2", "4"]))], ids=["on", "off"]
)
def test_a_run_with_a_flip_stops_before_it_saves(flags, expected, tmp_path, monkeypatch, capsys):
    """A bit flips after step 3: array and device are named after step 4, which is not saved; unchecked, it is."""
    take, count = TrainStep.__call__, itertools.count(1)

    def take_and_flip(self, state, batch):
        state, metrics = take(self, state, batch)
        if next(count) == 3:
            with jax.transfer_guard("allow"):
                state = with_flip(state, PATH, jax.devices()[5], element=17, bit=12)
        return state, metrics

    monkeypatch.setattr(TrainStep, "__call__", take_and_flip)
    assert train(write_tiny(tmp_path), tmp_path / "run", *flags) == expected
    said = capsys.readouterr().err
    assert ("Replicas differ after step 4:" in said) == bool(flags)
    assert (
        f"{PATH}: device 5 (process 0) holds other bits than the other replicas" in said
    ) == bool(flags)


TWO_PROCESSES = """
    import json, sys
    import jax, numpy as np
    from spmd.distributed.cluster_env import LaunchArgs
    from spmd.distributed.initialize import initialize
    initialize(4, LaunchArgs(sys.argv[2], 2, int(sys.argv[1])))
    from jax.sharding import NamedSharding, PartitionSpec as P
    from spmd.sharding.mesh import make_mesh
    from spmd.resilience.digests import make_digest, replica_differences
    from tests.faults import flip

    mesh = make_mesh(data=4, fsdp=2)
    place = NamedSharding(mesh, P("fsdp"))
    values = np.arange(12, dtype=np.float32)
    whole = jax.make_array_from_callback((12,), place, lambda index: values[index])
    abstract = {"w": jax.ShapeDtypeStruct((12,), "float32", sharding=place)}
    digest = make_digest(abstract, mesh)
    odd = flip(whole, mesh.devices.flat[5], element=4, bit=9)
    said = [[str(p) for p in replica_differences(np.asarray(digest({"w": w})), abstract, mesh)] for w in (whole, odd)]
    print(json.dumps([*said, mesh.devices.flat[5].id]))
"""


@pytest.mark.soak
def test_every_process_comes_to_the_same_verdict():
    """Process 1 holds the flipped bit, and process 0 names its device too; before, neither names any."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        coordinator = f"localhost:{bound.getsockname()[1]}"
    command = [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES)]
    running = [
        subprocess.Popen(
            [*command, str(number), coordinator], cwd=ROOT, stdout=-1, stderr=-1, text=True
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], ended
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    assert first == second
    untouched, (problem,), device = first
    assert untouched == []
    assert problem.startswith(
        f"w: device {device} (process 1) holds other bits than the other replicas"
    )
