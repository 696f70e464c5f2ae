"""Language-model head and its loss, without materialising the logits of all tokens.

For 8,192 tokens and 128,256 words the logits take 4 GiB in float32, and their gradient as much again. So inside
`lazy_logits` a model returns `LazyLogits`, and the loss computes logits, softmax and gradients chunk by chunk.

Under a plan the loss is one manual program over the mesh. Each device has its part of the tokens and, over `tensor`,
its part of the vocabulary (Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3):

```
tokens of this device ──▶ logits of this device's words ──▶ max, sum, target: three numbers for each token
                                                             │  summed over tensor
gradient of the tokens, summed over tensor ◀── gradient of the logits ──▶ gradient of the kernel, summed once at the end
```

Gradients are computed with the logits in the forward pass; the backward pass only scales them.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import AnnotationError, Problem
from spmd.layers.soft_cap import before_soft_cap, soft_capped
from spmd.plan.annotate import annotate, placement
from spmd.plan.context import current, override
from spmd.plan.fsdp import ParamPlacement, gather
from spmd.plan.manual import all_gather, dims_spec, extra_axes, manual_over, psum, psum_scatter, spec_dims, split_axes
from spmd.sharding.mesh import AnyMesh, entry_axes

CHUNK = 1024
"""Tokens of a chunk: enough for the matmuls to take longer than reading the kernel."""

_WHOLE = P()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LazyLogits:
    """Head inputs, for `spmd.gradients.losses.cross_entropy` to compute logits chunk by chunk.

    `axes` is `"io"` for a kernel `[d, vocab]`, `"oi"` for `[vocab, d]`; `placed` its placement, None outside a plan.
    `tokens` and `logits` are the activation names of `x` and of the logits.
    """

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
    kernel: P = _WHOLE  # as an input
    gradient: P = _WHOLE  # of the kernel, as an output
    vocabulary: tuple[str, ...] = ()  # the axes that the vocabulary is split over
    width: tuple[str, ...] = ()  # those of them that also split the width of `x`
    gathers: tuple[tuple[str, ...], ...] = ()  # the axes that each dimension of the kernel is gathered over
    scatters: tuple[tuple[str, ...], ...] = ()  # the axes that each dimension of its gradient is scattered over

    def run(self, differentiate: bool, *arrays: Array) -> tuple[Array, ...]:
        """Run `_local` on each device's part of `x`, the kernel, targets and weights."""
        local = functools.partial(_local, layout=self, differentiate=differentiate)
        if self.mesh is None:
            return local(*arrays)
        x = P(*self.tokens, self.width or None)
        specs = (x, self.kernel, self.tokens, self.tokens)
        results = (P(), P(), *([x, self.gradient] if differentiate else []))
        return manual_over(self.mesh, self.split, local, specs, results)(*arrays)

    @property
    def joined(self) -> tuple[str, ...]:
        """The axes that split both tokens and vocabulary: tokens are gathered (sequence parallelism)."""
        return tuple(axis for entry in self.tokens for axis in entry_axes(entry) if axis in self.vocabulary)

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
    kernel = gather(head.kernel.astype(head.x.dtype), head.placed)
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
    return _sums(head.x, head.kernel, targets, weights, _layout(head, chunk))


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
    used = [vocabulary if i == dim else () for i in range(2)]

    def contiguous(dims: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return `dims` if a device's words are contiguous after a gather, else `used`: then the compiler reshards."""
        return dims if dims[dim][: len(vocabulary)] == vocabulary else used

    stored = contiguous(spec_dims(head.placed.stored, 2, split))
    # Over an axis that splits neither tokens nor vocabulary, devices have equal gradients, which must not be summed.
    summed = tuple(axis for axis in split if axis in {*token_dims[0], *token_dims[1], *vocabulary})
    gradient = contiguous(spec_dims(head.placed.gradient, 2, summed))
    return dataclasses.replace(
        layout,
        mesh=mesh,
        split=split,
        tokens=dims_spec(token_dims),
        kernel=dims_spec(stored),
        gradient=dims_spec(gradient),
        vocabulary=vocabulary,
        width=width if set(width) <= set(vocabulary) else (),
        gathers=extra_axes(stored, used),
        scatters=extra_axes(gradient, used),
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
    whole = all_gather(kernel.astype(x.dtype), layout.gathers)
    count = x.shape[0] * x.shape[1]
    chunks = -(-count * (jax.lax.axis_size(layout.joined) if layout.joined else 1) // layout.chunk)
    padding = -count % chunks  # tokens of weight 0

    def split(a: Array) -> Array:
        flat = a.reshape(count, *a.shape[2:])
        return jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1))).reshape(chunks, 1, -1, *flat.shape[1:])

    of_chunk = functools.partial(
        _of_chunk, kernel=whole, layout=layout, gradient=kernel.dtype if differentiate else None
    )
    parts = tuple(split(a) for a in (x, targets, weights))
    first = tuple(a[0] for a in parts)
    if chunks == 1:
        sums, dx = of_chunk(*first)
    else:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of_chunk, *first)[0])

        def add(total: tuple[Array, ...], part: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array | None]:
            sums, dx = of_chunk(*part)
            return jax.tree.map(jnp.add, total, sums), dx

        sums, dx = jax.lax.scan(add, zeros, parts)
    totals = tuple(psum(s, layout.summed) for s in sums[:2])
    if dx is None:
        return totals
    dx = dx.reshape(-1, x.shape[-1])[:count].reshape(x.shape)
    dkernel = psum_scatter(sums[2], layout.scatters)
    scattered = {axis for dim in layout.scatters for axis in dim}
    return *totals, dx, psum(dkernel, tuple(axis for axis in layout.summed if axis not in scattered))


def _of_chunk(
    x: Float[Array, "1 token d"],
    targets: Int[Array, "1 token"],
    weights: Float[Array, "1 token"],
    *,
    kernel: Array,
    layout: _Layout,
    gradient: Any,
) -> tuple[tuple[Array, ...], Array | None]:
    """Return `(loss, correct)` of a chunk and None; with a `gradient` dtype `(loss, correct, dkernel)` and dx."""
    along = ((), layout.joined, layout.width)
    x, targets, weights = all_gather(x, along), *(all_gather(a, along[:2]) for a in (targets, weights))
    logits = jnp.einsum(f"...i,{layout.axes}->...o", x, kernel, preferred_element_type=jnp.float32)
    logits = annotate(soft_capped(logits, layout.soft_cap), layout.logits)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    if layout.vocabulary:
        ids += jax.lax.axis_index(layout.vocabulary) * logits.shape[-1]
    is_target = ids == targets[..., None]
    largest = logits.max(axis=-1)
    largest = jax.lax.pmax(largest, layout.vocabulary) if layout.vocabulary else largest
    exponentials = jnp.exp(logits - largest[..., None])
    own = jnp.stack([exponentials.sum(axis=-1), jnp.where(is_target, logits, 0.0).sum(axis=-1)])
    total, target = psum(own, layout.vocabulary)
    loss = ((jnp.log(total) + largest - target) * weights).sum()
    correct = ((target >= largest) * weights).sum()
    if gradient is None:
        return (loss, correct), None
    dlogits = (exponentials / total[..., None] - is_target) * weights[..., None]
    dlogits = before_soft_cap(dlogits, logits, layout.soft_cap)
    # The loss scale is applied in the backward pass; without it, most of these numbers would underflow in float16.
    dlogits = dlogits if x.dtype == jnp.float16 else dlogits.astype(x.dtype)
    dkernel = jnp.einsum(f"...i,...o->{layout.axes}", x, dlogits, preferred_element_type=gradient)
    dx = psum_scatter(jnp.einsum(f"...o,{layout.axes}->...i", dlogits, kernel), along)
    scattered = (*layout.joined, *layout.width)
    return (loss, correct, dkernel), psum(dx, tuple(axis for axis in layout.vocabulary if axis not in scattered))
