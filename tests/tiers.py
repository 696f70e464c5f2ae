"""Choices of a parametrized test of which some are for every change; the others are soak.

`long_rows.txt` lists rows that are soak because of their time: the longer ones of tests of which
half of the rows, or more, stay for every change.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def soak_but(choices: Iterable[Any], *in_ci: Any) -> list[Any]:
    """Return the values of a parameter, each that is not in `in_ci` with the mark `soak`.

    Raises:
        ValueError: A value in `in_ci` is none of the choices.
    """
    choices = list(choices)
    unknown = [choice for choice in in_ci if choice not in choices]
    if unknown:
        raise ValueError(f"{unknown} are none of {choices}")
    return [
        choice if choice in in_ci else pytest.param(choice, marks=pytest.mark.soak)
        for choice in choices
    ]


LONG_ROWS = frozenset(
    Path(__file__).with_name("long_rows.txt").read_text(encoding="utf-8").splitlines()
)
"""Names of the rows of `long_rows.txt`."""


def long_row_problems(long: Collection[str], every_change: Iterable[str]) -> list[str]:
    """Return what is wrong with rows that are soak, given the names of the tests of `make test`.

    Another row of the same test must be for every change.
    """
    kept = {name.partition("[")[0] for name in every_change}
    problems = []
    for name in long:
        if name.partition("[")[0] not in kept:
            problems.append(f"{name} is soak, and no row of its test is for every change")
    return problems
