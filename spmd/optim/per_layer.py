"""Optimizers applied per layer, for transforms of whole arrays.

They run once for each layer of a stack.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from spmd.errors import ConfigError, Problem
from spmd.sharding.layer_paths import Stack, audit_stacks, own_stacks, read_stacked, stacks_of
from spmd.sharding.optimizer_state import is_random_key
from spmd.tree import PyTree, flatten, merge, select


class PerLayerState(NamedTuple):
    """The transform's state for parameters outside of stacks, and for each stack.

    Stacks are named by their paths with dots. Every array of a stack's state, counters included,
    has the stack's dimensions in front.
    """

    rest: PyTree
    stacked: dict[str, PyTree]


def per_layer(
    transform: optax.GradientTransformation, stacked: Any = ("layers",)
) -> optax.GradientTransformationExtraArgs:
    """Apply a transform to every layer of a stack as if the layer were a parameter of its own.

    The transform gets whole paths and never two layers at once; a transform that combines
    parameters (a global norm) must stay outside, and so must one with a random key. Trees must be
    nested dictionaries.

    Args:
        stacked: `Rules.stacked`, or names of path components that are stacked along dimension 0.

    Raises:
        ConfigError: The arrays of a stack differ in size along its dimension; or the transform has
            a random key.

    Example:
        >>> clip = per_layer(optax.clip_by_block_rms(1.0))
        >>> gradients = {"layers": {"kernel": jax.numpy.array([[0.5, 0.5], [4.0, 4.0]])}}
        >>> clip.update(gradients, clip.init(gradients))[0]["layers"]["kernel"]
        Array([[0.5, 0.5],
               [1. , 1. ]], dtype=float32)
    """
    inner = optax.with_extra_args_support(transform)
    stacks = read_stacked(stacked)

    def init(params: PyTree) -> PerLayerState:
        _check_sizes(params, stacks)
        states = {}
        for part, leaves in _split(params, stacks).items():
            init_part = _over_layers(inner.init, part, leaves, _init_axes)
            states[part.name] = init_part(leaves)
        rest = states.pop(_REST.name)
        _check_no_random_keys(states)
        return PerLayerState(rest, states)

    def update(
        updates: PyTree, state: PerLayerState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PerLayerState]:
        def update_layer(updates: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            return inner.update(updates, state, params, **extra)

        params_parts = {}
        if params is not None:
            params_parts = _split(params, stacks)
        states = {_REST.name: state.rest, **state.stacked}
        done: PyTree = {}
        for part, leaves in _split(updates, stacks).items():
            update_part = _over_layers(update_layer, part, leaves, _update_axes)
            state_part = states[part.name]
            moved, states[part.name] = update_part(leaves, state_part, params_parts.get(part))
            done = merge(done, moved)
        rest = states.pop(_REST.name)
        return done, PerLayerState(rest, states)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_sizes(params: PyTree, stacks: Mapping[str, Stack]) -> None:
    """Raise ConfigError if the arrays of a stack differ in size along its dimension."""
    shapes = {}
    for path, leaf in flatten(params).items():
        if hasattr(leaf, "shape"):
            shapes[path] = leaf.shape
    problems = audit_stacks(shapes, stacks)
    if problems:
        raise ConfigError("Unsupported stacks in per_layer:", problems)


def _check_no_random_keys(states: Mapping[str, PyTree]) -> None:
    """Raise ConfigError if the state of a stack has a random key."""
    problems = []
    for path, leaf in flatten(states).items():
        if is_random_key(leaf):
            what = "is a random key, which every layer of the stack would share"
            problems.append(Problem(path, what, fix="run it outside"))
    if problems:
        raise ConfigError("Unsupported transform in per_layer:", problems)


class _Part(NamedTuple):
    """Path of a stack, with dots, and the dimensions of it and of the stacks around it.

    The dimension of the outermost stack is the first.
    """

    name: str
    dims: tuple[int, ...]


_REST = _Part("", ())


def _split(tree: PyTree, stacks: Mapping[str, Stack]) -> dict[_Part, PyTree]:
    """Return the leaves of each stack, and of none (always present), as nested dictionaries."""
    paths = flatten(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    parts = {_REST}
    parts.update(_part_of(path, stacks) for path in paths)
    split = {}
    for part in sorted(parts):

        def is_in_part(path: str, part: _Part = part) -> bool:
            return _part_of(path, stacks) == part

        split[part] = select(tree, is_in_part)
    return split


def _part_of(path: str, stacks: Mapping[str, Stack]) -> _Part:
    """Return the stack of a parameter; `_REST` if it is in none."""
    names = stacks_of(path, stacks)
    if not names:
        return _REST
    dims = tuple(stack.dim for stack in own_stacks(path, stacks))
    return _Part(names[-1].replace("/", "."), dims)


def _over_layers(
    f: Callable[..., Any], part: _Part, leaves: PyTree, axes: Callable[[int], Any]
) -> Callable[..., Any]:
    """Map `f` over the stacked dimensions, unless all of the stack is masked.

    `axes` gives the arguments of `jax.vmap` for one of them.
    """
    if not jax.tree.leaves(leaves):  # all of the stack is masked
        return f
    for dim in reversed(part.dims):
        f = jax.vmap(f, **axes(dim))
    return f


def _init_axes(dim: int) -> dict[str, Any]:
    return {"in_axes": dim}


def _update_axes(dim: int) -> dict[str, Any]:
    return {"in_axes": (dim, 0, dim), "out_axes": (dim, 0)}
