"""Language-model head and its loss, without materialising the logits of all tokens.

For 8,192 tokens and 128,256 words the logits take 4 GiB in float32, and their gradient as much again. So inside
`lazy_logits` a model returns `LazyLogits`, and the loss computes logits, softmax and gradients chunk by chunk.

Under a plan the loss is one manual program over the mesh. Each device has its part of the tokens and, over `tensor`,
its part of the vocabulary (Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3):

```
tokens of this device ──▶ logits of this device's words ──▶ max, sum, target: three numbers for each token
                                                             │  summed over tensor
gradient of the tokens, summed over tensor ◀── gradient of the logits ──▶ gradient of the kernel, some words in a turn
```

The kernel's gradient is computed when all chunks are done, over all tokens, and scattered in each turn: no part is
larger than the logits of a chunk. Gradients of logits are kept for it, in the compute dtype, if they take no more than
the whole would (8,192 tokens for a width of 4,096, in bfloat16); for more tokens, logits are computed again (decision
0031).

Gradients are computed with the logits in the forward pass; the backward pass only scales them.
"""

import contextlib
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import AnnotationError, Problem
from spmd.jaxpr.examples import per_example
from spmd.layers.soft_cap import before_soft_cap, soft_capped
from spmd.plan.annotate import annotate, placement
from spmd.plan.context import current, override
from spmd.plan.fsdp import ParamPlacement, gather
from spmd.plan.local_param import LocalParam, local_param
from spmd.plan.manual import all_gather, manual_over, psum, psum_scatter, split_axes
from spmd.plan.scopes import in_scope
from spmd.sharding.dims import Dims, dims_spec, spec_dims
from spmd.sharding.mesh import AnyMesh, entry_axes

CHUNK = 1024
"""Tokens of a chunk: enough for the matmuls to take longer than reading the kernel."""

_TILE = 256
"""Words of a turn are a multiple of it: XLA:TPU fuses reduce-scatters of such parts, and of few others."""

_PURPOSE = "vocabulary-parallel head"
_WHOLE, _ONE_DEVICE = P(), LocalParam(((), ()), ((), ()), ((), ()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LazyLogits:
    """Head inputs, for `spmd.gradients.losses.cross_entropy` to compute logits chunk by chunk.

    `axes` is `"io"` for a kernel `[d, vocab]`, `"oi"` for `[vocab, d]`; `placed` its placement, None outside a plan.
    `tokens` and `logits` are the activation names of `x` and of the logits.
    """

    keeps_dtype: ClassVar[bool] = True  # the loss computes the logits in float32

    x: Float[Array, "batch seq d"]
    kernel: Float[Array, "..."]
    axes: str = dataclasses.field(default="io", metadata={"static": True})
    placed: ParamPlacement | None = dataclasses.field(default=None, metadata={"static": True})
    tokens: str = dataclasses.field(default="residual", metadata={"static": True})
    logits: str = dataclasses.field(default="logits", metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})


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
    param: LocalParam = _ONE_DEVICE  # the kernel
    vocabulary: tuple[str, ...] = ()  # the axes that the vocabulary is split over
    width: tuple[str, ...] = ()  # those of them that also split the width of `x`

    def run(self, differentiate: bool, *arrays: Array) -> tuple[Array, ...]:
        """Run `_local` on each device's part of `x`, the kernel, targets and weights."""
        local = functools.partial(_local, layout=self, differentiate=differentiate)
        if self.mesh is None:
            return local(*arrays)
        x, (stored, _, kept) = P(*self.tokens, self.width or None), self.param.specs
        specs = (x, stored, self.tokens, self.tokens)
        results = (P(), P(), *([x, kept] if differentiate else []))
        return manual_over(self.mesh, self.split, local, specs, results, purpose=_PURPOSE)(*arrays)

    @property
    def joined(self) -> tuple[str, ...]:
        """The axes that split both tokens and vocabulary: tokens are gathered (sequence parallelism)."""
        return tuple(axis for entry in self.tokens for axis in entry_axes(entry) if axis in self.vocabulary)

    @property
    def along(self) -> tuple[tuple[str, ...], ...]:
        """The axes that the dimensions of a chunk of `x`, `[1, token, d]`, are gathered over."""
        return (), self.joined, self.width

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes that split tokens and not the vocabulary."""
        return tuple(axis for entry in self.tokens for axis in entry_axes(entry) if axis not in self.vocabulary)


def materialize(head: LazyLogits) -> Float[Array, "batch seq vocab"]:
    """Return the logits in float32, for a few tokens, as in sampling.

    Example:
        >>> materialize(LazyLogits(jnp.ones((1, 2, 4)), jnp.ones((4, 8)))).shape
        (1, 2, 8)
    """
    kernel = gather(head.kernel, head.placed, head.x.dtype)
    logits = jnp.einsum(f"...i,{head.axes}->...o", head.x, kernel, preferred_element_type=jnp.float32)
    return annotate(soft_capped(logits, head.soft_cap), head.logits)


def chunked_cross_entropy(
    head: LazyLogits, targets: Int[Array, "batch seq"], weights: Float[Array, "batch seq"], chunk: int = CHUNK
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the weighted sum of the cross-entropy in nats, and that of exactly predicted tokens.

    `weights` have no gradient. `chunk` is the number of tokens of each chunk, per device.

    Example:
        >>> head = LazyLogits(jnp.zeros((1, 2, 4)), jnp.ones((4, 8)))
        >>> loss, correct = chunked_cross_entropy(head, jnp.zeros((1, 2), int), jnp.ones((1, 2)), chunk=1)
        >>> round(float(loss), 4), float(correct)  # 2 ln 8
        (4.1589, 2.0)
    """
    layout = _layout(head, chunk)
    return per_example(_sums)(head.x, head.kernel, targets, weights, layout)


def _layout(head: LazyLogits, chunk: int) -> _Layout:
    layout, scope = _Layout(head.axes, head.logits, head.soft_cap, chunk), placement(head.tokens)
    if scope is None:
        return layout
    if head.placed is None:
        fix = "make the model by spmd.from_nnx, and give the table a rule for it"
        problem = Problem("the head's kernel", "is not in the rule table", fix=fix)
        raise AnnotationError("The sharding of the head is not known:", [problem])
    mesh, tokens = scope
    split = split_axes(mesh)
    (*token_dims, width), dim = spec_dims(tokens, 3, split), head.axes.index("o")
    vocabulary = spec_dims(head.placed.used, 2, split)[dim]
    used = tuple(vocabulary if i == dim else () for i in range(2))

    def contiguous(dims: Dims) -> Dims:
        """Return `dims` if a device's words are contiguous after a gather, else `used`: then the compiler reshards."""
        return tuple(dims) if dims[dim][: len(vocabulary)] == vocabulary else used

    param = local_param(head.placed, 2)
    # Over an axis that splits neither tokens nor vocabulary, devices have equal gradients, which must not be summed.
    summed = tuple(axis for axis in split if axis in {*token_dims[0], *token_dims[1], *vocabulary})
    kept = contiguous(spec_dims(head.placed.gradient, 2, summed))
    return dataclasses.replace(
        layout,
        mesh=mesh,
        split=split,
        tokens=dims_spec(token_dims),
        param=dataclasses.replace(param, stored=contiguous(param.stored), used=used, kept=kept),
        vocabulary=vocabulary,
        width=width if set(width) <= set(vocabulary) else (),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(x: Array, kernel: Array, targets: Array, weights: Array, layout: _Layout) -> Any:
    return layout.run(False, x, kernel, targets, weights)


def _forward(x: Array, kernel: Array, targets: Array, weights: Array, layout: _Layout) -> tuple[Any, Any]:
    loss, correct, *gradients = layout.run(True, x, kernel, targets, weights)
    return (loss, correct), (gradients, [jnp.zeros((0,), a.dtype) for a in (x, kernel)])


def _backward(layout: _Layout, saved: tuple[list[Array], list[Array]], cotangents: tuple[Array, ...]) -> Any:
    scaled = (g.astype(jnp.float32) * cotangents[0] for g in saved[0])
    return *(g.astype(like.dtype) for g, like in zip(scaled, saved[1], strict=True)), None, None


_sums.defvjp(_forward, _backward)


def _local(
    x: Array, kernel: Array, targets: Array, weights: Array, *, layout: _Layout, differentiate: bool
) -> tuple[Array, ...]:
    """Return one device's sums over its tokens and, to differentiate, the gradients of `x` and the kernel."""
    count, width = x.shape[0] * x.shape[1], x.shape[-1]
    tokens = count * (jax.lax.axis_size(layout.joined) if layout.joined else 1)
    chunks = -(-tokens // layout.chunk)
    padding = -count % chunks  # tokens of weight 0

    def split(a: Array) -> Array:
        flat = a.reshape(count, *a.shape[2:])
        return jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1))).reshape(chunks, 1, -1, *flat.shape[1:])

    with in_scope(layout.param.scope):
        head = _Head(layout, layout.param.gather(kernel, x.dtype), tokens)
    parts = tuple(split(a) for a in (x, targets, weights))

    def add(total: tuple[Array, ...], part: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        sums, saved = head.of_chunk(*part, differentiate=differentiate)
        return jax.tree.map(jnp.add, total, sums), saved

    zeros: tuple[Array, ...] = (jnp.float32(0), jnp.float32(0))
    sums, saved = jax.lax.scan(add, zeros, parts)
    totals = tuple(psum(s, layout.summed) for s in sums)
    if not differentiate:
        return totals
    dx = saved[1] if len(saved) > 1 else head.dx(saved[0])
    gathered = tuple(all_gather(a, ((), *layout.along)[: a.ndim]) for a in parts)
    with in_scope(layout.param.scope):
        dkernel = head.dkernel(saved[0], *gathered, dtype=kernel.dtype)
    # Without the barrier XLA:TPU computes it after the backward pass of all layers, and holds its operands until then.
    dx, dkernel = jax.lax.optimization_barrier((dx, dkernel))
    return *totals, dx.reshape(-1, width)[:count].reshape(x.shape), dkernel


@dataclasses.dataclass(frozen=True)
class _Head:
    """The head on one device: its kernel, gathered, for some number of tokens."""

    layout: _Layout
    kernel: Array
    tokens: int

    @property
    def narrow(self) -> Any:
        """The dtype of gradients of logits: that of the kernel, except for float16.

        The loss scale is applied in the backward pass; without it, most of these numbers would underflow in float16.
        """
        return jnp.dtype(jnp.float32 if self.kernel.dtype == jnp.float16 else self.kernel.dtype)

    @property
    def bytes_of_word(self) -> tuple[int, int, int]:
        """The bytes of a word in the logits of a chunk, the gradient of the kernel, and gradients of all logits."""
        width = self.kernel.shape[self.layout.axes.index("i")]
        return 4 * self.layout.chunk, 4 * width, self.narrow.itemsize * self.tokens

    @property
    def keeps(self) -> bool:
        """Whether gradients of all logits are kept: if they are no larger than the logits of a chunk."""
        chunk, _, kept = self.bytes_of_word
        return kept <= chunk

    @property
    def words(self) -> Int[Array, "word"]:
        """The ids of this device's words."""
        size, axes = self.kernel.shape[self.layout.axes.index("o")], self.layout.vocabulary
        return jnp.arange(size) + (jax.lax.axis_index(axes) * size if axes else 0)

    def logits(self, x: Array, kernel: Array) -> Array:
        """Return the logits of some words."""
        logits = jnp.einsum(f"...i,{self.layout.axes}->...o", x, kernel, preferred_element_type=jnp.float32)
        return annotate(soft_capped(logits, self.layout.soft_cap), self.layout.logits)

    def dlogits(self, logits: Array, probabilities: Array, is_target: Array, weights: Array) -> Array:
        """Return the gradient of logits."""
        dlogits = (probabilities - is_target) * weights[..., None]
        return before_soft_cap(dlogits, logits, self.layout.soft_cap).astype(self.narrow)

    def dx(self, dlogits: Float[Array, "*chunk 1 token word"]) -> Float[Array, "*chunk 1 token d"]:
        """Return the gradient of tokens, split as they were."""
        dx = jnp.einsum(f"...o,{self.layout.axes}->...i", dlogits, self.kernel)
        dx = psum_scatter(dx, ((),) * (dx.ndim - 3) + self.layout.along)
        scattered = (*self.layout.joined, *self.layout.width)
        return psum(dx, tuple(axis for axis in self.layout.vocabulary if axis not in scattered))

    def of_chunk(
        self, x: Float[Array, "1 token d"], targets: Int[Array, "1 token"], weights: Array, *, differentiate: bool
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return `(loss, correct)` of a chunk and, to differentiate, the gradient of its logits if the head keeps it.

        Otherwise the log-sum-exp of each token, and dx.
        """
        vocabulary = self.layout.vocabulary
        x, targets, weights = (all_gather(a, self.layout.along[: a.ndim]) for a in (x, targets, weights))
        logits, is_target = self.logits(x, self.kernel), _is_target(self.words, targets)
        largest = logits.max(axis=-1)
        largest = jax.lax.pmax(largest, vocabulary) if vocabulary else largest
        exponentials = jnp.exp(logits - largest[..., None])
        own = jnp.stack([exponentials.sum(axis=-1), jnp.where(is_target, logits, 0.0).sum(axis=-1)])
        total, target = psum(own, vocabulary)
        normalizer = jnp.log(total) + largest
        sums = ((normalizer - target) * weights).sum(), ((target >= largest) * weights).sum()
        if not differentiate:
            return sums, ()
        dlogits = self.dlogits(logits, exponentials / total[..., None], is_target, weights)
        return sums, (dlogits,) if self.keeps else (normalizer, self.dx(dlogits))

    def dkernel(
        self, kept: Array, x: Float[Array, "chunk 1 token d"], targets: Array, weights: Array, *, dtype: Any
    ) -> Array:
        """Return this device's shard of the kernel's gradient, summed over devices for some words in each turn.

        `kept` is what `of_chunk` returns first. The gradient of a turn is no larger than the logits of a chunk.
        """
        layout, dim = self.layout, self.layout.axes.index("o")
        param, scatters = layout.param, layout.param.scatters
        shape = [
            n // (jax.lax.axis_size(axes) if axes else 1) for n, axes in zip(self.kernel.shape, scatters, strict=True)
        ]
        own, shards = shape[dim], self.kernel.shape[dim] // shape[dim]  # a turn has words of all shards
        chunk, *others = self.bytes_of_word
        some = min(own, -(-own // (-(-max(others) // chunk) * _TILE)) * _TILE)

        def turn(i: Any, gradient: Array) -> Array:
            start = i * some  # slices and updates clamp it: the last turn may repeat words of the one before

            def of_turn(a: Array, axis: int) -> Array:
                split = a.reshape(*a.shape[:axis], shards, own, *a.shape[axis + 1 :])
                part = jax.lax.dynamic_slice_in_dim(split, start, some, axis + 1)
                return part.reshape(*a.shape[:axis], shards * some, *a.shape[axis + 1 :])

            if self.keeps:
                dlogits = of_turn(kept, 3)
            else:
                logits = self.logits(x, of_turn(self.kernel, dim))
                is_target = _is_target(of_turn(self.words, 0), targets)
                dlogits = self.dlogits(logits, jnp.exp(logits - kept[..., None]), is_target, weights)
            part = jnp.einsum(f"...i,...o->{layout.axes}", x, dlogits, preferred_element_type=dtype)
            return jax.lax.dynamic_update_slice_in_dim(gradient, param.reduce(part, scattered), start, dim)

        scattered = tuple(axis for axes in scatters for axis in axes)
        gradient = jax.lax.fori_loop(0, -(-own // some), turn, jnp.zeros(shape, dtype))
        rest = tuple(axis for axis in layout.summed if axis not in scattered)
        return param.with_whole_gradient().reduce(gradient, rest)


def _is_target(words: Int[Array, "word"], targets: Int[Array, "..."]) -> Array:
    return jnp.expand_dims(words, range(targets.ndim)) == targets[..., None]
