"""Language-model head and its loss, without materialising the logits of all tokens.

For 8,192 tokens and 128,256 words (entries of the vocabulary) the logits take 4 GiB in float32, and
their gradient as much again. So inside `lazy_logits` a model returns `LazyLogits`, and the loss
computes logits, softmax and gradients chunk by chunk.

Under a plan the loss is one manual program over the mesh. Each device has its part of the tokens
and, over `tensor`, its part of the vocabulary (Megatron-LM, Shoeybi et al., arXiv:1909.08053,
section 3):

```
tokens of this device ──▶ logits of this device's words ──▶ three numbers of each token:
                                          │                 max, sum, target; summed over tensor
gradient of the tokens,                   ▼
summed over tensor ◀────────── gradient of the logits ──▶ gradient of the kernel, in turns of words
```

The kernel's gradient is computed when all chunks are done, over all tokens. A loop computes and
scatters some words in each iteration (a turn), so that no part is larger than the logits of a
chunk. Gradients of logits are kept for this loop, in the compute dtype, if they take no more memory
than the float32 logits of a chunk (in bfloat16, for up to twice the tokens of a chunk); for more
tokens, logits are computed again (decision 0031).

Gradients are computed with the logits in the forward pass; the backward pass only scales them.
Of the losses of single tokens (`chunked_token_losses`) only the backward pass knows the weights, so
it computes the logits again.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from spmd.errors import AnnotationError, Problem
from spmd.jaxpr.examples import per_example
from spmd.layers.soft_cap import before_soft_cap, soft_capped
from spmd.plan.annotate import annotate, placement
from spmd.plan.context import current, override
from spmd.plan.fsdp import ParamPlacement, gather
from spmd.plan.manual import all_gather, psum, psum_scatter, shard_map_over, split_axes
from spmd.plan.scopes import comm_scope, in_scope
from spmd.plan.sharded_param import ShardedParam, sharded_param
from spmd.sharding.dims import Dims, dims_spec, spec_dims
from spmd.sharding.mesh import AnyMesh, spec_axes

CHUNK = 1024
"""Tokens of a chunk: enough for the matmuls to take longer than reading the kernel."""

_TILE = 256
"""The number of words in a turn is a multiple of this: XLA:TPU fuses reduce-scatters of such parts,
and of few others."""

_NO_ID = -(2**31)
"""The id of padding among words, which no target has."""

_NO_LOGIT = -1e9
"""The logit of padding: its probability is 0, and its square is finite."""

_PURPOSE = "vocabulary-parallel head"
_WHOLE = P()
_ONE_DEVICE = ShardedParam(((), ()), ((), ()), ((), ()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LazyLogits:
    """Head inputs, for `spmd.gradients.losses.cross_entropy` to compute logits chunk by chunk.

    `axes` is `"io"` for a kernel `[d, vocab]`, `"oi"` for `[vocab, d]`; `placed` its placement,
    None outside a plan. `tokens` and `logits` are the activation names of `x` and of the logits.
    `bias`, gathered, is added to the logits before a soft cap; None for none. Before the cap logits
    are divided by `temperature`; another one is set by `at_temperature`. `over` is a manual axis
    whose devices have equal arrays: each computes the logits of a part of its words (`divides`). The
    loss of one of these devices counts, and has a cotangent. That one has the gradient of `x`, and
    each has that of its own words in the kernel and the bias. None for no such axis.
    """

    keeps_dtype: ClassVar[bool] = True  # the loss computes the logits in float32

    x: Float[Array, "batch seq d"]
    kernel: Float[Array, "..."]
    axes: str = dataclasses.field(default="io", metadata={"static": True})
    placed: ParamPlacement | None = dataclasses.field(default=None, metadata={"static": True})
    tokens: str = dataclasses.field(default="residual", metadata={"static": True})
    logits: str = dataclasses.field(default="logits", metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    bias: Float[Array, "vocab"] | None = None
    temperature: float = dataclasses.field(default=1.0, metadata={"static": True})
    over: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def vocab_dim(self) -> int:
        """The dimension of the vocabulary in the kernel."""
        return self.axes.index("o")

    @property
    def divides(self) -> bool:
        """Whether `over` may divide the words: a device has all of its words before a gather."""
        layout = _layout(self, CHUNK)
        param = layout.param
        dim = self.vocab_dim
        return param.param_dims[dim] == layout.vocabulary == param.grad_dims[dim]


def lazy_logits() -> contextlib.AbstractContextManager[None]:
    """Let models return `LazyLogits` inside; they may also return plain logits."""
    return override(lazy_logits=True)


def is_lazy() -> bool:
    """Return True if a model may return `LazyLogits`."""
    return current().lazy_logits


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Options of the loss, named as in `LazyLogits`, and its sharding; by default on one device."""

    axes: str
    logits: str
    soft_cap: float | None
    chunk: int
    mesh: AnyMesh | None = None
    split: tuple[str, ...] = ()  # the axes of size above 1
    tokens: P = _WHOLE
    param: ShardedParam = _ONE_DEVICE  # the kernel
    vocabulary: tuple[str, ...] = ()  # the axes that the vocabulary is split over
    width: tuple[str, ...] = ()  # the axes of `vocabulary` that also split the width of `x`
    z_loss: float = 0.0
    temperature: float = 1.0
    over: str | None = None  # named as in `LazyLogits`
    part: "_Part | None" = None  # of the words, inside a manual region with `over`

    @property
    def vocab_dim(self) -> int:
        """The dimension of the vocabulary in the kernel."""
        return self.axes.index("o")

    def run(self, differentiate: bool, *arrays: Array) -> tuple[Array, ...]:
        """Run `_local` on each device's part of `x`, the kernel, targets, weights and a bias."""
        local = functools.partial(_local, layout=self, differentiate=differentiate)
        if self.over:
            local = functools.partial(_local_of_part, layout=self, differentiate=differentiate)
        if self.mesh is None:
            return local(*arrays)
        stored, _, kept = self.param.specs
        in_specs = (self.x_spec, stored, self.tokens, self.tokens, self.bias_spec)[: len(arrays)]
        out_specs: tuple[P, ...] = (P(),) * self.sum_count
        if differentiate:
            out_specs += (self.x_spec, kept, self.bias_spec)[: len(arrays) - 2]
        region = shard_map_over(self.mesh, self.split, local, in_specs, out_specs, purpose=_PURPOSE)
        return region(*arrays)

    def run_losses(self, *arrays: Array) -> tuple[Array, Array]:
        """Run `_local_losses` on each device's part of `x`, the kernel, targets and a bias."""
        local = functools.partial(_local_losses, layout=self)
        if self.over:
            local = functools.partial(_local_losses_of_part, layout=self)
        if self.mesh is None:
            return local(*arrays)
        stored, _, _ = self.param.specs
        in_specs = (self.x_spec, stored, self.tokens, self.bias_spec)[: len(arrays)]
        region = shard_map_over(
            self.mesh, self.split, local, in_specs, (self.tokens, self.tokens), purpose=_PURPOSE
        )
        return region(*arrays)

    def with_part(self, kernel: Array) -> "tuple[_Layout, _Part]":
        """Return this layout with a device's part of the words in its stored kernel, and the part."""
        assert self.over is not None
        part = _Part(self.over, self.vocab_dim, kernel.shape[self.vocab_dim])
        return dataclasses.replace(self, part=part), part

    def of_all_parts(self, cotangent: Array) -> Array:
        """Return the sum over the devices of `over`, each with a cotangent of its own."""
        if self.over is None:
            return cotangent
        with in_scope(comm_scope(_PURPOSE)):
            return jax.lax.psum(cotangent, self.over)

    @property
    def sum_count(self) -> int:
        """Number of sums: the loss, predicted tokens and, if it has a weight, the z-loss."""
        if self.z_loss:
            return 3
        return 2

    @property
    def x_spec(self) -> P:
        """The spec of `x`."""
        return P(*self.tokens, self.width or None)

    @property
    def bias_spec(self) -> P:
        """The spec of a bias."""
        return P(self.vocabulary or None)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """All axes of tokens, in order."""
        return tuple(spec_axes(self.tokens))

    @property
    def word_axes(self) -> tuple[str, ...]:
        """All axes of the words' division."""
        if self.over is None:
            return self.vocabulary
        return *self.vocabulary, self.over

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The axes of both tokens and vocabulary: tokens are gathered (sequence parallelism)."""
        return tuple(axis for axis in self.token_axes if axis in self.vocabulary)

    @property
    def gathered_dims(self) -> tuple[tuple[str, ...], ...]:
        """The gathered axes of the dimensions of a chunk of `x`, `[1, token, d]`."""
        return (), self.gathered_axes, self.width

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes of tokens and not of the vocabulary."""
        return tuple(axis for axis in self.token_axes if axis not in self.vocabulary)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A device's part of words common to all devices of a manual axis.

    Parts are equally long: where `size` does not divide, some of the last words are padding.

    Attributes:
        axis: The axis.
        vocab_dim: The dimension of words in the kernel.
        size: All words.
    """

    axis: str
    vocab_dim: int
    size: int

    @property
    def length(self) -> int:
        """The words of a part, with padding."""
        return -(-self.size // _axis_size((self.axis,)))

    @property
    def padding(self) -> int:
        """The number of words in all parts beyond `size`."""
        return self.length * _axis_size((self.axis,)) - self.size

    @property
    def first(self) -> Array:
        """The first word of this device's part."""
        return jax.lax.axis_index(self.axis) * self.length

    def of(self, a: Array, dim: int) -> Array:
        """Return this part of an array with all words along a dimension."""
        widths = [(0, 0)] * a.ndim
        widths[dim] = 0, self.padding
        return jax.lax.dynamic_slice_in_dim(jnp.pad(a, widths), self.first, self.length, dim)

    def of_head(self, kernel: Array, bias: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Return this part of a kernel, and of a bias, if there is one."""
        return self.of(kernel, self.vocab_dim), [self.of(b, 0) for b in bias]

    def in_whole(self, own: Array, dim: int) -> Array:
        """Return an array of all words with this part of it, and zeros."""
        shape = list(own.shape)
        shape[dim] = self.size + self.padding
        zeros = jnp.zeros(shape, own.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(zeros, own, self.first, dim)
        return jax.lax.slice_in_dim(whole, 0, self.size, axis=dim)


def at_temperature(logits: Array | LazyLogits, temperature: float) -> Array | LazyLogits:
    """Return logits divided by a temperature.

    With the cap c, c/T · tanh(z/c) is a cap c/T of z/T.

    Example:
        >>> head = LazyLogits(jnp.ones((1, 1, 4)), jnp.ones((4, 2)), soft_cap=3.0)
        >>> round(float(materialize(at_temperature(head, 2.0))[0, 0, 0]), 4)  # 3 tanh(4/3) / 2
        1.3051
    """
    if temperature == 1:
        return logits
    if not isinstance(logits, LazyLogits):
        return logits / temperature
    soft_cap = logits.soft_cap
    if soft_cap is not None:
        soft_cap = soft_cap / temperature
    whole = logits.temperature * temperature
    return dataclasses.replace(logits, temperature=whole, soft_cap=soft_cap)


def materialize(head: LazyLogits) -> Float[Array, "batch seq vocab"]:
    """Return the logits in float32, for a few tokens, as in sampling.

    Example:
        >>> materialize(LazyLogits(jnp.ones((1, 2, 4)), jnp.ones((4, 8)))).shape
        (1, 2, 8)
    """
    kernel = gather(head.kernel, head.placed, head.x.dtype)
    logits = _logits(head.x, kernel, head.axes, head.bias)
    logits = soft_capped(_over_temperature(logits, head.temperature), head.soft_cap)
    return annotate(logits, head.logits)


def _logits(x: Array, kernel: Array, axes: str, bias: Array | None) -> Array:
    form = f"...i,{axes}->...o"
    logits = jnp.einsum(form, x, kernel, preferred_element_type=jnp.float32)
    return plus_bias(logits, bias)


def _over_temperature(logits: Array, temperature: float) -> Array:
    """Return logits divided by a temperature, or gradients of logits before that division."""
    if temperature == 1:
        return logits
    return logits / temperature


def plus_bias(logits: Float[Array, "*tokens vocab"], bias: Array | None) -> Array:
    """Return the logits plus a gathered bias in float32, if there is one."""
    if bias is None:
        return logits
    wide = bias.astype(jnp.float32)
    return logits + wide.reshape((1,) * (logits.ndim - 1) + wide.shape)


def chunked_cross_entropy(
    head: LazyLogits,
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    chunk: int = CHUNK,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], ...]:
    """Return the weighted sums of the cross-entropy in nats, and of exactly predicted tokens.

    With a weight `z_loss`, the first has the z-loss in it, which is also the third sum. `weights`
    have no gradient. `chunk` is the number of tokens of each chunk, per device.

    Example:
        >>> head = LazyLogits(jnp.zeros((1, 2, 4)), jnp.ones((4, 8)))
        >>> targets, weights = jnp.zeros((1, 2), int), jnp.ones((1, 2))
        >>> loss, correct = chunked_cross_entropy(head, targets, weights, chunk=1)
        >>> round(float(loss), 4), float(correct)  # 2 ln 8
        (4.1589, 2.0)
    """
    layout = dataclasses.replace(_layout(head, chunk), z_loss=z_loss)
    return per_example(_loss_sums)(head.x, head.kernel, targets, weights, head.bias, layout)


def chunked_token_losses(
    head: LazyLogits, targets: Int[Array, "batch seq"], chunk: int = CHUNK
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Return the cross-entropy of each token in nats, and 1 for exactly predicted tokens, else 0.

    For losses that are no sum over tokens. `chunk` is as in `chunked_cross_entropy`.

    Example:
        >>> head = LazyLogits(jnp.zeros((1, 2, 4)), jnp.ones((4, 8)))
        >>> losses, correct = chunked_token_losses(head, jnp.zeros((1, 2), int), chunk=1)
        >>> round(float(losses[0, 0]), 4), correct.tolist()  # ln 8
        (2.0794, [[1.0, 1.0]])
    """
    layout = _layout(head, chunk)
    return per_example(_token_losses)(head.x, head.kernel, targets, head.bias, layout)


def _layout(head: LazyLogits, chunk: int) -> _Layout:
    """Return the options of the loss, with its sharding under the plan in scope."""
    layout = _Layout(
        head.axes,
        head.logits,
        head.soft_cap,
        chunk,
        temperature=head.temperature,
        over=head.over,
    )
    scope = placement(head.tokens)
    if scope is None:
        return layout
    if head.placed is None:
        problem = Problem(
            "the head's kernel",
            "is not in the rule table",
            fix="make the model by spmd.from_nnx, and give the table a rule for it",
        )
        raise AnnotationError("LM head outside of a plan:", [problem])
    mesh, spec = scope
    split = split_axes(mesh)
    *token_dims, width = spec_dims(spec, 3, split)
    examples, tokens = token_dims
    dim = head.vocab_dim
    vocabulary = spec_dims(head.placed.compute_spec, 2, split)[dim]
    if not set(width) <= set(vocabulary):
        width = ()
    # Over an axis that splits neither tokens nor vocabulary, devices have equal gradients, which
    # must not be summed.
    differing = {*examples, *tokens, *vocabulary}
    summed = tuple(axis for axis in split if axis in differing)
    return dataclasses.replace(
        layout,
        mesh=mesh,
        split=split,
        tokens=dims_spec(token_dims),
        param=_kernel_layout(head.placed, dim, vocabulary, summed),
        vocabulary=vocabulary,
        width=width,
    )


def _kernel_layout(
    placed: ParamPlacement, dim: int, vocabulary: tuple[str, ...], summed: tuple[str, ...]
) -> ShardedParam:
    """Return the layout of the kernel in the region: its words, dimension `dim`, are split.

    Args:
        placed: Its placement under the plan.
        dim: The dimension of words.
        vocabulary: The axes that words are split over.
        summed: The axes over which gradients are summed.
    """
    split: list[tuple[str, ...]] = [(), ()]
    split[dim] = vocabulary
    used = tuple(split)
    param = sharded_param(placed, 2)
    kept = spec_dims(placed.grad_spec, 2, summed)
    return dataclasses.replace(
        param,
        param_dims=_contiguous(param.param_dims, used, dim),
        compute_dims=used,
        grad_dims=_contiguous(kept, used, dim),
    )


def _contiguous(dims: Dims, used: Dims, dim: int) -> Dims:
    """Return `dims` if a device's words are contiguous after a gather, else `used`.

    With `used`, the compiler reshards.
    """
    vocabulary = used[dim]
    if dims[dim][: len(vocabulary)] == vocabulary:
        return tuple(dims)
    return used


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _loss_sums(
    x: Array, kernel: Array, targets: Array, weights: Array, bias: Array | None, layout: _Layout
) -> Any:
    return layout.run(False, x, kernel, targets, weights, *_if_any(bias))


def _forward_of_sums(
    x: Array, kernel: Array, targets: Array, weights: Array, bias: Array | None, layout: _Layout
) -> tuple[Any, Any]:
    own_bias = _if_any(bias)
    found = layout.run(True, x, kernel, targets, weights, *own_bias)
    likes = [jnp.zeros((0,), a.dtype) for a in (x, kernel, *own_bias)]
    return found[: layout.sum_count], (list(found[layout.sum_count :]), likes)


def _if_any(bias: Array | None) -> tuple[Array, ...]:
    if bias is None:
        return ()
    return (bias,)


def _backward_of_sums(
    layout: _Layout, saved: tuple[list[Array], list[Array]], cotangents: tuple[Array, ...]
) -> Any:
    gradients, likes = saved
    own = cotangents[0]
    of_all = layout.of_all_parts(own)
    scales = own, *[of_all] * (len(gradients) - 1)  # of x, and of the kernel's and bias's own words
    scaled = []
    for gradient, like, scale in zip(gradients, likes, scales, strict=True):
        wide = gradient.astype(jnp.float32) * scale
        scaled.append(wide.astype(like.dtype))
    dx, dkernel, *rest = scaled
    dbias = None
    if rest:
        (dbias,) = rest
    return dx, dkernel, None, None, dbias


_loss_sums.defvjp(_forward_of_sums, _backward_of_sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_losses(
    x: Array, kernel: Array, targets: Array, bias: Array | None, layout: _Layout
) -> tuple[Array, Array]:
    return layout.run_losses(x, kernel, targets, *_if_any(bias))


def _forward_of_losses(
    x: Array, kernel: Array, targets: Array, bias: Array | None, layout: _Layout
) -> tuple[Any, Any]:
    return _token_losses(x, kernel, targets, bias, layout), (x, kernel, targets, bias)


def _backward_of_losses(layout: _Layout, saved: Any, cotangents: tuple[Array, Array]) -> Any:
    """Return the gradients of the sum of the losses, with the cotangents as weights."""
    x, kernel, targets, bias = saved
    own_bias = _if_any(bias)
    own = cotangents[0].astype(jnp.float32)
    found = layout.run(True, x, kernel, targets, layout.of_all_parts(own), *own_bias)
    dx, dkernel, *rest = found[layout.sum_count :]
    if layout.over is not None:
        dx = jnp.where(jnp.any(own != 0), dx, jnp.zeros_like(dx))
    dbias = None
    if bias is not None:
        dbias = rest[0].astype(bias.dtype)
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype), None, dbias


_token_losses.defvjp(_forward_of_losses, _backward_of_losses)


def _local_losses(
    x: Array, kernel: Array, targets: Array, bias: Array | None = None, *, layout: _Layout
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Return the loss of each of a device's tokens, and whether it is exactly predicted."""
    head, chunks = _gathered_head(x, kernel, bias, layout)
    parts = tuple(_in_chunks(a, chunks) for a in (x, targets))

    def of_chunk(_: None, part: tuple[Array, ...]) -> tuple[None, tuple[Array, Array]]:
        return None, head.losses_of_chunk(*part)

    def without_padding(chunks: Array) -> Array:
        return chunks.reshape(-1)[: targets.size].reshape(targets.shape)

    _, (losses, correct) = jax.lax.scan(of_chunk, None, parts)
    return without_padding(losses), without_padding(correct)


def _local_of_part(
    x: Array,
    kernel: Array,
    targets: Array,
    weights: Array,
    *bias: Array,
    layout: _Layout,
    differentiate: bool,
) -> tuple[Array, ...]:
    """Return the results of `_local`, with the gradients through this device's part of its words."""
    layout, part = layout.with_part(kernel)
    own_kernel, own_bias = part.of_head(kernel, bias)
    found = _local(
        x, own_kernel, targets, weights, *own_bias, layout=layout, differentiate=differentiate
    )
    if not differentiate:
        return found
    *sums_and_dx, dkernel = found[: layout.sum_count + 2]
    dbias = found[layout.sum_count + 2 :]
    gradients = part.in_whole(dkernel, layout.vocab_dim), *(part.in_whole(d, 0) for d in dbias)
    return *sums_and_dx, *gradients


def _local_losses_of_part(
    x: Array, kernel: Array, targets: Array, *bias: Array, layout: _Layout
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Return the results of `_local_losses`; this device has the logits of a part of its words."""
    layout, part = layout.with_part(kernel)
    own_kernel, own_bias = part.of_head(kernel, bias)
    return _local_losses(x, own_kernel, targets, *own_bias, layout=layout)


def _gathered_head(
    x: Array, kernel: Array, bias: Array | None, layout: _Layout
) -> tuple["_Head", int]:
    """Return the head of a device's tokens, with its kernel gathered, and the number of chunks."""
    batch, seq, _ = x.shape
    tokens = batch * seq * _axis_size(layout.gathered_axes)
    with in_scope(layout.param.scope):
        whole = layout.param.gather(kernel, x.dtype)
    return _Head(layout, whole, tokens, bias), -(-tokens // layout.chunk)


def _local(
    x: Array,
    kernel: Array,
    targets: Array,
    weights: Array,
    bias: Array | None = None,
    *,
    layout: _Layout,
    differentiate: bool,
) -> tuple[Array, ...]:
    """Return a device's sums over its tokens and, to differentiate, gradients.

    The gradients are those of `x`, the kernel and the bias, if there is one.
    """
    batch, seq, width = x.shape
    head, chunks = _gathered_head(x, kernel, bias, layout)
    parts = tuple(_in_chunks(a, chunks) for a in (x, targets, weights))

    def add(total: tuple[Array, ...], part: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
        sums, saved = head.of_chunk(*part, differentiate=differentiate)
        return jax.tree.map(jnp.add, total, sums), saved

    zeros: tuple[Array, ...] = (jnp.float32(0),) * layout.sum_count
    if differentiate and bias is not None:
        zeros += (jnp.zeros(bias.shape, jnp.float32),)
    sums, saved = jax.lax.scan(add, zeros, parts)
    totals = tuple(psum(s, layout.summed_axes) for s in sums)
    if not differentiate:
        return totals
    own_sums, dbias = totals[: layout.sum_count], totals[layout.sum_count :]
    if head.keeps:
        (kept,) = saved
        dx = head.dx(kept)
    else:
        kept, dx = saved
    along = ((), *layout.gathered_dims)  # of [chunk, 1, token, d]
    gathered = [all_gather(a, along[: a.ndim]) for a in parts]
    with in_scope(layout.param.scope):
        dkernel = head.dkernel(kept, *gathered, dtype=kernel.dtype)
    # Without the barrier XLA:TPU computes dkernel after the backward pass of all layers, and holds
    # its operands until then.
    dx, dkernel = jax.lax.optimization_barrier((dx, dkernel))
    without_padding = dx.reshape(-1, width)[: batch * seq]
    return *own_sums, without_padding.reshape(x.shape), dkernel, *dbias


def _axis_size(axes: tuple[str, ...]) -> int:
    """Return the number of devices along manual axes; 1 for none."""
    if not axes:
        return 1
    return jax.lax.axis_size(axes)


def _in_chunks(a: Float[Array, "batch seq *d"], chunks: int) -> Float[Array, "chunk 1 token *d"]:
    """Split tokens into equal chunks; padding has weight 0."""
    batch, seq, *rest = a.shape
    count = batch * seq
    padding = -count % chunks
    flat = a.reshape(count, *rest)
    widths = ((0, padding), *((0, 0),) * len(rest))
    padded = jnp.pad(flat, widths)
    return padded.reshape(chunks, 1, -1, *rest)


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Turns of the kernel's gradient: each computes and scatters some words of all shards.

    Attributes:
        shards: The number of shards of the scattered gradient.
        words_per_shard: Words in a shard of the scattered gradient.
        words_per_turn: Words of a shard in one turn.
    """

    shards: int
    words_per_shard: int
    words_per_turn: int

    @property
    def count(self) -> int:
        """The number of turns."""
        return -(-self.words_per_shard // self.words_per_turn)

    def part(self, a: Array, start: Array, axis: int) -> Array:
        """Return the slice of a turn's words from an array with all words along an axis.

        Slices clamp `start`: the last turn may repeat words of the one before.
        """
        before = a.shape[:axis]
        after = a.shape[axis + 1 :]
        split = a.reshape(*before, self.shards, self.words_per_shard, *after)
        part = jax.lax.dynamic_slice_in_dim(split, start, self.words_per_turn, axis + 1)
        return part.reshape(*before, self.shards * self.words_per_turn, *after)


class _Softmax(NamedTuple):
    """Softmax of some tokens over the words of all devices.

    Attributes:
        logits: Of this device's words, `[1, token, word]`.
        is_target: Whether a word is the token's target.
        exponentials: Of the logits minus the largest.
        largest: Largest logit of each token, `[1, token]`.
        total: Sum of the exponentials.
        target: Logit of the target.
    """

    logits: Float[Array, "1 token word"]
    is_target: Bool[Array, "1 token word"]
    exponentials: Float[Array, "1 token word"]
    largest: Float[Array, "1 token"]
    total: Float[Array, "1 token"]
    target: Float[Array, "1 token"]

    @property
    def normalizer(self) -> Float[Array, "1 token"]:
        """The log-sum-exp of the logits."""
        return jnp.log(self.total) + self.largest

    @property
    def probabilities(self) -> Float[Array, "1 token word"]:
        """The probabilities of this device's words."""
        return self.exponentials / self.total[..., None]


@dataclasses.dataclass(frozen=True)
class _Head:
    """The head on one device: its kernel and bias, gathered, for some number of tokens."""

    layout: _Layout
    kernel: Array
    tokens: int
    bias: Array | None = None

    @property
    def narrow(self) -> Any:
        """The dtype of gradients of logits: the kernel's, except for float16.

        The loss scale is applied in the backward pass; without it, most of these numbers would
        underflow in float16.
        """
        dtype = self.kernel.dtype
        if dtype == jnp.float16:
            return jnp.dtype(jnp.float32)
        return jnp.dtype(dtype)

    @property
    def bytes_of_word(self) -> tuple[int, int, int]:
        """The bytes per word in a chunk's logits, in the kernel's gradient, and in all dlogits."""
        width = self.kernel.shape[self.layout.axes.index("i")]
        in_chunk = 4 * self.layout.chunk
        in_kernel = 4 * width
        in_dlogits = self.narrow.itemsize * self.tokens
        return in_chunk, in_kernel, in_dlogits

    @property
    def keeps(self) -> bool:
        """Whether all dlogits are kept: if they are no larger than the logits of a chunk."""
        chunk, _, kept = self.bytes_of_word
        return kept <= chunk

    @property
    def words(self) -> Int[Array, "word"]:
        """The ids of this device's words; `_NO_ID` for padding."""
        size = self.kernel.shape[self.layout.vocab_dim]
        part = self.layout.part
        ids = jnp.arange(size)
        if part is not None:
            size = part.size
            ids += part.first
        axes = self.layout.vocabulary
        first: Any = 0
        if axes:
            first = jax.lax.axis_index(axes) * size
        if part is None or not part.padding:
            return ids + first
        return jnp.where(ids < size, ids + first, _NO_ID)

    def logits(
        self, x: Array, kernel: Array, bias: Array | None, words: Int[Array, "word"]
    ) -> Array:
        """Return the logits of some words."""
        logits = _logits(x, kernel, self.layout.axes, bias)
        logits = soft_capped(
            _over_temperature(logits, self.layout.temperature), self.layout.soft_cap
        )
        part = self.layout.part
        if part is not None and part.padding:
            logits = jnp.where(words != _NO_ID, logits, _NO_LOGIT)
        return annotate(logits, self.layout.logits)

    def dlogits(
        self, logits: Array, probabilities: Array, is_target: Array, weights: Array
    ) -> Array:
        """Return the gradient of logits."""
        dlogits = (probabilities - is_target) * weights[..., None]
        uncapped = before_soft_cap(dlogits, logits, self.layout.soft_cap)
        return _over_temperature(uncapped, self.layout.temperature).astype(self.narrow)

    def dx(self, dlogits: Float[Array, "*chunk 1 token word"]) -> Float[Array, "*chunk 1 token d"]:
        """Return the gradient of tokens, split as they were."""
        dx = jnp.einsum(f"...o,{self.layout.axes}->...i", dlogits, self.kernel)
        leading = ((),) * (dx.ndim - 3)
        dx = psum_scatter(dx, leading + self.layout.gathered_dims)
        scattered = (*self.layout.gathered_axes, *self.layout.width)
        return psum(dx, tuple(axis for axis in self.layout.word_axes if axis not in scattered))

    def of_chunk(
        self,
        x: Float[Array, "1 token d"],
        targets: Int[Array, "1 token"],
        weights: Array,
        *,
        differentiate: bool,
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return `(loss, correct)` of a chunk and, to differentiate, values for the backward pass.

        The gradient of a bias is a third sum. The values are the gradient of the chunk's logits if
        the head keeps it, otherwise the log-sum-exp of each token, and dx.
        """
        weights = all_gather(weights, self.layout.gathered_dims[:2])
        softmax = self.softmax(x, targets)
        normalizer = softmax.normalizer
        is_correct = softmax.target >= softmax.largest
        sums: tuple[Array, ...]
        sums = ((normalizer - softmax.target) * weights).sum(), (is_correct * weights).sum()
        z_loss = self.layout.z_loss
        if z_loss:
            z_sum = (z_loss * normalizer**2 * weights).sum()
            sums = (sums[0] + z_sum, sums[1], z_sum)
        if not differentiate:
            return sums, ()
        probabilities = self.with_z_loss(softmax.probabilities, normalizer)
        dlogits = self.dlogits(softmax.logits, probabilities, softmax.is_target, weights)
        all_sums = (*sums, *self.dbias(dlogits))
        if self.keeps:
            return all_sums, (dlogits,)
        return all_sums, (normalizer, self.dx(dlogits))

    def with_z_loss(self, probabilities: Array, normalizer: Array) -> Array:
        """Return probabilities in the gradient of logits, with that of the squared normalizer."""
        z_loss = self.layout.z_loss
        if not z_loss:
            return probabilities
        return probabilities * (1 + 2 * z_loss * normalizer)[..., None]

    def losses_of_chunk(
        self, x: Float[Array, "1 token d"], targets: Int[Array, "1 token"]
    ) -> tuple[Float[Array, "1 token"], Float[Array, "1 token"]]:
        """Return the losses of a device's tokens of a chunk, and 1 for exactly predicted ones."""
        softmax = self.softmax(x, targets)
        losses = softmax.normalizer - softmax.target
        correct = (softmax.target >= softmax.largest).astype(jnp.float32)
        joined = self.layout.gathered_axes
        if not joined:
            return losses, correct
        own = targets.shape[1]
        first = jax.lax.axis_index(joined) * own
        return (
            jax.lax.dynamic_slice_in_dim(losses, first, own, axis=1),
            jax.lax.dynamic_slice_in_dim(correct, first, own, axis=1),
        )

    def softmax(self, x: Float[Array, "1 token d"], targets: Int[Array, "1 token"]) -> _Softmax:
        """Return the softmax of a chunk, with the gathered tokens."""
        vocabulary = self.layout.word_axes
        along = self.layout.gathered_dims
        x = all_gather(x, along)
        targets = all_gather(targets, along[:2])
        words = self.words
        logits = self.logits(x, self.kernel, self.bias, words)
        is_target = _is_target(words, targets)
        largest = logits.max(axis=-1)
        if vocabulary:
            largest = jax.lax.pmax(largest, vocabulary)
        exponentials = jnp.exp(logits - largest[..., None])
        own_total = exponentials.sum(axis=-1)
        own_target = jnp.where(is_target, logits, 0.0).sum(axis=-1)
        total, target = psum(jnp.stack([own_total, own_target]), vocabulary)
        return _Softmax(logits, is_target, exponentials, largest, total, target)

    def dbias(self, dlogits: Float[Array, "1 token word"]) -> tuple[Array, ...]:
        """Return the gradient of the bias in a chunk, if there is one."""
        if self.bias is None:
            return ()
        return (dlogits.sum((0, 1), dtype=jnp.float32),)

    def dkernel(
        self,
        kept: Array,
        x: Float[Array, "chunk 1 token d"],
        targets: Array,
        weights: Array,
        *,
        dtype: Any,
    ) -> Array:
        """Return this device's shard of the kernel's gradient, summed over devices in turns.

        Each turn has some of the words; its gradient is no larger than the logits of a chunk.
        `kept` is the first value of `of_chunk`.
        """
        layout = self.layout
        param = layout.param
        dim = layout.vocab_dim
        scattered = tuple(itertools.chain(*param.scatters))
        shape = []
        for size, axes in zip(self.kernel.shape, param.scatters, strict=True):
            shape.append(size // _axis_size(axes))
        turns = self._turns(shape[dim])
        form = f"...i,...o->{layout.axes}"

        def turn(i: Any, gradient: Array) -> Array:
            start = i * turns.words_per_turn
            if self.keeps:
                dlogits = turns.part(kept, start, 3)
            else:
                dlogits = self._dlogits_again(turns, start, x, targets, weights, normalizer=kept)
            part = jnp.einsum(form, x, dlogits, preferred_element_type=dtype)
            part = param.reduce(part, scattered)
            return jax.lax.dynamic_update_slice_in_dim(gradient, part, start, dim)

        gradient = jax.lax.fori_loop(0, turns.count, turn, jnp.zeros(shape, dtype))
        rest = tuple(axis for axis in layout.summed_axes if axis not in scattered)
        return param.with_whole_gradient().reduce(gradient, rest)

    def _turns(self, own: int) -> _Turns:
        """Return the fewest turns for `own` words, each no larger than the logits of a chunk."""
        words = self.kernel.shape[self.layout.vocab_dim]
        chunk, *others = self.bytes_of_word
        fewest = -(-max(others) // chunk)
        tiles = -(-own // (fewest * _TILE))
        some = min(own, tiles * _TILE)
        return _Turns(words // own, own, some)

    def _dlogits_again(
        self,
        turns: _Turns,
        start: Array,
        x: Array,
        targets: Array,
        weights: Array,
        *,
        normalizer: Array,
    ) -> Array:
        """Compute the logits of a turn's words again, for their gradient."""
        kernel = turns.part(self.kernel, start, self.layout.vocab_dim)
        bias = None
        if self.bias is not None:
            bias = turns.part(self.bias, start, 0)
        words = turns.part(self.words, start, 0)
        logits = self.logits(x, kernel, bias, words)
        is_target = _is_target(words, targets)
        probabilities = jnp.exp(logits - normalizer[..., None])
        probabilities = self.with_z_loss(probabilities, normalizer)
        return self.dlogits(logits, probabilities, is_target, weights)


def _is_target(words: Int[Array, "word"], targets: Int[Array, "..."]) -> Array:
    return jnp.expand_dims(words, range(targets.ndim)) == targets[..., None]
