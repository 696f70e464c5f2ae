"""Lines that follow a plan's text: the pipeline, experts, exchange and compression, the slices, and XLA's flags."""

import collections
import functools
import math
import re
from collections.abc import Iterator

import jax.numpy as jnp

from spmd.codecs import EXCHANGES, GATHERS
from spmd.coded_comm.comm import CodedComm
from spmd.data.order import Shares
from spmd.distributed.xla_flags import describe
from spmd.gradients.accumulate import values_of_microbatches
from spmd.gradients.exchange import AXES
from spmd.layers.expert_exchange import describe_exchange, expert_axes
from spmd.layers.router import RouterConfig
from spmd.pipeline.tick_table import describe_execution
from spmd.plan.local_param import local_param
from spmd.plan.manual import split_axes
from spmd.plan.plan import ShardingPlan
from spmd.powersgd.matrices import AXIS, find_matrices
from spmd.powersgd.transform import PowerSGD
from spmd.run.build import TrainSetup, abstract_batch, build_flags, build_powersgd, count_microbatches
from spmd.run.config import TrainConfig
from spmd.run.recipes import device_kind, recipe_lines
from spmd.sharding.dims import local_shape, spec_dims
from spmd.sharding.mesh import BATCH_SPEC, entry_axes
from spmd.sharding.optimizer_state import drop_axis, shard_bytes
from spmd.tree import human_bytes


def execution_lines(setup: TrainSetup, device: tuple[str, str] | None = None) -> str:
    """Return the lines of the pipeline, experts, the exchange of gradients and the slices, each after a line break.

    `device` is the platform and kind of absent devices; by default, those of the mesh.
    """
    lines = f"{pipeline_line(setup)}{experts_line(setup, device)}{exchange_line(setup)}{microbatch_line(setup)}"
    lines += f"{slices_line(setup)}{mixture_line(setup.config)}"
    more = [
        *recipe_lines(setup.plan, device[1] if device else device_kind(setup.mesh)),
        *compression_lines(setup.plan, build_powersgd(setup.config)),
    ]
    return lines + "".join(f"\n{line}" for line in more)


def pipeline_line(setup: TrainSetup) -> str:
    """Return the schedule and its execution; empty without a pipeline."""
    schedule = setup.schedule
    if schedule is None:
        return ""
    return f"\npipeline {schedule.name}, {schedule.microbatches} microbatches; {describe_execution(schedule)}"


def experts_line(setup: TrainSetup, device: tuple[str, str] | None = None) -> str:
    """Return the experts of a layer, their devices, and how these get tokens; empty for a model without experts."""
    router = getattr(setup.config.model, "router", None)
    placed = [x for path, x in setup.plan.placements.items() if re.search(r"\bexperts/.*kernel", path)]
    if not isinstance(router, RouterConfig) or not placed:
        return ""
    (names, *_) = spec_dims(placed[0].used, 3, split_axes(setup.mesh))
    axes = expert_axes(setup.mesh, names, device)
    over = "".join(f" over {'+'.join(names)}={axes.size}" for _ in names[:1])
    is_whole = setup.mesh.shape["sequence"] == 1 and "tensor" not in names
    slots = router.dispatch == "capacity" and (is_whole or router.choice == "expert")
    return f"\nexperts {router.experts}{over}, {router.top_k} a token: {describe_exchange(axes, router, slots=slots)}"


def exchange_line(setup: TrainSetup) -> str:
    """Return what is exchanged once a step and what could be, with bytes; empty without microbatches."""
    parts, exchange = setup.config.accumulate * count_microbatches(setup.config, setup.schedule), setup.exchange
    possible = tuple(axis for axis in AXES if setup.mesh.shape[axis] > 1)
    if parts == 1 or not possible or build_powersgd(setup.config):
        return ""

    def forms(axes: tuple[str, ...]) -> str:
        sent, gathered, held = exchange_bytes(setup.plan, axes)
        params = f"; {human_bytes(gathered)} of parameters, gathered once" if gathered else ""
        sums = f"{human_bytes(sent)} on the wire, not {human_bytes(parts * sent)}"
        return f"over {'+'.join(axes)} once a step: {sums}{params}; {human_bytes(held)} more memory"

    how = forms(exchange.axes) if exchange.axes else "one by one" + (exchange.reason and f": {exchange.reason}")
    other = f"\n  with --exchange-once data+fsdp {forms(possible)}"
    return f"\ngradients of {parts} microbatches are exchanged {how}" + other * (
        not exchange.reason and exchange.axes != possible
    )


def microbatch_line(setup: TrainSetup) -> str:
    """Return the names of what is of each microbatch, not of the batch; empty if nothing is."""
    if setup.config.accumulate * count_microbatches(setup.config, setup.schedule) == 1:
        return ""
    names = values_of_microbatches(setup.grad_fn, setup.plan, abstract_batch(setup.config))
    return f"\nof each microbatch, not of the batch: {', '.join(names)}" if names else ""


def slices_line(setup: TrainSetup) -> str:
    """Return the axes over the slow network; empty for one slice."""
    slices = {axis: count for axis, count in setup.config.slices.sizes.items() if count > 1}
    if not slices:
        return ""
    total, sizes = math.prod(slices.values()), setup.mesh.shape
    named = ", ".join(f"{axis} {count} × {sizes[axis] // count}" for axis, count in slices.items())
    return f"\nslices {total} of {setup.mesh.size // total} devices; over the slow network, × inside: {named}"


def mixture_line(config: TrainConfig) -> str:
    """Return the share of each set of a mixture, with its tokens of the run; empty without one."""
    if not config.data.mixture:
        return ""
    sets, data = config.data.sets, config.data
    draws = Shares([each.weight for each in sets]).counts(config.steps * data.batch)
    total = sum(each.weight for each in sets)
    named = [
        f"{each.name} {each.weight / total:.4g} ({rows * data.sequence:,}"
        + (f", at most {each.epochs} epoch{'s' * (each.epochs > 1)})" if each.epochs else ")")
        for each, rows in zip(sets, draws, strict=True)
    ]
    return f"\nmixture {', '.join(named)} of {config.steps * data.batch * data.sequence:,} tokens"


def sent_bytes(name: str, block: int = 128) -> float:
    """Return the bytes of an element on the wire: of a dtype, or of a codec with its part of the block's scale.

    Example:
        >>> sent_bytes("bfloat16"), sent_bytes("int8"), sent_bytes("int4")
        (2, 1.03125, 0.53125)
    """
    codec = EXCHANGES.get(name) or GATHERS.get(name)
    return codec.bits(block) / 8 if codec else jnp.dtype(name).itemsize


def compression_lines(plan: ShardingPlan, powersgd: PowerSGD | None = None) -> list[str]:
    """Return what each codec applies to: its axes, and the bytes that a device sends, before and with it."""
    thin = _powersgd_lines(plan, powersgd) if powersgd else ()
    return [*_gathered_lines(plan), *_reduced_lines(plan), *thin]


def _gathered_lines(plan: ShardingPlan) -> Iterator[str]:
    codec, dtype, sizes = plan.compress.gather, plan.precision.compute, plan.mesh.shape
    if not codec:
        return
    before, after, plain, over = 0.0, 0.0, ["vectors"], dict[str, int]()
    frozen = plan.model.info().frozen
    for entry in (*plan.params, *(entry for entry in plan.variables if entry.path in frozen)):
        placed = plan.placements.get(frozen.get(entry.path, entry.path))
        if placed is None or not (param := local_param(placed.of_stack(), len(entry.shape))).is_gathered:
            continue
        if placed.comm.param_codec:
            count = math.prod(entry.shape) // math.prod(sizes[axis] for axis in param.split)
            block = GATHERS[codec].block_dim(local_shape(entry.shape, param.stored, sizes))[1]
            before, after = before + count * sent_bytes(dtype), after + count * sent_bytes(codec, block)
            over |= {axis: sizes[axis] for axes in param.gathers for axis in axes}
        elif len(entry.shape) > len(placed.stacks) + 1:
            plain.append(entry.path)
    named = " and ".join(f"{axis} {size}" for axis, size in over.items())
    sent = f"{human_bytes(int(after))}, not {human_bytes(int(before))} in {dtype}, in each pass"
    yield f"layers gather in {codec} over {named}: {sent}; without codes: {', '.join(plain)}"


def _reduced_lines(plan: ShardingPlan) -> Iterator[str]:
    sizes, policy = plan.mesh.shape, plan.precision
    reduced = plan.model.info().gathered_by_layer
    codecs = policy.exchange_names(a for entry in BATCH_SPEC for a in entry_axes(entry) if sizes[a] > 1)
    for axis, codec in codecs.items():
        if codec not in EXCHANGES:
            continue
        before, after, plain = 0.0, 0.0, ["vectors"]
        for entry in plan.gradients:
            placed = plan.placements.get(entry.path)
            if placed is None or entry.path not in reduced or len(entry.shape) < len(placed.stacks) + 2:
                continue
            param = local_param(placed.of_stack(), len(entry.shape))
            if axis in param.split:
                continue
            count = math.prod(entry.shape) // math.prod(sizes[a] for axes in param.kept for a in axes if a != axis)
            count *= 1 if axis in (a for axes in param.scatters for a in axes) else 2  # a sum is a gather as well
            sent = param.sent(local_shape(entry.shape, param.used, sizes), [axis], sizes)[axis]
            coded = placed.comm.gradient_codec(sent) if isinstance(placed.comm, CodedComm) else None
            block = max(coded.least, coded.block_dim(local_shape(entry.shape, param.kept, sizes))[1]) if coded else 1
            before, after = before + count * sent_bytes(policy.gradients), after + count * sent_bytes(sent, block)
            plain += [entry.path] * (sent != codec)
        parts = plan.slices.get(axis, 1)
        inside = f": {sizes[axis] // parts} inside of a slice, then {parts} slices" if parts > 1 else f" {sizes[axis]}"
        sizes_text = f"{human_bytes(int(after))}, not {human_bytes(int(before))} in {policy.gradients}"
        yield f"gradients in {codec} over {axis}{inside}: {sizes_text}, in each sum; without codes: {', '.join(plain)}"


def _powersgd_lines(plan: ShardingPlan, powersgd: PowerSGD) -> Iterator[str]:
    width = sent_bytes(plan.precision.exchange_names((AXIS,))[AXIS])
    matrices, plain = find_matrices(plan, powersgd.rank, powersgd.rate)
    rows, before, after = list[tuple[str, ...]](), 0, 0
    for path, matrix in matrices.items():
        wide, sent = int(2 * width) * math.prod(matrix.local), 2 * matrix.sent(powersgd.rank)
        before, after = before + wide, after + sent
        shape = f"{matrix.count} × [{matrix.rows}, {matrix.columns}]"
        rows.append((f"  {path}", shape, f"{human_bytes(wide)} → {human_bytes(sent)}"))
    states = [entry for entry in plan.transform_states if entry.path.startswith(f"{powersgd.name}/")]
    held = sum(entry.bytes_per_device for entry in states)
    is_inside = 1 < powersgd.slices < plan.mesh.shape[AXIS]
    inside = f" between {powersgd.slices} slices, summed inside each" if is_inside else ""
    wire = "between slices, by a device in a step" if is_inside else "on the wire of a device in a step"
    bytes_sent = f"{human_bytes(before)} → {human_bytes(after)} {wire}"
    heading = f"gradients powersgd:{powersgd.rank} over {AXIS}={plan.mesh.shape[AXIS]}{inside}"
    reasons = collections.defaultdict[str, list[str]](list)
    for path, reason in plain.items():
        reasons[reason].append(path)
    sent_plain = [f"  sent as they are: {', '.join(paths)} ({reason})" for reason, paths in reasons.items()]
    state = f"{human_bytes(held)} of errors and Q on a device"
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    yield from (f"{heading}: {bytes_sent}; {state}", *lines, *sent_plain)


def flags_text(setup: TrainSetup, platform: str, kind: str) -> str:
    """Return XLA's flags for a kind of device with their reasons; empty where there are none."""
    flags = build_flags(setup.config, platform, kind)
    return describe(f"\nflags for XLA on {platform}", flags) if flags else ""


def exchange_bytes(plan: ShardingPlan, axes: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the bytes of gradients and of parameters on the wire for an exchange over axes of size above 1.

    They count as in `spmd.analysis.collective_record`. The third number is what is held beyond the plan's shards.
    """
    sizes, sent, gathered, held = plan.mesh.shape, 0, 0, 0
    for leaf in plan.gradients:
        specs = (leaf.spec, functools.reduce(drop_axis, axes, leaf.spec))
        shard, local = (shard_bytes(leaf.shape, plan.precision.accumulation, spec, sizes) for spec in specs)
        is_split = {axis for entry in leaf.spec for axis in entry_axes(entry)}.issuperset(axes)
        sent, held = sent + local * (local > shard) + 2 * shard * (not is_split), held + local - shard
    for leaf in (*plan.params, *plan.variables):
        local = shard_bytes(leaf.shape, leaf.dtype, functools.reduce(drop_axis, axes, leaf.spec), sizes)
        gathered += local * (local > leaf.bytes_per_device)
    return sent, gathered, held + gathered
