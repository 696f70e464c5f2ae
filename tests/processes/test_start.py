"""Processes start wherever they are: on TPU virtual machines, by torchrun and MPICH, over several networks.

There is no TPU here: each process has a metadata server of its own on loopback and simulated CPU devices, and that its
machine has chips is all that is pretended.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from spmd.cli import main
from spmd.distributed import metadata_server
from spmd.distributed.initialize import EXIT_LOST
from spmd.distributed.local import free_port
from spmd.resilience.preemption import EXIT_PREEMPTED
from tests.metadata_servers import MetadataStub, workers
from tests.networks import ADDRESSES, two_networks
from tests.slurm_cluster import slurm_cluster
from tests.train_runs import PACED, Run, assert_same, children, losses, state, train, write_tiny

ROOT = Path(__file__).resolve().parents[2]
START = """
import os
import sys

import jax

from spmd.distributed import cluster_env
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import exit_process, initialize
from spmd.errors import SpmdError

cluster_env.has_tpu = lambda: True
os.environ.pop("TPU_SKIP_MDS_QUERY")  # JAX sets it where it finds no chips
values = dict(word.split("=") for word in sys.argv[1:])
devices = int(values.pop("devices", 1))
for name in ("processes", "process_id", "start_timeout", "heartbeat"):
    if name in values:
        values[name] = int(values[name])
try:
    initialize(devices, LaunchArgs(**values))
except SpmdError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
said = f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices"
if not devices:
    said += f", GPUs {jax.config.values['jax_cuda_visible_devices']}"
print(said, flush=True)
sys.stdin.read()
"""
FIRST_HOSTS = (f"127.0.{number}.1" for number in range(40, 90))
"""Addresses of process 0 on loopback, so that its fixed port is free on each."""


def start(environment, *values):
    return subprocess.Popen(
        [sys.executable, "-c", START, *values],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@contextlib.contextmanager
def ending(processes):
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finish(processes, seconds=60):
    """What each printed, the first line of its errors and its exit code, once all have started or ended."""
    with ending(processes):
        first = [process.stdout.readline().strip() for process in processes]
        for process in processes:  # each waits for the others when it ends
            process.stdin.close()
            process.stdin = None
        results = []
        for process, line in zip(processes, first, strict=True):
            _, error = process.communicate(timeout=seconds)
            results.append((line, error, process.returncode))
    return results


def one_slice():
    return workers([next(FIRST_HOSTS), "10.0.0.2"])


def two_slices():
    first = next(FIRST_HOSTS)
    said = []
    for number in range(2):
        variables = {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(number),
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first}:8080",
        }
        own = [f"10.{number}.0.{worker}" for worker in range(2)]
        if number == 0:
            own[0] = first
        said += workers(own, variables, old_form=False)
    return said


@pytest.mark.parametrize(
    "make", [one_slice, pytest.param(two_slices, marks=pytest.mark.soak)], ids=["slice", "slices"]
)
def test_one_command_on_all_workers_is_one_run(make):
    """No variable says that they are many, and no flag: each reads its number and where process 0 is."""
    said = make()
    with contextlib.ExitStack() as stack:
        stubs = [stack.enter_context(MetadataStub(values)) for values in said]
        results = finish([start(stub.environment) for stub in stubs])
    count = len(said)
    lines = [f"process {number} of {count}, {count} devices" for number in range(count)]
    assert [line for line, _, _ in results] == lines, results


@pytest.mark.soak
def test_without_the_metadata_server_each_worker_is_alone():
    """The control: so it was for all of them before."""
    with MetadataStub(one_slice()[1]) as stub:
        (result,) = finish([start(stub.environment, "cluster=none")])
        assert result[0] == "process 0 of 1, 1 devices"
        assert stub.asked == []


@pytest.mark.parametrize(
    ("visible", "shares"),
    [
        (("0,1,2,3", "0,1,2,3"), ("0,1", "2,3")),
        pytest.param(("0,1", "2,3"), ("all", "all"), marks=pytest.mark.soak),
    ],
    ids=["same", "own"],
)
def test_processes_that_see_the_same_gpus_share_them(visible, shares):
    """What JAX is told in each of two processes with these visible GPUs; here are none, so all run on CPUs."""
    common = (f"coordinator=127.0.0.1:{free_port()}", "cluster=none", "processes=2", "devices=0")
    started = []
    for number, gpus in enumerate(visible):
        environment = {"CUDA_VISIBLE_DEVICES": gpus, "JAX_PLATFORMS": "cpu"}
        started.append(start(environment, *common, f"process_id={number}"))
    said = [line.partition("GPUs ")[2] for line, _, _ in finish(started)]
    assert tuple(said) == shares


def run_command(arguments, environment, monkeypatch, capsys):
    """`spmd` in this process; its exit code and its errors."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code, capsys.readouterr().err


def test_a_command_on_one_worker_names_the_others(monkeypatch, capsys, tmp_path):
    """`spmd train` on worker 0 alone: the start timeout names the hosts where it was not started."""
    host = next(FIRST_HOSTS)
    said = workers([host, "10.0.0.2", "10.0.0.3"])[0]
    out = tmp_path / "run"
    flags = ("--cluster", "tpu-vm", "--devices", 8, "--start-timeout", 1, "--out", out)
    with MetadataStub(said) as stub:
        code, error = run_command(("train", "demo", *flags), stub.environment, monkeypatch, capsys)
    assert code == 2
    assert f"process 0 listened at {host}:8482 (as tpu-vm says)" in error
    assert "process 1 on 10.0.0.2, process 2 on 10.0.0.3 did not" in error
    assert not out.exists()


def test_a_command_elsewhere_than_on_worker_0_names_it(monkeypatch, capsys):
    """Worker 1 alone: nobody listens on worker 0."""
    said = one_slice()[1]
    flags = ("--cluster", "tpu-vm", "--devices", 8, "--start-timeout", 1)
    with MetadataStub(said) as stub:
        code, error = run_command(("train", "demo", *flags), stub.environment, monkeypatch, capsys)
    assert code == 2
    assert ":8482 (as tpu-vm says) and found no process 0 (Connection refused)" in error


@pytest.mark.parametrize(
    ("environment", "flags", "said"),
    [
        (
            {"GCE_METADATA_HOST": "127.0.0.1:9"},
            ("--cluster", "tpu-vm"),
            "the metadata server 127.0.0.1:9 of this TPU VM does not answer",
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "7",
                "SM_HOSTS": '["a","b","c"]',
                "SM_CURRENT_HOST": "b",
            },
            (),
            "torchrun and sagemaker contradict each other: process 0 of 2, process 1 of 3",
        ),
    ],
    ids=["no-answer", "two-launchers"],
)
def test_bad_input_is_one_sentence_and_starts_nothing(
    environment, flags, said, monkeypatch, capsys, tmp_path
):
    """A metadata server that does not answer, and launchers that contradict each other."""
    monkeypatch.setattr(metadata_server, "_PAUSE", 0.01)
    out = tmp_path / "run"
    code, error = run_command(
        ("train", "demo", "--devices", 8, "--out", out, *flags), environment, monkeypatch, capsys
    )
    assert code == 2
    assert said in error
    assert "Traceback" not in error
    assert not out.exists()


def test_the_others_may_know_process_0_by_another_address():
    """Process 0 is named; a node that resolves the name to another of its networks joins."""
    port = free_port()
    common = ("cluster=none", "processes=2", "start_timeout=20")
    names = (f"coordinator=localhost:{port}", f"coordinator=127.0.0.2:{port}")
    started = [start({}, *common, f"process_id={i}", name) for i, name in enumerate(names)]
    assert [line for line, _, _ in finish(started)] == [
        "process 0 of 2, 2 devices",
        "process 1 of 2, 2 devices",
    ]


@pytest.mark.soak
def test_at_an_address_process_0_listens_at_no_other():
    """The control, and so it was for names before: the connection at another interface is refused."""
    port = free_port()
    common = ("cluster=none", "processes=2", "start_timeout=4")
    names = (f"coordinator=127.0.0.1:{port}", f"coordinator=127.0.0.2:{port}")
    started = [start({}, *common, f"process_id={i}", name) for i, name in enumerate(names)]
    results = finish(started)
    assert [code for _, _, code in results] == [2, 2]
    assert "process 1 did not" in results[0][1]
    assert "found no process 0 (Connection refused)" in results[1][1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config whose run of two processes was not interrupted."""
    folder = tmp_path_factory.mktemp("start")
    write_tiny(folder, PACED)
    train(folder / "tiny.py", folder / "whole", processes=2, devices=2)
    return folder


@pytest.mark.soak
def test_a_notice_in_the_metadata_server_saves_as_sigterm_does(folder):
    """The machine of one of two processes is preempted: both save and exit with 75, and go on bitwise."""
    out = folder / "noticed"
    config = folder / "tiny.py"
    with MetadataStub({"preempted": "FALSE"}) as stub:
        with Run(
            config,
            out,
            *("--resume", "auto"),
            processes=2,
            devices=2,
            environment={"PACE": "0.2", **stub.environment},
        ) as run:
            run.wait_for_step(6)
            stub.set("preempted", "TRUE")
            assert run.codes(120) == [EXIT_PREEMPTED] * 2, run.text()[-3000:]
        reached = max(losses(out))
        assert 6 <= reached < 30
        assert (out / "checkpoints" / str(reached)).is_dir()
        assert "metadata server: preempted is TRUE" in (out / "logs" / "process-1.log").read_text()
    train(config, out, "--resume", "auto", processes=2, devices=2)
    assert losses(out) == losses(folder / "whole")
    assert_same(state(config, out, 30, fsdp=4), state(config, folder / "whole", 30, fsdp=4))


@pytest.mark.soak
def test_a_process_that_is_busy_is_not_taken_for_dead(folder):
    """Stopped for longer than the heartbeat, as one that pins memory or compiles: the run goes on to its end.

    Before, the heartbeat was JAX's own, which such a process does not send, and the others aborted. A watch that counts
    what a process sends would be the control; one that is killed is below.
    """
    out = folder / "busy"
    with Run(folder / "tiny.py", out, "--heartbeat", 5, processes=2, devices=2) as run:
        run.wait_for_step(4)
        stopped = children(run.processes[1].pid)[0]
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(15)
        assert [process.poll() for process in run.processes] == [None, None]
        os.kill(stopped, signal.SIGCONT)
        assert run.codes(120) == [0, 0]
    assert losses(out) == losses(folder / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("dies", [0, 2])
def test_one_that_is_killed_ends_the_others_and_is_named(dies):
    """No collective is under way: the others end within the heartbeat, far before JAX's, and say which it was.

    Without process 0, JAX's coordination service is gone as well, and JAX aborts at once.
    """
    common = (f"coordinator=127.0.0.1:{free_port()}", "cluster=none", "processes=3", "heartbeat=3")
    with ending([start({}, *common, f"process_id={number}") for number in range(3)]) as processes:
        for process in processes:
            assert process.stdout.readline().endswith("of 3, 3 devices\n")
        began = time.monotonic()
        processes[dies].kill()
        for number, process in enumerate(processes):
            code = process.wait(30)
            if number != dies and dies == 0:
                assert code in (EXIT_LOST, -signal.SIGABRT)
            elif number != dies:
                assert code == EXIT_LOST
                assert f"another process is gone, process {dies} on " in process.stderr.read()
        assert time.monotonic() - began < 15


@pytest.mark.soak
def test_a_machine_that_is_gone_ends_the_others(folder):
    """The cable is cut, and no deadline of the watchdog is near: TCP's probes fail, and both end soon.

    A supervisor would wait a minute for the other to come back.
    """
    out, heartbeat = folder / "cut", 10
    flags = ("--heartbeat", heartbeat, "--recovery.no-supervisor")
    with two_networks(folder) as networks:
        where = {"host": ADDRESSES[0], "prefixes": networks.prefixes}
        with Run(folder / "tiny.py", out, *flags, processes=2, devices=2, **where) as run:
            run.wait_for_step(7)
            networks.cut()
            began = time.monotonic()
            codes = run.codes(90)
            assert time.monotonic() - began < 3 * heartbeat
            assert codes == [EXIT_LOST] * 2, (codes, run.text()[-3000:])
            assert "another process is gone, process " in run.text(0) + run.text(1)


def launched(command, folder, out):
    """A launcher's run of two processes with two devices each; its losses."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return losses(out)


@pytest.mark.soak
def test_torchrun_trains_as_two_processes(folder):
    """The real torchrun, whose agent listens at MASTER_PORT itself."""
    out = folder / "torchrun"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2)
    command = ("-m", "spmd.cli", "train", folder / "tiny.py", "--out", out, "--devices", 2)
    assert launched((*torchrun, *command), folder, out) == losses(folder / "whole")


@pytest.mark.soak
def test_mpich_trains_as_two_processes(folder):
    """The real mpiexec of MPICH, from the package `mpich`."""
    mpiexec = Path(sys.executable).with_name("mpiexec.hydra")
    found = shutil.which("mpiexec.hydra") or (mpiexec.is_file() and str(mpiexec))
    assert found, "MPICH is not installed; run `make soak`"
    out = folder / "mpich"
    command = (sys.executable, "-m", "spmd.cli", "train", folder / "tiny.py", "--out", out)
    started = (found, "-n", 2, *command, "--devices", 2)
    assert launched(started, folder, out) == losses(folder / "whole")


@pytest.mark.soak
def test_slurm_names_the_node_of_a_task_that_is_missing(tmp_path):
    """Two nodes with two tasks each on a real Slurm, one of which never starts the command: all others name it."""
    arguments = f"-m spmd.cli train demo --devices 2 --start-timeout 6 --out {tmp_path / 'run'}"
    command = f"test $SLURM_PROCID != 2 || exec sleep 15; exec {sys.executable} {arguments}"
    # Slurm's sockets lie deep in its folder, and a path to a socket has at most 108 bytes.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        slurm_cluster(Path(short) / "slurm", nodes=2) as cluster,
    ):
        environment = {name: value for name, value in cluster.items() if name.startswith("SLURM")}
        done = subprocess.run(
            ["srun", "--overcommit", "-N2", "-n4", "sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
            env={**os.environ, **environment},
            check=False,
        )
    assert done.returncode == 2
    said = "and not all 4 processes connected: process 2 on 127.0.0.2 did not"
    assert done.stderr.count(said) == 3, done.stderr
