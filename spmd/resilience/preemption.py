"""A run that is told to go finishes its step, saves and says so by its exit code.

SIGTERM is what schedulers send (Slurm, Kubernetes, spot instances); SIGUSR1 is what `#SBATCH --signal` is set to.
One process is enough to be told: with several, JAX's coordination service lets all of them stop after the same step.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from spmd.train.loop import Hook

EXIT_PREEMPTED = 75
"""The exit code of a run that was told to go and has saved: start it again (EX_TEMPFAIL of sysexits.h)."""


class Preemption(Hook):
    """Listens for SIGTERM and SIGUSR1 inside a `with` block, in the main thread.

    Attributes:
        stopped_at: The step that all processes stop after, once it is known.
    """

    def __init__(self) -> None:
        self.stopped_at: int | None = None
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # With several processes SIGTERM is JAX's own: its service has installed a handler, and tells the others.
        several = jax.process_count() > 1
        self._before = {signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._pass_on if several else self._ask)}
        if not several:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wants_stop(self, step: int) -> bool:
        """Whether training ends with this step; the same answer on every process."""
        asked = multihost_utils.reached_preemption_sync_point(step) if jax.process_count() > 1 else self._asked
        if asked and self.stopped_at is None:
            self.stopped_at = step
        return asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
