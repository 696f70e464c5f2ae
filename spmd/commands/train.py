"""`spmd train`."""

import dataclasses
from pathlib import Path
from typing import Any, Generic

from spmd.commands.parsing import ConfigFields, LaunchFields, parse_command
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, check_fields
from spmd.observe.goodput import command_start
from spmd.observe.profiling import parse_steps
from spmd.run.config import M
from spmd.run.run_dir import Resume
from spmd.run.train import check, run_dir, train
from spmd.sharding.mesh import AnyMesh


@dataclasses.dataclass(frozen=True)
class TrainCommand(Generic[M]):
    """Train a model, with everything about the run in one folder.

    Metrics go to the terminal and to DIR/metrics.jsonl, checkpoints to DIR/checkpoints. A folder
    that contains a run is refused without --resume; a resumed run is bitwise identical to one that
    was never interrupted. On SIGTERM, SIGUSR1 or SIGHUP the run finishes its step, saves a
    checkpoint and exits with 75: continue with --resume auto.
    """

    config: ConfigFields
    resume: Resume = "never"
    """If the folder contains a run: never (refuse it), auto (resume; start a run if there is none),
    always (resume from the newest intact checkpoint; refuse a folder without one)."""
    take_over: bool = False
    """Take the folder from the process that writes to it, which then ends."""
    max_restarts: int = 0
    """Attempts in a row that ended without a newer checkpoint, after which a further one is refused
    with exit code 2 (0: any number). For runs that something starts again; with --resume auto."""
    profile: str = ""
    """Steps to trace into DIR/profile, such as 10:15; SIGUSR2 traces the next five."""
    launch_args: LaunchFields = LaunchArgs()


def run_train(arguments: list[str]) -> int:
    """Run `spmd train`; return the exit code."""
    command, source = parse_command(TrainCommand, arguments, "train")
    _check_restarts(command)
    result = train(
        command.config,
        resume=command.resume,
        take_over=command.take_over,
        profile=command.profile,
        source=source,
        launch_args=command.launch_args,
        began=command_start(),
        max_restarts=command.max_restarts,
    )
    return result.exit_code


def _check_restarts(command: TrainCommand[Any]) -> None:
    """Raise for a limit of restarts that is none, or acts on nothing."""
    problems = check_fields(command, {"max_restarts": "at least 0"})
    if command.max_restarts and command.resume != "auto":
        what = f"acts on nothing with resume={command.resume!r}: only auto starts and resumes"
        problems.append(Problem("max_restarts", what, fix='resume="auto"'))
    if problems:
        raise ConfigError("Invalid limit of restarts:", problems)


def check_command(command: TrainCommand[Any], source: Path, mesh: AnyMesh) -> None:
    """Raise the problems of `run_train`, without the devices of the mesh."""
    resumes = run_dir(command.config, source).check_use(command.resume)
    parse_steps(command.profile)
    _check_restarts(command)
    check(command.config, mesh, resumes)
