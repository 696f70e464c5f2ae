"""Source lines of the operations of a traced program."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_LIBRARIES = ("flax", "jax", "optax")
_WRAPPERS = ("spmd/plan/flax_dtypes.py",)
"""Files of this package that only call what another function is about to call."""


def source_line(frames: Sequence[tuple[str, int]], wrappers: tuple[str, ...] = ()) -> str:
    """Return `file:line` of the innermost frame outside of libraries and wrappers, or the innermost of all.

    Args:
        frames: File and line, the innermost first.
        wrappers: Ends of the names of files that act for their caller.
    """
    outside = [(_relative(file), line) for file, line in frames if not file.endswith((*_WRAPPERS, *wrappers))]
    own = [frame for frame in outside if frame[0].partition(os.sep)[0] not in _LIBRARIES]
    inner = [(_relative(file), line) for file, line in frames[:1]]
    return next((f"{file}:{line}" for file, line in (*own, *outside, *inner)), "")


def equation_line(equations: Iterable[Any], wrappers: tuple[str, ...] = ()) -> str:
    """Return `file:line` of an equation and those around it, the innermost first; empty where JAX kept no frames."""
    traces = [equation.source_info.traceback for equation in equations]
    frames = [(frame.file_name, frame.line_num) for trace in traces if trace for frame in trace.frames]
    return source_line(frames, wrappers)


def _relative(file: str) -> str:
    """Return the file relative to the folder of `sys.path` that Python found it in."""
    roots = [root for root in map(os.path.abspath, sys.path) if file.startswith(f"{root}{os.sep}")]
    return file.removeprefix(max(roots, key=len, default="")).lstrip(os.sep) if roots else file
