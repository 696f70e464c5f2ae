"""`spmd script`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.commands.parsing import parse_command, parse_flags, split_arguments
from spmd.commands.train import TrainCommand
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.run.build import make_setup, planned_mesh
from spmd.run.job_files import KubernetesJob, SlurmJob
from spmd.run.preflight import preflight

_KINDS: Mapping[str, type[SlurmJob | KubernetesJob]] = {
    "slurm": SlurmJob,
    "kubernetes": KubernetesJob,
}


def run_script(arguments: list[str]) -> int:
    """Write a job file, if the config can run on all devices; return the exit code."""
    kind = _cluster(arguments)
    own, further = split_arguments(arguments[1:])
    config = own[:1]
    flags = own[1:]
    if "-h" in own or "--help" in own:
        config = []
        flags = ["--help"]
    usage = f"spmd script {kind} CONFIG"
    if config:
        usage = f"spmd script {kind} {config[0]}"
    job: SlurmJob | KubernetesJob = parse_flags(_KINDS[kind], flags, usage)
    train = [*config, *further]
    parsed, source = parse_command(TrainCommand, train, "train")
    name = job.name or source.stem.replace("_", "-")
    out = job.out or parsed.config.out or f"runs/{name}"
    job = dataclasses.replace(job, name=name, out=out)
    problems = job.problems() + _flag_problems(parsed)
    if problems:
        raise ConfigError("Invalid job script:", problems)
    devices = job.devices or job.processes * parsed.config.devices
    if devices:
        planned = dataclasses.replace(parsed.config, devices=devices)
        preflight(make_setup(planned, planned_mesh(planned)))
    text = job.render(train)
    if job.file:
        Path(job.file).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _cluster(arguments: list[str]) -> str:
    """Return the kind of cluster, or raise if it is not known."""
    kind = ""
    if arguments:
        kind = arguments[0]
    if kind in _KINDS:
        return kind
    fix = did_you_mean(kind, _KINDS)
    problem = Problem("spmd script", "needs a cluster", fix=fix)
    if kind:
        problem = Problem(kind, "unknown cluster", fix=fix)
    raise ConfigError("Unknown kind of script:", [problem])


def _flag_problems(parsed: TrainCommand[Any]) -> list[Problem]:
    """Return problems of flags of `spmd train` with a value from the job file."""
    own = {"launch_args": LaunchArgs(), "resume": "never"}
    problems = []
    for field, default in own.items():
        if getattr(parsed, field) != default:
            problems.append(
                Problem(
                    f"flags after -- ({field})",
                    "are set by the job file",
                    fix="remove them",
                )
            )
    return problems
