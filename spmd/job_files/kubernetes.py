"""JobSets for Kubernetes."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.chips import CHIPS
from spmd.errors import Problem
from spmd.job_files.job import CACHE, RESTARTED, GpuPlatform, Job

_PORT = 7777  # of process 0 in its pod, which has an address of its own
_GROUP = 1000
_TPU = re.compile(r"[-a-z0-9]+:\d+(x\d+)+")
_GPU_RESOURCES: Mapping[str, str] = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
# Amazon's guide to EFA on its Kubernetes service asks for both: libfabric takes huge pages, which
# Kubernetes grants beside a request for memory only.
_EFA_HUGE_PAGES = "5120Mi"
_EFA_MEMORY = "8000Mi"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesJob(Job):
    """JobSet for Kubernetes, as JSON, to submit with kubectl apply -f.

    Flags of `spmd train` follow after `--`. CONFIG and its corpus are read from the volume. Each
    node has one pod, and the pod one process for all GPUs or TPU chips of the node: pods with a
    part of the GPUs would hide them from each other's NCCL, and nothing starts several processes in
    one.
    """

    nodes: int
    """Number of machines."""
    gpus_per_node: int = 0
    """GPUs of each machine."""
    gpu_platform: GpuPlatform = "cuda"
    """Platform of the GPUs."""
    cpus_per_node: int = 0
    """CPUs to request on each machine (0: none)."""
    image: str = ""
    """Container image that has spmd."""
    claim: str = ""
    """PersistentVolumeClaim for the run folder; all pods write to it."""
    mount: str = "/runs"
    """Mount path of that volume: the working folder."""
    tpu: str = ""
    """ACCELERATOR:TOPOLOGY of a TPU slice, such as tpu-v5-lite-podslice:4x4."""
    efa: int = 0
    """Elastic Fabric Adapters of each machine, of Amazon's cloud."""

    @property
    def processes(self) -> int:
        """Number of processes of the run: one for each node."""
        return self.nodes

    @property
    def chips(self) -> int:
        """Number of TPU chips of all nodes; 0 if there are none."""
        if not self.tpu:
            return 0
        _, _, topology = self.tpu.partition(":")
        return math.prod(map(int, topology.split("x")))

    @property
    def devices(self) -> int:
        """Number of GPUs, or of TPU devices; 0 if there are none."""
        if self.tpu:
            return self.chips * self._devices_per_chip()
        return self.nodes * self.gpus_per_node

    def _devices_per_chip(self) -> int:
        accelerator, _, _ = self.tpu.partition(":")
        for chip in CHIPS.values():
            if chip.cloud is not None and chip.cloud.gke == accelerator:
                return chip.devices
        return 1

    @property
    def platform(self) -> str:
        """Platform of the devices; CPUs without GPUs and TPU."""
        if self.tpu:
            return "tpu"
        if self.gpus_per_node:
            return self.gpu_platform
        return "cpu"

    def _rules(self) -> dict[str, str]:
        rules = dict.fromkeys(("gpus_per_node", "cpus_per_node", "efa"), "at least 0")
        return {**super()._rules(), "nodes": "at least 1", **rules}

    def problems(self) -> list[Problem]:
        """Return the problems of the options."""
        problems = super().problems()
        for field in ("image", "claim"):
            if not getattr(self, field):
                problems.append(Problem(field, "is missing", fix=f"--{field} {field.upper()}"))
        if not self.mount.startswith("/"):
            what = f"{self.mount!r} is not an absolute path"
            problems.append(Problem("mount", what, fix="such as /runs"))
        return problems + self._tpu_problems()

    def _tpu_problems(self) -> list[Problem]:
        if not self.tpu:
            return []
        if not _TPU.fullmatch(self.tpu):
            what = f"{self.tpu!r} is not ACCELERATOR:TOPOLOGY"
            return [Problem("tpu", what, fix="such as tpu-v5-lite-podslice:4x4")]
        problems: list[Problem] = []
        for field in ("gpus_per_node", "efa"):
            if getattr(self, field):
                problems.append(Problem(field, "and tpu exclude each other"))
        if self.nodes > 0 and self.chips % self.nodes:
            detail = f"{self.chips} / {self.nodes}"
            problems.append(
                Problem("tpu", "does not divide over the processes", detail, "other --nodes")
            )
        return problems

    def launch_flags(self) -> dict[str, str]:
        """Return the values of `LaunchArgs` of a pod, with the address of the first one.

        A single pod has none.
        """
        flags = {**super().launch_flags(), "cluster": "none"}
        if self.processes > 1:
            flags["coordinator"] = f"{self.name}-workers-0-0.{self.name}:{_PORT}"
            flags["processes"] = str(self.processes)
            flags["process_id"] = "$(PROCESS_ID)"
        return flags

    def render(self, train: Sequence[str]) -> str:
        """Return the manifest as JSON, and so as YAML."""
        return json.dumps(self.manifest(train), indent=2, ensure_ascii=False) + "\n"

    def manifest(self, train: Sequence[str]) -> dict[str, Any]:
        """Return the JobSet (jobset.x-k8s.io/v1alpha2): one indexed Job.

        Its pods have stable names.
        """
        # A Job that fails by its pod failure policy had an exit code to restart after, and the run
        # counts restarts without progress; any other failure is final.
        restart = [
            {
                "name": "restart",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
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
                "failurePolicy": {"rules": restart},
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
        """Return the pod's spec: one container, the volume of the run folder, and shared memory."""
        node_selector = dict[str, str]()
        if self.tpu:
            accelerator, topology = self.tpu.split(":")
            node_selector["cloud.google.com/gke-tpu-accelerator"] = accelerator
            node_selector["cloud.google.com/gke-tpu-topology"] = topology
        runs = {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}
        # Containers get 64 MiB; NCCL and loaders with processes of their own need more.
        shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.save_seconds,
            # The user of the image (Containerfile) is not root, as the owner of a new volume is.
            "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [self._container(train)],
            "volumes": [runs, shared_memory],
            "nodeSelector": node_selector,
        }

    def _container(self, train: Sequence[str]) -> dict[str, Any]:
        """Return the container of a pod: one process, with all devices of its node."""
        return {
            "name": "spmd",
            "image": self.image,
            "command": self._container_command(train),
            "workingDir": self.mount,
            "env": self._environment(),
            "ports": [{"containerPort": _PORT, "name": "coordinator"}],
            "volumeMounts": [
                {"name": "runs", "mountPath": self.mount},
                {"name": "shared-memory", "mountPath": "/dev/shm"},
            ],
            "resources": self._resources(),
        }

    def _resources(self) -> dict[str, dict[str, int | str]]:
        """Return the requests and limits of a pod; extended resources are limits."""
        limits = dict[str, int | str]()
        requests = dict[str, int | str]()
        if self.tpu:
            limits["google.com/tpu"] = self.chips // self.nodes
        elif self.gpus_per_node:
            limits[_GPU_RESOURCES[self.gpu_platform]] = self.gpus_per_node
        if self.efa:
            limits["vpc.amazonaws.com/efa"] = self.efa
            limits["hugepages-2Mi"] = _EFA_HUGE_PAGES
            requests["memory"] = _EFA_MEMORY
        if self.cpus_per_node:
            requests["cpu"] = self.cpus_per_node
        return {"limits": limits, "requests": requests}

    def _container_command(self, train: Sequence[str]) -> list[str]:
        command = self.command(train)
        if self.setup:
            return ["bash", "-c", f'{self.setup}; exec "$@"', "bash", *command]
        return command

    def _environment(self) -> list[dict[str, Any]]:
        """Return the variables of a pod: cache, and number of the process."""
        cache = f"{self.mount.rstrip('/')}/{CACHE}"
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        return [
            {"name": "JAX_COMPILATION_CACHE_DIR", "value": cache},
            {"name": "PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
