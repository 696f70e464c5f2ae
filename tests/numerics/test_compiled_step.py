"""Compiled steps as files: loaded by a run with the same bits, and not where anything differs."""

import dataclasses
import json
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.commands.compile import run_compile
from spmd.errors import CheckpointError, ConfigError
from spmd.run import compiled_step
from spmd.run.build import make_setup
from spmd.run.compiled_step import finish_loading, load_compiled_step, step_key, write_bytes
from spmd.run.load_config import load_config
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import mesh_of
from spmd.training.compilation_cache import compilation_cache
from spmd.training.serialized_step import (
    LoweringCheck,
    NotSerializableError,
    SerializedProgram,
    SerializedStep,
    UnreadableError,
    install_programs,
    key_differences,
    read_step,
    serialize_step,
)
from spmd.training.step import TrainStep
from tests.programs import ROOT

RULES = spmd.Rules(params=[("w", P("fsdp", "tensor"))], activations=[])
MODEL = spmd.Model(
    lambda key: {"w": jax.random.normal(key, (4, 2))}, lambda params, x: x @ params["w"]
)
CONFIG = spmd.RunConfig(
    steps=4,
    log_every=1,
    checkpoint_every=2,
    checkpoint_minutes=0,
    metrics_to=(),
    compilation_cache_dir="none",  # a program of a cache is not written
)
BATCH = {
    "x": jax.ShapeDtypeStruct((8, 4), jnp.float32),
    "y": jax.ShapeDtypeStruct((8, 2), jnp.float32),
}


LOSSES: dict[int, "Loss"] = {}
STEPS: list[object] = []
"""The steps, which keeps their ids apart."""


class Loss:
    """Squares times a factor of its own, which no key knows; counts its traces."""

    def __init__(self, factor: float = 1.0, says: bool = False) -> None:
        self.factor = factor
        self.says = says
        self.traces = 0

    def __call__(self, params, variables, batch, key):
        self.traces += 1
        y = MODEL.apply(params, batch["x"]) + 0.01 * jax.random.normal(key, (8, 2))
        loss = self.factor * ((y - batch["y"]) ** 2).sum()
        if self.says:
            jax.debug.callback(lambda x: None, loss)
        return {"loss": loss, "weight": jnp.float32(8)}, variables


def plan(**sizes):
    return spmd.make_plan(spmd.make_mesh(**sizes), RULES, MODEL, optax.adam(0.1))


@pytest.fixture(scope="module")
def shared_plan():
    """The plan of all steps: two of data, two of fsdp, two of tensor."""
    return plan(data=2, fsdp=2, tensor=2)


def make_step(shared, **loss):
    """A step of its own, not compiled."""
    own = Loss(**loss)
    step = spmd.make_train_step(shared, own, check_first_batch=False)
    LOSSES[id(step)] = own
    STEPS.append(step)
    return step


def traces(step):
    """How often a step of `make_step` was traced."""
    return LOSSES[id(step)].traces


@pytest.fixture(scope="module")
def compiled(shared_plan):
    """A compiled step, and its bytes with the key of a run of `CONFIG`."""
    step = make_step(shared_plan)
    key = step_key(step, BATCH, CONFIG, None)
    return step, serialize_step(step, BATCH, key)


def numbers(start, steps):
    """Batches, each from its own number."""
    for n in range(start, steps):
        x = np.random.default_rng(n).normal(size=(8, 4)).astype(np.float32)
        yield {"x": x, "y": x[:, :2]}


def make_run(folder, step, **changes):
    return spmd.Run(
        folder, step, numbers, config=dataclasses.replace(CONFIG, **changes), batch=BATCH
    )


def load(step, folder, **changes):
    """What a run of a folder says about its compiled step, loaded or not."""
    config = dataclasses.replace(CONFIG, **changes)
    loading = load_compiled_step(step, BATCH, config, RunDir(folder), None)
    return finish_loading(loading, step, BATCH, config)


def losses(step, state, count):
    """The bytes of all metrics of some steps, and the last state."""
    found = list[bytes]()
    for batch in numbers(0, count):
        state, metrics = step(state, batch)
        found += [np.asarray(x).tobytes() for x in jax.tree.leaves(metrics)]
    return found, state


def test_fifty_steps_are_bitwise_those_of_the_compiled_step(shared_plan, compiled, tmp_path):
    """Nothing of the model is traced. The control has another learning rate."""
    write_bytes(tmp_path / "compiled_step", compiled[1])
    step = make_step(shared_plan)
    result = load(step, tmp_path)
    assert result.loaded
    assert not result.said
    found, state = losses(step, step.init_state(), 50)
    expected, state_of_compiled = losses(compiled[0], step.init_state(), 50)
    assert found == expected
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(state_of_compiled), strict=True):
        assert np.array_equal(x, y)
    assert traces(step) == 0
    other = make_step(shared_plan, factor=1.5)
    assert losses(other, step.init_state(), 2)[0] != expected[: len(expected) // 25]


def print_losses(folder):
    """What another process makes of the step in a folder: fifty steps, without a trace."""
    step = make_step(plan(data=2, fsdp=2, tensor=2))
    assert load(step, Path(folder)).loaded
    found, _ = losses(step, step.init_state(), 50)
    assert traces(step) == 0
    print(b"".join(found).hex())


def test_fifty_steps_are_bitwise_the_same_in_another_process(compiled, tmp_path):
    """Of which this one wrote the file."""
    write_bytes(tmp_path / "compiled_step", compiled[1])
    program = (
        "from tests import conftest\nfrom tests.numerics.test_compiled_step import print_losses\n"
    )
    program += f"print_losses({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, _ = losses(compiled[0], compiled[0].init_state(), 50)
    assert done.stdout.strip() == b"".join(found).hex()


def with_key(data, change):
    """The bytes of a step with a changed key."""
    stored = read_step(data)
    key = json.loads(json.dumps(stored.key))
    change(key)
    return SerializedStep(key, stored.programs).to_bytes()


def test_each_value_of_the_key_is_compared(shared_plan, compiled, tmp_path):
    """A changed one is named, and the step is not loaded; with the same key, it is."""
    step = make_step(shared_plan)
    key = step_key(step, BATCH, CONFIG, None)
    assert key["topology"].keys() == {
        *("mesh", "platform", "kind", "devices", "processes", "order")
    }
    assert {"jax", "jaxlib", "spmd", "runtime", "python"} <= key["versions"].keys()
    assert {"jax_enable_x64", "jax_default_matmul_precision"} <= key["flags"].keys()
    assert "avx" in key["processor"]["instructions"] or key["processor"]["machine"] != "x86_64"
    for part, values in key.items():
        name = next(iter(values))
        changed = with_key(compiled[1], lambda key: key[part].update({name: "another"}))  # noqa: B023
        write_bytes(tmp_path / "compiled_step", changed)
        result = load(step, tmp_path)
        assert result.loaded is None
        assert f"compiled_step is not used: {part}.{name} " in result.said
        for each in values:
            other = {**key, part: {**values, each: "another"}}
            (said,) = key_differences(other, key)
            assert said.startswith(f"{part}.{each} ")
    assert key_differences(key, key) == []
    assert not step.programs
    write_bytes(tmp_path / "compiled_step", compiled[1])
    assert load(step, tmp_path).loaded


def test_a_step_of_another_mesh_config_or_setting_is_not_loaded(shared_plan, compiled, tmp_path):
    """By what the process itself has. A file that the config names is an error then."""
    write_bytes(tmp_path / "compiled_step", compiled[1])
    other = make_step(plan(data=4, fsdp=2))
    said = "topology.mesh was data=2 fsdp=2 tensor=2 and is data=4 fsdp=2"
    assert said in load(other, tmp_path).said
    step = make_step(shared_plan)
    assert "config.steps was 4 and is 5" in load(step, tmp_path, steps=5).said
    assert not load(step, tmp_path, checkpoint_every=1, log_every=3).said
    step = make_step(shared_plan)
    with jax.default_matmul_precision("float32"):
        assert "flags.jax_default_matmul_precision was None" in load(step, tmp_path).said
    named = str(tmp_path / "compiled_step")
    (tmp_path / "folder" / "compiled_step").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"topology\.mesh was"):
        load(other, tmp_path / "run", compiled_step=named)
    with pytest.raises(ConfigError, match="it does not exist"):
        load(other, tmp_path / "run", compiled_step=str(tmp_path / "absent"))
    unreadable = load(step, tmp_path / "folder")  # a folder, not a file
    assert "it cannot be read" in unreadable.said
    assert load(step, tmp_path / "run", compiled_step=named).loaded


def test_a_changed_module_is_not_loaded(shared_plan, compiled, tmp_path, monkeypatch):
    """This file is one of the key's; the control is a module that only one of the processes has."""
    name = __name__
    assert name in read_step(compiled[1]).key["modules"]
    step = make_step(shared_plan)
    other = with_key(compiled[1], lambda key: key["modules"].update({"only_there": "0"}))
    write_bytes(tmp_path / "compiled_step", other)
    assert load(step, tmp_path).loaded
    step = make_step(shared_plan)
    changed = with_key(compiled[1], lambda key: key["modules"].update({name: "0"}))
    write_bytes(tmp_path / "compiled_step", changed)
    assert f"modules.{name} was 0" in load(step, tmp_path).said


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "a checksum differs"),
        (lambda data: data + b"x", "another length"),
        (lambda data: data[:200] + b"x" + data[201:], ""),
        (lambda data: data[:-50] + b"x" + data[-49:], "a checksum differs"),
        (lambda data: data[:60], "its first lines cannot be read"),
        (lambda data: b"", "no compiled step"),
        (lambda data: pickle.dumps(1), "no compiled step"),
    ],
)
def test_a_damaged_file_is_said_and_the_step_is_compiled(
    shared_plan, compiled, tmp_path, damage, said
):
    write_bytes(tmp_path / "run" / "compiled_step", damage(compiled[1]))
    step = make_step(shared_plan)
    run = make_run(tmp_path / "run", step, steps=1)
    result = load(step, tmp_path / "run")
    assert f"{run.run_dir.compiled_step} is not used: " in result.said
    assert said in result.said
    assert run.train().steps == 1
    assert traces(step) > 0
    assert "is not used" in run.run_dir.log.read_text()


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "executed")


def test_nothing_is_unpickled_if_the_config_says_none(shared_plan, compiled, tmp_path):
    """Nor if the key differs. The control is a run that loads the same file: it executes it."""
    trap = tmp_path / "executed"
    stored = read_step(compiled[1])
    pickled = zlib.compress(pickle.dumps(Malicious(trap)))
    program = SerializedProgram("", pickled, stored.programs[0].text)
    data = SerializedStep(stored.key, [program]).to_bytes()
    write_bytes(tmp_path / "compiled_step", data)
    step = make_step(shared_plan)
    assert load(step, tmp_path, compiled_step="none").loaded is None
    assert load(step, tmp_path, steps=5).said
    refused = make_run(tmp_path, step, compiled_step="none", steps=1)
    assert refused.train().steps == 1
    assert not trap.exists()
    assert refused.run_dir.compiled_step.read_bytes() == data
    assert "cannot be loaded" in load(make_step(shared_plan), tmp_path).said
    assert trap.exists()


def test_a_changed_closure_ends_the_run_before_its_first_save(shared_plan, tmp_path, monkeypatch):
    """With the lines that differ. The control has the closure of before: it saves."""
    monkeypatch.setattr(compiled_step, "MIN_SECONDS", 0.0)
    folder = tmp_path / "run"
    stopping = dataclasses.replace(make_run(folder, make_step(shared_plan)), hooks=[StopAt(2)])
    stopping.train()
    log = folder / "logs" / "process-0.log"
    assert "wrote the compiled step" in log.read_text()
    changed = make_run(folder, make_step(shared_plan, factor=1.25))
    with pytest.raises(CheckpointError) as raised:
        changed.train("always")
    assert "nothing is saved" in str(raised.value)
    assert "1.250000e+00" in str(raised.value)
    assert 'compiled_step="none"' in str(raised.value)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    step = make_step(shared_plan)
    assert make_run(folder, step).train("always").checkpoint == 4
    assert "the loaded step is as it is traced here" in log.read_text()


class StopAt(spmd.Hook):
    """Ends the run after a step."""

    def __init__(self, last: int) -> None:
        self.last = last

    def wants_stop(self, step: int) -> bool:
        return step == self.last


def test_a_context_of_the_main_thread_is_no_difference(shared_plan):
    """Its settings are not those of the thread that traces, whose text differs: it is traced again."""
    with jax.default_matmul_precision("float32"):
        step = make_step(shared_plan)
        data = serialize_step(step, BATCH, step_key(step, BATCH, CONFIG, None))
        again = make_step(shared_plan)
        check = LoweringCheck(again, BATCH, read_step(data))
        assert check.problems() == []
        assert traces(again) > 1
    check = LoweringCheck(make_step(shared_plan), BATCH, read_step(data))
    (problem,) = check.problems()
    assert "precision" in problem.detail


def test_programs_that_would_not_be_the_same_are_not_written(shared_plan, tmp_path):
    """Of pipelines on CPUs, with calls of Python, and read from a cache; the control was compiled."""
    with pytest.raises(NotSerializableError, match=r"jax\.debug\.callback"):
        serialize_step(make_step(shared_plan, says=True), BATCH, {})
    model = spmd.Model(MODEL.init, MODEL.apply)
    rules = spmd.Rules(params=[("w", P("fsdp", "tensor"))], activations=[])
    pipelined = spmd.make_plan(spmd.make_mesh(pipe=2, fsdp=4), rules, model, optax.adam(0.1))
    step = make_step(pipelined)
    with pytest.raises(NotSerializableError, match="can hang"):
        serialize_step(step, BATCH, {})
    key = step_key(step, BATCH, CONFIG, None)
    of_others = SerializedStep(key, [SerializedProgram("", b"", b"")])
    write_bytes(tmp_path / "compiled_step", of_others.to_bytes())
    assert "can hang" in load(step, tmp_path).said
    names = (
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    jax.config.update(names[0], 0.0)
    jax.config.update(names[1], -1)
    try:
        with compilation_cache(tmp_path):
            serialize_step(make_step(shared_plan), BATCH, {})
            with pytest.raises(NotSerializableError, match="read from the compilation cache"):
                serialize_step(make_step(shared_plan), BATCH, {})
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_step_of_several_networks_is_loaded(shared_plan):
    """All of its turns; a step of one network refuses the file."""

    def make():
        steps = {"one": make_step(shared_plan), "two": make_step(shared_plan, factor=0.5)}
        turns = [("one", lambda states, batch: batch), ("two", lambda states, batch: batch)]
        return spmd.AlternatingStep(steps, turns)

    step = make()
    serialized = read_step(serialize_step(step, BATCH, {}))
    other = make()
    install_programs(other, BATCH, serialized.load(other, BATCH))
    batch = next(numbers(0, 1))
    _, expected = step(step.init_state(), batch)
    _, found = other(other.init_state(), batch)
    assert {name: float(x) for name, x in found.items()} == {
        name: float(x) for name, x in expected.items()
    }
    assert all(traces(part) == 0 for part in other.parts.values())
    with pytest.raises(UnreadableError, match="other networks"):
        serialized.load(make_step(shared_plan), BATCH)


TINY = """
import dataclasses
import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=dataclasses.replace(PRESETS["test"], vocab=256, layers=1),
    rules=LLAMA,
    mesh=spmd.MeshShape(data=2, fsdp=-1),
    data=spmd.DataConfig(source=("stdlib",), sequence=16, batch=8),
)
"""


def test_a_step_is_compiled_ahead_for_the_machine_of_a_run(tmp_path, monkeypatch, capsys):
    """A run's setup loads it, and is not traced. The control is another machine, and a GPU's is refused."""
    config_file = tmp_path / "tiny.py"
    config_file.write_text(TINY)
    out = tmp_path / "run"
    assert run_compile([str(config_file), "--topology", "cpu:8", "--out", str(out)]) == 0
    assert f"written to {out}/compiled_step" in capsys.readouterr().out
    config = dataclasses.replace(load_config(str(config_file)), out=str(out))
    monkeypatch.setattr(TrainStep, "lower", lambda step, batch: pytest.fail("it is lowered"))
    for devices, fits in ((8, True), (4, False)):
        mesh = mesh_of(config.mesh, jax.devices()[:devices])
        setup = make_setup(config, mesh)
        result = load_compiled_step(setup.step, setup.batch, config, RunDir(out), config_file)
        result = finish_loading(result, setup.step, setup.batch, config)
        assert bool(result.loaded) == bool(setup.step.programs) == fits
    assert "topology.mesh was data=2 fsdp=4 and is data=2 fsdp=2" in result.said
    with pytest.raises(ConfigError, match="tuned by XLA on the GPU"):
        run_compile([str(config_file), "--topology", "h100:1x8", "--out", str(out)])
    with pytest.raises(ConfigError, match="is missing"):
        run_compile([str(config_file), "--out", str(out)])
