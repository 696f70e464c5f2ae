"""Real `spmd train` processes that are killed with SIGKILL: only those without a newer checkpoint are counted."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spmd.job_files.job import RESTARTED
from spmd.resilience.attempts import read_attempts
from spmd.run.run_dir import RunDir
from tests.forked import Run, command_server
from tests.train_runs import write_tiny

FLAGS = ("--resume", "auto", "--max-restarts", 3, "--mesh.data", 1, "--devices", 1)
STEPS = ("--steps", 100_000, "--checkpoint-every", 1)


class Killed:
    """Attempts of one run, each killed as soon as something is true."""

    def __init__(self, start: Callable[..., Run], config: Path, out: Path) -> None:
        self._start = start
        self._arguments = ("train", config, "--out", out, *FLAGS, *STEPS)
        self.out = out
        self.log = out.parent / f"{out.name}.log"

    def start(self) -> Run:
        return self._start(self.log, self._arguments)

    def kill_when(self, condition: Callable[[], bool]) -> None:
        run = self.start()
        deadline = time.monotonic() + 60
        while not condition():
            assert not run.ended(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL

    def attempts(self) -> int:
        return len(read_attempts(self.out))

    def checkpoint(self) -> int:
        return RunDir(self.out).newest_checkpoint() or 0


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Killed]]:
    folder = tmp_path_factory.mktemp("restarts")
    config = write_tiny(folder)
    with command_server(config, folder / "compiled") as start:
        yield lambda name: Killed(start, config, folder / name)


def test_three_kills_before_a_checkpoint_end_the_run(make_run: Callable[[str], Killed]) -> None:
    """With an exit code after which no job file starts it again, and one sentence."""
    run = make_run("stuck")
    for number in range(1, 4):
        run.kill_when(lambda: run.attempts() == number)  # noqa: B023
    code = run.start().wait()
    said = run.log.read_text()
    assert code == 2, said
    assert code not in RESTARTED
    assert "3 attempts in a row ended without a checkpoint" in said
    assert "attempt 3: ended without a word: killed" in said
    assert "Traceback" not in said


@pytest.mark.soak
def test_kills_after_newer_checkpoints_do_not(make_run: Callable[[str], Killed]) -> None:
    """The control: four kills, each after a further checkpoint, and the next attempt gets further."""
    run = make_run("further")
    for number in range(1, 6):
        reached = run.checkpoint()
        run.kill_when(lambda: run.checkpoint() > reached)  # noqa: B023
        assert run.attempts() == number
    assert "attempts in a row" not in run.log.read_text()
