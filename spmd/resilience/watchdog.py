"""Watchdog: a hanging process exits, with the stack of every thread.

A collective that one process never reaches, a dead network and a stuck disk all stop progress, so
one deadline covers them. Every process has its own watchdog; those that wait for the stuck one exit
at about the same time.
"""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from spmd.training.loop import Hook

EXIT_HUNG = 70
"""Exit code of a process whose deadline has passed (EX_SOFTWARE of sysexits.h)."""

GRACE = 20.0
"""Seconds after the deadline until faulthandler ends the process, if a hang holds the interpreter
lock."""
SAVE_LOG_SECONDS = 10.0


class Watchdog(Hook):
    """Exit the process after too long without progress.

    Args:
        timeout: Seconds between two finished steps, evaluation batches or checkpoints; 0 for no
            deadline.
        start_timeout: Seconds until the first step has finished, with compilation.
        log: File for stacks besides standard error; it has a descriptor.
        save_log: Called after the stacks were written, such as to upload them; it has
            `SAVE_LOG_SECONDS`.
    """

    def __init__(
        self,
        timeout: float,
        start_timeout: float,
        log: TextIO | None = None,
        exit_process: Callable[[int], object] = os._exit,
        save_log: Callable[[], object] = lambda: None,
    ) -> None:
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._log = log
        self._exit = exit_process
        self._save_log = save_log
        self._last = "nothing"
        self._activity = "starting"
        self._limit = 0.0
        self._deadline = math.inf
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._arm(self._start_timeout)
        self._thread = threading.Thread(target=self._watch, name="spmd-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread:
            self._thread.join()

    def set_activity(self, what: str) -> None:
        """Record the current activity, for the message; the deadline stays."""
        self._activity = what

    def reset(self, finished: str) -> None:
        """Restart the deadline, because something has finished."""
        self._last = finished
        self._activity = "training"
        self._arm(self._timeout)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Restart the deadline after a step."""
        self.reset(f"step {step}")

    def _arm(self, seconds: float) -> None:
        """Set the deadline; 0 seconds: none."""
        self._limit = seconds
        self._deadline = time.monotonic() + (seconds or math.inf)
        if seconds:
            # The hang may hold the interpreter lock; faulthandler's thread does not need it.
            faulthandler.dump_traceback_later(
                seconds + GRACE, exit=True, file=self._log or sys.stderr
            )
        else:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """Poll the deadline, and end the process after it."""
        while not self._stopped.wait(self._interval()):
            if time.monotonic() > self._deadline:
                self._report()
                saving = threading.Thread(target=self._save_log, name="spmd-log", daemon=True)
                saving.start()
                saving.join(SAVE_LOG_SECONDS)
                self._exit(EXIT_HUNG)
                return

    def _interval(self) -> float:
        """Return the seconds between two looks at the deadline."""
        return min(1.0, max(self._limit / 20, 0.05))

    def _report(self) -> None:
        """Write the message and the stacks to the log and to standard error."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        message = (
            f"{now} spmd: no progress for {self._limit:g} s. Last finished: {self._last}; "
            f"since then: {self._activity}.\nThe stack of every thread follows. "
            f"Exit code {EXIT_HUNG}. If this is not a hang, raise recovery.deadline.\n"
        )
        for file in (self._log, sys.__stderr__):
            if not file:
                continue
            with contextlib.suppress(OSError):  # a full disk or a closed terminal
                file.write(message)
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
