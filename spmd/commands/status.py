"""`spmd status`."""

import dataclasses
import json

import tyro

from spmd.commands.parsing import parse_flags
from spmd.run.status import read_status
from spmd.storage.address import locate


@dataclasses.dataclass(frozen=True)
class StatusCommand:
    """Print the state of a run, of another terminal or machine: step, loss, speed and last save.

    Nothing is written to the run folder.
    """

    run: tyro.conf.Positional[str]
    """Run folder, such as runs/demo or gs://bucket/runs/demo."""
    json: bool = False
    """Print JSON."""


def run_status(arguments: list[str]) -> int:
    """Print the state of a run, and return the exit code."""
    command: StatusCommand = parse_flags(StatusCommand, arguments, "spmd status")
    status = read_status(locate(command.run))
    if command.json:
        print(json.dumps(status.to_json()))
    else:
        print(status)
    return 0
