"""Reports of a training process to its supervisor, and the time of a recovery."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

from spmd.distributed.liveness import call_at_loss
from spmd.observe.metrics import human_duration
from spmd.resilience.supervisor import Worker
from spmd.training.loop import Hook


class Supervision(Hook):
    """Hook to report each finished step to the supervisor, as a `with` block of a session.

    Args:
        worker: This process under its supervisor; None without one.
        generation: Number of the lease of the run folder.
        note: Shows the time of a recovery.
    """

    def __init__(
        self, worker: Worker | None, generation: int, note: Callable[[str], object]
    ) -> None:
        self._worker = worker
        self._note = note
        self._stack = contextlib.ExitStack()
        self._is_recovering = False
        if worker is not None:
            worker.control.join(generation)
            self._is_recovering = worker.is_restart
            self._last_sign = worker.before.step_time

    def __enter__(self) -> Self:
        if self._worker is not None:
            control = self._worker.control
            self._stack.enter_context(call_at_loss(lambda gone: control.change(is_lost=1)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Report the step."""
        if self._worker is None:
            return
        if self._is_recovering:
            self._is_recovering = False
            self._say_recovered(step)
        self._worker.control.change(step=step, step_time=time.time())

    def _say_recovered(self, step: int) -> None:
        """Show the time from the last finished step of the process before, to this one."""
        assert self._worker is not None
        seconds = human_duration(time.time() - self._last_sign)
        repeated = max(self._worker.before.step - step + 1, 0)
        self._note(
            f"recovered in {seconds}: the process before {self._worker.reason} after step "
            f"{self._worker.before.step}; {repeated} steps were computed twice"
        )
