"""Job files for clusters: a batch file for Slurm, a JobSet for Kubernetes.

Both train until the last step. After a preemption, a lost node or another exit code in `RESTARTED`,
all processes start again with `--resume auto`; any other failure ends the job. All nodes and
restarts share a compilation cache.

Under Slurm the exit code of the job is that of `srun`: the highest of its processes. If one process
ends with a final code, 1 or 2, and the others then with 69 or 134, the job is requeued and fails
again, up to `restarts` times.
"""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

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

_PORT = 7777  # of process 0 in its pod, which has an address of its own
_CACHE = "compiled"  # in the working folder
# Kubernetes' names, and short enough for names of pods
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?")
_TPU = re.compile(r"[-a-z0-9]+:\d+(x\d+)+")


@dataclasses.dataclass(frozen=True)
class Job:
    """Options of every job file."""

    nodes: int
    """Number of machines."""
    processes_per_node: int = 1
    """Processes on each machine; one serves all of its GPUs or TPU chips."""
    gpus_per_node: int = 0
    """GPUs of each machine."""
    cpus_per_process: int = 0
    """CPU cores of each process (0: the cluster's default, which may be one)."""
    name: str = ""
    """Name of the job; by default that of the config."""
    out: str = ""
    """Run folder, shared by all machines; runs/CONFIG by default."""
    save_seconds: int = 120
    """Seconds from the preemption signal to the end of a process, to save a checkpoint."""
    restarts: int = 50
    """Maximum number of restarts of all processes."""
    setup: str = ""
    """Shell line that runs first, such as "source .venv/bin/activate"."""
    file: str = ""
    """Write to this file instead of the terminal."""

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return self.nodes * self.processes_per_node

    @property
    def devices(self) -> int:
        """Number of accelerators of all nodes; 0 if there are none."""
        return self.nodes * self.gpus_per_node

    @property
    def platform(self) -> str:
        """Platform of the variables to set at start-up; for TPUs there are none."""
        return "cuda" if self.gpus_per_node else "cpu"

    def problems(self) -> list[Problem]:
        """Return the problems of the options."""
        rules = {
            "nodes": "at least 1",
            "processes_per_node": "at least 1",
            "gpus_per_node": "at least 0",
            "cpus_per_process": "at least 0",
            "save_seconds": "at least 1",
            "restarts": "at least 0",
        }
        problems = check_fields(self, rules)
        if not problems and self.gpus_per_node % self.processes_per_node:
            what = "does not divide over the processes of a node"
            detail = f"{self.gpus_per_node} / {self.processes_per_node}"
            problems.append(Problem("gpus_per_node", what, detail))
        if not _NAME.fullmatch(self.name):
            fix = "at most 41 lowercase letters, digits and dashes, and a letter first: --name"
            problems.append(Problem("name", f"{self.name!r} is not a valid name of a job", fix=fix))
        return problems

    def command(self, train: Sequence[str]) -> list[str]:
        """Return the command of each process; `train` is the config and flags of `spmd train`."""
        return ["spmd", "train", *train, "--out", self.out, "--resume", "auto"]


@dataclasses.dataclass(frozen=True)
class SlurmJob(Job):
    """Batch file for Slurm, to submit with sbatch in a folder on a shared file system.

    Flags of `spmd train` follow after `--`. The config is planned for all devices first, so that an
    error shows now and not after the queue.
    """

    time: str = ""
    """Time limit, such as 1-00:00:00; the job is requeued until the run is done."""
    partition: str = ""
    """Partition of the cluster."""
    account: str = ""
    """Account to charge."""

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
export JAX_COMPILATION_CACHE_DIR="$SLURM_SUBMIT_DIR/{_CACHE}"
{about_signals}
srun --kill-on-bad-exit=0 --wait=60{self._step_options()} \\
  {shlex.join(self.command(train))}
status=$?

restarts=${{SLURM_RESTART_COUNT:-0}}
case "$status" in {" | ".join(map(str, RESTARTED))})
  if [ "$restarts" -lt {self.restarts} ]; then
    echo "exit code $status: requeued, after $restarts restarts of at most {self.restarts}"
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
esac
exit "$status"
"""

    def _options(self) -> str:
        """Return the lines of the job's options."""
        options = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.processes_per_node,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_process,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }
        return "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value)

    def _step_options(self) -> str:
        """Return the options of `srun`, each after a space."""
        options = ""
        if self.cpus_per_process:  # a step does not inherit the job's CPUs
            options += f" --cpus-per-task={self.cpus_per_process}"
        if self.gpus_per_node and self.processes_per_node > 1:
            # Several tasks on a node divide the GPUs; a single one sees all.
            options += f" --gpus-per-task={self.gpus_per_node // self.processes_per_node}"
        return options


@dataclasses.dataclass(frozen=True)
class KubernetesJob(Job):
    """JobSet for Kubernetes, as JSON, to submit with kubectl apply -f.

    Flags of `spmd train` follow after `--`. CONFIG and its corpus are read from the volume.
    """

    image: str = ""
    """Container image that has spmd."""
    claim: str = ""
    """PersistentVolumeClaim for the run folder; all pods write to it."""
    mount: str = "/runs"
    """Mount path of that volume: the working folder."""
    tpu: str = ""
    """ACCELERATOR:TOPOLOGY of a TPU slice, such as tpu-v5-lite-podslice:4x4."""

    @property
    def devices(self) -> int:
        """Number of TPU chips or GPUs; 0 if there are none."""
        if not self.tpu:
            return super().devices
        _, _, topology = self.tpu.partition(":")
        chips = math.prod(map(int, topology.split("x")))
        return chips or super().devices

    def problems(self) -> list[Problem]:
        """Return the problems of the options."""
        problems = super().problems()
        for field in ("image", "claim"):
            if not getattr(self, field):
                problems.append(Problem(field, "is missing", fix=f"--{field} {field.upper()}"))
        if not self.mount.startswith("/"):
            what = f"{self.mount!r} is not an absolute path"
            problems.append(Problem("mount", what, fix="such as /runs"))
        if self.tpu and not _TPU.fullmatch(self.tpu):
            what = f"{self.tpu!r} is not ACCELERATOR:TOPOLOGY"
            problems.append(Problem("tpu", what, fix="such as tpu-v5-lite-podslice:4x4"))
        elif self.tpu and self.gpus_per_node:
            problems.append(Problem("gpus_per_node", "and tpu exclude each other"))
        elif self.tpu and self.processes > 0 and self.devices % self.processes:
            detail = f"{self.devices} / {self.processes}"
            problems.append(
                Problem("tpu", "does not divide over the processes", detail, "other --nodes")
            )
        return problems

    def render(self, train: Sequence[str]) -> str:
        """Return the manifest as JSON, and so as YAML."""
        return json.dumps(self.manifest(train), indent=2, ensure_ascii=False) + "\n"

    def manifest(self, train: Sequence[str]) -> dict[str, Any]:
        """Return the JobSet (jobset.x-k8s.io/v1alpha2): one indexed Job.

        Its pods have stable names.
        """
        # A Job that fails by its pod failure policy had an exit code to restart after; any other
        # failure is final.
        restart = [
            {
                "name": "restart",
                "action": "RestartJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
            {"name": "fail", "action": "FailJobSet"},
        ]
        job = {"name": "workers", "replicas": 1, "template": {"spec": self._job(train)}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {
                "network": {
                    "enableDNSHostnames": True,
                    "subdomain": self.name,
                    "publishNotReadyAddresses": True,
                },
                "failurePolicy": {"maxRestarts": self.restarts, "rules": restart},
                "replicatedJobs": [job],
            },
        }

    def _job(self, train: Sequence[str]) -> dict[str, Any]:
        """Return the Job's spec: it fails at once, and the JobSet restarts all of its pods."""
        codes = {"containerName": "spmd", "operator": "In", "values": sorted(RESTARTED)}
        node_lost = [{"type": "DisruptionTarget", "status": "True"}]
        failures = [
            {"action": "FailJob", "onExitCodes": codes},
            {"action": "FailJob", "onPodConditions": node_lost},
        ]
        return {
            "completionMode": "Indexed",
            "completions": self.processes,
            "parallelism": self.processes,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": failures},
            "template": {"spec": self._pod(train)},
        }

    def _pod(self, train: Sequence[str]) -> dict[str, Any]:
        """Return the pod's spec: one container, with the volume of the run folder."""
        node_selector = dict[str, str]()
        if self.tpu:
            accelerator, topology = self.tpu.split(":")
            node_selector["cloud.google.com/gke-tpu-accelerator"] = accelerator
            node_selector["cloud.google.com/gke-tpu-topology"] = topology
        volume = {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.save_seconds,
            "containers": [self._container(train)],
            "volumes": [volume],
            "nodeSelector": node_selector,
        }

    def _container(self, train: Sequence[str]) -> dict[str, Any]:
        """Return the container of a pod: one process, with its share of the devices."""
        limits = dict[str, int]()
        if self.devices:
            kind = "google.com/tpu" if self.tpu else "nvidia.com/gpu"
            limits[kind] = self.devices // self.processes
        requests = dict[str, int]()
        if self.cpus_per_process:
            requests["cpu"] = self.cpus_per_process
        return {
            "name": "spmd",
            "image": self.image,
            "command": self._container_command(train),
            "workingDir": self.mount,
            "env": self._environment(),
            "ports": [{"containerPort": _PORT, "name": "coordinator"}],
            "volumeMounts": [{"name": "runs", "mountPath": self.mount}],
            "resources": {"limits": limits, "requests": requests},
        }

    def _container_command(self, train: Sequence[str]) -> list[str]:
        """Return the command of a pod, with the address of the first one if there are several."""
        command = [*self.command(train), "--cluster", "none"]
        if self.processes > 1:
            command += ["--coordinator", f"{self.name}-workers-0-0.{self.name}:{_PORT}"]
            command += ["--processes", str(self.processes)]
            command += ["--process-id", "$(PROCESS_ID)"]
        if self.setup:
            return ["bash", "-c", f'{self.setup}; exec "$@"', "bash", *command]
        return command

    def _environment(self) -> list[dict[str, Any]]:
        """Return the variables of a pod: cache, number of the process, and the platform's."""
        cache = f"{self.mount.rstrip('/')}/{_CACHE}"
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        return [
            {"name": "JAX_COMPILATION_CACHE_DIR", "value": cache},
            {"name": "PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
