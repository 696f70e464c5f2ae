"""Specs that follow from the rule table: those of ZeRO stages, and those of any optimizer's state.

Optimizer state is mapped by structure. A subtree of the state with the structure of the parameters (or of some of them)
follows them: an array of the parameter's shape gets its spec, and a statistic gets the entries of the dimensions it
has. To find these, the optimizer's `init` is traced again with every dimension of every parameter enlarged by another
amount. A dimension of the state that grew like a dimension of the parameter is that dimension; one that did not grow is
the optimizer's own. A second probe grows by whole blocks, for the scales of 8-bit moments. Ambiguous state is an error.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem
from spmd.sharding.mesh import as_entry, entry_axes, shards_of

ZERO_KEEPS = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "params"),
}
"""ZeRO stage → the tables that keep the `fsdp` axis (Rajbhandari et al., arXiv:1910.02054, section 5)."""

MAX_CONSTANT_BYTES = 64 * 1024
"""Largest array that is replicated without error if it depends on no parameter's shape."""

BLOCKS = 256
"""Growth unit of the second probe, which so finds statistics of blocks whose size divides it."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Dim:
    """A dimension of a parameter: its size, its size in the probe, and its entry in the spec."""

    size: int
    probed: int
    entry: Any


@dataclasses.dataclass(frozen=True)
class DerivedSpec:
    """Spec of an array of optimizer state, its origin, and the number of parameter elements per element."""

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
    itemsize = getattr(dtype, "itemsize", None) or jnp.dtype(dtype).itemsize  # random keys have a dtype of JAX
    return math.prod(shape) * itemsize // parts


def drop_axis(spec: P, axis: str) -> P:
    """Return the spec without one mesh axis.

    Example:
        >>> drop_axis(P(("data", "fsdp"), "fsdp", "tensor"), "fsdp") == P("data", None, "tensor")
        True
    """
    return P(*(as_entry([a for a in entry_axes(entry) if a != axis]) for entry in spec))


def drop_fsdp(spec: P) -> P:
    """Return the spec of an array that is whole over `fsdp`, and over `expert` where this continues an `fsdp` split.

    Example:
        >>> drop_fsdp(P(("fsdp", "expert"), "tensor")) == P(None, "tensor")
        True
        >>> drop_fsdp(P("expert", "fsdp", "tensor")) == P("expert", None, "tensor")
        True
    """
    split = [as_entry([a for a in entry_axes(e) if a != "expert" or "fsdp" not in entry_axes(e)]) for e in spec]
    return drop_axis(P(*split), "fsdp")


def is_random_key(leaf: Any) -> bool:
    """Return whether an array of optimizer state is a random key; raw keys are the only uint32 state in optax."""
    raw = leaf.dtype == jnp.uint32 and leaf.shape[-1:] == (2,)
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or raw


def optimizer_specs(
    init: Callable[[Any], Any], params: Any, specs: Mapping[str, P], stacked: Mapping[str, Collection[int]]
) -> tuple[dict[str, DerivedSpec], list[Problem]]:
    """Derive the specs of an optimizer's state, from its `init` on abstract parameters.

    `specs` holds the spec of state of each parameter's shape, `stacked` the dimensions that stacking added. Return the
    spec of each state path, and the problems of arrays that cannot be mapped.

    Example:
        >>> params = {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")}
        >>> init = lambda params: {"kernel": params["kernel"].sum(axis=0)}
        >>> state, problems = optimizer_specs(init, params, {"kernel": P("fsdp", "tensor")}, {"kernel": ()})
        >>> state["kernel"].spec == P("tensor")
        True
    """
    flat = tree.flatten(params)
    shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    dims = _probe(shapes, specs, stacked)
    layers = tuple(dict.fromkeys(dims[path][i] for path, own in stacked.items() for i in own))
    probed = _probed_shapes(init, params, dims)
    dims_by_block = _probe(shapes, specs, stacked, unit=BLOCKS)
    probed_by_block = _probed_shapes(init, params, dims_by_block)

    table: dict[str, DerivedSpec] = {}
    problems: list[Problem] = []
    state = jax.eval_shape(init, params)
    followed = followed_params(state, shapes)
    for path, leaf in tree.flatten(state).items():
        shape, param = tuple(leaf.shape), followed.get(path)
        known = layers if param is None else dims[param]
        found = _find(shape, probed.get(path), known)
        if found is None and param is not None:
            blocks = _find(shape, probed_by_block.get(path), dims_by_block[param], in_blocks=True)
            block = math.prod(d.size // size if d else 0 for d, size in zip(blocks or (), shape, strict=False))
            if blocks and block > 1:
                table[path] = DerivedSpec(shape, leaf.dtype, _spec(blocks), f"blocks of {block} of {param}", block)
                continue
            found = _find_by_size(shape, known)
        if param is not None and (found == known or (found is None and shape == shapes[param])):
            spec, source = specs[param], f"as {param}"
        elif is_random_key(leaf):
            spec, source = P(), "a random key"
        elif not shape:
            spec, source = P(), "a scalar"
        elif found is None or (not any(found) and math.prod(shape) * leaf.dtype.itemsize > MAX_CONSTANT_BYTES):
            what = "has a structure that no parameter explains"
            why = "it has the structure of no parameter"
            why = why if param is None else f"the parameter {param} has the shape {shapes[param]}"
            fix = "keep statistics in a tree like the parameters, or as scalars"
            problems.append(Problem(f"optimizer state {path}", what, f"its shape is {shape}; {why}", fix))
            continue
        else:
            spec, source = _spec(found), _source(found, known, param)
        table[path] = DerivedSpec(shape, leaf.dtype, spec, source)
    return table, problems


def followed_params(state: Any, params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter of each state path in a subtree with the structure of (some of) the parameters.

    A parameter may have several arrays, such as the list of SM3.
    """

    def param_of(path: str) -> str:
        while path and path not in params:
            path = path.rpartition("/")[0]
        return path

    def like_params(node: Any) -> bool:
        paths = tree.flatten(node).keys() if isinstance(node, Mapping) else ()
        return bool(paths) and all(map(param_of, paths))

    return {
        f"{prefix}/{path}" if prefix else path: param_of(path)
        for prefix, node in tree.flatten(state, is_leaf=like_params).items()
        if isinstance(node, Mapping)
        for path in tree.flatten(node)
    }


def _probed_shapes(init: Callable[[Any], Any], params: Any, dims: Mapping[str, tuple[_Dim, ...]]) -> dict[str, Shape]:
    """Return the shape of each state path for a probe; nothing if `init` rejects other shapes."""

    def grow(path: str, p: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(d.probed for d in dims[path]), p.dtype)

    try:
        state = jax.eval_shape(init, tree.map_with_path(grow, params))
    except (TypeError, ValueError):
        return {}
    return {path: tuple(leaf.shape) for path, leaf in tree.flatten(state).items()}


def _probe(
    shapes: Mapping[str, Shape], specs: Mapping[str, P], stacked: Mapping[str, Collection[int]], unit: int = 1
) -> dict[str, tuple[_Dim, ...]]:
    """Return the dimensions of every parameter, each enlarged in the probe by a multiple of `unit`."""
    # Within a parameter all differ and keep their order, ties included, because optimizers choose dimensions by size.
    # Stacked dimensions of equal size and spec stay equal.
    padded = {path: (*specs[path], *(None,) * (len(shape) - len(specs[path]))) for path, shape in shapes.items()}
    stacks = sorted({(shapes[path][i], i, str(padded[path][i])) for path, own in stacked.items() for i in own})
    margin = 1 + max(map(len, shapes.values()), default=0)
    grown = {stack: stack[0] + unit * margin * rank for rank, stack in enumerate(stacks, start=1)}

    dims = {}
    for path, shape in shapes.items():
        probed, last = [0] * len(shape), 0
        for i in sorted(range(len(shape)), key=shape.__getitem__):
            stack = (shape[i], i, str(padded[path][i]))
            steps = max(1, (last - shape[i]) // unit + 1)
            last = grown[stack] if i in stacked[path] else shape[i] + unit * steps
            probed[i] = last
        dims[path] = tuple(map(_Dim, shape, probed, padded[path]))
    return dims


def _find(
    shape: Shape, probed: Shape | None, known: tuple[_Dim, ...], *, in_blocks: bool = False
) -> tuple[_Dim | None, ...] | None:
    """Match each dimension of a state array with a parameter's (or its blocks); None for one of the optimizer's own."""
    if probed is None or len(probed) != len(shape):
        return None
    found = []
    for size, after in zip(shape, probed, strict=True):
        if in_blocks and size:
            fits = [d for d in known if d.size % size == 0 and d.size * after == d.probed * size]
        else:
            fits = [d for d in known if (d.size, d.probed) == (size, after)]
        if len(fits) > 1 if in_blocks else not fits and size != after:
            return None
        found.append(fits[0] if fits else None)
    return tuple(found)


def _find_by_size(shape: Shape, known: tuple[_Dim, ...]) -> tuple[_Dim | None, ...] | None:
    """Match dimensions by sizes that occur once, for state whose structure depends on sizes, as that of Adafactor."""
    sizes = [d.size for d in known]
    if any(size > 1 and sizes.count(size) != 1 for size in shape):
        return None
    return tuple(known[sizes.index(size)] if size > 1 else None for size in shape)


def _spec(found: tuple[_Dim | None, ...]) -> P:
    """Return the entries of the dimensions; the second occurrence of one, as in Shampoo's squares, is whole."""
    if not any(found):
        return P()
    return P(*(None if d is None or d in found[:i] else d.entry for i, d in enumerate(found)))


def _source(found: tuple[_Dim | None, ...], known: tuple[_Dim, ...], param: str | None) -> str:
    if not any(found):
        return "a constant of the optimizer"
    if param is None:
        return "one for each layer"
    return f"dimensions {tuple(None if d is None else known.index(d) for d in found)} of {param}"
