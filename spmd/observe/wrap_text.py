"""Texts and tables in the width of the terminal."""

import re
import shutil
import sys
import textwrap
from typing import TextIO


def wrap_to_terminal(text: str, stream: TextIO | None = None, *, indent: int = 4) -> str:
    """Return a text in the width of the terminal; the same text if there is no terminal."""
    if stream is None:
        stream = sys.stdout
    if not stream.isatty():
        return text
    return wrap_text(text, shutil.get_terminal_size().columns, indent)


def wrap_text(text: str, width: int, indent: int = 4) -> str:
    """Break lines longer than `width` between columns, and within a column only at its words.

    Columns are separated by two spaces or more.

    Args:
        indent: Of continued lines, beyond that of the line.

    Example:
        >>> print(wrap_text("kernel  float32[8×8]  P(fsdp, tensor)  a rule", width=30))
        kernel  float32[8×8]
            P(fsdp, tensor)  a rule
    """
    lines = []
    for line in text.split("\n"):
        lines += _parts(line, width, indent)
    return "\n".join(lines)


def _parts(line: str, width: int, indent: int) -> list[str]:
    """Return the lines in place of one."""
    if len(line) <= width:
        return [line]
    start = len(line) - len(line.lstrip())
    margin = " " * min(start + indent, width // 2)
    first, *gaps_and_cells = re.split(r"( {2,})", line[start:])
    parts = [" " * start + first]
    for gap, cell in zip(gaps_and_cells[::2], gaps_and_cells[1::2], strict=True):
        if len(parts[-1]) + len(gap) + len(cell) <= width:
            parts[-1] += gap + cell
        else:
            parts.append(margin + cell)
    lines = []
    for part in parts:
        lines += _words(part, width, margin)
    return lines


def _words(part: str, width: int, margin: str) -> list[str]:
    """Break a cell at its words; continued lines begin with `margin`."""
    if len(part) <= width:
        return [part]
    text = part.lstrip()
    start = len(part) - len(text)
    return textwrap.wrap(
        text,
        width,
        break_long_words=False,
        break_on_hyphens=False,
        initial_indent=part[:start],
        subsequent_indent=margin,
    )
