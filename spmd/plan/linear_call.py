"""A linear function with a custom transpose, differentiable in every mode and to any order.

`jax.custom_vjp` has reverse mode only, and its backward function is differentiated as ordinary
code. Here the transpose of the transpose is the function itself, so a gather of a parameter stays a
gather in a Hessian-vector product, where the tangent of the parameter is gathered as the parameter
is. JAX's own `jax.custom_derivatives.linear_call` does the same, but has no batching rule, which
`jax.jacfwd` needs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True, eq=False)
class _Transpose:
    """The traced transpose, wrapped so that walks over a program's equations do not enter it."""

    call_jaxpr: ClosedJaxpr


def linear_call(
    function: Callable[[jax.Array], jax.Array],
    transpose: Callable[[jax.Array], jax.Array],
    x: jax.Array,
) -> jax.Array:
    """Return `function(x)`; `function` and `transpose` are each other's transpose.

    Args:
        function: A linear function of one array; traced immediately.
        transpose: Its transpose; traced immediately.

    Example:
        >>> import jax.numpy as jnp
        >>> double = lambda x: linear_call(lambda x: 2 * x, lambda y: 2 * y, x)
        >>> jax.grad(lambda x: double(x) ** 2)(3.0), jax.jacfwd(double)(jnp.ones(2)).tolist()
        (Array(24., dtype=float32), [[2.0, 0.0], [0.0, 2.0]])
    """
    forward = jax.make_jaxpr(function)(x)
    (out,) = forward.out_avals
    backward = jax.make_jaxpr(transpose)(jax.ShapeDtypeStruct(out.shape, out.dtype))
    return _linear_call.bind(x, call_jaxpr=forward, transpose=_Transpose(backward))


def _call(x: Any, *, call_jaxpr: ClosedJaxpr, transpose: _Transpose) -> Any:
    del transpose
    return jaxpr_as_fun(call_jaxpr)(x)[0]


def _transposed(
    cotangent: Any, x: Any, *, call_jaxpr: ClosedJaxpr, transpose: _Transpose
) -> list[Any]:
    del x
    return [
        _linear_call.bind(
            cotangent, call_jaxpr=transpose.call_jaxpr, transpose=_Transpose(call_jaxpr)
        )
    ]


def _batched(arrays: Any, dims: Any, *, call_jaxpr: ClosedJaxpr, transpose: _Transpose) -> Any:
    (x,) = arrays
    (dim,) = dims
    function = _mapped(call_jaxpr, dim)
    backward = _mapped(transpose.call_jaxpr, dim)
    return linear_call(function, backward, x), dim


def _mapped(jaxpr: ClosedJaxpr, dim: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a function of one array and one result, mapped over a dimension of both."""
    mapped = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=dim, out_axes=dim)
    return lambda x: mapped(x)[0]


_linear_call = Primitive("linear_call")
_linear_call.def_impl(_call)
_linear_call.def_abstract_eval(lambda x, *, call_jaxpr, transpose: call_jaxpr.out_avals[0])
mlir.register_lowering(_linear_call, mlir.lower_fun(_call, multiple_results=False))
ad.deflinear2(_linear_call, _transposed)
batching.primitive_batchers[_linear_call] = _batched
jet.deflinear(_linear_call)
