"""Parameters and variables in the form of generation: each token reads all of them.

Reading them takes most of the time of a token, so each array is prepared once:

```
stacked layers   [layer, in, out]  ──▶  an array for each layer: a loop would copy each slice
dtype            float32           ──▶  bfloat16, if every use casts to it
sharding         of the training   ──▶  of the generator's plan
```

Programs are traced with arrays as the model has them: stacks put together of layers, dtypes cast
back. Their loops over layers are unrolled, and the compiler removes both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.jaxpr.promoted import used_dtype
from spmd.jaxpr.scanned_inputs import scanned_inputs, unroll_scans
from spmd.jaxpr.traced_program import read_program
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import shards_of

MOST_LAYERS = 256
"""Layers of the largest stack that is read layer by layer: its loop is unrolled."""


@dataclasses.dataclass(frozen=True)
class ArrayForm:
    """How programs read an array of the model.

    Attributes:
        dtype: The narrower dtype of all uses; None for the array's own.
        by_layer: Whether loops read it layer by layer.
    """

    dtype: Any = None
    by_layer: bool = False


def array_forms(programs: Sequence[ClosedJaxpr], count: int) -> list[ArrayForm]:
    """Return a form for each of the first `count` inputs, allowed by all programs."""
    forms = []
    scanned = list(map(scanned_inputs, programs))
    traced = list(map(read_program, programs))
    for number in range(count):
        dtype, *others = (used_dtype(program, number, differentiated=False) for program in traced)
        if any(other != dtype for other in others):
            dtype = None
        shape = traced[0].inputs[number].shape
        is_scanned = all(flags[number] for flags in scanned)
        forms.append(ArrayForm(dtype, is_scanned and 1 <= shape[0] <= MOST_LAYERS))
    return forms


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["dtypes", "structure"]
)
@dataclasses.dataclass(frozen=True)
class ModelArrays:
    """Parameters and variables of a model, as programs read them.

    Attributes:
        arrays: An array, or a tuple of those of each layer, for each leaf of `(params, variables)`.
        dtypes: The dtype of each leaf in the model.
        structure: The structure of `(params, variables)`.
    """

    arrays: tuple[jax.Array | tuple[jax.Array, ...], ...]
    dtypes: tuple[Any, ...]
    structure: Any

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(params, variables, *arguments)`; call it in a jitted function."""
        leaves = []
        by_layer = []
        for array, dtype in zip(self.arrays, self.dtypes, strict=True):
            by_layer.append(isinstance(array, tuple))
            leaves.append(_as_in_model(array, dtype))
        params, variables = jax.tree.unflatten(self.structure, leaves)
        jaxpr, outputs = jax.make_jaxpr(function, return_shape=True)(params, variables, *arguments)
        others = jax.tree.leaves(arguments)
        by_layer += [False] * len(others)
        results = jaxpr_as_fun(unroll_scans(jaxpr, by_layer))(*leaves, *others)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)

    @property
    def is_deleted(self) -> bool:
        """Whether an array was deleted, as by a training step."""
        return any(array.is_deleted() for array in jax.tree.leaves(self.arrays))


def _as_in_model(array: jax.Array | tuple[jax.Array, ...], dtype: Any) -> jax.Array:
    """Return a leaf as the model has it; the compiler removes a cast back to the narrower dtype."""
    if not isinstance(array, tuple):
        return array.astype(dtype)
    return jnp.stack([layer.astype(dtype) for layer in array])


def prepare_arrays(
    plan: ShardingPlan,
    params: Any,
    variables: Any,
    forms: Sequence[ArrayForm],
    *,
    donate: bool = False,
) -> ModelArrays:
    """Return arrays of a model in these forms, sharded as in a plan.

    An array that is so already is not copied. The others may have any sharding over the devices of
    the plan: no array passes through the host. A stack with layers on several devices stays whole.

    Args:
        donate: Whether to delete each array whose form changes, as soon as it is prepared.
    """
    given, structure = jax.tree.flatten((params, variables))
    places = jax.tree.leaves((plan.abstract_params, plan.abstract_variables))
    arrays = []
    dtypes = []
    for array, place, form in zip(given, places, forms, strict=True):
        prepared = _prepared(array, place.sharding, form)
        arrays.append(prepared)
        dtypes.append(array.dtype)
        if donate and prepared is not array and isinstance(array, jax.Array):
            array.delete()
    return ModelArrays(tuple(arrays), tuple(dtypes), structure)


def _prepared(array: Any, sharding: NamedSharding, form: ArrayForm) -> Any:
    if not isinstance(array, jax.Array):
        array = jax.device_put(array, sharding)
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        array = _moved(array, form.dtype, sharding)
    if not form.by_layer or _is_split_by_layer(sharding):
        return _cast(array, form.dtype)
    of_layer = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    layers = []
    for number in range(array.shape[0]):
        layers.append(_take_layer(array, number, form.dtype, of_layer))
    return tuple(layers)


def _is_split_by_layer(sharding: NamedSharding) -> bool:
    """Return whether an axis of the mesh splits the layers of a stack."""
    if not sharding.spec:
        return False
    return shards_of(sharding.spec[0], sharding.mesh.shape) > 1


def _moved(array: jax.Array, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array in another sharding over the same devices; narrower, before it is sent."""
    given = array.sharding
    if not isinstance(given, NamedSharding) or given.memory_kind != sharding.memory_kind:
        return jax.device_put(array, sharding)
    if list(given.mesh.devices.flat) != list(sharding.mesh.devices.flat):
        # A program takes its devices in one order.
        return jax.device_put(_cast(array, dtype), sharding)
    return reshard(array, dtype, sharding)


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    if dtype is None:
        return array
    return array.astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def reshard(array: jax.Array, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array in a dtype and a sharding; None for its own dtype."""
    return jax.lax.with_sharding_constraint(_cast(array, dtype), sharding)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _take_layer(
    stack: jax.Array, number: jax.Array, dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """Return a layer of a stack in a dtype; one program for all layers."""
    layer = jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
    return jax.lax.with_sharding_constraint(_cast(layer, dtype), sharding)
