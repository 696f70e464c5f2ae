"""Runs of `spmd train` in processes of their own, one or several, and what they left in their folders."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from spmd.checkpoint.manager import CheckpointManager
from spmd.distributed.local import free_port
from spmd.run.build import make_setup
from spmd.run.config import with_values
from spmd.run.load_config import load_config
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import mesh_of
from spmd.storage.address import locate
from spmd.storage.bucket import Bucket
from spmd.storage.mirror import Mirror
from spmd.training.state import abstract_state

ROOT = Path(__file__).resolve().parent.parent
MIRRORS = []
TINY = """
import dataclasses
import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=dataclasses.replace(PRESETS["test"], vocab=256),
    rules=LLAMA,
    mesh=spmd.MeshShape(data=2, fsdp=-1),
    data=spmd.DataConfig(source=({corpus!r},), sequence=16, batch=8, validation=0.2, cache={cache!r}),
    optimizer=spmd.OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    evaluate=spmd.EvaluationConfig(tokens=256),
    steps=30,
    log_every=1,
    checkpoint_every=5,
    max_to_keep=20,
)
"""
"""A config whose steps take milliseconds; `write_tiny` fills in where its text is."""
PACED = """
import os
import time
from spmd.data.loader import Windows

unpaced = Windows.rows


def paced(self, indices):
    time.sleep(float(os.environ.get("PACE", 0)))
    return unpaced(self, indices)


Windows.rows = paced
"""
"""Lines of a config that takes steps as slowly as the environment says."""
SLOWLY = {"PACE": "0.2"}
"""For a run of thirty steps that a test wants to catch half-way, however late the machine lets the test run: ten steps
a second, because two batches are read at a time."""


def write_tiny(folder, more=""):
    """Writes a corpus and a config into `folder`, with further lines of Python; the config's path."""
    lines = [f"line {n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(400)]
    (folder / "corpus.txt").write_text(
        "\n".join("".join(lines[i : i + 20]) for i in range(0, 400, 20))
    )
    path = folder / "tiny.py"
    path.write_text(
        TINY.format(corpus=str(folder / "corpus.txt"), cache=str(folder / "cache")) + more
    )
    return path


def finish_together(*commands, timeout=400):
    """Runs the processes of a group side by side, at the root of the repository; what each printed. All must exit with
    0. Each is read while all run: one whose pipe is full would wait, and the others for it."""

    def finish(command):
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        patience = threading.Timer(timeout, process.kill)
        patience.start()
        printed = process.communicate()
        patience.cancel()
        return process.returncode, *printed

    with ThreadPoolExecutor(len(commands)) as threads:
        codes, outputs, errors = zip(*threads.map(finish, commands), strict=True)
    assert codes == (0,) * len(commands), [error[-3000:] for error in errors]
    return outputs


def children(process):
    """Numbers of the children of a process, older ones first: of a supervisor, the training process is the first."""
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


class Run:
    """The processes of one run, started at once; killed at the end of the `with` block where they still are.

    Args:
        config: Path of the config.
        out: The run folder; what process i prints goes to `out.i.txt` beside it.
        processes: How many.
        devices: Simulated devices of each.
        arguments: More flags, for all.
        own: More flags, for each.
        host: Where process 0 listens.
        prefixes: What the command of each begins with.
        environment: Further variables; the default is for a run that the test interrupts.
        printed: Path beside which the output goes, if not beside the run folder; that of a run in a bucket goes
            beside the config.
    """

    def __init__(
        self,
        config,
        out,
        *arguments,
        processes=1,
        devices=4,
        own=(),
        host="127.0.0.1",
        prefixes=(),
        environment=SLOWLY,
        printed=None,
    ):
        common = [
            sys.executable,
            "-m",
            "spmd.cli",
            "train",
            config,
            "--out",
            out,
            "--devices",
            devices,
            *arguments,
        ]
        port = free_port()
        self.out, self.printed, self.processes = out, [], []
        for i in range(processes):
            several = [
                "--coordinator",
                f"{host}:{port}",
                "--processes",
                processes,
                "--process-id",
                i,
            ]
            command = [
                *(prefixes[i] if prefixes else []),
                *common,
                *(several if processes > 1 else []),
                *(own[i] if own else []),
            ]
            beside = printed or out
            if isinstance(beside, str):
                beside = config.with_name(beside.replace("/", "-"))
            self.printed.append(beside.with_name(f"{beside.name}.{i}.txt"))
            with self.printed[-1].open("a") as file:
                process = subprocess.Popen(
                    list(map(str, command)),
                    stdout=file,
                    stderr=file,
                    cwd=ROOT,
                    env={**os.environ, **environment},
                )
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def text(self, i=0):
        return self.printed[i].read_text(errors="replace")

    def wait_for_step(self, step, seconds=240):
        """Returns once `step` is among the metrics."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(line["step"] >= step for line in metrics(self.out)):
                return
            assert None in [process.poll() for process in self.processes], self.text()[-3000:]
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached: {self.text()[-3000:]}")

    def codes(self, seconds=300):
        """The exit codes, when all have ended."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]


def train(config, out, *arguments, seconds=300, **options):
    """Runs to the end, within so many seconds; all must exit with 0."""
    with Run(config, out, *arguments, **{"environment": {}, **options}) as run:
        codes = run.codes(seconds)
        assert codes == [0] * len(codes), [run.text(i)[-3000:] for i in range(len(codes))]
    return run


def files(out):
    """The folder with a run's files, which are copied for the rest of the tests if the run is in a bucket."""
    if isinstance(out, Path):
        return out
    mirror = Mirror(Bucket(locate(out)), excluded=("checkpoints/", "lease/", "generations/"))
    mirror.pull()
    MIRRORS.append(mirror)
    return mirror.folder


def saved(out):
    """The steps of a run's checkpoints."""
    return RunDir(locate(out)).checkpoint_steps()


def metrics(out):
    path = RunDir(locate(out)).metrics
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def losses(out):
    """Step → training loss."""
    return {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}


def state(config, out, step, **mesh):
    """The training state of a checkpoint as NumPy arrays, restored onto a mesh of this process's devices."""
    config = with_values(
        load_config(str(config)), {"mesh": {"data": 1, "fsdp": 1, "tensor": 1, **mesh}}
    )
    size = int(np.prod(list(mesh.values()) or [1]))
    setup = make_setup(config, mesh_of(config.mesh, jax.devices()[:size]))
    directory = RunDir(locate(out)).checkpoints
    with CheckpointManager(directory, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(step, abstract_state(setup.plan))
    return jax.tree.map(np.asarray, restored)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
