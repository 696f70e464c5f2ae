"""One process at a time holds the lease of a folder; it is taken from one that has ended or whose lease has expired."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd.errors import CheckpointError, Problem
from spmd.observe.goodput import start_ticks
from spmd.resilience import lease as module
from spmd.resilience.lease import EXIT_LOST, EXPIRY, Lease
from spmd.resilience.lease_files import Holder, LeaseName, this_process


def files(folder):
    return sorted(path.name for path in (folder / "lease").iterdir())


def write_lease(folder, age, number=3, **fields):
    """A lease of a process on another host, unless the fields say otherwise; its last heartbeat was `age` s ago."""
    holder = {
        "host": "elsewhere",
        "pid": 7,
        "since": "yesterday",
        "machine": "another boot",
        "started": "1",
        **fields,
    }
    (folder / "lease").mkdir(parents=True, exist_ok=True)
    path = folder / "lease" / f"{number}.json"
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age,) * 2)
    return path


def refusal(*arguments, **options):
    with (
        pytest.raises(CheckpointError) as caught,
        Lease(*arguments, say=lambda line: None, **options),
    ):
        pass
    return str(caught.value)


def test_one_holds_it_until_it_is_released(tmp_path):
    """The refusal names process, host, times and the flag; released, the folder is free, also after an error."""
    with Lease(tmp_path):
        assert files(tmp_path) == ["1.json"]
        text = refusal(tmp_path)
        for part in (
            f"process {os.getpid()} on ",
            " since 2",
            "last heartbeat",
            "expires in",
            "take_over=True",
        ):
            assert part in text
    with pytest.raises(KeyError), Lease(tmp_path):
        raise KeyError
    with Lease(tmp_path):
        assert files(tmp_path) == ["3.json"]
    assert files(tmp_path) == ["3.released"]


def test_a_process_that_has_ended_holds_nothing(tmp_path):
    """Killed, waited for or not, or its number in use again: the next one has the folder at once."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = dataclasses.asdict(this_process())
    alive = {**own, "pid": child.pid, "started": start_ticks(child.pid)}
    write_lease(tmp_path, 0, **alive)
    assert f"process {child.pid} on" in refusal(tmp_path)
    child.kill()
    while start_ticks(child.pid):  # a zombie
        time.sleep(0.01)
    began = time.monotonic()
    with Lease(tmp_path):
        pass
    child.communicate()
    write_lease(tmp_path, 0, number=5, **alive)
    with Lease(tmp_path):
        pass
    write_lease(tmp_path, 0, number=7, **{**own, "started": "1"})
    with Lease(tmp_path):
        pass
    assert time.monotonic() - began < 5
    assert files(tmp_path) == ["8.released"]


def test_a_lease_of_another_host_is_respected_until_it_expires(tmp_path):
    """Whether that process lives cannot be seen: a heartbeat refuses, and none until the lease expires frees it."""
    path, said = write_lease(tmp_path, EXPIRY - 2), []
    began = time.monotonic()
    with Lease(tmp_path, say=said.append):
        assert 1 < time.monotonic() - began < 10
        assert files(tmp_path) == ["4.json"]
    assert "held by process 7 on elsewhere since yesterday: waiting up to 2 s" in said[0]
    path = write_lease(tmp_path, 8, number=6)
    timer = threading.Timer(0.7, os.utime, [path])
    timer.start()
    assert "process 7 on elsewhere" in refusal(tmp_path)
    assert files(tmp_path) == ["4.released", "6.json"]


def test_ages_are_by_the_file_server(tmp_path, monkeypatch):
    """A claimant whose clock is a day fast or slow respects a lease as one whose clock is right."""
    for shift in (-86400, 86400):
        monkeypatch.setattr(
            time, "time", lambda shift=shift: os.stat("/proc/self").st_mtime + shift
        )
        path = tmp_path / str(shift)
        (path / "lease").mkdir(parents=True)
        (path / "lease" / "3.json").write_text(
            json.dumps({**dataclasses.asdict(Holder()), "machine": "another"})
        )
        timer = threading.Timer(0.7, os.utime, [path / "lease" / "3.json"])
        timer.start()
        assert "writes to it" in refusal(path)


def test_a_lease_of_the_future_or_of_nobody_expires_too(tmp_path, monkeypatch):
    """A file that was cut, or whose time is wrong, holds the folder for one expiry at most."""
    monkeypatch.setattr(module, "EXPIRY", 1.0)
    path = write_lease(tmp_path, -1000)
    path.write_text('{"host": ')
    os.utime(path, (time.time() + 1000,) * 2)
    with Lease(tmp_path, say=lambda line: None):
        assert files(tmp_path) == ["4.json"]


def test_taken_over_it_is_lost(tmp_path, capsys, monkeypatch):
    """By the flag; the one who had it cannot write, and its thread ends the process, even while nothing is written."""
    monkeypatch.setattr(module, "HEARTBEAT", 0.05)
    codes = []
    with Lease(tmp_path, exit_process=codes.append) as old:
        old.renew()
        with Lease(tmp_path, take_over=True) as new:
            with pytest.raises(
                CheckpointError, match=rf"its lease was taken over by process {os.getpid()} on"
            ):
                old.renew()
            while not codes:
                time.sleep(0.01)
            new.renew()
    assert codes == [EXIT_LOST]
    assert "Run folder lost to another process" in capsys.readouterr().err
    assert files(tmp_path) == ["2.released"]


def race(folder, monkeypatch, claimants=8):
    """How many of several that find an expired lease hold it afterwards."""
    write_lease(folder, 2 * EXPIRY)
    together, held = threading.Barrier(claimants), []
    read = module.Lease._newest

    def all_see_the_same(self):
        found = read(self)
        if found == LeaseName(3):
            together.wait(10)
        return found

    monkeypatch.setattr(module.Lease, "_newest", all_see_the_same)

    def claim():
        lease = Lease(folder, say=lambda line: None)
        if not lease._problems():
            held.append(lease)

    threads = [threading.Thread(target=claim) for _ in range(claimants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    return len(held)


def test_of_several_that_find_an_expired_lease_one_gets_it(tmp_path, monkeypatch):
    """A number is created once; the control: if files were overwritten, several would hold the folder."""
    for n in range(4):
        assert race(tmp_path / str(n), monkeypatch) == 1
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", **options: opened(path, mode.replace("x", "w"), **options),
    )
    undo, monkeypatch.undo = monkeypatch.undo, lambda: None
    assert race(tmp_path / "control", monkeypatch) > 1
    monkeypatch.undo = undo


def test_a_claim_that_comes_late_gets_nothing(tmp_path):
    """Its number was taken, released or removed while it slept, and a later one counts: what is there stays."""
    late = Lease(tmp_path)
    write_lease(tmp_path, 0, number=6)
    assert not late._create(LeaseName(5))
    assert files(tmp_path) == ["6.json"]
    (tmp_path / "lease" / "6.json").rename(tmp_path / "lease" / "6.released")
    assert not late._create(LeaseName(6))
    assert files(tmp_path) == ["6.released"]


def test_problems_of_the_folder_release_it(tmp_path):
    """They are looked for while it is held, so that nobody changes it in between."""
    found = Problem("runs/x", "another run has begun here")
    assert "another run has begun here" in refusal(
        tmp_path, check=lambda: [found] if files(tmp_path) else []
    )
    assert files(tmp_path) == ["1.released"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    """With its path and the flag."""
    (tmp_path / "file").write_text("")
    assert "choose a folder that can be written" in refusal(tmp_path / "file")


@pytest.mark.parametrize("take_over", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "1234567890123456789.json",
        "1" * 150 + ".released",
        "999999999999999999.json",
        "0.json",
        "007.json",
    ],
)
def test_a_number_that_no_lease_has_is_refused(name, take_over, tmp_path):
    """It is neither ignored nor removed, even to take the folder over: another program may hold it."""
    write_lease(tmp_path, 0, number=2)
    path = tmp_path / "lease" / name
    path.write_text("{}")
    text = refusal(tmp_path, take_over=take_over)
    assert f"{path}: is not a lease of this version" in text
    assert files(tmp_path) == sorted(["2.json", name])


def test_control_other_files_and_the_largest_number_are_fine(tmp_path):
    """A file of an editor is nobody's lease; the last number but one can be followed."""
    write_lease(tmp_path, EXPIRY + 1, number=10**18 - 2)
    (tmp_path / "lease" / ".nfs0001").write_text("")
    (tmp_path / "lease" / "notes.txt").write_text("")
    with Lease(tmp_path) as lease:
        assert lease.number == 10**18 - 1
