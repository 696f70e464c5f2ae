"""Optimizers applied per layer: a transform that depends on whole arrays runs once for each layer of a stack."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from spmd.errors import ConfigError, Problem
from spmd.sharding.layer_paths import stacks_of
from spmd.sharding.optimizer_state import is_random_key
from spmd.tree import PyTree, flatten, merge, select


class PerLayerState(NamedTuple):
    """The transform's state for parameters that are not stacked, and that of each stack, by path with dots.

    Every array of a stack's state, counters included, has the stack's leading dimensions.
    """

    rest: PyTree
    stacked: dict[str, PyTree]


def per_layer(
    transform: optax.GradientTransformation, stacked: Sequence[str] = ("layers",)
) -> optax.GradientTransformationExtraArgs:
    """Apply a transform to every layer of a stack as if the layer were a parameter of its own.

    The transform gets whole paths and never two layers at once; a transform that combines parameters (a global norm)
    must stay outside, and so must one with a random key. Trees must be nested dictionaries.

    Example:
        >>> clip = per_layer(optax.clip_by_block_rms(1.0))
        >>> gradients = {"layers": {"kernel": jax.numpy.array([[0.5, 0.5], [4.0, 4.0]])}}
        >>> clip.update(gradients, clip.init(gradients))[0]["layers"]["kernel"]
        Array([[0.5, 0.5],
               [1. , 1. ]], dtype=float32)
    """
    inner = optax.with_extra_args_support(transform)

    def init(params: PyTree) -> PerLayerState:
        parts = _split(params, stacked).items()
        states = {stack.name: _over_layers(inner.init, stack, part)(part) for stack, part in parts}
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

        params_parts = {} if params is None else _split(params, stacked)
        states = {_REST.name: state.rest, **state.stacked}
        done: PyTree = {}
        for stack, part in _split(updates, stacked).items():
            step = _over_layers(update_layer, stack, part)
            part, states[stack.name] = step(part, states[stack.name], params_parts.get(stack))
            done = merge(done, part)
        return done, PerLayerState(states.pop(_REST.name), states)

    return optax.GradientTransformationExtraArgs(init, update)


class _Stack(NamedTuple):
    """Path of a stack, with dots, and its number of leading dimensions."""

    name: str
    depth: int


_REST = _Stack("", 0)


def _split(tree: PyTree, stacked: Sequence[str]) -> dict[_Stack, PyTree]:
    """Return the leaves of each stack, and those of none (always present), as nested dictionaries."""
    paths = flatten(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    stacks = sorted({_REST, *(_stack_of(path, stacked) for path in paths)})
    return {stack: select(tree, lambda path, s=stack: _stack_of(path, stacked) == s) for stack in stacks}  # type: ignore[misc]


def _stack_of(path: str, stacked: Sequence[str]) -> _Stack:
    stacks = stacks_of(path, stacked)
    return _Stack(stacks[-1].replace("/", "."), len(stacks)) if stacks else _REST


def _over_layers(f: Callable[..., Any], stack: _Stack, part: PyTree) -> Callable[..., Any]:
    """Map `f` over the leading dimensions, unless all of the stack is masked."""
    for _ in range(stack.depth if jax.tree.leaves(part) else 0):
        f = jax.vmap(f)
    return f
