"""Batch files for Slurm.

The exit code of the job is that of `srun`: the highest of its processes. If one process ends with a
final code, 1 or 2, and the others then with 69 or 134, the job is requeued, and fails again until
the run has used its restarts without a newer checkpoint.
"""

import dataclasses
import shlex
from collections.abc import Sequence

from spmd.errors import Problem
from spmd.job_files.job import CACHE, RESTARTED, GpuPlatform, WrappedJob, command_line_problems
from spmd.resilience.preemption import EXIT_PREEMPTED

_COMMAND_LINES = {
    "wrapper": "apptainer exec --nv image.sif",
    "srun_options": "--container-image=image.sqsh --container-mounts=/data",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmJob(WrappedJob):
    """Batch file for Slurm, to submit with sbatch in a folder on a shared file system.

    Flags of `spmd train` follow after `--`. The config is planned for all devices first, so that an
    error shows now and not after the queue. There is one process for each GPU, and each sees all
    GPUs of its node, which NCCL needs to reach neighbours.
    """

    nodes: int
    """Number of machines."""
    gpus_per_node: int = 0
    """GPUs of each machine."""
    gpu_platform: GpuPlatform = "cuda"
    """Platform of the GPUs."""
    processes_per_node: int = 0
    """Processes on each machine, which divide its GPUs (0: one for each GPU, or one without)."""
    cpus_per_node: int = 0
    """CPUs of each machine, which its processes divide (0: whole machines, with all CPUs and
    memory)."""
    time: str = ""
    """Time limit, such as 1-00:00:00; the job is requeued until the run is done."""
    partition: str = ""
    """Partition of the cluster."""
    account: str = ""
    """Account to charge."""
    srun_options: str = ""
    """Further options of srun, such as --srun-options="--container-image=image.sqsh" (pyxis)."""

    @property
    def tasks(self) -> int:
        """Processes on each machine."""
        return self.processes_per_node or max(self.gpus_per_node, 1)

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return self.nodes * self.tasks

    @property
    def devices(self) -> int:
        """Number of GPUs of all nodes; 0 if there are none."""
        return self.nodes * self.gpus_per_node

    @property
    def platform(self) -> str:
        """Platform of the devices; CPUs without GPUs."""
        if self.gpus_per_node:
            return self.gpu_platform
        return "cpu"

    def _rules(self) -> dict[str, str]:
        rules = dict.fromkeys(
            ("gpus_per_node", "processes_per_node", "cpus_per_node"), "at least 0"
        )
        return {**super()._rules(), "nodes": "at least 1", **rules}

    def problems(self) -> list[Problem]:
        """Return the problems of the options."""
        problems = super().problems()
        if problems:
            return problems
        if self.gpus_per_node % self.tasks:
            what = "does not divide over the processes of a node"
            detail = f"{self.gpus_per_node} / {self.tasks}"
            problems.append(Problem("gpus_per_node", what, detail))
        if self.cpus_per_node and self.cpus_per_node < self.tasks:
            what = f"is {self.cpus_per_node}, and each of {self.tasks} processes needs one"
            problems.append(Problem("cpus_per_node", what, fix="0 for all CPUs of the machines"))
        return problems + command_line_problems(self, _COMMAND_LINES)

    def render(self, train: Sequence[str]) -> str:
        """Return the batch file of `command(train)`."""
        hint = (
            "# sbatch passes on the environment of its shell: activate the one that has spmd "
            "before."
        )
        about_signals = (
            f"# {self.save_seconds} s before the time limit, and at a preemption, "
            "Slurm signals the processes: they save and exit with\n"
            f"# {EXIT_PREEMPTED}. The first exit does not kill the others, "
            "which may still be saving; a minute later they are killed."
        )
        return f"""\
#!/bin/bash
{self._options()}
#SBATCH --output={self.name}-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@{self.save_seconds}
#SBATCH --requeue

{self.setup or hint}
export JAX_COMPILATION_CACHE_DIR="$SLURM_SUBMIT_DIR/{CACHE}"
{self._cpus()}
{self._check_of_wrapper()}{about_signals}
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="$cpus"{self._step_options()} \\
  {self.wrapped(self.command(train))}
status=$?

case "$status" in {" | ".join(map(str, RESTARTED))})
  echo "exit code $status: requeued, after ${{SLURM_RESTART_COUNT:-0}} restarts"
  exec scontrol requeue "$SLURM_JOB_ID"
esac
exit "$status"
"""

    def _options(self) -> str:
        """Return the lines of the job's options."""
        options = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_node // self.tasks,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
        if not self.cpus_per_node:
            lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
        return "\n".join(lines)

    def _cpus(self) -> str:
        """Return the lines for `cpus`, the CPUs of each process.

        A step does not inherit the job's. Slurm gives whole cores, which may be two CPUs.
        """
        if self.cpus_per_node:
            return f"cpus={self.cpus_per_node // self.tasks}"
        return f"""\
# CPUs of a process: those of the node with the fewest, divided, in whole cores of two.
cpus=$(tr , '\\n' <<< "${{SLURM_JOB_CPUS_PER_NODE:-1}}" | grep -o '^[0-9]*' | sort -n | head -n 1)
cpus=$((cpus / {self.tasks}))
if [ "$cpus" -ge 2 ]; then cpus=$((cpus - cpus % 2)); else cpus=1; fi"""

    def _check_of_wrapper(self) -> str:
        """Return the lines for a trial of the wrapper on every node."""
        if not self.wrapper:
            return ""
        words = self.wrapped(["spmd", "--version"])
        reason = f"{self.wrapper} spmd --version fails on a node, as above: correct --wrapper"
        return f"""\
if ! srun --ntasks-per-node=1 --ntasks="$SLURM_NNODES"{self._further_options()} \\
  {words} > /dev/null; then
  echo {shlex.quote(f"spmd: {reason}. Nothing was started.")} >&2
  exit 2
fi
"""

    def _step_options(self) -> str:
        """Return the options of `srun`, each after a space."""
        if self.gpus_per_node and self.tasks > 1:
            return f" --gpu-bind=none{self._further_options()}"
        return self._further_options()

    def _further_options(self) -> str:
        return f" {self.srun_options}".rstrip()
