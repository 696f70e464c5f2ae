"""A preempted run finishes its step, saves, exits with its own code, and resumes bitwise."""

import os
import signal

import pytest

from spmd.resilience.preemption import EXIT_PREEMPTED, Preemption
from spmd.training.loop import Hook, fit
from tests.train_runs import PACED, Run, assert_same, losses, saved, state, train, write_tiny

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_training_after_the_step(number):
    """The step that was running is the last, and its metrics are read."""
    read = []

    class Send(Hook):
        def on_metrics(self, step, metrics):
            read.append(step)
            if step == 3:
                os.kill(os.getpid(), number)

    with Preemption() as preemption:
        fit(
            0,
            lambda state, batch: (state + 1, {}),
            range(100),
            steps=100,
            hooks=[Send(), preemption],
        )
    assert preemption.stop_step == 4
    assert read == [1, 2, 3, 4]


def test_without_a_signal_it_runs_to_the_end():
    """The control; and afterwards signals do what they did before."""
    before = list(map(signal.getsignal, SIGNALS))
    with Preemption() as preemption:
        assert (
            fit(0, lambda state, batch: (state + 1, {}), range(9), steps=9, hooks=[preemption]) == 9
        )
    assert preemption.stop_step is None
    assert list(map(signal.getsignal, SIGNALS)) == before


def test_a_hangup_that_is_ignored_stays_ignored():
    """As in a process that `nohup` starts; control: by default it is preemption."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.wants_stop(1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert preemption.wants_stop(1)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.soak
def test_a_preempted_run_goes_on_bitwise(tmp_path, place):
    """Preempted in step 6 or later, started again with the same command: the curve and the state of the whole."""
    config = write_tiny(tmp_path, PACED)
    train(config, tmp_path / "whole")
    out = place(tmp_path / "run")
    printed = tmp_path / "printed"
    with Run(config, out, "--resume", "auto", printed=printed) as run:
        run.wait_for_step(6)
        run.processes[0].terminate()
        assert run.codes(120) == [EXIT_PREEMPTED]
        assert "continue with --resume auto" in run.text()
    reached = max(losses(out))
    assert 6 <= reached < 30
    assert reached in saved(out), "it saved the step that it stopped with"
    train(config, out, "--resume", "auto", printed=printed)
    assert losses(out) == losses(tmp_path / "whole")
    assert_same(state(config, out, 30, fsdp=4), state(config, tmp_path / "whole", 30, fsdp=4))
    assert "in 2 sessions" in (tmp_path / "printed.0.txt").read_text()
