"""Agreement of all processes before the first step: where they differ, all of them stop.

Processes that run different programs do not fail: they deadlock in the first collective that only
some of them reach, or train something else. So each states its config, plan, versions and data, and
all statements are compared.
"""

import collections
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.distributed.hosts import gather_json
from spmd.errors import AgreementError, Problem

SHOWN = 5
"""Differences of one process that are listed; the rest is counted."""

Statements = Mapping[str, Any]
"""Name → JSON value; texts are compared line by line."""


def check_hosts_agree(statements: Statements) -> None:
    """Compare the statements of all processes.

    Every process makes this call, and all raise the same error.
    """
    problems = _unequal_devices()
    if problems:
        raise AgreementError("Processes disagree, none starts:", problems)
    text = json.dumps(statements, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # Digests first: they are short, and almost always equal.
    digests = gather_json(digest)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(other) for other in gather_json(text)]
    title = "Processes disagree, none starts:"
    raise AgreementError(title, differences(everyone))


def _unequal_devices() -> list[Problem]:
    """Return a problem for each process with another number of devices than the most common one.

    JAX has told every process the devices of all, and exchanges no values where they differ.
    """
    counts = collections.Counter(device.process_index for device in jax.devices())
    return differences([{"devices": count} for _, count in sorted(counts.items())])


def source_fingerprint() -> str:
    """Return a digest of the source of this package and of the packages shipped with it."""
    package = Path(__file__).resolve().parents[1]
    paths = set(package.rglob("*.py"))
    for name in ("models", "partition_rules", "name_maps"):  # links, which rglob does not follow
        paths.update((package / name).glob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


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
