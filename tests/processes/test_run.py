"""A run that is killed goes on bitwise, on another mesh it has the same parameters, and two processes equal one."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.run.build import config_mesh, make_setup
from spmd.run.config import with_values
from spmd.run.load_config import load_config
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import mesh_of
from spmd.storage.address import locate
from spmd.training.state import abstract_state
from tests.command_line import TEXT, write_config
from tests.rounding import EPS, FACTOR
from tests.train_runs import (
    PACED,
    ROOT,
    SLOWLY,
    files,
    finish_together,
    free_port,
    losses,
    metrics,
    saved,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus and a config that all runs of this file share."""
    folder = tmp_path_factory.mktemp("run")
    with write_config(folder, TEXT * 4).open("a") as config:
        config.write(PACED)
    return folder


def command(folder, *arguments):
    return [
        sys.executable,
        "-m",
        "spmd.cli",
        "train",
        str(folder / "tiny.py"),
        *map(str, arguments),
    ]


def train(folder, *arguments):
    """Runs to the end in a process of its own."""
    done = subprocess.run(
        command(folder, *arguments), capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def params(folder, out, step, **mesh):
    """The parameters of a checkpoint, restored onto a mesh of this process's devices."""
    config = with_values(
        load_config(str(folder / "tiny.py")), {"mesh": {"data": 1, "fsdp": 1, "tensor": 1, **mesh}}
    )
    size = int(np.prod(list(mesh.values()) or [1]))
    setup = make_setup(config, mesh_of(config.mesh, jax.devices()[:size]))
    with CheckpointManager(RunDir(locate(out)).checkpoints) as checkpoints:
        state, _ = checkpoints.restore(step, abstract_state(setup.plan))
    return jax.tree.map(np.asarray, state)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def whole(folder):
    """A run of 30 steps that nothing interrupts."""
    out = folder / "whole"
    train(
        folder,
        "--out",
        out,
        "--steps",
        30,
        "--devices",
        8,
        "--checkpoint-every",
        5,
        "--max-to-keep",
        10,
    )
    return out


@pytest.mark.soak
def test_killed_mid_step_and_resumed_the_curve_joins_bitwise(folder, whole, place):
    """SIGKILL at an arbitrary moment, then --resume: every loss and the final state are bitwise those of the whole."""
    out = place(folder / "killed")
    arguments = (
        "--out",
        out,
        "--steps",
        30,
        "--devices",
        8,
        "--checkpoint-every",
        5,
        "--max-to-keep",
        10,
    )
    process = subprocess.Popen(
        command(folder, *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, **SLOWLY},
    )
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and len(losses(out)) < 13:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    reached = len(losses(out))
    assert 13 <= reached < 30, f"the run was at step {reached} when it was killed"

    train(folder, *arguments, "--resume", "always")
    assert losses(out) == losses(whole)
    assert list(losses(out)) == list(range(1, 31))
    assert_same(params(folder, out, 30, fsdp=8), params(folder, whole, 30, fsdp=8))


@pytest.mark.soak
def test_a_checkpoint_is_the_same_on_any_mesh(folder, whole):
    """Saved on 2×2×2, restored on fsdp=8, tensor=2, and one device: the same parameters and moments."""
    reference = params(folder, whole, 30, data=2, fsdp=2, tensor=2)
    for mesh in ({"fsdp": 8}, {"tensor": 2}, {}):
        assert_same(params(folder, whole, 30, **mesh), reference)
    assert np.abs(reference.params["lm_head"]["kernel"]).max() > 0


@pytest.mark.soak
def test_the_record_beside_a_checkpoint_says_what_it_is_of(folder, whole):
    """Config, plan, mesh, versions, data position and seed lie beside the arrays."""
    with CheckpointManager(whole / "checkpoints") as checkpoints:
        record = checkpoints.record(30)
    assert record["position"] == 30 * 8
    assert record["mesh"]["tensor"] == 2
    assert "lm_head/kernel" in record["plan"]
    assert {"jax", "flax", "optax", "spmd"} <= record["versions"].keys()
    assert record["config"]["steps"] == 30


@pytest.mark.soak
def test_two_processes_train_the_same_as_one(folder, whole, place):
    """Two processes of four devices (gloo) and one of eight: the same losses, the same final parameters."""
    port, out = free_port(), place(folder / "two")
    arguments = (
        "--out",
        out,
        "--steps",
        30,
        "--devices",
        4,
        "--checkpoint-every",
        5,
        "--max-to-keep",
        10,
    )
    arguments += ("--coordinator", f"127.0.0.1:{port}", "--processes", 2)
    outputs = finish_together(*(command(folder, *arguments, "--process-id", i) for i in range(2)))
    assert "step 30/30" in outputs[0]
    assert "[Gloo]" not in outputs[0]
    assert outputs[1] == "", "process 0 alone prints"
    for i in range(2):
        assert "[Gloo]" in (files(out) / "logs" / f"process-{i}.log").read_text()
    ours, theirs = losses(out), losses(whole)
    assert ours.keys() == theirs.keys()
    # 30 steps
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=30 * FACTOR * EPS)
    a, b = (params(folder, o, 30, fsdp=8).params for o in (out, whole))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)


@pytest.mark.soak
def test_nan_stops_the_run_and_skip_too_in_the_end(folder, place):
    """A learning rate far too high: stop names step, position and newest checkpoint; skip counts up to its limit."""
    out, skipping = place(folder / "nan"), place(folder / "skip")
    high = (
        "--optimizer.learning-rate",
        "1e30",
        "--optimizer.clip-norm",
        "0",
        "--steps",
        8,
        "--devices",
        8,
    )
    done = subprocess.run(
        command(folder, "--out", out, *high, "--checkpoint-every", 1),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "is not finite" in done.stderr
    assert "Traceback" not in done.stderr
    assert "the newest checkpoint is of step" in done.stderr
    skip = command(folder, "--out", skipping, *high, "--on-nan", "skip")
    done = subprocess.run(skip, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 2
    assert "7 skipped / 8 steps = 0.875 > 0.25" in done.stderr
    assert [line["skipped_steps"] for line in metrics(skipping)] == list(range(7))
    assert not saved(skipping)


def test_a_config_from_the_run_folder_is_the_resolved_one(whole):
    """`config.py` and `config.json` together give the run's own config back."""
    config = RunDir(whole).config()
    assert (config.steps, config.devices, config.max_to_keep) == (30, 8, 10)
    assert config_mesh(config).size == 8
    assert (whole / "tensorboard").is_dir()
