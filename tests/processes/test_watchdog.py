"""What hangs ends within its deadline, on all processes, with every thread's stack and what was finished last."""

import subprocess
import sys
import time

import pytest

from spmd.resilience import watchdog as watchdog_module
from spmd.resilience.watchdog import EXIT_HUNG, Watchdog
from tests.train_runs import ROOT


def watch(seconds, start, work):
    """The exit codes of a watchdog over `work`, which is given the watchdog and the codes so far."""
    codes = []
    with Watchdog(seconds, start, None, codes.append) as watchdog:
        work(watchdog, codes)
    return codes


def hang(watchdog, codes):
    """Until the watchdog has had enough, however late a loaded machine lets it run, and a moment longer."""
    until = time.monotonic() + 15
    while not codes and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)


@pytest.mark.soak
def test_nothing_happens_while_something_finishes():
    """The control: steps within the deadline, for longer than one deadline."""

    def steps(watchdog, _):
        for step in range(17):
            time.sleep(0.2)
            watchdog.on_metrics(step, {})

    assert watch(3, 3, steps) == []


def test_the_deadline_passes_once():
    """Whatever was said to be going on since the last that finished."""

    def save(watchdog, codes):
        watchdog.on_metrics(7, {})
        watchdog.set_activity("saving step 7")
        hang(watchdog, codes)

    assert watch(0.3, 60, save) == [EXIT_HUNG]


def test_the_start_has_its_own_deadline():
    """Compilation may take longer than a step."""
    assert watch(0.2, 60, lambda *_: time.sleep(1.5)) == []
    assert watch(60, 0.2, hang) == [EXIT_HUNG]


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["saved", "hangs"])
def test_the_log_is_saved_before_the_end(seconds, monkeypatch):
    """Uploaded, for a run in a bucket; a store that does not answer does not keep the process."""
    monkeypatch.setattr(watchdog_module, "SAVE_LOG_SECONDS", 0.3)
    events = []

    def save_log():
        time.sleep(seconds)
        events.append("saved")

    with Watchdog(0.2, 0.2, None, events.append, save_log) as watchdog:
        hang(watchdog, events)
    assert events == (["saved", EXIT_HUNG] if seconds == 0 else [EXIT_HUNG])


def test_zero_is_no_deadline():
    """It can be turned off."""
    assert watch(0, 0, lambda *_: time.sleep(1.5)) == []


@pytest.mark.parametrize(
    ("hang", "code"),
    [
        ("time.sleep(600)", EXIT_HUNG),
        # holds the interpreter's lock: no Python thread can run any more
        ("ctypes.PyDLL(None).sleep(600)", 1),
    ],
)
@pytest.mark.soak
def test_a_hung_process_prints_its_stacks_and_ends(tmp_path, hang, code):
    """For real, in a process of its own, with the interpreter's lock free and held."""
    program = f"""
import ctypes, time
from spmd.resilience import watchdog as deadline

deadline.GRACE = 2.0


def the_function_that_hangs():
    {hang}


with open({str(tmp_path / "log")!r}, "w") as log, deadline.Watchdog(1.0, 1.0, log) as watchdog:
    watchdog.reset("step 41")
    watchdog.set_activity("saving step 41")
    the_function_that_hangs()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == code
    log = (tmp_path / "log").read_text()
    assert "the_function_that_hangs" in log
    if code == EXIT_HUNG:
        assert "Last finished: step 41; since then: saving step 41" in log
        assert "the_function_that_hangs" in done.stderr
