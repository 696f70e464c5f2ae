"""A frozen parameter in 4 or 8 bits: sharded and saved as codes, and decoded for its use."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.lora.weight_formats import FORMATS, Parts, WeightFormat
from spmd.model_interface.wrapped_param import StoredParam, has_fetched, start_layer
from spmd.plan.fsdp import decode_shards
from spmd.sharding.collectives import gather_dims
from spmd.sharding.dims import spec_dims
from spmd.sharding.mesh import AnyMesh, shards_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedParam(StoredParam):
    """The arrays of a parameter in a format, as fields, so that each has a path of its own.

    Attributes:
        codes: As `spmd.lora.weight_formats.Parts` says, like the following ones.
        format: A name in `FORMATS`.
        param_dtype: Dtype of the parameter without a cast.
        path: Its path in the model.
        takes_codes: Whether its layer gathers it as codes; else the layer is given the parameter.
    """

    codes: Any
    scale: Any
    outer_scale: Any
    offset: Any
    format: str = dataclasses.field(metadata={"static": True})
    param_dtype: str = dataclasses.field(metadata={"static": True})
    path: str = dataclasses.field(metadata={"static": True})
    takes_codes: bool = dataclasses.field(metadata={"static": True})

    @property
    def parts(self) -> Parts:
        """The arrays."""
        return Parts(self.codes, self.scale, self.outer_scale, self.offset)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameter without a cast."""
        return jnp.dtype(self.param_dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self._format.shape_of(self.codes.shape)

    @property
    def is_fetched(self) -> bool:
        """Whether its layer copies it from another memory."""
        return has_fetched(self.parts)

    def at_layer(self) -> "QuantizedParam | Array":
        """Return the codes, fetched if need be, or the parameter for a layer without codes."""
        here = self._with(start_layer(self.parts))
        if self.takes_codes:
            return here
        return decode_shards(here, self.path, self.dtype, is_stack=False)

    def __jax_array__(self) -> Array:
        """Return the parameter, for a layer without `start_layer`."""
        return self.decoded(self.dtype)

    def __getitem__(self, index: Any) -> Array:
        """Return a part of the parameter, as Flax's layers take their arrays."""
        return self.__jax_array__()[index]

    def operand(self) -> Any:
        """Return the codes: a linear layer gathers them, and decodes them for its matmuls."""
        return self

    def decoded(self, dtype: Any) -> Array:
        """Return the parameter."""
        return self._format.decode(self.parts, dtype)

    def abstract_param(self) -> jax.ShapeDtypeStruct:
        """Return the parameter as an abstract array, sharded as its codes are."""
        of_codes = self.codes.sharding
        sharding = NamedSharding(of_codes.mesh, of_codes.spec)  # in device memory
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)

    def specs_by(self, spec: P) -> Self:
        """Return the spec of each array: blocks of scales are split as the parameter is."""
        ndim = len(self.shape)
        entries = [*spec, *(None,) * (ndim - len(spec))]
        lead = entries[:-2]
        of_scale = list(entries)
        if not self._format.block:
            of_scale[-2] = None
        specs = Parts(P(*entries), P(*of_scale), P(*lead, None), P(*lead))
        return self._with(_where_present(specs, self.parts))

    def stored(self, param: Array) -> Self:
        """Encode a parameter, and place each array as the one here.

        Every device encodes whole matrices, one after the other, so codes are equal on all meshes.
        """
        shardings = jax.tree.map(lambda part: part.sharding, self.parts)
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        encode = _encoder(self._format, param.sharding, param.ndim, specs)
        return self._with(jax.device_put(encode(param), shardings))

    @property
    def _format(self) -> WeightFormat:
        return FORMATS[self.format]

    def _with(self, parts: Parts) -> Self:
        return dataclasses.replace(self, **parts._asdict())


def quantize_param(
    param: Array, weight_format: WeightFormat, *, dtype: str, path: str, takes_codes: bool
) -> QuantizedParam:
    """Return a parameter in a format."""
    parts = weight_format.encode_all(param)
    return QuantizedParam(*parts, weight_format.name, dtype, path, takes_codes)


def _where_present(specs: Parts, arrays: Parts) -> Parts:
    """Return the specs of the present arrays."""
    kept = []
    for spec, array in zip(specs, arrays, strict=True):
        kept.append(None if array is None else spec)
    return Parts(*kept)


@functools.cache
def _encoder(
    weight_format: WeightFormat, sharding: NamedSharding, ndim: int, specs: Parts
) -> Callable[[Array], Parts]:
    """Return the program for encoding a parameter into arrays with some specs.

    Before the last two dimensions they are split as the parameter is.
    """
    mesh = sharding.mesh
    axes = tuple(mesh.shape)
    gathers = spec_dims(sharding.spec, ndim, axes)[-2:]
    lead = ndim - 2

    def own_part(whole: Array, spec: P) -> Array:
        return _own_part(whole, spec_dims(spec, lead + whole.ndim, axes)[lead:], mesh)

    def encode(matrix: Array) -> Parts:
        parts = weight_format.encode(gather_dims(matrix, mesh, gathers))
        return jax.tree.map(own_part, parts, specs)

    def encode_shard(shard: Array) -> Parts:
        encoded = jax.lax.map(encode, shard.reshape(-1, *shard.shape[-2:]))
        return jax.tree.map(lambda part: part.reshape(*shard.shape[:-2], *part.shape[1:]), encoded)

    run = jax.shard_map(
        encode_shard, mesh=mesh, in_specs=sharding.spec, out_specs=specs, check_vma=False
    )
    return jax.jit(run)


def _own_part(whole: Array, dims: Sequence[tuple[str, ...]], mesh: AnyMesh) -> Array:
    """Return the device's part of an array, whole on all devices."""
    for dim, axes in enumerate(dims):
        count = shards_of(axes, mesh.shape)
        if count > 1:
            size = whole.shape[dim] // count
            start = jax.lax.axis_index(axes) * size
            whole = jax.lax.dynamic_slice_in_dim(whole, start, size, dim)
    return whole
