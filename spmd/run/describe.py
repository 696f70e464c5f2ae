"""Lines below a plan's text.

They describe the learning rate, pipeline, experts, exchange and compression, the slices, and XLA's
flags.
"""

import collections
import math
import re
from collections.abc import Sequence

from spmd import tree
from spmd.codecs import EXCHANGES
from spmd.data.sampler import MixtureSchedule
from spmd.diloco.replicas import AXIS as REPLICAS
from spmd.diloco.transform import DiLoCo
from spmd.distributed.xla_flags import Flag, describe
from spmd.gradients.accumulate import values_of_microbatches
from spmd.gradients.deferred_reduction import DEFERRABLE_AXES
from spmd.layers.expert_exchange import describe_exchange, expert_axes
from spmd.layers.router import RouterConfig
from spmd.model_interface.model_config import layers_of, router_of
from spmd.optim.config import describe_schedule
from spmd.pipeline.layer_split import LayerSplit
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.tick_table import describe_execution
from spmd.plan.communication import (
    batch_axes,
    deferred_reduction_bytes,
    element_bytes,
    gathers,
    reductions,
)
from spmd.plan.manual import split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import ParamPlacement
from spmd.powersgd.matrices import AXIS, find_matrices
from spmd.powersgd.transform import PowerSGD
from spmd.run.build import (
    TrainSetup,
    build_powersgd,
    count_microbatches,
)
from spmd.run.config import TrainConfig
from spmd.run.planned_step import PlannedStep
from spmd.run.recipes import device_kind, recipe_lines
from spmd.run.teacher_plan import read_model
from spmd.sharding.dims import spec_dims
from spmd.sharding.layer_paths import is_staged, own_stacks
from spmd.tree import human_bytes, with_noun


def execution_lines(setup: TrainSetup, device: tuple[str, str] | None = None) -> str:
    """Return lines about the schedules, experts, exchange, slices and data.

    Each comes after a line break. `device` is the platform and kind of absent devices; by default,
    those of the mesh.
    """
    text = f"\n{describe_schedule(setup.config.optimizer, setup.config.steps)}"
    text += pipeline_line(setup)
    text += experts_line(setup, device)
    text += exchange_line(setup)
    text += microbatch_line(setup)
    text += mixture_line(setup.config)
    text += teacher_line(setup)
    kind = device[1] if device else device_kind(setup.mesh)
    return text + plan_lines(setup, kind)


def plan_lines(planned: PlannedStep, kind: str) -> str:
    """Return lines about slices, recipes and compression, each after a line break.

    `kind` is that of the devices.
    """
    text = slices_line(planned)
    lines = recipe_lines(planned.plan, kind)
    lines += compression_lines(planned.plan, powersgd_of(planned.plan))
    lines += _replica_lines(planned.plan)
    for line in lines:
        text += f"\n{line}"
    return text


def powersgd_of(plan: ShardingPlan) -> PowerSGD | None:
    """Return the low-rank compression of gradients among a plan's transforms, if any."""
    for transform in plan.transforms:
        if isinstance(transform, PowerSGD):
            return transform
    return None


def _replica_lines(plan: ShardingPlan) -> list[str]:
    """Return a line about the replicas of DiLoCo, if there are any."""
    lines = list[str]()
    for transform in plan.transforms:
        if isinstance(transform, DiLoCo):
            lines.append(_replica_line(plan, transform))
    return lines


def _replica_line(plan: ShardingPlan, diloco: DiLoCo) -> str:
    """Return the line of DiLoCo: the steps of a synchronization, and its bytes."""
    sent = 0.0
    for transfer in reductions(plan):
        if transfer.axes == (REPLICAS,):
            sent += transfer.bytes
    parts = "at once"
    if diloco.fragments > 1:
        parts = f"in {diloco.fragments} fragments"
    count = plan.mesh.shape[REPLICAS]
    return (
        f"diloco {count} replicas over {REPLICAS}, synchronized every {diloco.every} steps {parts}: "
        f"a device sends {human_bytes(int(sent * diloco.every))} in {diloco.codec} between them, "
        f"{human_bytes(int(sent))} a step"
    )


def pipeline_line(setup: TrainSetup) -> str:
    """Return the schedule and its execution; empty without a pipeline."""
    schedule = setup.schedule
    if schedule is None:
        return ""
    name = f"{schedule.name}, {schedule.microbatches} microbatches"
    execution = describe_execution(schedule, recompute=setup.config.pipeline.recomputes)
    return f"\npipeline {name}; {execution}{_uneven_stages(setup, schedule)}"


def _uneven_stages(setup: TrainSetup, schedule: Schedule) -> str:
    """Return the numbers of layers of the stages; empty where they are equal."""
    for entry in setup.plan.params:
        if not is_staged(own_stacks(entry.path, setup.plan.rules.stacks)):
            continue
        split = LayerSplit.of(entry.shape[0], schedule.stages, schedule.chunks)
        if split.is_even:
            return ""
        parts = "chunks of stages" if schedule.chunks > 1 else "stages"
        things = "layers"
        if split.layers != layers_of(setup.config.model):
            things = "groups of layers"
        return f"; {parts} have unequal numbers of {things}, {split.text}"
    return ""


def experts_line(setup: TrainSetup, device: tuple[str, str] | None = None) -> str:
    """Return the experts of a layer and the exchange of their tokens; empty without experts."""
    router = router_of(setup.config.model)
    placed = _expert_kernel(setup.plan)
    if not isinstance(router, RouterConfig) or placed is None:
        return ""
    # Kernels of experts are [expert, in, out].
    names = spec_dims(placed.compute_spec, 3, split_axes(setup.mesh))[0]
    axes = expert_axes(setup.mesh, names, device)
    over = f" over {'+'.join(names)}={axes.size}" if names else ""
    is_whole = setup.mesh.shape["sequence"] == 1 and "tensor" not in names
    slots = router.dispatch == "capacity" and (is_whole or router.choice == "expert")
    how = describe_exchange(axes, router, slots=slots)
    return f"\nexperts {router.experts}{over}, {router.top_k} a token: {how}"


def teacher_line(setup: TrainSetup) -> str:
    """Return the size of the teacher; empty without one."""
    if setup.teacher is None:
        return ""
    count = tree.size(setup.teacher.abstract_params)
    held = sum(entry.bytes_per_device for entry in setup.teacher.params)
    of_loss = setup.config.distillation
    way = "divergence"
    if of_loss.reverse:
        way = "reverse divergence"
    return (
        f"\nteacher {setup.config.teacher}: {count:,} frozen parameters, "
        f"{human_bytes(held)} on each device; {way} at the temperature {of_loss.temperature:g} "
        f"has {of_loss.weight:.0%} of the loss{_unlike_heads(setup.config)}"
    )


def _unlike_heads(config: TrainConfig) -> str:
    """Return the outputs of a teacher's and the student's head; empty where they are equal."""
    teacher, _ = read_model(config.teacher)
    sizes = (teacher.vocab, config.model.vocab)
    if sizes[0] == sizes[1]:
        return ""
    return f"; heads of {sizes[0]:,} and {sizes[1]:,} outputs, compared in {min(sizes):,}"


def _expert_kernel(plan: ShardingPlan) -> ParamPlacement | None:
    """Return the placement of the first kernel of experts; None for a model without experts."""
    for path, placed in plan.placements.items():
        if re.search(r"\bexperts/.*kernel", path):
            return placed
    return None


def exchange_line(setup: TrainSetup) -> str:
    """Return the exchange of gradients, with bytes; empty without microbatches."""
    exchange = setup.exchange
    parts = setup.config.accumulate * count_microbatches(setup.config, setup.schedule)
    possible = tuple(axis for axis in DEFERRABLE_AXES if setup.mesh.shape[axis] > 1)
    if parts == 1 or not possible or build_powersgd(setup.config):
        return ""
    how = "one by one"
    if exchange.axes:
        how = _exchange_form(setup.plan, exchange.axes, parts)
    elif exchange.reason:
        how = f"one by one: {exchange.reason}"
    text = f"\ngradients of {parts} microbatches are exchanged {how}"
    if not exchange.reason and exchange.axes != possible:
        other = _exchange_form(setup.plan, possible, parts)
        text += f"\n  with --defer-grad-reduction data+fsdp {other}"
    return text


def _exchange_form(plan: ShardingPlan, axes: tuple[str, ...], parts: int) -> str:
    """Return a description, with bytes, of one exchange over axes in place of one for each part."""
    sent, gathered, held = deferred_reduction_bytes(plan, axes)
    sums = f"{human_bytes(sent)} on the wire, not {human_bytes(parts * sent)}"
    params = ""
    if gathered:
        params = f"; {human_bytes(gathered)} of parameters, gathered once"
    memory = f"{human_bytes(held)} more memory"
    return f"over {'+'.join(axes)} once a step: {sums}{params}; {memory}"


def microbatch_line(setup: TrainSetup) -> str:
    """Return the names of values of each microbatch, not of the batch; empty if there are none."""
    if setup.config.accumulate * count_microbatches(setup.config, setup.schedule) == 1:
        return ""
    names = values_of_microbatches(setup.grad_fn, setup.plan, setup.batch)
    if not names:
        return ""
    return f"\nof each microbatch, not of the batch: {', '.join(names)}"


def slices_line(planned: PlannedStep) -> str:
    """Return the axes over the slow network; empty for one slice."""
    slices = planned.plan.slices
    if not slices:
        return ""
    total = math.prod(slices.values())
    named = list[str]()
    for axis, count in slices.items():
        inside = planned.mesh.shape[axis] // count
        named.append(f"{axis} {count} × {inside}")
    devices = planned.mesh.size // total
    axes = ", ".join(named)
    return f"\nslices {total} of {devices} devices; over the slow network, × inside: {axes}"


def mixture_line(config: TrainConfig) -> str:
    """Return the share of each set of a mixture, with its tokens of the run; empty without one."""
    data = config.data
    if not data.mixture:
        return ""
    weights = [each.weight for each in data.sets]
    examples = data.batch_sizes.rows_before(config.steps)
    draws = MixtureSchedule(weights).counts(examples)
    total = sum(weights)
    named = list[str]()
    for each, rows in zip(data.sets, draws, strict=True):
        share = each.weight / total
        limit = ""
        if each.epochs:
            limit = f", at most {with_noun(each.epochs, 'epoch')}"
        named.append(f"{each.name} {share:.4g} ({rows * data.sequence:,}{limit})")
    return f"\nmixture {', '.join(named)} of {examples * data.sequence:,} tokens"


def compression_lines(plan: ShardingPlan, powersgd: PowerSGD | None = None) -> list[str]:
    """Return a line for each use of a codec: its axes, and a device's bytes without and with it."""
    lines = _gathered_lines(plan)
    lines += _reduced_lines(plan)
    if powersgd:
        lines += _powersgd_lines(plan, powersgd)
    return lines


def _gathered_lines(plan: ShardingPlan) -> list[str]:
    """Return the line of the codec of gathered parameters, if there is one."""
    codec = plan.compress.gather
    if not codec:
        return []
    dtype = plan.precision.compute
    sizes = plan.mesh.shape
    before = 0.0
    after = 0.0
    plain = ["vectors"]
    over = dict[str, int]()
    for transfer in gathers(plan):
        if transfer.dtype == codec:
            before += transfer.plain_bytes
            after += transfer.bytes
            for axis in transfer.axes:
                over[axis] = sizes[axis]
        elif transfer.is_matrix:
            plain.append(transfer.path)
    named = " and ".join(f"{axis} {size}" for axis, size in over.items())
    sent = f"{human_bytes(int(after))}, not {human_bytes(int(before))} in {dtype}, in each pass"
    uncoded = ", ".join(plain)
    return [f"layers gather in {codec} over {named}: {sent}; without codes: {uncoded}"]


def _reduced_lines(plan: ShardingPlan) -> list[str]:
    """Return a line for each axis with a codec of gradients."""
    split = batch_axes(plan.mesh.shape)
    lines = list[str]()
    for axis, codec in plan.precision.exchange_names(split).items():
        if codec in EXCHANGES:
            lines.append(_reduced_line(plan, axis, codec))
    return lines


def _reduced_line(plan: ShardingPlan, axis: str, codec: str) -> str:
    """Return the line of the codec of gradients on an axis."""
    dtype = plan.precision.gradients
    before = 0.0
    after = 0.0
    plain = ["vectors"]
    gathered = plan.model.info().gathered_by_layer
    for transfer in reductions(plan):
        if transfer.axes != (axis,) or transfer.path not in gathered or not transfer.is_matrix:
            continue
        before += transfer.plain_bytes
        after += transfer.bytes
        if transfer.dtype != codec:
            plain.append(transfer.path)
    where = f"{axis}{_slices_text(plan, axis)}"
    sums = f"{human_bytes(int(after))}, not {human_bytes(int(before))} in {dtype}, in each sum"
    return f"gradients in {codec} over {where}: {sums}; without codes: {', '.join(plain)}"


def _slices_text(plan: ShardingPlan, axis: str) -> str:
    """Return the size of an axis, inside of slices and over them."""
    size = plan.mesh.shape[axis]
    parts = plan.slices.get(axis, 1)
    if parts > 1:
        return f": {size // parts} inside of a slice, then {parts} slices"
    return f" {size}"


def _powersgd_lines(plan: ShardingPlan, powersgd: PowerSGD) -> list[str]:
    """Return a heading, the matrices as a table, and the gradients without compression."""
    width = element_bytes(plan.precision.exchange_names((AXIS,))[AXIS])
    matrices, plain = find_matrices(plan, powersgd.rank, powersgd.rate)
    rows = list[tuple[str, ...]]()
    before = 0
    after = 0
    for path, matrix in matrices.items():
        wide = int(2 * width) * math.prod(matrix.local)
        sent = 2 * sum(matrix.sent(powersgd.rank))  # a sum is a gather as well
        before += wide
        after += sent
        shape = f"{matrix.count} × [{matrix.rows}, {matrix.columns}]"
        rows.append((f"  {path}", shape, f"{human_bytes(wide)} → {human_bytes(sent)}"))
    change = f"{human_bytes(before)} → {human_bytes(after)}"
    lines = [_powersgd_heading(plan, powersgd, change)]
    lines += _table_lines(rows)
    reasons = collections.defaultdict[str, list[str]](list)
    for path, reason in plain.items():
        reasons[reason].append(path)
    for reason, paths in reasons.items():
        lines.append(f"  sent as they are: {', '.join(paths)} ({reason})")
    return lines


def _powersgd_heading(plan: ShardingPlan, powersgd: PowerSGD, change: str) -> str:
    """Return the line above the matrices; `change` compares the bytes sent."""
    size = plan.mesh.shape[AXIS]
    inside = ""
    wire = "on the wire of a device in a step"
    if 1 < powersgd.slices < size:
        inside = f" between {powersgd.slices} slices, summed inside each"
        wire = "between slices, by a device in a step"
    held = 0
    for entry in plan.transform_states:
        if entry.path.startswith(f"{powersgd.name}/"):
            held += entry.bytes_per_device
    heading = f"gradients powersgd:{powersgd.rank} over {AXIS}={size}{inside}"
    if powersgd.start:
        heading += f" after {powersgd.start:,} steps"
    return f"{heading}: {change} {wire}; {human_bytes(held)} of errors and Q on a device"


def _table_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = list[int]()
    for column in zip(*rows, strict=True):
        widths.append(max(len(cell) for cell in column))
    lines = list[str]()
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def flags_text(flags: Sequence[Flag], platform: str) -> str:
    """Return XLA's flags for a platform with their reasons; empty where there are none."""
    if not flags:
        return ""
    return describe(f"\nflags for XLA on {platform}", flags)
