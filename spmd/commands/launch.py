"""`spmd launch`."""

import dataclasses

from spmd.commands.parsing import parse_command, parse_flags
from spmd.commands.train import TrainCommand
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.local import free_port, launch_local, process_commands
from spmd.errors import ConfigError, Problem


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """Rehearses a run on this machine: N processes with simulated devices, as a cluster would start them.

    What follows `--` is the command line of `spmd train`. A signal goes to all processes; when one fails, the others
    are stopped, and the exit code is that of the first that failed.
    """

    processes: int
    """How many processes."""
    devices_per_process: int = 0
    """Simulated devices of each process (0: the config's `devices`, divided; 1 where it has none)."""
    grace: float = 15.0
    """Seconds that the other processes have to end by themselves after one has failed."""


def run_launch(arguments: list[str]) -> int:
    """Rehearses; the exit code of the first process that failed, or 0."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, train = arguments[:cut], arguments[cut + 1 :]
    command: LaunchCommand = parse_flags(LaunchCommand, own, "spmd launch")
    if train[:1] != ["train"]:
        what = f"{train[0]!r} cannot be rehearsed" if train else "nothing is to be run"
        fix = "spmd launch --processes 2 -- train CONFIG …"
        raise ConfigError("spmd launch runs spmd train:", [Problem("after --", what, fix=fix)])
    devices = _devices(command, train[1:])
    return launch_local(process_commands(train, command.processes, devices, free_port()), grace=command.grace)


def _devices(command: LaunchCommand, train: list[str]) -> int:
    """Simulated devices of each process.

    Raises:
        ConfigError: What was asked for does not divide, or says twice which processes there are.
    """
    parsed, _ = parse_command(TrainCommand, train, "train")
    config, processes = parsed.config, command.processes
    problems = []
    if processes < 2:
        problems.append(Problem("processes", f"is {processes}", fix="2 or more; `spmd train` is one"))
    if command.devices_per_process < 0:
        problems.append(Problem("devices-per-process", f"is {command.devices_per_process}", fix="1 or more"))
    if command.grace < 0:
        problems.append(Problem("grace", f"is {command.grace:g} seconds", fix="0 or more"))
    for name in ("coordinator", "processes", "process_id"):
        if getattr(parsed.asked, name) != getattr(LaunchArgs(), name):
            flag = name.replace("_", "-")
            problems.append(Problem(f"train --{flag}", "is what spmd launch gives each process", fix="leave it out"))
    if not problems and not command.devices_per_process and config.devices % processes:
        arithmetic = f"{config.devices} / {processes} = {config.devices / processes:g}"
        fix = "--devices-per-process D"
        problems.append(Problem("devices", "do not divide over the processes", arithmetic, fix))
    if problems:
        raise ConfigError("The run cannot be rehearsed:", problems)
    return command.devices_per_process or max(config.devices // processes, 1)
