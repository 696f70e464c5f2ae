"""The boundary of a model, where arrays enter and leave the compute dtype of the plan in scope.

Layers of Flax, and products written by hand, compute in the dtype to which their parameters and inputs promote. So a
model that knows nothing of a plan computes in its dtype if float parameters and float inputs are cast before it. Two
kinds of parameters are not cast, because their layers cast by themselves (`ModelInfo.cast_by_layer`): those of layers
that gather their own parameters, and those of a layer of Flax with a `dtype` of its own. Variables are never cast.

Outside a plan the boundary does nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import tree
from spmd.model_api.ambient import ambient_compute_dtype

KEEPS_DTYPE = "keeps_dtype"
"""Attribute of a class of outputs that has a dtype of its own, such as that of logits which are not computed yet."""


@dataclasses.dataclass(frozen=True)
class InComputeDtype:
    """A function of a model, `(params, *arguments, **keywords)`, in the compute dtype of the plan in scope.

    Attributes:
        info: Returns the model's `ModelInfo`.
        inputs_from: The position after the parameters from which arguments are inputs; None if none of them enters the
            model here.
        returns_outputs: Whether what it returns leaves the model.
        has_variables: Whether it returns outputs with the updated variables.

    Example:
        >>> double = InComputeDtype(lambda params, x: params["w"] * x, lambda: None, inputs_from=0)
        >>> double({"w": jnp.float32(2)}, jnp.float32(3)).dtype
        dtype('float32')
    """

    function: Callable[..., Any]
    info: Callable[[], Any] = dataclasses.field(compare=False)
    inputs_from: int | None = None
    returns_outputs: bool = True
    has_variables: bool = False

    def __call__(self, params: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call the function with what enters it cast, and cast what leaves it."""
        dtype = ambient_compute_dtype()
        if dtype is None:
            return self.function(params, *arguments, **keywords)
        own = self.info().cast_by_layer
        if own.issuperset(tree.flatten(params, is_leaf=_is_node)):
            return self.function(params, *arguments, **keywords)
        params = tree.map_with_path(
            lambda path, x: x if path in own else cast_array(x, dtype), params, is_leaf=_is_node
        )
        if self.inputs_from is not None:
            before, inputs = arguments[: self.inputs_from], arguments[self.inputs_from :]
            arguments = (*before, *cast_arrays(inputs, dtype))
            keywords = cast_arrays(keywords, dtype)
        returned = self.function(params, *arguments, **keywords)
        if not self.returns_outputs:
            return returned
        if self.has_variables:
            outputs, variables = returned
            return widen_arrays(outputs), variables
        return widen_arrays(returned)


def cast_arrays(values: Any, dtype: Any) -> Any:
    """Cast the float arrays of a tree; numbers of Python stay, since they promote to the dtype of what they meet."""
    return jax.tree.map(lambda x: cast_array(x, dtype), values)


def widen_arrays(values: Any) -> Any:
    """Cast the float arrays of a tree that are narrower than float32 to float32, unless a class `keeps_dtype`."""

    def widen(x: Any) -> Any:
        if _is_float(x) and x.dtype.itemsize < jnp.dtype(jnp.float32).itemsize:
            return jnp.asarray(x, jnp.float32)
        return x

    return jax.tree.map(widen, values, is_leaf=lambda node: getattr(type(node), KEEPS_DTYPE, False))


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(x.dtype, jnp.floating)


def cast_array(x: Any, dtype: Any) -> Any:
    """Cast a float array; anything else is returned as it is."""
    return jnp.asarray(x, dtype) if _is_float(x) else x


def _is_node(x: Any) -> bool:
    """Return whether a value among parameters is a leaf or an object of several arrays, which its layer unpacks."""
    return not isinstance(x, Mapping | list | tuple)
