"""Traces of chosen steps by JAX's profiler, for TensorBoard's profile plugin or Perfetto."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from spmd.errors import ConfigError, Problem
from spmd.train.loop import Hook

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

    What else runs meanwhile is in it too: the ends of their neighbours. A process traces without the others knowing, so
    nothing here waits for a device.

    Args:
        folder: Where traces go; each process writes its own.
        steps: First and last, or None for none but on demand.
        say: Told where a trace begins and ends.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder, say
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

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Starts or stops the trace; the step after this one is running already."""
        if self._asked and self._steps is None:
            self._asked, self._steps = False, (step + 2, step + 1 + ON_DEMAND)
        self._turn(step)

    def _turn(self, finished: int) -> None:
        if self._steps is None:
            return
        first, last = self._steps
        if finished >= last:
            if not self._tracing:
                self._say(f"nothing is traced: step {last} was behind already")
            self._stop()
        elif finished >= first - 2 and not self._tracing:
            jax.profiler.start_trace(self.folder)
            self._tracing = True
            self._say(f"tracing to step {last}, into {self.folder}")

    def _stop(self) -> None:
        self._steps = None
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
            self._say(f"traced, into {self.folder}")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
