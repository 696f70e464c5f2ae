"""`spmd script`."""

import dataclasses
import shlex
import shutil
import sys
from collections.abc import Mapping

from spmd.commands.flag_names import given_flags
from spmd.commands.parsing import parse_command, parse_flags, split_arguments
from spmd.commands.train import TrainCommand
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.job_files.job import Job, WrappedJob
from spmd.job_files.kubernetes import KubernetesJob
from spmd.job_files.slurm import SlurmJob
from spmd.job_files.tpu_vm import TpuVmJob
from spmd.run.build import make_setup, planned_mesh
from spmd.run.preflight import preflight
from spmd.storage.output_file import write_output

JOBS: Mapping[str, type[SlurmJob | KubernetesJob | TpuVmJob]] = {
    "slurm": SlurmJob,
    "kubernetes": KubernetesJob,
    "tpu-vm": TpuVmJob,
}
"""Kind of job file → its options."""


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
    job: Job = parse_flags(JOBS[kind], flags, usage)
    train = [*config, *further]
    parsed, source = parse_command(TrainCommand, train, "train")
    name = job.name or source.stem.replace("_", "-")
    out = job.out or parsed.config.out or f"runs/{name}"
    job = dataclasses.replace(job, name=name, out=out)
    problems = job.problems()
    if not problems:  # which options a file sets depends on its devices
        problems = _flag_problems(job, kind, further)
    if problems:
        raise ConfigError("Invalid job script:", problems)
    devices = job.devices or job.processes * parsed.config.devices
    if devices:
        planned = dataclasses.replace(parsed.config, devices=devices)
        preflight(make_setup(planned, planned_mesh(planned)))
    text = job.render(train)
    _note_missing_wrapper(job)
    if job.file:
        write_output("--file", job.file, text)
    else:
        print(text, end="")
    return 0


def _cluster(arguments: list[str]) -> str:
    """Return the kind of cluster, or raise if it is not known."""
    kind = ""
    if arguments:
        kind = arguments[0]
    if kind in JOBS:
        return kind
    fix = did_you_mean(kind, JOBS)
    problem = Problem("spmd script", "needs a cluster", fix=fix)
    if kind:
        problem = Problem(kind, "unknown cluster", fix=fix)
    raise ConfigError("Unknown kind of script:", [problem])


def _flag_problems(job: Job, kind: str, train: list[str]) -> list[Problem]:
    """Return a problem for each flag of `spmd train` that the job file sets."""
    problems = []
    for field in sorted(job.set_flags().intersection(given_flags(train))):
        flag = f"--{field.replace('_', '-')}"
        what = f"is set by the job file for {kind}"
        problems.append(Problem(f"{flag} after --", what, fix=f"remove {flag}"))
    return problems


def _note_missing_wrapper(job: Job) -> None:
    """Say that the wrapper is not on this machine, which is not where it must be."""
    if not isinstance(job, WrappedJob) or not job.wrapper:
        return
    program = shlex.split(job.wrapper)[0]
    if "$" in program or "=" in program or shutil.which(program):
        return
    print(
        f"spmd: note: {program} is not on this machine; the job needs it on every node",
        file=sys.stderr,
    )
