"""A run that hangs ends: with every thread's stack, and what was finished last.

A collective that one process never reaches, a dead network and a stuck disk have one thing in common: nothing finishes.
So one deadline serves all of them. Every process has its own watchdog; those that wait for the stuck one see no step
finish either, so all of them end at about the same time.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from spmd.train.loop import Hook

EXIT_HUNG = 70
"""The exit code of a process whose deadline has passed (EX_SOFTWARE of sysexits.h)."""

GRACE = 20.0
"""Seconds after the deadline until a thread that needs no interpreter lock ends a process whose lock is held."""


class Watchdog(Hook):
    """Ends the process where nothing has finished for too long.

    Args:
        seconds: From one finished step, evaluation batch or checkpoint to the next; 0 for no deadline.
        start: The same until the first step has finished, with compilation.
        log: Where stacks go besides standard error; a file with a descriptor, or None.
        leave: How the process ends.
    """

    def __init__(
        self, seconds: float, start: float, log: TextIO | None = None, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._seconds, self._start, self._log, self._leave = seconds, start, log, leave
        self._last, self._doing = "nothing", "starting"
        self._limit = 0.0
        self._due = float("inf")
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._arm(self._start)
        self._thread = threading.Thread(target=self._watch, name="spmd-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread:
            self._thread.join()

    def doing(self, what: str) -> None:
        """Says what begins now; the deadline stays."""
        self._doing = what

    def finished(self, what: str) -> None:
        """Says what has finished: the deadline is as far off as ever."""
        self._last, self._doing = what, "training"
        self._arm(self._seconds)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """A step has finished."""
        self.finished(f"step {step}")

    def _arm(self, seconds: float) -> None:
        self._limit = seconds
        if seconds:
            self._due = time.monotonic() + seconds
            # The lock of the interpreter may be held by what hangs: this thread of faulthandler's does not need it.
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=self._log or sys.stderr)
        else:
            self._due = float("inf")
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, max(self._limit / 20, 0.05))):
            if time.monotonic() > self._due:
                now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
                message = (
                    f"{now} spmd: nothing has finished for {self._limit:g} s. The last that finished: {self._last}; "
                    f"since then: {self._doing}.\nThe stack of every thread follows; this process ends with "
                    f"{EXIT_HUNG}. Raise --recovery.deadline where this is no hang.\n"
                )
                for file in (self._log, sys.__stderr__):
                    if file:
                        file.write(message)
                        file.flush()
                        faulthandler.dump_traceback(file=file, all_threads=True)
                self._leave(EXIT_HUNG)
                return
