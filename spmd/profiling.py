"""Traces of chosen steps by JAX's profiler, for TensorBoard's profile plugin or Perfetto."""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from spmd.errors import ConfigError, Problem
from spmd.state import TrainState
from spmd.trainer import Hook

ON_DEMAND = 5
"""Steps that SIGUSR2 asks for."""


def parse_steps(text: str) -> tuple[int, int] | None:
    """The steps that `--profile` names, None for an empty text.

    Raises:
        ConfigError: It is not FIRST:LAST.

    Example:
        >>> parse_steps("10:15"), parse_steps("")
        ((10, 15), None)
    """
    if not text:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        fix = "the first step and the last, from 1: --profile 10:15"
        raise ConfigError("Nothing can be profiled:", [Problem("profile", f"is {text!r}", fix=fix)])
    return int(first), int(last)


class Profile(Hook):
    """Writes a trace of the steps `first … last`, and of the next `ON_DEMAND` at SIGUSR2, inside a `with` block.

    Args:
        folder: Where traces go; each process writes its own.
        steps: First and last, or None for none but on demand.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self.folder = folder
        self._steps, self._asked, self._tracing = steps, False, False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR2, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGUSR2, self._before)
        self._stop()

    def on_start(self, step: int) -> None:
        """The first step may be the first to trace."""
        self._turn(step)

    def wants_state(self, step: int) -> bool:
        """Between the steps that are traced and those that are not."""
        if self._asked and not self._tracing:
            self._asked, self._steps = False, (step + 1, step + ON_DEMAND)
        return self._steps is not None and step in (self._steps[0] - 1, self._steps[1])

    def on_state(self, step: int, state: TrainState) -> None:
        """Starts or stops the trace, when everything dispatched before has finished."""
        jax.block_until_ready(state)
        self._turn(step)

    def _turn(self, step: int) -> None:
        if self._steps is not None and step == self._steps[1]:
            self._stop()
        elif self._steps is not None and step == self._steps[0] - 1 and not self._tracing:
            jax.profiler.start_trace(self.folder)
            self._tracing = True

    def _stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
