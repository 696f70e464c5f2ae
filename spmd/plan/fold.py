"""Fold lines of a plan that differ in one number of their paths, as those of unrolled layers do."""

import re
from collections.abc import Iterator, Sequence

from spmd.plan.records import PlanEntry
from spmd.tree import human_bytes

Row = tuple[str, str, str, str, str]
"""The cells of a line: path, dtype and shape, spec, bytes of a shard, and rule."""
_Numbered = tuple[str, int]
"""The text of a number in a path, and the index of its entry."""

_NUMBER = re.compile(r"(\d+)")


def rows(entries: Sequence[PlanEntry]) -> list[Row]:
    """Return the cells of each entry."""
    found = []
    for entry in entries:
        found.append(entry.row)
    return found


def folded_rows(entries: Sequence[PlanEntry]) -> list[Row]:
    """Return the cells of each entry, one line for entries that differ in a number alone.

    Their numbers are consecutive, and everything else is equal. The first number of a path that
    folds it does; bytes are those of one entry and of all. A line is at its first entry's place.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> entry = ("float32", ".*kernel", "P()", P(), "", "device", 32)
        >>> paths = ("layers/0/kernel", "layers/1/kernel", "layers/3/kernel")
        >>> for row in folded_rows([PlanEntry(path, (8,), *entry) for path in paths]):
        ...     print(*row)
        layers/{0…1}/kernel float32[8] P() 2 × 32 B = 64 B .*kernel
        layers/3/kernel float32[8] P() 32 B .*kernel
    """
    lines: dict[int, Row] = {}
    left = list(range(len(entries)))
    deepest = 0
    for entry in entries:
        deepest = max(deepest, len(_NUMBER.findall(entry.path)))
    for position in range(deepest):
        folded = set[int]()
        for run in _runs(entries, left, position):
            _, indices = zip(*run, strict=True)
            folded.update(indices)
            lines[min(indices)] = _folded(entries[indices[0]], position, run)
        left = sorted(set(left) - folded)
    for index in left:
        lines[index] = entries[index].row
    return [lines[index] for index in sorted(lines)]


def _runs(
    entries: Sequence[PlanEntry], indices: Sequence[int], position: int
) -> Iterator[list[_Numbered]]:
    """Yield the runs of consecutive numbers at a position of otherwise equal entries."""
    groups: dict[tuple[object, ...], list[_Numbered]] = {}
    for index in indices:
        entry = entries[index]
        parts = _NUMBER.split(entry.path)
        place = 2 * position + 1  # the texts between numbers have the even places
        if place >= len(parts):
            continue
        others = (*parts[:place], None, *parts[place + 1 :])
        _, *cells = entry.row
        key = (others, tuple(cells), entry.bytes_per_device)
        groups.setdefault(key, []).append((parts[place], index))
    for group in groups.values():
        for run in _consecutive(group):
            if len(run) > 1:
                yield run


def _consecutive(group: Sequence[_Numbered]) -> list[list[_Numbered]]:
    """Split numbers into runs, each one more than the one before."""
    runs: list[list[_Numbered]] = []
    for numbered in sorted(group, key=lambda each: int(each[0])):
        if runs and int(numbered[0]) == int(runs[-1][-1][0]) + 1:
            runs[-1].append(numbered)
        else:
            runs.append([numbered])
    return runs


def _folded(entry: PlanEntry, position: int, run: Sequence[_Numbered]) -> Row:
    """Return the cells of a run, of which one entry is given."""
    parts = _NUMBER.split(entry.path)
    first, _ = run[0]
    last, _ = run[-1]
    parts[2 * position + 1] = f"{{{first}…{last}}}"
    _, shape, spec, size, rule = entry.row
    total = human_bytes(len(run) * entry.bytes_per_device)
    return "".join(parts), shape, spec, f"{len(run)} × {size} = {total}", rule
