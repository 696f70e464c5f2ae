"""Texts and tables that fit the width of the terminal."""

import re
import shutil
import sys
import textwrap
from typing import TextIO


def fitted(text: str, stream: TextIO | None = None, *, indent: int = 4) -> str:
    """Return text whose lines fit the terminal; the same text if there is no terminal."""
    stream = sys.stdout if stream is None else stream
    return fit(text, shutil.get_terminal_size().columns, indent) if stream.isatty() else text


def fit(text: str, width: int, indent: int = 4) -> str:
    """Break lines longer than `width`: between columns, which two spaces separate, and within one only at its words.

    Args:
        indent: Of continued lines, beyond that of the line.

    Example:
        >>> print(fit("kernel  float32[8×8]  P(fsdp, tensor)  a rule", width=30))
        kernel  float32[8×8]
            P(fsdp, tensor)  a rule
    """
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width, indent))


def _parts(line: str, width: int, indent: int) -> list[str]:
    if len(line) <= width:
        return [line]
    start = len(line) - len(line.lstrip())
    margin = " " * min(start + indent, width // 2)
    gaps_and_cells = re.split(r"( {2,})", line[start:])
    parts = [" " * start + gaps_and_cells[0]]
    for gap, cell in zip(gaps_and_cells[1::2], gaps_and_cells[2::2], strict=True):
        if len(parts[-1]) + len(gap) + len(cell) <= width:
            parts[-1] += gap + cell
        else:
            parts.append(margin + cell)

    def words(part: str) -> list[str]:
        first = part[: len(part) - len(part.lstrip())]
        options = {"initial_indent": first, "subsequent_indent": margin}
        wrap = textwrap.wrap(part.lstrip(), width, break_long_words=False, break_on_hyphens=False, **options)  # type: ignore[arg-type]
        return wrap if len(part) > width else [part]

    return [line for part in parts for line in words(part)]
