"""The compute dtype of Flax's layers under a plan, with or without a `dtype` of their own.

A layer with a `dtype` of its own computes in it whatever the plan's precision, and gets its
parameters in the dtype in which they are stored. A layer without a `dtype` computes in the dtype to
which its parameters and inputs promote: the compute dtype of the plan, or float32 where the model
adds a constant in float32. Products of parameters are then narrow all the same
(`spmd.jaxpr.promoted`); products of attention, which has no parameters, are made narrow here.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from spmd.model_interface.ambient import ambient_compute_dtype
from spmd.model_interface.compute_dtype import cast_array

CAST_BY_LAYER = "cast_by_layer"
"""Metadata of a parameter of NNX whose layer casts it."""

_LAYERS_OF_NNX = "flax.nnx.nn."
_LAYERS_OF_LINEN = "flax.linen."
_NOT_A_LAYER = "flax.linen.module"


def mark_own_dtypes(module: nnx.Module) -> None:
    """Mark the parameters of each layer of Flax with a `dtype` of its own in a module."""
    inferred = {id(layer) for layer in _with_inferred_dtype(module)}
    for _, layer in nnx.iter_modules(module):
        if getattr(layer, "dtype", None) is None or id(layer) in inferred:
            continue
        if not _is_of(layer, _LAYERS_OF_NNX):
            continue
        for value in vars(layer).values():
            if isinstance(value, nnx.Param):
                value.set_metadata(cast_by_layer=True)


@contextlib.contextmanager
def record_own_dtypes() -> Iterator[set[str]]:
    """Yield a set; it collects the paths of called Linen layers with a `dtype` of their own."""
    found = set[str]()

    def record(
        run: Callable[..., Any], args: Any, keywords: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        if getattr(module, "dtype", None) is not None and _is_of(module, _LAYERS_OF_LINEN):
            found.add("/".join(module.path))
        return run(*args, **keywords)

    with nn.intercept_methods(record):
        yield found


def params_of(layers: Collection[str], paths: Collection[str]) -> frozenset[str]:
    """Return the paths of the parameters of some layers.

    Args:
        layers: The paths of the layers.
        paths: The paths of all parameters.
    """
    if "" in layers:  # the module itself
        return frozenset(paths)
    prefixes = tuple(f"{layer}/" for layer in layers)
    return frozenset(path for path in paths if path.startswith(prefixes))


def use_plan_dtype(module: nnx.Module) -> None:
    """Make lookups and attention of Flax's layers in a module compute in the plan's dtype.

    A layer with a `dtype` keeps it. Outside a plan the module is unchanged.
    """
    dtype = ambient_compute_dtype()
    if dtype is None:
        return
    for layer in _with_inferred_dtype(module):
        layer.dtype = dtype if isinstance(layer, nnx.Embed) else None
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.MultiHeadAttention) and layer.dtype is None:
            layer.attention_fn = functools.partial(_in_compute_dtype, layer.attention_fn)


def _with_inferred_dtype(module: nnx.Module) -> list[Any]:
    """Return the lookups and cells with the `dtype` of their parameters, as if without a `dtype`.

    These layers store a `dtype` in either case, so a layer created with the dtype of its parameters
    cannot be told from one created without a `dtype`.
    """
    found = list[Any]()
    for _, layer in nnx.iter_modules(module):
        if not isinstance(layer, nnx.Embed | nnx.SimpleCell) or layer.dtype is None:
            continue
        if jnp.dtype(layer.dtype) != jnp.dtype(layer.param_dtype):
            continue
        found.append(layer)
        if isinstance(layer, nnx.SimpleCell):
            found += [layer.dense_h, layer.dense_i]
    return found


@contextlib.contextmanager
def narrow_linen_attention() -> Iterator[None]:
    """Run attention layers of Linen in the plan's compute dtype, unless they have a `dtype`."""

    def narrow(
        run: Callable[..., Any], args: Any, keywords: Any, context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        is_attention = isinstance(layer, nn.MultiHeadDotProductAttention)
        if not is_attention or context.method_name != "__call__":
            return run(*args, **keywords)
        if layer.dtype is not None:
            return run(*args, **keywords)
        return _in_compute_dtype(run, *args, **keywords)

    with nn.intercept_methods(narrow):
        yield


def _in_compute_dtype(attend: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Run attention with its arrays, and so its result, in the plan's compute dtype."""
    dtype = ambient_compute_dtype()
    if dtype is None:
        return attend(*args, **keywords)
    args = tuple(cast_array(x, dtype) for x in args)
    keywords = {name: cast_array(x, dtype) for name, x in keywords.items()}
    return attend(*args, **keywords)


def _is_of(module: Any, folder: str) -> bool:
    """Return whether the class of a module is a layer of Flax, or derived from one."""
    for kind in type(module).__mro__:
        home = kind.__module__
        if home.startswith(folder) and home != _NOT_A_LAYER:
            return True
    return False
