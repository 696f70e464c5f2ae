"""`spmd launch`."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from spmd.commands.parsing import (
    launch_args_of,
    parse_command,
    parse_flags,
    split_arguments,
    value_of,
)
from spmd.commands.processes import IN_PROCESSES
from spmd.commands.train import TrainCommand, check_command
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.local import free_port, launch_local, process_commands
from spmd.errors import ConfigError, Problem, check_fields
from spmd.run.build import planned_mesh
from spmd.run.run_dir import RunDir
from spmd.run.step_source import ConfigSource, load_source
from spmd.storage.address import locate


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """Run N processes with simulated devices on this machine, as a cluster would start them.

    The command line of `spmd train`, check, eval, generate, import or export follows after `--`.
    Signals are forwarded to all processes. When one fails, the others are stopped, and the exit
    code is that of the first that failed.
    """

    processes: int
    """Number of processes."""
    devices_per_process: int = 0
    """Simulated devices of each process (0: the config's `devices`, divided; 1 if it has none)."""
    grace: float = 15.0
    """Seconds after a failure in which the other processes can end by themselves."""


def run_launch(arguments: list[str]) -> int:
    """Run the processes; return the exit code of the first failure, or 0."""
    own, launched = split_arguments(arguments)
    command: LaunchCommand = parse_flags(LaunchCommand, own, "spmd launch")
    _check_verb(launched)
    if launched[0] == "train":
        each = _check_train(command, launched)
    else:
        devices = _configured_devices(launched)
        if devices < command.processes:  # as each process of a run of several has
            devices = 0
        each = _devices_of_each(command, launched, devices)
    commands = process_commands(launched, command.processes, each, free_port())
    return launch_local(commands, grace=command.grace)


def _check_train(command: LaunchCommand, launched: list[str]) -> int:
    """Check a training run; return the simulated devices of each process.

    Whatever all processes would refuse is refused here, once.
    """
    parsed, source = parse_command(TrainCommand, launched[1:], "train")
    each = _devices_of_each(command, launched, parsed.config.devices)
    config = dataclasses.replace(parsed.config, devices=each * command.processes)
    check_command(dataclasses.replace(parsed, config=config), source, planned_mesh(config))
    return each


def _check_verb(launched: list[str]) -> None:
    """Raise unless a command for several processes comes after `--`."""
    names = ("train", *IN_PROCESSES)
    if launched and launched[0] in names:
        return
    what = "there is no command"
    if launched:
        what = f"{launched[0]!r} cannot be launched"
    fix = f"spmd launch --processes 2 -- train CONFIG …, or another of: {', '.join(names)}"
    raise ConfigError("spmd launch runs a command:", [Problem("after --", what, fix=fix)])


def _configured_devices(launched: list[str]) -> int:
    """Return the simulated devices of a command without processes; 0 for none."""
    given = value_of("--devices", launched)
    if given.isdigit():
        return int(given)
    name, *arguments = launched
    names = list(itertools.takewhile(lambda each: not each.startswith("-"), arguments))
    if len(names) != 1 or name not in _DEVICES:  # two are a run and the file of its step
        return 0
    return _DEVICES[name](names[0])


def _devices_of_run(name: str) -> int:
    return RunDir(locate(name)).config().devices


def _devices_of_source(name: str) -> int:
    source = load_source(name)
    if isinstance(source, ConfigSource):
        return source.config.devices
    return 0


_DEVICES: Mapping[str, Callable[[str], int]] = {
    "check": _devices_of_source,
    "eval": _devices_of_run,
    "generate": _devices_of_run,
    "export": _devices_of_run,
}
"""Command → function of its first argument that returns the simulated devices of its config."""


def _devices_of_each(command: LaunchCommand, launched: list[str], devices: int) -> int:
    """Return the simulated devices of each process.

    Raises:
        ConfigError: All problems of the numbers of devices and processes.
    """
    rules = {
        "processes": "at least 2 and at most 256",
        "devices_per_process": "at least 0",
        "grace": "at least 0",
    }
    problems = check_fields(command, rules)
    problems += _set_for_each(launched)
    processes = command.processes
    if not problems and not command.devices_per_process and devices % processes:
        problems.append(
            Problem(
                "devices",
                "do not divide over the processes",
                detail=f"{devices} / {processes} = {devices / processes:g}",
                fix="--devices-per-process D",
            )
        )
    if problems:
        raise ConfigError("The processes cannot be launched:", problems)
    return command.devices_per_process or max(devices // processes, 1)


def _set_for_each(launched: list[str]) -> list[Problem]:
    """Return a problem for each given flag of the process group."""
    given: Any = launch_args_of(launched[1:])
    problems = []
    for name in ("coordinator", "processes", "process_id"):
        if getattr(given, name) != getattr(LaunchArgs(), name):
            flag = name.replace("_", "-")
            what = "is set by spmd launch for each process"
            problems.append(Problem(f"{launched[0]} --{flag}", what, fix="remove it"))
    return problems
