"""`spmd launch`."""

import dataclasses
from typing import Any

from spmd.commands.parsing import parse_command, parse_flags, split_arguments
from spmd.commands.train import TrainCommand, check_command
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.local import free_port, launch_local, process_commands
from spmd.errors import ConfigError, Problem, check_fields
from spmd.run.build import planned_mesh


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """Run N processes with simulated devices on this machine, as a cluster would start them.

    The command line of `spmd train` follows after `--`. Signals are forwarded to all processes.
    When one fails, the others are stopped, and the exit code is that of the first that failed.
    """

    processes: int
    """Number of processes."""
    devices_per_process: int = 0
    """Simulated devices of each process (0: the config's `devices`, divided; 1 if it has none)."""
    grace: float = 15.0
    """Seconds after a failure in which the other processes can end by themselves."""


def run_launch(arguments: list[str]) -> int:
    """Run the processes; return the exit code of the first failure, or 0."""
    own, train = split_arguments(arguments)
    command: LaunchCommand = parse_flags(LaunchCommand, own, "spmd launch")
    _check_verb(train)
    parsed, source = parse_command(TrainCommand, train[1:], "train")
    problems = _problems(command, parsed)
    if problems:
        raise ConfigError("The processes cannot be launched:", problems)
    processes = command.processes
    each = command.devices_per_process or max(parsed.config.devices // processes, 1)
    # Whatever all processes would refuse is refused here, once.
    config = dataclasses.replace(parsed.config, devices=each * processes)
    check_command(dataclasses.replace(parsed, config=config), source, planned_mesh(config))
    commands = process_commands(train, processes, each, free_port())
    return launch_local(commands, grace=command.grace)


def _check_verb(train: list[str]) -> None:
    """Raise if another command than `train` comes after `--`, or none."""
    if train[:1] == ["train"]:
        return
    what = "there is no command"
    if train:
        what = f"{train[0]!r} cannot be launched"
    problem = Problem("after --", what, fix="spmd launch --processes 2 -- train CONFIG …")
    raise ConfigError("spmd launch runs spmd train:", [problem])


def _problems(command: LaunchCommand, parsed: TrainCommand[Any]) -> list[Problem]:
    rules = {
        "processes": "at least 2 and at most 256",
        "devices_per_process": "at least 0",
        "grace": "at least 0",
    }
    problems = check_fields(command, rules)
    for name in ("coordinator", "processes", "process_id"):
        if getattr(parsed.launch_args, name) != getattr(LaunchArgs(), name):
            flag = name.replace("_", "-")
            problems.append(
                Problem(
                    f"train --{flag}",
                    "is set by spmd launch for each process",
                    fix="remove it",
                )
            )
    if problems or command.devices_per_process:
        return problems
    devices = parsed.config.devices
    processes = command.processes
    if devices % processes:
        problems.append(
            Problem(
                "devices",
                "do not divide over the processes",
                detail=f"{devices} / {processes} = {devices / processes:g}",
                fix="--devices-per-process D",
            )
        )
    return problems
