"""Two processes of one run, and what may happen to one of them: the other never hangs, and no step is lost."""

import contextlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.distributed.initialize import EXIT_LOST
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.resilience.watchdog import EXIT_HUNG
from spmd.run.run_dir import RunDir
from spmd.storage.address import locate
from tests.networks import ADDRESSES, two_networks
from tests.train_runs import (
    PACED,
    ROOT,
    Run,
    assert_same,
    files,
    losses,
    metrics,
    saved,
    state,
    train,
    write_tiny,
)

TWO = {"processes": 2, "devices": 2}
ALONE = ("--recovery.no-supervisor",)
"""How processes end is tested here; what a supervisor does then, in `test_supervisor.py`."""
SOON = (*ALONE, "--heartbeat", 10)
"""Flags with which a process notices within ten seconds that the other is gone."""

FAULT = """
import os
import signal
import sys
import time
from pathlib import Path

from spmd.checkpoint.manager import CheckpointManager
from spmd.data.loader import Windows
from spmd.observe.metrics import JsonLines

read, write, save = Windows.rows, JsonLines.write, CheckpointManager._write
fault, slow, broken, dying = (Path(__file__).with_name(name) for name in ("fault", "slow", "broken", "dying"))


def is_here(file):
    return file.exists() and file.read_text() in " ".join(sys.argv)


def rows(self, indices):
    while is_here(fault):
        time.sleep(0.1)
    time.sleep(1.0 * is_here(slow))
    return read(self, indices)


def writes(self, step, values):
    if is_here(broken):
        raise RuntimeError("metrics cannot be written")
    write(self, step, values)


def saves(self, started):
    if started.step == 10 and is_here(dying):
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, started)


Windows.rows, JsonLines.write, CheckpointManager._write = rows, writes, saves
"""
"""Lines of a config with faults: a file says on the process with which flags data hang or are slow, metrics fail, or
the process dies as it begins to write a checkpoint."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The corpus and the config."""
    folder = tmp_path_factory.mktemp("two")
    write_tiny(folder, FAULT + PACED)
    return folder


@pytest.fixture(scope="module")
def folder(written):
    """The corpus, the config, and a run of two processes that nothing interrupts."""
    train(written / "tiny.py", written / "whole", **TWO)
    return written


@contextlib.contextmanager
def fault(file, process):
    """A fault of `FAULT`, in one of the processes, as long as the block lasts."""
    file.write_text(f"--process-id {process}")
    try:
        yield
    finally:
        file.unlink()


@pytest.fixture(scope="module")
def exported(folder):
    """The parameters of that run as a Hugging Face folder."""
    out = folder / "hf"
    command = [sys.executable, "-m", "spmd.cli", "export", str(folder / "whole"), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return out


def assert_joins(folder, out, **where):
    """The run in `out`, resumed, is bitwise the one that nothing interrupted."""
    train(folder / "tiny.py", out, "--resume", "auto", **TWO, **where)
    assert losses(out) == losses(folder / "whole")
    assert_same(*(state(folder / "tiny.py", run, 30, fsdp=4) for run in (out, folder / "whole")))


def assert_goes_on_from(out, *steps):
    """The newest checkpoint that a run would go on from is whole, and of one of these steps."""
    with CheckpointManager(RunDir(locate(out)).checkpoints, read_only=True) as checkpoints:
        assert (checkpoints.latest_valid() in steps, checkpoints.damaged) == (True, {})


@pytest.mark.soak
def test_processes_that_differ_stop_before_the_first_step(written, place):
    """A learning rate that differs on process 1: both exit with 2 and name it, and no step is taken."""
    out = place(written / "differ")
    with Run(
        written / "tiny.py", out, **TWO, own=[(), ("--optimizer.learning-rate", "0.5")]
    ) as run:
        assert run.codes(240) == [2, 2]
        for i in range(2):
            assert "process 1: config.optimizer.learning_rate is 0.5" in run.text(i)
            assert "process 0: 0.01" in run.text(i)
    assert not metrics(out)


@pytest.mark.soak
def test_both_start_from_a_hugging_face_folder(folder, exported, place):
    """Each process reads its own shards, and both train as one process that read all."""
    flags = ("--init", exported, "--steps", 3, "--optimizer.warmup-steps", 1)
    started = place(folder / "started")
    alone = place(folder / "alone")
    train(folder / "tiny.py", started, *flags, **TWO)
    train(folder / "tiny.py", alone, *flags, processes=1, devices=4)
    ours, theirs, drawn = (list(losses(out).values()) for out in (started, alone, folder / "whole"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[0] < drawn[0] - 0.1


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_one_that_is_told_to_go_takes_the_other_along(number, folder, place):
    """A signal to process 1: both stop after the same step, save and exit with 75; resumed, it is bitwise the whole."""
    out = place(folder / f"preempted-{number}")
    with Run(folder / "tiny.py", out, **TWO) as run:
        run.wait_for_step(7)
        run.processes[1].send_signal(number)
        assert run.codes(120) == [EXIT_PREEMPTED, EXIT_PREEMPTED]
    reached = max(losses(out))
    assert 7 <= reached < 30
    assert reached in saved(out), "it saved the step that it stopped with"
    assert_joins(folder, out)


@pytest.mark.soak
def test_data_that_hang_on_one_end_both(folder, place):
    """Process 1 gets no more batches: both end within a minute, at least one with 70 and every thread's stack."""
    out = place(folder / "hung")
    with Run(folder / "tiny.py", out, *ALONE, "--recovery.deadline", 8, **TWO) as run:
        run.wait_for_step(7)
        with fault(folder / "fault", 1):
            began = time.monotonic()
            codes = run.codes(90)
        assert time.monotonic() - began < 60
        assert all(codes), codes
        hung = codes.index(EXIT_HUNG)
        assert "no progress for 8 s" in run.text(hung)
    log = (files(out) / "logs" / f"process-{hung}.log").read_text()
    assert "Last finished: " in log
    assert "Thread 0x" in log
    assert_goes_on_from(out, *range(5, 30, 5))


@pytest.mark.soak
@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_dies_takes_the_other_down(folder, dead, place):
    """SIGKILL: the other ends within a minute, not with 0, and says that a process is gone."""
    out = place(folder / f"dead{dead}")
    with Run(folder / "tiny.py", out, *SOON, **TWO) as run:
        run.wait_for_step(7)
        run.processes[dead].kill()
        began = time.monotonic()
        codes = run.codes(90)
        assert time.monotonic() - began < 60
        assert codes[dead] == -signal.SIGKILL
        # By an error in a collective, or by the heartbeat.
        assert codes[1 - dead] in (EXIT_LOST, -signal.SIGABRT), run.text(1 - dead)[-3000:]
        said = "another process is gone" if codes[1 - dead] == EXIT_LOST else "another task died"
        assert said in run.text(1 - dead), run.text(1 - dead)[-3000:]
    if dead:
        assert_joins(folder, out)
    else:
        assert_goes_on_from(out, *range(5, 30, 5))


@pytest.mark.soak
def test_one_that_dies_while_both_write_a_checkpoint_costs_that_one(folder, place):
    """SIGKILL in the thread that writes: the other does not wait for it, and the checkpoint before is gone on from."""
    out = place(folder / "unwritten")
    with fault(folder / "dying", 1), Run(folder / "tiny.py", out, *SOON, **TWO) as run:
        codes = run.codes()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] in (EXIT_LOST, -signal.SIGABRT)
    assert 10 not in saved(out)
    assert_goes_on_from(out, 5)


@pytest.mark.soak
def test_one_that_fails_leaves_at_once(written, place):
    """An error that process 0 alone has, while a save may be under way: it is told, and the other ends as well."""
    out = place(written / "broken-run")
    with Run(written / "tiny.py", out, *SOON, **TWO) as run:
        run.wait_for_step(7)
        with fault(written / "broken", 0):
            began = time.monotonic()
            codes = run.codes(90)
        assert time.monotonic() - began < 60
    assert codes[0] == 1
    assert "RuntimeError: metrics cannot be written" in run.text(0)
    assert codes[1] in (EXIT_LOST, -signal.SIGABRT)
    assert_goes_on_from(out, *range(5, 30, 5))


@pytest.mark.soak
def test_a_trace_on_one_of_them_disturbs_nobody(folder, place):
    """SIGUSR2 to process 1, which alone traces; the run is bitwise the whole."""
    out = place(folder / "traced")
    with Run(folder / "tiny.py", out, **TWO) as run:
        run.wait_for_step(3)
        run.processes[1].send_signal(signal.SIGUSR2)
        assert run.codes(120) == [0, 0]
    assert len(list(files(out).rglob("*.xplane.pb"))) == 1
    assert "traced, into" in (files(out) / "logs" / "process-1.log").read_text()
    assert losses(out) == losses(folder / "whole")


@pytest.mark.soak
def test_a_cut_link_ends_both(folder):
    """Two machines as far as the network knows, and its cable is cut: both end within the deadline, not with 0."""
    out, deadline = folder / "cut", 10
    with two_networks(folder) as networks:
        where = {"host": ADDRESSES[0], "prefixes": networks.prefixes}
        limits = *ALONE, "--recovery.deadline", deadline, "--heartbeat", deadline
        with Run(folder / "tiny.py", out, *limits, **TWO, **where) as run:
            run.wait_for_step(7)
            networks.cut()
            began = time.monotonic()
            codes = run.codes(90)
            assert time.monotonic() - began < deadline + 5, (
                "so much for the last step, and to write the stacks"
            )
            assert all(codes), codes
            assert max(losses(out)) < 30
        networks.mend()
        assert_joins(folder, out, **where)


@pytest.mark.soak
def test_the_one_that_waits_for_data_is_named(folder, place):
    """Process 1 reads slowly: once what was read ahead is used up, every line names it, with how long it waited."""
    out = place(folder / "slowed")
    with fault(folder / "slow", 1):
        train(folder / "tiny.py", out, "--steps", 24, "--log-every", 4, **TWO)
    lines = [line for line in metrics(out) if "process_step_s_most" in line and line["step"] > 12]
    assert len(lines) == 3
    assert {line["process_of_data_s_most"] for line in lines} == {1}
    assert all(line["process_data_s_most"] > 0.05 for line in lines)
    assert all(line["process_step_s_least"] <= line["process_step_s_most"] for line in lines)
    control = [line for line in metrics(folder / "whole") if "process_data_s_most" in line]
    assert min(line["process_data_s_most"] for line in control) < 0.05


@pytest.mark.soak
def test_unequal_numbers_of_devices_are_named(written, place):
    """Before the first exchange, which JAX cannot make between them."""
    config, out = written / "tiny.py", place(written / "unequal")
    with Run(config, out, processes=2, devices=2, own=([], ["--devices", 4])) as run:
        assert run.codes(120) == [2, 2]
        for process in (0, 1):
            assert "process 1: devices is 4" in run.text(process)
            assert "Traceback" not in run.text(process)
