"""Norms, gates, and stacks of layers, shared by the model families."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.layers.kv_cache import Layer, collect_cache, isolate_layer, thread_cache
from spmd.layers.sequential_stages import run_stack
from spmd.model_interface.wrapped_param import has_fetched
from spmd.plan.annotate import remat_interval, remat_layer
from spmd.plan.manual import is_partly_manual

Step = Callable[..., tuple[Array, Any]]
"""`(layer, x, state, own) -> (x, value)`: call of one layer with its own input and value."""


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float, offset: float = 0.0) -> None:
        scale = jnp.full((width,), 1.0 - offset, jnp.float32)
        self.scale = nnx.Param(scale, gathered_by_layer=True)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Return `x / rms(x) · (offset + scale)` in the dtype of `x`."""
        return _rms_norm(x, self.scale[...], self.eps, self.offset)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2, 3))
def _rms_norm(x: Array, scale: Array, eps: float, offset: float) -> Array:
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(square + eps)
    if offset:
        scale = scale + offset
    wide = wide * _for_tokens(scale, x)
    return wide.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalisation to mean 0 and variance 1 in float32 (Ba et al., arXiv:1607.06450)."""

    def __init__(self, width: int, *, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32), gathered_by_layer=True)
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32), gathered_by_layer=True)
        self.eps = eps

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Return `(x − mean(x)) / std(x) · scale + bias` in the dtype of `x`."""
        return _layer_norm(x, self.scale[...], self.bias[...], self.eps)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(variance + eps)
    wide = wide * _for_tokens(scale, x) + _for_tokens(bias, x)
    return wide.astype(x.dtype)


def _for_tokens(values: Float[Array, "d"], x: Array) -> Array:
    return jnp.expand_dims(values, tuple(range(x.ndim - 1)))


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(
    gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]
) -> Float[Array, "batch seq d"]:
    """Return `silu(gate) · up`; only the inputs are saved for the backward pass."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu_gated(
    gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]
) -> Float[Array, "batch seq d"]:
    """Return `gelu(gate) · up`; only the inputs are saved for the backward pass.

    The gelu is the tanh approximation.
    """
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def gelu(x: Float[Array, "batch seq d"], approximate: bool) -> Float[Array, "batch seq d"]:
    """Return `jax.nn.gelu(x)`; only `x` is saved for the backward pass."""
    return jax.nn.gelu(x, approximate=approximate)


def make_layers(
    make: Callable[[nnx.Rngs], nnx.Module], count: int, key: Array, *, stacked: bool
) -> nnx.Module:
    """Return `count` equal layers: one module of stacked parameters, or a list of modules.

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


def run_layers(layers: nnx.Module, x: Array, *context: Any, unroll: int = 1) -> Array:
    """Run layers from `make_layers` in order, each under the plan's remat policy.

    Stacked layers are scanned, `unroll` of them per iteration, and at least as many as the policy's
    interval.
    """

    def step(layer: Layer, x: Array, state: Any, own: None) -> tuple[Array, None]:
        return layer(state, x, *context), None

    x, _ = _run(layers, x, None, step, unroll)
    return x


def scan_layers_with_outputs(
    layers: nnx.Module, x: Array, each: Any, *context: Any, unroll: int = 1
) -> tuple[Array, Any]:
    """Run layers with one input each and one return value each, besides `x`.

    Args:
        layers: Layers `(x, own, *context) -> (x, value)`.
        x: Input of the first layer.
        each: A tree of arrays with a leading layer dimension; each layer takes its slice of it.
        *context: Inputs of every layer.
        unroll: As for `run_layers`.

    Returns:
        `x` after the last layer, and the values of all layers, stacked.
    """

    def step(layer: Layer, x: Array, state: Any, own: Any) -> tuple[Array, Any]:
        return layer(state, x, own, *context)

    return _run(layers, x, each, step, unroll)


def _run(layers: nnx.Module, x: Array, each: Any, step: Step, unroll: int) -> tuple[Array, Any]:
    step, each = thread_cache(step, each)
    if isinstance(layers, nnx.List):
        x, values = _run_list(layers, x, each, step)
        return x, collect_cache(values)
    graph, state = nnx.split(layers)
    stack = _LayerStack(graph, step, remat_interval(), unroll)
    x, values = run_stack(stack.run, x, (state, each))
    return x, collect_cache(values)


def _run_list(layers: nnx.List, x: Array, each: Any, step: Step) -> tuple[Array, Any]:
    """Run a list of layers one after the other."""
    graphs, inputs = [], []
    for number, layer in enumerate(layers):
        graph, state = nnx.split(layer)
        own = jax.tree.map(operator.itemgetter(number), each)
        graphs.append(graph)
        inputs.append((state, own))
    return _run_each(graphs, x, inputs, step, scanned=False)


def _run_each(
    graphs: Sequence[nnx.GraphDef],
    x: Array,
    inputs: Sequence[tuple[Any, Any]],
    step: Step,
    *,
    scanned: bool,
) -> tuple[Array, Any]:
    """Run layers one after the other; return `x` after the last, and their values, stacked.

    `inputs` are the state of each layer and its own input.
    """
    values = []
    for number, (graph, (state, own)) in enumerate(zip(graphs, inputs, strict=True)):
        layer = remat_layer(_call(graph), scanned=scanned, number=number)
        x, value = step(layer, x, state, own)
        values.append(value)
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *values)
    return x, stacked


@dataclasses.dataclass(frozen=True, eq=False)
class _LayerStack:
    """Equal layers, scanned over their stacked arrays.

    Attributes:
        graph: The graph of one layer.
        step: As for `_run`.
        interval: The remat policy's interval.
        unroll: Layers per iteration, at least.
    """

    graph: nnx.GraphDef
    step: Step
    interval: int
    unroll: int

    def run(self, x: Array, stack: Any) -> tuple[Array, Any]:
        """Return `x` after the layers, and their values, stacked."""
        count = jax.tree.leaves(stack)[0].shape[0]
        size, turn = self._group_size(count)
        if has_fetched(stack):
            # libtpu refuses slices of host memory in an unrolled scan (E1200): one layer at a time.
            turn = 1
        turns, left = divmod(count, size)
        # In one program, XLA could merge recomputation and original.
        scanned = turn == 1 and turns > 1 and size == self.interval
        if size == 1:
            return self._scan_layers(x, stack, turn, scanned)
        shape = (turns, size)
        groups = jax.tree.map(lambda w: w[: turns * size].reshape(*shape, *w.shape[1:]), stack)
        x, values = self._scan_groups(x, groups, size, turn, scanned)
        if not left:
            return x, values
        last = jax.tree.map(lambda w: w[turns * size :], stack)
        x, rest = self._run_group(x, last, left, scanned=False)
        values = jax.tree.map(lambda v, r: jnp.concatenate([v, r]), values, rest)
        return x, values

    def _group_size(self, count: int) -> tuple[int, int]:
        """Return the layers of a group, and the groups per iteration of the scan."""
        if not is_partly_manual():
            turn = max(1, self.unroll // self.interval)
            return self.interval, turn
        # libtpu aborts for the slices of a stack in an unrolled scan of a partly manual region:
        # scan equal groups of layers instead.
        size = self.interval
        for larger in range(self.interval, self.unroll + 1, self.interval):
            if count % larger == 0:
                size = larger
        return size, 1

    def _scan_layers(self, x: Array, stack: Any, turn: int, scanned: bool) -> tuple[Array, Any]:
        layer = remat_layer(_call(self.graph), scanned=scanned, number=0)

        def body(x: Array, inputs: tuple[Any, Any]) -> tuple[Array, Any]:
            return self.step(layer, x, *inputs)

        return jax.lax.scan(body, x, stack, unroll=turn)

    def _scan_groups(
        self, x: Array, groups: Any, size: int, turn: int, scanned: bool
    ) -> tuple[Array, Any]:
        """Scan groups of `size` layers, `turn` of them per iteration."""

        def body(x: Array, group: Any) -> tuple[Array, Any]:
            return self._run_group(x, group, size, scanned=scanned)

        x, values = jax.lax.scan(body, x, groups, unroll=turn)
        values = jax.tree.map(lambda v: v.reshape(v.shape[0] * size, *v.shape[2:]), values)
        return x, values

    def _run_group(self, x: Array, group: Any, size: int, *, scanned: bool) -> tuple[Array, Any]:
        """Run a group of layers one after the other."""
        graphs = [self.graph] * size
        layers = _unstack(group)
        return _run_each(graphs, x, layers, self.step, scanned=scanned)


def _unstack(group: Any) -> list[Any]:
    """Return the layers of a stack, by one split of each array.

    The gradients of one split are concatenated once; those of slices would be summed.
    """
    leaves, structure = jax.tree.flatten(group)
    parts = [jax.lax.split(w, [1] * w.shape[0]) for w in leaves]
    layers = []
    for slices in zip(*parts, strict=True):
        arrays = [w.reshape(w.shape[1:]) for w in slices]
        layer = jax.tree.unflatten(structure, arrays)
        layers.append(layer)
    return layers


def _call(graph: nnx.GraphDef) -> Layer:
    return isolate_layer(lambda state, x, *context: nnx.merge(graph, state)(x, *context))
