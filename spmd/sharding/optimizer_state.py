"""Specs derived from the rule table: those of ZeRO stages, and those of any optimizer's state.

Optimizer state is mapped by structure. A subtree of the state with the structure of the parameters
(or of some of them) follows them: an array of the parameter's shape gets its spec, and a statistic
gets the entries of its dimensions. To find these, the optimizer's `init` is traced again (a probe)
with every dimension of every parameter enlarged by another amount. A dimension of the state that
grew like a dimension of the parameter is that dimension; one that did not grow is the optimizer's
own. A second probe grows by whole blocks, for the scales of 8-bit moments. Ambiguous state is an
error.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem
from spmd.sharding.mesh import GATHERED_AXES, as_entry, entry_axes, shards_of

ZeroStage = Literal[0, 1, 2, 3]

ZERO_KEEPS: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "params"),
}
"""ZeRO stage → the tables that stay split over the axes that parameters are gathered over.

Rajbhandari et al., arXiv:1910.02054, section 5.
"""

MAX_CONSTANT_BYTES = 64 * 1024
"""Largest array that is replicated without error if it depends on no parameter's shape."""

BLOCKS = 256
"""Growth unit of the second probe, to find statistics of blocks of a size that divides it."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Dim:
    """A dimension of a parameter: its size, its size in the probe, and its entry in the spec."""

    size: int
    probed: int
    entry: Any


_Dims = tuple[_Dim, ...]
"""The dimensions of a parameter."""

_Found = tuple[_Dim | None, ...]
"""For each dimension of a state array, the same dimension of a parameter, or None."""


@dataclasses.dataclass(frozen=True)
class DerivedSpec:
    """Spec of an array of optimizer state, and its origin.

    `block` is the number of parameter elements per element.
    """

    shape: Shape
    dtype: Any
    spec: P
    source: str
    block: int = 1


def shard_bytes(shape: Shape, dtype: Any, spec: P, axes: Mapping[str, int]) -> int:
    """Return the bytes of one device's shard of an array.

    Example:
        >>> shard_bytes((8, 6), "float32", P("fsdp"), {"fsdp": 4})
        48
    """
    parts = math.prod(shards_of(entry, axes) for entry in spec)
    # Random keys have a dtype of JAX, which jnp.dtype does not take.
    itemsize = getattr(dtype, "itemsize", None) or jnp.dtype(dtype).itemsize
    return math.prod(shape) * itemsize // parts


def drop_axis(spec: P, axis: str) -> P:
    """Return the spec without one mesh axis.

    Example:
        >>> drop_axis(P(("data", "fsdp"), "fsdp", "tensor"), "fsdp") == P("data", None, "tensor")
        True
    """
    entries = []
    for entry in spec:
        entries.append(_entry_without([axis], entry))
    return P(*entries)


def drop_gathered(spec: P, axes: Collection[str] = GATHERED_AXES) -> P:
    """Return the spec of a parameter in its use, without the axes of its gather.

    These are `axes`, and `expert` in a dimension that is split over one of them too.

    Example:
        >>> drop_gathered(P(("fsdp", "expert", "sequence"), "tensor")) == P(None, "tensor")
        True
        >>> drop_gathered(P("expert", "fsdp", "tensor")) == P("expert", None, "tensor")
        True
    """
    entries = []
    for entry in spec:
        dropped = {*axes}
        if not dropped.isdisjoint(entry_axes(entry)):
            dropped.add("expert")
        entries.append(_entry_without(dropped, entry))
    return P(*entries)


def _entry_without(axes: Collection[str], entry: Any) -> Any:
    """Return an entry of a spec without some axes."""
    return as_entry([name for name in entry_axes(entry) if name not in axes])


def is_random_key(leaf: Any) -> bool:
    """Return whether an array of optimizer state is a random key.

    Raw keys are the only uint32 state in optax.
    """
    is_raw = leaf.dtype == jnp.uint32 and leaf.shape[-1:] == (2,)
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or is_raw


def optimizer_specs(
    init: Callable[[Any], Any],
    params: Any,
    specs: Mapping[str, P],
    stacked: Mapping[str, Collection[int]],
) -> tuple[dict[str, DerivedSpec], list[Problem]]:
    """Derive the specs of an optimizer's state, from its `init` on abstract parameters.

    `specs` holds the spec of state of each parameter's shape, `stacked` the dimensions that
    stacking added. Return the spec of each state path, and the problems of arrays that cannot be
    mapped.

    Example:
        >>> params = {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")}
        >>> init = lambda params: {"kernel": params["kernel"].sum(axis=0)}
        >>> specs, stacked = {"kernel": P("fsdp", "tensor")}, {"kernel": ()}
        >>> state, problems = optimizer_specs(init, params, specs, stacked)
        >>> state["kernel"].spec == P("tensor")
        True
    """
    shapes = _shapes_of(params)
    dims = _probe(shapes, specs, stacked)
    dims_by_block = _probe(shapes, specs, stacked, unit=BLOCKS)
    matcher = _Matcher(
        specs=specs,
        shapes=shapes,
        dims=dims,
        dims_by_block=dims_by_block,
        probed=_probed_shapes(init, params, dims),
        probed_by_block=_probed_shapes(init, params, dims_by_block),
        stacked_dims=_stacked_dims(dims, stacked),
    )
    table: dict[str, DerivedSpec] = {}
    problems: list[Problem] = []
    state = jax.eval_shape(init, params)
    followed = followed_params(state, shapes)
    for path, leaf in tree.flatten(state).items():
        param = followed.get(path)
        derived = matcher.derive(path, leaf, param)
        if derived is None:
            problems.append(_unexplained(path, leaf, param, shapes))
        else:
            table[path] = derived
    return table, problems


@dataclasses.dataclass(frozen=True)
class _Matcher:
    """Derivation of specs from the results of both probes.

    Attributes:
        specs: Parameter → the spec of state of its shape.
        shapes: Parameter → its shape.
        dims: Parameter → its dimensions in the first probe.
        dims_by_block: The same in the second probe, which grows by whole blocks.
        probed: State path → its shape in the first probe.
        probed_by_block: The same in the second probe.
        stacked_dims: The stacked dimensions of all parameters, each once.
    """

    specs: Mapping[str, P]
    shapes: Mapping[str, Shape]
    dims: Mapping[str, _Dims]
    dims_by_block: Mapping[str, _Dims]
    probed: Mapping[str, Shape]
    probed_by_block: Mapping[str, Shape]
    stacked_dims: _Dims

    def derive(self, path: str, leaf: Any, param: str | None) -> DerivedSpec | None:
        """Return the spec of an array of the state; None if nothing explains it."""
        shape = tuple(leaf.shape)
        known = self.stacked_dims
        if param is not None:
            known = self.dims[param]
        found = _find(shape, self.probed.get(path), known)
        if found is None and param is not None:
            by_blocks = self._by_blocks(path, leaf, param)
            if by_blocks is not None:
                return by_blocks
            found = _find_by_size(shape, known)

        if param is not None and self._is_like_param(shape, found, param):
            return DerivedSpec(shape, leaf.dtype, self.specs[param], f"as {param}")
        if is_random_key(leaf):
            return DerivedSpec(shape, leaf.dtype, P(), "a random key")
        if not shape:
            return DerivedSpec(shape, leaf.dtype, P(), "a scalar")
        if found is None or _is_large_constant(leaf, found):
            return None
        return DerivedSpec(shape, leaf.dtype, _spec(found), _source(found, known, param))

    def _is_like_param(self, shape: Shape, found: _Found | None, param: str) -> bool:
        """Return whether an array has its parameter's dimensions, or shape if they are unknown."""
        if found is None:
            return shape == self.shapes[param]
        return found == self.dims[param]

    def _by_blocks(self, path: str, leaf: Any, param: str) -> DerivedSpec | None:
        """Return the spec of a statistic of blocks of a parameter; None for anything else."""
        shape = tuple(leaf.shape)
        found = _find_blocks(shape, self.probed_by_block.get(path), self.dims_by_block[param])
        if not found:
            return None
        block = 1
        for dim, size in zip(found, shape, strict=True):
            if dim is None:
                return None
            block *= dim.size // size
        if block <= 1:
            return None
        return DerivedSpec(shape, leaf.dtype, _spec(found), f"blocks of {block} of {param}", block)


def _stacked_dims(dims: Mapping[str, _Dims], stacked: Mapping[str, Collection[int]]) -> _Dims:
    """Return the stacked dimensions of all parameters, each once."""
    found: dict[_Dim, None] = {}
    for path, own in stacked.items():
        for index in own:
            found[dims[path][index]] = None
    return tuple(found)


def _is_large_constant(leaf: Any, found: _Found) -> bool:
    """Return whether an array depends on no parameter's shape and is too large to be replicated."""
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
    return not any(found) and nbytes > MAX_CONSTANT_BYTES


def _unexplained(path: str, leaf: Any, param: str | None, shapes: Mapping[str, Shape]) -> Problem:
    """Return the problem of an array of the state without a spec."""
    why = "it has the structure of no parameter"
    if param is not None:
        why = f"the parameter {param} has the shape {shapes[param]}"
    return Problem(
        f"optimizer state {path}",
        "has a structure that no parameter explains",
        detail=f"its shape is {tuple(leaf.shape)}; {why}",
        fix="keep statistics in a tree like the parameters, or as scalars",
    )


def followed_params(state: Any, params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter of each state path in a subtree like the parameters.

    Such a subtree has the structure of the parameters, or of some of them. A parameter may have
    several arrays, such as the list of SM3.
    """

    def like_params(node: Any) -> bool:
        if not isinstance(node, Mapping):
            return False
        paths = list(tree.flatten(node))
        return bool(paths) and all(_param_of(path, params) for path in paths)

    followed = {}
    for prefix, node in tree.flatten(state, is_leaf=like_params).items():
        if not isinstance(node, Mapping):
            continue
        for path in tree.flatten(node):
            state_path = f"{prefix}/{path}" if prefix else path
            followed[state_path] = _param_of(path, params)
    return followed


def _param_of(path: str, params: Mapping[str, Any]) -> str:
    """Return the longest prefix of a path among the parameters' paths; empty if none is."""
    while path and path not in params:
        path = path.rpartition("/")[0]
    return path


def _probed_shapes(
    init: Callable[[Any], Any], params: Any, dims: Mapping[str, _Dims]
) -> dict[str, Shape]:
    """Return the shape of each state path for a probe; nothing if `init` rejects other shapes."""

    def grow(path: str, param: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(dim.probed for dim in dims[path])
        return jax.ShapeDtypeStruct(shape, param.dtype)

    try:
        state = jax.eval_shape(init, tree.map_with_path(grow, params))
    except (TypeError, ValueError):
        return {}
    return _shapes_of(state)


def _shapes_of(arrays: Any) -> dict[str, Shape]:
    return {path: tuple(leaf.shape) for path, leaf in tree.flatten(arrays).items()}


def _probe(
    shapes: Mapping[str, Shape],
    specs: Mapping[str, P],
    stacked: Mapping[str, Collection[int]],
    unit: int = 1,
) -> dict[str, _Dims]:
    """Return the dimensions of every parameter, each enlarged in the probe by a multiple of `unit`.

    The enlarged sizes of a parameter's dimensions all differ, in the order of the sizes (of the
    dimensions for ties), because optimizers choose dimensions by size. Stacked dimensions of equal
    size and spec stay equal.
    """
    entries = {path: _padded(specs[path], len(shape)) for path, shape in shapes.items()}
    grown_stacks = _grown_stacks(shapes, entries, stacked, unit)
    dims = {}
    for path, shape in shapes.items():
        probed = [0] * len(shape)
        last = 0
        for index in sorted(range(len(shape)), key=shape.__getitem__):
            if index in stacked[path]:
                last = grown_stacks[_stack_key(shape, entries[path], index)]
            else:
                steps = max(1, (last - shape[index]) // unit + 1)
                last = shape[index] + unit * steps
            probed[index] = last
        dims[path] = tuple(map(_Dim, shape, probed, entries[path]))
    return dims


def _padded(spec: P, rank: int) -> tuple[Any, ...]:
    """Return the entries of a spec, with None for the dimensions after them."""
    return (*spec, *(None,) * (rank - len(spec)))


_StackKey = tuple[int, int, str]
"""Size, index and entry of a stacked dimension."""


def _stack_key(shape: Shape, entries: tuple[Any, ...], index: int) -> _StackKey:
    return shape[index], index, str(entries[index])


def _grown_stacks(
    shapes: Mapping[str, Shape],
    entries: Mapping[str, tuple[Any, ...]],
    stacked: Mapping[str, Collection[int]],
    unit: int,
) -> dict[_StackKey, int]:
    """Return the size of each stacked dimension in the probe."""
    keys = set()
    for path, own in stacked.items():
        for index in own:
            keys.add(_stack_key(shapes[path], entries[path], index))
    margin = 1 + max(map(len, shapes.values()), default=0)
    grown = {}
    for rank, key in enumerate(sorted(keys), start=1):
        size = key[0]
        grown[key] = size + unit * margin * rank
    return grown


def _find(shape: Shape, probed: Shape | None, known: _Dims) -> _Found | None:
    """Match each dimension of a state array with a parameter's.

    A dimension of the optimizer's own is None; the result is None if a dimension is neither.
    """
    if probed is None or len(probed) != len(shape):
        return None
    found: list[_Dim | None] = []
    for size, after in zip(shape, probed, strict=True):
        dim = _grown_alike(size, after, known)
        if dim is None and size != after:
            return None
        found.append(dim)
    return tuple(found)


def _grown_alike(size: int, probed: int, known: _Dims) -> _Dim | None:
    """Return the first dimension with these sizes, without and with the probe."""
    for dim in known:
        if (dim.size, dim.probed) == (size, probed):
            return dim
    return None


def _find_blocks(shape: Shape, probed: Shape | None, known: _Dims) -> _Found | None:
    """Match each dimension of a state array with a parameter's dimension in blocks.

    A dimension of the optimizer's own is None; the result is None if a match is ambiguous.
    """
    if probed is None or len(probed) != len(shape):
        return None
    found: list[_Dim | None] = []
    for size, after in zip(shape, probed, strict=True):
        fits = [dim for dim in known if _is_in_blocks(dim, size, after)]
        if len(fits) > 1:
            return None
        found.append(fits[0] if fits else None)
    return tuple(found)


def _is_in_blocks(dim: _Dim, size: int, probed: int) -> bool:
    """Return whether sizes, without and with the probe, are one whole fraction of a dimension's."""
    if size == 0:
        return (dim.size, dim.probed) == (size, probed)
    return dim.size % size == 0 and dim.size * probed == dim.probed * size


def _find_by_size(shape: Shape, known: _Dims) -> _Found | None:
    """Match the dimensions of a state array with those of a parameter by size alone.

    The result is None if a size above 1 is not that of exactly one dimension. It serves state with
    a structure that depends on sizes, such as Adafactor's.
    """
    sizes = [dim.size for dim in known]
    found: list[_Dim | None] = []
    for size in shape:
        if size <= 1:
            found.append(None)
        elif sizes.count(size) == 1:
            found.append(known[sizes.index(size)])
        else:
            return None
    return tuple(found)


def _spec(found: _Found) -> P:
    """Return the entries of the dimensions; a dimension's second occurrence is whole.

    Shampoo's squares have each dimension twice.
    """
    if not any(found):
        return P()
    entries: list[Any] = []
    for index, dim in enumerate(found):
        if dim is None or dim in found[:index]:
            entries.append(None)
        else:
            entries.append(dim.entry)
    return P(*entries)


def _source(found: _Found, known: _Dims, param: str | None) -> str:
    """Return the origin of a spec, as the plan prints it."""
    if not any(found):
        return "a constant of the optimizer"
    if param is None:
        return "one for each layer"
    indices: list[int | None] = []
    for dim in found:
        if dim is None:
            indices.append(None)
        else:
            indices.append(known.index(dim))
    return f"dimensions {tuple(indices)} of {param}"
