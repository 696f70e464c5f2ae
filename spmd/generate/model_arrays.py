"""Parameters and variables in the form of generation, which reads all of them for each token.

Reading them takes most of the time of a token, so each array is prepared once:

```
stacked layers   [layer, in, out]  ──▶  an array for each layer: a loop would copy each slice
dtype            float32           ──▶  bfloat16, if every use casts to it
sharding         of the training   ──▶  of the generator's plan
```

Programs are traced with the model's own arrays. Their loops over layers are unrolled, and the
stack that they read is put together of the layers, which the compiler removes.
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


@dataclasses.dataclass(frozen=True)
class ArrayForm:
    """How programs read an array of the model.

    Attributes:
        dtype: The narrower dtype of all uses; None for the array's own.
        is_split: Whether loops read it layer by layer.
    """

    dtype: Any = None
    is_split: bool = False


def array_forms(programs: Sequence[ClosedJaxpr], count: int) -> list[ArrayForm]:
    """Return a form for each of the first `count` inputs, allowed by all programs."""
    forms = []
    scanned = [scanned_inputs(program) for program in programs]
    traced = [read_program(program) for program in programs]
    for number in range(count):
        dtypes = {used_dtype(program, number) for program in traced}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        is_split = all(flags[number] for flags in scanned)
        forms.append(ArrayForm(dtype, is_split))
    return forms


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["structure"]
)
@dataclasses.dataclass(frozen=True)
class ModelArrays:
    """Parameters and variables of a model, as programs read them.

    Attributes:
        arrays: An array, or a tuple of those of each layer, for each leaf of `(params, variables)`.
        structure: The structure of `(params, variables)`.
    """

    arrays: tuple[jax.Array | tuple[jax.Array, ...], ...]
    structure: Any

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(params, variables, *arguments)`; call it in a jitted function."""
        leaves = []
        is_split = []
        for array in self.arrays:
            is_split.append(isinstance(array, tuple))
            leaves.append(jnp.stack(array) if isinstance(array, tuple) else array)
        params, variables = jax.tree.unflatten(self.structure, leaves)
        jaxpr, outputs = jax.make_jaxpr(function, return_shape=True)(params, variables, *arguments)
        others = jax.tree.leaves(arguments)
        is_split += [False] * len(others)
        results = jaxpr_as_fun(unroll_scans(jaxpr, is_split))(*leaves, *others)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)


def prepare_arrays(
    plan: ShardingPlan, params: Any, variables: Any, forms: Sequence[ArrayForm]
) -> ModelArrays:
    """Return arrays of a model in these forms, sharded as in a plan.

    An array that is so already is not copied. The others may have any sharding over the devices of
    the plan: no array passes through the host.
    """
    given, structure = jax.tree.flatten((params, variables))
    places = jax.tree.leaves((plan.abstract_params, plan.abstract_variables))
    arrays = []
    for array, place, form in zip(given, places, forms, strict=True):
        arrays.append(_prepared(array, place.sharding, form))
    return ModelArrays(tuple(arrays), structure)


def _prepared(array: Any, sharding: NamedSharding, form: ArrayForm) -> Any:
    if not isinstance(array, jax.Array):
        array = jax.device_put(array, sharding)
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        array = _moved(array, form.dtype, sharding)
    if not form.is_split:
        return _cast(array, form.dtype)
    of_layer = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    layers = []
    for number in range(array.shape[0]):
        layers.append(_take_layer(array, number, form.dtype, of_layer))
    return tuple(layers)


def _moved(array: jax.Array, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array in another sharding over the same devices; narrower, before it is sent."""
    given = array.sharding
    devices = list(sharding.mesh.devices.flat)
    # A program takes its devices in one order.
    if isinstance(given, NamedSharding) and list(given.mesh.devices.flat) == devices:
        return reshard(array, dtype, sharding)
    return jax.device_put(_cast(array, dtype), sharding)


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    return array if dtype is None else array.astype(dtype)


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
