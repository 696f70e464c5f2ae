"""Before the first step all processes say what they are about to do; where they differ, all of them stop.

Processes that run different programs do not fail, they hang in the first collective that only some of them reach, or
train something that nobody asked for. So each states its config, plan, versions and data; a digest of that is compared
first, and the statements themselves only where digests differ.
"""

import collections
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmd.errors import AgreementError, Problem

SHOWN = 5
"""Differences of one process that are listed; the rest is counted."""

Statements = Mapping[str, Any]
"""Name → JSON value; the lines of a text are compared one by one."""


def check_hosts_agree(statements: Statements) -> None:
    """Returns where every process states the same; every process makes this call.

    Args:
        statements: What this process is about to do.

    Raises:
        AgreementError: They differ; raised on every process, with who differs in what.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(statements, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    if len(np.unique(_gather(digest), axis=0)) == 1:
        return
    lengths = _gather(np.array([len(text)], np.int32))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = [json.loads(row[:length].tobytes()) for row, length in zip(_gather(padded), lengths, strict=True)]
    raise AgreementError("The processes do not agree, and none of them starts:", differences(everyone))


def source_fingerprint() -> str:
    """A digest of the source of this package and of those that ship with it: an edited file on one machine shows."""
    package = Path(__file__).resolve().parents[1]
    linked = (path for name in ("models", "partition_rules", "name_maps") for path in (package / name).glob("*.py"))
    digest = hashlib.sha256()
    for path in sorted({*package.rglob("*.py"), *linked}):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _gather(row: np.ndarray) -> np.ndarray:
    """`[n]` of each process → `[processes, n]` on all of them."""
    return np.asarray(multihost_utils.process_allgather(row))


def differences(everyone: Sequence[Statements]) -> list[Problem]:
    """Who differs in what from the value that most processes state; of two that are as common, the lower process's.

    Args:
        everyone: The statements of each process, in order.

    Example:
        >>> print(*differences([{"steps": 9}, {"steps": 9}, {"steps": 8}]))
        process 2: steps is 8
            process 0 and 1 more: 9
            fix: start every process with the same command, files and versions
    """
    flat = [dict(_flatten("", statements)) for statements in everyone]
    problems = []
    found: collections.Counter[int] = collections.Counter()
    for name in dict.fromkeys(name for statements in flat for name in statements):
        values = [statements.get(name, "nothing") for statements in flat]
        usual, count = collections.Counter(values).most_common(1)[0]
        first = values.index(usual)
        agreeing = f"process {first}" + (f" and {count - 1} more" if count > 1 else "")
        for process, value in enumerate(values):
            if value != usual:
                found[process] += 1
                if found[process] <= SHOWN:
                    fix = "start every process with the same command, files and versions"
                    problems.append(Problem(f"process {process}", f"{name} is {value}", f"{agreeing}: {usual}", fix))
    problems += [
        Problem(f"process {process}", f"and {count - SHOWN} more differences")
        for process, count in found.items()
        if count > SHOWN
    ]
    return problems


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, str) and "\n" in value:
        for number, line in enumerate(value.split("\n"), 1):
            yield f"{path}, line {number}", line
    else:
        yield path, str(value)
