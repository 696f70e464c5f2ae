"""A line that moves while something takes long, such as a compilation."""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from spmd.observe.metrics import human_duration

_REFRESH_SECONDS = 0.2
T = TypeVar("T")


@contextlib.contextmanager
def show_waiting(doing: str, *, plain: bool = False) -> Iterator[None]:
    """Show what is done and since when, inside the block, on a terminal.

    The line is on standard error and vanishes with the block. Elsewhere nothing is written, or with `plain` one line
    on standard output.
    """
    if not sys.stderr.isatty():
        if plain:
            print(f"{doing} …", flush=True)
        yield
        return
    done, began = threading.Event(), time.monotonic()
    terminal = os.dup(sys.stderr.fileno())  # the descriptor itself may be redirected inside the block

    def draw() -> None:
        for mark in itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"):
            seconds = int(time.monotonic() - began)
            shown = human_duration(seconds) if seconds >= 60 else f"{seconds} s"
            os.write(terminal, f"\r{mark} {doing}   {shown}\x1b[K".encode())
            if done.wait(_REFRESH_SECONDS):
                return

    thread = threading.Thread(target=draw, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        os.write(terminal, b"\r\x1b[K")
        os.close(terminal)


def show_waiting_for(results: Iterator[T], doing: str) -> Iterator[T]:
    """Yield results; `show_waiting` until each of them is there."""
    while True:
        with show_waiting(doing):
            result = next(results, None)
        if result is None:
            return
        yield result
