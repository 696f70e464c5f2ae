"""Real `spmd train` processes under their supervisor: killed, they go on from memory, bitwise."""

import os
import re
import signal
import time

import pytest

from spmd.run.run_dir import RunDir
from tests.forked import server
from tests.tiers import soak_but
from tests.train_runs import children, losses, metrics, write_tiny

FLAGS = ("--mesh.data", 1, "--devices", 1, "--evaluate.tokens", 64, "--sample.prompt", "")
STEPS = ("--steps", 40, "--checkpoint-every", 1000)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("supervised"), PACED)


PACED = """
import time
from spmd.data.loader import Windows

unpaced = Windows.rows


def paced(self, indices):
    time.sleep(0.03)
    return unpaced(self, indices)


Windows.rows = paced
"""


@pytest.fixture(scope="module")
def start(config):
    """Starts `spmd` with arguments, as the command's own process does."""
    program = (
        f"from tests import forked; forked.serve_processes({str(config.parent)!r}, {str(config)!r})"
    )
    with server(program) as start_process:
        yield lambda out, *more: start_process(
            out.with_suffix(".log"), ("train", config, "--out", out, *FLAGS, *STEPS, *more)
        )


@pytest.fixture(scope="module")
def whole(start, config):
    """A run that nothing disturbs."""
    out = config.parent / "whole"
    assert start(out).wait() == 0, out.with_suffix(".log").read_text()
    return out


def await_step(out, step, run):
    deadline = time.monotonic() + 60
    while not any(line["step"] >= step for line in metrics(out)):
        assert not run.ended(), out.with_suffix(".log").read_text()
        assert time.monotonic() < deadline, out.with_suffix(".log").read_text()
        time.sleep(0.005)


def await_checkpoint(out, run):
    """Wait until a checkpoint is committed; return its step. A save may end steps after its own."""
    await_step(out, 5, run)
    deadline = time.monotonic() + 60
    while (step := RunDir(out).newest_checkpoint()) is None:
        assert not run.ended(), out.with_suffix(".log").read_text()
        assert time.monotonic() < deadline, out.with_suffix(".log").read_text()
        time.sleep(0.005)
    return step


def kill_after(out, step, run):
    """Kill the training process after a step; return the last step that it had logged."""
    await_step(out, step, run)
    worker, *_ = children(run.pid)
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.02)
    return max(losses(out))


@pytest.mark.parametrize("every", soak_but([1, 3], 3))
def test_a_killed_process_goes_on_from_memory(every, start, whole, config):
    """Without a checkpoint; as many steps are computed twice as are between copies, at most."""
    out = config.parent / f"killed-{every}"
    run = start(out, "--recovery.memory-every", every)
    reached = kill_after(out, 12, run)
    assert run.wait() == 0, out.with_suffix(".log").read_text()
    text = out.with_suffix(".log").read_text()
    (resumed,) = map(int, re.findall(r"resuming from step (\d+) in memory", text))
    assert 0 <= reached - resumed <= every
    assert losses(out) == losses(whole)
    assert "recovered in" in (out / "logs" / "process-0.log").read_text()


@pytest.mark.soak
def test_control_without_copies_it_starts_again(start, whole, config):
    """The same kill, and no checkpoint: from step 0, to the same end."""
    out = config.parent / "without"
    run = start(out, "--recovery.memory-every", -1)
    kill_after(out, 12, run)
    assert run.wait() == 0, out.with_suffix(".log").read_text()
    assert "starting from step 0" in out.with_suffix(".log").read_text()
    assert losses(out) == losses(whole)


def test_a_killed_supervisor_leaves_a_folder_that_can_be_resumed(start, config):
    """Its training process ends with it, so that the lease is free at once; SIGTERM is passed on."""
    out = config.parent / "supervisor"
    run = start(out, "--checkpoint-every", 5)
    committed = await_checkpoint(out, run)
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run = start(out, "--checkpoint-every", 5, "--resume", "auto")
    await_step(out, committed + 7, run)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, out.with_suffix(".log").read_text()
    text = out.with_suffix(".log").read_text()
    (resumed,) = map(int, re.findall(r"resuming from step (\d+)$", text, re.MULTILINE))
    assert resumed >= committed
    (stopped,) = map(int, re.findall(r"checkpoint saved at step (\d+)", text))
    assert RunDir(out).newest_checkpoint() == stopped
