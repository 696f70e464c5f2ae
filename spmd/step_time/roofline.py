"""Rooflines in closed form: the critical batch, the largest mesh axes, and the time of training.

A collective is hidden if the matmuls beside it take longer ("How to Scale Your Model", Austin et
al., 2025, chapter 5). All results follow from two times of one microbatch, at the rates of
`spmd.step_time.closed_form`: that of matmuls, proportional to the tokens of a device and inversely
proportional to `tensor`, and that of the collectives of one axis.
"""

import dataclasses
import math
from collections.abc import Iterator

from spmd.step_time.closed_form import (
    ClosedRates,
    Workload,
    axes_above_one,
    closed_form,
    collective_seconds,
)
from spmd.step_time.network import Network


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Rooflines of one step; None where an axis has size 1.

    Attributes:
        communication: Axes → seconds of their collectives in one step, hidden or not.
        critical_batch: Least number of examples in a step with which gathers of parameters and
            reductions of gradients can be hidden.
        largest_tensor: Size of `tensor` up to which matmuls take longer than its collectives.
        largest_fsdp: Size of `fsdp` up to which its collectives can be hidden, with this batch.
        slice_batch: Least number of examples on one slice with which gradients between slices can
            be hidden.
        model_flops: FLOPs of one step without recomputation; `hardware_flops` with it.
        days: Time of all steps.
    """

    communication: dict[str, float]
    critical_batch: float | None
    largest_tensor: float | None
    largest_fsdp: float | None
    slice_batch: float | None
    model_flops: float
    hardware_flops: float
    days: float

    def lines(self) -> Iterator[str]:
        """Yield a line of text for each roofline."""
        times = ", ".join(f"{axis} {seconds:.3g} s" for axis, seconds in self.communication.items())
        yield f"collectives of a step, hidden or not: {times or 'none'}"
        if self.critical_batch is not None:
            batch = math.ceil(self.critical_batch)
            yield f"gathers of parameters can be hidden from a batch of {batch:,} on"
        if self.largest_fsdp is not None:
            yield f"with this batch, up to fsdp {_power(self.largest_fsdp):,}"
        if self.largest_tensor is not None:
            largest = _power(self.largest_tensor)
            yield f"matmuls take longer than collectives over tensor up to tensor {largest:,}"
        if self.slice_batch is not None:
            batch = math.ceil(self.slice_batch)
            yield f"gradients between slices can be hidden from {batch:,} examples on a slice on"
        again = self.hardware_flops / self.model_flops
        recomputed = f"{self.hardware_flops:.4g} with recomputation (× {again:.3g})"
        yield f"{self.model_flops:.4g} FLOPs in a step, {recomputed}"
        yield f"all steps take {self.days:.3g} days"


def roofline(work: Workload, network: Network, rates: ClosedRates, steps: int) -> Roofline:
    """Return the rooflines of a step on a machine, and the time of a number of steps."""
    parts = closed_form(work, network, rates)
    matmuls = parts["matmuls"]
    of_axes = {}
    communication = dict[str, float]()
    for axes, seconds in collective_seconds(work, network, rates.hop).items():
        times = 1 if axes == ("data",) else work.microbatches
        of_axes[axes] = seconds * times
        name = axes_above_one(axes, work.mesh)
        communication[name] = communication.get(name, 0.0) + of_axes[axes]
    gathers = of_axes.get(work.gathered_axes)
    tensor = of_axes.get(("tensor",))
    largest_fsdp = None
    if gathers and work.mesh["fsdp"] > 1:
        largest_fsdp = work.mesh["fsdp"] * matmuls / gathers
    crossing = _gradients_between_slices(work, network)
    slice_batch = None
    if crossing:
        on_slice = work.batch / network.topology.slices
        slice_batch = on_slice * crossing / (matmuls * _backward_share(work))
    return Roofline(
        communication=communication,
        critical_batch=gathers and work.batch * gathers / matmuls,
        largest_tensor=tensor and work.mesh["tensor"] * matmuls / tensor,
        largest_fsdp=largest_fsdp,
        slice_batch=slice_batch,
        model_flops=work.model_flops,
        hardware_flops=work.hardware_flops,
        days=steps * sum(parts.values()) / 86_400,
    )


def _backward_share(work: Workload) -> float:
    """Return the share of matmuls in the backward pass: gradients exist there alone."""
    repeated = work.repeated * work.layer_params + work.recomputes_head * work.head_params
    again = repeated / (work.layer_params + work.head_params)
    return (4 + 2 * again) / (6 + 2 * again)


def _gradients_between_slices(work: Workload, network: Network) -> float:
    """Return the time of the gradients of a step between slices; 0 for one slice."""
    group = network.axis_group(("data",))
    shards = math.prod(size for axis, size in work.mesh.items() if axis != "data")
    sent = work.params / shards * work.reduced_bytes * work.data_share
    return network.between("all-reduce", sent, group)


def _power(size: float) -> int:
    """Return the largest power of two up to a size, at least 1."""
    return 2 ** max(0, math.floor(math.log2(size)))
