"""`spmd script`."""

import dataclasses
from pathlib import Path

from spmd.commands.parsing import parse_command, parse_flags, split_arguments
from spmd.commands.train import TrainCommand
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.run.build import make_setup, planned_mesh
from spmd.run.job_files import KubernetesJob, SlurmJob
from spmd.run.preflight import preflight


def run_script(arguments: list[str]) -> int:
    """Write a job file, if the config can run on all devices; return the exit code."""
    kinds: dict[str, type[SlurmJob | KubernetesJob]] = {"slurm": SlurmJob, "kubernetes": KubernetesJob}
    kind = arguments[0] if arguments else ""
    if kind not in kinds:
        problem = Problem(kind or "spmd script", "unknown cluster" if kind else "needs a cluster")
        raise ConfigError("There is no such script:", [dataclasses.replace(problem, fix=did_you_mean(kind, kinds))])
    own, further = split_arguments(arguments[1:])
    config, flags = own[:1], own[1:]
    if {"-h", "--help"} & set(own):
        config, flags = [], ["--help"]
    job: SlurmJob | KubernetesJob = parse_flags(kinds[kind], flags, f"spmd script {kind} {[*config, 'CONFIG'][0]}")
    train = [*config, *further]
    parsed, source = parse_command(TrainCommand, train, "train")
    name = job.name or source.stem.replace("_", "-")
    job = dataclasses.replace(job, name=name, out=job.out or parsed.config.out or f"runs/{name}")
    problems = job.problems()
    for field, default in (("launch_args", LaunchArgs()), ("resume", "never")):
        if getattr(parsed, field) != default:
            problems.append(Problem(f"flags after -- ({field})", "are set by the job file", fix="remove them"))
    if problems:
        raise ConfigError("The script cannot be written:", problems)
    if devices := job.devices or job.processes * parsed.config.devices:
        planned = dataclasses.replace(parsed.config, devices=devices)
        preflight(make_setup(planned, planned_mesh(planned)))
    text = job.render(train)
    if job.file:
        Path(job.file).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0
