"""Ranks of parameters at creation; in `nnx.vmap` or `nn.scan`, a layer sees its own dimensions.

Linen's methods are intercepted, so each parameter is seen in its own layer. NNX has no
interceptors; there the rank is read from the random draws of the traced creation: a key drawn by a
module from its `nnx.Rngs` inside of a map is a key for each layer of a stack.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from spmd import tree
from spmd.jaxpr.equations import has_arity, inner_jaxprs, producers, stacked_outputs
from spmd.model_interface.kernels import Said
from spmd.plan.flax_layers import said_of


@contextlib.contextmanager
def recording(said: dict[str, Said]) -> Iterator[None]:
    """Record the statements of Linen layers about their parameters, at each layer's first call."""

    def record(
        next_method: Any, args: Any, keywords: Any, context: nn.module.InterceptorContext
    ) -> Any:
        result = next_method(*args, **keywords)
        layer = context.module
        if layer.scope is not None:
            _record_layer(layer, said)
        return result

    with nn.intercept_methods(record):
        yield


def _record_layer(layer: nn.Module, said: dict[str, Said]) -> None:
    own = nn.meta.unbox(layer.variables.get("params", {}))
    for name, value in own.items():
        path = "/".join((*layer.path, name))
        if isinstance(value, Mapping) or path in said:
            continue
        shape = jnp.shape(value)  # a Python number has no attribute `shape`
        said[path] = said_of(layer, name, {}, shape) or Said(shape)


def drawn_shapes(create: Any, *args: Any) -> dict[str, tuple[int | None, ...]]:
    """Return the shape as created of each randomly drawn array, by path; None for an unknown size.

    Args:
        create: From its arguments, a key among them, to nested dictionaries of arrays.

    Example:
        >>> def draw(key):
        ...     return jax.random.normal(jax.random.fold_in(key, 0), (4,))  # as `nnx.Rngs` does
        >>> def create(key):
        ...     return {"layers": jax.vmap(draw)(jax.random.split(key, 3)), "head": draw(key)}
        >>> drawn_shapes(create, jax.random.key(0))
        {'head': (4,), 'layers': (4,)}
    """
    jaxpr, shapes = jax.make_jaxpr(create, return_shape=True)(*args)
    program = _Program(jaxpr.jaxpr)
    created = {}
    outputs = zip(tree.flatten(shapes).items(), jaxpr.jaxpr.outvars, strict=True)
    for (path, array), value in outputs:
        draws = list(program.draws(value))
        if draws:
            maps, drawn = max(draws)
            created[path] = _shape_of_layer(array.shape, maps, drawn)
    return created


def _shape_of_layer(
    shape: tuple[int, ...], maps: int, drawn: tuple[int, ...]
) -> tuple[int | None, ...]:
    """Return an array's shape in its own layer.

    Args:
        maps: The number of maps around the layer.
        drawn: The shape of the random draw.
    """
    if not maps:
        return shape
    rank = len(shape) - maps
    if len(drawn) == rank:
        return drawn
    return (None,) * rank


class _Program:
    """A jaxpr, or an inner one, with the origins of its values, to trace random draws to modules.

    Args:
        jaxpr: The equations.
        loops: The number of loops with stacked iterations around the jaxpr.
        outside: Input of an inner jaxpr → the program around it, and the value there.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        loops: int = 0,
        outside: Mapping[Any, tuple["_Program", Any]] | None = None,
    ) -> None:
        self.loops = loops
        self.outside = outside or {}
        self.made_by = producers(jaxpr)

    def draws(self, value: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each random draw behind a value: the maps around its module, and its shape."""
        seen = set[Any]()
        left = [value]
        while left:
            value = left.pop()
            if isinstance(value, Literal) or value in seen or value not in self.made_by:
                continue
            seen.add(value)
            equation = self.made_by[value]
            if equation.primitive.name == "random_bits":
                yield self.maps_around(equation.invars[0]), tuple(equation.params["shape"])
                continue
            for program, result in self._inside(equation, value):
                yield from program.draws(result)
            left += equation.invars

    def maps_around(self, key: Any) -> int:
        """Return the number of maps around the module behind a key; 0 without an `nnx.Rngs`."""
        while key in self.made_by:
            equation = self.made_by[key]
            if equation.primitive.name == "random_fold_in":
                return self.loops + key.aval.ndim
            for program, result in self._inside(equation, key):
                return program.maps_around(result)
            key = equation.invars[0]
        if key in self.outside:
            program, value = self.outside[key]
            return program.maps_around(value)
        return 0

    def _inside(self, equation: JaxprEqn, value: Any) -> Iterator[tuple["_Program", Any]]:
        """Yield the programs called by an equation with its operands, and the value in them."""
        index = equation.outvars.index(value)
        is_scan = equation.primitive.name == "scan"
        is_stacked = is_scan and stacked_outputs(equation)[index]
        for inner in inner_jaxprs(equation):
            if not has_arity(inner, equation):
                continue
            outside = {}
            for own, operand in zip(inner.invars, equation.invars, strict=True):
                outside[own] = (self, operand)
            yield _Program(inner, self.loops + is_stacked, outside), inner.outvars[index]
