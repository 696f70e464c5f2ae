"""A supervisor ends as its training process ends, and starts another one after a crash alone."""

import contextlib
import errno
import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest

from spmd.resilience import supervisor as supervisor_module
from spmd.resilience.generations import FolderStore, Generations
from spmd.resilience.supervisor import fork_obstacle, native_threads, supervise
from tests import forked


def supervised(
    work, folder, *, attempts=3, generations=None, prepare=lambda: None, own_group=False
):
    """A process that supervises `work(worker)`, a function of the training process; its number."""

    def run():
        if own_group:
            os.setpgid(0, 0)
        # handlers of the test's own process
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        records = generations or Generations()
        found = supervise(records, lambda: 0, prepare, attempts, standby_delay=0.0)
        if not isinstance(found, int):
            with (folder / "started").open("a") as file:
                file.write(f"{os.getpid()} {found.number} {found.before.step}\n")
            found = work(found)
        raise SystemExit(found)

    return forked.fork(run, folder / "log")


def ended(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def started(folder):
    """Process, number and last step before, of each training process."""
    path = folder / "started"
    if not path.exists():
        return []
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die(number):
    faulthandler.disable()  # it would print the stacks of the tests
    os.kill(os.getpid(), number)


def train_to(worker, step):
    worker.control.join(worker.before.newest + 1)
    worker.control.change(step=step, step_time=time.time())


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130])
def test_exit_codes_are_passed_on(code, tmp_path):
    """Also those after training has begun, if they are no crash."""

    def work(worker):
        train_to(worker, 1)
        return code

    assert ended(supervised(work, tmp_path)) == code
    assert len(started(tmp_path)) == 1


def test_a_start_that_fails_is_not_repeated(tmp_path):
    """Killed before it has trained: the supervisor is ended by the same signal, as if it were the process."""
    assert ended(supervised(lambda worker: die(signal.SIGKILL), tmp_path)) == -signal.SIGKILL
    assert len(started(tmp_path)) == 1


@pytest.mark.parametrize("crash", [signal.SIGKILL, 69, 70])
def test_a_crash_is_followed_by_the_next_process(crash, tmp_path, capfd):
    """It learns what the one before has reached; the last one's exit code counts."""

    def work(worker):
        train_to(worker, 7 + worker.number)
        if worker.number == 2:
            return 0
        if crash in (69, 70):
            return crash
        return die(crash)

    assert ended(supervised(work, tmp_path)) == 0
    assert [row[1:] for row in started(tmp_path)] == [(0, 0), (1, 7), (2, 8)]
    assert "after step 8; starting the next one" in capfd.readouterr().err


def test_crashes_without_progress_end_the_supervisor(tmp_path, capfd):
    """Two restarts are allowed; then it ends by the signal of the last process."""

    def work(worker):
        train_to(worker, 1)
        die(signal.SIGABRT)

    assert ended(supervised(work, tmp_path, attempts=2)) == -signal.SIGABRT
    assert len(started(tmp_path)) == 3
    assert "2 processes in a row got no further" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_forwarded(number, tmp_path):
    """What the process does then counts, and a process that the signal has ended is not replaced."""

    def work(worker):
        train_to(worker, 1)
        if worker.number == 0 and number == signal.SIGUSR1:
            signal.signal(number, lambda *_: os._exit(75))
        (tmp_path / "ready").touch()
        return time.sleep(60)

    process = supervised(work, tmp_path)
    wait_until((tmp_path / "ready").exists)
    os.kill(process, number)
    expected = 75 if number == signal.SIGUSR1 else -number
    assert ended(process) == expected
    assert len(started(tmp_path)) == 1


@pytest.mark.parametrize("group", [True, False], ids=["from a terminal", "to it alone"])
def test_an_interrupted_process_ends_first(group, tmp_path, monkeypatch):
    """Ctrl-C: what the process does at its end is done, such as freeing the folder."""
    monkeypatch.setattr(supervisor_module, "_INTERRUPT_SECONDS", 1.0)

    def work(worker):
        try:
            (tmp_path / "ready").touch()
            time.sleep(60)
        finally:
            time.sleep(0.3)
            (tmp_path / "cleaned").touch()

    process = supervised(work, tmp_path, own_group=True)
    wait_until((tmp_path / "ready").exists)
    if group:
        os.killpg(process, signal.SIGINT)
    else:
        os.kill(process, signal.SIGINT)
    assert ended(process) != 0
    assert (tmp_path / "cleaned").exists()


def test_a_process_ends_with_its_supervisor(tmp_path):
    """SIGKILL to the supervisor alone leaves nothing behind."""

    def work(worker):
        (tmp_path / "ready").touch()
        return time.sleep(60)

    process = supervised(work, tmp_path)
    wait_until((tmp_path / "ready").exists)
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    ((worker, _, _),) = started(tmp_path)
    wait_until(lambda: not is_running(worker))


def is_running(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.parametrize("failure", ["", "ends", "raises"])
def test_the_next_process_is_prepared_ahead(failure, tmp_path):
    """A standby is there before the crash; one that has failed, in silence, is replaced by a new process."""

    def prepare():
        (tmp_path / "prepared").write_text(str(os.getpid()))
        if failure == "ends":
            os._exit(1)
        if failure == "raises":
            raise RuntimeError("not to be seen")

    def work(worker):
        train_to(worker, 1)
        if worker.is_restart:
            return 0
        wait_until((tmp_path / "prepared").exists)
        time.sleep(0.1)
        return die(signal.SIGKILL)

    assert ended(supervised(work, tmp_path, prepare=prepare)) == 0
    _, (second, _, _) = started(tmp_path)
    assert (str(second) == (tmp_path / "prepared").read_text()) is (failure == "")
    assert "not to be seen" not in (tmp_path / "log").read_text()


def test_a_generation_that_has_failed_elsewhere_is_ended(tmp_path):
    """Its process is killed, and the next generation starts; records of others are left alone."""
    store = FolderStore(tmp_path / "generations")

    def work(worker):
        train_to(worker, 1)
        if worker.is_restart:
            return 0
        store.create("5.failed", b"")
        wait_until((tmp_path / "others").exists)
        store.create("1.failed", b"process 3 is gone\n")
        return time.sleep(60)

    process = supervised(work, tmp_path, generations=Generations(store))
    wait_until(lambda: store.exists("5.failed"))
    time.sleep(0.5)
    assert len(started(tmp_path)) == 1  # the control
    (tmp_path / "others").touch()
    assert ended(process) == 0
    assert len(started(tmp_path)) == 2


def test_nothing_is_awaited_after_an_end_for_good(tmp_path):
    """A process that waits for another one is ended, and its supervisor ends as the process before."""
    store = FolderStore(tmp_path / "generations")

    def work(worker):
        if not worker.is_restart:
            train_to(worker, 1)
            return 69
        store.create("1.ended", b"process 3 ended with exit code 2\n")
        return time.sleep(60)

    assert ended(supervised(work, tmp_path, generations=Generations(store))) == 69
    assert len(started(tmp_path)) == 2


def test_a_record_is_made_once(tmp_path):
    """The first supervisor that records a failure says why."""
    generations = Generations(FolderStore(tmp_path))
    assert not generations.has_failed(3)
    assert generations.fail(3, "first")
    assert not generations.fail(3, "second")
    assert generations.has_failed(3)
    assert (tmp_path / "3.failed").read_text() == "first\n"


def test_threads_of_a_config_are_an_obstacle(tmp_path):
    """Those that were there after the imports are not."""
    assert fork_obstacle(native_threads()) == ""
    assert "threads" in fork_obstacle([])


def test_a_kernel_without_process_handles_is_an_obstacle(monkeypatch):
    def lacks(process):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", lacks)
    assert "Function not implemented" in fork_obstacle(native_threads())
