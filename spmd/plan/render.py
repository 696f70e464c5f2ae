"""Render a plan as text: the heading, a table with one line for each array, and the bytes on each device."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from spmd.plan.records import PlanEntry
from spmd.tree import human_bytes


def format_entries(tables: Mapping[str, Sequence[PlanEntry]]) -> list[str]:
    """Align the entries of some tables as lines; those of gradients and optimizer state begin with the table."""
    rows = []
    for table, entries in tables.items():
        prefix = "" if table in ("params", "variables", "transforms") else f"{table.removesuffix('_state')}: "
        rows += [(prefix + entry.row[0], *entry.row[1:]) for entry in entries]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [
        "  ".join((path.ljust(widths[0]), shape.ljust(widths[1]), spec.ljust(widths[2]), size.rjust(widths[3]), rule))
        for path, shape, spec, size, rule in rows
    ]


def format_footer(params: Iterable[PlanEntry], on_device: Mapping[str, int], on_host: Mapping[str, int]) -> str:
    """Return the last line: the number of parameters, and the bytes on each device and in its host memory."""

    def listed(sizes: Mapping[str, int]) -> str:
        return "   ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())

    hosted = f"   in host memory for each: {listed(on_host)}" if on_host else ""
    count = sum(math.prod(entry.shape) for entry in params)
    return f"{count:,} parameters   on each device: {listed(on_device)}{hosted}"


def format_html(heading: str, entries: Sequence[PlanEntry], footer: str) -> str:
    """Return a plan for a notebook: the heading, the bytes, and the table, which a click opens."""
    head = "".join(f"<th>{name}</th>" for name in ("path", "array", "spec", "bytes of a device", "rule"))
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in entry.row) for entry in entries)
    body = "".join(f'<tr style="text-align:left">{row}</tr>' for row in rows)
    return (
        f"<div><b>{html.escape(heading)}</b><br>{html.escape(footer)}"
        f"<details><summary>{len(entries):,} arrays</summary><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></details></div>"
    )


def diff_texts(mine: str, theirs: str) -> str:
    """Return the lines that differ between two plans' texts (`-`, `+`), whatever the padding of columns."""
    before, after = (_lines_by_path(text) for text in (mine, theirs))
    changed = []
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            changed += [f"{sign} {lines[name]}" for sign, lines in (("-", before), ("+", after)) if name in lines]
    return "\n".join(changed)


def _lines_by_path(text: str) -> dict[str, str]:
    first, *rows, last = text.split("\n")
    by_path = {row.split("  ")[0]: " ".join(row.split()) for row in rows}
    return {"": " ".join(first.split()), **by_path, "\n": " ".join(last.split())}
