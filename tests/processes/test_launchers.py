"""Runs that something else starts, for real: a rehearsal, mpirun, and a Slurm that takes its nodes away half-way."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd.run.run_dir import RunDir
from tests.slurm_cluster import missing_programs, slurm_cluster
from tests.train_runs import PACED, SLOWLY, losses, saved, state

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
FLAGS = ("--steps", STEPS, "--checkpoint-every", 20)
CONFIG = """
import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=DecoderConfig(vocab=256, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    rules=LLAMA,
    mesh=spmd.MeshShape(fsdp=2),
    devices=1,
    data=spmd.DataConfig(source=("corpus.txt",), sequence=32, batch=8, cache="cache"),
    evaluate=spmd.EvaluationConfig(tokens=256),
    log_every=1,
)
"""
EXAMPLE = (
    "--mesh.fsdp",
    "2",
    "--devices",
    "1",
    "--steps",
    "3",
    "--optimizer.warmup-steps",
    "1",
    "--data.cache",
    "cache",
    *("--data.sequence", "32", "--evaluate.tokens", "256", "--sample.tokens", "4"),
)
"""How the example is made small."""
TEXT = (
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n" * 240
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config, a corpus, and the command `spmd`, that all runs of this file share."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "corpus.txt").write_text(TEXT)
    (folder / "tiny.py").write_text(CONFIG + PACED)
    (folder / "bin").mkdir()
    program = folder / "bin" / "spmd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m spmd.cli "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def environment(folder, s3_of_session):
    """Where commands find `spmd`, programs that were compiled before, and the server of a bucket."""
    return {
        **os.environ,
        **s3_of_session.environment,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    }


def command(*words):
    return [str(word) for word in words]


def params(folder: Path, out: Path | str):
    """The parameters and the optimizer's state after the last step, on two of this process's devices."""
    after = state(folder / "tiny.py", out, STEPS, fsdp=2)
    return after.params, after.optimizer_state


def wait_for(what: str, condition, seconds: float, describe=lambda: "") -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come in {seconds} s: {describe()}"
        time.sleep(0.1)


def run_by_mpi(folder, environment, out):
    """Train in two processes that mpirun starts and nothing interrupts."""
    absent = missing_programs(("mpirun",))
    assert not absent, "mpirun is not installed; run `make system` as root"
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", 2)
    done = subprocess.run(
        command(*mpirun, "spmd", "train", "tiny.py", "--out", out, *FLAGS),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"done: {STEPS} steps" in done.stdout


@pytest.fixture(scope="module")
def by_mpi(folder, environment):
    """The folder of a run of two processes that mpirun starts."""
    run_by_mpi(folder, environment, folder / "mpi")
    return folder / "mpi"


@pytest.mark.soak
def test_mpirun_trains_as_one_process(folder, environment, by_mpi):
    """Two processes of one device, started by mpirun without a flag, and one of two: the same training."""
    out = folder / "one"
    done = subprocess.run(
        command("spmd", "train", "tiny.py", "--out", out, *FLAGS, "--devices", 2),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = losses(by_mpi), losses(out)
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    assert theirs[STEPS] < theirs[1] - 0.5
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        params(folder, by_mpi),
        params(folder, out),
    )


@pytest.mark.soak
def test_mpirun_trains_into_a_bucket(folder, environment, by_mpi, s3_of_session):
    """Each process writes its part: the run is bitwise that of a disk."""
    out = s3_of_session.address("launched/mpi")
    run_by_mpi(folder, environment, out)
    assert losses(out) == losses(by_mpi)
    jax.tree.map(np.testing.assert_array_equal, params(folder, out), params(folder, by_mpi))


@pytest.mark.soak
def test_rehearsal_ends_when_a_process_is_killed(folder, environment, place):
    """`spmd launch` trains in two processes; one is killed, the other ends too, and the message says which it was."""
    out = place(folder / "rehearsed")
    printed = folder / "rehearsed.txt"
    words = command(
        "spmd",
        "launch",
        "--processes",
        2,
        "--",
        "train",
        "tiny.py",
        "--out",
        out,
        *FLAGS,
        "--devices",
        2,
    )
    with printed.open("w") as file:
        rehearsal = subprocess.Popen(
            words, stdout=file, stderr=file, cwd=folder, env={**environment, **SLOWLY}
        )
    try:
        wait_for("step 3", lambda: len(losses(out)) >= 3 or rehearsal.poll() is not None, 200)
        children = Path(f"/proc/{rehearsal.pid}/task/{rehearsal.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        killed = time.monotonic()
        rehearsal.wait(90)
    finally:
        rehearsal.kill()
    assert rehearsal.returncode == 137
    assert "process 1 ended with signal SIGKILL" in printed.read_text()
    assert time.monotonic() - killed < 60
    assert 3 <= len(losses(out)) < STEPS
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.soak
def test_slurm_takes_the_nodes_and_the_run_goes_on(folder, environment, by_mpi, place):
    """The written script runs on two nodes; preempted, it saves, is requeued and finishes as if never interrupted."""
    out = place(folder / "slurm")
    written = ("--nodes", 2, "--name", "tiny", "--out", out, "--file", "job.sh", "--", *FLAGS)
    subprocess.run(
        command("spmd", "script", "slurm", "tiny.py", *written),
        cwd=folder,
        env=environment,
        check=True,
        timeout=120,
    )
    with cluster_variables(environment, nodes=2) as variables:
        variables.update(SLOWLY)
        job = slurm(variables, folder, "sbatch", "--parsable", "job.sh").strip()
        log = folder / f"tiny-{job}.log"

        def state() -> str:
            shown = slurm(variables, folder, "scontrol", "show", "job", job)
            return " ".join(re.findall(r"(?:JobState|Restarts|ExitCode)=\S+", shown))

        def describe() -> str:
            return f"{state()}\n{log.read_text()[-3000:] if log.exists() else ''}"

        wait_for("step 3", lambda: len(losses(out)) >= 3, 200, describe)
        slurm(variables, folder, "scancel", "--signal=TERM", job)
        wait_for(
            "the queue",
            lambda: "JobState=PENDING" in state() and "Restarts=1" in state(),
            90,
            describe,
        )
        reached = len(losses(out))
        assert 3 <= reached < STEPS
        assert reached in saved(out), "the last step was saved"
        assert "exit code 75" in log.read_text().lower()
        # Slurm lets a requeued job wait for two minutes; nobody needs to.
        slurm(variables, folder, "scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_for(
            "the end", lambda: re.search("JobState=(COMPLETED|FAILED)", state()), 200, describe
        )
        assert "JobState=COMPLETED Restarts=1 ExitCode=0:0" in state(), describe()
    assert f"resuming from step {reached}" in log.read_text()
    assert losses(out) == losses(by_mpi)
    jax.tree.map(np.testing.assert_array_equal, params(folder, out), params(folder, by_mpi))


@pytest.mark.soak
def test_the_example_for_slurm_runs(folder, environment):
    """On two nodes, to its last checkpoint."""
    example = ROOT / "examples" / "slurm_run.sh"
    with cluster_variables(environment, nodes=2) as variables:
        printed = slurm(variables, folder, "sh", str(example), *EXAMPLE, seconds=200)
    assert "runs/own-text/checkpoints/3" in printed


@pytest.mark.soak
def test_slurm_files_start_several_processes_in_a_wrapper_or_nothing(folder, environment):
    """Two processes on each of two whole nodes, in a wrapper, train together.

    The controls end for good, and train nothing: a wrapper that no node has, and GPUs without a driver (Slurm counts
    GPUs that are not there).
    """
    wrapper, wrapped = folder / "contained", folder / "wrapped.txt"
    wrapper.write_text(f'#!/bin/sh\necho "$SLURM_PROCID $2" >> {wrapped}\nexec "$@"\n')
    wrapper.chmod(0o755)
    mesh = ("--steps", 3, "--mesh.fsdp", 4)
    files = {
        "several": ("--processes-per-node", 2, "--wrapper", "./contained", "--", *mesh),
        "no-wrapper": ("--processes-per-node", 2, "--wrapper", "apptainer-x exec", "--", *mesh),
        "no-driver": ("--gpus-per-node", 2, "--", *mesh),
    }
    for name, flags in files.items():
        written = ("--nodes", 2, "--name", name, "--file", f"{name}.sh", *flags)
        subprocess.run(
            command("spmd", "script", "slurm", "tiny.py", *written),
            cwd=folder,
            env=environment,
            check=True,
            timeout=120,
        )
    ended = {}
    with cluster_variables(environment, nodes=2, cpus=4, gpus=2) as variables:
        for name in files:
            submit = ("sbatch", "--parsable", f"{name}.sh")
            job = slurm(variables, folder, *submit).strip()
            wait_for(name, lambda job=job: has_ended(variables, folder, job), 150)
            shown = slurm(variables, folder, "scontrol", "show", "job", job)
            log = (folder / f"{name}-{job}.log").read_text()
            ended[name] = (*re.findall(r"(?:JobState|ExitCode)=(\S+)", shown), log)
    state, code, log = ended["several"]
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert "4 processes" in log
    assert "done: 3 steps" in log
    trained = sorted(line for line in wrapped.read_text().splitlines() if "train" in line)
    assert trained == [f"{process} train" for process in range(4)]
    assert list(losses(folder / "runs" / "several")) == [1, 2, 3]
    for name, sentence in (
        ("no-wrapper", "apptainer-x exec spmd --version fails on a node"),
        ("no-driver", "cuda"),
    ):
        state, code, log = ended[name]
        assert (state, code) == ("FAILED", "2:0"), log
        assert sentence in log
        assert "Traceback" not in log
        assert not RunDir(folder / "runs" / name).has_run


@contextlib.contextmanager
def cluster_variables(environment, **options) -> Iterator[dict[str, str]]:
    """Run a cluster of Slurm; yield the environment in which commands find it."""
    # Slurm's sockets lie deep in its folder, and a path to a socket has at most 108 bytes.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        slurm_cluster(Path(short) / "slurm", **options) as cluster,
    ):
        found = {name: cluster[name] for name in cluster if name.startswith("SLURM")}
        yield {**environment, **found}


def has_ended(environment, folder, job):
    shown = slurm(environment, folder, "scontrol", "show", "job", job)
    return re.search("JobState=(COMPLETED|FAILED)", shown) is not None


def slurm(environment: Mapping[str, str], folder: Path, *words: str, seconds: float = 60) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
