"""Of two runs in one folder one trains and the other is refused; a run that has lost the folder writes nothing more."""

import contextlib
import functools
import json
import os
import re
import signal
import time

import pytest

from spmd.resilience.lease import EXPIRY, Lease
from spmd.storage.address import locate
from spmd.storage.bucket import Bucket
from tests import forked
from tests.train_runs import PACED, Run, losses, write_tiny

STEPS = 24
SMALL = ("--devices", 2, "--mesh.data", 1, "--steps", STEPS, "--checkpoint-every", 4)
WITHOUT_LEASE = """
from spmd.resilience.lease import Lease

Lease._problems = lambda self: ()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, s3_of_session):
    """The folder of a config whose steps take 50 ms, and two servers that start a run each at a time; they find S3."""
    del s3_of_session
    folder = tmp_path_factory.mktemp("lease")
    config = write_tiny(folder, PACED)
    serve = (
        f"from tests import forked; forked.serve_commands({str(folder / 'xla')!r}, {str(config)!r})"
    )
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(forked.server(serve, PACE="0.25")) for _ in range(2)]
        yield folder, servers


@pytest.fixture
def start(place, folder, request):
    """Starts a run with one of the servers, in the test's own run folder, in a bucket too; logs are on a disk."""
    (folder, servers), runs = folder, []
    name = re.sub(r"\W", "_", request.node.name)
    out = place(folder / name)

    def start(server, *arguments, config="tiny.py"):
        log = folder / f"{name}.{server}.txt"
        run = servers[server](
            log, ["train", folder / config, "--out", out, *SMALL, "--resume", "auto", *arguments]
        )
        run.log, run.wait = log, functools.cache(run.wait)
        runs.append(run)
        return run

    yield start, out
    for run in runs:
        if not run.wait.cache_info().currsize:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pid, signal.SIGKILL)
            run.wait()


def wait_for_step(run, out, step):
    deadline = time.monotonic() + 240
    while max(losses(out), default=0) < step:
        assert not run.ended(), run.log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_file(out, name):
    """A file of a run folder."""
    if isinstance(out, str):
        return Bucket(locate(out)).read(name).decode()
    return (out / name).read_text()


def files_below(out, folder):
    """Names of the files in a folder of a run."""
    if isinstance(out, str):
        return Bucket(locate(out) / folder).list()
    return [path.name for path in (out / folder).iterdir()]


def contents(out):
    """Every file of a run but the lease, and those that belong to one process: its log and its event file."""
    found = (path for path in sorted(out.rglob("*")) if path.is_file())
    own = {"logs", "tensorboard", "lease"}
    return {str(path): path.read_bytes() for path in found if not own & set(path.parts)}


def two_at_once(start, out, config="tiny.py"):
    """Starts another run beside a living one, which must not notice; the living one."""
    first = start(0, config=config)
    wait_for_step(first, out, 2)
    second = start(1, "--seed", 1, config=config)
    assert second.wait() == 2
    text = second.log.read_text()
    for part in (
        f"process {first.pid} on",
        "since 2",
        "last heartbeat",
        "expires in",
        "--take-over",
    ):
        assert part in text
    reached = max(losses(out))
    wait_for_step(first, out, reached + 2)
    assert list(losses(out))[: reached + 2] == list(range(1, reached + 3))
    assert json.loads(read_file(out, "config.json"))["config"]["seed"] == 0
    return first


@pytest.mark.soak
def test_one_of_two_trains_and_killed_it_is_resumed_at_once(start):
    """The other exits with 2 and names the first, whose metrics and config stay its own. SIGKILL leaves the lease of a
    process that has ended: the next run on this host does not wait."""
    first, (start, out) = two_at_once(*start), start
    wait_for_step(first, out, 6)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    second = start(0)
    assert second.wait() == 0
    text = second.log.read_text()
    assert "resuming from step " in text
    assert "waiting up to" not in text
    assert list(losses(out)) == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_the_control_without_a_lease(start, folder):
    """The second run is not refused, or the first one dies."""
    folder, _ = folder
    (folder / "control.py").write_text((folder / "tiny.py").read_text() + WITHOUT_LEASE)
    with pytest.raises(AssertionError):
        two_at_once(*start, config="control.py")


# A bucket's clock cannot be set; for buckets: `test_a_lease_in_a_bucket_expires_by_the_stores_clock`.
@pytest.mark.parametrize("place", ["disk"], indirect=True)
@pytest.mark.soak
def test_suspended_until_it_expired_it_writes_nothing_more(start):
    """SIGSTOP, another run takes the folder, SIGCONT: exit code 2, who has the folder, and no file is other."""
    start, out = start
    first = start(0)
    wait_for_step(first, out, 6)
    os.kill(first.pid, signal.SIGSTOP)
    (lease,) = (out / "lease").iterdir()
    os.utime(lease, (time.time() - EXPIRY - 1,) * 2)
    second = start(1)
    assert second.wait() == 0, second.log.read_text()[-3000:]
    before = contents(out)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 2
    assert contents(out) == before
    assert "its lease was" in first.log.read_text()
    assert list(losses(out)) == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_taken_over_by_the_flag(start):
    """The run that had the folder stops and names the one that took it, which trains to the end."""
    start, out = start
    first = start(0)
    wait_for_step(first, out, 6)
    second = start(1, "--take-over")
    assert first.wait() == 2
    assert f"its lease was taken over by process {second.pid} on" in first.log.read_text()
    assert second.wait() == 0, second.log.read_text()[-3000:]
    assert list(losses(out)) == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_a_run_that_ends_early_leaves_the_folder_free(start):
    """Preempted, or interrupted by Ctrl-C: another host need not wait."""
    start, out = start
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        run = start(0)
        wait_for_step(run, out, max(losses(out), default=0) + 2)
        os.kill(run.pid, number)
        assert run.wait() == code, run.log.read_text()[-3000:]
        assert [name.endswith(".released") for name in files_below(out, "lease")] == [True]


@pytest.mark.soak
def test_both_of_two_processes_are_refused(folder, tmp_path):
    """Process 0 finds the folder taken, and process 1 exits with it, though it cannot see why itself."""
    folder, _ = folder
    with (
        Lease(tmp_path / "run"),
        Run(folder / "tiny.py", tmp_path / "run", processes=2, devices=2) as run,
    ):
        assert run.codes(120) == [2, 2]
        assert all(f"process {os.getpid()} on" in run.text(i) for i in range(2))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lease"]
