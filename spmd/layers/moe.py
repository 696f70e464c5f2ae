"""Mixture of experts: tokens are dispatched to experts, each an MLP, and results are combined.

Only the experts are split over mesh axis `expert`; the rest of a model is data-parallel over it
(GShard, arXiv:2006.16668). Under a plan the layer is one manual program (`jax.shard_map`) over
every axis of the mesh:

```
tokens of this device ──rows by expert──▶ all-to-all ──▶ tokens for this device's experts
                                                           │  kernels gathered over fsdp,
                                                           │  split over tensor
tokens of this device ◀────sums──────── all-to-all ◀───────┘  weighted inside the MLP
```

`spmd.layers.expert_dispatch` has token dispatch and combine: by **capacity**, where each expert has
a fixed number of slots for each example and tokens beyond it are dropped, or **dropless**
(MegaBlocks, arXiv:2211.15841). Routing weights multiply the hidden units, where their gradients are
sums over hidden units too, so that no result is sent twice. The backward pass is a `custom_vjp`: it
uses the dispatch and combine of the forward pass, and recomputes the passes of dropless dispatch
after the first.
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
from spmd.layers.expert_exchange import DenseAllToAll
from spmd.layers.expert_layout import ExpertKernel, ExpertLayout, biases_of, expert_layout
from spmd.layers.grouped_matmul import (
    Sizes,
    group_sums,
    group_values,
    grouped_gradient,
    quantized_grouped_matmul,
)
from spmd.layers.linear_recipes import recipe_of
from spmd.layers.router import RouterConfig, Routing, expert_slots
from spmd.model_interface.wrapped_param import is_stored
from spmd.plan.annotate import annotate, placement
from spmd.plan.manual import batch_sum, psum, shard_map_over, split_axes
from spmd.settings.quantize import QuantizationRecipe
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
    """Return the weighted sum of each token's experts, and the counts of drops and extra passes.

    An expert is `out(activation(into(x)))`, where kernels may have biases; a token's weight
    multiplies its output, or its input (`config.weight_on`). The counts are those of `"dropped"` choices and of
    `"extra_passes"`.

    Args:
        x: Tokens; under a plan, split like the activation `expert_tokens`.
        into: Kernels `[expert, d, hidden]`: one, or those of gate and gated array, the arguments of
            `activation`.
        out: Kernels `[expert, hidden, d]`.
    """
    kernels = (*into, out)
    capacity = config.capacity(x.shape[1])
    scope = placement("expert_tokens", x.shape)
    layout = ExpertLayout()
    if scope is not None:
        layout = expert_layout(*scope, kernels)
    tokens = x.shape[0] * x.shape[1] // layout.parts
    chunks = math.gcd(tokens, config.chunks)
    recipes = tuple(recipe_of(kernel.placed) for kernel in kernels)
    with_bias = tuple(kernel.bias is not None for kernel in kernels)
    layer = _Layer(config, capacity, activation, layout, chunks, recipes, with_bias)
    where = routing.experts
    dropped = jnp.zeros((), jnp.float32)
    if config.dispatch == "capacity":
        slots, dropped = expert_slots(where, config.experts, capacity, routing.capacities)
        is_kept = slots < config.experts * capacity
        where = slots
        if layer.is_dropless:
            where = jnp.where(is_kept, routing.experts, config.experts)
    biases = biases_of(kernels)
    arrays = tuple(kernel.array for kernel in kernels) + tuple(bias.array for bias in biases)
    # Rows are sorted by expert across the examples of a device, but each token's results are
    # combined at its own place.
    y, extra = per_example(_apply)(layer, x, where, routing.weights, arrays)
    return y, {"dropped": batch_sum(dropped), "extra_passes": extra}


class _Received(NamedTuple):
    """Rows of one device's experts in a pass, their weights, and hidden units of gate and up."""

    rows: Float[Array, "*own d"]
    scales: Float[Array, "*own"]
    hidden: tuple[Float[Array, "*own hidden"], ...]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Static properties of a layer, known before its arrays."""

    config: RouterConfig
    capacity: int
    activation: Activation
    layout: ExpertLayout
    chunks: int
    recipes: tuple[QuantizationRecipe | None, ...]
    with_bias: tuple[bool, ...]

    @property
    def weighs_inputs(self) -> bool:
        """Whether weights multiply the inputs of experts, not their outputs."""
        return self.config.weight_on == "input"

    def dtypes(self, dtype: jnp.dtype) -> list[jnp.dtype]:
        """Return the dtypes of gathered parameters; biases are added in float32."""
        biases = sum(self.with_bias)
        return [dtype] * len(self.recipes) + [jnp.dtype(jnp.float32)] * biases

    def experts(self, dispatch: Dispatch, gathered: Sequence[Array]) -> "_Experts":
        """Return the experts of gathered parameters: kernels, then the biases of some of them."""
        *into, out = gathered[: len(self.recipes)]
        biases = iter(gathered[len(self.recipes) :])
        by_kernel = []
        for has_bias in self.with_bias:
            bias = next(biases) if has_bias else None
            by_kernel.append(bias)
        return _Experts(self, dispatch, into, out, by_kernel)

    @property
    def is_dropless(self) -> bool:
        """Whether rows have no slots.

        With `dispatch="capacity"` they have none where an example is split over devices, since a
        part of an example may fill any slot. Where experts choose, rows have slots: a token has one
        choice for each expert, nearly all of them empty, too many for rows.
        """
        if self.config.dispatch == "dropless":
            return True
        _, tokens_of_example = self.layout.tokens
        return self.config.choice == "token" and bool(tokens_of_example)

    def product(
        self, index: int, x: Array, kernel: Array, sizes: Sizes, *, transposed: bool = False
    ) -> Array:
        """Return the products of rows with kernel `index` of each expert; the last is `out`."""
        last = len(self.recipes) - 1
        is_last = index in (last, -1)
        return quantized_grouped_matmul(
            x,
            kernel,
            sizes,
            self.recipes[index],
            tensor=self.layout.tensor,
            is_split=is_last != transposed,
            transposed=transposed,
        )

    def dispatch(self, where: Array) -> Dispatch:
        """Return the dispatch of one device's tokens."""
        expert = self.layout.expert
        if self.is_dropless:
            choices = where.reshape(-1, where.shape[-1])
            return Dropless(choices, self.config, expert, self.layout.over)
        return Capacity(where, self.config, expert, self.capacity)

    def split(self, *arrays: Array) -> list[list[Array]]:
        """Split arrays of a device's tokens into chunks: a list of parts for each."""
        if self.chunks == 1:
            return [list(arrays)]
        parts = [jnp.split(_flat(array), self.chunks) for array in arrays]
        return list(map(list, zip(*parts, strict=True)))

    def manual(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Run `local` on the shards of each device."""
        mesh = self.layout.mesh
        if mesh is None:
            return local
        axes = split_axes(mesh)
        return shard_map_over(mesh, axes, local, in_specs, out_specs, purpose="experts")

    @property
    def tokens(self) -> P:
        """The spec of tokens."""
        return dims_spec((*self.layout.tokens, ()))

    @property
    def received(self) -> _Received:
        """The specs of the rows of experts, their weights and hidden units."""
        expert = self.layout.expert
        over = self.layout.over or None
        is_sorted = self.is_dropless and (expert is None or expert.kind is not DenseAllToAll)
        rows: Any = P(over) if is_sorted else P(None, over)
        hidden: Any = P(*rows, self.layout.tensor or None)
        return _Received(rows, rows, hidden)


@dataclasses.dataclass(frozen=True)
class _Experts:
    """The experts of one device, for a chunk of its tokens.

    Attributes:
        into: Gathered kernels into hidden units.
        out: Gathered kernels out of them.
        biases: The biases of each kernel, the last ones of `out`; None without.
    """

    layer: _Layer
    dispatch: Dispatch
    into: Sequence[Array]
    out: Array
    biases: Sequence[Array | None]

    def send(self, x: Array, weights: Array) -> tuple[Array, Array]:
        """Return the rows of a chunk in order of experts, and the weight of each."""
        return self.dispatch.rows(_flat(x)), self.dispatch.choices(_flat(weights))

    def receive(self, sent: tuple[Array, Array], pass_index: Any) -> _Received:
        """Return the rows of this device's experts in a pass, with their hidden units."""
        rows, scales = (self.dispatch.receive(array, pass_index) for array in sent)
        inputs = self._inputs(rows, scales)
        hidden = []
        for index, kernel in enumerate(self.into):
            sizes = self.dispatch.sizes(pass_index)
            product = self.layer.product(index, inputs, kernel, sizes)
            bias = self.biases[index]
            if bias is not None:
                product = _added(product, group_values(bias, sizes, product.shape[0]))
            hidden.append(annotate(product, "expert_hidden", in_rule=True))
        return _Received(rows, scales, tuple(hidden))

    def _inputs(self, rows: Array, scales: Array) -> Array:
        """Return the inputs of experts: rows, or weighted rows."""
        if self.layer.weighs_inputs:
            return _scaled(rows, scales)
        return rows

    def _weighted(self, x: Array, scales: Array) -> Array:
        """Multiply hidden units or outputs by the weights of rows, if inputs are not."""
        if self.layer.weighs_inputs:
            return x
        return _scaled(x, scales)

    def results(self, got: _Received, pass_index: Any) -> Array:
        """Return the weighted results of rows."""
        value = self.layer.activation(*got.hidden)
        scaled = self._weighted(value, got.scales)
        sizes = self.dispatch.sizes(pass_index)
        result = self.layer.product(-1, scaled, self.out, sizes)
        bias = self.biases[-1]
        if bias is None:
            return result
        values = group_values(bias, sizes, result.shape[0])
        values = jnp.broadcast_to(values, result.shape)
        values = self._weighted(values, got.scales)
        return _added(result, _once(values, self.layer.layout.tensor))

    def gradients(
        self, got: _Received, dy: Array, pass_index: Any, dtypes: Sequence[Any]
    ) -> tuple[Array, Array, list[Array]]:
        """Return a pass's gradients of rows, of their weights, and of parameters in their `dtypes`.

        Those of kernels and of rows are partial sums over `tensor`.
        """
        layer = self.layer
        dresult = self.dispatch.receive(dy, pass_index)
        sizes = self.dispatch.sizes(pass_index)
        value, transpose = jax.vjp(layer.activation, *got.hidden)
        dscaled = layer.product(-1, dresult, self.out, sizes, transposed=True)
        if not layer.weighs_inputs:
            dscales = _dots(dscaled, value)
        dhidden = transpose(self._weighted(dscaled, got.scales))
        drows = []
        for index, (dunits, kernel) in enumerate(zip(dhidden, self.into, strict=True)):
            drows.append(layer.product(index, dunits, kernel, sizes, transposed=True))
        weighted = self._inputs(got.rows, got.scales)
        inputs = [weighted] * len(dhidden) + [self._weighted(value, got.scales)]
        doutputs = [*dhidden, dresult]
        dparams = []
        of_kernels = dtypes[: len(inputs)]
        for rows, doutput, dtype in zip(inputs, doutputs, of_kernels, strict=True):
            dparams.append(grouped_gradient(rows, doutput, sizes, dtype))
        dinputs = functools.reduce(jnp.add, drows)
        if layer.weighs_inputs:
            dscales = _dots(dinputs, got.rows)
            dinputs = _scaled(dinputs, got.scales)
        bias = self.biases[-1]
        if bias is not None and not layer.weighs_inputs:
            values = group_values(bias, sizes, dresult.shape[0])
            dscales = dscales + _once(_dots(dresult, values), layer.layout.tensor)
        of_biases = self._bias_gradients(doutputs, got.scales, sizes)
        for gradient, dtype in zip(of_biases, dtypes[len(dparams) :], strict=True):
            dparams.append(gradient.astype(dtype))
        return dinputs, dscales, dparams

    def _bias_gradients(
        self, doutputs: Sequence[Array], scales: Array, sizes: Sizes
    ) -> list[Array]:
        """Return the gradients of biases from those of the kernels' outputs, in float32."""
        found = []
        last = len(self.biases) - 1
        for index, doutput in enumerate(doutputs):
            if self.biases[index] is None:
                continue
            if index == last:
                doutput = self._weighted(doutput, scales)
            found.append(group_sums(doutput, sizes))
        return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    layer: _Layer, x: Array, where: Array, weights: Array, kernels: tuple[Any, ...]
) -> tuple[Array, Array]:
    return _apply_forward(layer, x, where, weights, kernels)[0]


def _apply_forward(
    layer: _Layer, x: Array, where: Array, weights: Array, kernels: tuple[Any, ...]
) -> tuple[tuple[Array, Array], Any]:
    layout = layer.layout
    tokens = layer.tokens
    stored, used, _ = layout.specs
    received = (layer.received,) * layer.chunks
    wholes = used if layout.save_gathered else ()
    local = functools.partial(_forward_on_device, layer)
    in_specs = (tokens, tokens, tokens, stored)
    manual = layer.manual(local, in_specs, (tokens, P(), received, wholes))
    shards = layout.prepare(layout.decode(kernels, layer.dtypes(x.dtype)))
    y, extra, got, gathered = manual(x, where, weights, shards)
    like: tuple[Array, ...] = ()
    if layout.prepares:
        # A prepared kernel may have another dtype than its gradient.
        like = tuple(jnp.zeros((0,), kernel.dtype) for kernel in kernels)
    kept = list(shards)
    for index, kernel in enumerate(kernels):
        if is_stored(kernel):  # the backward pass decodes codes again
            kept[index] = kernel
    return (y, extra), (x, where, weights, tuple(kept), like, got, gathered)


def _forward_on_device(
    layer: _Layer, x: Array, where: Array, weights: Array, kernels: tuple[Array, ...]
) -> tuple[Array, Array, tuple[_Received, ...], tuple[Array, ...]]:
    """Return the sums of a device's tokens, the number of extra passes, received rows and kernels.

    The rows and the gathered kernels are residuals of the backward pass.
    """
    layout = layer.layout
    params = layout.gather(kernels, layer.dtypes(x.dtype))
    ys, extra, got = [], [], []
    for part in layer.split(x, where, weights):
        y, passes, received = _forward_of_chunk(layer, params, *part)
        ys.append(y)
        extra.append(passes - 1)
        got.append(received)
    y = psum(jnp.concatenate(ys), layout.tensor)
    y = y.reshape(x.shape)
    gathered = tuple(params) if layout.save_gathered else ()
    return y, jnp.float32(sum(extra)), tuple(got), gathered


def _forward_of_chunk(
    layer: _Layer, params: Sequence[Array], x: Array, where: Array, weights: Array
) -> tuple[Array, Any, _Received]:
    """Return the sums of a chunk's tokens, the number of passes, and rows of the first one."""
    dispatch = layer.dispatch(where)
    experts = layer.experts(dispatch, params)
    sent = experts.send(x, weights)

    def add(pass_index: Any, rows: Array) -> Array:
        got = experts.receive(sent, pass_index)
        return dispatch.send_back(experts.results(got, pass_index), pass_index, rows)

    got = experts.receive(sent, 0)
    first = dispatch.send_back(experts.results(got, 0), 0, None)
    rows = _more(dispatch, add, first)
    return dispatch.combine(rows).astype(x.dtype), dispatch.passes, got


def _apply_backward(
    layer: _Layer, saved: Any, dys: tuple[Array, Array]
) -> tuple[Array, None, Array, tuple[Array | None, ...]]:
    x, where, weights, kernels, like, got, gathered = saved
    frozen = [index for index, kernel in enumerate(kernels) if is_stored(kernel)]
    dtypes = [array.dtype for array in like or kernels]
    tokens = layer.tokens
    stored, used, kept = layer.layout.specs
    if gathered:
        kernels, given = gathered, used
    else:
        # The barrier keeps XLA from merging this gather with that of the forward pass and saving
        # its result until now.
        kernels, given = jax.lax.optimization_barrier(kernels), stored
        kernels = layer.layout.decode(kernels, layer.dtypes(x.dtype))
    received = (layer.received,) * layer.chunks
    local = functools.partial(_backward_on_device, layer, dtypes)
    in_specs = (tokens, tokens, tokens, given, received, tokens)
    manual = layer.manual(local, in_specs, (tokens, tokens, kept))
    dx, dweights, found = manual(x, where, weights, kernels, got, dys[0])
    dkernels = list(found)
    for index in frozen:
        dkernels[index] = None
    return dx, None, dweights, tuple(dkernels)


_apply.defvjp(_apply_forward, _apply_backward)


def _backward_on_device(
    layer: _Layer,
    dtypes: Sequence[Any],
    x: Array,
    where: Array,
    weights: Array,
    kernels: tuple[Array, ...],
    got: tuple[_Received, ...],
    dy: Array,
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Return the gradients of a device's tokens, of their weights, and of parameters."""
    layout = layer.layout
    params: Sequence[Array] = kernels
    if not layout.save_gathered:
        params = layout.gather(kernels, layer.dtypes(x.dtype))
    dxs, dscales, dkernels = [], [], []
    parts = layer.split(x, where, weights, dy)
    for part, received in zip(parts, got, strict=True):
        gradients = _backward_of_chunk(layer, params, dtypes, received, *part)
        dxs.append(gradients[0])
        dscales.append(gradients[1])
        dkernels.append(gradients[2])
    dx = psum(jnp.concatenate(dxs), layout.tensor)
    dweights = psum(jnp.concatenate(dscales), layout.tensor)
    sums = jax.tree.map(_total, *dkernels)
    return (
        dx.reshape(x.shape),
        dweights.reshape(weights.shape),
        tuple(layout.sum_gradients(sums)),
    )


def _backward_of_chunk(
    layer: _Layer,
    params: Sequence[Array],
    dtypes: Sequence[Any],
    got: _Received,
    x: Array,
    where: Array,
    weights: Array,
    dy: Array,
) -> tuple[Array, Array, list[Array]]:
    """Return the gradients of a chunk's tokens, of their weights, and of kernels.

    Args:
        got: The received rows of the first pass; those of later passes are computed again.
    """
    dispatch = layer.dispatch(where)
    experts = layer.experts(dispatch, params)
    dy = dispatch.rows(_flat(dy))

    def add(pass_index: Any, sums: tuple[Array, Array, list[Array]]) -> Any:
        again = experts.receive(experts.send(x, weights), pass_index)
        drows, dscales, dkernels = experts.gradients(again, dy, pass_index, dtypes)
        return (
            dispatch.send_back(drows, pass_index, sums[0]),
            dispatch.send_back(dscales, pass_index, sums[1]),
            jax.tree.map(jnp.add, sums[2], dkernels),
        )

    drows, dscales, dkernels = experts.gradients(got, dy, 0, dtypes)
    first = dispatch.send_back(drows, 0, None), dispatch.send_back(dscales, 0, None), dkernels
    drows, dscales, dkernels = _more(dispatch, add, first)
    dx = dispatch.combine(drows).astype(x.dtype)
    dweights = dispatch.gather_weights(dscales).astype(weights.dtype)
    return dx, dweights, dkernels


def _more(dispatch: Dispatch, body: Callable[[Any, Any], Any], first: Any) -> Any:
    """Run the passes after the first."""
    if isinstance(dispatch.passes, int):
        return first
    with jax.named_scope(EXTRA_PASSES):
        return jax.lax.fori_loop(1, dispatch.passes, body, first)


def _total(*parts: Array) -> Array:
    return functools.reduce(jnp.add, parts)


def _scaled(x: Float[Array, "*row d"], scales: Float[Array, "*row"]) -> Float[Array, "*row d"]:
    """Multiply rows by their weights, in float32."""
    wide = x.astype(jnp.float32)
    factors = scales[..., None].astype(jnp.float32)
    scaled = wide * factors
    return scaled.astype(x.dtype)


def _added(x: Float[Array, "*row d"], values: Float[Array, "*row d"]) -> Float[Array, "*row d"]:
    """Add biases to rows, in float32."""
    return (x.astype(jnp.float32) + values).astype(x.dtype)


def _dots(x: Float[Array, "*row d"], y: Float[Array, "*row d"]) -> Float[Array, "*row"]:
    """Return the products of rows, in float32."""
    products = x.astype(jnp.float32) * y.astype(jnp.float32)
    return products.sum(axis=-1)


def _once(x: Array, tensor: tuple[str, ...]) -> Array:
    """Return a term of a sum over `tensor` on the first device, 0 on the others."""
    if not tensor:
        return x
    is_first = jax.lax.axis_index(tensor) == 0
    return jnp.where(is_first, x, 0.0)


def _flat(x: Float[Array, "batch seq d"]) -> Float[Array, "token d"]:
    return x.reshape(-1, x.shape[-1])
