"""Stacks of layers: equal layers, or a repeated group of layers of several kinds.

```
group of three, twice     layers/a [2, …]   layers/b [2, …]   layers/c [2, …]
scan                      a₀ → b₀ → c₀ → a₁ → b₁ → c₁
```

Each layer is rematerialised, cached and updated by itself, also inside a group.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from spmd.layers.kv_cache import Layer, collect_cache, isolate_layer, thread_cache
from spmd.layers.sequential_stages import run_stack
from spmd.model_interface.wrapped_param import has_fetched
from spmd.plan.annotate import remat_interval, remat_layer
from spmd.plan.manual import is_partly_manual

Step = Callable[..., tuple[Array, Any]]
"""`(layer, x, state, own) -> (x, value)`: call of one layer with its own input and value."""


class LayerGroup(nnx.Module):
    """Consecutive layers of different kinds, each under its name.

    A stack of groups has one stack of layers for each name.
    """

    def __init__(self, layers: Mapping[str, nnx.Module]) -> None:
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.names = tuple(layers)

    @property
    def members(self) -> tuple[nnx.Module, ...]:
        """The layers in order."""
        return tuple(getattr(self, name) for name in self.names)


def make_layers(
    make: Callable[[nnx.Rngs], nnx.Module], count: int, key: Array, *, stacked: bool
) -> nnx.Module:
    """Return `count` equal layers, or groups: a module of stacked parameters, or a list of modules.

    Stacked parameters have a leading layer dimension. Layer *i* is initialised from
    `jax.random.split(key, count)[i]`, so both forms are bitwise equal.
    """
    keys = jax.random.split(key, count)
    if not stacked:
        layers = [make(nnx.Rngs(k)) for k in keys]
        return nnx.List(layers)
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, _ = nnx.split(abstract)
    states = jax.vmap(lambda k: nnx.state(make(nnx.Rngs(k))))(keys)
    return nnx.merge(graph, states)


def members_of(layer: nnx.Module) -> tuple[nnx.Module, ...]:
    """Return the layers of a group, or the layer itself."""
    if isinstance(layer, LayerGroup):
        return layer.members
    return (layer,)


def run_layers(layers: nnx.Module, x: Array, *context: Any, unroll: int = 1) -> Array:
    """Run layers from `make_layers` in order, each under the plan's remat policy.

    Stacked layers are scanned, `unroll` of them per iteration, and at least as many as the policy's
    interval.
    """

    def step(layer: Layer, x: Array, state: Any, own: None) -> tuple[Array, None]:
        return layer(state, x, *context), None

    one = layers
    if isinstance(layers, nnx.List):
        one = layers[0]
    each = (None,) * len(members_of(one))
    x, _ = _run(layers, x, each, step, unroll)
    return x


def scan_layers_with_outputs(
    layers: nnx.Module, x: Array, each: tuple[Any, ...], *context: Any, unroll: int = 1
) -> tuple[Array, tuple[Any, ...]]:
    """Run layers with one input each and one return value each, besides `x`.

    Args:
        layers: Layers `(x, own, *context) -> (x, value)`.
        x: Input of the first layer.
        each: For each layer of a group (one without groups), a tree of arrays with a leading
            dimension of repeats; each layer takes its slice of it.
        *context: Inputs of every layer.
        unroll: As for `run_layers`.

    Returns:
        `x` after the last layer, and for each layer of a group the values of all repeats, stacked.
    """

    def step(layer: Layer, x: Array, state: Any, own: Any) -> tuple[Array, Any]:
        return layer(state, x, own, *context)

    return _run(layers, x, each, step, unroll)


def _run(
    layers: nnx.Module, x: Array, each: tuple[Any, ...], step: Step, unroll: int
) -> tuple[Array, tuple[Any, ...]]:
    step, each = thread_cache(step, each)
    if isinstance(layers, nnx.List):
        x, values = _run_list(layers, x, each, step)
        return x, collect_cache(values)
    graphs, states = _split(layers)
    stack = _LayerStack(graphs, step, remat_interval(), unroll)
    inputs = tuple(zip(states, each, strict=True))
    x, values = run_stack(stack.run, x, inputs)
    return x, collect_cache(values)


def _split(layer: nnx.Module) -> tuple[tuple[nnx.GraphDef, ...], tuple[Any, ...]]:
    """Return the graphs and states of the layers of a group."""
    graphs, states = [], []
    for member in members_of(layer):
        graph, state = nnx.split(member)
        graphs.append(graph)
        states.append(state)
    return tuple(graphs), tuple(states)


def _run_list(
    layers: nnx.List, x: Array, each: tuple[Any, ...], step: Step
) -> tuple[Array, tuple[Any, ...]]:
    """Run a list of layers, or groups, one after the other."""
    graphs: list[nnx.GraphDef] = []
    inputs: list[tuple[Any, Any]] = []
    for number, layer in enumerate(layers):
        its_graphs, states = _split(layer)
        own = jax.tree.map(operator.itemgetter(number), each)
        graphs += its_graphs
        inputs += zip(states, own, strict=True)
    return _run_each(graphs, x, inputs, step, len(each), scanned=False)


def _run_each(
    graphs: Sequence[nnx.GraphDef],
    x: Array,
    inputs: Sequence[tuple[Any, Any]],
    step: Step,
    size: int,
    *,
    scanned: bool,
) -> tuple[Array, tuple[Any, ...]]:
    """Run layers one after the other.

    Args:
        graphs: The graph of each layer.
        x: Input of the first layer.
        inputs: The state of each layer and its own input.
        step: As for `_run`.
        size: The layers of a group.
        scanned: As for `remat_layer`.

    Returns:
        `x` after the last layer, and for each layer of a group its values, stacked.
    """
    values = []
    for number, (graph, (state, own)) in enumerate(zip(graphs, inputs, strict=True)):
        layer = remat_layer(_call(graph), scanned=scanned, number=number)
        x, value = step(layer, x, state, own)
        values.append(value)
    stacked = []
    for place in range(size):
        repeats = values[place::size]
        stacked.append(jax.tree.map(lambda *values: jnp.stack(values), *repeats))
    return x, tuple(stacked)


@dataclasses.dataclass(frozen=True, eq=False)
class _LayerStack:
    """Equal groups of layers, scanned over their stacked arrays.

    Attributes:
        graphs: The graph of each layer of a group.
        step: As for `_run`.
        interval: The remat policy's interval.
        unroll: Layers per iteration, at least.
    """

    graphs: tuple[nnx.GraphDef, ...]
    step: Step
    interval: int
    unroll: int

    @property
    def least_groups(self) -> int:
        """Least number of groups in a multiple of the remat policy's interval."""
        size = len(self.graphs)
        return math.lcm(size, self.interval) // size

    def run(self, x: Array, stack: Any) -> tuple[Array, tuple[Any, ...]]:
        """Return `x` after the layers, and for each layer of a group its values, stacked.

        `stack` has the state and the own input of each layer of a group, stacked.
        """
        count = jax.tree.leaves(stack)[0].shape[0]
        size, turn = self._iteration(count)
        if has_fetched(stack):
            # libtpu refuses slices of host memory in an unrolled scan (E1200): one layer at a time.
            turn = 1
        turns, left = divmod(count, size)
        # In one program, XLA could merge recomputation and original.
        scanned = turn == 1 and turns > 1 and size == self.least_groups
        if size == 1:
            return self._scan_groups(x, stack, turn, scanned)
        shape = (turns, size)
        parts = jax.tree.map(lambda w: w[: turns * size].reshape(*shape, *w.shape[1:]), stack)
        x, values = self._scan_parts(x, parts, size, turn, scanned)
        if not left:
            return x, values
        last = jax.tree.map(lambda w: w[turns * size :], stack)
        x, rest = self._run_part(x, last, left, scanned=False)
        values = jax.tree.map(lambda v, r: jnp.concatenate([v, r]), values, rest)
        return x, values

    def _iteration(self, count: int) -> tuple[int, int]:
        """Return the groups of one part, and the parts per iteration of the scan."""
        size = self.least_groups
        layers = size * len(self.graphs)
        if not is_partly_manual():
            turn = max(1, self.unroll // layers)
            return size, turn
        # libtpu aborts for the slices of a stack in an unrolled scan of a partly manual region:
        # scan equal parts of layers instead.
        largest = size
        for larger in range(size, self.unroll // len(self.graphs) + 1, size):
            if count % larger == 0:
                largest = larger
        return largest, 1

    def _scan_groups(
        self, x: Array, stack: Any, turn: int, scanned: bool
    ) -> tuple[Array, tuple[Any, ...]]:
        layers = []
        for number, graph in enumerate(self.graphs):
            layers.append(remat_layer(_call(graph), scanned=scanned, number=number))

        def body(x: Array, inputs: Any) -> tuple[Array, tuple[Any, ...]]:
            values = []
            for layer, its_inputs in zip(layers, inputs, strict=True):
                x, value = self.step(layer, x, *its_inputs)
                values.append(value)
            return x, tuple(values)

        return jax.lax.scan(body, x, stack, unroll=turn)

    def _scan_parts(
        self, x: Array, parts: Any, size: int, turn: int, scanned: bool
    ) -> tuple[Array, tuple[Any, ...]]:
        """Scan parts of `size` groups, `turn` of them per iteration."""

        def body(x: Array, part: Any) -> tuple[Array, Any]:
            return self._run_part(x, part, size, scanned=scanned)

        x, values = jax.lax.scan(body, x, parts, unroll=turn)
        values = jax.tree.map(lambda v: v.reshape(v.shape[0] * size, *v.shape[2:]), values)
        return x, values

    def _run_part(
        self, x: Array, part: Any, size: int, *, scanned: bool
    ) -> tuple[Array, tuple[Any, ...]]:
        """Run `size` groups of layers one after the other."""
        graphs = [*self.graphs] * size
        places = [_unstack(place) for place in part]
        layers = list(_interleave(places))
        return _run_each(graphs, x, layers, self.step, len(places), scanned=scanned)


def _interleave(places: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Yield the layers in order, from those of each place in a group."""
    for group in zip(*places, strict=True):
        yield from group


def _unstack(stack: Any) -> list[Any]:
    """Return the layers of a stack, by one split of each array.

    The gradients of one split are concatenated once; those of slices would be summed.
    """
    leaves, structure = jax.tree.flatten(stack)
    parts = [jax.lax.split(w, [1] * w.shape[0]) for w in leaves]
    layers = []
    for slices in zip(*parts, strict=True):
        arrays = [w.reshape(w.shape[1:]) for w in slices]
        layer = jax.tree.unflatten(structure, arrays)
        layers.append(layer)
    return layers


def _call(graph: nnx.GraphDef) -> Layer:
    return isolate_layer(lambda state, x, *context: nnx.merge(graph, state)(x, *context))
