"""Published training throughput, rebuilt as jobs of this package.

A row is one published measurement: model shape, chip, mesh, batch, remat, precision → tokens/s of
one chip. A row that publishes only MFU or TFLOP/s has `derived_tokens_per_s_per_chip`, by its
source's own convention.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.analysis.topology import Topology, parse_topology
from spmd.chips import CHIPS, Hardware
from spmd.errors import ConfigError, MeshError, Problem, SpmdError
from spmd.sharding.mesh import AXES, BATCH_AXES, GATHERED_AXES, MeshShape
from spmd.step_time.closed_form import Workload
from spmd.step_time.hardware import hardware_of
from spmd.step_time.network import Network, make_network

Row = Mapping[str, Any]

ROWS = Path(__file__).with_name("published_throughput.json")
"""Published rows, each with its source."""

REQUIRED = (
    "model",
    "chip",
    "chips",
    "mesh",
    "layers",
    "d_model",
    "d_ff",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "seq",
    *("remat", "precision"),
)
_GPUS = {
    "A100-SXM-40GB": "a100-40gb",
    "A100-SXM-80GB": "a100",
    "H100": "h100",
    "H100-SXM": "h100",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
}
_SHAPES_2D = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
_PUBLISHED_AXES = {"dcn_data": "data", "dcn_fsdp": "fsdp", "fsdp_transpose": "fsdp"}
_PRODUCTS = {"fp4": "float4", "fp8": "float8", "int8": "int8"}
"""What a precision names → dtype of the layers' products."""
_FOUR_BITS = {"B200": 0.25, "B300": 1 / 6, "GB200": 0.25, "GB300": 1 / 6}
"""GPU → time of a product of NVFP4, relative to bfloat16; NVIDIA's data sheets."""
_LATENT = re.compile(r"MLA q_lora (\d+) kv_lora (\d+) nope (\d+) rope (\d+) v (\d+)")
_MICRO_BATCH = re.compile(r"micro batch (\d+)")
_VIRTUAL_STAGES = re.compile(r"virtual stages (\d+)")
_STATE_BYTES = {False: 28, True: 16}
"""Whether all state has 16 bits → bytes of a parameter's state that an update reads and writes."""
_FLASH_1 = 0.7
"""Speed of llm-foundry's attention, a Triton kernel of FlashAttention, relative to FlashAttention-2
(Dao, arXiv:2307.08691)."""
_POWER_LIMIT = ((500 - 150) / (700 - 150)) ** (1 / 3)
"""Clock of an H100 that is limited to 500 of 700 W: the power of its cores grows with the cube of the
clock, and about 150 W of memory and idle circuits do not."""


@dataclasses.dataclass(frozen=True)
class Recompute:
    """What a published policy computes again.

    Attributes:
        policy: The policy of this package that is nearest.
        again: Projections that are computed again: of `"qkv"`, `"o"`, `"in"` (gate and up) and
            `"down"`.
        attention: Whether attention is.
        every: Of how many products one is computed again, where no projection is named.
    """

    policy: str
    again: Sequence[str] = ()
    attention: bool = False
    every: int = 0


_QKV = "attention_query,attention_key,attention_value"
_KEEP_DOTS = f"save:{_QKV},attention_out,mlp_up"
_REMATS = (  # how a policy's description begins → the policy; the first that fits
    ("full", Recompute("full", ("qkv", "o", "in"), True)),
    ("none", Recompute("none")),
    ("minimal", Recompute(_KEEP_DOTS, ("o",), False)),
    ("selective", Recompute("selective", every=2)),
    ("save_dot_except_mlpwi", Recompute(f"save:{_QKV},attention_out", ("o", "in"), False)),
    ("qkv_proj_offloaded", Recompute(f"offload:{_QKV}", ("o", "in"), True)),
    (
        "custom: offload decoder_layer_input, q, k, v",
        Recompute(f"offload:layer_input,{_QKV}", ("o", "in"), True),
    ),
    (
        "custom: offload decoder_layer_input, out_proj, q, k, v",
        Recompute(f"offload:layer_input,{_QKV}", ("in",), True),
    ),
    (
        "custom: offload decoder_layer_input and mlpwo",
        Recompute("offload:layer_input", ("qkv", "o", "in"), True),
    ),
    (
        "custom: offload decoder_layer_input",
        Recompute("offload:layer_input", ("qkv", "o", "in"), True),
    ),
    ("custom: offload context", Recompute("offload:attention_out", ("qkv", "o", "in"), False)),
    (
        "custom: keep decoder_layer_input, context, q, k, v",
        Recompute(f"save:{_QKV},attention_out", ("o", "in"), False),
    ),
    ("custom", Recompute("full", ("qkv", "o", "in"), True)),
)


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """A row as a job: its numbers, its network, and what it published."""

    row: Row
    work: Workload
    network: Network
    slices: Mapping[str, int]
    remat: Recompute

    @property
    def topology(self) -> Topology:
        """The machine."""
        return self.network.topology

    @property
    def published(self) -> float:
        """Tokens in a second on one chip."""
        return float(
            self.row.get("tokens_per_s_per_chip") or self.row["derived_tokens_per_s_per_chip"]
        )

    @property
    def chip(self) -> str:
        """The kind of chip."""
        return self.topology.kind

    @property
    def kind(self) -> str:
        """Kind of step, as `Workload.kind`; products of 4 bits are a kind of their own."""
        if "float4" in self.work.quantized and not self.work.experts:
            return "4 bits"
        return self.work.kind

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token."""
        return self.work.model_flops / self.work.tokens

    @property
    def attention_speed(self) -> float:
        """Speed of the attention kernel, relative to those of today."""
        if "llm-foundry" in self.row.get("source", ""):
            return _FLASH_1
        return 1.0

    def tokens_per_second(self, seconds: float) -> float:
        """Return the tokens in a second on one chip, of steps of a length."""
        return self.work.tokens / seconds / self.topology.chips


def read_rows(file: str) -> list[Row]:
    """Read a file of rows.

    Raises:
        ConfigError: It cannot be read, or rows lack inputs; all problems at once.
    """
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            raise ValueError("no list of objects")
    except (OSError, ValueError) as error:
        fix = "a JSON list of published rows"
        raise ConfigError(
            "There are no rows:", [Problem("rows", f"{file}: {error}", fix=fix)]
        ) from None
    problems = []
    for number, row in enumerate(rows):
        where = f"row {number} ({row.get('model', 'no model')} on {row.get('chip', 'no chip')})"
        missing = [name for name in REQUIRED if row.get(name) is None]
        if row.get("per_device_batch") is None and row.get("global_batch") is None:
            missing.append("per_device_batch or global_batch")
        if not (row.get("tokens_per_s_per_chip") or row.get("derived_tokens_per_s_per_chip")):
            missing.append("tokens_per_s_per_chip or derived_tokens_per_s_per_chip")
        if missing:
            problems.append(
                Problem(
                    where,
                    f"lacks {', '.join(missing)}",
                    fix="add what was published, or drop the row",
                )
            )
    if problems:
        raise ConfigError("The rows cannot be rebuilt:", problems)
    return list(rows)


def rebuild(row: Row) -> Rebuilt | str:
    """Return a row as a job, or the reason why there is none."""
    problem = _unknown(row)
    if problem:
        return problem
    remat = _remat(row)
    if remat is None:
        return f"remat {row['remat']!r}: no such policy"
    try:
        topology = parse_topology(_machine(row))
        sizes, slices = _mesh_sizes(row)
        shape = MeshShape(**sizes).resolve(topology.devices)
        network = make_network(topology, shape, slices, _hardware(row, topology))
    except (SpmdError, NotImplementedError) as error:  # JAX arranges no such mesh on a torus
        last = str(error).splitlines()[-1].strip()
        return f"mesh {row['mesh']} on {row['chips']} {row['chip']}: {last}"
    return Rebuilt(row, _workload(row, topology, shape, remat), network, slices, remat)


def chip_kind(row: Row) -> str:
    """Return the kind of chip of a row; its own name for it if it is not known."""
    return _GPUS.get(row["chip"], row["chip"])


def windows(row: Row) -> tuple[int, ...]:
    """Return the attention windows of consecutive layers, repeated; 0 for all tokens before.

    A pattern is `"5 local : 1 global"`; without one, all layers are alike.
    """
    extra = row.get("extra") or {}
    window = extra.get("sliding_window", 0)
    numbers = re.findall(r"\d+", extra.get("sliding_pattern", ""))
    if not numbers:
        return (window,)
    some, all_of = map(int, numbers)
    return (window,) * some + (0,) * all_of


def _unknown(row: Row) -> str:
    """Return what a row has that does not exist here; empty if there is nothing."""
    extra = row.get("extra") or {}
    if " or bf16" in row["precision"].lower():
        return f"precision {row['precision']}: one of two"
    if "global_head_dim" in extra:
        return "layers of several kinds: heads of several widths"
    if "not a plain transformer" in _notes(row):
        return "no plain transformer: embeddings of each layer, shared keys and values"
    if row["chip"] not in CHIPS and row["chip"] not in _GPUS:
        return f"no chip {row['chip']!r}"
    axes = [axis for axis in row["mesh"] if _axis(axis) not in AXES]
    if axes:
        return f"no mesh axis {', '.join(axes)}"
    return ""


def _notes(row: Row) -> str:
    return row.get("notes") or ""


def _axis(published: str) -> str:
    """Return our name of a published axis."""
    return _PUBLISHED_AXES.get(published, published)


def _remat(row: Row) -> Recompute | None:
    for text, remat in _REMATS:
        if row["remat"].startswith(text):
            return remat
    return None


def _mesh_sizes(row: Row) -> tuple[dict[str, int], dict[str, int]]:
    """Return axis → size, and axis → slices along it."""
    sizes = dict.fromkeys(AXES, 1)
    slices = dict.fromkeys(AXES, 1)
    for axis, size in row["mesh"].items():
        sizes[_axis(axis)] *= size
        if axis.startswith("dcn_"):
            slices[_axis(axis)] *= size
    return sizes, slices


def _machine(row: Row) -> str:
    """Return the topology of a row.

    Raises:
        MeshError: A TPU has no slice of so many chips.
    """
    chip, chips = row["chip"], row["chips"]
    if chip in _GPUS:
        each = 8
        if chip.startswith("GB"):
            each = 4
        return f"{_GPUS[chip]}:{max(1, chips // each)}x{min(each, chips)}"
    slices = math.prod(_mesh_sizes(row)[1].values())
    each = chips // slices
    size = "x".join(map(str, _cuboid(each)))
    if CHIPS[chip].dims == 2:
        size = _SHAPES_2D.get(each, "")
    if not size:
        raise MeshError("Invalid topology:", [Problem("chips", f"no slice of {each} chips")])
    if slices > 1:
        return f"{slices}x{chip}:{size}"
    return f"{chip}:{size}"


def _cuboid(chips: int) -> tuple[int, ...]:
    """Return the most cubic slice of whole cubes of 4 × 4 × 4 chips; empty if there is none."""
    fitting = []
    for x, y in itertools.combinations_with_replacement(range(4, 65, 4), 2):
        z = chips // (x * y)
        if x * y * z == chips and z >= y and z % 4 == 0:
            fitting.append((x, y, z))
    return min(fitting, key=sum, default=())


def _hardware(row: Row, topology: Topology) -> Hardware:
    hardware = hardware_of(topology)
    if row["chip"] in _FOUR_BITS:
        products = {**hardware.products, "float4": _FOUR_BITS[row["chip"]]}
        hardware = dataclasses.replace(hardware, products=products)
    if "500 W" in _notes(row):
        hardware = dataclasses.replace(hardware, peak=hardware.peak * _POWER_LIMIT)
    return hardware


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Sizes of a row's attention.

    Attributes:
        width: Of all query heads; of latent attention, the mean of keys and values.
        kv_width: Of all key heads.
        inputs: Parameters of a layer that make queries, keys and values.
        outputs: Those after attention.
    """

    width: int
    kv_width: int
    inputs: int
    outputs: int


def _attention(row: Row) -> _Attention:
    d, heads = row["d_model"], row["heads"]
    width = heads * row["head_dim"]
    kv_width = row["kv_heads"] * row["head_dim"]
    latent = _LATENT.match(str((row.get("extra") or {}).get("attention", "")))
    if latent is None:
        return _Attention(width, kv_width, d * (width + 2 * kv_width), d * width)
    query, keys, nope, rope, value = map(int, latent.groups())
    down = d * (query + keys + rope)
    up = heads * (query * (nope + rope) + keys * (nope + value))
    width = heads * (nope + rope + value) // 2
    return _Attention(width, kv_width, down + up, heads * value * d)


@dataclasses.dataclass(frozen=True)
class _MLPs:
    """Sizes of a row's MLPs and experts, of all layers.

    Attributes:
        matrices: Of an MLP: two, or three with a gate.
        dense: Hidden units that all tokens meet.
        routed: Hidden units of the experts that a token is sent to.
        stored: Hidden units of all experts.
        of_layer: Hidden units of a layer that a token meets.
    """

    matrices: int
    dense: int
    routed: float
    stored: int
    of_layer: int


def _mlps(row: Row) -> _MLPs:
    extra = row.get("extra") or {}
    matrices = 3
    if "2 matrices" in extra.get("mlp", ""):
        matrices = 2
    experts = extra.get("experts", 0)
    if not experts:
        return _MLPs(matrices, row["layers"] * row["d_ff"], 0, 0, row["d_ff"])
    dense_layers = extra.get("dense_layers", 0)
    layers = row["layers"] - dense_layers
    hidden = extra.get("moe_d_ff", row["d_ff"])
    routed = extra["experts_per_token"]
    room = 1.0
    if "capacity factor 1.25" in _notes(row):
        room = 1.25
    return _MLPs(
        matrices=matrices,
        dense=dense_layers * row["d_ff"] + layers * extra.get("shared_experts", 0) * hidden,
        routed=layers * routed * hidden * room,
        stored=layers * experts * hidden,
        of_layer=routed * hidden,
    )


def _workload(row: Row, topology: Topology, shape: MeshShape, remat: Recompute) -> Workload:
    extra = row.get("extra") or {}
    d, layers = row["d_model"], row["layers"]
    attention, mlps = _attention(row), _mlps(row)
    units = mlps.dense + mlps.routed
    kernels = {
        "qkv": layers * attention.inputs,
        "o": layers * attention.outputs,
        "in": (mlps.matrices - 1) * d * units,
        "down": d * units,
    }
    layer_params = sum(kernels.values())
    attention_params = kernels["qkv"] + kernels["o"]
    head_params = d * row["vocab"]
    embeddings = 2
    if extra.get("tied_embeddings"):
        embeddings = 1
    stored = attention_params + mlps.matrices * d * (mlps.dense + mlps.stored)
    parts = row.get("grad_accum") or 1
    batch = row.get("global_batch")
    if row.get("per_device_batch"):
        batch = row["per_device_batch"] * topology.devices * parts
    split = math.prod(shape.sizes[axis] for axis in BATCH_AXES)
    microbatches, bubble = _pipeline(row, shape.pipe, batch / split, parts)
    is_pure = "PURE" in row["precision"]
    return Workload(
        layers=layers,
        width=d,
        hidden=mlps.of_layer,
        attention_width=attention.width,
        head_width=attention.width // row["heads"],
        kv_width=attention.kv_width,
        windows=windows(row),
        vocab=row["vocab"],
        layer_params=layer_params,
        expert_params=mlps.matrices * d * mlps.routed,
        experts=extra.get("experts", 0),
        head_params=head_params,
        params=stored + embeddings * head_params,
        sequence=row["seq"],
        batch=batch,
        mesh=shape.sizes,
        microbatches=microbatches,
        bubble=bubble,
        gathered_axes=_gathered_axes(row),
        quantized=_quantized(row),
        recomputed=_recomputed(kernels, topology, remat),
        recomputes_attention=remat.attention,
        is_gated=mlps.matrices == 3,
        kept_logits=_kept_logits(row),
        regathers="SHARD_GRAD_OP" not in _notes(row),
        gathered_bytes=_gathered_bytes(row),
        reduced_bytes=_reduced_bytes(topology, is_pure),
        state_bytes=_STATE_BYTES[is_pure],
        routed=extra.get("experts_per_token", 0),
        offloaded=_offloaded_bytes(d, attention, remat),
        is_fused=topology.platform == "tpu" or "compile" in row["precision"],
    )


def _recomputed(kernels: Mapping[str, float], topology: Topology, remat: Recompute) -> float:
    """Return the share of the layers' forward products that the backward pass repeats."""
    if remat.every:
        return 1 / remat.every
    if topology.platform == "cuda" and remat.policy == "full":  # PyTorch repeats a whole layer
        return 1.0
    return sum(kernels[name] for name in remat.again) / sum(kernels.values())


def _offloaded_bytes(width: int, attention: _Attention, remat: Recompute) -> float:
    """Return the bytes of a token's activations of a layer in host memory."""
    widths = {
        "layer_input": width,
        "attention_out": attention.width,
        "attention_query": attention.width,
        "attention_key": attention.kv_width,
        "attention_value": attention.kv_width,
    }
    kind, _, names = remat.policy.partition(":")
    if kind != "offload":
        return 0.0
    return 2.0 * sum(widths[name] for name in names.split(","))


def _kept_logits(row: Row) -> float:
    """Return the most tokens of a device whose logits are not computed again: all, or none."""
    if "num_vocab_tiling" in row["remat"]:
        return 0.0
    return math.inf


def _gathered_bytes(row: Row) -> int:
    """Return the bytes of a parameter in a gather.

    Megatron Bridge (`fp8_param_gather`) and torchtitan (`enable_fsdp_float8_all_gather`, not with a
    scale for each row) gather the operands of their fp8 products.
    """
    gathers_codes = row.get("source", "").startswith(("NVIDIA-NeMo", "pytorch/torchtitan"))
    if gathers_codes and {*_quantized(row)} <= {"float8", "float4"} and _quantized(row):
        return 1
    return 2


def _reduced_bytes(topology: Topology, is_pure: bool) -> int:
    """Return the bytes of a parameter's gradient in a reduction."""
    if topology.platform == "tpu" or is_pure:
        return 2
    return 4


def _quantized(row: Row) -> dict[str, float]:
    """Return dtype → share of the layers' products in it.

    PyTorch's products with a scale for each row took as long as those of 16 bits (2025).
    """
    precision = row["precision"].lower()
    for word, dtype in _PRODUCTS.items():
        if word in precision and "rowwise" in precision:
            return {f"{dtype} by row": 1.0}
        if word in precision:
            return {dtype: 1.0}
    return {}


def _gathered_axes(row: Row) -> tuple[str, ...]:
    """Return the axes that split the state.

    Systems with FSDP split it over the devices of a sequence too, Megatron does not.
    """
    if "fsdp" in map(_axis, row["mesh"]):
        return GATHERED_AXES
    return ("fsdp",)


def _pipeline(row: Row, stages: int, examples: float, parts: int) -> tuple[int, float]:
    """Return the microbatches of a step, and the idle time of a stage relative to its work.

    Args:
        examples: Of one pipeline, in a step.
        parts: Microbatches that follow each other without a pipeline.
    """
    size = row.get("micro_batch") or _said(_MICRO_BATCH, row)
    if not size:
        return parts, (stages - 1) / parts  # nothing is said: as GPipe
    chunks = row.get("virtual_stages") or _said(_VIRTUAL_STAGES, row) or 1
    microbatches = max(1, round(examples / size))
    return microbatches, (stages - 1) / (microbatches * chunks)


def _said(pattern: re.Pattern[str], row: Row) -> int:
    """Return the number that a row's notes say; 0 if they say none."""
    found = pattern.search(_notes(row))
    if found is None:
        return 0
    return int(found[1])
