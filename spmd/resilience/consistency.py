"""Agreement of all processes before the first step: where they differ, all of them stop.

Processes that run different programs do not fail: they deadlock in the first collective that only some of them reach,
or train something else. So each states its config, plan, versions and data, and all statements are compared.
"""

import collections
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.hosts import gather_json
from spmd.errors import AgreementError, Problem

SHOWN = 5
"""Differences of one process that are listed; the rest is counted."""

Statements = Mapping[str, Any]
"""Name → JSON value; texts are compared line by line."""


def check_hosts_agree(statements: Statements) -> None:
    """Compare the statements of all processes; every process makes this call, and all raise the same error."""
    text = json.dumps(statements, sort_keys=True)
    # Digests first: they are short, and almost always equal.
    if len(set(gather_json(hashlib.sha256(text.encode()).hexdigest()))) > 1:
        everyone = [json.loads(other) for other in gather_json(text)]
        raise AgreementError("The processes do not agree, and none of them starts:", differences(everyone))


def source_fingerprint() -> str:
    """Return a digest of the source of this package and of those that ship with it."""
    package = Path(__file__).resolve().parents[1]
    linked = (path for name in ("models", "partition_rules", "name_maps") for path in (package / name).glob("*.py"))
    digest = hashlib.sha256()
    for path in sorted({*package.rglob("*.py"), *linked}):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def differences(everyone: Sequence[Statements]) -> list[Problem]:
    """Return who differs from the most common value; of two that are as common, the lower process's counts.

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
        agreeing = f"process {values.index(usual)}" + (f" and {count - 1} more" if count > 1 else "")
        for process, value in enumerate(values):
            if value != usual:
                found[process] += 1
                if found[process] <= SHOWN:
                    fix = "start every process with the same command, files and versions"
                    problems.append(Problem(f"process {process}", f"{name} is {value}", f"{agreeing}: {usual}", fix))
    more = {process: count - SHOWN for process, count in found.items() if count > SHOWN}
    return problems + [Problem(f"process {process}", f"and {n} more differences") for process, n in more.items()]


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, str) and "\n" in value:
        for number, line in enumerate(value.split("\n"), 1):
            yield f"{path}, line {number}", line
    else:
        yield path, str(value)
