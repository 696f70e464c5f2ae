"""Predicted time of a config's step: by closed forms, or from its compiled program."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.collective_record import Collective
from spmd.analysis.hlo import HloModule
from spmd.analysis.topology import Topology
from spmd.chips import ClosedRates
from spmd.diloco.exchange import OuterExchange
from spmd.diloco.transform import DiLoCo
from spmd.errors import ConfigError, Problem
from spmd.layers.router import RouterConfig
from spmd.model_interface.attention_config import context_for, split_kernel
from spmd.model_interface.fused_attention import FUSED
from spmd.model_interface.model_config import (
    HasHeads,
    HasHeadWidth,
    HasHiddenWidth,
    HasKVWidth,
    HasWidth,
    repeats_of,
    router_of,
    windows_of,
)
from spmd.model_interface.remat import Remat, make_remat
from spmd.pipeline.layer_split import LayerSplit
from spmd.plan.communication import element_bytes
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.run.build import (
    TrainSetup,
    build_precision,
    build_schedule,
)
from spmd.run.config import CountsFlops, TrainConfig
from spmd.run.planned_step import CompiledStep, PlannedStep
from spmd.settings.compress import powersgd_rank
from spmd.settings.quantize import QuantizationRecipe
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh, shards_of, slice_numbers
from spmd.step_time.closed_form import Workload, closed_form
from spmd.step_time.hardware import closed_rates, compiled_rates, hardware_of
from spmd.step_time.network import make_network
from spmd.step_time.program import read_program_schedule
from spmd.step_time.report import CollectiveTime, StepTime
from spmd.step_time.roofline import roofline
from spmd.step_time.timeline import StepTimeline, run_schedule
from spmd.step_time.traced_form import count_work, traced_bounds, traced_form

_SAVES = {
    "attention_query": "q",
    "attention_key": "k",
    "attention_value": "v",
    "mlp_gate": "gate",
    "mlp_up": "up",
    "residual": "o",
}
"""Activation → its projection, which is not computed again if the activation is saved."""

_CORE = "attention_out"
"""Activation of attention itself, which is not computed again if it is saved."""


@dataclasses.dataclass(frozen=True)
class ModelNumbers:
    """Numbers of a model and its optimizer, the same on all meshes.

    Attributes:
        kernels: Projection, such as `"down"` → parameters that a token meets, of all layers.
        expert_params: Those of them in experts.
        quantized: Dtype → share of the layers' products in it.
        params: All parameters.
        state_bytes: Bytes of the state of one parameter, itself included.
    """

    kernels: Mapping[str, float]
    quantized: Mapping[str, float]
    expert_params: float
    experts: int
    head_params: float
    params: float
    state_bytes: float
    width: int
    hidden: int
    routed: int


def count_model(setup: TrainSetup) -> ModelNumbers:
    """Count the parameters of a config's model from its plan.

    Raises:
        ConfigError: Adapters are trained, or there is a teacher.
    """
    model, plan = setup.config.model, setup.plan
    problems = _count_problems(setup)
    if problems:
        raise ConfigError("The time of a step cannot be predicted:", problems)
    router = router_of(model)
    routed = 0
    experts = 0
    if isinstance(router, RouterConfig):
        routed = router.top_k
        experts = router.experts
    counted = _count_kernels(plan, router, routed)
    kernels = counted.kernels
    if not kernels:  # layers that are no stack, or weights of other names
        kernels["all"] = model.matmul_params
    params = float(sum(math.prod(entry.shape) for entry in plan.params))
    layers = sum(kernels.values())
    updated = _updated_plan(plan)
    state = _bytes(updated.params) + _bytes(updated.optimizer_state)
    width, hidden = _widths(model, plan)
    head = max(0.0, model.matmul_params - layers)
    return ModelNumbers(
        kernels=kernels,
        quantized={dtype: size / layers for dtype, size in counted.in_dtype.items()},
        expert_params=counted.in_experts,
        experts=experts,
        head_params=head,
        params=params,
        state_bytes=state / params,
        width=width,
        hidden=hidden * max(1, routed),
        routed=routed,
    )


def _count_problems(setup: TrainSetup) -> list[Problem]:
    """Return why a model cannot be counted."""
    model = setup.config.model
    problems: list[Problem] = []
    if setup.teacher is not None:
        what = "is a second model in the step, and no rates are fitted to two"
        problems.append(Problem("teacher", what, fix="--teacher '', or spmd plan --compile"))
    if setup.config.lora.targets:
        what = "has adapters, whose steps no rates are fitted to"
        problems.append(Problem("lora.targets", what, fix="--lora.targets, without any"))
    if not isinstance(model, CountsFlops):
        what = f"{type(model).__name__} does not count its FLOPs"
        fix = "properties layers, attention_width and matmul_params (`spmd.run.config.CountsFlops`)"
        problems.append(Problem("model", what, fix=fix))
    return problems


def _updated_plan(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan whose state each step updates: with replicas, that of one."""
    for transform in plan.transforms:
        if isinstance(transform, DiLoCo):
            return transform.inner.plan
    return plan


def _widths(config: Any, plan: ShardingPlan) -> tuple[int, int]:
    """Return the width of a model, and the hidden units of a feed-forward layer or an expert.

    For a config that does not say them, they are the smaller dimension of the first parameter, and
    four times the width.
    """
    width = 0
    if isinstance(config, HasWidth):
        width = config.d_model
    if not width:
        width = min(plan.params[0].shape[-2:])
    if isinstance(config, HasHiddenWidth):
        return width, config.d_ff
    return width, 4 * width


@dataclasses.dataclass
class _Kernels:
    """Active parameters for a token in the layers' kernels.

    Attributes:
        kernels: Projection → parameters.
        in_dtype: Dtype of a recipe → parameters with products in it.
        in_experts: Parameters of experts.
    """

    kernels: dict[str, float]
    in_dtype: dict[str, float]
    in_experts: float = 0.0


def _count_kernels(plan: ShardingPlan, router: Any, routed: int) -> _Kernels:
    """Count the active parameters for a token in the layers' kernels."""
    found = _Kernels(collections.defaultdict(float), collections.defaultdict(float))
    for entry in plan.params:
        is_repeated = any(f"/{name}/" in f"/{entry.path}" for name in plan.rules.stacks)
        if not entry.path.endswith("kernel") or not is_repeated:
            continue
        count: float = math.prod(entry.shape)
        if router and re.search(r"\bexperts/", entry.path):
            count *= routed / router.experts
            found.in_experts += count
        name = entry.path.split("/")[-2].removesuffix("_proj")
        found.kernels[name] += count
        recipe = plan.placements[entry.path].recipe
        if recipe and recipe.kind:
            found.in_dtype[recipe.kind] += count * _share_of_products(recipe)
    return found


def _share_of_products(recipe: QuantizationRecipe) -> float:
    """Return the share of a kernel's three products, forward and backward, in a recipe's dtype."""
    if recipe.scaling == "row":
        return 2 / 3
    return 1


def workload(
    config: TrainConfig, model: ModelNumbers, mesh: MeshShape, platform: str = ""
) -> Workload:
    """Return the numbers of a config's step on a mesh shape without -1."""
    remat = make_remat(config.remat)
    precision = build_precision(config)
    gathered = config.compress.gather or precision.compute
    reduced = precision.exchange or precision.gradients
    pipeline = _pipeline(config, mesh)
    context = _context(config, platform)
    heads = config.model.attention_width
    kv_width = heads
    if isinstance(config.model, HasKVWidth):
        kv_width = config.model.kv_width
    widths = {
        "residual": model.width,
        "layer_input": model.width,
        "attention_query": heads,
        "attention_out": heads,
        "attention_key": kv_width,
        "attention_value": kv_width,
    }
    return Workload(
        layers=config.model.layers,
        width=model.width,
        hidden=model.hidden,
        attention_width=heads,
        kv_width=kv_width,
        head_width=_head_width(config.model, heads),
        windows=windows_of(config.model),
        matmul_params=config.model.matmul_params,
        vocab=config.model.vocab,
        layer_params=sum(model.kernels.values()),
        expert_params=model.expert_params,
        experts=model.experts,
        head_params=model.head_params,
        params=model.params,
        sequence=config.data.sequence,
        batch=config.data.batch,
        mesh={axis: mesh.sizes[axis] for axis in AXES},
        microbatches=config.accumulate * pipeline.microbatches,
        quantized=model.quantized,
        recomputed=_recomputed_share(remat, model) / remat.every,
        stages_again=pipeline.recomputes,
        longest_stage=pipeline.longest_stage,
        recomputes_attention=remat.kind != "none" and _CORE not in remat.names,
        # Gradients of logits are kept if they take no more memory than a chunk's float32 logits.
        kept_logits=4 * config.logits_chunk / element_bytes(precision.compute),
        is_gated="gate" in model.kernels,
        zero=config.zero,
        regathers=remat.kind != "none",
        gathered_bytes=element_bytes(gathered),
        reduced_bytes=element_bytes(reduced),
        data_share=_data_share(config, model, mesh, element_bytes(reduced)),
        state_bytes=2 * model.state_bytes + 4,
        routed=model.routed,
        offloads_state="optimizer_state" in config.offload,
        offloads_params="params" in config.offload,
        offloaded=_offloaded_bytes(remat, widths, model.hidden),
        bubble=pipeline.bubble,
        context=context,
        in_chunks=config.attention == "chunked" or (context == "ring" and mesh.sequence > 1),
        gathered_axes=config.rules.gathered_axes,
    )


def _head_width(config: Any, width: int) -> int:
    """Return the width of one query head; 0 if it is not known.

    Args:
        width: Of all query heads together.
    """
    if isinstance(config, HasHeadWidth):
        return config.head_width
    if isinstance(config, HasHeads) and config.heads:
        return width // config.heads
    return 0


def _context(config: TrainConfig, platform: str) -> str:
    """Return the algorithm of attention over a split sequence on a platform."""
    if config.context != "auto":
        return config.context
    kernel: str = config.attention
    if kernel == "auto":
        kernel = split_kernel(FUSED.get(platform, ""))
    return context_for(kernel)


def _recomputed_share(remat: Remat, model: ModelNumbers) -> float:
    """Return the share of a layer's products computed again in the backward pass."""
    if remat.kind not in ("full", "names"):
        return 0.0
    # The last product of a layer is not repeated: nothing in its backward pass reads it.
    kept = {"down"}
    for activation, name in _SAVES.items():
        if activation in remat.names:
            kept.add(name)
    again = sum(size for name, size in model.kernels.items() if name not in kept)
    return again / sum(model.kernels.values())


def _offloaded_bytes(remat: Remat, widths: Mapping[str, int], hidden: int) -> float:
    """Return the bytes of a token's activations of a layer in host memory.

    Activations without a width in `widths` are `hidden` wide.
    """
    total: float = 0
    for name in remat.offload:
        codec = remat.codec(name)
        element: float = 2
        if codec is not None:
            element = codec.bits(128) / 8
        total += element * widths.get(name, hidden)
    return total


def work_of(setup: TrainSetup, platform: str = "") -> Workload:
    """Return the numbers of a config's step on its mesh; a mesh without devices has no platform."""
    shape = MeshShape(**setup.mesh.shape)
    on = platform or setup.plan.attention.platform
    return workload(setup.config, count_model(setup), shape, on)


def estimate_time(setup: TrainSetup, topology: Topology) -> StepTime:
    """Predict the step of a config by closed forms.

    Raises:
        ConfigError: The speeds of the machine are not known.
    """
    hardware = hardware_of(topology)
    shape = MeshShape(**setup.mesh.shape)
    rates = closed_rates(topology)
    work = work_of(setup, topology.platform)
    network = make_network(topology, shape, setup.slices, hardware)
    return StepTime(
        topology,
        "closed forms",
        work,
        hardware,
        closed_form(work, network, rates),
        rates.spread_of(work.kind),
        examples=setup.examples,
        roofline=roofline(work, network, rates, setup.config.steps),
    )


def estimate_traced_time(planned: PlannedStep, topology: Topology) -> StepTime:
    """Predict the step of any model by the roofline of its trace.

    Raises:
        ConfigError: The speeds of the machine are not known.
    """
    hardware = hardware_of(topology)
    rates = topology.chip.closed or ClosedRates()
    shape = MeshShape(**planned.mesh.shape)
    network = make_network(topology, shape, planned.slices, hardware)
    work = count_work(planned.step, planned.batch, topology.platform)
    return StepTime(
        topology,
        "roofline of the trace",
        None,
        hardware,
        traced_form(work, network, rates),
        rates.spread,
        bounds=traced_bounds(work, network, rates),
        examples=planned.examples,
    )


def time_program(
    planned: PlannedStep,
    topology: Topology,
    compiled: CompiledStep,
    work: Workload | None = None,
    *,
    keep_spans: bool = False,
) -> tuple[StepTime, StepTimeline]:
    """Return the time of a compiled TPU step and its collectives, and its timeline.

    `work` are the numbers of a transformer's step, for its utilization.
    """
    found, line = _schedule_time(planned, topology, compiled.program, work, keep_spans)
    collectives = _collective_times(compiled.audit, line)
    memory = compiled.memory.total if compiled.memory else None
    return dataclasses.replace(found, collectives=collectives, memory=memory), line


def _schedule_time(
    planned: PlannedStep,
    topology: Topology,
    program: HloModule,
    work: Workload | None,
    keep_spans: bool,
) -> tuple[StepTime, StepTimeline]:
    """Return the time of a step by its program's schedule, and the timeline."""
    table = planned.tick_table
    taken: Mapping[str, Fraction] = {}
    if table:
        taken = table.waited
    shape = MeshShape(**planned.mesh.shape)
    spread: float | None = compiled_rates(topology).spread
    if work is not None and work.kind != "dense":
        spread = None
    line = program_timeline(program, topology, shape, planned.slices, taken, keep_spans=keep_spans)
    found = StepTime(
        topology,
        "compiled program",
        work,
        hardware_of(topology),
        dict(line.spent),
        spread,
        uncounted=tuple(line.uncounted),
        examples=planned.examples,
    )
    return found, line


def program_timeline(
    program: HloModule,
    topology: Topology,
    shape: MeshShape,
    slices: Mapping[str, int],
    taken: Mapping[str, Fraction] = MappingProxyType({}),
    *,
    keep_spans: bool = False,
) -> StepTimeline:
    """Return the timeline of a TPU program, of this package or of another, on a machine.

    Args:
        slices: Axis → the number of slices along it.
        taken: Share of a branch's turns, as for `spmd.analysis.executions.executions`.
    """
    rates = compiled_rates(topology)
    network = make_network(topology, shape, slices, hardware_of(topology), rates.network)
    numbers = slice_numbers(shape.sizes, slices)
    schedule = read_program_schedule(program, shape.sizes, taken, numbers)
    clock = topology.chip.clock
    assert clock is not None
    line = run_schedule(schedule, network, clock, rates, keep_spans=keep_spans)
    waiting = network.waiting(line.seconds, rates.straggling)
    if waiting:
        line.spent["waiting for the slowest slice"] = waiting
    return line


def _collective_times(audit: CollectiveAudit, line: StepTimeline) -> tuple[CollectiveTime, ...]:
    """Return the times of an audit's collectives by kind, axes and cause, the longest first."""
    # An instruction has several records if it moves several arrays, and one time.
    first_records = dict[str, Collective]()
    for record in audit.records:
        first_records.setdefault(record.instruction, record)
    moving = collections.defaultdict[tuple[str, str, str], float](float)
    exposed = collections.defaultdict[tuple[str, str, str], float](float)
    for name, record in first_records.items():
        cause = record.cause.text if record.cause else ""
        key = (record.kind, record.over, cause)
        moving[key] += line.moving.get(name, 0.0)
        exposed[key] += line.exposed.get(name, 0.0)
    found = list[CollectiveTime]()
    for key, seconds in moving.items():
        if seconds:
            found.append(CollectiveTime(*key, seconds, exposed[key]))
    return tuple(sorted(found, key=lambda each: (-each.exposed, -each.seconds)))


def _data_share(
    config: TrainConfig, model: ModelNumbers, mesh: MeshShape, exchange: float
) -> float:
    """Return the share of a gradient's bytes sent over data, as for an MLP's kernel."""
    rank = powersgd_rank(config.compress.gradients)
    every = config.diloco.every
    if not rank and not every:
        return 1.0
    rows: float = model.width
    if config.zero >= 2:
        rows /= shards_of(config.rules.gathered_axes, mesh.sizes)
    columns = model.hidden / mesh.tensor
    if every:
        outer = OuterExchange(abstract_mesh(mesh), config.diloco.codec)
        shape = (math.ceil(rows), math.ceil(columns))
        return outer.bytes_of_term(shape) / (math.prod(shape) * exchange * every)
    return min(1.0, 4 * rank * (rows + columns) / (rows * columns * exchange))


class _Pipeline(NamedTuple):
    """What a step's time needs to know of its pipeline.

    Attributes:
        bubble: Idle time of a stage, relative to its work.
        recomputes: Whether backward tasks run the forward pass again.
        longest_stage: Layers of a stage with the most, relative to the mean.
    """

    microbatches: int
    bubble: float
    recomputes: bool
    longest_stage: float = 1.0


def _pipeline(config: TrainConfig, mesh: MeshShape) -> _Pipeline:
    """Return the numbers of the pipeline over `mesh.pipe`."""
    pipeline = config.pipeline
    microbatches = pipeline.microbatches
    chunks = pipeline.stage_chunks
    if mesh.pipe == 1:
        return _Pipeline(microbatches or 1, 0.0, recomputes=False)
    has_flush = pipeline.schedule != "pipedream"
    if not microbatches or pipeline.schedule.endswith(".csv"):
        schedule = build_schedule(config, abstract_mesh(mesh))
        assert schedule is not None
        microbatches = schedule.microbatches
        chunks = schedule.chunks
        has_flush = schedule.flush
    if not has_flush:
        return _Pipeline(microbatches, 0.0, recomputes=True)
    bubble = (mesh.pipe - 1) / (microbatches * chunks)
    longest = _longest_stage(repeats_of(config.model), mesh.pipe, chunks)
    return _Pipeline(microbatches, bubble, pipeline.recomputes, longest)


def _longest_stage(repeats: int, stages: int, chunks: int) -> float:
    """Return the layers of a stage with the most, relative to the mean of the stages.

    Stages wait for the longest chunk in each tick. The relation is 1 where the number of equal
    groups of layers is not known.
    """
    parts = stages * chunks
    if repeats < parts:
        return 1.0
    return LayerSplit.of(repeats, stages, chunks).most * parts / repeats


def _bytes(entries: Iterable[PlanEntry]) -> float:
    """Return the bytes of whole arrays."""
    total = 0
    for entry in entries:
        total += math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
    return float(total)
