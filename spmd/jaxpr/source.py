"""Source lines of the operations of a traced program."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_LIBRARIES = ("flax", "jax", "optax")
_WRAPPERS = ("spmd/plan/flax_dtypes.py",)
"""Files of this package with wrappers only: the line of their caller is shown."""


def source_line(frames: Sequence[tuple[str, int]], wrappers: tuple[str, ...] = ()) -> str:
    """Return `file:line` of the innermost frame outside of libraries and wrappers.

    Without one, return the innermost frame outside of wrappers, else the innermost one of all.

    Args:
        frames: File and line, the innermost first.
        wrappers: Ends of the names of files that act for their caller.
    """
    if not frames:
        return ""
    outside: list[str] = []
    for file, line in frames:
        if file.endswith((*_WRAPPERS, *wrappers)):
            continue
        relative = _relative(file)
        outside.append(f"{relative}:{line}")
        if relative.partition(os.sep)[0] not in _LIBRARIES:
            return outside[-1]
    if outside:
        return outside[0]
    file, line = frames[0]
    return f"{_relative(file)}:{line}"


def equation_line(equations: Iterable[Any], wrappers: tuple[str, ...] = ()) -> str:
    """Return `file:line` of an equation; empty where JAX kept no frames.

    `equations` are the equation and those around it, innermost first.
    """
    frames = []
    for equation in equations:
        trace = equation.source_info.traceback
        if not trace:
            continue
        for frame in trace.frames:
            frames.append((frame.file_name, frame.line_num))
    return source_line(frames, wrappers)


def _relative(file: str) -> str:
    """Return the file relative to its folder in `sys.path`."""
    longest = ""
    for root in map(os.path.abspath, sys.path):
        if file.startswith(f"{root}{os.sep}") and len(root) > len(longest):
            longest = root
    if not longest:
        return file
    return file.removeprefix(longest).lstrip(os.sep)
