"""Linear layers under a plan: kernels gathered over `fsdp`, hidden units split over `tensor`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.layers.linear_recipes import (
    History,
    as_history,
    gather_operand,
    gradient_by_recipe,
    recipe_of,
    seen_before,
)
from spmd.layers.lm_head import LazyLogits, is_lazy, plus_bias
from spmd.layers.quantized_matmul import Operand, quantized_einsum
from spmd.layers.soft_cap import soft_capped
from spmd.model_interface.wrapped_param import (
    complete_product,
    is_stored,
    operand_of,
    rider_of,
)
from spmd.plan.annotate import annotate, attention_config, constrain_like, is_recomputed, placement
from spmd.plan.fsdp import (
    ParamPlacement,
    gathered,
    named_after,
    placement_of,
    prepare,
    saves_gathered,
)


def dense(
    x: Float[Array, "batch seq *in"],
    kernel: nnx.Param[Float[Array, "*in out"]],
    precision: str | None = None,
    dtype: Any = None,
    axes: str = "io",
) -> Float[Array, "batch seq out"]:
    """Return `x @ kernel`, with the kernel gathered over `fsdp` and discarded after use.

    The kernel is cast to the dtype of `x` and then gathered, so the collective is in bfloat16. Its
    gradient leaves the matmul in the kernel's own dtype, so sums over devices are in float32, and
    is scattered into the plan's sharding.

    Args:
        x: Activations.
        kernel: A parameter; its metadata has its path under a plan.
        precision: As in `jax.lax.dot`, for the product and its derivative.
        dtype: Dtype of the product; None for that of `x`.
        axes: The kernel's dimensions, `o` for the output; the others are the last ones of `x`.
    """
    how = _Products((_placed(kernel),), axes, dtype, precision=precision)
    (y,) = _multiplied(x, (kernel,), how)
    return y


def column_parallel(
    x: Float[Array, "batch seq d"],
    kernels: Sequence[nnx.Param],
    whole: str,
    head: int = 0,
    *,
    stream: str = "residual",
) -> tuple[Float[Array, "batch seq hidden"], ...]:
    """Apply column-parallel kernels: from the residual stream into hidden units.

    A rule table may split hidden units over `tensor`. If it splits the residual stream over
    `tensor` too, by width or by tokens (sequence parallelism, Korthikanti et al., arXiv:2205.05198,
    section 4.2.2), tokens are gathered here, once for all kernels. For the backward pass they are
    saved split, and gathered again, unless the whole layer is recomputed there.

    Args:
        x: Tokens.
        kernels: Parameters.
        whole: The activation name of gathered tokens.
        head: The width of a head, if hidden units are heads.
        stream: The activation name of the tokens before.
    """
    how = _Products(tuple(map(_placed, kernels)), into=whole, stream=stream)
    x = constrain_like(x, stream)
    return _multiplied(x, kernels, how, head=head)


def row_parallel(
    x: Float[Array, "batch seq hidden"], kernel: nnx.Param, whole: str, head: int = 0
) -> Float[Array, "batch seq d"]:
    """Apply a row-parallel kernel: from hidden units back into the residual stream.

    Args:
        x: Hidden units.
        kernel: A parameter.
        whole: The activation name of the gathered gradient.
        head: The width of a head, if hidden units are heads.
    """
    how = _Products((_placed(kernel),), out=whole)
    (y,) = _multiplied(x, (kernel,), how, head=head)
    return constrain_like(y, "residual")


def unembed(
    x: Float[Array, "batch seq d"],
    kernel: Float[Array, "..."],
    placed: ParamPlacement | None,
    axes: str,
    soft_cap: float | None = None,
    bias: nnx.Param | None = None,
) -> Float[Array, "batch seq vocab"] | LazyLogits:
    """Return logits in float32; `LazyLogits` inside `spmd.layers.lm_head.lazy_logits`.

    Args:
        x: The normalised residual stream.
        kernel: `[d, vocab]` or `[vocab, d]`.
        placed: The kernel's placement under the plan in scope.
        axes: `"io"` for `[d, vocab]`, `"oi"` for `[vocab, d]`.
        soft_cap: The cap of logits; None for no cap.
        bias: A parameter `[vocab]` that is added to the logits; None for none.
    """
    x = constrain_like(x, "residual")
    whole_bias = None
    if bias is not None:
        whole_bias = gathered(bias[...], _placed(bias))
    if is_lazy():
        return LazyLogits(x, kernel, axes, placed, soft_cap=soft_cap, bias=whole_bias)
    how = _Products((placed,), axes, jnp.float32)
    (logits,) = _products(x, (kernel,), (None,), how)
    logits = plus_bias(logits, whole_bias)
    return annotate(soft_capped(logits, soft_cap), "logits")


def biased(
    x: Float[Array, "batch seq out"], bias: nnx.Param[Float[Array, "out"]]
) -> Float[Array, "batch seq out"]:
    """Return `x + bias` in the dtype of `x`; the sum and the bias's gradient are in float32."""
    whole = gathered(bias[...], _placed(bias))
    y = x.astype(whole.dtype) + whole[None, None]
    return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Products:
    """Options of the product of an array with kernels.

    Attributes:
        placed: The placement of each kernel under the plan in scope.
        axes: As for `dense`, like `dtype` and `precision`.
        into: The activation name of the array as an input of the matmul, if any.
        out: The activation name of a product's gradient as an input of the matmul, if any.
        stream: The activation name of the array before it is an input, with `into`.
        outs: The kernel's dimensions that the product has.
        recomputed: Whether the backward pass recomputes the layer; read at creation, since JAX
            traces derivatives later.
    """

    placed: tuple[ParamPlacement | None, ...]
    axes: str = "io"
    dtype: Any = None
    into: str = ""
    out: str = ""
    stream: str = "residual"
    precision: str | None = None
    outs: str = "o"
    recomputed: bool = dataclasses.field(default_factory=is_recomputed)

    @property
    def inputs(self) -> str:
        """The contracted dimensions."""
        return "".join(dim for dim in self.axes if dim not in self.outs)

    @property
    def heads_dim(self) -> int:
        """The kernel's dimension of all heads together, before it is split into heads and width.

        Heads are the outputs of a kernel with `into`, else the inputs.
        """
        letter = "o" if self.into else "i"
        return self.axes.index(letter)

    def has_whole_heads(self, kernels: Sequence[Array], head: int) -> bool:
        """Return whether all shards of the kernels have whole heads of this width."""
        dim = self.heads_dim
        for kernel, placed in zip(kernels, self.placed, strict=True):
            heads = kernel.shape[dim] // head
            if placed is not None and not placed.keeps_whole(dim, heads):
                return False
        return True

    def with_heads(self) -> "_Products":
        """Return the options for kernels with heads as a dimension of their own."""
        dim = self.heads_dim + 1
        placed = tuple(placed and placed.with_dim(dim) for placed in self.placed)
        if self.into:
            return dataclasses.replace(self, placed=placed, axes="ihk", outs="hk")
        return dataclasses.replace(self, placed=placed, axes="hko")

    def gather(self, prepared: Any, index: int, scales: Any, dtype: Any) -> Array | Operand:
        """Gather a kernel for its products, from the result of `prepare`."""
        return gather_operand(prepared, self.placed[index], scales, dtype, ndim=len(self.axes))

    def gather_again(self, kept: Any, index: int, scales: Any, dtype: Any) -> Array | Operand:
        """Return a gathered kernel in the backward pass: saved, or gathered once more."""
        if saves_gathered(self.placed[index]):
            return kept
        return self.gather(jax.lax.optimization_barrier(kept), index, scales, dtype)

    def einsum(self, form: str, a: Array, b: Array, dtype: Any = None) -> Array:
        """Return the product of two arrays; `dtype` is theirs by default."""
        return jnp.einsum(form, a, b, preferred_element_type=dtype, precision=self.precision)

    def multiplied(
        self,
        form: str,
        a: Array,
        kernel: Array | Operand,
        index: int,
        *,
        scales: Any = None,
        dtype: Any = None,
    ) -> Array:
        """Return the product of an input, or an output's gradient, with a kernel, by its recipe."""
        recipe = recipe_of(self.placed[index])
        if recipe is None:
            assert not isinstance(kernel, Operand)
            return self.einsum(form, a, kernel, dtype)
        return quantized_einsum(
            form,
            a,
            kernel,
            recipe,
            is_gradient=form.endswith(self.inputs),
            scales=scales,
            dtype=dtype or a.dtype,
        )

    def kernel_gradient(self, x: Array, dy: Array, index: int, scales: Any, dtype: Any) -> Array:
        """Return the gradient of a kernel, by its recipe."""
        form = f"...{self.inputs},...{self.outs}->{self.axes}"
        exact = functools.partial(self.einsum, form, dtype=dtype)
        placed = self.placed[index]
        return gradient_by_recipe(exact, form, (x, dy), placed, self.axes, self.outs, scales, dtype)


def _multiplied(
    x: Array, kernels: Sequence[nnx.Param], how: _Products, *, head: int = 0
) -> tuple[Array, ...]:
    """Return the product with each kernel, completed by its technique, such as an adapter.

    With a `head`, its width, heads are a dimension of their own on TPUs: XLA can then lay out the
    product as attention needs it, without a copy.
    """
    values = [kernel.get_value() for kernel in kernels]
    histories = tuple(rider_of(value) for value in values)
    bases = [operand_of(value) for value in values]
    tokens = x
    splits_heads = _splits_heads(bases, how, head)
    if splits_heads:
        dim = how.heads_dim
        bases = [_split_dim(kernel, dim, head) for kernel in bases]
        if not how.into:
            tokens = _split_dim(x, x.ndim - 1, head)
        how = how.with_heads()
    ys = []
    for y in _products(tokens, tuple(bases), histories, how):
        if splits_heads:
            y = y.reshape(*x.shape[:-1], -1)
        ys.append(y)
    completed = []
    for value, y, placed in zip(values, ys, how.placed, strict=True):
        with named_after(placed):
            completed.append(complete_product(value, y, x))
    return tuple(completed)


def _splits_heads(kernels: Sequence[Array], how: _Products, head: int) -> bool:
    if not head or attention_config().platform != "tpu":
        return False
    if any(map(is_stored, kernels)):
        return False
    return how.has_whole_heads(kernels, head)


def _split_dim(x: Array, dim: int, size: int) -> Array:
    """Split a dimension into two, the second of a size."""
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    x: Array, kernels: tuple[Array, ...], histories: tuple[History | None, ...], how: _Products
) -> tuple[Array, ...]:
    return _products_forward(x, kernels, histories, how)[0]


def _products_forward(
    x: Array, kernels: tuple[Array, ...], histories: tuple[History | None, ...], how: _Products
) -> tuple[tuple[Array, ...], Any]:
    tokens = x
    if how.into:
        tokens = annotate(x, how.into, in_rule=True)
    scales = [_scales_of(history) for history in histories]
    shards = []
    for kernel, placed in zip(kernels, how.placed, strict=True):
        shards.append(prepare(kernel, placed))
    used = []
    for index, shard in enumerate(shards):
        used.append(how.gather(shard, index, scales[index], x.dtype))
    dtype = how.dtype or x.dtype
    form = f"...{how.inputs},{how.axes}->...{how.outs}"
    ys, seen, kept = [], [], []
    for index, placed in enumerate(how.placed):
        scale = scales[index]
        with named_after(placed):
            y = how.multiplied(form, tokens, used[index], index, scales=scale, dtype=dtype)
            seen.append(seen_before(tokens, kernels[index], scale))
        ys.append(y)
        kept.append(used[index] if saves_gathered(placed) else shards[index])
    like = [_gradient_like(kernel) for kernel in kernels]
    inputs = tokens if how.recomputed else x
    return tuple(ys), (inputs, kept, like, scales, seen)


def _gradient_like(kernel: Any) -> Array | None:
    """Return an empty array in the dtype of a kernel's gradient; None if it has none: codes."""
    if is_stored(kernel):
        return None
    return jnp.zeros((0,), kernel.dtype)


def _scales_of(history: History | None) -> Any:
    """Return the largest magnitudes of a history, for scaling; None without one."""
    if history is None:
        return None
    return history.max(axis=-1)


def _products_backward(
    how: _Products, saved: Any, dys: tuple[Array, ...]
) -> tuple[Array, tuple[Array | None, ...], tuple[History | None, ...]]:
    x, kept, likes, scales, seen = saved
    # Barriers keep XLA from merging these gathers with those of the forward pass and saving their
    # results until now.
    if how.into and not how.recomputed and placement(how.stream) != placement(how.into):
        x = constrain_like(jax.lax.optimization_barrier(x), how.stream)
        x = annotate(x, how.into)
    dkernels = list[Array | None]()
    factors, histories = [], []
    for index, dy in enumerate(dys):
        scale = scales[index]
        used = how.gather_again(kept[index], index, scale, x.dtype)
        if how.out:
            dy = annotate(dy, how.out)
        dy = dy.astype(x.dtype)
        like = likes[index]
        dkernel = None
        if like is not None:
            dkernel = how.kernel_gradient(x, dy, index, scale, like.dtype)
        dkernels.append(dkernel)
        factor = _Factors(dy, used, how.outs, how.axes, scale)
        factors.append(factor)
        with named_after(how.placed[index]):
            histories.append(as_history(seen[index], dy))
    dxs = []
    for index, factor in enumerate(_joined(factors, how, x.size)):
        form = f"...{factor.outs},{factor.axes}->...{how.inputs}"
        with named_after(how.placed[index]):
            dx = how.multiplied(form, factor.dy, factor.kernel, index, scales=factor.scales)
        dxs.append(dx)
    # JAX sums cotangents in this order: the last one first.
    with named_after(how.placed[0]):
        dx = functools.reduce(jnp.add, reversed(dxs))
    return dx, tuple(dkernels), tuple(histories)


_products.defvjp(_products_forward, _products_backward)


class _Factors(NamedTuple):
    """Factors of an input's gradient: an output's gradient and its kernel.

    `outs` and `axes` are the dimensions of the two; `scales` are those of a recipe, or None.
    """

    dy: Array
    kernel: Array | Operand
    outs: str
    axes: str
    scales: Any

    @property
    def has_scales(self) -> bool:
        """Whether the factors have scales of their own."""
        return isinstance(self.kernel, Operand) or self.scales is not None


def _joined(factors: list[_Factors], how: _Products, sent: int) -> list[_Factors]:
    """Concatenate each device's factors of all outputs, so that one sum over devices suffices.

    Factors stay separate if a device would copy more elements than the `sent` ones of one sum, or
    if they have scales of their own.
    """
    if not _can_join(factors, how, sent):
        return factors
    first = how.outs[0]
    dim = how.axes.index(first)
    count = _shards(how.placed[0], dim)
    dys = [factor.dy for factor in factors]
    kernels = [factor.kernel for factor in factors]
    dy = _join_shards(dys, dys[0].ndim - len(how.outs), count)
    kernel = _join_shards(kernels, dim, count)
    split = f"z{first}"
    outs = how.outs.replace(first, split)
    axes = how.axes.replace(first, split)
    return [_Factors(dy, kernel, outs, axes, None)]


def _can_join(factors: list[_Factors], how: _Products, sent: int) -> bool:
    """Return whether one product of joined factors spares sums over devices, at little cost."""
    dim = how.axes.index(how.outs[0])
    counts = {_shards(placed, dim) for placed in how.placed}
    recipes = {recipe_of(placed) for placed in how.placed}
    if len(factors) == 1 or len(counts) > 1 or len(recipes) > 1:
        return False
    (count,) = counts
    copied = sum(factor.dy.size for factor in factors)
    if count == 1 or copied > count * sent:
        return False
    return not any(factor.has_scales for factor in factors)


def _shards(placed: ParamPlacement | None, dim: int) -> int:
    if placed is None:
        return 1
    return placed.shards(dim)


def _join_shards(arrays: Sequence[Any], axis: int, count: int) -> Array:
    """Concatenate each of `count` shards of arrays: an axis becomes `[shard, joined]`."""
    parts = []
    for a in arrays:
        parts.append(a.reshape(*a.shape[:axis], count, -1, *a.shape[axis + 1 :]))
    return jnp.concatenate(parts, axis + 1)


def _placed(kernel: nnx.Param) -> ParamPlacement | None:
    return placement_of(kernel.get_metadata("path", None))


class Dense(nnx.Module):
    """Linear layer: a `kernel` `[in, out]`, and an optional `bias`.

    The initial kernel has variance scale² / in, and the bias is zero. See `column_parallel`,
    `row_parallel` and `biased`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        scale: float = 1.0,
        bias: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        init = nnx.initializers.normal(scale * inputs**-0.5)
        table = init(rngs.params(), (inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(
            table, gathered_by_layer=True, takes_wrapped=True, linear=True, matrix="io"
        )
        self.bias = make_bias(outputs) if bias else None

    def with_bias(self, x: Float[Array, "batch seq out"]) -> Float[Array, "batch seq out"]:
        """Add the bias, if any, to a product with the kernel."""
        if self.bias is None:
            return x
        return biased(x, self.bias)


def make_bias(width: int) -> nnx.Param:
    """Return a bias of zeros."""
    return nnx.Param(jnp.zeros((width,), jnp.float32), gathered_by_layer=True)


class Head(nnx.Module):
    """Output head; its `kernel` is `[d, vocab]`, initialised with variance 1 / d."""

    def __init__(self, width: int, vocab: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = Dense(width, vocab, rngs=rngs).kernel
        # A loss may use the kernel in chunks.
        self.kernel.set_metadata(takes_wrapped=False, linear=False, role="logits")

    def __call__(
        self,
        x: Float[Array, "batch seq d"],
        soft_cap: float | None = None,
        bias: nnx.Param | None = None,
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return logits, with an optional soft cap and bias, or `LazyLogits`."""
        return unembed(x, self.kernel[...], _placed(self.kernel), "io", soft_cap, bias)
