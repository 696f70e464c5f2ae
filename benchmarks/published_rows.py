"""Published training throughput, rebuilt as jobs of this package.

A row is one published measurement: model shape, chip, mesh, batch, remat, precision → tokens/s of
one chip. A row that publishes only MFU or TFLOP/s has `derived_tokens_per_s_per_chip`, by its
source's own convention.
"""

import dataclasses
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
_NO_DECODER = ("global_head_dim",)
_LATENT = re.compile(r"MLA q_lora (\d+) kv_lora (\d+) nope (\d+) rope (\d+) v (\d+)")
_MICRO_BATCH = re.compile(r"micro batch (\d+)")
_VIRTUAL_STAGES = re.compile(r"virtual stages (\d+)")
_BLOCK = {"tpu": 1024, "cuda": 128}
"""Platform → tokens of a block of attention."""
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
    """

    policy: str
    again: Sequence[str] = ()
    attention: bool = False


_QKV = "attention_query,attention_key,attention_value"
_KEEP_DOTS = f"save:{_QKV},attention_out,mlp_up"
_REMATS = (  # how a policy's description begins → the policy; the first that fits
    ("full", Recompute("full", ("qkv", "o", "in"), True)),
    ("none", Recompute("none")),
    ("minimal", Recompute(_KEEP_DOTS, ("o",), False)),
    ("selective", Recompute("selective", ("half",), False)),
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
        return _FLASH_1 if "llm-foundry" in self.row.get("source", "") else 1.0

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
    extra, precision = (row.get("extra") or {}), row["precision"].lower()
    if " or bf16" in precision:
        return f"precision {row['precision']}: one of two"
    if any(name in extra for name in _NO_DECODER):
        return "layers of several kinds: heads of several widths"
    if "not a plain transformer" in (row.get("notes") or ""):
        return "no plain transformer: embeddings of each layer, shared keys and values"
    if problem := _unknown(row):
        return problem
    try:
        topology = parse_topology(_machine(row))
        sizes, slices = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1)
        for axis, size in row["mesh"].items():
            name = _PUBLISHED_AXES.get(axis, axis)
            sizes[name] *= size
            slices[name] *= size if axis.startswith("dcn_") else 1
        shape = MeshShape(**sizes).resolve(topology.devices)
        network = make_network(topology, shape, slices, _hardware(row, topology))
    except (SpmdError, NotImplementedError) as error:  # JAX arranges no such mesh on a torus
        return f"mesh {row['mesh']} on {row['chips']} {row['chip']}: {str(error).splitlines()[-1].strip()}"
    remat = next((remat for text, remat in _REMATS if row["remat"].startswith(text)), None)
    if remat is None:
        return f"remat {row['remat']!r}: no such policy"
    return Rebuilt(row, _workload(row, topology, shape, remat), network, slices, remat)


def chip_kind(row: Row) -> str:
    """Return the kind of chip of a row; its own name for it if it is not known."""
    return _GPUS.get(row["chip"], row["chip"])


def _unknown(row: Row) -> str:
    """Return what a row names that does not exist here; empty if there is nothing."""
    if row["chip"] not in CHIPS and row["chip"] not in _GPUS:
        return f"no chip {row['chip']!r}"
    axes = [axis for axis in row["mesh"] if _PUBLISHED_AXES.get(axis, axis) not in AXES]
    return f"no mesh axis {', '.join(axes)}" if axes else ""


def _machine(row: Row) -> str:
    chip, chips = row["chip"], row["chips"]
    if chip in _GPUS:
        each = 4 if chip.startswith("GB") else 8
        return f"{_GPUS[chip]}:{max(1, chips // each)}x{min(each, chips)}"
    slices = math.prod(size for axis, size in row["mesh"].items() if axis.startswith("dcn_"))
    each = chips // slices
    size = _SHAPES_2D.get(each, "") if CHIPS[chip].dims == 2 else "x".join(map(str, _cuboid(each)))
    if not size:
        raise MeshError("Invalid topology:", [Problem("chips", f"no slice of {each} chips")])
    return f"{slices}x{chip}:{size}" if slices > 1 else f"{chip}:{size}"


def _cuboid(chips: int) -> tuple[int, ...]:
    """Return the most cubic slice of whole cubes of 4 × 4 × 4 chips; empty if there is none."""
    sides = [4 * n for n in range(1, 17)]
    found = [(x, y, chips // (x * y)) for x in sides for y in sides if chips % (x * y) == 0]
    fitting = [shape for shape in found if shape[0] <= shape[1] <= shape[2] and shape[2] % 4 == 0]
    return min(fitting, key=sum, default=())


def _hardware(row: Row, topology: Topology) -> Hardware:
    hardware = hardware_of(topology)
    if row["chip"] in _FOUR_BITS:
        products = {**hardware.products, "float4": _FOUR_BITS[row["chip"]]}
        hardware = dataclasses.replace(hardware, products=products)
    if "500 W" in (row.get("notes") or ""):
        hardware = dataclasses.replace(hardware, peak=hardware.peak * _POWER_LIMIT)
    return hardware


@dataclasses.dataclass(frozen=True)
class _Model:
    """Parameters of a row's model.

    Attributes:
        kernels: Projection → parameters that a token meets, of all layers.
        experts: Those of them in experts.
        stored: Parameters of all layers.
        hidden: Hidden units of a layer that a token meets.
        heads: Width of all query heads; of latent attention, the mean of keys and values.
        kv: Width of all key heads.
    """

    kernels: Mapping[str, float]
    experts: float
    stored: float
    hidden: int
    heads: int
    kv: int


def _model(row: Row) -> _Model:
    """Count a row's model."""
    extra = row.get("extra") or {}
    d, layers = row["d_model"], row["layers"]
    heads, kv = row["heads"] * row["head_dim"], row["kv_heads"] * row["head_dim"]
    kernels = {"qkv": layers * d * (heads + 2 * kv), "o": layers * d * heads}
    if latent := _LATENT.match(str(extra.get("attention", ""))):
        query, keys, nope, rope, value = map(int, latent.groups())
        heads = row["heads"] * (nope + rope + value) // 2
        down = d * (query + keys + rope)
        up = row["heads"] * (query * (nope + rope) + keys * (nope + value))
        kernels = {"qkv": layers * (down + up), "o": layers * row["heads"] * value * d}
    matrices = 2 if "2 matrices" in extra.get("mlp", "") else 3
    routed = extra.get("experts_per_token", 0)
    dense_layers = extra.get("dense_layers", 0) if routed else layers
    expert = extra.get("moe_d_ff", row["d_ff"])
    room = 1.25 if "capacity factor 1.25" in (row.get("notes") or "") else 1.0
    units = dense_layers * row["d_ff"]
    units += (layers - dense_layers) * extra.get("shared_experts", 0) * expert
    active = (layers - dense_layers) * routed * room * expert
    kernels["in"] = (matrices - 1) * d * (units + active)
    kernels["down"] = d * (units + active)
    stored = kernels["qkv"] + kernels["o"] + matrices * d * units
    stored += (layers - dense_layers) * extra.get("experts", 0) * matrices * d * expert
    hidden = max(1, routed) * expert if routed else row["d_ff"]
    return _Model(kernels, matrices * d * active, stored, hidden, heads, kv)


def _workload(row: Row, topology: Topology, shape: MeshShape, remat: Recompute) -> Workload:
    extra, d = (row.get("extra") or {}), row["d_model"]
    notes = row.get("notes") or ""
    model = _model(row)
    layer_params = sum(model.kernels.values())
    again = ({"half"} & set(remat.again) and 0.5 * layer_params) or sum(
        model.kernels[name] for name in remat.again
    )
    if topology.platform == "cuda" and remat.policy == "full":  # PyTorch repeats a whole layer
        again = layer_params
    wide = {"layer_input": d, "attention_out": model.heads, "attention_query": model.heads}
    wide |= dict.fromkeys(("attention_key", "attention_value"), model.kv)
    offloaded: Sequence[str] = ()
    if remat.policy.startswith("offload:"):
        offloaded = remat.policy.removeprefix("offload:").split(",")
    parts, is_pure = row.get("grad_accum") or 1, "PURE" in row["precision"]
    batch = (
        row["per_device_batch"] * topology.devices * parts
        if row.get("per_device_batch")
        else row["global_batch"]
    )
    split = math.prod(shape.sizes[axis] for axis in BATCH_AXES)
    microbatches, bubble = _pipeline(row, shape.pipe, batch / split, parts)
    return Workload(
        layers=row["layers"],
        width=d,
        hidden=model.hidden,
        attention_width=model.heads,
        head_width=model.heads // row["heads"],
        kv_width=model.kv,
        keys=_keys(row["seq"], extra),
        computed_keys=_keys(row["seq"], extra, _BLOCK[topology.platform]),
        vocab=row["vocab"],
        layer_params=layer_params,
        expert_params=model.experts,
        experts=extra.get("experts", 0),
        head_params=d * row["vocab"],
        params=model.stored + d * row["vocab"] * (1 if extra.get("tied_embeddings") else 2),
        sequence=row["seq"],
        batch=batch,
        mesh=shape.sizes,
        microbatches=microbatches,
        bubble=bubble,
        # Systems with FSDP split parameters over the devices of a sequence too, Megatron does not.
        gathered_axes=GATHERED_AXES if _is_fsdp(row) else ("fsdp",),
        quantized=_quantized(row),
        recomputed=again / layer_params,
        recomputes_attention=remat.attention,
        is_gated="2 matrices" not in extra.get("mlp", ""),
        recomputes_head="num_vocab_tiling" in row["remat"],
        regathers="SHARD_GRAD_OP" not in notes,
        reduced_bytes=4 if topology.platform == "cuda" and not is_pure else 2,
        state_bytes=16 if is_pure else 28,
        routed=extra.get("experts_per_token", 0),
        offloaded=2 * sum(wide[name] for name in offloaded),
        is_fused=topology.platform == "tpu" or "compile" in row["precision"],
    )


def _quantized(row: Row) -> dict[str, float]:
    """Return dtype → share of the layers' products in it.

    PyTorch's products with a scale for each row took as long as those of 16 bits (2025).
    """
    precision = row["precision"].lower()
    for word, dtype in _PRODUCTS.items():
        if word in precision:
            return {f"{dtype} by row" if "rowwise" in precision else dtype: 1.0}
    return {}


def _is_fsdp(row: Row) -> bool:
    return any(_PUBLISHED_AXES.get(axis, axis) == "fsdp" for axis in row["mesh"])


def _pipeline(row: Row, stages: int, examples: float, parts: int) -> tuple[int, float]:
    """Return the microbatches of a step, and the idle time of a stage relative to its work.

    Args:
        examples: Of one pipeline, in a step.
        parts: Microbatches that follow each other without a pipeline.
    """
    if stages == 1:
        return parts, 0.0
    said = _MICRO_BATCH.search(row.get("notes") or "")
    size = row.get("micro_batch") or (said and int(said[1]))
    if not size:
        return parts, (stages - 1) / parts  # nothing is said: as GPipe
    said = _VIRTUAL_STAGES.search(row.get("notes") or "")
    chunks = row.get("virtual_stages") or (int(said[1]) if said else 1)
    microbatches = max(1, round(examples / size))
    return microbatches, (stages - 1) / (microbatches * chunks)


def _keys(sequence: int, extra: Mapping[str, Any], block: int = 0) -> float:
    """Return the keys that a query sees; with a block, those that a kernel multiplies.

    A pattern is `"5 local : 1 global"`.
    """
    window = min(extra.get("sliding_window", sequence), sequence)
    local = window - window * window / (2 * sequence)
    whole = (sequence + block) / 2
    numbers = [int(word) for word in extra.get("sliding_pattern", "").split() if word.isdigit()]
    some, all_of = (
        numbers
        if len(numbers) == 2
        else (1 if window < sequence else 0, 0 if window < sequence else 1)
    )
    return (some * min(local + block, whole) + all_of * whole) / (some + all_of)
