"""Optimizers applied per layer: a transform that depends on whole arrays runs once for each layer of a stack."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from spmd.errors import ConfigError, Problem
from spmd.sharding.layer_paths import Stack, audit_stacks, own_stacks, read_stacked, stacks_of
from spmd.sharding.optimizer_state import is_random_key
from spmd.tree import PyTree, flatten, merge, select


class PerLayerState(NamedTuple):
    """The transform's state for parameters that are not stacked, and that of each stack, by path with dots.

    Every array of a stack's state, counters included, has the stack's dimensions in front.
    """

    rest: PyTree
    stacked: dict[str, PyTree]


def per_layer(
    transform: optax.GradientTransformation, stacked: Any = ("layers",)
) -> optax.GradientTransformationExtraArgs:
    """Apply a transform to every layer of a stack as if the layer were a parameter of its own.

    The transform gets whole paths and never two layers at once; a transform that combines parameters (a global norm)
    must stay outside, and so must one with a random key. Trees must be nested dictionaries.

    Args:
        stacked: `Rules.stacked`, or names of path components that are stacked along dimension 0.

    Raises:
        ConfigError: The arrays of a stack differ in size along its dimension; or the transform has a random key.

    Example:
        >>> clip = per_layer(optax.clip_by_block_rms(1.0))
        >>> gradients = {"layers": {"kernel": jax.numpy.array([[0.5, 0.5], [4.0, 4.0]])}}
        >>> clip.update(gradients, clip.init(gradients))[0]["layers"]["kernel"]
        Array([[0.5, 0.5],
               [1. , 1. ]], dtype=float32)
    """
    inner, stacks = optax.with_extra_args_support(transform), read_stacked(stacked)

    def init(params: PyTree) -> PerLayerState:
        shapes = {path: leaf.shape for path, leaf in flatten(params).items() if hasattr(leaf, "shape")}
        if problems := audit_stacks(shapes, stacks):
            raise ConfigError("These stacks of layers cannot be updated per layer:", problems)
        parts = _split(params, stacks).items()
        states = {part.name: _over_layers(inner.init, part, leaves, _init_axes)(leaves) for part, leaves in parts}
        rest = states.pop(_REST.name)
        problems = [
            Problem(path, "is a random key, which every layer of the stack would share", fix="run it outside")
            for path, leaf in flatten(states).items()
            if is_random_key(leaf)
        ]
        if problems:
            raise ConfigError("This transform cannot run per layer:", problems)
        return PerLayerState(rest, states)

    def update(
        updates: PyTree, state: PerLayerState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PerLayerState]:
        def update_layer(updates: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            return inner.update(updates, state, params, **extra)

        params_parts = {} if params is None else _split(params, stacks)
        states = {_REST.name: state.rest, **state.stacked}
        done: PyTree = {}
        for part, leaves in _split(updates, stacks).items():
            step = _over_layers(update_layer, part, leaves, _update_axes)
            moved, states[part.name] = step(leaves, states[part.name], params_parts.get(part))
            done = merge(done, moved)
        return done, PerLayerState(states.pop(_REST.name), states)

    return optax.GradientTransformationExtraArgs(init, update)


class _Part(NamedTuple):
    """Path of a stack, with dots, and the dimension that it and each stack around it adds, the outermost first."""

    name: str
    dims: tuple[int, ...]


_REST = _Part("", ())


def _split(tree: PyTree, stacks: Mapping[str, Stack]) -> dict[_Part, PyTree]:
    """Return the leaves of each stack, and those of none (always present), as nested dictionaries."""
    paths = flatten(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    parts = sorted({_REST, *(_part_of(path, stacks) for path in paths)})
    return {part: select(tree, lambda path, p=part: _part_of(path, stacks) == p) for part in parts}  # type: ignore[misc]


def _part_of(path: str, stacks: Mapping[str, Stack]) -> _Part:
    if names := stacks_of(path, stacks):
        return _Part(names[-1].replace("/", "."), tuple(stack.dim for stack in own_stacks(path, stacks)))
    return _REST


def _over_layers(f: Callable[..., Any], part: _Part, leaves: PyTree, axes: Callable[[int], Any]) -> Callable[..., Any]:
    """Map `f` over the stacked dimensions, unless all of the stack is masked; `axes` gives those of arguments."""
    for dim in reversed(part.dims if jax.tree.leaves(leaves) else ()):
        f = jax.vmap(f, **axes(dim))
    return f


def _init_axes(dim: int) -> dict[str, Any]:
    return {"in_axes": dim}


def _update_axes(dim: int) -> dict[str, Any]:
    return {"in_axes": (dim, 0, dim), "out_axes": (dim, 0)}
