"""Closed forms of the time of a transformer's step: no trace, no compiler.

For one device and one microbatch of T tokens, with P parameters, N of them in matmuls:

| part | time |
|---|---|
| matmuls | T·(6·N + recomputed)/(peak·efficiency), longer for narrow matrices |
| attention | FLOPs of a kernel that skips masked blocks: 3.5 forward passes if not recomputed |
| memory-bound work | passes over the residual stream, hidden units and logits |
| collectives | `spmd.step_time.network`, of which a share is exposed |

Further parts, once per step: the optimizer, gradients over `data`, the bubble of a pipeline, and
waiting for the slowest slice.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.chips import ClosedRates
from spmd.observe.metrics import mean_keys, transformer_flops
from spmd.sharding.mesh import GATHERED_AXES, TOKEN_AXES, shards_of
from spmd.step_time.network import Network

_FORWARD, _BACKWARD = 1.0, 2.5
"""FLOPs of attention, forward and backward, in forward passes: two matmuls, and five."""
_IN_CHUNKS = 0.1
"""Speed of attention in chunks of plain XLA on a TPU, relative to the kernel's.

Rings of Llama 3 8B, as compiled by libtpu 0.0.42: 0.11 with 32,768 tokens on 4 chips of a v5e, 0.09
with 131,072 on 8 of a v5p.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Numbers of a training step, of all devices together.

    Attributes:
        width: Width of the residual stream.
        hidden: Hidden units of an MLP per token.
        attention_width: Width of all query heads; `head_width`: of one, 0 if unknown.
        kv_width: Width of all key heads.
        windows: Attention windows of consecutive layers, repeated; 0 for all tokens before.
        layer_params: Parameters in the matmuls of one token, of all layers.
        expert_params: Those of them that are in experts.
        experts: Experts of a layer.
        head_params: Parameters of the output head.
        matmul_params: Parameters in the matmuls of one token, as the model counts them; 0 for
            the sum of layers and head.
        params: All parameters.
        mesh: Axis → size.
        microbatches: Microbatches of a batch, one after the other or in a pipeline.
        quantized: Dtype, `int8` or `float8` → share of the layers' products in it.
        recomputed: Share of the layers' forward matmuls that the remat policy repeats.
        recomputes_attention: Whether the policy repeats attention.
        stages_again: Whether backward tasks of a pipeline run the forward pass of their stage again.
        kept_logits: Most tokens of a device in a microbatch whose logits the backward pass does not
            repeat.
        is_gated: Whether MLPs multiply their hidden units by those of a second matrix.
        longest_stage: Layers of a stage with the most, relative to the mean of the stages.
        zero: ZeRO stage.
        regathers: Whether ZeRO 3 gathers parameters again for the backward pass.
        gathered_bytes: Bytes of a parameter in a gather; `reduced_bytes`: of a gradient in a
            reduction.
        data_share: Share of the bytes of a gradient that is sent over `data`, less than 1 if it is
            compressed.
        state_bytes: Bytes of a parameter's state that an update reads and writes.
        routed: Copies of a token that are sent to experts in each layer.
        offloaded: Bytes of a token's activations in each layer that are sent to the host.
        offloads_state: Whether the optimizer's state is in host memory.
        offloads_params: Whether the parameters of layers are in host memory, and each use of a
            layer copies its own to the device.
        bubble: Idle time of a stage, relative to its working time.
        is_fused: Whether a compiler fuses element-wise operations.
        context: Algorithm of attention over a split sequence.
        in_chunks: Whether attention is plain XLA, in chunks of keys.
        gathered_axes: Axes that split the state, and over which parameters are gathered.
    """

    layers: int
    width: int
    hidden: int
    attention_width: int
    kv_width: int
    vocab: int
    layer_params: float
    head_params: float
    params: float
    sequence: int
    batch: float
    mesh: Mapping[str, int]
    microbatches: int = 1
    quantized: Mapping[str, float] = dataclasses.field(default_factory=dict)
    recomputed: float = 0.0
    recomputes_attention: bool = False
    stages_again: bool = False
    zero: int = 3
    regathers: bool = True
    gathered_bytes: float = 2
    reduced_bytes: float = 2
    data_share: float = 1.0
    state_bytes: float = 28
    routed: int = 0
    offloaded: float = 0.0
    offloads_state: bool = False
    offloads_params: bool = False
    bubble: float = 0.0
    matmul_params: float = 0.0
    is_fused: bool = True
    context: str = "ring"
    in_chunks: bool = False
    windows: tuple[int, ...] = (0,)
    head_width: int = 0
    expert_params: float = 0.0
    experts: int = 0
    kept_logits: float = math.inf
    is_gated: bool = False
    longest_stage: float = 1.0
    gathered_axes: tuple[str, ...] = GATHERED_AXES

    @property
    def kind(self) -> str:
        """Kind of step, for the range of its time: one of `spmd.chips.KINDS`."""
        if self.experts:
            return "experts"
        if self.mesh["pipe"] > 1:
            return "pipelines"
        if self.quantized:
            return "8 bits"
        return "dense"

    @property
    def stage_layers(self) -> float:
        """Layers of a stage with the most."""
        return self.layers / self.mesh["pipe"] * self.longest_stage

    @property
    def gathered_parts(self) -> int:
        """Number of devices that a parameter is gathered from."""
        return shards_of(self.gathered_axes, self.mesh)

    @property
    def keys(self) -> float:
        """Keys per query, on average over positions and layers."""
        return mean_keys(self.sequence, self.windows)

    @property
    def tokens(self) -> float:
        """Tokens of one step."""
        return self.batch * self.sequence

    @property
    def device_tokens(self) -> float:
        """Tokens of one device in one microbatch."""
        shards = shards_of(TOKEN_AXES, self.mesh)
        return self.tokens / shards / self.microbatches

    @property
    def recomputes_head(self) -> bool:
        """Whether the backward pass repeats the logits."""
        return self.device_tokens > self.kept_logits

    @property
    def model_flops(self) -> float:
        """Model FLOPs of one step, without recomputation, by the formula of a run's MFU."""
        params = self.matmul_params or self.layer_params + self.head_params
        flops = transformer_flops(params, self.layers, self.attention_width, self.keys)
        return self.tokens * flops.per_token

    @property
    def repeated(self) -> float:
        """Forward matmuls of layers that the backward pass repeats, relative to one pass."""
        return self.recomputed + self.stages_again

    @property
    def repeats(self) -> int:
        """Further passes through the layers, of whatever share."""
        return (self.recomputed > 0) + self.stages_again

    @property
    def attention_repeats(self) -> int:
        """Further forward passes of attention."""
        return self.recomputes_attention + self.stages_again

    @property
    def hardware_flops(self) -> float:
        """FLOPs of one step with recomputation."""
        repeats = 0.5 + self.attention_repeats
        attention = 4 * self.layers * self.attention_width * self.keys * repeats
        matmuls = 2 * (self.repeated * self.layer_params + self.recomputes_head * self.head_params)
        return self.model_flops + self.tokens * (matmuls + attention)


_STREAM, _HIDDEN, _LOGITS = 16, 4, 8
"""Times that the residual stream, hidden units and logits are read or written in a step.

Without recomputation.
"""

_BYTES = {"int8": 4 / 6, "float8": 4 / 6, "float4": 3 / 6}
"""Bytes of two operands of a dtype and a result of 16 bits, relative to those of 16 bits alone."""

_ROUTED = 12
"""Times that the copies of a token for its experts are read or written in a step: each is sorted by
expert and summed again, in both passes."""

_CAST = 2
"""Times that the operands of a product of 8 bits are read or written, in elements of 2 bytes."""

_PARAM_BYTES = 4
"""Bytes of a stored parameter: float32."""

FUSED = 0.4
"""Share of these passes that remains if the compiler fuses element-wise operations."""


def closed_form(work: Workload, network: Network, rates: ClosedRates) -> dict[str, float]:
    """Return part of a step, such as `"matmuls"` → seconds on a device."""
    parts = {"matmuls": _matmul_seconds(work, network, rates)}
    parts["attention"] = _attention_seconds(work, network, rates)
    parts["memory-bound work"] = _memory_seconds(work, network, rates)
    offloading = _offload_seconds(work, network)
    parts["host transfers"] = max(0.0, offloading - parts["matmuls"] / 3)
    for axes, seconds in collective_seconds(work, network, rates.hop).items():
        share = _exposed_share(axes, work, rates)
        name = f"exposed collectives over {axes_above_one(axes, work.mesh)}"
        parts[name] = parts.get(name, 0.0) + seconds * share
    for name in parts:
        if name != "exposed collectives over data":  # once a step
            parts[name] *= work.microbatches
    if work.bubble:
        parts["pipeline bubble"] = work.bubble * sum(parts.values())
    parts["optimizer"] = _optimizer_seconds(work, network)
    waiting = network.waiting(sum(parts.values()), rates.straggling)
    if waiting:
        parts["waiting for the slowest slice"] = waiting
    return parts


def _exposed_share(axes: tuple[str, ...], work: Workload, rates: ClosedRates) -> float:
    """Return the exposed share of the time of collectives over mesh axes."""
    if axes in (work.gathered_axes, ("data",)):
        return rates.exposed
    if axes == ("tensor",):
        return rates.exposed_tensor
    return 1.0


def _layer_shards(work: Workload) -> float:
    """Return the number of devices at work on one token: tensor × pipe.

    Where `pipe` does not divide the layers, stages wait for those with the most.
    """
    return work.mesh["tensor"] * work.mesh["pipe"] / work.longest_stage


def _matmul_seconds(work: Workload, network: Network, rates: ClosedRates) -> float:
    """Return the time of matmuls in one microbatch."""
    tokens = work.device_tokens
    passes = 6 + 2 * work.repeated
    dense = passes * (work.layer_params - work.expert_params)
    head = (6 + 2 * work.recomputes_head) * work.head_params
    narrow = rates.half * (1 / work.width + work.mesh["tensor"] / work.hidden + 1 / tokens)
    flops = dense * _relative_time(work, network, rates, narrow) + head * (1 + narrow)
    if work.experts:
        flops += _expert_flops(work, network, rates)
    speed = network.hardware.peak * rates.matmul
    return tokens * flops / _layer_shards(work) / speed


def _expert_flops(work: Workload, network: Network, rates: ClosedRates) -> float:
    """Return the FLOPs of a token in experts, as FLOPs of equally long wide dense matmuls."""
    flops = (6 + 2 * work.repeated) * work.expert_params
    # A device with a part of the experts has the tokens of all devices that share them.
    rows = work.device_tokens * work.mesh["expert"] * work.routed / work.experts
    hidden = work.hidden / work.routed
    narrow = rates.half * (1 / work.width + work.mesh["tensor"] / hidden + 1 / rows)
    return flops * _relative_time(work, network, rates, narrow) / rates.experts


def _relative_time(work: Workload, network: Network, rates: ClosedRates, narrow: float) -> float:
    """Return the time of products, relative to wide ones of 16 bits.

    Args:
        narrow: Time of reading and writing the matrices, relative to that of multiplying; products
            of 8 bits have operands of one byte and results of two.
    """
    multiplying, moving = 1.0, 1.0
    for dtype, share in work.quantized.items():
        product = network.hardware.products.get(dtype)
        if product is None:  # the device converts them, and multiplies 16 bits
            continue
        multiplying -= share * (1 - product / rates.eight_bits)
        moving -= share * (1 - _BYTES[dtype])
    return multiplying + narrow * moving


def _attention_seconds(work: Workload, network: Network, rates: ClosedRates) -> float:
    """Return the time of attention in one microbatch."""
    units = _FORWARD + _BACKWARD + work.attention_repeats
    tokens = work.device_tokens
    # A kernel skips whole blocks alone.
    keys = mean_keys(work.sequence, work.windows, network.topology.chip.attention_block)
    flops = tokens * work.layers * 4 * work.attention_width * keys * units
    peak = network.hardware.peak
    if work.head_width:
        peak = network.hardware.attention_peak(work.head_width)
    speed = peak * rates.attention
    if work.in_chunks and network.topology.chip.platform == "tpu":
        speed *= _IN_CHUNKS
    return flops / _layer_shards(work) / speed


def _memory_seconds(work: Workload, network: Network, rates: ClosedRates) -> float:
    """Return the time of memory-bound work in one microbatch."""
    again = 1 + 0.4 * work.repeats
    passes_of_layer = _STREAM * work.width + _HIDDEN * (1 + work.is_gated) * work.hidden
    # Elements have 2 bytes.
    passes = work.layers * passes_of_layer * again * 2 + _LOGITS * work.vocab * 2
    left = FUSED if work.is_fused else 1
    moved = work.device_tokens * passes / _layer_shards(work) * rates.passes * left
    moved += work.device_tokens * _unfused_passes(work) * 2 / _layer_shards(work)
    return moved / network.hardware.memory_bandwidth


def _unfused_passes(work: Workload) -> float:
    """Count the elements of a token in operations without fusion, read or written."""
    routed = _ROUTED * work.routed * work.width
    inputs = 2 * work.width + work.attention_width + work.hidden
    results = 2 * work.width + work.attention_width + 2 * work.kv_width + 2 * work.hidden
    cast = _CAST * sum(work.quantized.values()) * (inputs + results)
    return work.layers * (routed + cast)


def _offload_seconds(work: Workload, network: Network) -> float:
    """Return the time of activations and parameters copied from or to the host in one microbatch."""
    sent = work.device_tokens * work.layers * work.offloaded / _layer_shards(work)
    if work.offloads_params:
        uses = 1 + work.regathers
        sent += uses * _own_params(work) * _PARAM_BYTES
    return sent / network.hardware.host


def _own_params(work: Workload) -> float:
    """Return the parameters in the memory of one device, between steps."""
    shards = work.mesh["tensor"] * work.mesh["pipe"] * work.mesh["expert"]
    if work.zero:
        shards *= work.gathered_parts
    return work.params / shards


def _optimizer_seconds(work: Workload, network: Network) -> float:
    """Return the time of the update of parameters in one step."""
    bandwidth = network.hardware.memory_bandwidth
    if work.offloads_state:
        bandwidth = network.hardware.host
    return _own_params(work) * work.state_bytes / bandwidth


def axes_above_one(axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    """Return the axes of a size above 1 as text.

    Example:
        >>> axes_above_one(("fsdp", "sequence"), {"fsdp": 4, "sequence": 1})
        'fsdp'
    """
    return "+".join(axis for axis in axes if mesh[axis] > 1)


def collective_seconds(
    work: Workload, network: Network, hop: float = 0.0
) -> dict[tuple[str, ...], float]:
    """Return mesh axes → seconds of their collectives in one microbatch; of `data`, in one step."""
    found: dict[tuple[str, ...], float] = {}
    layers = work.stage_layers
    for sent in (*_parameter_transfers(work), *_activation_transfers(work)):
        if math.prod(work.mesh[axis] for axis in sent.axes) <= 1:
            continue
        group = network.axis_group(sent.axes)
        late = hop * (network.extent(group).parts - 1) * layers
        seconds = sent.times * network.seconds(sent.kind, sent.payload, group)
        found[sent.axes] = found.get(sent.axes, 0.0) + seconds + late
    return found


class _Transfer(NamedTuple):
    """Collectives over mesh axes: a payload in bytes, and the number of executions."""

    axes: tuple[str, ...]
    kind: str
    payload: float
    times: float


def _parameter_transfers(work: Workload) -> Iterator[_Transfer]:
    """Yield the collectives of parameters and their gradients."""
    own = work.params / _layer_shards(work) / work.mesh["expert"]
    if work.zero == 3:
        gathers: float = 1 + work.regathers + work.stages_again
    elif work.zero == 0:
        gathers = 0
    else:  # once a step
        gathers = 1 / work.microbatches
    yield _Transfer(work.gathered_axes, "all-gather", own * work.gathered_bytes, gathers)
    reduction = "all-reduce"
    shard = own
    if work.zero >= 2:
        reduction = "reduce-scatter"
        shard = own / work.gathered_parts
    yield _Transfer(work.gathered_axes, reduction, own * work.reduced_bytes, 1)
    yield _Transfer(("data",), "all-reduce", shard * work.reduced_bytes * work.data_share, 1)


def _attention_transfers(work: Workload, tokens: float, layers: float) -> Iterator[_Transfer]:
    """Yield the collectives of attention over a split sequence."""
    tensor = work.mesh["tensor"]
    parts = work.mesh["sequence"]
    again = work.repeats
    own = 2 * tokens * work.kv_width * 2 / tensor  # keys and values of a device
    if work.context == "gather":
        yield _Transfer(("sequence",), "all-gather", own * parts, layers * (2 + again))
        yield _Transfer(("sequence",), "reduce-scatter", own * parts, layers)
    elif work.context == "all-to-all":
        exchanged = own + 2 * tokens * work.attention_width * 2 / tensor
        yield _Transfer(("sequence",), "all-to-all", exchanged, layers * (2 + again))
    else:
        yield _Transfer(
            ("sequence",), "collective-permute", own * (parts - 1), layers * (3 + again)
        )


def _activation_transfers(work: Workload) -> Iterator[_Transfer]:
    """Yield the collectives of activations and their gradients."""
    mesh = work.mesh
    tensor = mesh["tensor"]
    layers = work.stage_layers
    again = work.repeats
    tokens = work.device_tokens
    stream = tokens * work.width * 2
    yield _Transfer(("tensor",), "all-gather", stream, layers * (4 + again))
    yield _Transfer(("tensor",), "reduce-scatter", stream, layers * (4 + again))
    routed = stream * work.routed / tensor
    yield _Transfer(("expert",), "all-to-all", routed, layers * (4 + 2 * again))
    yield from _attention_transfers(work, tokens, layers)
    yield _Transfer(("pipe",), "collective-permute", stream / tensor, 2)
    if not work.stages_again:  # the stream to the logits of all stages, and its gradient
        yield _Transfer(("pipe",), "all-reduce", stream / tensor, 2)
