"""Differences between the statements of several processes, as problems."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.errors import Problem

SHOWN = 5
"""Differences of one process that are listed; the rest is counted."""

Statements = Mapping[str, Any]
"""Name → JSON value; texts are compared line by line."""


def differences(everyone: Sequence[Statements]) -> list[Problem]:
    """Return a problem for each process with another value than the most common one.

    Of two equally common values, that of the lower process counts.

    Example:
        >>> print(*differences([{"steps": 9}, {"steps": 9}, {"steps": 8}]))
        process 2: steps is 8
            process 0 and 1 more: 9
            fix: start every process with the same command, files and versions
    """
    flat = [dict(_flatten("", statements)) for statements in everyone]
    names: dict[str, None] = {}
    for statements in flat:
        names |= dict.fromkeys(statements)
    problems = []
    found: collections.Counter[int] = collections.Counter()
    for name in names:
        values = [statements.get(name, "nothing") for statements in flat]
        usual, detail = _most_common(values)
        for process, value in enumerate(values):
            if value == usual:
                continue
            found[process] += 1
            if found[process] <= SHOWN:
                fix = "start every process with the same command, files and versions"
                problems.append(Problem(f"process {process}", f"{name} is {value}", detail, fix))
    for process, count in found.items():
        if count > SHOWN:
            what = f"and {count - SHOWN} more differences"
            problems.append(Problem(f"process {process}", what))
    return problems


def _most_common(values: Sequence[str]) -> tuple[str, str]:
    """Return the most common value, and its processes in words."""
    [(usual, count)] = collections.Counter(values).most_common(1)
    processes = f"process {values.index(usual)}"
    if count > 1:
        processes += f" and {count - 1} more"
    return usual, f"{processes}: {usual}"


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of each value, or of each line of a longer text."""
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        for name, inner in value.items():
            yield from _flatten(f"{prefix}{name}", inner)
    elif isinstance(value, str) and "\n" in value:
        for number, line in enumerate(value.split("\n"), 1):
            yield f"{path}, line {number}", line
    else:
        yield path, str(value)
