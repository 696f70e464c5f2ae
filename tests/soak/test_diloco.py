"""DiLoCo with families and optimizers of ours, on more axes; a run of it is stopped inside a period and resumed."""

import json
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import spmd
from spmd import tree
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.testing import token_batches
from tests import tiny
from tests.train_runs import ROOT, Run, losses, train, write_tiny

pytestmark = pytest.mark.soak

FAMILIES = {"llama": (tiny.CONFIG, LLAMA), "mixtral": (MIXTRALS["test"], MIXTRAL)}
SGD, ADAM = optax.sgd(0.1), optax.adamw(1e-3)
MUON = spmd.OptimizerConfig(name="muon", learning_rate=0.01, schedule="constant")


def final_params(plan, loss_fn, batches):
    step = spmd.make_train_step(plan, loss_fn)
    state = step.init_state(0)
    for batch in batches:
        state, _ = step(state, batch)
    return tree.flatten(jax.device_get(state.params))


def compare(family, inner, sizes, *, same, precision="float32"):
    """Largest difference after three steps, H = 1, to data parallelism, or with `same` to one replica."""
    config, rules = FAMILIES[family]
    model = spmd.from_nnx(config.build)
    loss_fn = spmd.next_token_loss(model)
    mesh = tiny.mesh(data=2, **sizes)
    batches = token_batches((8, 16), config.vocab, 3, padding=0.0)
    given = batches
    whole = mesh
    if same:
        given = [jax.tree.map(lambda x: np.concatenate([x, x]), batch) for batch in batches]
        whole = tiny.mesh(**sizes)
    replica = spmd.make_plan(spmd.replica_mesh(mesh), rules, model, inner, precision=precision)
    diloco = spmd.DiLoCo(spmd.make_train_step(replica, loss_fn), every=1)
    outer = spmd.make_plan(
        mesh, rules, model, optax.sgd(1.0), precision=precision, transforms=[diloco]
    )
    found = final_params(outer, loss_fn, given)
    plan = spmd.make_plan(whole, rules, model, inner, precision=precision)
    expected = final_params(plan, loss_fn, batches)
    return max(float(np.abs(found[path] - x).max()) for path, x in expected.items())


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_data_parallelism_on_other_axes(axis):
    assert compare("llama", SGD, {"fsdp": 2, axis: 2}, same=False) < 1e-6


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_experts_of_each_replica(precision):
    sizes = {"fsdp": 2, "expert": 2}
    assert compare("mixtral", ADAM, sizes, same=True, precision=precision) < 1e-6
    # the control: losses that balance experts are of a replica's own tokens
    assert compare("mixtral", SGD, sizes, same=False) > 1e-4


def test_muon_inside():
    muon = spmd.make_optimizer(MUON, 3, model=tiny.model())
    assert compare("llama", muon, {"fsdp": 2, "tensor": 2}, same=True) < 2e-6


DILOCO = """
from spmd.diloco.config import DiLoCoConfig

config = dataclasses.replace(
    config, diloco=DiLoCoConfig(every=4, fragments=2, codec="int4"), checkpoint_every=12, steps=24
)
"""


def test_a_run_is_resumed_inside_a_period_with_the_same_bits(tmp_path):
    """With SIGTERM after some step, then on four replicas, which `spmd eval` reads."""
    config = write_tiny(tmp_path, DILOCO)
    train(config, tmp_path / "whole")
    with Run(config, tmp_path / "stopped") as run:
        run.wait_for_step(9)
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes() == [EXIT_PREEMPTED]
    train(config, tmp_path / "stopped", "--resume", "auto")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    more = ("--mesh.data", 4, "--mesh.fsdp", 1, "--steps", 32)
    train(config, tmp_path / "stopped", "--resume", "auto", *more)
    assert max(losses(tmp_path / "stopped")) == 32
    command = [sys.executable, "-m", "spmd.cli", "eval", str(tmp_path / "stopped"), "--json"]
    command += ["--tokens", "256", "--devices", "1", "--mesh.fsdp", "-1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tokens"] > 0


def test_two_processes_are_as_one(tmp_path):
    """Each has the devices of one replica."""
    config = write_tiny(tmp_path, DILOCO)
    train(config, tmp_path / "one", "--steps", "12")
    train(config, tmp_path / "two", "--steps", "12", processes=2, devices=2)
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
