"""The boundary of a model, where arrays enter and leave the compute dtype of the plan in scope.

Layers of Flax, and products written by hand, compute in the dtype to which their parameters and
inputs promote. So a model without code for a plan computes in the plan's dtype if float parameters
and float inputs are cast before the call. Two kinds of parameters are not cast, because their
layers cast by themselves (`ModelInfo.cast_by_layer`): those of layers that gather their own
parameters, and those of a layer of Flax with a `dtype` of its own. Variables are never cast.

Outside a plan nothing is cast.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from spmd import tree
from spmd.model_interface.ambient import ambient_compute_dtype


@runtime_checkable
class KeepsDtype(Protocol):
    """Outputs with a dtype of their own, such as logits before they are computed."""

    keeps_dtype: ClassVar[bool]
    """Whether the arrays inside stay in their dtype."""


@dataclasses.dataclass(frozen=True)
class InComputeDtype:
    """A function of a model in the compute dtype of the plan in scope.

    It is called as `(params, *arguments, **keywords)`.

    Attributes:
        info: Returns the model's `ModelInfo`.
        inputs_from: Position, after the parameters, of the first argument that is an input of the
            model; None if the arguments are not cast here.
        returns_outputs: Whether its results are outputs of the model, which are cast to float32.
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
        """Call the function with cast parameters and inputs, and cast its outputs."""
        dtype = ambient_compute_dtype()
        if dtype is None:
            return self.function(params, *arguments, **keywords)
        own = self.info().cast_by_layer
        if own.issuperset(tree.flatten(params, is_leaf=_is_node)):
            return self.function(params, *arguments, **keywords)

        def cast_unless_own(path: str, x: Any) -> Any:
            if path in own:
                return x
            return cast_array(x, dtype)

        params = tree.map_with_path(cast_unless_own, params, is_leaf=_is_node)
        if self.inputs_from is not None:
            others = arguments[: self.inputs_from]
            inputs = arguments[self.inputs_from :]
            arguments = (*others, *cast_arrays(inputs, dtype))
            keywords = cast_arrays(keywords, dtype)
        returned = self.function(params, *arguments, **keywords)
        if not self.returns_outputs:
            return returned
        if self.has_variables:
            outputs, variables = returned
            return widen_arrays(outputs), variables
        return widen_arrays(returned)


def cast_arrays(values: Any, dtype: Any) -> Any:
    """Cast the float arrays of a tree; numbers of Python stay, as they promote to any dtype."""
    return jax.tree.map(lambda x: cast_array(x, dtype), values)


def widen_arrays(values: Any) -> Any:
    """Cast the narrow float arrays of a tree to float32, but for those in a `KeepsDtype`."""
    full_size = jnp.dtype(jnp.float32).itemsize

    def widen(x: Any) -> Any:
        if _is_float(x) and x.dtype.itemsize < full_size:
            return jnp.asarray(x, jnp.float32)
        return x

    def keeps_dtype(node: Any) -> bool:
        return isinstance(node, KeepsDtype) and node.keeps_dtype

    return jax.tree.map(widen, values, is_leaf=keeps_dtype)


def _is_float(x: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return False
    return jnp.issubdtype(x.dtype, jnp.floating)


def cast_array(x: Any, dtype: Any) -> Any:
    """Cast a float array; return anything else unchanged."""
    if not _is_float(x):
        return x
    return jnp.asarray(x, dtype)


def _is_node(x: Any) -> bool:
    """Return whether a node of a parameter tree is an array or a wrapped parameter."""
    return not isinstance(x, Mapping | list | tuple)
