"""A kernel's gradient in several copies, summed by additions.

XLA:TPU adds the slices of an array in a third to a seventh of the cycles of a sum over the
dimension (four to eight copies of 64 MiB in bfloat16; libtpu 0.0.42, v5e, v5p and v6e).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from spmd.jaxpr.equations import nested_jaxprs, producers, replace_equations


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_added_copies(run: Callable[..., jax.Array], fixed: Any, *arrays: jax.Array) -> jax.Array:
    """Return `run(fixed, *arrays)`; in its gradient, copies are added to each other.

    Copies are the slices of a sum over one dimension that is not among the last two, which make the
    tiles of an array.

    Args:
        run: Function without tracers of its own.
        fixed: Arrays without a gradient, in any structure.
    """
    return run(fixed, *arrays)


def _forward(run: Callable[..., jax.Array], fixed: Any, *arrays: jax.Array) -> tuple[Any, Any]:
    return jax.vjp(functools.partial(run, fixed), *arrays)


def _backward(run: Callable[..., jax.Array], pull: Any, d: jax.Array) -> tuple[Any, ...]:
    del run
    program = jax.make_jaxpr(pull)(d)
    additions = {}
    nested = list(nested_jaxprs(program))  # equations are known by their addresses
    for jaxpr in nested:
        made = producers(jaxpr)
        for equation in jaxpr.eqns:
            if _sums_copies(equation):
                additions[id(equation)] = _addition(equation, _stored_dtype(equation, made))
    gradients = jaxpr_as_fun(replace_equations(program, additions))(d)
    return None, *gradients


with_added_copies.defvjp(_forward, _backward)


def _sums_copies(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "reduce_sum" or len(equation.params["axes"]) != 1:
        return False
    (axis,) = equation.params["axes"]
    operand: Any = equation.invars[0].aval
    return operand.shape[axis] > 1 and axis < operand.ndim - 2


def _stored_dtype(equation: JaxprEqn, made: dict[Var, JaxprEqn]) -> Any:
    """Return the dtype of an operand before it was cast for its sum."""
    operand: Any = equation.invars[0]
    cast = made.get(operand)
    if cast is not None and cast.primitive.name == "convert_element_type":
        operand = cast.invars[0]
    return operand.aval.dtype


def _addition(equation: JaxprEqn, stored: Any) -> ClosedJaxpr:
    """Return a program for the sum of copies, cast back to their dtype in memory first.

    XLA removes both casts. It would not fuse a cast of all copies with their slices. The sum is
    rounded to that dtype, as JAX does next.
    """
    (axis,) = equation.params["axes"]
    operand: Any = equation.invars[0].aval

    def add(copies: jax.Array) -> jax.Array:
        narrow = copies.astype(stored)
        slices = []
        for number in range(copies.shape[axis]):
            one = jax.lax.index_in_dim(narrow, number, axis, keepdims=False)
            slices.append(one.astype(copies.dtype))
        total = functools.reduce(operator.add, slices).astype(stored)
        # Fused with the readers of the sum, copies would stay in memory, and be added again.
        return jax.lax.optimization_barrier(total).astype(copies.dtype)

    return jax.make_jaxpr(add)(jax.ShapeDtypeStruct(operand.shape, operand.dtype))
