"""Declaration of cached arrays by token mixers, for `spmd.layers.kv_cache`.

A mixer declares a `CacheEntry`: a dataclass of named arrays, each with the names of its axes.

```
attention          key, value  "batch length heads _"    the token is added
latent attention   latent      "batch length _"          the same, without heads
recurrent mixer    state       "batch heads _ _"         replaced by each token
convolution        inputs      "batch _ heads"           replaced; channels are split as heads
```

Stacked layers add dimensions in front. The axes decide how an array grows, how it is split over a
mesh, and what has a scale of its own in int8 (`encode_entry`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from spmd.codecs import dequantize, largest_code, quantize
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, shards_of

WHOLE = "_"
_SPLIT_OVER: dict[str, Any] = {
    "batch": BATCH_AXES,
    "length": "sequence",
    "heads": "tensor",
    WHOLE: None,
}


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """Base of the cached arrays of a mixer; fields are `cached_array`s.

    Example:
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass(frozen=True)
        ... class LatentCache(CacheEntry):
        ...     latent: Array = cached_array("batch length _")
        >>> LatentCache(jnp.ones((1, 3, 8))).axes()
        {'latent': ('batch', 'length', '_')}
    """

    @classmethod
    def axes(cls) -> dict[str, tuple[str, ...]]:
        """Return the axes of each array.

        Raises:
            ConfigError: A field is no `cached_array`.
        """
        axes = {}
        problems = []
        for field in dataclasses.fields(cls):
            if "axes" in field.metadata:
                axes[field.name] = field.metadata["axes"]
                continue
            fix = f'{field.name}: Array = cached_array("batch length heads _")'
            problems.append(Problem(f"{cls.__name__}.{field.name}", "declares no axes", fix=fix))
        if problems:
            raise ConfigError("Invalid cache entry:", problems)
        return axes


def cached_array(axes: str) -> Any:
    """Return the dataclass field of an array of a `CacheEntry`.

    Args:
        axes: A word for each axis, without those of stacked layers: `batch` once, split over the
            mesh's batch axes; `length`, if each token adds an element, split over `sequence`;
            `heads`, split over `tensor`; `_` for an axis that is never split.

    Raises:
        ConfigError: An axis is unknown or repeated, or there is no `batch`.
    """
    names = tuple(axes.split())
    problems = []
    for name in dict.fromkeys(names):
        if name not in _SPLIT_OVER:
            fix = did_you_mean(name, list(_SPLIT_OVER))
            problems.append(Problem(name, "is an unknown axis", fix=fix))
        elif name != WHOLE and names.count(name) > 1:
            problems.append(Problem(name, "is repeated", fix="name each axis once"))
    if "batch" not in names:
        fix = "batch, the axis of the rows of tokens"
        problems.append(Problem("batch", "is missing", fix=fix))
    if problems:
        raise ConfigError(f"Invalid axes {axes!r} of a cached array:", problems)
    return dataclasses.field(metadata={"axes": names})


def check_dimensions(entry: CacheEntry) -> list[Problem]:
    """Return a problem for each array of a layer without a dimension for each of its axes."""
    problems = []
    for name, axes in entry.axes().items():
        shape = getattr(entry, name).shape
        if len(shape) != len(axes):
            what = "has other dimensions than it declares"
            detail = f"{shape}, declared as {' '.join(axes)}"
            fix = "declare the axes that the array has"
            problems.append(Problem(f"{type(entry).__name__}.{name}", what, detail, fix))
    return problems


def prompt_shape(entry: CacheEntry) -> tuple[int, int] | None:
    """Return the rows and the tokens of prompts, by the first array of tokens; None without one."""
    for name, axes in entry.axes().items():
        if "length" in axes:
            shape = getattr(entry, name).shape[-len(axes) :]
            return shape[axes.index("batch")], shape[axes.index("length")]
    return None


def pad_entry(entry: CacheEntry, places: int) -> CacheEntry:
    """Pad arrays with an axis `length` to a number of places, at the end."""
    padded = {}
    for name, axes in entry.axes().items():
        x = getattr(entry, name)
        if "length" in axes:
            x = _pad(x, x.ndim - len(axes) + axes.index("length"), places)
        padded[name] = x
    return dataclasses.replace(entry, **padded)


def _pad(x: Array, axis: int, length: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedArray:
    """A cached array in int8.

    Attributes:
        scale: Float32, with the dimensions of the codes; those behind `length` that are never split
            have the size 1.
        dtype: The dtype of the array itself.
    """

    codes: Array
    scale: Array
    dtype: Any = dataclasses.field(metadata={"static": True})

    def decoded(self) -> Array:
        """Return the array, within 1/254 of the largest magnitude of each scale."""
        return dequantize(self.codes, self.scale, self.dtype)


def encode_entry(entry: CacheEntry) -> CacheEntry:
    """Encode the arrays of tokens in int8, with a scale for each token, and each head.

    An array without `length`, or without an axis `_` behind it, stays.
    """
    encoded = {}
    for name, axes in entry.axes().items():
        encoded[name] = _encoded(getattr(entry, name), axes)
    return dataclasses.replace(entry, **encoded)


def _encoded(x: Array, axes: tuple[str, ...]) -> Array | CodedArray:
    shared = _shared_dims(axes)
    if not shared:
        return x
    magnitude = jnp.abs(x.astype(jnp.float32))
    largest = magnitude.max(axis=shared, keepdims=True)
    codes, scale = quantize(x, largest, "int8", largest_code("int8"))
    return CodedArray(codes, scale, x.dtype)


def _shared_dims(axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the dimensions of elements with a common scale, from the end."""
    if "length" not in axes:
        return ()
    shared = []
    for place in range(axes.index("length") + 1, len(axes)):
        if axes[place] == WHOLE:
            shared.append(place - len(axes))
    return tuple(shared)


def decode_entry(entry: CacheEntry) -> CacheEntry:
    """Decode the arrays in int8 of an entry."""
    decoded = {}
    for name in entry.axes():
        x = getattr(entry, name)
        if isinstance(x, CodedArray):
            decoded[name] = x.decoded()
    return dataclasses.replace(entry, **decoded)


def update_entry(past: CacheEntry, new: CacheEntry, place: Int[Array, ""]) -> CacheEntry:
    """Write one token of each row at a place; replace arrays without an axis `length`.

    Raises:
        ConfigError: A replaced array has another shape or dtype than before.
    """
    updated = {}
    problems = []
    for name, axes in past.axes().items():
        before = getattr(past, name)
        after = getattr(new, name)
        updated[name] = after
        if "length" in axes:
            updated[name] = _written(before, after, place, axes)
        elif (before.shape, before.dtype) != (after.shape, after.dtype):
            what = "is not the same array in prefill and decoding"
            detail = f"{before.dtype}{before.shape}, then {after.dtype}{after.shape}"
            fix = "one shape and dtype, such as float32"
            problems.append(Problem(f"{type(past).__name__}.{name}", what, detail, fix))
    if problems:
        raise ConfigError("Invalid use of the cache:", problems)
    return dataclasses.replace(past, **updated)


def _written(
    before: Array | CodedArray, after: Array, place: Array, axes: tuple[str, ...]
) -> Array | CodedArray:
    """Write one token of each row: the array itself, or codes and scales."""
    token: Any = after
    if isinstance(before, CodedArray):
        token = _encoded(after.astype(before.dtype), axes)
    length = axes.index("length") - len(axes)

    def write(whole: Array, part: Array) -> Array:
        part = part.astype(whole.dtype)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, place, whole.ndim + length)

    return jax.tree.map(write, before, token)


def split_entry(entry: CacheEntry, mesh: AnyMesh) -> CacheEntry:
    """Split arrays over a mesh by their axes, and stacked layers over `pipe`.

    A dimension that does not divide is not split.
    """
    split = {}
    for name, axes in entry.axes().items():
        arrays = getattr(entry, name)  # one, or codes and scales
        shardings = jax.tree.map(lambda x, axes=axes: _sharding(x, axes, mesh), arrays)
        split[name] = jax.lax.with_sharding_constraint(arrays, shardings)
    return dataclasses.replace(entry, **split)


def _sharding(x: Array, axes: tuple[str, ...], mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, _spec(x.shape, axes, mesh))


def _spec(shape: tuple[int, ...], axes: tuple[str, ...], mesh: AnyMesh) -> P:
    wanted: list[Any] = [_SPLIT_OVER[name] for name in axes]
    stacks = len(shape) - len(axes)
    if stacks > 0:
        wanted = ["pipe", *[None] * (stacks - 1), *wanted]
    entries = []
    for entry, size in zip(wanted, shape, strict=True):
        if size % shards_of(entry, mesh.shape):
            entry = None
        entries.append(entry)
    return P(*entries)
