"""Choices of a parametrized test of which some are for every change; the others are soak."""

from collections.abc import Iterable
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
