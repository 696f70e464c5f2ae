"""The layers that the model families share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.layers.kv_cache import collect_cache, isolate_layer, thread_cache
from spmd.layers.lm_head import LazyLogits, is_lazy
from spmd.layers.pipelined_layers import pipelined_layers
from spmd.layers.soft_cap import soft_capped
from spmd.plan.annotate import annotate, constrain_like, has_other_spec, remat_interval, remat_layer
from spmd.plan.fsdp import ParamPlacement, gather, gathered, placement_of, saves_gathered, scatter
from spmd.plan.lora_layer import base_weight, lora_delta


def dense(
    x: Float[Array, "batch seq *in"],
    kernel: nnx.Param[Float[Array, "*in out"]],
    precision: str | None = None,
    dtype: Any = None,
    axes: str = "io",
) -> Float[Array, "batch seq out"]:
    """`x @ kernel` on every token, with the kernel gathered over `fsdp` for as long as it is used.

    The kernel is cast to the dtype of `x` and then gathered, so bfloat16 travels. Its gradient leaves the matmul in the
    kernel's own dtype, so sums over devices are float32, and goes to where the plan keeps gradients.

    Args:
        x: Activations.
        kernel: A parameter, which knows its path under a plan.
        precision: Of the product and of those of its derivative, as in `jax.lax.dot`.
        dtype: Of the product; None for that of `x`.
        axes: The kernel's dimensions, `o` for the one that is left; the others are the last ones of `x`.
    """
    return _multiplied(x, (kernel,), _Products((_placed(kernel),), axes, dtype, precision=precision))[0]


def columns(
    x: Float[Array, "batch seq d"], kernels: Sequence[nnx.Param], whole: str
) -> tuple[Float[Array, "batch seq hidden"], ...]:
    """`dense` from a copy of the residual stream into hidden units, which a table may split over `tensor`.

    Where the table splits the residual stream over `tensor` too, by tokens (sequence parallelism, Korthikanti et al.,
    arXiv:2205.05198, section 4.2.2), tokens are gathered here, once for all kernels. The backward pass keeps them split
    and gathers them again.

    Args:
        x: Tokens.
        kernels: Parameters.
        whole: What tokens are marked as where they meet the kernels.
    """
    static = _Products(tuple(map(_placed, kernels)), into=whole)
    return _multiplied(constrain_like(x, "residual"), kernels, static)


def rows(x: Float[Array, "batch seq hidden"], kernel: nnx.Param, whole: str) -> Float[Array, "batch seq d"]:
    """`dense` from hidden units back into the residual stream: the reverse of `columns`.

    Args:
        x: Hidden units.
        kernel: A parameter.
        whole: What tokens are marked as where their gradient meets the kernel.
    """
    return constrain_like(_multiplied(x, (kernel,), _Products((_placed(kernel),), out=whole))[0], "residual")


def unembed(
    x: Float[Array, "batch seq d"],
    kernel: Float[Array, "..."],
    placed: ParamPlacement | None,
    axes: str,
    soft_cap: float | None = None,
) -> Float[Array, "batch seq vocab"] | LazyLogits:
    """How well each word fits each token, in float32; where a loss asks for it, that product still to be taken.

    Args:
        x: The residual stream, normalised.
        kernel: `[d, vocab]`, or `[vocab, d]`.
        placed: How the plan in scope places the kernel.
        axes: `"io"` for the one, `"oi"` for the other.
        soft_cap: What logits stay below; None for no cap.
    """
    x = constrain_like(x, "residual")
    if is_lazy():
        return LazyLogits(x, kernel, axes, placed, soft_cap=soft_cap)
    how = _Products((placed,), axes, jnp.float32)
    return annotate(soft_capped(_products(x, (kernel,), how)[0], soft_cap), "logits")


def biased(x: Float[Array, "batch seq out"], bias: nnx.Param[Float[Array, "out"]]) -> Float[Array, "batch seq out"]:
    """`x + bias` on every token, in the dtype of `x`; summed in float32, and so is the bias's gradient."""
    whole = gathered(bias[...], _placed(bias))
    return (x.astype(whole.dtype) + whole[None, None]).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Products:
    """How an array is multiplied with kernels.

    Attributes:
        placed: How the plan in scope places each kernel.
        axes: A kernel's dimensions, `o` for the one that is not summed over.
        dtype: Of the products; None for that of the array.
        into: What the array is marked as where it meets a kernel, if anything.
        out: What a product's gradient is marked as where it does.
        precision: Of all products, as in `jax.lax.dot`.
    """

    placed: tuple[ParamPlacement | None, ...]
    axes: str = "io"
    dtype: Any = None
    into: str = ""
    out: str = ""
    precision: str | None = None

    @property
    def inputs(self) -> str:
        """The dimensions that are summed over, as the array has them."""
        return self.axes.replace("o", "")

    def einsum(self, form: str, a: Array, b: Array, dtype: Any = None) -> Array:
        """The product of two arrays, in a dtype; by default in their own."""
        return jnp.einsum(form, a, b, preferred_element_type=dtype, precision=self.precision)


def _multiplied(x: Array, kernels: Sequence[nnx.Param], how: _Products) -> tuple[Array, ...]:
    """An array times each kernel, with what the kernel's adapter adds, if it has one."""
    values = [kernel.get_value() for kernel in kernels]
    ys = _products(x, tuple(map(base_weight, values)), how)
    added = [lora_delta(x, value) for value in values]
    return tuple(y if change is None else y + change for y, change in zip(ys, added, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products(x: Array, kernels: tuple[Array, ...], how: _Products) -> tuple[Array, ...]:
    return _products_forward(x, kernels, how)[0]


def _products_forward(x: Array, kernels: tuple[Array, ...], how: _Products) -> tuple[tuple[Array, ...], Any]:
    tokens = annotate(x, how.into) if how.into else x
    used = [gather(kernel.astype(x.dtype), placed) for kernel, placed in zip(kernels, how.placed, strict=True)]
    dtype = how.dtype or x.dtype
    ys = tuple(how.einsum(f"...{how.inputs},{how.axes}->...o", tokens, kernel, dtype) for kernel in used)
    kept = [u if saves_gathered(placed) else k for u, k, placed in zip(used, kernels, how.placed, strict=True)]
    return ys, (x, kept, [jnp.zeros((0,), kernel.dtype) for kernel in kernels])


def _products_backward(how: _Products, saved: Any, dys: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    x, kept, like_kernels = saved
    # Barriers keep XLA from taking the copy that the forward pass gathered, and from keeping that until now.
    if how.into and has_other_spec("residual", how.into):
        x = annotate(jax.lax.optimization_barrier(x), how.into)
    dxs, dkernels = [], []
    for kernel, placed, like_kernel, dy in zip(kept, how.placed, like_kernels, dys, strict=True):
        used = (
            kernel if saves_gathered(placed) else gather(jax.lax.optimization_barrier(kernel).astype(x.dtype), placed)
        )
        dy = annotate(dy, how.out) if how.out else dy
        dy = dy.astype(x.dtype)
        dkernel = how.einsum(f"...{how.inputs},...o->{how.axes}", x, dy, like_kernel.dtype)
        dkernels.append(scatter(dkernel, placed))
        dxs.append(how.einsum(f"...o,{how.axes}->...{how.inputs}", dy, used))
    # Added as JAX adds up what several readers give back: the last one first.
    return functools.reduce(jnp.add, reversed(dxs)), tuple(dkernels)


_products.defvjp(_products_forward, _products_backward)


def _placed(kernel: nnx.Param) -> ParamPlacement | None:
    return placement_of(kernel.get_metadata("path", None))


class Dense(nnx.Module):
    """The `kernel` of a linear layer, `[in, out]`, drawn with variance 1 / in, and its `bias`, if it has one.

    See `columns`, `rows` and `biased`.
    """

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, bias: bool = False, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(scale * inputs**-0.5)
        table = init(rngs.params(), (inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(table, gathered_by_layer=True, supports_lora=True)
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32), gathered_by_layer=True) if bias else None

    def with_bias(self, x: Float[Array, "batch seq out"]) -> Float[Array, "batch seq out"]:
        """A product with the kernel, and the bias, if there is one."""
        return x if self.bias is None else biased(x, self.bias)


class Head(nnx.Module):
    """The output head; its `kernel` is `[d, vocab]`, drawn with variance 1 / d."""

    def __init__(self, width: int, vocab: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = Dense(width, vocab, rngs=rngs).kernel
        self.kernel.set_metadata(supports_lora=False)  # by a loss, perhaps, in chunks

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """The logits of each token, or what they are the product of."""
        return unembed(x, self.kernel[...], _placed(self.kernel), "io")


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float, offset: float = 0.0) -> None:
        self.scale = nnx.Param(jnp.full((width,), 1.0 - offset, jnp.float32), gathered_by_layer=True)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """`x / rms(x) · (offset + scale)`, in the dtype of `x`."""
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
        """`(x − mean(x)) / std(x) · scale + bias`, in the dtype of `x`."""
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
    """`silu(gate) · up`; the backward pass keeps the two, and computes the rest again."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu_gated(gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
    """`gelu(gate) · up`, with the approximation by tanh; the backward pass keeps the two."""
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def gelu(x: Float[Array, "batch seq d"], approximate: bool) -> Float[Array, "batch seq d"]:
    """`jax.nn.gelu`; the backward pass keeps `x`, and computes the rest again."""
    return jax.nn.gelu(x, approximate=approximate)


def make_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, key: Array, *, stacked: bool) -> nnx.Module:
    """`count` equal layers: one module whose parameters have a leading layer dimension, or a list of modules.

    Layer *i* draws from `jax.random.split(key, count)[i]`, so both forms start bitwise equal.
    """
    keys = jax.random.split(key, count)
    if not stacked:
        return nnx.List([make(nnx.Rngs(k)) for k in keys])
    graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]
    return nnx.merge(graph, jax.vmap(lambda k: nnx.state(make(nnx.Rngs(k))))(keys))


def run_layers(layers: nnx.Module, x: Array, *context: Any, unroll: int = 1) -> Array:
    """Runs layers made by `make_layers` one after the other, each under the plan's remat policy.

    Stacked layers are scanned, `unroll` of them in each turn of the loop. Under a policy with an interval, a turn is at
    least as many layers as that.
    """
    return _run(layers, x, None, lambda layer, x, state, _: (layer(state, x, *context), None), unroll)[0]


def collect_layers(layers: nnx.Module, x: Array, each: Any, *context: Any, unroll: int = 1) -> tuple[Array, Any]:
    """`run_layers`, for layers that take something of their own and return something besides `x`.

    Args:
        layers: Layers `(x, own, *context) -> (x, value)`.
        x: What goes from layer to layer.
        each: A tree of arrays with a leading layer dimension; each layer takes its own slice of it.
        *context: What every layer takes.
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
    size = remat_interval()

    def scan(x: Array, stack: Any) -> tuple[Array, Any]:
        turns, left = divmod(jax.tree.leaves(stack)[0].shape[0], size)
        turn = max(1, unroll // size)
        scanned = turn == 1 and turns > 1  # in one program, XLA could merge recomputation and original
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

    x, values = pipelined_layers(scan, x, (state, each))
    return x, collect_cache(values)


def _unstack(group: Any) -> list[Any]:
    """The layers of a stack; what comes back in the backward pass is put together once, not added up."""
    leaves, structure = jax.tree.flatten(group)
    parts = [jax.lax.split(w, [1] * w.shape[0]) for w in leaves]
    return [
        jax.tree.unflatten(structure, [w.reshape(w.shape[1:]) for w in layer]) for layer in zip(*parts, strict=True)
    ]


def _call(graph: nnx.GraphDef) -> Callable[..., Array]:
    return isolate_layer(lambda state, x, *context: nnx.merge(graph, state)(x, *context))
