"""Render a plan as text: heading, table with a line for each array, and bytes on each device."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from spmd.plan.fold import Row, folded_rows
from spmd.plan.records import PlanEntry
from spmd.tree import human_bytes


def format_rows(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """Align the rows of some tables as lines.

    Lines of gradients and optimizer state begin with the name of the table.
    """
    rows = []
    for table, cells_of_table in tables.items():
        prefix = ""
        if table not in ("params", "variables", "transforms"):
            prefix = f"{table.removesuffix('_state')}: "
        for path, *others in cells_of_table:
            rows.append((prefix + path, *others))
    widths = [0, 0, 0, 0]  # the last column, the rule, is not padded
    for row in rows:
        for column, width in enumerate(widths):
            widths[column] = max(width, len(row[column]))
    lines = []
    for path, shape, spec, size, rule in rows:
        cells = (
            path.ljust(widths[0]),
            shape.ljust(widths[1]),
            spec.ljust(widths[2]),
            size.rjust(widths[3]),
            rule,
        )
        lines.append("  ".join(cells))
    return lines


def format_footer(
    params: Iterable[PlanEntry], on_device: Mapping[str, int], on_host: Mapping[str, int]
) -> str:
    """Return the last line: the number of parameters, and the bytes on each device and its host."""
    count = sum(math.prod(entry.shape) for entry in params)
    footer = f"{count:,} parameters   on each device: {_list_sizes(on_device)}"
    if on_host:
        footer += f"   in host memory for each: {_list_sizes(on_host)}"
    return footer


def _list_sizes(sizes: Mapping[str, int]) -> str:
    return "   ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())


def format_html(heading: str, entries: Sequence[PlanEntry], footer: str) -> str:
    """Return a plan for a notebook: the heading, the bytes, and the table, opened by a click."""
    head = _html_cells("th", ("path", "array", "spec", "bytes of a device", "rule"))
    body = ""
    for row in folded_rows(entries):
        cells = _html_cells("td", row)
        body += f'<tr style="text-align:left">{cells}</tr>'
    return (
        f"<div><b>{html.escape(heading)}</b><br>{html.escape(footer)}"
        f"<details><summary>{len(entries):,} arrays</summary><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></details></div>"
    )


def _html_cells(tag: str, cells: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def diff_texts(mine: str, theirs: str) -> str:
    """Return the differing lines of two plans' texts (`-`, `+`), without padding of columns."""
    before = _lines_by_path(mine)
    after = _lines_by_path(theirs)
    changed = []
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) == after.get(name):
            continue
        if name in before:
            changed.append(f"- {before[name]}")
        if name in after:
            changed.append(f"+ {after[name]}")
    return "\n".join(changed)


def _lines_by_path(text: str) -> dict[str, str]:
    """Return path → line of a plan's text without padding.

    The first line is under an empty path, the last under a line break.
    """
    first, *rows, last = text.split("\n")
    lines = {"": _without_padding(first)}
    for row in rows:
        path, _, _ = row.partition("  ")
        lines[path] = _without_padding(row)
    lines["\n"] = _without_padding(last)
    return lines


def _without_padding(line: str) -> str:
    return " ".join(line.split())
