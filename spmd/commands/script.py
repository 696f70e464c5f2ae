"""`spmd script`."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from spmd.commands.parsing import parse_command, parse_flags
from spmd.commands.train import TrainCommand
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.run.build import TrainSetup, planned_mesh
from spmd.run.config import TrainConfig
from spmd.run.job_files import Job, jobset_manifest, slurm_script, to_yaml, topology_chips

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?")
"""What Kubernetes takes for a name, short enough for that of a pod that is made from it."""


@dataclasses.dataclass(frozen=True)
class ScriptCommand:
    """What every script has."""

    nodes: int
    """How many machines."""
    processes_per_node: int = 1
    """Processes on each of them; one serves all of its GPUs or TPU chips."""
    gpus_per_node: int = 0
    """GPUs of each machine that the run gets."""
    cpus_per_process: int = 0
    """CPU cores of each process (0: the cluster's default, which may be one)."""
    name: str = ""
    """What the job is called; by default as the config is."""
    out: str = ""
    """The run folder, which all machines share; runs/CONFIG by default."""
    save_seconds: int = 120
    """How long before its end a process is told to go; it saves in that time."""
    restarts: int = 50
    """How often all processes are started again, at most."""
    setup: str = ""
    """A line of shell that comes first, such as "source .venv/bin/activate"."""
    file: str = ""
    """Write to this file instead of the terminal."""


@dataclasses.dataclass(frozen=True)
class SlurmCommand(ScriptCommand):
    """Writes a batch file for Slurm: submit it with sbatch, in a folder that all machines share.

    What follows `--` are further flags of `spmd train`. The config is planned for all devices first, so what would fail
    in the queue fails here.
    """

    time: str = ""
    """How long the job may take, such as 1-00:00:00; it is requeued until the run is done."""
    partition: str = ""
    """Where it runs."""
    account: str = ""
    """Who pays for it."""


@dataclasses.dataclass(frozen=True)
class KubernetesCommand(ScriptCommand):
    """Writes a JobSet for Kubernetes: submit it with kubectl apply -f.

    What follows `--` are further flags of `spmd train`. CONFIG and its corpus are looked for in the volume.
    """

    image: str = ""
    """The container image, which has spmd."""
    claim: str = ""
    """The PersistentVolumeClaim for the run folder, which all pods may write to."""
    mount: str = "/runs"
    """Where that volume is in a pod: the working folder."""
    tpu: str = ""
    """ACCELERATOR:TOPOLOGY of a TPU slice, such as tpu-v5-lite-podslice:4x4."""


def run_script(arguments: list[str]) -> int:
    """Writes a script; the exit code."""
    commands: dict[str, type[ScriptCommand]] = {"slurm": SlurmCommand, "kubernetes": KubernetesCommand}
    if not arguments or arguments[0] not in commands:
        word = arguments[0] if arguments else ""
        problem = Problem(word or "spmd script", "is no cluster" if word else "needs a cluster")
        problem = dataclasses.replace(problem, fix=did_you_mean(word, commands))
        raise ConfigError("There is no such script:", [problem])
    kind, rest = arguments[0], arguments[1:]
    cut = rest.index("--") if "--" in rest else len(rest)
    config, own, further = rest[:1], rest[1:cut], rest[cut + 1 :]
    if {"-h", "--help"} & set(rest[:cut]):
        config, own = [], ["--help"]
    command = parse_flags(commands[kind], own, f"spmd script {kind} {config[0] if config else 'CONFIG'}")
    parsed, source = parse_command(TrainCommand, [*config, *further], "train")
    name = command.name or source.stem.replace("_", "-")
    _check(command, parsed, name)
    job = Job(
        train=(*config, *further),
        out=command.out or parsed.config.out or f"runs/{name}",
        name=name,
        nodes=command.nodes,
        processes_per_node=command.processes_per_node,
        gpus_per_node=command.gpus_per_node,
        cpus_per_process=command.cpus_per_process,
        save_seconds=command.save_seconds,
        restarts=command.restarts,
        setup=command.setup,
    )
    if isinstance(command, KubernetesCommand):
        places = {"image": command.image, "claim": command.claim, "mount": command.mount}
        manifest = jobset_manifest(job, **places, tpu=command.tpu)
        text = to_yaml(manifest)
    else:
        text = slurm_script(job, time=command.time, partition=command.partition, account=command.account)
    if command.file:
        Path(command.file).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _check(command: Any, parsed: Any, name: str) -> None:
    """Refuses what could not run.

    Raises:
        SpmdError: The numbers are wrong, or the config cannot run on all devices.
    """
    least = {
        "nodes": 1,
        "processes_per_node": 1,
        "gpus_per_node": 0,
        "cpus_per_process": 0,
        "save_seconds": 1,
        "restarts": 0,
    }
    problems = [
        Problem(field.replace("_", "-"), f"is {value}", fix=f"{lowest} or more")
        for field, lowest in least.items()
        if (value := getattr(command, field)) < lowest
    ]
    if not problems and command.gpus_per_node % command.processes_per_node:
        arithmetic = f"{command.gpus_per_node} / {command.processes_per_node}"
        problems.append(Problem("gpus-per-node", "do not divide over the processes of a node", arithmetic))
    if not _NAME.fullmatch(name):
        fix = "at most 41 small letters, digits and dashes, of which the first is a letter: --name"
        problems.append(Problem("name", f"{name!r} is no name of a job", fix=fix))
    for field, flag in (("asked", LaunchArgs()), ("resume", "never")):
        if getattr(parsed, field) != flag:
            what = "says how processes meet or go on, which the script does"
            problems.append(Problem(f"flags after -- ({field})", what, fix="leave it out"))
    chips = 0
    if isinstance(command, KubernetesCommand):
        for field in ("image", "claim"):
            if not getattr(command, field):
                problems.append(Problem(field, "is missing", fix=f"--{field} {field.upper()}"))
        if not command.mount.startswith("/"):
            problems.append(Problem("mount", f"{command.mount!r} is no absolute path", fix="such as /runs"))
        chips, wrong = _tpu_chips(command)
        problems += wrong
    if problems:
        raise ConfigError("The script cannot be written:", problems)
    config: TrainConfig = parsed.config
    processes = command.nodes * command.processes_per_node
    devices = chips or command.nodes * command.gpus_per_node or processes * config.devices
    if devices:
        TrainSetup(config, planned_mesh(dataclasses.replace(config, devices=devices))).audit()


def _tpu_chips(command: KubernetesCommand) -> tuple[int, list[Problem]]:
    """How many chips the slice has, 0 for none, and what is wrong with it."""
    if not command.tpu:
        return 0, []
    if not re.fullmatch(r"[-a-z0-9]+:\d+(x\d+)+", command.tpu):
        what = f"{command.tpu!r} is not ACCELERATOR:TOPOLOGY"
        return 0, [Problem("tpu", what, fix="such as tpu-v5-lite-podslice:4x4")]
    chips, processes = topology_chips(command.tpu.split(":")[1]), command.nodes * command.processes_per_node
    if not processes or chips % processes:
        return 0, [Problem("tpu", "does not divide over the processes", f"{chips} / {processes}", "other --nodes")]
    return chips, [Problem("gpus-per-node", "and tpu exclude each other")] if command.gpus_per_node else []
