"""Preemption: a signal makes a run save a checkpoint and exit with a code of its own.

It finishes its step first. Schedulers send SIGTERM (Slurm, Kubernetes, spot instances); `#SBATCH
--signal` is set to SIGUSR1; a closed terminal sends SIGHUP. It suffices to signal one of several
processes: JAX's coordination service makes all of them stop after the same step.
"""

import os
import signal
from types import FrameType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from spmd.training.loop import Hook

EXIT_PREEMPTED = 75
"""Exit code of a preempted run that has saved: start it again (EX_TEMPFAIL of sysexits.h)."""


class Preemption(Hook):
    """Handler of SIGTERM, SIGUSR1 and SIGHUP inside a `with` block, in the main thread.

    A SIGHUP that the process ignores, as `nohup` starts it, stays ignored.
    """

    def __init__(self) -> None:
        self.stop_step: int | None = None
        """Step after which all processes stop, once it is known."""
        self._signaled = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = [signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if jax.process_count() > 1:
            # JAX's coordination service has its own handler of SIGTERM, which informs the others.
            handlers = dict.fromkeys(numbers, self._to_sigterm)
        else:
            handlers = dict.fromkeys([*numbers, signal.SIGTERM], self._on_signal)
        for number, handler in handlers.items():
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wants_stop(self, step: int) -> bool:
        """Return whether training ends with this step; the same on every process."""
        stop = self._signaled
        if jax.process_count() > 1:
            stop = multihost_utils.reached_preemption_sync_point(step)
        if stop and self.stop_step is None:
            self.stop_step = step
        return stop

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signaled = True

    def _to_sigterm(self, number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
