"""Mixture of experts: dispatch of a layer's tokens, the experts' matmuls, and combination.

Only these are split over mesh axis `expert`; the rest of a model is data-parallel over it (GShard, arXiv:2006.16668).
Under a plan the layer is one manual program (`jax.shard_map`) over every axis of the mesh:

```
tokens of this device ──dispatch──▶ by expert ──all-to-all──▶ tokens of all devices for this device's experts
                                                               │  kernels gathered over fsdp, split over tensor
tokens of this device ◀──combine─── by expert ◀──all-to-all────┘
```

Dispatch (`spmd.layers.expert_dispatch`) is by **capacity**, where each expert has a fixed number of slots for each
example and tokens beyond it are dropped, or **dropless**, where rows are sorted by expert and multiplied group by group
(`jax.lax.ragged_dot`; MegaBlocks, arXiv:2211.15841). Tokens are summed over `tensor` after they are combined.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import AnnotationError, Problem
from spmd.layers.expert_dispatch import ExpertAxis, dispatch_capacity, dispatch_dropless
from spmd.layers.router import RouterConfig, Routing, expert_slots
from spmd.plan.annotate import annotate, placement
from spmd.plan.fsdp import ParamPlacement
from spmd.plan.manual import Dims, all_gather, dims_spec, extra_axes, psum, spec_dims, split_axes, sum_gradient
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.rules import spec_text

Activation = Callable[..., Array]
"""Function between an expert's matmuls: of one array, or of a gate and the gated array."""

_REPLICATED = P()


@dataclasses.dataclass(frozen=True)
class ExpertKernel:
    """The kernels of all experts of a layer; `placed` is from `spmd.plan.fsdp.placement_of`, None outside a plan."""

    array: Float[Array, "expert in out"]
    placed: ParamPlacement | None


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Sharding of the manual program; the default is for one device."""

    split: tuple[str, ...] = ()  # the axes of size above 1; collectives are over these alone
    tokens: P = _REPLICATED
    stored: tuple[P, ...] = ()  # the spec of each kernel outside the program
    expert: ExpertAxis | None = None
    tensor: tuple[str, ...] = ()  # the axes that hidden units are split over
    gathers: tuple[tuple[tuple[str, ...], ...], ...] = ()  # the axes of each dimension of each kernel
    save_gathered: bool = True  # for the backward pass


def mixture_of_experts(
    x: Float[Array, "batch seq d"],
    routing: Routing,
    config: RouterConfig,
    into: Sequence[ExpertKernel],
    out: ExpertKernel,
    activation: Activation,
) -> tuple[Float[Array, "batch seq d"], Float[Array, ""]]:
    """Return the weighted sum of each token's experts, `out(activation(into(x)))`, and the number of dropped choices.

    Args:
        x: Tokens; under a plan, split like the activation `expert_tokens`.
        into: Kernels `[expert, d, hidden]`: one, or those of gate and gated array, the arguments of `activation`.
        out: Kernels `[expert, hidden, d]`.
    """
    kernels, capacity = (*into, out), config.capacity(x.shape[1])
    where, dropped = routing.experts, jnp.zeros((), jnp.float32)
    if config.dispatch == "capacity":
        where, dropped = expert_slots(routing.experts, config.experts, capacity)
    x = annotate(x, "expert_tokens")
    scope = placement("expert_tokens", x.shape)
    layout = _layout(*scope, kernels) if scope else _Layout()

    def local(x: Array, where: Array, weights: Array, *kernels: Array) -> Array:
        rows, weights = (_varying(a.reshape(-1, a.shape[-1]), layout.tensor) for a in (x, weights))
        mlp = functools.partial(_mlp, kernels=kernels, activation=activation, layout=layout)
        if config.dispatch == "dropless":
            choices = where.reshape(-1, where.shape[-1])
            mixed = dispatch_dropless(rows, choices, weights, config.experts, mlp, layout.expert)
        else:
            mixed = dispatch_capacity(rows, where, weights, config, capacity, mlp, layout.expert)
        return psum(mixed.astype(x.dtype), layout.tensor).reshape(x.shape)

    arrays = (x, where, routing.weights, *(kernel.array for kernel in kernels))
    if scope is None or not layout.split:
        return local(*arrays), dropped
    manual_axes = get_abstract_mesh().manual_axes
    manual = jax.shard_map(
        local,
        mesh=None if manual_axes else scope[0],
        in_specs=(*(layout.tokens,) * 3, *layout.stored),
        out_specs=layout.tokens,
        # Every axis, of size 1 too: if some are not manual, XLA:CPU crashes on a sum of bfloat16.
        axis_names=set(scope[0].axis_names) - set(manual_axes),
    )
    return manual(*arrays), dropped


def _layout(mesh: AnyMesh, tokens: P, kernels: Sequence[ExpertKernel]) -> _Layout:
    """Return the sharding of the layer under the plan in scope, if there are collectives for it."""
    split = split_axes(mesh)
    placements = [kernel.placed for kernel in kernels if kernel.placed]
    if len(placements) < len(kernels):
        fix = "make the model by spmd.from_nnx, and give the table a rule for each of them"
        problem = Problem("the experts' kernels", "are not all in the rule table", fix=fix)
        raise AnnotationError("The sharding of the expert layer is not known:", [problem])
    used = [spec_dims(placed.used, 3, split) for placed in placements]
    stored = [spec_dims(placed.stored, 3, split) for placed in placements]
    expert, tensor, _ = used[-1]
    batch, seq, width = spec_dims(tokens, 3, split)
    problems = []
    if used != [[expert, (), tensor]] * (len(used) - 1) + [[expert, tensor, ()]] or len(expert) > 1:
        what = "are split, apart from fsdp, " + " and ".join(spec_text(P(*spec)) for spec in used)
        fix = 'P("expert", "fsdp", "tensor") into the hidden units and P("expert", "tensor", "fsdp") out of them'
        problems.append(Problem("the experts' kernels", what, fix=fix))
    pairs = [pair for specs in zip(stored, used, strict=True) for pair in zip(*specs, strict=True)]
    if any(own[: len(kept)] != kept for own, kept in pairs):
        what = "are stored " + " and ".join(spec_text(P(*spec)) for spec in stored) + ": shards are not contiguous"
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
    is_ragged = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu"
    return _Layout(
        split=split,
        tokens=dims_spec((batch, seq, width)),
        stored=tuple(map(dims_spec, stored)),
        expert=ExpertAxis(expert[0], mesh.shape[expert[0]], is_ragged) if expert else None,
        tensor=tensor,
        gathers=tuple(extra_axes(*specs) for specs in zip(stored, used, strict=True)),
        save_gathered=all(placed.save_gathered for placed in placements),
    )


def _mlp(x: Array, sizes: Array | None, *, kernels: Sequence[Array], activation: Activation, layout: _Layout) -> Array:
    """Apply each row's expert: rows are `[expert, row, d]`, or `[row, d]` sorted by expert with group `sizes`."""
    *into, out = zip(kernels, layout.gathers or ((),) * len(kernels), strict=True)
    hidden = activation(*(_grouped_matmul(x, kernel, sizes, dims, layout.save_gathered) for kernel, dims in into))
    return _grouped_matmul(annotate(hidden, "expert_hidden"), out[0], sizes, out[1], layout.save_gathered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(x: Array, kernel: Array, sizes: Array | None, gathers: Dims, save_gathered: bool) -> Array:
    """Multiply rows by their expert's kernel, gathered in the dtype of `x`; its gradient is summed in its own dtype."""
    return _grouped_forward(x, kernel, sizes, gathers, save_gathered)[0]


def _grouped_forward(
    x: Array, kernel: Array, sizes: Array | None, gathers: Dims, save_gathered: bool
) -> tuple[Array, Any]:
    whole = all_gather(kernel.astype(x.dtype), gathers)
    return _product(x, whole, sizes), (x, whole if save_gathered else kernel, kernel[..., :0], sizes)


def _grouped_backward(gathers: Dims, save_gathered: bool, saved: Any, dy: Array) -> tuple[Array, Array, None]:
    x, kernel, like_kernel, sizes = saved
    # The barrier keeps XLA from merging this gather with that of the forward pass and saving its result until now.
    whole = kernel if save_gathered else all_gather(jax.lax.optimization_barrier(kernel).astype(x.dtype), gathers)
    dx = _product(dy, whole.swapaxes(1, 2), sizes)
    if sizes is None:
        dkernel = jnp.einsum("eni,eno->eio", x, dy, preferred_element_type=like_kernel.dtype)
    else:
        rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        dkernel = jax.lax.ragged_dot_general(x, dy, sizes, rows, preferred_element_type=like_kernel.dtype)
    scattered = tuple(axis for axes in gathers for axis in axes)
    return _sum_like(dx, x), sum_gradient(dkernel, gathers, (*scattered, *_missing(dkernel, like_kernel))), None


_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _product(x: Array, kernel: Array, sizes: Array | None) -> Array:
    if sizes is None:
        return jnp.einsum("eni,eio->eno", x, kernel, preferred_element_type=x.dtype)
    return jax.lax.ragged_dot(x, kernel, sizes, preferred_element_type=x.dtype)


def _varying(x: Array, axes: tuple[str, ...]) -> Array:
    """Mark `x` as varying over axes, so that its gradient is summed over them."""
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _sum_like(gradient: Array, like: Array) -> Array:
    """Sum a gradient over the axes that it varies over and the primal does not."""
    return psum(gradient, _missing(gradient, like))


def _missing(gradient: Array, like: Array) -> tuple[str, ...]:
    own, wanted = (jax.typeof(a).manual_axis_type.varying for a in (gradient, like))
    return tuple(sorted(own - wanted))
