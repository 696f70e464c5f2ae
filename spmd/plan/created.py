"""Ranks of parameters where they are created: inside of `nnx.vmap` or `nn.scan`, a layer sees its own dimensions alone.

Linen's methods are intercepted, so each parameter is seen in its own layer. NNX has no such place; there the random
draws of the traced creation tell it: a key that a module draws from its `nnx.Rngs` inside of a map is a key for each
layer of a stack.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from spmd import tree
from spmd.jaxpr.equations import inner_jaxprs
from spmd.model_api.kernels import Said
from spmd.plan.flax_layers import said_of


@contextlib.contextmanager
def recording(said: dict[str, Said]) -> Iterator[None]:
    """Record what each Linen layer says of its parameters, at the first call of one of its methods."""

    def record(next_method: Any, args: Any, keywords: Any, context: nn.module.InterceptorContext) -> Any:
        result = next_method(*args, **keywords)
        layer = context.module
        own = nn.meta.unbox(layer.variables.get("params", {})) if layer.scope is not None else {}
        for name, value in own.items():
            path = "/".join((*layer.path, name))
            if isinstance(value, Mapping) or path in said:
                continue
            shape = jnp.shape(value)  # a number of Python has none
            said[path] = said_of(layer, name, {}, shape) or Said(shape)
        return result

    with nn.intercept_methods(record):
        yield


def drawn_shapes(create: Any, *args: Any) -> dict[str, tuple[int | None, ...]]:
    """Return the path of each array that depends on random keys → its shape as created, None for an unknown size.

    Args:
        create: From its arguments, a key among them, to nested dictionaries of arrays.

    Example:
        >>> def create(key):
        ...     draw = lambda key: jax.random.normal(jax.random.fold_in(key, 0), (4,))  # as `nnx.Rngs` does
        ...     return {"layers": jax.vmap(draw)(jax.random.split(key, 3)), "head": draw(key)}
        >>> drawn_shapes(create, jax.random.key(0))
        {'head': (4,), 'layers': (4,)}
    """
    jaxpr, shapes = jax.make_jaxpr(create, return_shape=True)(*args)
    program, created = _Program(jaxpr.jaxpr), {}
    for (path, array), value in zip(tree.flatten(shapes).items(), jaxpr.jaxpr.outvars, strict=True):
        draws = list(program.draws(value))
        if not draws:
            continue
        maps, drawn = max(draws)
        rank = len(array.shape) - maps
        created[path] = tuple(drawn) if maps and len(drawn) == rank else array.shape if not maps else (None,) * rank
    return created


class _Program:
    """A jaxpr, or one inside of it, whose random draws are followed back to the modules that made them.

    Args:
        jaxpr: Its equations.
        loops: The number of loops around it whose iterations are stacked.
        outside: Its inputs → the program around it, and the value there.
    """

    def __init__(self, jaxpr: Jaxpr, loops: int = 0, outside: Mapping[Any, tuple["_Program", Any]] | None = None):
        self.loops, self.outside = loops, outside or {}
        self.made_by = {out: equation for equation in jaxpr.eqns for out in equation.outvars}

    def draws(self, value: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the number of maps around the module, and the shape, of each random draw that a value depends on."""
        seen, left = set[Any](), [value]
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
        """Return the number of maps around the module that drew a key from its `nnx.Rngs`; 0 if none did."""
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
        """Yield the programs that an equation calls with its operands, and what the value is in them."""
        index = equation.outvars.index(value)
        is_stacked = equation.primitive.name == "scan" and index >= equation.params["num_carry"]
        for inner in inner_jaxprs(equation):
            if (len(inner.invars), len(inner.outvars)) != (len(equation.invars), len(equation.outvars)):
                continue
            outside = {own: (self, operand) for own, operand in zip(inner.invars, equation.invars, strict=True)}
            yield _Program(inner, self.loops + is_stacked, outside), inner.outvars[index]
