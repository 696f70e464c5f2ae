"""Linear layers under a plan: kernels gathered over `fsdp` for their product, hidden units split over `tensor`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.layers.linear_recipes import History, as_history, gather_operand, gradient_by_recipe, recipe_of, seen_before
from spmd.layers.lm_head import LazyLogits, is_lazy
from spmd.layers.quantized_matmul import Operand, quantized_einsum
from spmd.layers.soft_cap import soft_capped
from spmd.model_api.wrapped_param import addend_of, operand_of, rider_of
from spmd.plan.annotate import annotate, attention_config, constrain_like, is_recomputed, placement
from spmd.plan.fsdp import ParamPlacement, gathered, named_after, placement_of, prepare, saves_gathered


def dense(
    x: Float[Array, "batch seq *in"],
    kernel: nnx.Param[Float[Array, "*in out"]],
    precision: str | None = None,
    dtype: Any = None,
    axes: str = "io",
) -> Float[Array, "batch seq out"]:
    """Return `x @ kernel`, with the kernel gathered over `fsdp` and discarded after use.

    The kernel is cast to the dtype of `x` and then gathered, so the collective is in bfloat16. Its gradient leaves the
    matmul in the kernel's own dtype, so sums over devices are in float32, and is scattered as the plan says.

    Args:
        x: Activations.
        kernel: A parameter; its metadata has its path under a plan.
        precision: As in `jax.lax.dot`, for the product and its derivative.
        dtype: Dtype of the product; None for that of `x`.
        axes: The kernel's dimensions, `o` for the output; the others are the last ones of `x`.
    """
    return _multiplied(x, (kernel,), _Products((_placed(kernel),), axes, dtype, precision=precision))[0]


def columns(
    x: Float[Array, "batch seq d"], kernels: Sequence[nnx.Param], whole: str, head: int = 0
) -> tuple[Float[Array, "batch seq hidden"], ...]:
    """Apply column-parallel kernels: from the residual stream into hidden units, which a table may split over `tensor`.

    If the table splits the residual stream over `tensor` too, by width or by tokens (sequence parallelism, Korthikanti
    et al., arXiv:2205.05198, section 4.2.2), tokens are gathered here, once for all kernels. For the backward pass they
    are saved split, and gathered again, unless the whole layer is recomputed there.

    Args:
        x: Tokens.
        kernels: Parameters.
        whole: The activation name of gathered tokens.
        head: The width of a head, if hidden units are heads.
    """
    static = _Products(tuple(map(_placed, kernels)), into=whole)
    return _multiplied(constrain_like(x, "residual"), kernels, static, head=head)


def rows(
    x: Float[Array, "batch seq hidden"], kernel: nnx.Param, whole: str, head: int = 0
) -> Float[Array, "batch seq d"]:
    """Apply a row-parallel kernel: from hidden units back into the residual stream.

    Args:
        x: Hidden units.
        kernel: A parameter.
        whole: The activation name of the gathered gradient.
        head: The width of a head, if hidden units are heads.
    """
    return constrain_like(_multiplied(x, (kernel,), _Products((_placed(kernel),), out=whole), head=head)[0], "residual")


def unembed(
    x: Float[Array, "batch seq d"],
    kernel: Float[Array, "..."],
    placed: ParamPlacement | None,
    axes: str,
    soft_cap: float | None = None,
) -> Float[Array, "batch seq vocab"] | LazyLogits:
    """Return logits in float32; `LazyLogits` inside `spmd.layers.lm_head.lazy_logits`.

    Args:
        x: The normalised residual stream.
        kernel: `[d, vocab]` or `[vocab, d]`.
        placed: The kernel's placement under the plan in scope.
        axes: `"io"` for `[d, vocab]`, `"oi"` for `[vocab, d]`.
        soft_cap: The cap of logits; None for no cap.
    """
    x = constrain_like(x, "residual")
    if is_lazy():
        return LazyLogits(x, kernel, axes, placed, soft_cap=soft_cap)
    how = _Products((placed,), axes, jnp.float32)
    return annotate(soft_capped(_products(x, (kernel,), (None,), how)[0], soft_cap), "logits")


def biased(x: Float[Array, "batch seq out"], bias: nnx.Param[Float[Array, "out"]]) -> Float[Array, "batch seq out"]:
    """Return `x + bias` in the dtype of `x`; the sum and the bias's gradient are in float32."""
    whole = gathered(bias[...], _placed(bias))
    return (x.astype(whole.dtype) + whole[None, None]).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Products:
    """Options of the product of an array with kernels.

    Attributes:
        placed: The placement of each kernel under the plan in scope.
        axes: As for `dense`, as are `dtype` and `precision`.
        into: The activation name of the array as an input of the matmul, if any.
        out: The activation name of a product's gradient as an input of the matmul, if any.
        outs: The kernel's dimensions that the product has.
        recomputed: Whether the backward pass recomputes the layer; asked here, since JAX traces derivatives later.
    """

    placed: tuple[ParamPlacement | None, ...]
    axes: str = "io"
    dtype: Any = None
    into: str = ""
    out: str = ""
    precision: str | None = None
    outs: str = "o"
    recomputed: bool = dataclasses.field(default_factory=is_recomputed)

    @property
    def inputs(self) -> str:
        """The contracted dimensions."""
        return "".join(dim for dim in self.axes if dim not in self.outs)

    def gather(self, prepared: Any, index: int, scales: Any, dtype: Any) -> Array | Operand:
        """Return a kernel as it is multiplied, from what both passes gather it from."""
        return gather_operand(prepared, self.placed[index], scales, dtype, ndim=len(self.axes))

    def einsum(self, form: str, a: Array, b: Array, dtype: Any = None) -> Array:
        """Return the product of two arrays; `dtype` is theirs by default."""
        return jnp.einsum(form, a, b, preferred_element_type=dtype, precision=self.precision)

    def multiplied(
        self, form: str, a: Array, kernel: Array | Operand, index: int, *, scales: Any = None, dtype: Any = None
    ) -> Array:
        """Return the product of an input, or of an output's gradient, with a kernel, by the kernel's recipe."""
        recipe = recipe_of(self.placed[index])
        if recipe is None:
            assert not isinstance(kernel, Operand)
            return self.einsum(form, a, kernel, dtype)
        is_gradient = form.endswith(self.inputs)
        return quantized_einsum(form, a, kernel, recipe, is_gradient=is_gradient, scales=scales, dtype=dtype or a.dtype)


def _multiplied(x: Array, kernels: Sequence[nnx.Param], how: _Products, *, head: int = 0) -> tuple[Array, ...]:
    """Return the product with each kernel, plus what a technique adds to it, such as an adapter's.

    With a `head`, its width, heads are a dimension of their own on TPUs: XLA can then lay out the product as attention
    needs it, without a copy. They are the outputs of a kernel that takes tokens `into` it, else the inputs.
    """
    values = [kernel.get_value() for kernel in kernels]
    histories = tuple(rider_of(value) for value in values)
    bases, tokens = [operand_of(value) for value in values], x
    dim = how.axes.index("o" if how.into else "i") if head else 0
    heads = [kernel.shape[dim] // head for kernel in bases] if head and attention_config().platform == "tpu" else []
    if heads and all(p is None or p.keeps_whole(dim, n) for p, n in zip(how.placed, heads, strict=True)):
        bases = [kernel.reshape(*kernel.shape[:dim], -1, head, *kernel.shape[dim + 1 :]) for kernel in bases]
        folded = tuple(placed and placed.with_dim(dim + 1) for placed in how.placed)
        axes, outs = ("ihk", "hk") if how.into else ("hko", how.outs)
        how = dataclasses.replace(how, placed=folded, axes=axes, outs=outs)
        tokens = x if how.into else x.reshape(*x.shape[:-1], -1, head)
    ys = [y.reshape(*x.shape[:-1], -1) if heads else y for y in _products(tokens, tuple(bases), histories, how)]
    added = []
    for value, placed in zip(values, how.placed, strict=True):
        with named_after(placed):
            added.append(addend_of(value, x))
    return tuple(y if change is None else y + change for y, change in zip(ys, added, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    x: Array, kernels: tuple[Array, ...], histories: tuple[History | None, ...], how: _Products
) -> tuple[Array, ...]:
    return _products_forward(x, kernels, histories, how)[0]


def _products_forward(
    x: Array, kernels: tuple[Array, ...], histories: tuple[History | None, ...], how: _Products
) -> tuple[tuple[Array, ...], Any]:
    tokens = annotate(x, how.into, in_rule=True) if how.into else x
    scales = [history if history is None else history.max(axis=-1) for history in histories]
    shards = [prepare(kernel, placed) for kernel, placed in zip(kernels, how.placed, strict=True)]
    used = [how.gather(shard, index, scales[index], x.dtype) for index, shard in enumerate(shards)]
    dtype = how.dtype or x.dtype
    ys, seen, form = [], [], f"...{how.inputs},{how.axes}->...{how.outs}"
    for index, (kernel, stored, placed) in enumerate(zip(used, kernels, how.placed, strict=True)):
        with named_after(placed):
            ys.append(how.multiplied(form, tokens, kernel, index, scales=scales[index], dtype=dtype))
            seen.append(seen_before(tokens, stored, scales[index]))
    kept = [u if saves_gathered(placed) else k for u, k, placed in zip(used, shards, how.placed, strict=True)]
    like = [jnp.zeros((0,), kernel.dtype) for kernel in kernels]
    return tuple(ys), (tokens if how.recomputed else x, kept, like, scales, seen)


def _products_backward(
    how: _Products, saved: Any, dys: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], tuple[History | None, ...]]:
    x, kept, like_kernels, scales, seen = saved
    # Barriers keep XLA from merging these gathers with those of the forward pass and saving their results until now.
    if how.into and not how.recomputed and placement("residual") != placement(how.into):
        x = annotate(constrain_like(jax.lax.optimization_barrier(x), "residual"), how.into)
    dkernels, factors, histories = [], [], []
    form = f"...{how.inputs},...{how.outs}->{how.axes}"
    for index, (kernel, placed, like_kernel, dy) in enumerate(zip(kept, how.placed, like_kernels, dys, strict=True)):
        is_gathered, scale = saves_gathered(placed), scales[index]
        used = kernel if is_gathered else how.gather(jax.lax.optimization_barrier(kernel), index, scale, x.dtype)
        dy = annotate(dy, how.out) if how.out else dy
        dy = dy.astype(x.dtype)
        exact = functools.partial(how.einsum, form, dtype=like_kernel.dtype)
        layout = placed, how.axes, how.outs
        dkernels.append(gradient_by_recipe(exact, form, (x, dy), *layout, scale, like_kernel.dtype))
        factors.append(_Factors(dy, used, how.outs, how.axes, scale))
        with named_after(placed):
            histories.append(as_history(seen[index], dy))
    # In the order in which JAX sums cotangents: the last one first.
    dxs = []
    for index, (dy, used, outs, axes, scale) in enumerate(_joined(factors, how, x.size)):
        with named_after(how.placed[index]):
            dxs.append(how.multiplied(f"...{outs},{axes}->...{how.inputs}", dy, used, index, scales=scale))
    with named_after(how.placed[0]):
        return functools.reduce(jnp.add, reversed(dxs)), tuple(dkernels), tuple(histories)


_products.defvjp(_products_forward, _products_backward)


class _Factors(NamedTuple):
    """The gradient of an output and its kernel, the dimensions of both, and their scales."""

    dy: Array
    kernel: Array | Operand
    outs: str
    axes: str
    scales: Any


def _joined(factors: list[_Factors], how: _Products, sent: int) -> list[_Factors]:
    """Join what devices have of all outputs to one, on each device: its product is then summed over devices only once.

    Nothing is joined that would copy more numbers than the `sent` ones of a sum, or has scales of its own already.
    """
    dys, kernels = [factor.dy for factor in factors], [factor.kernel for factor in factors]
    dim, first = how.axes.index(how.outs[0]), how.outs[0]
    counts = {placed.shards(dim) if placed else 1 for placed in how.placed}
    count, recipes = max(counts), {recipe_of(placed) for placed in how.placed}
    has_scales = any(isinstance(factor.kernel, Operand) or factor.scales is not None for factor in factors)
    if len(dys) == 1 or len(counts) > 1 or count == 1 or sum(dy.size for dy in dys) > count * sent:
        return factors
    if len(recipes) > 1 or has_scales:
        return factors

    def join(arrays: Sequence[Any], axis: int) -> Array:
        parts = [a.reshape(*a.shape[:axis], count, -1, *a.shape[axis:][1:]) for a in arrays]
        return jnp.concatenate(parts, axis + 1)

    outs, axes = (names.replace(first, f"z{first}") for names in (how.outs, how.axes))
    return [_Factors(join(dys, dys[0].ndim - len(how.outs)), join(kernels, dim), outs, axes, None)]


def _placed(kernel: nnx.Param) -> ParamPlacement | None:
    return placement_of(kernel.get_metadata("path", None))


class Dense(nnx.Module):
    """Linear layer: `kernel` `[in, out]`, initialised with variance 1 / in, and `bias`, if it has one.

    See `columns`, `rows` and `biased`.
    """

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, bias: bool = False, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(scale * inputs**-0.5)
        table = init(rngs.params(), (inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(table, gathered_by_layer=True, takes_wrapped=True, linear=True, matrix="io")
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32), gathered_by_layer=True) if bias else None

    def with_bias(self, x: Float[Array, "batch seq out"]) -> Float[Array, "batch seq out"]:
        """Add the bias, if any, to a product with the kernel."""
        return x if self.bias is None else biased(x, self.bias)


class Head(nnx.Module):
    """Output head; its `kernel` is `[d, vocab]`, initialised with variance 1 / d."""

    def __init__(self, width: int, vocab: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = Dense(width, vocab, rngs=rngs).kernel
        self.kernel.set_metadata(takes_wrapped=False, linear=False, role="logits")  # a loss may use it in chunks

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return logits or `LazyLogits`."""
        return unembed(x, self.kernel[...], _placed(self.kernel), "io")
