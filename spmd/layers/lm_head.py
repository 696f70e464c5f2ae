"""The head of a language model and its loss, without the logits of all tokens ever being there.

A head multiplies each token with a table of the vocabulary. For 8,192 tokens and 128,256 words that is 4 GiB in
float32, and as much again for their gradient: more than all else. So a model that is asked for its loss returns its
head `LazyLogits`, and the loss takes some tokens at a time: their logits, their softmax, their gradients, the next
tokens.

Under a plan that is one manual program over the mesh. Each device has its part of the tokens and, over `tensor`, its
part of the vocabulary (Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3):

```
tokens of this device ──▶ logits of this device's words ──▶ largest, sum, target: three numbers for each token
                                                             │  summed over tensor
gradient of the tokens, summed over tensor ◀── gradient of the logits ──▶ gradient of the table, summed once, at the end
```

Gradients are computed where the logits are, in the forward pass, so no logit is computed twice. The backward pass only
scales them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float, Int

from spmd.errors import AnnotationError, Problem
from spmd.layers.soft_cap import before_soft_cap, soft_capped
from spmd.plan.annotate import annotate, manual_over, placement
from spmd.plan.context import current, override
from spmd.plan.fsdp import ParamPlacement, gather
from spmd.sharding.mesh import AnyMesh, entry_axes

CHUNK = 1024
"""Tokens whose logits are there at once: so many that the products take longer than reading the table does."""

_WHOLE = P()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LazyLogits:
    """Logits that are not multiplied out, for `spmd.gradients.losses.cross_entropy` to take some tokens at a time.

    Attributes:
        x: `[batch, seq, d]`, split like the activation `tokens`.
        kernel: The head, `[d, vocab]` or `[vocab, d]`.
        axes: `"io"` for the one, `"oi"` for the other.
        placed: How the plan in scope places the kernel; None outside a plan.
        tokens: The activation that `x` is split like.
        logits: The activation that logits are marked as.
        soft_cap: What logits stay below (`spmd.layers.soft_cap`); None for no cap.
    """

    x: Float[Array, "batch seq d"]
    kernel: Float[Array, "..."]
    axes: str = dataclasses.field(default="io", metadata={"static": True})
    placed: ParamPlacement | None = dataclasses.field(default=None, metadata={"static": True})
    tokens: str = dataclasses.field(default="residual", metadata={"static": True})
    logits: str = dataclasses.field(default="logits", metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})


@contextlib.contextmanager
def lazy_logits() -> Iterator[None]:
    """Asks the models that run inside for `LazyLogits` logits; those that do not know of it return them as ever."""
    with override(lazy_logits=True):
        yield


def is_lazy() -> bool:
    """Whether a model may return its logits `LazyLogits`."""
    return current().lazy_logits


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What the program is, and how it lies on the devices; by default on one.

    Attributes:
        axes: Of the kernel, as in `LazyLogits`.
        logits: What logits are marked as.
        soft_cap: Of logits.
        chunk: Of how many tokens there are some at once.
        mesh: The plan's; None without devices to split over.
        split: The axes of size above 1.
        tokens: How `x` is split.
        kernel: How the kernel comes.
        gradient: How its gradient goes.
        vocabulary: The axes that the vocabulary is split over.
        gathers: For each dimension of the kernel, the axes it is gathered over when it is used.
        scatters: The same for its gradient.
    """

    axes: str
    logits: str
    soft_cap: float | None
    chunk: int
    mesh: AnyMesh | None = None
    split: tuple[str, ...] = ()
    tokens: P = _WHOLE
    kernel: P = _WHOLE
    gradient: P = _WHOLE
    vocabulary: tuple[str, ...] = ()
    gathers: tuple[tuple[str, ...], ...] = ((), ())
    scatters: tuple[tuple[str, ...], ...] = ((), ())

    def run(self, differentiate: bool, *arrays: Array) -> tuple[Array, ...]:
        """`_local` on each device's part of `x`, the kernel, targets and weights."""
        local = functools.partial(_local, layout=self, differentiate=differentiate)
        if self.mesh is None:
            return local(*arrays)
        specs = (self.tokens, self.kernel, self.tokens, self.tokens)
        results = (P(), P(), *([self.tokens, self.gradient] if differentiate else []))
        return manual_over(self.mesh, self.split, local, specs, results)(*arrays)

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that tokens are split over."""
        return tuple(axis for entry in self.tokens for axis in entry_axes(entry))

    @property
    def joined(self) -> tuple[str, ...]:
        """The axes that tokens and vocabulary are both split over: there tokens are gathered (sequence parallel)."""
        return tuple(axis for axis in self.over if axis in self.vocabulary)

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes along which devices have other tokens, and the same words."""
        return tuple(axis for axis in self.over if axis not in self.vocabulary)


def materialize(head: LazyLogits) -> Float[Array, "batch seq vocab"]:
    """The logits after all, in float32: of a few tokens, such as those that others are drawn from.

    Args:
        head: From a model.

    Example:
        >>> multiplied(Unembedded(jnp.ones((1, 2, 4)), jnp.ones((4, 8)))).shape
        (1, 2, 8)
    """
    kernel = gather(head.kernel.astype(head.x.dtype), head.placed)
    logits = jnp.einsum(f"...i,{head.axes}->...o", head.x, kernel, preferred_element_type=jnp.float32)
    return annotate(soft_capped(logits, head.soft_cap), head.logits)


def chunked_cross_entropy(
    head: LazyLogits, targets: Int[Array, "batch seq"], weights: Float[Array, "batch seq"], chunk: int = CHUNK
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the summed cross-entropy in nats, and how many tokens are predicted exactly.

    Args:
        head: From a model.
        targets: The token that follows each position.
        weights: Of each position. They have no gradient.
        chunk: How many tokens of a device there are logits of at once.

    Example:
        >>> head = Unembedded(jnp.zeros((1, 2, 4)), jnp.ones((4, 8)))
        >>> loss, correct = chunked_cross_entropy(head, jnp.zeros((1, 2), int), jnp.ones((1, 2)), chunk=1)
        >>> round(float(loss), 4), float(correct)  # 2 ln 8
        (4.1589, 2.0)
    """
    loss, correct = _sums(head.x, head.kernel, targets, weights, _layout(head, chunk))
    return loss, correct


def _layout(head: LazyLogits, chunk: int) -> _Layout:
    scope = placement(head.tokens)
    if scope is None:
        return _Layout(head.axes, head.logits, head.soft_cap, chunk)
    if head.placed is None:
        fix = "make the model by spmd.from_nnx, and give the table a rule for it"
        problem = Problem("the head's kernel", "is not in the rule table", fix=fix)
        raise AnnotationError("The loss does not know how the head is split:", [problem])
    mesh, tokens = scope
    split = tuple(a for a, n in mesh.shape.items() if n > 1 and a not in get_abstract_mesh().manual_axes)

    def dims(spec: P) -> list[tuple[str, ...]]:
        entries = [tuple(a for a in entry_axes(entry) if a in split) for entry in spec]
        return [*entries, (), ()][:2]

    used, parts = dims(head.placed.used), dims(tokens)
    word = head.axes.index("o")
    vocabulary = used[word]
    whole = [vocabulary if dim == word else () for dim in range(2)]

    def in_order(spec: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """`spec`, if what a device gathers of the vocabulary is one piece; else the compiler brings the pieces."""
        return spec if spec[word][: len(vocabulary)] == vocabulary else whole

    def beyond(spec: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a for a in axes if a not in kept) for axes, kept in zip(spec, whole, strict=True))

    def spec(dims: list[tuple[str, ...]]) -> P:
        return P(*(axes or None for axes in dims))

    stored = in_order(dims(head.placed.stored))
    # Along an axis that splits neither tokens nor words, devices have the same gradient, and it is not summed.
    summed = {*parts[0], *parts[1], *vocabulary}
    gradient = in_order([tuple(a for a in axes if a in summed) for axes in dims(head.placed.gradient)])
    return _Layout(
        head.axes,
        head.logits,
        head.soft_cap,
        chunk,
        mesh=mesh,
        split=split,
        tokens=spec(parts),
        kernel=spec(stored),
        gradient=spec(gradient),
        vocabulary=vocabulary,
        gathers=beyond(stored),
        scatters=beyond(gradient),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(x: Array, kernel: Array, targets: Array, weights: Array, layout: _Layout) -> tuple[Array, ...]:
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
    """What one device does: sums over its tokens and, to differentiate, what `x` and the kernel get of them."""
    whole = _each_dim(jax.lax.all_gather, kernel.astype(x.dtype), layout.gathers)
    count = x.shape[0] * x.shape[1]
    chunks = -(-count * (jax.lax.axis_size(layout.joined) if layout.joined else 1) // layout.chunk)
    padding = -count % chunks  # with tokens that weigh nothing

    def cut(a: Array) -> Array:
        flat = a.reshape(count, *a.shape[2:])
        return jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1))).reshape(chunks, 1, -1, *flat.shape[1:])

    one = functools.partial(_of_chunk, kernel=whole, layout=layout, gradient=kernel.dtype if differentiate else None)
    parts = tuple(cut(a) for a in (x, targets, weights))
    first = tuple(a[0] for a in parts)
    if chunks == 1:
        sums, dx = one(*first)
    else:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, *first)[0])

        def add(total: tuple[Array, ...], part: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array | None]:
            sums, dx = one(*part)
            return jax.tree.map(jnp.add, total, sums), dx

        sums, dx = jax.lax.scan(add, zeros, parts)
    totals = tuple(_sum(s, layout.summed) for s in sums[:2])
    if dx is None:
        return totals
    dx = dx.reshape(-1, x.shape[-1])[:count].reshape(x.shape)
    dkernel = _each_dim(jax.lax.psum_scatter, sums[2], layout.scatters)
    scattered = {axis for dim in layout.scatters for axis in dim}
    return *totals, dx, _sum(dkernel, tuple(axis for axis in layout.summed if axis not in scattered))


def _of_chunk(
    x: Float[Array, "1 token d"],
    targets: Int[Array, "1 token"],
    weights: Float[Array, "1 token"],
    *,
    kernel: Array,
    layout: _Layout,
    gradient: Any,
) -> tuple[tuple[Array, ...], Array | None]:
    """The sums over some tokens and, with a dtype for it, the kernel's gradient among them, and that of `x`."""
    along = ((), layout.joined)
    x, targets, weights = (_each_dim(jax.lax.all_gather, a, along) for a in (x, targets, weights))
    logits = jnp.einsum(f"...i,{layout.axes}->...o", x, kernel, preferred_element_type=jnp.float32)
    logits = annotate(soft_capped(logits, layout.soft_cap), layout.logits)
    words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    if layout.vocabulary:
        words += jax.lax.axis_index(layout.vocabulary) * logits.shape[-1]
    is_target = words == targets[..., None]
    largest = logits.max(axis=-1)
    largest = jax.lax.pmax(largest, layout.vocabulary) if layout.vocabulary else largest
    likely = jnp.exp(logits - largest[..., None])
    own = jnp.stack([likely.sum(axis=-1), jnp.where(is_target, logits, 0.0).sum(axis=-1)])
    total, target = _sum(own, layout.vocabulary)
    loss = ((jnp.log(total) + largest - target) * weights).sum()
    correct = ((target >= largest) * weights).sum()
    if gradient is None:
        return (loss, correct), None
    dlogits = (likely / total[..., None] - is_target) * weights[..., None]
    dlogits = before_soft_cap(dlogits, logits, layout.soft_cap)
    # The scale of a float16 loss comes with the backward pass; most of these numbers would be 0 without it.
    dlogits = dlogits if x.dtype == jnp.float16 else dlogits.astype(x.dtype)
    dkernel = jnp.einsum(f"...i,...o->{layout.axes}", x, dlogits, preferred_element_type=gradient)
    dx = _each_dim(jax.lax.psum_scatter, jnp.einsum(f"...o,{layout.axes}->...i", dlogits, kernel), along)
    return (loss, correct, dkernel), _sum(dx, tuple(axis for axis in layout.vocabulary if axis not in layout.joined))


def _each_dim(collective: Any, x: Array, dims: tuple[tuple[str, ...], ...]) -> Array:
    """An all-gather or a reduce-scatter of each dimension over its axes."""
    word = "axis" if collective is jax.lax.all_gather else "scatter_dimension"
    for dim, axes in enumerate(dims):
        if axes:
            x = collective(x, axes, **{word: dim}, tiled=True)
    return x


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, axes) if axes else x
