"""A moving line during long work, such as a compilation."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")


@contextlib.contextmanager
def spinner(doing: str, *, plain: bool = False) -> Iterator[None]:
    """Show the work of a block and its time so far, on a terminal.

    The line is on standard error and vanishes with the block. Elsewhere nothing is written, or with
    `plain` one line on standard output.
    """
    if not sys.stderr.isatty():
        if plain:
            print(f"{doing} …", flush=True)
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
    """Yield results; `spinner` until each of them is there."""
    while True:
        with spinner(doing):
            result = next(results, None)
        if result is None:
            return
        yield result
