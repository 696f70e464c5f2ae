"""Two processes whose clocks differ save after the same steps, those that are due by the clock of process 0."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train_runs import PACED, Run, assert_same, losses, saved, state, train, write_tiny

TWO = {"processes": 2, "devices": 2}
CLOCK = """
import itertools
import sys

from spmd.run import session
from spmd.run.hooks import CommonClock

is_second = "--process-id 1" in " ".join(sys.argv)
seconds_per_step = 5.0 if is_second else 20.0


def own_clock(every, requests):
    now = itertools.count(0.0, seconds_per_step).__next__
    return CommonClock(every, now=now, requests=requests)


session.CommonClock = own_clock
"""
"""Lines of a config in whose run a step takes 20 s by the clock of process 0, and 5 s by that of process 1."""


@pytest.mark.soak
def test_processes_save_together_by_the_first_clock(
    tmp_path: Path, place: Callable[[Path], Path | str]
) -> None:
    """By the clock of process 1 none would be due before the last. Numbers are those of the control, without saves by
    time, and a resumed run may change the options: then milestones stay."""
    config = write_tiny(tmp_path, CLOCK)
    flags = ("--steps", 12, "--checkpoint-every", 0, "--keep-best", 0)
    by_time, control = place(tmp_path / "by-time"), place(tmp_path / "control")
    train(config, by_time, *flags, "--checkpoint-minutes", 1, **TWO)
    train(config, control, *flags, "--checkpoint-minutes", 0, **TWO)
    # 20 s after step 1, heard of at step 2: 60 s at step 4.
    assert saved(by_time) == [4, 7, 10, 12]
    assert saved(control) == [12]
    assert losses(by_time) == losses(control)
    assert_same(*(state(config, out, 12, fsdp=4) for out in (by_time, control)))
    changed = ("--steps", 16, "--checkpoint-minutes", 0, "--keep-every", 5, "--max-to-keep", 1)
    train(config, by_time, *flags, *changed, "--resume", "auto", **TWO)
    assert saved(by_time) == [10, 15, 16]


@pytest.mark.soak
def test_processes_save_together_when_asked(
    tmp_path: Path, place: Callable[[Path], Path | str]
) -> None:
    """`spmd save` returns once a checkpoint of both processes is there, the only one; the run goes on."""
    config = write_tiny(tmp_path, PACED)
    out = place(tmp_path / "asked")
    flags = ("--steps", 4000, "--checkpoint-every", 0, "--log-every", 1)
    command = [sys.executable, "-m", "spmd.cli"]
    with Run(config, out, *flags, **TWO) as run:
        run.wait_for_step(4)
        asked = subprocess.run([*command, "save", out], capture_output=True, text=True, check=True)
        (step,) = saved(out)
        assert asked.stdout == f"{out} saved step {step:,}\n"
        run.wait_for_step(step + 2)
        shown = subprocess.run(
            [*command, "status", out, "--json"], capture_output=True, text=True, check=True
        )
        status = json.loads(shown.stdout)
        assert (status["lease"]["is_alive"], status["checkpoints"]) == (True, [step])
