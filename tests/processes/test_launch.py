"""Processes meet at one address of one interface, leave so that the others notice, and are rehearsed together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd.cli import main
from spmd.distributed import coordinator
from spmd.distributed import initialize as distributed
from spmd.distributed import local as rehearsal
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.launchers import ProcessGroup
from spmd.distributed.local import free_port, launch_local, process_commands
from spmd.errors import ConfigError


def test_a_free_port_is_one_that_no_connection_is_given(monkeypatch):
    """It is below those of connections, and not one that something listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        monkeypatch.setattr(rehearsal, "_PORTS", range(port, port + 2))
        assert free_port() == port + 1
        monkeypatch.setattr(rehearsal, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"every port of {port} to {port}"):
            free_port()


def group(address, source="--coordinator"):
    return ProcessGroup(2, 0, address, source)


def where(group):
    """Where process 0 listens, and the address for JAX."""
    listener, address = coordinator.listen(group)
    with listener:
        return listener.getsockname()[0], address


def test_process_0_listens_at_the_named_interface():
    """At an address it listens there; at a name on all interfaces, as the others may know it by another address."""
    port = free_port()
    for host in ("127.0.0.1", "127.0.0.3"):
        assert where(group(f"{host}:{port}")) == (host, f"{host}:{port}")
    for source in ("--coordinator", "slurm"):
        assert where(group(f"localhost:{port}", source)) in (("::", None), ("0.0.0.0", None))


def test_an_address_that_is_not_here_or_in_use_is_refused():
    """Process 0 says what is wrong with its address before JAX fails at it."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77:9 .*Cannot assign") as caught:
        coordinator.listen(group("192.0.2.77:9", "slurm"))
    assert "as slurm says" in str(caught.value)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            coordinator.listen(group(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_an_unknown_name_is_waited_for_and_refused(monkeypatch):
    """A name may appear late, as a pod's does; one that never does is an error that names it."""
    answers = [socket.gaierror(-2, "unknown"), [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]]

    def getaddrinfo(*arguments, **options):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    port = free_port()
    assert where(group(f"late:{port}"))[1] is None
    monkeypatch.setattr(coordinator, "_DNS_TIMEOUT", -1)
    answers.append(socket.gaierror(-2, "unknown"))
    with pytest.raises(ConfigError, match="the name never has no address"):
        coordinator.listen(group(f"never:{port}"))


def python(program, *arguments):
    return [sys.executable, "-c", program, *map(str, arguments)]


JOIN = """
import sys
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import exit_process, initialize
from spmd.errors import SpmdError

address, process_id, seconds = sys.argv[1:]
launch_args = LaunchArgs(address, 2, int(process_id), "none", start_timeout=int(seconds))
try:
    initialize(1, launch_args)
except SpmdError as error:
    sys.exit(f"spmd: {error}")
print("met", flush=True)
if process_id == "1":
    raise KeyError("a bug")
sys.stdin.read()  # until the test has seen the other's end: without this one's coordinator, that would be another
exit_process(7)
"""


@pytest.mark.soak
@pytest.mark.parametrize("process_id", [0, 1])
def test_processes_that_wait_in_vain_say_where(process_id):
    """Without the other process, each ends by itself and says which address was tried, and for how long."""
    address = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    done = subprocess.run(
        python(JOIN, address, process_id, 2),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("spmd: The processes cannot connect:")
    assert address in done.stderr
    assert "2 s have passed" in done.stderr
    said = ["found no process 0 (Connection refused)", "not all 2 processes connected: process 1"]
    assert said[process_id == 0] in done.stderr
    assert time.monotonic() - began < 40


@pytest.mark.soak
def test_leaving_waits_for_nobody():
    """Two processes meet, past any proxy, and after an error each is gone at once with its code.

    JAX's own way out waits for both.
    """
    address = f"127.0.0.1:{free_port()}"
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": "x.invalid"}
    processes = [
        subprocess.Popen(python(JOIN, address, i, 60), env=environment, **pipes) for i in range(2)
    ]
    try:
        # Longer than they wait for each other, so that a failure says why.
        (second_output, second_error) = processes[1].communicate(timeout=100)
        processes[0].communicate(timeout=20)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1].returncode == 1, second_error
    assert second_output == "met\n"
    assert "KeyError: 'a bug'" in second_error
    assert processes[0].returncode == 7


def test_alone_leave_is_exit():
    """A process that trains alone ends in the usual way."""
    with pytest.raises(SystemExit) as caught:
        distributed.exit_process(3)
    assert caught.value.code == 3


SAY = """
import sys
print("out of", sys.argv[1])
print("err of", sys.argv[1], file=sys.stderr)
"""


def test_rehearsal_passes_on_what_processes_say(capfd):
    """Process 0 speaks for itself; the lines of the others carry their number, on stderr."""
    assert launch_local([python(SAY, i) for i in range(3)], grace=5) == 0
    captured = capfd.readouterr()
    assert captured.out == "out of 0\n"
    lines = set(captured.err.splitlines())
    assert lines == {
        "err of 0",
        *(f"[{i}] {kind} of {i}" for i in (1, 2) for kind in ("out", "err")),
    }


END = """
import os, signal, sys, time
mode, seconds = sys.argv[1], float(sys.argv[2])
time.sleep(seconds)
if mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(mode))
"""


@pytest.mark.parametrize(
    ("endings", "code", "says"),
    [
        (
            (("0", 0), ("3", 0.5), ("0", 60)),
            3,
            ["process 1 ended with exit code 3", "stopped process 2"],
        ),
        (
            (("0", 60), ("kill", 0)),
            137,
            ["process 1 ended with signal SIGKILL", "stopped process 0"],
        ),
        pytest.param(
            (("4", 4), ("5", 0)), 5, ["process 1 ended with exit code 5"], marks=pytest.mark.soak
        ),
        ((("0", 0), ("0", 0.2)), 0, []),
    ],
    ids=["exit-code", "signal", "both-fail", "none-fails"],
)
def test_rehearsal_shares_one_fate(endings, code, says, capfd):
    """The first failure is named, gives the exit code, and after a while ends the others; ends without one do not."""
    began = time.monotonic()
    grace = 1.5 if len(says) > 1 else 30  # long enough for those that end by themselves
    assert launch_local([python(END, *ending) for ending in endings], grace=grace) == code
    assert time.monotonic() - began < 45
    error = capfd.readouterr().err
    assert [line for line in says if line not in error] == []
    assert ("ended with" in error, "stopped" in error) == (bool(says), len(says) > 1)


WAIT = """
import pathlib, signal, sys, time
signal.signal(int(sys.argv[1]), lambda number, frame: sys.exit(40 + number))
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def default_hang_up():
    """A hang-up is not ignored, also if `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


FORWARDED = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("number", FORWARDED)
def test_rehearsal_forwards_signals(number, tmp_path, capfd):
    """A signal that the rehearsal gets is sent to all processes, and its own handlers are as before afterwards."""
    ready = [tmp_path / str(i) for i in range(3)]

    def send():
        while not all(path.exists() for path in ready):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert (
        launch_local([python(WAIT, int(number), path) for path in ready], grace=20) == 40 + number
    )
    thread.join(10)
    assert "stopped" not in capfd.readouterr().err, "all three ended by themselves"
    assert signal.getsignal(number) == before


def test_rehearsal_ends_at_once_at_sigint(tmp_path):
    """All processes are killed, also those that ignore it, and the caller gets `KeyboardInterrupt`."""
    ready = [tmp_path / str(i) for i in range(2)]
    ignoring = (
        "import os, pathlib, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    )
    ignoring += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    before, sent = signal.getsignal(signal.SIGINT), []

    def send():
        while not all(path.exists() and path.read_text() for path in ready):
            time.sleep(0.05)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch_local([python(ignoring, path) for path in ready], grace=60)
    assert time.monotonic() - sent[0] < 5
    thread.join(10)
    for path in ready:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert signal.getsignal(signal.SIGINT) == before


def test_process_commands():
    """Each process of a rehearsal is told the same, and its own number."""
    commands = process_commands(["train", "tiny.py", "--zero", "1"], 2, 4, 7777)
    assert [command[-1] for command in commands] == ["0", "1"]
    assert commands[0][:-1] == commands[1][:-1]
    flags = commands[0][commands[0].index("train") :]
    assert flags[:4] == ["train", "tiny.py", "--zero", "1"]
    assert dict(zip(flags[4::2], flags[5::2], strict=True)) == {
        "--devices": "4",
        "--cluster": "none",
        "--coordinator": "127.0.0.1:7777",
        "--processes": "2",
        "--process-id": "0",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "2"], "there is no command"),
        (["--processes", "2", "--", "search", "demo"], "'search' cannot be launched"),
        (["--processes", "1", "--", "train", "demo"], "processes: is 1"),
        (["--processes", "3", "--", "train", "demo"], "8 / 3 = 2.66667"),
        (["--processes", "2", "--", "train", "demo", "--process-id", "0"], "train --process-id"),
        (["--processes", "2", "--", "train", "nodemo"], "nodemo"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(arguments, said, capsys):
    """Only a run can be rehearsed, in a number of processes that its devices divide over."""
    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_detection_reads_this_environment(monkeypatch):
    """`initialize` finds a contradiction between the flags and the variables of this process, before JAX does."""
    for name, value in {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert os.environ["OMPI_COMM_WORLD_SIZE"] == "2"
    with pytest.raises(ConfigError, match="is 4, but openmpi says 2"):
        distributed.initialize(8, LaunchArgs(processes=4))
    distributed.initialize(8)  # other commands than train take no notice
