"""Holder of the ambient value of a trace, set by `spmd.plan.context` to its `TraceContext`.

It is in this package so that a model's own functions, which know no plan, can read the compute
dtype.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp


class _Precision(Protocol):
    @property
    def compute_dtype(self) -> jnp.dtype: ...


class _Context(Protocol):
    @property
    def precision(self) -> _Precision | None: ...


AMBIENT: Any = jax.make_user_context(default_value=None)
"""The context of the trace; None outside a plan. JAX's own caches are keyed by it."""


def ambient_compute_dtype() -> jnp.dtype | None:
    """Return the compute dtype of the plan in scope; None outside a plan."""
    context: _Context | None = AMBIENT.value
    if context is None or context.precision is None:
        return None
    return context.precision.compute_dtype
