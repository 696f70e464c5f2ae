"""Mixture of experts: a layer's tokens are sent to their experts, which are MLPs, and their results are added up.

Only the experts are split over mesh axis `expert`; the rest of a model is data-parallel over it (GShard,
arXiv:2006.16668). Under a plan the layer is one manual program (`jax.shard_map`) over every axis of the mesh:

```
tokens of this device ──rows by expert──▶ all-to-all ──▶ tokens of all devices for this device's experts
                                                           │  kernels gathered over fsdp, split over tensor
tokens of this device ◀────sums──────── all-to-all ◀───────┘  weighted inside the MLP
```

`spmd.layers.expert_dispatch` has the ways there and back: by **capacity**, where each expert has a fixed number of
slots for each example and tokens beyond it are dropped, or **dropless** (MegaBlocks, arXiv:2211.15841). Routing weights
multiply the hidden units, where their gradients are sums over hidden units too, so that no result is sent twice. The
derivative is written out: its way there and back are those of the forward pass, and a pass that dropless dispatch needs
beyond the first is computed again in it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.jaxpr.examples import per_example
from spmd.layers.expert_dispatch import EXTRA_PASSES, Capacity, Dispatch, Dropless
from spmd.layers.expert_exchange import Blocks
from spmd.layers.expert_layout import ExpertKernel, ExpertLayout, expert_layout
from spmd.layers.grouped_matmul import Sizes, grouped_gradient, quantized_grouped_matmul
from spmd.layers.router import RouterConfig, Routing, expert_slots
from spmd.plan.annotate import annotate, placement
from spmd.plan.manual import batch_sum, manual_over, psum, split_axes
from spmd.settings.quantize import MatmulRecipe
from spmd.sharding.dims import dims_spec

Activation = Callable[..., Array]
"""Function between an expert's matmuls: of one array, or of a gate and the gated array."""


def mixture_of_experts(
    x: Float[Array, "batch seq d"],
    routing: Routing,
    config: RouterConfig,
    into: Sequence[ExpertKernel],
    out: ExpertKernel,
    activation: Activation,
) -> tuple[Float[Array, "batch seq d"], dict[str, Float[Array, ""]]]:
    """Return the weighted sum of each token's experts, `out(activation(into(x)))`, and what became of the rows.

    These are the number of `"dropped"` choices, and of `"extra_passes"`.

    Args:
        x: Tokens; under a plan, split like the activation `expert_tokens`.
        into: Kernels `[expert, d, hidden]`: one, or those of gate and gated array, the arguments of `activation`.
        out: Kernels `[expert, hidden, d]`.
    """
    kernels, capacity = (*into, out), config.capacity(x.shape[1])
    scope = placement("expert_tokens", x.shape)
    layout = expert_layout(*scope, kernels) if scope else ExpertLayout()
    tokens = x.shape[0] * x.shape[1] // layout.parts
    recipes = tuple(kernel.placed.recipe if kernel.placed else None for kernel in kernels)
    layer = _Layer(config, capacity, activation, layout, math.gcd(tokens, config.chunks), recipes)
    where, dropped = routing.experts, jnp.zeros((), jnp.float32)
    if config.dispatch == "capacity":
        slots, dropped = expert_slots(routing.experts, config.experts, capacity, routing.capacities)
        is_kept = slots < config.experts * capacity
        where = jnp.where(is_kept, routing.experts, config.experts) if layer.is_dropless else slots
    arrays = tuple(kernel.array for kernel in kernels)
    # The rows of experts are sorted over the examples of a device, and go back to where they were.
    y, extra = per_example(_apply)(layer, x, where, routing.weights, arrays)
    return y, {"dropped": batch_sum(dropped), "extra_passes": extra}


class _Received(NamedTuple):
    """What the experts of one device get in a pass: rows, the weight of each, and the hidden units of gate and up."""

    rows: Float[Array, "*own d"]
    scales: Float[Array, "*own"]
    hidden: tuple[Float[Array, "*own hidden"], ...]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What is known of a layer before its arrays."""

    config: RouterConfig
    capacity: int
    activation: Activation
    layout: ExpertLayout
    chunks: int
    recipes: tuple[MatmulRecipe | None, ...]

    @property
    def is_dropless(self) -> bool:
        """Whether rows have no slots: for capacities too where an example is split, since a part of it fills any slot.

        Where experts choose, a token has a choice for each of them, nearly all without an expert: too many for rows.
        """
        return self.config.dispatch == "dropless" or (self.config.choice == "token" and bool(self.layout.tokens[1]))

    def product(self, index: int, x: Array, kernel: Array, sizes: Sizes, *, transposed: bool = False) -> Array:
        """Return the products of rows with kernels, the last ones of which lead out of hidden units."""
        is_last = index % len(self.recipes) == len(self.recipes) - 1
        return quantized_grouped_matmul(
            *(x, kernel, sizes, self.recipes[index]),
            tensor=self.layout.tensor,
            is_split=is_last != transposed,
            transposed=transposed,
        )

    def dispatch(self, where: Array) -> Dispatch:
        """Return the ways of the rows of one device."""
        if self.is_dropless:
            return Dropless(where.reshape(-1, where.shape[-1]), self.config, self.layout.expert, self.layout.over)
        return Capacity(where, self.config, self.layout.expert, self.capacity)

    def split(self, *arrays: Array) -> list[list[Array]]:
        """Split arrays of a device's tokens into chunks: a list of parts for each."""
        if self.chunks == 1:
            return [list(arrays)]
        return list(map(list, zip(*(jnp.split(_flat(array), self.chunks) for array in arrays), strict=True)))

    def manual(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Run `local` on the shards of each device."""
        mesh = self.layout.mesh
        if mesh is None:
            return local
        return manual_over(mesh, split_axes(mesh), local, in_specs, out_specs, purpose="experts")

    @property
    def tokens(self) -> P:
        """The spec of tokens."""
        return dims_spec((*self.layout.tokens, ()))

    @property
    def received(self) -> _Received:
        """The specs of what experts get."""
        expert = self.layout.expert
        is_sorted = self.is_dropless and (expert is None or expert.kind is not Blocks)
        leading = () if is_sorted else (None,)
        rows: Any = P(*leading, self.layout.over or None)
        hidden: Any = P(*rows, self.layout.tensor or None)
        return _Received(rows, rows, hidden)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(layer: _Layer, x: Array, where: Array, weights: Array, kernels: tuple[Array, ...]) -> tuple[Array, Array]:
    return _apply_forward(layer, x, where, weights, kernels)[0]


def _apply_forward(
    layer: _Layer, x: Array, where: Array, weights: Array, kernels: tuple[Array, ...]
) -> tuple[tuple[Array, Array], Any]:
    layout = layer.layout

    def local(x: Array, where: Array, weights: Array, kernels: tuple[Array, ...]) -> Any:
        *into, out = layout.gather(kernels, x.dtype)

        def chunk(x: Array, where: Array, weights: Array) -> tuple[Array, Any, _Received]:
            dispatch = layer.dispatch(where)
            sent = dispatch.rows(_flat(x)), dispatch.choices(_flat(weights))

            def result(turn: Any) -> tuple[Array, _Received]:
                got = _receive(layer, dispatch, sent, into, turn)
                value = _scaled(layer.activation(*got.hidden), got.scales)
                return layer.product(-1, value, out, dispatch.sizes(turn)), got

            first, got = result(0)
            rows = _more(
                dispatch, lambda turn, rows: dispatch.give(result(turn)[0], turn, rows), dispatch.give(first, 0, None)
            )
            return dispatch.combine(rows).astype(x.dtype), dispatch.passes - 1, got

        ys, extra, got = zip(*(chunk(*part) for part in layer.split(x, where, weights)), strict=True)
        y = psum(jnp.concatenate(ys), layout.tensor).reshape(x.shape)
        return y, jnp.float32(sum(extra)), got, (*into, out) if layout.save_gathered else ()

    stored, used, _ = layout.specs
    wholes = used if layout.save_gathered else ()
    received = (layer.received,) * layer.chunks
    manual = layer.manual(local, (*(layer.tokens,) * 3, stored), (layer.tokens, P(), received, wholes))
    shards = layout.prepare(kernels)
    y, extra, got, gathered = manual(x, where, weights, shards)
    # What is prepared of a kernel may not have the dtype of its gradient.
    like = tuple(jnp.zeros((0,), k.dtype) for k in kernels) if layout.prepares else ()
    return (y, extra), (x, where, weights, shards, like, got, gathered)


def _apply_backward(
    layer: _Layer, saved: Any, dys: tuple[Array, Array]
) -> tuple[Array, None, Array, tuple[Array, ...]]:
    layout, (x, where, weights, kernels, like, got, gathered) = layer.layout, saved
    dtypes = [array.dtype for array in like or kernels]

    def local(x: Array, where: Array, weights: Array, kernels: tuple[Array, ...], got: Any, dy: Array) -> Any:
        *into, out = kernels if layout.save_gathered else layout.gather(kernels, x.dtype)
        chunks = zip(layer.split(x, where, weights, dy), got, strict=True)
        dxs, dscales, dkernels = zip(*(chunk(into, out, had, *part) for part, had in chunks), strict=True)
        dx, dweights = (psum(jnp.concatenate(parts), layout.tensor) for parts in (dxs, dscales))
        sums = jax.tree.map(lambda *parts: functools.reduce(jnp.add, parts), *dkernels)
        return dx.reshape(x.shape), dweights.reshape(weights.shape), tuple(layout.sum_gradients(sums))

    def chunk(
        into: Sequence[Array], out: Array, got: _Received, x: Array, where: Array, weights: Array, dy: Array
    ) -> tuple[Array, Array, list[Array]]:
        dispatch = layer.dispatch(where)
        dy = dispatch.rows(_flat(dy))

        def gradients(got: _Received, turn: Any) -> tuple[Array, Array, list[Array]]:
            dresult, sizes = dispatch.receive(dy, turn), dispatch.sizes(turn)
            value, transpose = jax.vjp(layer.activation, *got.hidden)
            dscaled = layer.product(-1, dresult, out, sizes, transposed=True)
            dscales = (dscaled.astype(jnp.float32) * value.astype(jnp.float32)).sum(axis=-1)
            dhidden = transpose(_scaled(dscaled, got.scales))
            pairs = enumerate(zip(dhidden, into, strict=True))
            drows = [layer.product(i, dh, kernel, sizes, transposed=True) for i, (dh, kernel) in pairs]
            factors = (*((got.rows, dh) for dh in dhidden), (_scaled(value, got.scales), dresult))
            dkernels = [grouped_gradient(*pair, sizes, dtype) for pair, dtype in zip(factors, dtypes, strict=True)]
            return functools.reduce(jnp.add, drows), dscales, dkernels

        def add(turn: Any, sums: Any) -> Any:
            sent = dispatch.rows(_flat(x)), dispatch.choices(_flat(weights))
            drows, dscales, dkernels = gradients(_receive(layer, dispatch, sent, into, turn), turn)
            return (
                dispatch.give(drows, turn, sums[0]),
                dispatch.give(dscales, turn, sums[1]),
                jax.tree.map(jnp.add, sums[2], dkernels),
            )

        drows, dscales, dkernels = gradients(got, 0)
        first = dispatch.give(drows, 0, None), dispatch.give(dscales, 0, None), dkernels
        drows, dscales, dkernels = _more(dispatch, add, first)
        return dispatch.combine(drows).astype(x.dtype), dispatch.uncombined(dscales).astype(weights.dtype), dkernels

    # The barrier keeps XLA from merging this gather with that of the forward pass and saving its result until now.
    stored, used, kept = layout.specs
    kernels, given = (gathered, used) if gathered else (jax.lax.optimization_barrier(kernels), stored)
    in_specs = (*(layer.tokens,) * 3, given, (layer.received,) * layer.chunks, layer.tokens)
    manual = layer.manual(local, in_specs, (layer.tokens, layer.tokens, kept))
    dx, dweights, dkernels = manual(x, where, weights, kernels, got, dys[0])
    return dx, None, dweights, dkernels


_apply.defvjp(_apply_forward, _apply_backward)


def _receive(
    layer: _Layer, dispatch: Dispatch, sent: tuple[Array, Array], into: Sequence[Array], turn: Any
) -> _Received:
    """Return what the experts of this device get in a pass."""
    rows, scales = (dispatch.receive(array, turn) for array in sent)
    products = (layer.product(i, rows, kernel, dispatch.sizes(turn)) for i, kernel in enumerate(into))
    return _Received(rows, scales, tuple(annotate(product, "expert_hidden", in_rule=True) for product in products))


def _more(dispatch: Dispatch, body: Callable[[Any, Any], Any], first: Any) -> Any:
    """Run the passes after the first."""
    if isinstance(dispatch.passes, int):
        return first
    with jax.named_scope(EXTRA_PASSES):
        return jax.lax.fori_loop(1, dispatch.passes, body, first)


def _scaled(x: Float[Array, "*row d"], scales: Float[Array, "*row"]) -> Float[Array, "*row d"]:
    return (x.astype(jnp.float32) * scales[..., None].astype(jnp.float32)).astype(x.dtype)


def _flat(x: Float[Array, "batch seq d"]) -> Float[Array, "token d"]:
    return x.reshape(-1, x.shape[-1])
