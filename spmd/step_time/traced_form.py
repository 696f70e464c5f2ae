"""Roofline of any train step, from its trace: no closed form of a model, and no compiler.

| part | of one device, in one step |
|---|---|
| matmuls | FLOPs of matmuls and convolutions, by the shards of their operands |
| starting operations | the least time of each, of which a share is fused into others |
| memory-bound work | their operands and results, other results, and the update of the state |
| collectives over an axis | gathers and reductions of parameters, and partial sums of matmuls |

Collectives that a program writes by itself (`shard_map`), and those of further microbatches, are
not counted; a `while` loop counts as one iteration.

The shortest step is as long as the longer of matmuls at the published peak and their bytes at the
published bandwidth. The longest does what is counted one after the other, and fuses nothing.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmd.analysis.memory import trace_program
from spmd.chips import ClosedRates
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue
from spmd.plan.communication import gathers, reductions
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import TOKEN_AXES
from spmd.step_time.closed_form import FUSED
from spmd.step_time.network import Network
from spmd.training.step import TrainStep

_VIEWS = ("reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "sharding_constraint")
"""Operations whose results a compiler does not write."""

_START = 1e-6
"""Least seconds of an operation: a launch on GPUs, and the filling of pipelines on TPUs."""


@dataclasses.dataclass
class TracedWork:
    """Work of one device in one step.

    Attributes:
        flops: Of matmuls and convolutions.
        operands: Bytes of their operands and results.
        results: Bytes of the results of all other operations.
        state: Bytes that the update reads and writes.
        on_host: Those of them in host memory.
        operations: Operations with a result of their own, those that may be fused included.
        sent: (kind, axes, bytes) → the number of such collectives.
    """

    flops: float = 0.0
    operands: float = 0.0
    results: float = 0.0
    state: float = 0.0
    on_host: float = 0.0
    operations: float = 0.0
    sent: collections.Counter[tuple[str, tuple[str, ...], float]] = dataclasses.field(
        default_factory=collections.Counter
    )


def count_work(step: TrainStep, batch: Any, platform: str) -> TracedWork:
    """Count the work of a step by its trace; the mesh needs no devices."""
    program, _ = trace_program(step, batch, platform)
    work = TracedWork()
    _add_program(work, program, dict(step.plan.mesh.shape), times=1)
    _add_state(work, step.plan)
    return work


def _add_program(
    work: TracedWork, program: TracedProgram, axes: Mapping[str, int], times: int
) -> None:
    for operation in program.operations:
        if operation.bodies:
            _add_bodies(work, operation, axes, times)
        elif operation.primitive == "dot_general":
            _add_matmul(work, operation, axes, times)
        elif operation.primitive == "conv_general_dilated":
            _add_convolution(work, operation, axes, times)
        elif operation.primitive not in _VIEWS:
            work.results += times * _bytes(operation.outputs, axes)
            work.operations += times


def _add_bodies(
    work: TracedWork, operation: Operation, axes: Mapping[str, int], times: int
) -> None:
    """Add a loop's body once for each iteration, or the branch with the most FLOPs."""
    if operation.primitive == "scan":
        times = times * operation.params["length"]
    branches = list[TracedWork]()
    for body in operation.bodies:
        branch = TracedWork()
        _add_program(branch, body, axes, times)
        branches.append(branch)
    longest = max(branches, key=lambda branch: (branch.flops, branch.results))
    work.operations += longest.operations
    work.flops += longest.flops
    work.operands += longest.operands
    work.results += longest.results
    work.sent += longest.sent


def _add_matmul(
    work: TracedWork, operation: Operation, axes: Mapping[str, int], times: int
) -> None:
    (contracted, _), _ = operation.params["dimension_numbers"]
    left = operation.inputs[0]
    local = _local_shape(left, axes)
    depth = math.prod(local[dim] for dim in contracted)
    (product,) = operation.outputs
    work.operations += times
    work.flops += times * 2 * depth * math.prod(_local_shape(product, axes))
    work.operands += times * _bytes((*operation.inputs, product), axes)
    summed = list[str]()
    for dim in contracted:
        for axis in (left.dims or ((),) * len(left.shape))[dim]:
            if axis not in TOKEN_AXES and axes[axis] > 1:
                summed.append(axis)
    if summed:  # sums over the tokens of a batch are gradients, which the ledger has
        work.sent["all-reduce", tuple(summed), product.bytes(axes)] += times


def _add_convolution(
    work: TracedWork, operation: Operation, axes: Mapping[str, int], times: int
) -> None:
    numbers = operation.params["dimension_numbers"]
    _, kernel = operation.inputs
    (product,) = operation.outputs
    # A kernel of [out, in / groups, …space] meets each element of the result with all but `out`.
    depth = math.prod(_local_shape(kernel, axes)[dim] for dim in numbers.rhs_spec[1:])
    work.operations += times
    work.flops += times * 2 * depth * math.prod(_local_shape(product, axes))
    work.operands += times * _bytes((*operation.inputs, product), axes)


def _add_state(work: TracedWork, plan: ShardingPlan) -> None:
    """Add the update, which reads and writes all state, and the collectives of parameters."""
    work.state = 2 * sum(plan.bytes_per_device().values())
    work.on_host = 2 * sum(plan.bytes_on_host().values())
    passes = 1
    if plan.remat.kind != "none":
        passes = 2
    for transfer in gathers(plan):
        work.sent["all-gather", transfer.axes, transfer.bytes] += passes
    for transfer in reductions(plan):
        work.sent["reduce-scatter", transfer.axes, transfer.bytes] += 1
    split = tuple(axis for axis in plan.rules.gathered_axes if plan.mesh.shape[axis] > 1)
    if plan.zero in (1, 2) and split:  # updated in shards, and stored whole
        whole = plan.bytes_per_device()["params"]
        work.sent["all-gather", split, whole] += 1


def _local_shape(value: TracedValue, axes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one device's shard; uneven shards are padded."""
    local = list[int]()
    for size, entry in zip(value.shape, value.dims or ((),) * len(value.shape), strict=True):
        shards = math.prod(axes[axis] for axis in entry)
        local.append(-(-size // shards))
    return tuple(local)


def _bytes(values: Any, axes: Mapping[str, int]) -> int:
    return sum(value.bytes(axes) for value in values if not value.on_host)


def traced_form(work: TracedWork, network: Network, rates: ClosedRates) -> dict[str, float]:
    """Return part of a step → seconds: they add up to the step."""
    hardware = network.hardware
    bandwidth = hardware.memory_bandwidth
    parts = {"matmuls": work.flops / (hardware.peak * rates.matmul)}
    # A matmul reads and writes while it multiplies; other operations do so by themselves.
    waiting = max(0.0, work.operands / bandwidth - parts["matmuls"])
    parts["memory-bound work"] = waiting + FUSED * work.results / bandwidth
    parts["starting operations"] = FUSED * work.operations * _START
    parts["optimizer"] = work.state / bandwidth
    parts["host transfers"] = work.on_host / hardware.host
    for axes, seconds in _collective_seconds(work, network).items():
        share = rates.exposed
        if axes == ("tensor",):
            share = rates.exposed_tensor
        elif not set(axes) <= set(TOKEN_AXES):  # the next matmul waits for a partial sum
            share = 1.0
        parts[f"exposed collectives over {'+'.join(axes)}"] = seconds * share
    return parts


def traced_bounds(work: TracedWork, network: Network, rates: ClosedRates) -> tuple[float, float]:
    """Return the shortest and the longest step."""
    hardware = network.hardware
    least = work.operands + work.state
    shortest = max(work.flops / hardware.peak, least / hardware.memory_bandwidth)
    most = work.operands + work.results + work.state
    longest = work.flops / (hardware.peak * rates.matmul) + most / hardware.memory_bandwidth
    longest += work.operations * _START + work.on_host / hardware.host
    longest += sum(_collective_seconds(work, network).values())
    return shortest, longest * (1 + rates.spread)


def _collective_seconds(work: TracedWork, network: Network) -> dict[tuple[str, ...], float]:
    """Return axes → seconds of their collectives, hidden or not."""
    found = collections.defaultdict[tuple[str, ...], float](float)
    for (kind, axes, size), times in work.sent.items():
        group = network.axis_group(axes)
        found[axes] += times * network.seconds(kind, size, group)
    return found
