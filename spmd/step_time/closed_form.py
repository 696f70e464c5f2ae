"""Closed forms of the time of a transformer's step: no trace, no compiler.

For one device and one microbatch of T tokens, with P parameters, N of them in matmuls:

| part | time |
|---|---|
| matmuls | T·(6·N + recomputed)/(peak·efficiency), longer for narrow matrices |
| attention | FLOPs of a kernel that skips masked blocks, 3.5 forward passes for one without recomputation |
| memory-bound work | passes over the residual stream, hidden units and logits |
| collectives | `spmd.step_time.network`, of which a share is exposed |

Once a step: the optimizer, gradients over `data`, the bubble of a pipeline, and waiting for the slowest slice.
"""

import dataclasses
import math
from collections.abc import Mapping

from spmd.observe.metrics import transformer_flops
from spmd.step_time.network import Network

_FORWARD, _BACKWARD = 1.0, 2.5
"""Attention's FLOPs in units of its forward pass: two matmuls, then five."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Numbers of a training step, of all devices together.

    Attributes:
        width: Of the residual stream.
        hidden: Hidden units of an MLP that a token meets.
        attention_width: Of all query heads.
        kv_width: Of all key heads.
        keys: Keys that a query sees, on average over positions and layers.
        layer_params: Parameters in matmuls that a token meets in all layers.
        head_params: Parameters of the output head.
        matmul_params: Parameters that a token is multiplied with, as the model counts them; 0 for those of layers and
            head.
        params: All parameters.
        mesh: Axis → size.
        microbatches: Of a batch, one after the other or in a pipeline.
        quantized: Dtype, `int8` or `float8` → share of the layers' products in it.
        recomputed: Share of the layers' forward matmuls that the backward pass repeats.
        recomputes_attention: Whether it repeats attention.
        zero: ZeRO stage.
        regathers: Whether ZeRO 3 gathers parameters again for the backward pass.
        gathered_bytes: Of a parameter when it is gathered; `reduced_bytes` of a gradient when it is reduced.
        data_share: Share of the bytes of a gradient that is sent over `data`, less than 1 if it is compressed.
        state_bytes: Bytes of a parameter's state that an update reads and writes.
        routed: Copies of a token that are sent to experts in each layer.
        offloaded: Bytes of a token's activations in each layer that are sent to the host.
        offloads_state: Whether the optimizer's state is in host memory.
        bubble: Time in which a stage is idle, relative to that in which it works.
        is_fused: Whether a compiler fuses element-wise operations.
    """

    layers: int
    width: int
    hidden: int
    attention_width: int
    kv_width: int
    keys: float
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
    zero: int = 3
    regathers: bool = True
    gathered_bytes: float = 2
    reduced_bytes: float = 2
    data_share: float = 1.0
    state_bytes: float = 28
    routed: int = 0
    offloaded: float = 0.0
    offloads_state: bool = False
    bubble: float = 0.0
    matmul_params: float = 0.0
    is_fused: bool = True

    @property
    def tokens(self) -> float:
        """Tokens of one step."""
        return self.batch * self.sequence

    @property
    def model_flops(self) -> float:
        """Model FLOPs of one step, without recomputation, by the formula of a run's MFU."""
        params = self.matmul_params or self.layer_params + self.head_params
        return self.tokens * transformer_flops(params, self.layers, self.attention_width, self.keys).per_token

    @property
    def hardware_flops(self) -> float:
        """FLOPs of one step with what is recomputed."""
        attention = 4 * self.layers * self.attention_width * self.keys * (0.5 + self.recomputes_attention)
        return self.model_flops + self.tokens * (2 * self.recomputed * self.layer_params + attention)


@dataclasses.dataclass(frozen=True)
class ClosedRates:
    """Calibration of the closed forms for one kind of chip; fitted to published steps by `benchmarks.backtest`.

    Attributes:
        matmul: Share of the peak that large matmuls reach.
        half: Width at which narrow matrices halve it.
        attention: Share of the peak that attention reaches.
        passes: Passes over activations, relative to those of `_STREAM` and `_HIDDEN`.
        exposed: Share of the time of gathers and reductions that is not hidden.
        hop: Seconds that each further host or slice adds to a collective.
        straggling: Standard deviation of the steps of slices, relative; all wait for the slowest.
        spread: Half of the range of nine predictions of ten, relative; of rows that were not fitted.
    """

    matmul: float = 0.75
    half: float = 300.0
    attention: float = 0.4
    passes: float = 1.0
    exposed: float = 0.5
    hop: float = 1e-5
    straggling: float = 0.07
    spread: float = 0.15


_STREAM, _HIDDEN, _LOGITS = 16, 4, 8
"""Times that the residual stream, hidden units and logits are read or written in a step, without recomputation."""

_FUSED = 0.4
"""Share of these passes that is left by a compiler which fuses element-wise operations."""


def closed_form(work: Workload, network: Network, rates: ClosedRates) -> dict[str, float]:
    """Return what a device does in one step → seconds."""
    hardware, mesh = network.hardware, work.mesh
    tensor, pipe = mesh["tensor"], mesh["pipe"]
    tokens = work.tokens / math.prod(mesh[axis] for axis in ("data", "fsdp", "expert", "sequence")) / work.microbatches
    parts = dict[str, float]()
    shorter = sum(share * (1 - hardware.products.get(dtype, 1.0)) for dtype, share in work.quantized.items())
    flops = (6 + 2 * work.recomputed) * work.layer_params * (1 - shorter) + 6 * work.head_params
    slower = 1 + rates.half * (1 / work.width + tensor / work.hidden + 1 / tokens)
    parts["matmuls"] = tokens * flops / (tensor * pipe) / (hardware.peak * rates.matmul) * slower
    units = _FORWARD + _BACKWARD + work.recomputes_attention
    attention = tokens * work.layers * 4 * work.attention_width * work.keys * units
    parts["attention"] = attention / (tensor * pipe) / (hardware.peak * rates.attention)
    again = 1 + 0.4 * (work.recomputed > 0)
    passes = work.layers * (_STREAM * work.width + _HIDDEN * work.hidden) * again * 2 + _LOGITS * work.vocab * 2
    moved = tokens * passes / (tensor * pipe) * rates.passes * (_FUSED if work.is_fused else 1)
    parts["memory-bound work"] = moved / hardware.memory_bandwidth
    parts["host transfers"] = max(
        0.0, tokens * work.layers * work.offloaded / (tensor * pipe) / hardware.host - parts["matmuls"] / 3
    )
    for axis, seconds in collective_seconds(work, network, rates.hop).items():
        share = rates.exposed if axis in ("fsdp", "data") else 1.0
        parts[f"exposed collectives over {axis}"] = seconds * share
    for name in parts:
        if name != "exposed collectives over data":
            parts[name] *= work.microbatches
    if work.bubble:
        parts["pipeline bubble"] = work.bubble * sum(parts.values())
    shards = tensor * pipe * mesh["expert"] * (mesh["fsdp"] if work.zero else 1)
    bandwidth = hardware.host if work.offloads_state else hardware.memory_bandwidth
    parts["optimizer"] = work.params / shards * work.state_bytes / bandwidth
    if waiting := network.waiting(sum(parts.values()), rates.straggling):
        parts["waiting for the slowest slice"] = waiting
    return parts


def collective_seconds(work: Workload, network: Network, hop: float = 0.0) -> dict[str, float]:
    """Return mesh axis → seconds of its collectives in one microbatch; of `data`, in one step."""
    mesh, found = work.mesh, dict[str, float]()
    tensor = mesh["tensor"]
    split = tensor * mesh["pipe"]
    tokens = work.tokens / math.prod(mesh[axis] for axis in ("data", "fsdp", "expert", "sequence")) / work.microbatches
    layers, again = work.layers / mesh["pipe"], work.recomputed > 0

    def add(axis: str, kind: str, payload: float, times: float) -> None:
        if mesh[axis] > 1:
            group = network.axis_group((axis,))
            late = hop * (network.extent(group).parts - 1) * layers
            found[axis] = found.get(axis, 0.0) + times * network.seconds(kind, payload, group) + late

    own = work.params / split / mesh["expert"]
    gathers = {3: 1 + work.regathers, 0: 0}.get(work.zero, 1 / work.microbatches)
    add("fsdp", "all-gather", own * work.gathered_bytes, gathers)
    reduction = "reduce-scatter" if work.zero >= 2 else "all-reduce"
    add("fsdp", reduction, own * work.reduced_bytes, 1)
    shard = own / (mesh["fsdp"] if work.zero >= 2 else 1)
    add("data", "all-reduce", shard * work.reduced_bytes * work.data_share, 1)
    stream = tokens * work.width * 2
    add("tensor", "all-gather", stream, layers * (4 + again))
    add("tensor", "reduce-scatter", stream, layers * (4 + again))
    add("expert", "all-to-all", stream * work.routed / tensor, layers * (4 + 2 * again))
    around = 2 * tokens * work.kv_width * 2 / tensor * (mesh["sequence"] - 1)
    add("sequence", "collective-permute", around, layers * (3 + again))
    add("pipe", "collective-permute", stream / tensor, 2)
    return found
