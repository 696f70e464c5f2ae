"""Faults of JAX's own under its upgrade flags, by name; `tests/numerics/test_upgrades.py` says when they are mended."""

from collections.abc import Callable
from typing import TypeVar

import jax
import pytest

from spmd.jaxpr.upgrades import IS_FIRST_FORM

F = TypeVar("F", bound=Callable)

IS_OLD = IS_FIRST_FORM
"""JAX 0.10.2: `jax.checkpoint` ignores combined policies and those that offload, and sees no custom derivative."""

ARE_ON = bool(getattr(jax.config, "jax_remat3", False))
"""Whether this run is one with the flags in the environment."""

UNLESS_OLD = [] if IS_OLD else [pytest.mark.upgrades]
"""The mark of files with what JAX 0.10.2 cannot do under the flags."""

IN_CUSTOM_VJP = True
"""JAX 0.10.2 and 0.12.0.1: what the policy `dots` saves in a custom derivative is computed again."""

POLICIES = {
    "selective": False,
    "save:hidden": False,
    "save:operand": IS_OLD,
    "offload:hidden": IS_OLD,
    "store:int8=hidden": IS_OLD,
    "store:int8=operand": IS_OLD,
    "store:int8=hidden offload:hidden": IS_OLD,
    "dots": IN_CUSTOM_VJP,
}
"""Remat policy → whether a fault of JAX keeps it from being applied under the flags."""


def unless_old(test: F) -> F:
    """Marks a test of what JAX 0.10.2 cannot do under the flags."""
    return test if IS_OLD else pytest.mark.upgrades(test)


def fault(remat: str) -> bool:
    """Whether a fault of JAX keeps a policy from being applied under the flags."""
    return POLICIES.get(remat, IS_OLD and ":" in remat)
