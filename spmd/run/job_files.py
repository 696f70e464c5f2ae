"""Files that start a run on a cluster: a batch file for Slurm, a JobSet for Kubernetes.

Both train until the run is done: after what a run can recover from, such as being told to go or a lost node, all
processes are started again with `--resume auto`; any other failure ends the job. What is compiled is kept in a folder
that all nodes and restarts share.

Under Slurm the job goes by the highest exit code of its processes, which is all that `srun` returns. Where one of them
ends with a final code, 1 or 2, and the others then with 69 or 134 because it was gone, the job goes back into the queue
and fails the same way again, until `restarts` are used up.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.distributed.initialize import EXIT_LOST
from spmd.distributed.xla_flags import START_UP, exports
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.resilience.watchdog import EXIT_HUNG

COORDINATOR_PORT = 7777
"""Where process 0 listens in a pod, which has an address of its own."""

COMPILED = "compiled"
"""The folder, in the working folder, where compiled programs are kept."""

WORKERS = "workers"
"""What a JobSet calls its only group of pods."""

RESTARTED = {
    EXIT_LOST: "the runtime failed, mostly because another process was gone",
    EXIT_HUNG: "nothing finished within its deadline",
    EXIT_PREEMPTED: "told to go, after a checkpoint",
    134: "ended by JAX, because another process was gone",
    137: "killed: out of memory, or its node went away",
    138: "told to go by SIGUSR1 while it was starting",
    143: "told to go by SIGTERM while it was starting",
}
"""The exit codes after which all processes are started again; any other is final. Slurm's own care is for its nodes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is run, and on how much of a cluster.

    Attributes:
        train: What follows `spmd train`: the config and flags.
        out: The run folder.
        name: What the job is called.
        nodes: How many machines.
        processes_per_node: Processes on each; on GPUs and TPUs one for a whole machine is usual.
        gpus_per_node: GPUs that each machine gives, 0 for none.
        cpus_per_process: CPU cores of each process, 0 for the cluster's default.
        save_seconds: How long before the end a process is told to go, to save.
        restarts: How often all processes are started again, at most.
        setup: A line of shell that comes first; may be empty.
    """

    train: tuple[str, ...]
    out: str
    name: str
    nodes: int
    processes_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_process: int = 0
    save_seconds: int = 120
    restarts: int = 50
    setup: str = ""

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return self.nodes * self.processes_per_node

    @property
    def platform(self) -> str:
        """`"cuda"` where machines give GPUs, otherwise `"cpu"`; a TPU needs nothing at start-up."""
        return "cuda" if self.gpus_per_node else "cpu"

    @property
    def arguments(self) -> list[str]:
        """The command of each process."""
        return ["spmd", "train", *self.train, "--out", self.out, "--resume", "auto"]


def slurm_script(job: Job, *, time: str = "", partition: str = "", account: str = "") -> str:
    """A batch file for `sbatch`.

    Args:
        job: What is run.
        time: The limit of the job, as Slurm writes it.
        partition: Where it runs; empty for the default.
        account: Who pays; empty for the default.
    """
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes_per_node,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_process,
        "time": time,
        "partition": partition,
        "account": account,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{job.save_seconds}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    # A step does not take over the job's CPUs. With several tasks on a node, Slurm deals the GPUs out; one sees all.
    step = ["--kill-on-bad-exit=0", "--wait=60"]
    step += [f"--cpus-per-task={job.cpus_per_process}"] if job.cpus_per_process else []
    if job.gpus_per_node and job.processes_per_node > 1:
        step.append(f"--gpus-per-task={job.gpus_per_node // job.processes_per_node}")
    return f"""\
#!/bin/bash
{chr(10).join(lines)}
#SBATCH --requeue

{job.setup or "# The environment is that of the shell where sbatch is called: activate the one that has spmd."}
export JAX_COMPILATION_CACHE_DIR="$SLURM_SUBMIT_DIR/{COMPILED}"
{exports(job.platform)}
# {job.save_seconds} s before the time is up, and when the job is preempted, Slurm signals the processes: they save and
# exit with {EXIT_PREEMPTED}. One that exits must not have the others killed, for they may still be saving; after a
# minute they are.
srun {" ".join(step)} \\
  {shlex.join(job.arguments)}
status=$?

restarts=${{SLURM_RESTART_COUNT:-0}}
case "$status" in {" | ".join(map(str, RESTARTED))})
  if [ "$restarts" -lt {job.restarts} ]; then
    echo "exit code $status: back into the queue, after $restarts restarts of at most {job.restarts}"
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
esac
exit "$status"
"""


def jobset_manifest(job: Job, *, image: str, claim: str, mount: str, tpu: str = "") -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2): one indexed Job, whose pods have names, an order and one fate.

    Args:
        job: What is run.
        image: The container image, which has spmd.
        claim: The PersistentVolumeClaim that all pods write the run folder to.
        mount: Where it is in a pod; the processes' working folder.
        tpu: ACCELERATOR:TOPOLOGY of a slice, as Google Kubernetes Engine names them; empty for no TPU.
    """
    index = "batch.kubernetes.io/job-completion-index"
    together = ["--coordinator", f"{job.name}-{WORKERS}-0-0.{job.name}:{COORDINATOR_PORT}"]
    together += ["--processes", str(job.processes), "--process-id", "$(PROCESS_ID)"]
    command = [*job.arguments, "--cluster", "none", *(together if job.processes > 1 else [])]
    if job.setup:
        command = ["bash", "-c", f'{job.setup}; exec "$@"', "bash", *command]
    container: dict[str, Any] = {
        "name": "spmd",
        "image": image,
        "command": command,
        "workingDir": mount,
        "env": [
            {"name": "JAX_COMPILATION_CACHE_DIR", "value": f"{mount.rstrip('/')}/{COMPILED}"},
            {"name": "PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{index}']"}}},
            *({"name": flag.name, "value": str(flag.value)} for flag in START_UP[job.platform]),
        ],
        "ports": [{"containerPort": COORDINATOR_PORT, "name": "coordinator"}],
        "volumeMounts": [{"name": "runs", "mountPath": mount}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.save_seconds,
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}],
    }
    chips = {"nvidia.com/gpu": job.gpus_per_node // job.processes_per_node} if job.gpus_per_node else {}
    if tpu:
        accelerator, topology = tpu.split(":")
        chips = {"google.com/tpu": topology_chips(topology) // job.processes}
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": topology,
        }
    requests = {"cpu": job.cpus_per_process} if job.cpus_per_process else {}
    resources = {"limits": chips, "requests": requests}
    if chips or requests:
        container["resources"] = {name: amounts for name, amounts in resources.items() if amounts}
    codes = {"containerName": "spmd", "operator": "In", "values": sorted(RESTARTED)}
    restart = {"action": "FailJob", "onExitCodes": codes}
    gone = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    indexed = {
        "completionMode": "Indexed",
        "completions": job.processes,
        "parallelism": job.processes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [restart, gone]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": job.restarts,
                # A Job that fails by its own policy had a process that may start again; any other failure is final.
                "rules": [
                    {"name": "startAgain", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                    {"name": "giveUp", "action": "FailJobSet"},
                ],
            },
            "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": indexed}}],
        },
    }


def topology_chips(topology: str) -> int:
    """How many chips a topology has.

    Raises:
        ValueError: It is not written as sizes with `x` between them.

    Example:
        >>> topology_chips("4x4"), topology_chips("2x2x4")
        (16, 16)
    """
    chips = 1
    for size in topology.split("x"):
        chips *= int(size)
    return chips


def to_yaml(value: Any, indent: int = 0) -> str:
    """Mappings, lists, texts, numbers and truth values as YAML; texts are quoted as in JSON, which YAML reads.

    Example:
        >>> print(to_yaml({"name": "demo", "values": [1, {"a": True, "b": []}]}), end="")
        name: "demo"
        values:
          - 1
          - a: true
            b: []
    """
    if isinstance(value, Mapping) and value:
        return "".join(f"{' ' * indent}{name}:{_after(entry, indent)}" for name, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        items = (to_yaml(entry, indent + 2) for entry in value)
        return "".join(f"{' ' * indent}- {item[indent + 2 :]}" for item in items)
    return f"{' ' * indent}{json.dumps(value)}\n"


def _after(value: Any, indent: int) -> str:
    nested = isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value
    return f"\n{to_yaml(value, indent + 2)}" if nested else f" {json.dumps(value)}\n"
