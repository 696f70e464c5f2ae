"""Traces of chosen steps by JAX's profiler, for TensorBoard's profile plugin or Perfetto."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import jax

from spmd.errors import ConfigError, Problem
from spmd.training.loop import Hook

ON_DEMAND = 5
"""Steps that SIGUSR2 traces."""


def parse_steps(text: str) -> tuple[int, int] | None:
    """Parse FIRST:LAST, the value of `--profile`; None for an empty text.

    Example:
        >>> parse_steps("10:15"), parse_steps("")
        ((10, 15), None)
    """
    if not text:
        return None
    first, _, last = text.partition(":")
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    problem = Problem(
        "profile",
        f"is {text!r}",
        fix='the first step and the last, from 1: profile="10:15"',
    )
    raise ConfigError("Nothing can be profiled:", [problem])


class Profile(Hook):
    """Trace the steps `first … last`, and the next `ON_DEMAND` at SIGUSR2, inside a `with` block.

    A trace also has parts of the neighbouring steps: nothing here waits for a device, because a
    process may trace without the others. Each process writes its own trace into `folder`; `log` is
    called when one begins and ends.
    """

    def __init__(
        self, folder: Path, steps: tuple[int, int] | None, log: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self._log = log
        self._steps = steps
        self._requested = False
        self._tracing = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR2, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGUSR2, self._before)
        self._stop()

    def on_start(self, step: int) -> None:
        """Start the trace if the first step is part of it."""
        self._update(step)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Start or stop the trace; the step after this one is already running."""
        if self._requested and self._steps is None:
            self._requested = False
            self._steps = (step + 2, step + 1 + ON_DEMAND)
        self._update(step)

    def _update(self, finished: int) -> None:
        if self._steps is None:
            return
        first, last = self._steps
        if finished >= last:
            if not self._tracing:
                self._log(f"no trace: step {last} was before this run")
            self._stop()
        elif finished >= first - 2 and not self._tracing:
            jax.profiler.start_trace(self.folder)
            self._tracing = True
            self._log(f"tracing to step {last}, into {self.folder}")

    def _stop(self) -> None:
        self._steps = None
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
            self._log(f"traced, into {self.folder}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
