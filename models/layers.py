"""Norms, gates, and stacks of layers, shared by the model families."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.layers.kv_cache import collect_cache, isolate_layer, thread_cache
from spmd.layers.sequential_stages import run_stack
from spmd.plan.annotate import remat_interval, remat_layer
from spmd.plan.manual import is_partly_manual


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float, offset: float = 0.0) -> None:
        self.scale = nnx.Param(jnp.full((width,), 1.0 - offset, jnp.float32), gathered_by_layer=True)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Return `x / rms(x) · (offset + scale)` in the dtype of `x`."""
        return _rms_norm(x, self.scale[...], self.eps, self.offset)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2, 3))
def _rms_norm(x: Array, scale: Array, eps: float, offset: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = scale + offset if offset else scale
    return (wide * _for_tokens(scale, x)).astype(x.dtype)


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
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _for_tokens(scale, x) + _for_tokens(bias, x)).astype(x.dtype)


def _for_tokens(values: Float[Array, "d"], x: Array) -> Array:
    return jnp.expand_dims(values, tuple(range(x.ndim - 1)))


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
    """Return `silu(gate) · up`; only the inputs are saved for the backward pass."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu_gated(gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
    """Return `gelu(gate) · up`, with the tanh approximation; only the inputs are saved for the backward pass."""
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def gelu(x: Float[Array, "batch seq d"], approximate: bool) -> Float[Array, "batch seq d"]:
    """Return `jax.nn.gelu(x)`; only `x` is saved for the backward pass."""
    return jax.nn.gelu(x, approximate=approximate)


def make_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, key: Array, *, stacked: bool) -> nnx.Module:
    """Return `count` equal layers: one module whose parameters have a leading layer dimension, or a list of modules.

    Layer *i* is initialised from `jax.random.split(key, count)[i]`, so both forms are bitwise equal.
    """
    keys = jax.random.split(key, count)
    if not stacked:
        return nnx.List([make(nnx.Rngs(k)) for k in keys])
    graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]
    return nnx.merge(graph, jax.vmap(lambda k: nnx.state(make(nnx.Rngs(k))))(keys))


def run_layers(layers: nnx.Module, x: Array, *context: Any, unroll: int = 1) -> Array:
    """Run layers from `make_layers` in order, each under the plan's remat policy.

    Stacked layers are scanned, `unroll` of them per iteration, and at least as many as the policy's interval.
    """
    return _run(layers, x, None, lambda layer, x, state, _: (layer(state, x, *context), None), unroll)[0]


def collect_layers(layers: nnx.Module, x: Array, each: Any, *context: Any, unroll: int = 1) -> tuple[Array, Any]:
    """Run layers that have their own inputs and return values besides `x`.

    Args:
        layers: Layers `(x, own, *context) -> (x, value)`.
        x: Input of the first layer.
        each: A tree of arrays with a leading layer dimension; each layer takes its slice of it.
        *context: Inputs of every layer.
        unroll: As for `run_layers`.

    Returns:
        `x` after the last layer, and the values of all layers, stacked.
    """
    return _run(layers, x, each, lambda layer, x, state, own: layer(state, x, own, *context), unroll)


def _run(layers: nnx.Module, x: Array, each: Any, step: Callable[..., tuple[Array, Any]], unroll: int) -> Any:
    step, each = thread_cache(step, each)

    def run(x: Array, states: list[Any], graphs: Sequence[nnx.GraphDef], scanned: bool) -> tuple[Array, Any]:
        values = []
        for number, (graph, state) in enumerate(zip(graphs, states, strict=True)):
            x, value = step(remat_layer(_call(graph), scanned=scanned, number=number), x, *state)
            values.append(value)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *values)

    if isinstance(layers, nnx.List):
        graphs, states = zip(*map(nnx.split, layers), strict=True)
        owns = [jax.tree.map(lambda own: own[number], each) for number in range(len(states))]  # noqa: B023
        x, values = run(x, list(zip(states, owns, strict=True)), graphs, False)
        return x, collect_cache(values)
    graph, state = nnx.split(layers)
    interval = remat_interval()

    def scan(x: Array, stack: Any) -> tuple[Array, Any]:
        count = jax.tree.leaves(stack)[0].shape[0]
        size, turn = interval, max(1, unroll // interval)
        if is_partly_manual():
            # libtpu aborts for the slices of a stack that an unrolled scan makes there: equal groups in place of it.
            fitting = [n for n in range(interval, unroll + 1, interval) if count % n == 0]
            size, turn = max(fitting, default=interval), 1
        turns, left = divmod(count, size)
        # In one program, XLA could merge recomputation and original.
        scanned = turn == 1 and turns > 1 and size == interval
        if size == 1:
            call = remat_layer(_call(graph), scanned=scanned, number=0)
            return jax.lax.scan(lambda x, layer: step(call, x, *layer), x, stack, unroll=turn)
        groups = jax.tree.map(lambda w: w[: turns * size].reshape(turns, size, *w.shape[1:]), stack)
        x, values = jax.lax.scan(
            lambda x, group: run(x, _unstack(group), (graph,) * size, scanned), x, groups, unroll=turn
        )
        values = jax.tree.map(lambda v: v.reshape(turns * size, *v.shape[2:]), values)
        if not left:
            return x, values
        x, rest = run(x, _unstack(jax.tree.map(lambda w: w[turns * size :], stack)), (graph,) * left, False)
        return x, jax.tree.map(lambda v, r: jnp.concatenate([v, r]), values, rest)

    x, values = run_stack(scan, x, (state, each))
    return x, collect_cache(values)


def _unstack(group: Any) -> list[Any]:
    """Return the layers of a stack; by one split, so their gradients are concatenated once, not summed."""
    leaves, structure = jax.tree.flatten(group)
    parts = [jax.lax.split(w, [1] * w.shape[0]) for w in leaves]
    return [
        jax.tree.unflatten(structure, [w.reshape(w.shape[1:]) for w in layer]) for layer in zip(*parts, strict=True)
    ]


def _call(graph: nnx.GraphDef) -> Callable[..., Array]:
    return isolate_layer(lambda state, x, *context: nnx.merge(graph, state)(x, *context))
