"""Predicted time of a config's step: by closed forms, or from its compiled program."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.hlo import HloModule
from spmd.analysis.topology import Topology, missing_extra
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, Problem
from spmd.layers.router import RouterConfig
from spmd.model_api.remat import make_remat
from spmd.observe.waiting import show_waiting
from spmd.pipeline.tick_table import tabulate
from spmd.plan.records import PlanEntry
from spmd.run.build import TrainSetup, build_precision, build_schedule, keys_of, make_setup, planned_mesh
from spmd.run.config import CountsFlops, TrainConfig
from spmd.run.describe import sent_bytes
from spmd.run.preflight import CompiledStep, compile_step, topology_mesh
from spmd.settings.compress import powersgd_rank
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh, slice_numbers
from spmd.step_time.calibration import CLOSED, COMPILED
from spmd.step_time.closed_form import Workload, closed_form
from spmd.step_time.hardware import hardware_of
from spmd.step_time.network import make_network
from spmd.step_time.program import read_schedule
from spmd.step_time.report import CollectiveTime, StepTime, write_trace
from spmd.step_time.roofline import roofline
from spmd.step_time.timeline import Timeline, run_schedule

_SAVES = {
    **{"attention_query": "q", "attention_key": "k", "attention_value": "v"},
    **{"mlp_gate": "gate", "mlp_up": "up", "residual": "o"},
}
"""Activation → the projection whose output it is, which is not computed again if it is saved."""

_CORE = "attention_out"
"""Activation whose saving keeps attention itself from being computed again."""


@dataclasses.dataclass(frozen=True)
class ModelNumbers:
    """Numbers of a model and its optimizer that no mesh changes.

    Attributes:
        kernels: Projection, such as `"down"` → parameters that a token meets, of all layers.
        quantized: Dtype → share of the layers' products in it.
        params: All parameters.
        state_bytes: Bytes of the state of one parameter, itself included.
    """

    kernels: Mapping[str, float]
    quantized: Mapping[str, float]
    head_params: float
    params: float
    state_bytes: float
    width: int
    hidden: int
    routed: int


def count_model(setup: TrainSetup) -> ModelNumbers:
    """Count the parameters of a config's model from its plan; raise `ConfigError` for adapters."""
    model, plan = setup.config.model, setup.plan
    if setup.config.lora.targets:
        what, fix = "has adapters, whose steps no rates are fitted to", "--lora.targets, without any"
        raise ConfigError("The time of a step cannot be predicted:", [Problem("lora.targets", what, fix=fix)])
    if not isinstance(model, CountsFlops):
        what = f"{type(model).__name__} does not count its FLOPs"
        fix = "properties layers, attention_width and matmul_params (`spmd.run.config.CountsFlops`)"
        raise ConfigError("The time of a step cannot be predicted:", [Problem("model", what, fix=fix)])
    router = getattr(model, "router", None)
    routed = router.top_k if isinstance(router, RouterConfig) else 0
    kernels, in_dtype = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    for entry in plan.params:
        is_repeated = any(f"/{name}/" in f"/{entry.path}" for name in plan.rules.stacks)
        if not entry.path.endswith("kernel") or not is_repeated:
            continue
        active = routed / router.experts if router and re.search(r"\bexperts/", entry.path) else 1.0
        name = entry.path.split("/")[-2].removesuffix("_proj")
        kernels[name] += math.prod(entry.shape) * active
        if (recipe := plan.placements[entry.path].recipe) and recipe.kind:
            in_dtype[recipe.kind] += math.prod(entry.shape) * active * (2 / 3 if recipe.scaling == "row" else 1)
    if not kernels:  # layers that are no stack, or weights of other names
        kernels["all"] = model.matmul_params
    params = float(sum(math.prod(entry.shape) for entry in plan.params))
    layers = sum(kernels.values())
    state = _bytes(plan.params) + _bytes(plan.optimizer_state)
    width = getattr(model, "d_model", 0) or min(plan.params[0].shape[-2:])
    hidden = getattr(model, "d_ff", 4 * width) * max(1, routed)
    head = max(0.0, model.matmul_params - layers)
    shares = {dtype: size / layers for dtype, size in in_dtype.items()}
    return ModelNumbers(kernels, shares, head, params, state / params, width, hidden, routed)


def workload(config: TrainConfig, model: ModelNumbers, mesh: MeshShape) -> Workload:
    """Return the numbers of a config's step on a mesh shape without -1."""
    remat, saved = make_remat(config.remat), set(make_remat(config.remat).names)
    layer_params = sum(model.kernels.values())
    repeats = remat.kind in ("full", "names")
    # The last product of a layer is not repeated: nothing in its backward pass reads it.
    kept = {"down", *(name for activation, name in _SAVES.items() if activation in saved)}
    again = sum(size for name, size in model.kernels.items() if name not in kept) / layer_params if repeats else 0.0
    precision = build_precision(config)
    gathered = config.compress.gather or precision.compute
    reduced = precision.exchange or precision.gradients
    parts, bubble = _pipeline(config, mesh)
    heads = config.model.attention_width
    kv_width = getattr(config.model, "kv_width", heads)
    widths = {"residual": model.width, "layer_input": model.width, "attention_query": heads, "attention_out": heads}
    widths |= {"attention_key": kv_width, "attention_value": kv_width}
    return Workload(
        layers=config.model.layers,
        width=model.width,
        hidden=model.hidden,
        attention_width=heads,
        kv_width=kv_width,
        keys=keys_of(config),
        matmul_params=config.model.matmul_params,
        vocab=config.model.vocab,
        layer_params=layer_params,
        head_params=model.head_params,
        params=model.params,
        sequence=config.data.sequence,
        batch=config.data.batch,
        mesh={axis: mesh.sizes[axis] for axis in AXES},
        microbatches=config.accumulate * parts,
        quantized=model.quantized,
        recomputed=again / remat.every,
        recomputes_attention=remat.kind != "none" and _CORE not in saved,
        zero=config.zero,
        regathers=remat.kind != "none",
        gathered_bytes=sent_bytes(gathered),
        reduced_bytes=sent_bytes(reduced),
        data_share=_data_share(config, model, mesh, sent_bytes(reduced)),
        state_bytes=2 * model.state_bytes + 4,
        routed=model.routed,
        offloads_state="optimizer_state" in config.offload,
        offloaded=sum(
            (codec.bits(128) / 8 if (codec := remat.codec(name)) else 2) * widths.get(name, model.hidden)
            for name in remat.offload
        ),
        bubble=bubble,
    )


def estimate_time(setup: TrainSetup, topology: Topology) -> StepTime:
    """Predict the step of a config by closed forms; raise `ConfigError` for a machine without known speeds."""
    hardware, shape = hardware_of(topology), MeshShape(**setup.mesh.shape)
    rates = CLOSED[topology.kind]
    work = workload(setup.config, count_model(setup), shape)
    network = make_network(topology, shape, setup.config.slices.sizes, hardware)
    spent, answers = closed_form(work, network, rates), roofline(work, network, rates, setup.config.steps)
    return StepTime(topology, "closed forms", work, hardware, spent, rates.spread, roofline=answers)


def time_compiled_step(config: TrainConfig, topology: Topology, trace: str = "") -> StepTime:
    """Compile the step of a config for a machine and predict its time; write a trace if a file is named.

    Programs of GPUs have no cycles: their time is that of the closed forms.

    Raises:
        ConfigError: There is no compiler or no speed for the machine, the step does not fit, or the trace cannot be
            written.
    """
    hardware_of(topology)  # before the compiler
    if topology.platform != "tpu":
        if trace:
            problem = Problem("--trace", f"programs for {topology.kind} have no cycles", fix="a TPU, or no --trace")
            raise ConfigError("There is no trace:", [problem])
        return estimate_time(make_setup(config, planned_mesh(config)), topology)
    if absent := missing_extra(topology):
        raise ConfigError("The step cannot be compiled:", [absent])
    initialize(0, target_platform=topology.platform)
    setup = make_setup(config, topology_mesh(config, topology))
    try:
        with show_waiting(f"compiling for {topology}"):
            compiled = compile_step(setup)
    except MemoryError as error:
        problem = Problem("topology", f"has no room for the step: {error}", fix="spmd plan says what would fit")
        raise ConfigError("The step cannot be compiled:", [problem]) from None
    found, line = time_program(setup, topology, compiled, keep_spans=bool(trace))
    if trace:
        write_trace(trace, line.spans, str(topology))
    return found


def time_program(
    setup: TrainSetup, topology: Topology, compiled: CompiledStep, *, keep_spans: bool = False
) -> tuple[StepTime, Timeline]:
    """Return the time of a compiled TPU step with that of its collectives, and its timeline."""
    found, line = _schedule_time(setup, topology, compiled.program, keep_spans)
    memory = compiled.memory.total if compiled.memory else None
    return dataclasses.replace(found, collectives=_collective_times(compiled.audit, line), memory=memory), line


def _schedule_time(
    setup: TrainSetup, topology: Topology, program: HloModule, keep_spans: bool
) -> tuple[StepTime, Timeline]:
    hardware = hardware_of(topology)
    shape, slices, rates = MeshShape(**setup.mesh.shape), setup.config.slices.sizes, COMPILED[topology.kind]
    network = make_network(topology, shape, slices, hardware, rates.network)
    taken = tabulate(setup.schedule).waited if setup.schedule else {}
    schedule = read_schedule(program, shape.sizes, taken, slice_numbers(shape.sizes, slices))
    assert topology.chip.clock is not None
    line = run_schedule(schedule, network, topology.chip.clock, rates, keep_spans=keep_spans)
    work = workload(setup.config, count_model(setup), shape)
    spent = dict(line.spent)
    if waiting := network.waiting(line.seconds, rates.straggling):
        spent["waiting for the slowest slice"] = waiting
    method, uncounted = "compiled program", tuple(line.uncounted)
    return StepTime(topology, method, work, hardware, spent, rates.spread, uncounted=uncounted), line


def _collective_times(audit: CollectiveAudit, line: Timeline) -> tuple[CollectiveTime, ...]:
    """Return the times of an audit's collectives by kind, axes and cause, the longest first."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for name in dict.fromkeys(record.instruction for record in audit.records):
        record = next(record for record in audit.records if record.instruction == name)
        sums = groups.setdefault((record.kind, record.over, record.cause.text if record.cause else ""), [0.0, 0.0])
        sums[0] += line.moving.get(name, 0.0)
        sums[1] += line.exposed.get(name, 0.0)
    found = [CollectiveTime(*key, *sums) for key, sums in groups.items() if sums[0]]
    return tuple(sorted(found, key=lambda c: (-c.exposed, -c.seconds)))


def _data_share(config: TrainConfig, model: ModelNumbers, mesh: MeshShape, exchange: float) -> float:
    """Return the share of the bytes of a gradient that is sent over data: that of an MLP's kernel."""
    rank, rows = powersgd_rank(config.compress.gradients), model.width / (mesh.fsdp if config.zero >= 2 else 1)
    columns = model.hidden / mesh.tensor
    return min(1.0, 4 * rank * (rows + columns) / (rows * columns * exchange)) if rank else 1.0


def _pipeline(config: TrainConfig, mesh: MeshShape) -> tuple[int, float]:
    """Return the microbatches of a pipeline or in its place, and the idle time of a stage relative to its work."""
    name, microbatches, chunks = dataclasses.astuple(config.pipeline)
    if mesh.pipe == 1:
        return microbatches or 1, 0.0
    if not microbatches or name.endswith(".csv"):
        schedule = build_schedule(config, abstract_mesh(mesh))
        assert schedule is not None
        microbatches, chunks = schedule.microbatches, schedule.chunks
    chunks = chunks or (2 if name == "interleaved" else 1)
    return microbatches, 0.0 if name == "pipedream" else (mesh.pipe - 1) / (microbatches * chunks)


def _bytes(entries: Iterable[PlanEntry]) -> float:
    return float(sum(math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize for entry in entries))
