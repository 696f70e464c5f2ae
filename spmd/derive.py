"""The tables that follow from the one rule set: ZeRO stages, and the state of any optimizer.

Optimizer state is mapped by structure. Whatever part of the state is laid out like the parameters (or like some of
them) follows them: an equal shape takes the parameter's spec, a statistic that lacks dimensions keeps the entries
of those it has, and scalars are replicated. What cannot be told apart is an error.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
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


@dataclasses.dataclass(frozen=True)
class Derived:
    """The spec of a derived leaf and where it comes from."""

    shape: tuple[int, ...]
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
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(params).items()}
    state = jax.eval_shape(init, params)
    probed = _followers(jax.eval_shape(init, _probe(params, leading)), shapes.keys())
    followed = _followers(state, shapes.keys())
    stacks = {(shapes[path][0], specs[path][0]) for path, n in leading.items() if n}
    layers = {length: axis for length, axis in stacks if sum(length == other for other, _ in stacks) == 1}

    table: dict[str, Derived] = {}
    problems: list[Problem] = []
    for path, leaf in tree.flatten(state).items():
        shape, param = tuple(leaf.shape), followed.get(path, (None, None))[1]
        if param is not None and shape == shapes[param]:
            table[path] = Derived(shape, leaf.dtype, specs[param], f"as {param}")
        elif not shape:
            table[path] = Derived(shape, leaf.dtype, P(), "a scalar")
        elif param is not None and path in probed:
            dims = _dims(
                shape,
                probed[path][0],
                shapes[param],
                _probe_shape(shapes[param], leading[param]),
                leading[param],
            )
            if dims is None:
                problems.append(_unknown(path, shape, f"the parameter {param} has the shape {shapes[param]}"))
                continue
            padded = (*specs[param], *(None,) * len(shapes[param]))
            spec = P(*(None if d is None else padded[d] for d in dims))
            table[path] = Derived(shape, leaf.dtype, spec, f"dimensions {dims} of {param}")
        elif shape[0] in layers and len(shape) == 1:
            table[path] = Derived(shape, leaf.dtype, P(layers[shape[0]]), "one for each layer")
        else:
            problems.append(_unknown(path, shape, "it is laid out like no parameter"))
    return table, problems


def _followers(state: Any, params: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """State path → (shape, the parameter it follows), for subtrees laid out like (some of) the parameters."""
    known = set(params)

    def like_params(node: Any) -> bool:
        paths = tree.flatten(node).keys() if isinstance(node, Mapping) else ()
        return bool(paths) and known.issuperset(paths)

    found = {}
    for prefix, node in tree.flatten(state, is_leaf=like_params).items():
        if isinstance(node, Mapping):
            for path, leaf in tree.flatten(node).items():
                found[f"{prefix}/{path}" if prefix else path] = (tuple(leaf.shape), path)
    return found


def _probe_shape(shape: tuple[int, ...], leading: int) -> tuple[int, ...]:
    """The shape with every dimension different from the others and their order unchanged, ties included."""
    inner = shape[leading:]
    probe = list(inner)
    for rank, dim in enumerate(np.argsort(np.array(inner), kind="stable")):
        probe[dim] = inner[dim] + rank
    return (*shape[:leading], *probe)


def _probe(params: Any, leading: Mapping[str, int]) -> Any:
    return tree.map_with_path(
        lambda path, p: jax.ShapeDtypeStruct(_probe_shape(tuple(p.shape), leading[path]), p.dtype), params
    )


def _dims(
    shape: tuple[int, ...],
    probed: tuple[int, ...],
    param: tuple[int, ...],
    param_probed: tuple[int, ...],
    leading: int,
) -> tuple[int | None, ...] | None:
    """For each dimension of a statistic, the parameter's dimension it comes from (None: from none)."""
    if len(shape) != len(probed):
        return None
    stacked = leading if shape[:leading] == param[:leading] else 0
    dims: list[int | None] = list(range(stacked))
    for size, probe in zip(shape[stacked:], probed[stacked:], strict=True):
        candidates = [d for d in range(leading, len(param)) if param_probed[d] == probe and d not in dims]
        if candidates and param[candidates[0]] == size:
            dims.append(candidates[0])
        elif size == 1:
            dims.append(None)
        else:
            return None
    return tuple(dims)


def _unknown(path: str, shape: tuple[int, ...], why: str) -> Problem:
    return Problem(
        f"optimizer state {path}",
        "has a structure that no parameter explains",
        f"its shape is {shape}; {why}",
        "keep statistics in a tree like the parameters, or as scalars",
    )
