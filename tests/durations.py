"""How long each test of `make test` takes, as `make durations` measured it: a file that a test compares with the suite.

The seconds are those of one test on one core of two, its fixtures included: a run takes half of
their sum.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

RECORDED = Path(__file__).with_name("durations.txt")
MOST = 24 * 60
"""Seconds of one core that `make test` may take: 12 minutes on two."""


def read(path: Path = RECORDED) -> dict[str, float]:
    """Test → seconds; nothing where no file is."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {
        test: float(seconds) for seconds, _, test in (line.strip().partition(" ") for line in lines)
    }


def write(seconds: Mapping[str, float], path: Path) -> None:
    """One line for each test, the slowest first."""
    ordered = sorted(seconds.items(), key=lambda item: (-round(item[1], 2), item[0]))
    path.write_text("".join(f"{spent:7.2f} {test}\n" for test, spent in ordered), encoding="utf-8")


def by_file(recorded: Mapping[str, float]) -> dict[str, float]:
    """File → seconds of all of its tests."""
    totals: dict[str, float] = {}
    for test, spent in recorded.items():
        file = test.partition("::")[0]
        totals[file] = totals.get(file, 0.0) + spent
    return totals


def problems(recorded: Mapping[str, float], collected: Iterable[str]) -> list[str]:
    """What is wrong with a record of these tests: too much time, tests that are not in it.

    Args:
        recorded: Test → seconds.
        collected: The tests of `make test`, or some of them.
    """
    spent = sum(recorded.values())
    found = [
        f"{test} is not in tests/durations.txt: run make durations"
        for test in collected
        if test not in recorded
    ]
    if spent > MOST:
        found.append(
            f"make test takes {spent:.0f} s of one core, and may take {MOST}: {spent - MOST:.0f} too many"
        )
    return found
