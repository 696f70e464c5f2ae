"""Branches of a tick, each in a name scope that an audit finds."""

from collections.abc import Callable
from typing import Any

import jax

from spmd.plan.scopes import stage_scope


def cond(
    predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
) -> Any:
    """Apply `jax.lax.cond` in a scope of the branch's name, with barriers.

    Without barriers, XLA refuses branches with different shardings.
    """

    def barrier(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    with jax.named_scope(stage_scope(yes.__name__)):
        return jax.lax.cond(predicate, barrier(yes), barrier(no), *operands)
