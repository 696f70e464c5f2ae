"""Attempts without progress are counted, and the process that was gone first is named."""

import json
import os
import signal
import time
from pathlib import Path

import jax
import pytest

from spmd.distributed import liveness
from spmd.errors import BusyDeviceError, DataError, Problem, RestartsError
from spmd.resilience.attempts import CurrentAttempt, read_attempts
from tests.forked import fork


def attempt(folder: Path, checkpoint: int | None, error: BaseException | None = None) -> str:
    """Make an attempt that ends, or raises; the sentence about the one before."""
    before = ""
    try:
        with CurrentAttempt(folder, checkpoint, 3, is_first=True) as current:
            before = current.share()
            if error is not None:
                raise error
    except (jax.errors.JaxRuntimeError, DataError):
        pass
    return before


def killed(folder: Path, checkpoint: int | None) -> None:
    """Make an attempt in a process that is killed with SIGKILL."""

    def run() -> None:
        with CurrentAttempt(folder, checkpoint, 3, is_first=True):
            os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(fork(run, folder / "log"), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def write(folder: Path, process: int, **values: object) -> None:
    """Append a line as another process would."""
    file = folder / "attempts" / f"process-{process}.jsonl"
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps({"time": time.time(), **values}) + "\n")


def test_three_kills_without_progress_end_the_run(tmp_path: Path) -> None:
    """With the reason of each; a user who starts it again has three more. The limit is never reached before."""
    for _ in range(3):
        killed(tmp_path, None)
    with pytest.raises(RestartsError) as caught:
        attempt(tmp_path, None)
    text = str(caught.value)
    assert "3 attempts in a row ended without a checkpoint" in text
    assert "attempt 3: ended without a word: killed" in text
    for _ in range(3):
        killed(tmp_path, None)
    with pytest.raises(RestartsError, match="attempt 7"):
        attempt(tmp_path, None)


def test_a_hundred_attempts_with_progress_do_not(tmp_path: Path) -> None:
    """The control: each begins with a newer checkpoint, and ends by preemption or a lost process."""
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset by peer")
    for checkpoint in range(100):
        attempt(tmp_path, checkpoint, [None, lost][checkpoint % 2])
    assert len(read_attempts(tmp_path)) == 100


def test_progress_and_errors_of_the_user_begin_a_new_count(tmp_path: Path) -> None:
    killed(tmp_path, 5)
    killed(tmp_path, 5)
    attempt(tmp_path, 5, DataError("no text", [Problem("a", "b")]))
    killed(tmp_path, 5)
    killed(tmp_path, 5)
    killed(tmp_path, 7)
    killed(tmp_path, 7)
    assert attempt(tmp_path, 7).startswith("attempt 8; the one before: ended without a word")


def test_a_damaged_checkpoint_is_no_progress(tmp_path: Path) -> None:
    """The newest one was removed: the run begins at an older step. The control gets further each time."""
    (tmp_path / "back").mkdir()
    (tmp_path / "on").mkdir()
    for checkpoint in (20, 10, None):
        killed(tmp_path / "back", checkpoint)
        killed(tmp_path / "on", 20 - (checkpoint or 0))
    with pytest.raises(RestartsError, match="3 attempts in a row ended without a checkpoint"):
        attempt(tmp_path / "back", None)
    assert attempt(tmp_path / "on", 30).startswith("attempt 4;")


def test_a_held_device_counts_as_it_starts_again(tmp_path: Path) -> None:
    for _ in range(3):
        with (
            pytest.raises(BusyDeviceError),
            CurrentAttempt(tmp_path, 1, 3, is_first=True),
        ):
            raise BusyDeviceError("busy", [Problem("TPU", "is held")])
    with pytest.raises(RestartsError, match="without a newer checkpoint than step 1"):
        attempt(tmp_path, 1)


def test_the_process_that_was_gone_first_is_named(tmp_path: Path) -> None:
    """As the others saw it; else the one without an end, where the others have one."""
    for process in range(3):
        write(tmp_path, process, attempt=1, host=f"node{process}", checkpoint=None)
    write(tmp_path, 0, attempt=1, end="JaxRuntimeError: connection reset by peer")
    write(tmp_path, 2, attempt=1, end="JaxRuntimeError: connection reset by peer")
    [first] = read_attempts(tmp_path)
    assert str(first) == "process 1 on node1 was gone first"
    write(tmp_path, 0, attempt=1, gone="process 2 on node2")
    [first] = read_attempts(tmp_path)
    assert str(first) == "process 2 on node2 was gone first"
    assert attempt(tmp_path, None) == "attempt 2; the one before: process 2 on node2 was gone first"


def test_an_error_of_one_process_counts_and_is_named(tmp_path: Path) -> None:
    """Slurm starts the run again where one process fails for good and the others end with 69."""
    for number in range(1, 4):
        for process in range(2):
            write(tmp_path, process, attempt=number, host=f"node{process}", checkpoint=None)
        write(tmp_path, 0, attempt=number, end="JaxRuntimeError: reset", gone="process 1 on node1")
        write(tmp_path, 1, attempt=number, end="final: KeyError: 'tokens'")
    with pytest.raises(
        RestartsError, match="attempt 3: process 1 on node1 failed: KeyError: 'tokens'"
    ):
        attempt(tmp_path, None)


def test_a_line_that_a_kill_cut_off_is_skipped(tmp_path: Path) -> None:
    attempt(tmp_path, None)
    file = tmp_path / "attempts/process-0.jsonl"
    file.write_text(file.read_text() + '{"attempt": 2, "ti')
    assert len(read_attempts(tmp_path)) == 1
    attempt(tmp_path, None)


def test_a_finished_run_may_be_started_again(tmp_path: Path) -> None:
    """Chains of jobs do so; the control, ends by preemption without a newer checkpoint, are counted."""
    for _ in range(5):
        with CurrentAttempt(tmp_path, 9, 3, is_first=True) as current:
            current.finish()
    assert len(read_attempts(tmp_path)) == 5
    for _ in range(3):
        attempt(tmp_path, 9)
    with pytest.raises(RestartsError, match="3 attempts in a row"):
        attempt(tmp_path, 9)


def test_lost_lines_do_not_stop_the_count(tmp_path: Path) -> None:
    """Numbers go on from the last one, and damage is skipped."""
    for number in (1, 3, 4):
        write(tmp_path, 0, attempt=number, host="node0", checkpoint=None)
    file = tmp_path / "attempts/process-0.jsonl"
    file.write_bytes(file.read_bytes() + b'\xff[[]\n"text"\n{"attempt": "x"}\n{"cut')
    with pytest.raises(RestartsError, match="3 attempts in a row"):
        attempt(tmp_path, None)
    assert [each.number for each in read_attempts(tmp_path)] == [1, 3, 4, 5]


def test_nothing_is_recorded_without_a_limit(tmp_path: Path) -> None:
    with CurrentAttempt(tmp_path, None, 0, is_first=True) as current:
        assert current.share() == ""
    assert not (tmp_path / "attempts").exists()


def test_the_newest_checkpoint_is_that_of_process_0(tmp_path: Path) -> None:
    """Another process may list a folder of NFS late: what it writes is no progress."""
    for number in range(1, 4):
        write(tmp_path, 0, attempt=number, host="node0", checkpoint=5)
        write(tmp_path, 1, attempt=number, host="node1", checkpoint=4 - number)
    assert [each.checkpoint for each in read_attempts(tmp_path)] == [5, 5, 5]
    with pytest.raises(RestartsError, match="3 attempts in a row"):
        attempt(tmp_path, 5)


def test_a_later_run_of_a_process_writes_into_its_own_folder(tmp_path: Path) -> None:
    """The name of a lost process goes to the attempt that is under way; the control is the first attempt."""
    first, second = tmp_path / "first", tmp_path / "second"
    attempt(first, None)
    with CurrentAttempt(second, None, 3, is_first=True):
        for listener in liveness._AT_LOSS:
            listener("process 1 on node1")
    assert [each.gone for each in read_attempts(first)] == [""]
    assert [each.gone for each in read_attempts(second)] == ["process 1 on node1"]
