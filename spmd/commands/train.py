"""`spmd train`."""

import contextlib
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Generic

from spmd.commands.parsing import ConfigFields, LaunchFields, parse_command
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import no_accelerators, starts_alone
from spmd.errors import ConfigError, Problem, SpmdError, check_fields
from spmd.observe.goodput import command_start
from spmd.observe.profiling import parse_steps
from spmd.observe.tensorboard import import_tensorboard
from spmd.resilience.forked_call import call_in_fork
from spmd.resilience.generations import Generations, conditional_store
from spmd.resilience.supervisor import ATTEMPTS, Worker, fork_obstacle, native_threads, supervise
from spmd.run.build import planned_mesh
from spmd.run.config import M
from spmd.run.load_config import local_target
from spmd.run.run_dir import Resume, RunDir
from spmd.run.train import check, run_dir, train
from spmd.sharding.mesh import AnyMesh
from spmd.storage.address import is_address

REJOIN_SECONDS = 60
"""Seconds in which all processes must have connected again after a crash. Then each supervisor ends
as its process had ended, so that the launcher can start the run again on other hosts."""

_LISTING_SECONDS = 30.0
_DOWNLOAD_SECONDS = 60.0


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
    """Run `spmd train` in this process; return the exit code."""
    command, source = parse_command(TrainCommand, arguments, "train")
    _check_restarts(command)
    return _train(command, source, command_start(), None)


def run_supervised(arguments: list[str]) -> int:
    """Run `spmd train` in a process of its own under a supervisor; return the exit code in both.

    Where this process cannot be forked it trains itself.
    """
    threads = native_threads()
    command, source = parse_command(TrainCommand, _with_local_config(arguments), "train")
    _check_restarts(command)
    began = command_start()
    if not command.config.recovery.supervisor:
        return _train(command, source, began, None)
    obstacle = fork_obstacle(threads)
    if obstacle:
        print(f"spmd: training without a supervisor: {obstacle}", file=sys.stderr)
        return _train(command, source, began, None)
    folder = run_dir(command.config, source)
    generations = Generations()
    if not starts_alone(command.launch_args):
        generations = Generations(conditional_store(folder.location / "generations"))
    attempts = command.max_restarts or ATTEMPTS
    prepare = functools.partial(_prepare, command)
    progress = functools.partial(_newest_checkpoint, folder)
    worker = supervise(generations, progress, prepare, attempts)
    if isinstance(worker, int):
        return worker
    if worker.is_restart:
        launch_args = command.launch_args
        seconds = min(launch_args.start_timeout, REJOIN_SECONDS)
        launch_args = dataclasses.replace(launch_args, start_timeout=seconds)
        command = dataclasses.replace(
            command, resume="auto", take_over=False, launch_args=launch_args
        )
    return _train(command, source, worker.began or began, worker)


def _with_local_config(arguments: list[str]) -> list[str]:
    """Return the arguments with the local copy of a config in a bucket, which a fork downloads.

    If it fails, the arguments are as they were, and reading the config says why.
    """
    if sys.platform != "linux" or not arguments or not is_address(arguments[0]):
        return arguments
    address = arguments[0]
    local = call_in_fork(lambda: local_target(address), _DOWNLOAD_SECONDS)
    return [local or address, *arguments[1:]]


def _newest_checkpoint(folder: RunDir) -> int:
    """Return the step of the newest checkpoint, or 0; a bucket is asked by another process."""
    newest = None
    if isinstance(folder.location, Path):
        newest = folder.newest_checkpoint()
    else:
        newest = call_in_fork(folder.newest_checkpoint, _LISTING_SECONDS)
    return newest or 0


def _prepare(command: TrainCommand[Any]) -> None:
    """Prepare a run up to the first use of a device, so that it begins sooner.

    What is wrong with a run is left to the run.
    """
    config = command.config
    if "tensorboard" in config.metrics_to:
        import_tensorboard()
    devices = config.devices * (command.launch_args.processes or 1)
    with no_accelerators(), contextlib.suppress(SpmdError):
        config = dataclasses.replace(config, devices=devices)
        check(config, planned_mesh(config), resumes=True)


def _train(command: TrainCommand[Any], source: Path, began: float, worker: Worker | None) -> int:
    result = train(
        command.config,
        resume=command.resume,
        take_over=command.take_over,
        profile=command.profile,
        source=source,
        launch_args=command.launch_args,
        began=began,
        max_restarts=command.max_restarts,
        worker=worker,
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
