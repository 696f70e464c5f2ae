"""Progress of long work, such as a compilation: a moving line on a terminal, elsewhere some lines."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")

INTERVAL = 10.0
"""Seconds between lines about work that goes on, where there is no terminal."""


@contextlib.contextmanager
def spinner(doing: str, *, plain: bool = False) -> Iterator[None]:
    """Show the work of a block and its time so far.

    On a terminal it is a line on standard error that vanishes with the block. Elsewhere standard
    error gets a line at the start and one every `INTERVAL`, `[0:10] compiling for v5e:4x4`; or with
    `plain` standard output gets one line.
    """
    if not sys.stderr.isatty():
        if plain:
            print(f"{doing} …", flush=True)
            yield
            return
        with _lines(doing):
            yield
        return
    # Descriptor 2 may be redirected inside the block.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal:
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=terminal, force_terminal=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with progress:
            progress.add_task(doing, total=None)
            yield


def spin_until_each(results: Iterator[T], doing: str) -> Iterator[T]:
    """Yield results; `spinner` until each of them is there.

    Without a terminal the lines are about all of them.
    """
    if not sys.stderr.isatty():
        with _lines(doing):
            yield from results
        return
    while True:
        with spinner(doing):
            result = next(results, None)
        if result is None:
            return
        yield result


@contextlib.contextmanager
def _lines(doing: str) -> Iterator[None]:
    """Write a line about the work of a block at its start, and one every `INTERVAL`."""
    began = time.monotonic()
    ended = threading.Event()
    with _standard_error() as write:

        def say() -> None:
            minutes, seconds = divmod(round(time.monotonic() - began), 60)
            with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full
                write(f"[{minutes}:{seconds:02}] {doing}\n")

        def say_at_intervals() -> None:
            while not ended.wait(INTERVAL):
                say()

        say()
        thread = threading.Thread(target=say_at_intervals, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def _standard_error() -> Iterator[Callable[[str], object]]:
    """Return a function that writes to standard error, also while its descriptor is redirected."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):  # a stream of Python alone
        yield sys.stderr.write
        return
    try:
        yield lambda text: os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
