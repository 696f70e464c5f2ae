"""A mixture of experts on the tokens of a layer: dispatch, the experts' matmuls, and combination.

Only these are split over `expert`; everything else of a model is data-parallel on that axis (GShard,
arXiv:2006.16668). Under a plan the layer is one manual program (`jax.shard_map`) over every axis of the mesh:

```
tokens of this device ──dispatch──▶ by expert ──all-to-all──▶ this device's experts, everyone's tokens
                                                               │  kernels gathered over fsdp, split over tensor
tokens of this device ◀──combine─── by expert ◀──all-to-all────┘
```

That is two all-to-alls forward and two backward. Sums over `tensor` are of tokens, after they are combined, not of
their copies for each expert.

Dispatch is by **capacity**, where each expert has so many places for each example and a token that finds none is
dropped, or **dropless**, where rows are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`;
MegaBlocks, arXiv:2211.15841).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import AnnotationError, Problem
from spmd.layers.router import RouterConfig, Routing, places
from spmd.plan.annotate import annotate, placement
from spmd.plan.fsdp import ParamPlacement
from spmd.sharding.mesh import AnyMesh, entry_axes
from spmd.sharding.rules import spec_text

Activation = Callable[..., Array]
"""What is between an expert's matmuls: of one array, or of a gate and what it gates."""


@dataclasses.dataclass(frozen=True)
class ExpertKernel:
    """The kernels of all experts of a layer, `[expert, in, out]`, and how the plan in scope places them.

    Attributes:
        array: The kernels.
        placed: From `spmd.plan.fsdp.placement_of`; None outside a plan.
    """

    array: Float[Array, "expert in out"]
    placed: ParamPlacement | None


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the manual program lies on the devices; the empty one is for one device.

    Attributes:
        split: The axes of size above 1 that the program is manual over; collectives are over these alone.
        expert: The axis that experts are split over, and into how many parts.
        tensor: The axes that hidden units are split over.
        gathers: For each kernel, the axes that each of its dimensions is gathered over when it is used.
        is_kept: Whether a derivative keeps kernels as gathered.
        ragged: Whether an all-to-all of rows sends only those that are filled, which XLA:CPU cannot.
    """

    split: tuple[str, ...] = ()
    expert: tuple[str, int] | None = None
    tensor: tuple[str, ...] = ()
    gathers: tuple[tuple[tuple[str, ...], ...], ...] = ()
    is_kept: bool = True
    ragged: bool = False

    @property
    def parts(self) -> int:
        """Into how many parts experts are split."""
        return self.expert[1] if self.expert else 1


def mixture_of_experts(
    x: Float[Array, "batch seq d"],
    routing: Routing,
    config: RouterConfig,
    into: Sequence[ExpertKernel],
    out: ExpertKernel,
    activation: Activation,
) -> tuple[Float[Array, "batch seq d"], Float[Array, ""]]:
    """Each token's experts, `out(activation(into(x)))`, weighted and added up, and how many choices were dropped.

    Args:
        x: Tokens; under a plan they are split as its table says of the activation `expert_tokens`.
        routing: From `spmd.layers.router.route`.
        config: Of the router; its `dispatch` is what is done here.
        into: Kernels `[expert, d, hidden]`: one, or a gate's and that of what it gates.
        out: Kernels `[expert, hidden, d]`.
        activation: Of as many arrays as `into` has kernels.

    Raises:
        AnnotationError: The table splits tokens or kernels in a way that this layer has no collectives for.
    """
    kernels, capacity = (*into, out), config.capacity(x.shape[1])
    where, dropped = routing.experts, jnp.zeros((), jnp.float32)
    if config.dispatch == "capacity":
        where, dropped = places(routing.experts, config.experts, capacity)
    x = annotate(x, "expert_tokens")
    scope = placement("expert_tokens", x.shape)
    layout = _layout(*scope, kernels) if scope else _Layout()

    def local(x: Array, where: Array, weights: Array, *kernels: Array) -> Array:
        rows, weights = (_varying(a.reshape(-1, a.shape[-1]), layout.tensor) for a in (x, weights))
        mlp = functools.partial(_mlp, kernels=kernels, activation=activation, layout=layout)
        if config.dispatch == "dropless":
            mixed = _dropless(rows, where.reshape(-1, where.shape[-1]), weights, config.experts, mlp, layout)
        else:
            mixed = _by_place(rows, where, weights, config, capacity, mlp, layout)
        return _sum(mixed.astype(x.dtype), layout.tensor).reshape(x.shape)

    arrays = (x, where, routing.weights, *(kernel.array for kernel in kernels))
    if scope is None or not layout.split:
        return local(*arrays), dropped
    mesh, tokens = scope[0], _only(scope[1], layout.split)
    stored = [_only(kernel.placed.stored, layout.split) for kernel in kernels if kernel.placed]
    already = get_abstract_mesh().manual_axes
    manual = jax.shard_map(
        local,
        mesh=None if already else mesh,
        in_specs=(tokens, tokens, tokens, *stored),
        out_specs=tokens,
        # Every axis, of size 1 too: where some are not manual, XLA:CPU dies of a sum of bfloat16.
        axis_names=set(mesh.axis_names) - set(already),
    )
    return manual(*arrays), dropped


def _layout(mesh: AnyMesh, tokens: P, kernels: Sequence[ExpertKernel]) -> _Layout:
    """How the plan in scope splits the layer.

    Raises:
        AnnotationError: There are no collectives for it.
    """
    split = tuple(a for a, n in mesh.shape.items() if n > 1 and a not in get_abstract_mesh().manual_axes)

    def dims(spec: P, count: int) -> list[tuple[str, ...]]:
        return [entry_axes(entry) for entry in (*_only(spec, split), *(None,) * count)][:count]

    if not all(kernel.placed for kernel in kernels):
        fix = "make the model by spmd.from_nnx, and give the table a rule for each of them"
        problem = Problem("the experts' kernels", "are not all in the rule table", fix=fix)
        raise AnnotationError("The expert layer does not know how it is split:", [problem])
    used = [dims(kernel.placed.used, 3) for kernel in kernels if kernel.placed]
    stored = [dims(kernel.placed.stored, 3) for kernel in kernels if kernel.placed]
    expert, tensor, _ = used[-1]
    wanted = [[expert, (), tensor]] * (len(used) - 1) + [[expert, tensor, ()]]
    batch, seq, width = dims(tokens, 3)
    problems = []
    if used != wanted or len(expert) > 1:
        what = "are split, fsdp aside, " + " and ".join(spec_text(P(*spec)) for spec in used)
        fix = 'P("expert", "fsdp", "tensor") into the hidden units and P("expert", "tensor", "fsdp") out of them'
        problems.append(Problem("the experts' kernels", what, fix=fix))
    pairs = [pair for specs in zip(stored, used, strict=True) for pair in zip(*specs, strict=True)]
    if any(own[: len(kept)] != kept for own, kept in pairs):
        what = "are stored " + " and ".join(spec_text(P(*spec)) for spec in stored) + ": parts that are not neighbours"
        problems.append(Problem("the experts' kernels", what, fix='"fsdp" last in its dimension'))
    gathered = {axis for own, kept in pairs for axis in own if axis not in kept}
    if missing := sorted(gathered - {*batch, *seq}):
        what = f"is split {spec_text(tokens)}, and not over {missing}, which kernels are gathered over"
        problems.append(Problem("activation 'expert_tokens'", what, fix='P(("data", "fsdp", "expert"), "sequence")'))
    if width or not {*expert} <= {*batch, *seq} or {*tensor} & {*batch, *seq}:
        what = f"is split {spec_text(tokens)}, experts over {[*expert]} and their hidden units over {[*tensor]}"
        fix = 'P(("data", "fsdp", "expert"), "sequence"): over expert, and not over tensor'
        problems.append(Problem("activation 'expert_tokens'", what, fix=fix))
    if problems:
        raise AnnotationError("The expert layer has no collectives for this rule table:", problems)
    return _Layout(
        split=split,
        expert=(expert[0], mesh.shape[expert[0]]) if expert else None,
        tensor=tensor,
        gathers=tuple(
            tuple(tuple(a for a in axes if a not in kept) for axes, kept in zip(*specs, strict=True))
            for specs in zip(stored, used, strict=True)
        ),
        is_kept=all(kernel.placed is None or kernel.placed.save_gathered for kernel in kernels),
        ragged=isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu",
    )


def _only(spec: P, axes: tuple[str, ...]) -> P:
    """The spec without other axes than these."""
    return P(*(tuple(a for a in entry_axes(entry) if a in axes) or None for entry in spec))


def _by_place(
    rows: Float[Array, "token d"],
    place: Int[Array, "example seq choice"],
    weights: Float[Array, "token choice"],
    config: RouterConfig,
    capacity: int,
    mlp: Callable[..., Array],
    layout: _Layout,
) -> Float[Array, "token d"]:
    """By capacity: every expert has `capacity` places for each example, filled or not."""
    examples, _, k = place.shape
    room, n, d = config.experts * capacity, rows.shape[0] * k, rows.shape[1]
    first = room * jax.lax.broadcasted_iota(jnp.int32, place.shape, 0)
    slot = jnp.where(place < room, place + first, examples * room).reshape(-1, k)
    source = _inverse(slot, examples * room)

    def exchange(parts: Float[Array, "part example expert place d"]) -> Float[Array, "part example expert place d"]:
        return jax.lax.all_to_all(parts, layout.expert[0], 0, 0, tiled=True) if layout.expert else parts

    # Where experts choose, a token has a choice for each of them, nearly all of them empty: then rows are added up.
    sparse = config.choice == "expert"
    sent = _rows(rows, source // k) if sparse else _take(rows, source // k, slot)
    parts = exchange(sent.reshape(examples, layout.parts, -1, capacity, d).swapaxes(0, 1))
    own = jnp.moveaxis(parts, 2, 0)
    own = mlp(own.reshape(own.shape[0], -1, d), None).reshape(own.shape)
    found = exchange(jnp.moveaxis(own, 0, 2)).swapaxes(0, 1).reshape(-1, d)
    if sparse:
        weighted = _rows(weights.reshape(-1, 1), source) * found
        return jnp.zeros_like(rows, jnp.float32).at[source // k].add(weighted, mode="drop")
    return _combine(_take(found, slot.reshape(n), source[:, None]), weights)


def _dropless(
    rows: Float[Array, "token d"],
    experts: Int[Array, "token choice"],
    weights: Float[Array, "token choice"],
    count: int,
    mlp: Callable[..., Array],
    layout: _Layout,
) -> Float[Array, "token d"]:
    """Every choice is followed: rows are sorted by expert, and those of one device's experts sent to it.

    A buffer has room for all rows of a device, whomever they are for, so nothing is ever dropped.
    """
    if layout.expert is None:
        return _combine(_by_expert(rows, experts, count, mlp), weights)
    axis, parts = layout.expert
    n, k, d, own = experts.size, experts.shape[1], rows.shape[1], count // parts
    queue = experts.reshape(-1)
    sizes = _sizes(queue, count)
    sent = sizes.reshape(parts, own).sum(axis=1)
    owner = jnp.minimum(queue // own, parts - 1)
    rank = jnp.argsort(jnp.argsort(queue))
    slot = jnp.where(queue < count, owner * n + rank - (jnp.cumsum(sent) - sent)[owner], parts * n).reshape(-1, k)
    source = _inverse(slot, parts * n)

    everyones = jax.lax.all_gather(sizes, axis)  # [part, expert]: a few integers, so that all know how much comes
    mine = jax.lax.dynamic_slice_in_dim(everyones, jax.lax.axis_index(axis) * own, own, axis=1)
    received = mine.sum(axis=1)
    got = _exchange(_take(rows, source // k, slot).reshape(parts, n, d), sent, received, axis, layout.ragged)
    position = jax.lax.broadcasted_iota(jnp.int32, (parts, n, own), 1)
    expert = (position >= jnp.cumsum(mine, axis=1)[:, None]).sum(axis=-1).reshape(-1, 1)  # `own` where a row is empty
    found = _by_expert(got.reshape(-1, d), expert, own, mlp)
    found = _exchange(found.reshape(parts, n, d), received, sent, axis, layout.ragged).reshape(-1, d)
    return _combine(_take(found, slot.reshape(n), source[:, None]), weights)


def _by_expert(
    rows: Float[Array, "token d"], experts: Int[Array, "token choice"], count: int, mlp: Callable[..., Array]
) -> Float[Array, "row d"]:
    """What each choice's expert makes of its token, one row for each choice; zeros for a choice of none."""
    n, k = experts.size, experts.shape[1]
    queue = experts.reshape(-1)
    slot = jnp.where(queue < count, jnp.argsort(jnp.argsort(queue)), n)
    source = _inverse(slot, n)
    return _take(mlp(_take(rows, source // k, slot.reshape(-1, k)), _sizes(queue, count)), slot, source[:, None])


def _combine(found: Float[Array, "row d"], weights: Float[Array, "token choice"]) -> Float[Array, "token d"]:
    """Each token's rows, weighted and added up in float32."""
    return (found.reshape(*weights.shape, -1) * weights[..., None]).sum(axis=1)


def _sizes(experts: Int[Array, "row"], count: int) -> Int[Array, "expert"]:
    return jax.nn.one_hot(experts, count, dtype=jnp.int32).sum(axis=0)


def _inverse(slot: Int[Array, "..."], size: int) -> Int[Array, "slot"]:
    """For each of `size` slots the position of its number in `slot`; the number of positions for an empty one."""
    slot = slot.reshape(-1)
    return jnp.full_like(slot, slot.size, shape=(size,)).at[slot].set(jnp.arange(slot.size), mode="drop")


def _rows(x: Float[Array, "row d"], index: Int[Array, "..."]) -> Float[Array, "... d"]:
    """Rows by number, zeros for a number that there is not."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _take(
    x: Float[Array, "row d"], index: Int[Array, "taken"], back: Int[Array, "row copies"]
) -> Float[Array, "taken d"]:
    """`_rows`, whose derivative takes rows by `back`, where each row went, instead of scattering them."""
    return _rows(x, index)


_take.defvjp(
    lambda x, index, back: (_rows(x, index), back),
    lambda back, dy: (_rows(dy, back).sum(axis=1), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _exchange(
    rows: Float[Array, "part row d"],
    sent: Int[Array, "part"],
    received: Int[Array, "part"],
    axis: str,
    ragged: bool,
) -> Float[Array, "part row d"]:
    """All-to-all over `axis`: the first `sent[p]` rows of part *p* go to device *p*, and as many as received come."""
    if not ragged:
        return jax.lax.all_to_all(rows, axis, 0, 0, tiled=True)
    parts, n, d = rows.shape
    starts = n * jnp.arange(parts, dtype=jnp.int32)
    there = jnp.full_like(starts, n) * jax.lax.axis_index(axis)
    flat = rows.reshape(parts * n, d)
    return jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), starts, sent, there, received, axis_name=axis).reshape(
        rows.shape
    )


_exchange.defvjp(
    lambda rows, sent, received, axis, ragged: (_exchange(rows, sent, received, axis, ragged), (sent, received)),
    lambda axis, ragged, sizes, dy: (_exchange(dy, *sizes[::-1], axis, ragged), None, None),
)


def _mlp(x: Array, sizes: Array | None, *, kernels: Sequence[Array], activation: Activation, layout: _Layout) -> Array:
    """Each row through its expert: rows `[expert, row, d]`, or `[row, d]` sorted by expert, with `sizes` of each."""
    *into, out = zip(kernels, layout.gathers or ((),) * len(kernels), strict=True)
    hidden = activation(*(_grouped(x, kernel, sizes, gathers, layout.is_kept) for kernel, gathers in into))
    kernel, gathers = out
    return _grouped(annotate(hidden, "expert_hidden"), kernel, sizes, gathers, layout.is_kept)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(
    x: Array, kernel: Array, sizes: Array | None, gathers: tuple[tuple[str, ...], ...], is_kept: bool
) -> Array:
    """Multiply rows by their expert's kernel, as `spmd.models.layers.dense` does by one kernel.

    The kernel is gathered in the dtype of `x` for as long as it is used; its gradient leaves the matmul in the
    kernel's own dtype and is summed in it.
    """
    return _grouped_forward(x, kernel, sizes, gathers, is_kept)[0]


def _grouped_forward(x: Array, kernel: Array, sizes: Array | None, gathers: Any, is_kept: bool) -> tuple[Array, Any]:
    whole = _gather(kernel.astype(x.dtype), gathers)
    return _product(x, whole, sizes), (x, whole if is_kept else kernel, kernel[..., :0], sizes)


def _grouped_backward(gathers: Any, is_kept: bool, saved: Any, dy: Array) -> tuple[Array, Array, None]:
    x, kept, like_kernel, sizes = saved
    # The barrier keeps XLA from taking the copy that the forward pass gathered, and from keeping that until now.
    whole = kept if is_kept else _gather(jax.lax.optimization_barrier(kept).astype(x.dtype), gathers)
    dx = _product(dy, whole.swapaxes(1, 2), sizes)
    if sizes is None:
        dkernel = jnp.einsum("eni,eno->eio", x, dy, preferred_element_type=like_kernel.dtype)
    else:
        rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        dkernel = jax.lax.ragged_dot_general(x, dy, sizes, rows, preferred_element_type=like_kernel.dtype)
    for dim, axes in enumerate(gathers):
        if axes:
            dkernel = jax.lax.psum_scatter(dkernel, axes, scatter_dimension=dim, tiled=True)
    return _sum_like(dx, x), _sum_like(dkernel, like_kernel), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _product(x: Array, kernel: Array, sizes: Array | None) -> Array:
    if sizes is None:
        return jnp.einsum("eni,eio->eno", x, kernel, preferred_element_type=x.dtype)
    return jax.lax.ragged_dot(x, kernel, sizes, preferred_element_type=x.dtype)


def _gather(kernel: Array, gathers: tuple[tuple[str, ...], ...]) -> Array:
    for dim, axes in enumerate(gathers):
        if axes:
            kernel = jax.lax.all_gather(kernel, axes, axis=dim, tiled=True)
    return kernel


def _varying(x: Array, axes: tuple[str, ...]) -> Array:
    """`x`, from here on another on each device along these axes; its gradient is summed over them."""
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, axes) if axes else x


def _sum_like(gradient: Array, like: Array) -> Array:
    """A gradient summed over the axes along which it differs from device to device, and what it is of does not."""
    own, wanted = (jax.typeof(a).manual_axis_type.varying for a in (gradient, like))
    return _sum(gradient, tuple(sorted(own - wanted)))
