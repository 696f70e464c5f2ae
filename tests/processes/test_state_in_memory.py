"""A supervised run of four processes is killed again and again, in parts and as a whole host.

Each kill is a real signal to real `spmd train` processes. What is left goes on by itself; what is
gone is started again with the same command, as a cluster does.
"""

import collections
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd.distributed.local import free_port
from spmd.run.run_dir import RunDir
from spmd.storage.address import locate
from tests.object_stores import FaultProxy
from tests.train_runs import ROOT, assert_same, children, losses, metrics, state, train, write_tiny

PROCESSES, EVERY, CHECKPOINT = 4, 1, 20
SEEDS = list(map(int, os.environ.get("KILLS_SEEDS", "1").split(",")))
KILLS = int(os.environ.get("KILLS", 50))
STEPS = 9 * KILLS + 20
"""Of a run: more than it takes until the last kill, for there are 2 to 9 steps between two."""
KINDS = {"process": 50, "host": 30, "SIGTERM": 10, "all processes of all hosts": 10}
"""Kind of a kill → how often it is drawn."""
OUTAGE = "outage of the store"
OUTAGE_SECONDS = 8.0
PACED = """
import os
import time
from spmd.data.loader import Windows

unpaced = Windows.rows


def paced(self, indices):
    time.sleep(0.05)
    return unpaced(self, indices)


Windows.rows = paced
"""


@dataclasses.dataclass
class Host:
    """One of the hosts of a run: a supervisor and its training process."""

    number: int
    command: list[str]
    printed: Path
    supervisor: subprocess.Popen[bytes] | None = None

    def start(self):
        with self.printed.open("ab") as file:
            self.supervisor = subprocess.Popen(self.command, stdout=file, stderr=file, cwd=ROOT)

    @property
    def worker(self):
        """The training process: there is one while steps are taken."""
        return children(self.supervisor.pid)[0]


class Cluster:
    """Four hosts with one process each, on this machine; each is started again when it has ended.

    Args:
        out: The run folder, as the hosts name it.
        folder: Where their output goes.
        seen: The run folder, as this process names it.
        proxy: The way from the hosts to the store of a run in a bucket.
    """

    def __init__(self, config, out, steps, folder, seen=None, proxy=None):
        port = free_port()
        self.out = seen or out
        self.proxy = proxy
        self.hosts = []
        for number in range(PROCESSES):
            flags = {
                "--out": out,
                "--devices": 1,
                "--mesh.data": 1,
                "--mesh.fsdp": PROCESSES,
                "--steps": steps,
                "--resume": "auto",
                "--checkpoint-every": CHECKPOINT,
                "--recovery.memory-every": EVERY,
                "--recovery.memory-peer": "always",
                "--coordinator": f"127.0.0.1:{port}",
                "--processes": PROCESSES,
                "--process-id": number,
            }
            command = [sys.executable, "-m", "spmd_command", "train", str(config)]
            for flag, value in flags.items():
                command += [flag, str(value)]
            self.hosts.append(Host(number, command, folder / f"run.{number}.txt"))

    def __enter__(self):
        for host in self.hosts:
            host.start()
        return self

    def __exit__(self, *error):
        for host in self.hosts:
            host.supervisor.kill()
            host.supervisor.wait()

    def step(self):
        return max((line["step"] for line in metrics(self.out)), default=0)

    def text(self, number=0):
        return self.hosts[number].printed.read_text(errors="replace")

    def await_step(self, step, seconds=120):
        """Wait for a step, and start hosts again that have ended; return the exit codes of these."""
        deadline = time.monotonic() + seconds
        codes = []
        while self.step() < step:
            codes += self.restart_ended()
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.02)
        return codes

    def restart_ended(self):
        codes = []
        for host in self.hosts:
            code = host.supervisor.poll()
            if code:
                codes.append(code)
                host.start()
        return codes

    def kill(self, kind, rng):
        host = rng.choice(self.hosts)
        if kind == "process":
            os.kill(host.worker, signal.SIGKILL)
        elif kind == "host":
            host.supervisor.kill()
        elif kind == "SIGTERM":
            host.supervisor.terminate()
        else:
            for each in self.hosts:
                each.supervisor.kill()
            for each in self.hosts:
                each.supervisor.wait()

    def cut_store(self):
        """Let the store be away for a while: training goes on."""
        self.proxy.fault = "cut"
        time.sleep(OUTAGE_SECONDS)
        self.proxy.fault = "none"
        self.await_step(self.step() + 1)

    def finish(self, seconds=600):
        """The exit codes, when all have ended with 0."""
        deadline = time.monotonic() + seconds
        while any(host.supervisor.poll() != 0 for host in self.hosts):
            self.restart_ended()
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.05)


def resumed(text):
    """Step and origin of each resumption that was printed: memory or a checkpoint."""
    pattern = r"^(?:resuming|.* starting) from step (\d+)( in memory)?$"
    found = re.findall(pattern, text, re.MULTILINE)
    return [(int(step), bool(memory)) for step, memory in found]


def run_kills(cluster, kinds, kills, seed, capsys):
    """Kill a run at random moments, until it ends; the steps computed twice of each kind and origin, and seconds."""
    rng = random.Random(seed)
    repeated = collections.defaultdict(list)
    recovery = collections.defaultdict(list)
    with cluster:
        cluster.await_step(3)
        for _ in range(kills):
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            cluster.await_step(cluster.step() + rng.randint(2, 9))
            time.sleep(rng.uniform(0, 0.1))
            if kind == OUTAGE:
                before = resumed(cluster.text())
                cluster.cut_store()
                assert resumed(cluster.text()) == before, "an outage ends nothing"
                continue
            before = len(resumed(cluster.text()))
            committed = RunDir(locate(cluster.out)).newest_checkpoint() or 0
            cluster.kill(kind, rng)
            began = time.monotonic()
            # a step may have ended at the moment of the kill
            time.sleep(0.05)
            reached = cluster.step()
            while len(resumed(cluster.text())) == before:
                reached = max(reached, cluster.step())
                cluster.restart_ended()
                assert time.monotonic() < began + 150, cluster.text()[-3000:]
                time.sleep(0.02)
            start, in_memory = resumed(cluster.text())[before]
            assert start >= committed
            cluster.await_step(start + 1)
            recovery[kind].append(time.monotonic() - began)
            repeated[kind, in_memory].append(max(reached - start, 0))
            with capsys.disabled():
                text = f"{kind} after step {reached}: from step {start}"
                print(f"{text}, {recovery[kind][-1]:.1f} s", flush=True)
        cluster.finish()
    return repeated, recovery


def train_undisturbed(config, out, steps):
    """The same run, that nothing disturbs."""
    train(
        *(config, out, "--mesh.data", 1, "--mesh.fsdp", PROCESSES, "--steps", steps),
        *("--checkpoint-every", CHECKPOINT),
        processes=PROCESSES,
        devices=1,
        seconds=1800,
    )


def assert_no_trace(config, out, whole, steps):
    """The metrics and the state of a run are those of the undisturbed one."""
    assert losses(out) == losses(whole)
    assert_same(state(config, out, steps, fsdp=4), state(config, whole, steps, fsdp=4))


def show(title, repeated, recovery, capsys):
    """Print what a test has counted."""
    with capsys.disabled():
        print(f"\n{title}:")
        for (kind, in_memory), counts in sorted(repeated.items()):
            origin = "memory" if in_memory else "a checkpoint"
            print(
                f"  {kind:26} from {origin:12} {len(counts):4} times, steps computed twice: "
                f"{dict(sorted(collections.Counter(counts).items()))}"
            )
        for kind, seconds in sorted(recovery.items()):
            ordered = sorted(seconds)
            median = ordered[len(ordered) // 2]
            print(f"  {kind:26} recovered in {median:.1f} s (median), {ordered[-1]:.1f} s at most")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A config, its steps, and the folder of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_tiny(folder, PACED)
    train_undisturbed(config, folder / "whole", STEPS)
    return config, folder / "whole"


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_fifty_kills_leave_no_trace(seed, undisturbed, tmp_path, capsys):
    """Of a process, of all of a host, SIGTERM, and of everything: bitwise the undisturbed run."""
    config, whole = undisturbed
    out = tmp_path / "run"
    cluster = Cluster(config, out, STEPS, tmp_path)
    repeated, recovery = run_kills(cluster, KINDS, KILLS, seed, capsys)
    assert_no_trace(config, out, whole, STEPS)
    show(f"{KILLS} kills of {PROCESSES} processes, seed {seed}", repeated, recovery, capsys)
    for (kind, in_memory), counts in repeated.items():
        # the save that a kill has ended does not count, and another one begins when it has ended
        most = EVERY if in_memory else 2 * CHECKPOINT
        assert max(counts) <= most, (kind, counts)
        if kind in ("process", "host"):
            assert in_memory
    assert {kind for kind, _ in repeated} == set(KINDS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_kills_of_a_run_in_a_bucket_leave_no_trace(seed, tmp_path, capsys, s3_of_session):
    """The same kills, and outages of the store between them.

    Metrics are in the bucket some seconds late, so steps that were computed twice are not counted.
    """
    kills = int(os.environ.get("BUCKET_KILLS", 20))
    config = write_tiny(tmp_path, PACED.replace("0.05", "0.4"))
    key, steps = f"killed-{seed}", 20 * kills + 20
    with FaultProxy(s3_of_session) as proxy:
        out = s3_of_session.address(key)
        through = s3_of_session.through(proxy, key)
        cluster = Cluster(config, through, steps, tmp_path, out, proxy)
        repeated, recovery = run_kills(cluster, {**KINDS, OUTAGE: 25}, kills, seed, capsys)
    train_undisturbed(config, tmp_path / "whole", steps)
    assert_no_trace(config, out, tmp_path / "whole", steps)
    show(f"{kills} kills and outages in a bucket, seed {seed}", {}, recovery, capsys)
    assert all(in_memory for kind, in_memory in repeated if kind in ("process", "host"))
