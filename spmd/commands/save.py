"""`spmd save`."""

import dataclasses
import time

import tyro

from spmd.commands.parsing import parse_flags
from spmd.errors import CheckpointError, Problem
from spmd.observe.spinner import spinner
from spmd.resilience.lease import request_save
from spmd.run.run_dir import RunDir, check_has_run
from spmd.storage.address import Location, locate

_POLL = 1.0
"""Seconds between two looks at the folder."""


@dataclasses.dataclass(frozen=True)
class SaveCommand:
    """Ask a run of another terminal or machine to save a checkpoint now; wait until it is written.

    The run goes on. It sees the request within 10 seconds and at its next step; of several
    processes, after up to two lines of its log.
    """

    run: tyro.conf.Positional[str]
    """Run folder, such as runs/demo or gs://bucket/runs/demo."""
    wait: float = 600.0
    """Seconds to wait for the checkpoint at most; 0 to wait for none."""


def run_save(arguments: list[str]) -> int:
    """Ask for a checkpoint, wait for it, and return the exit code."""
    command: SaveCommand = parse_flags(SaveCommand, arguments, "spmd save")
    location = locate(command.run)
    run = RunDir(location)
    check_has_run(run, command.run)
    before = run.newest_checkpoint()
    request_save(location)
    if not command.wait:
        print(f"asked {command.run} to save a checkpoint")
        return 0
    with spinner("waiting for the checkpoint"):
        step = _await_checkpoint(location, before, command.wait)
    print(f"{command.run} saved step {step:,}")
    return 0


def _await_checkpoint(location: Location, before: int | None, seconds: float) -> int:
    """Return the step of the first checkpoint after `before`."""
    end = time.monotonic() + seconds
    run = RunDir(location)
    while time.monotonic() < end:
        newest = run.newest_checkpoint()
        if newest is not None and newest != before:
            return newest
        time.sleep(_POLL)
    what = "has not saved a checkpoint"
    fix = "spmd status RUN says whether it trains; a longer --wait"
    problem = Problem(str(location), what, f"{seconds:g} s", fix)
    raise CheckpointError("No checkpoint yet:", [problem])
