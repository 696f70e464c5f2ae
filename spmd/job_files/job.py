"""Options, restarts and command of every job file.

A job file trains until the last step. After a preemption, a lost node or another exit code in
`RESTARTED`, all processes start again with `--resume auto`; any other failure ends the job. The run
itself counts attempts without a newer checkpoint (`--max-restarts`), so preemptions of a run that
makes progress end no job. All nodes and restarts share a compilation cache.
"""

import abc
import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from spmd.distributed.initialize import EXIT_LOST
from spmd.errors import Problem, check_fields
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.resilience.watchdog import EXIT_HUNG

RESTARTED = {
    EXIT_LOST: "the runtime failed, mostly because another process was gone",
    EXIT_HUNG: "no progress within the watchdog's deadline",
    EXIT_PREEMPTED: "preempted, after a checkpoint",
    134: "aborted by JAX, because another process was gone",
    137: "killed: out of memory, or its node was lost",
    138: "SIGUSR1 during start-up",
    143: "SIGTERM during start-up",
}
"""Exit codes after which all processes start again. Slurm itself requeues the jobs of failed
nodes."""

CACHE = "compiled"
"""Folder of compiled programs."""

GpuPlatform = Literal["cuda", "rocm"]
"""Platform of GPUs: NVIDIA's or AMD's."""

# Kubernetes' names, and short enough for names of pods
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(abc.ABC):
    """Options of every job file."""

    name: str = ""
    """Name of the job; by default that of the config."""
    out: str = ""
    """Run folder, shared by all machines; runs/CONFIG by default."""
    save_seconds: int = 120
    """Seconds from the preemption signal to the end of a process, to save a checkpoint."""
    max_restarts: int = 3
    """Maximum number of restarts in a row without a newer checkpoint."""
    setup: str = ""
    """Shell line that runs first, such as "source .venv/bin/activate"."""
    file: str = ""
    """Write to this file instead of the terminal."""

    SET_BY_LAUNCHER: ClassVar[tuple[str, ...]] = ("processes", "process_id")
    """Fields of `LaunchArgs` that the launcher of the processes says."""

    @property
    @abc.abstractmethod
    def processes(self) -> int:
        """Number of processes of the run."""

    @property
    @abc.abstractmethod
    def devices(self) -> int:
        """Number of accelerators of all nodes, as JAX counts them; 0 if there are none."""

    @property
    @abc.abstractmethod
    def platform(self) -> str:
        """JAX's platform of the devices."""

    @abc.abstractmethod
    def render(self, train: Sequence[str]) -> str:
        """Return the job file of `command(train)`."""

    def problems(self) -> list[Problem]:
        """Return the problems of the options."""
        problems = check_fields(self, self._rules())
        if not _NAME.fullmatch(self.name):
            fix = "at most 41 lowercase letters, digits and dashes, and a letter first: --name"
            problems.append(Problem("name", f"{self.name!r} is not a valid name of a job", fix=fix))
        return problems

    def _rules(self) -> dict[str, str]:
        return {"save_seconds": "at least 1", "max_restarts": "at least 1"}

    def launch_flags(self) -> dict[str, str]:
        """Return the values of `LaunchArgs` on the command line of `spmd train`.

        A node without its driver would train on CPUs, so accelerators are asked for by platform and
        number; and a job on CPUs says so, as its nodes may have accelerators.
        """
        if not self.devices:
            return {"platform": self.platform}
        return {"platform": self.platform, "expect_devices": str(self.devices)}

    def set_flags(self) -> frozenset[str]:
        """Return the fields of `spmd train` on its command line, or set by the launcher."""
        fields = {"resume", "max_restarts", *self.SET_BY_LAUNCHER, *self.launch_flags()}
        if self.devices:
            fields.add("devices")
        return frozenset(fields)

    def command(self, train: Sequence[str]) -> list[str]:
        """Return the command of each process; `train` is the config and flags of `spmd train`."""
        command = ["spmd", "train", *train, "--out", self.out, "--resume", "auto"]
        command += ["--max-restarts", str(self.max_restarts)]
        if self.devices:
            command += ["--devices", "0"]  # a config may simulate some
        for field, value in self.launch_flags().items():
            command += [f"--{field.replace('_', '-')}", value]
        return command


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrappedJob(Job):
    """Options of a job file with processes in containers of the nodes."""

    wrapper: str = ""
    """Command that runs each process, such as "apptainer exec --nv image.sif"."""

    def wrapped(self, command: Sequence[str]) -> str:
        """Return a command after the wrapper; that is shell, so it may name variables."""
        return f"{self.wrapper} {shlex.join(command)}".lstrip()


def command_line_problems(job: Job, fields: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each invalid command line; `fields` has an example of each."""
    problems: list[Problem] = []
    for field, example in fields.items():
        value = getattr(job, field)
        try:
            words = shlex.split(value)
        except ValueError as error:
            what = f"is no command line: {str(error).lower()}"
            problems.append(Problem(field, what, repr(value), f"such as {example!r}"))
            continue
        if value and not words:
            problems.append(Problem(field, "is blank", repr(value), f"such as {example!r}"))
    return problems
