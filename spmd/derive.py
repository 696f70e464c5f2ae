"""The tables that follow from the one rule set: ZeRO stages, and the state of any optimizer.

Optimizer state is mapped by structure. Whatever part of the state is laid out like the parameters (or like some of
them) follows them: an equal shape takes the parameter's spec, and a statistic takes the entries of the dimensions it
has. Which those are is asked of the optimizer: its `init` runs a second time, on shapes alone, with every dimension of
every parameter a little larger and no two alike. A dimension of the state that grew as a dimension of the parameter did
is that dimension; one that did not grow is the optimizer's own. What cannot be told apart is an error.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem
from spmd.mesh import entry_axes

ZERO_KEEPS = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "params"),
}
"""ZeRO stage → which tables keep the `fsdp` axis (Rajbhandari et al., arXiv:1910.02054, section 5)."""

MAX_CONSTANT_BYTES = 64 * 1024
"""Up to this size an array that depends on no parameter's shape is replicated without a word."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Derived:
    """The spec of a derived leaf and where it comes from."""

    shape: Shape
    dtype: Any
    spec: P
    source: str


def drop_axis(spec: P, axis: str) -> P:
    """The spec without one mesh axis.

    Example:
        >>> drop_axis(P(("data", "fsdp"), "fsdp", "tensor"), "fsdp") == P("data", None, "tensor")
        True
    """
    entries = []
    for entry in spec:
        left = tuple(a for a in entry_axes(entry) if a != axis)
        entries.append(left if len(left) > 1 else left[0] if left else None)
    return P(*entries)


def is_random_key(leaf: Any) -> bool:
    """Whether a leaf of an optimizer's state is a random key.

    A raw key is an array of uint32, a dtype that no other state in optax has.
    """
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.dtype == jnp.uint32


@dataclasses.dataclass(frozen=True)
class _Dim:
    """A dimension of a parameter: its size, its size in the probe, and the entry of the spec that splits it."""

    size: int
    probed: int
    entry: Any


def optimizer_specs(
    init: Callable[[Any], Any], params: Any, specs: Mapping[str, P], leading: Mapping[str, int]
) -> tuple[dict[str, Derived], list[Problem]]:
    """How each leaf of an optimizer's state is split.

    Args:
        init: The optimizer's `init`.
        params: The parameters' abstract values: a nested dictionary.
        specs: Parameter path → the spec that optimizer state of its shape has.
        leading: Parameter path → how many leading dimensions are stacked layers.

    Returns:
        State path → its derived spec, and the problems of those leaves that cannot be mapped.

    Example:
        >>> params = {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")}
        >>> init = lambda params: {"kernel": params["kernel"].sum(axis=0)}
        >>> state, problems = optimizer_specs(init, params, {"kernel": P("fsdp", "tensor")}, {"kernel": 0})
        >>> state["kernel"].spec == P("tensor")
        True
    """
    flat = tree.flatten(params)
    shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    dims = _probe(shapes, specs, leading)
    probe = tree.map_with_path(
        lambda path, p: jax.ShapeDtypeStruct(tuple(d.probed for d in dims[path]), p.dtype), params
    )
    try:
        probed = {path: tuple(leaf.shape) for path, leaf in tree.flatten(jax.eval_shape(init, probe)).items()}
    except (TypeError, ValueError):  # an `init` that holds arrays of its own takes no other shapes than theirs
        probed = {}
    layers = tuple(dict.fromkeys(d for path, n in leading.items() for d in dims[path][:n]))

    table: dict[str, Derived] = {}
    problems: list[Problem] = []
    state = jax.eval_shape(init, params)
    followed = followed_params(state, shapes)
    for path, leaf in tree.flatten(state).items():
        shape, param = tuple(leaf.shape), followed.get(path)
        known = layers if param is None else dims[param]
        found = _find(shape, probed.get(path), known, by_size=param is not None)
        if is_random_key(leaf):
            spec, source = P(), "a random key"
        elif param is not None and (found == known or (found is None and shape == shapes[param])):
            spec, source = specs[param], f"as {param}"
        elif not shape:
            spec, source = P(), "a scalar"
        elif found is None or (not any(found) and math.prod(shape) * leaf.dtype.itemsize > MAX_CONSTANT_BYTES):
            problems.append(_unknown(path, shape, param, shapes))
            continue
        else:
            spec, source = _spec(found), _source(found, known, param)
        table[path] = Derived(shape, leaf.dtype, spec, source)
    return table, problems


def followed_params(state: Any, params: Mapping[str, Any]) -> dict[str, str]:
    """State path → the parameter it follows, for subtrees laid out like (some of) the parameters.

    In place of a parameter's array there may be several, such as the list that SM3 keeps.
    """

    def param_of(path: str) -> str | None:
        parts = path.split("/")
        prefixes = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in params), None)

    def like_params(node: Any) -> bool:
        paths = tree.flatten(node).keys() if isinstance(node, Mapping) else ()
        return bool(paths) and all(map(param_of, paths))

    found = {}
    for prefix, node in tree.flatten(state, is_leaf=like_params).items():
        if isinstance(node, Mapping):
            for path in tree.flatten(node):
                found[f"{prefix}/{path}" if prefix else path] = str(param_of(path))
    return found


def _probe(
    shapes: Mapping[str, Shape], specs: Mapping[str, P], leading: Mapping[str, int]
) -> dict[str, tuple[_Dim, ...]]:
    """The dimensions of every parameter, each a little larger in the probe.

    Within a parameter no two are alike and their order is unchanged, ties included, because optimizers choose
    dimensions by size. Stacks of one length that are split alike grow alike, as the layers of one stack must.
    """
    padded = {path: (*specs[path], *(None,) * (len(shape) - len(specs[path]))) for path, shape in shapes.items()}
    stacks = sorted(
        {(shapes[path][i], i, str(padded[path][i])) for path, n in leading.items() for i in range(n)},
    )
    margin = 1 + max(map(len, shapes.values()), default=0)
    grown = {stack: stack[0] + margin * rank for rank, stack in enumerate(stacks, start=1)}

    dims = {}
    for path, shape in shapes.items():
        probed, last = dict.fromkeys(range(len(shape)), 0), 0
        for i in sorted(probed, key=lambda i, shape=shape: (shape[i], i)):  # type: ignore[misc]
            stack = (shape[i], i, str(padded[path][i]))
            last = grown[stack] if i < leading[path] else max(shape[i], last) + 1
            probed[i] = last
        dims[path] = tuple(map(_Dim, shape, probed.values(), padded[path]))
    return dims


def _find(
    shape: Shape, probed: Shape | None, known: tuple[_Dim, ...], *, by_size: bool
) -> tuple[_Dim | None, ...] | None:
    """For each dimension of a state's leaf the dimension it is, None for one of the optimizer's own.

    None altogether where that cannot be told. If the probe went another way than the parameters, such as over
    the size from which Adafactor factors, sizes that occur once tell (`by_size`).
    """
    if probed is not None and len(probed) == len(shape):
        pairs = list(zip(shape, probed, strict=True))
        found = [next((d for d in known if (d.size, d.probed) == pair), None) for pair in pairs]
        if all(d is not None or size == after for d, (size, after) in zip(found, pairs, strict=True)):
            return tuple(found)
    if not by_size:
        return None
    candidates = [[d for d in known if d.size == size] for size in shape]
    if any(len(c) != 1 and size > 1 for c, size in zip(candidates, shape, strict=True)):
        return None
    return tuple(c[0] if size > 1 else None for c, size in zip(candidates, shape, strict=True))


def _spec(found: tuple[_Dim | None, ...]) -> P:
    """The entries of the dimensions; a second occurrence of one, as in Shampoo's squares, is whole."""
    if not any(found):
        return P()
    return P(*(None if d is None or d in found[:i] else d.entry for i, d in enumerate(found)))


def _source(found: tuple[_Dim | None, ...], known: tuple[_Dim, ...], param: str | None) -> str:
    if not any(found):
        return "a constant of the optimizer"
    if param is None:
        return "one for each layer"
    return f"dimensions {tuple(None if d is None else known.index(d) for d in found)} of {param}"


def _unknown(path: str, shape: Shape, param: str | None, shapes: Mapping[str, Shape]) -> Problem:
    why = f"the parameter {param} has the shape {shapes[param]}" if param else "it is laid out like no parameter"
    return Problem(
        f"optimizer state {path}",
        "has a structure that no parameter explains",
        f"its shape is {shape}; {why}",
        "keep statistics in a tree like the parameters, or as scalars",
    )
