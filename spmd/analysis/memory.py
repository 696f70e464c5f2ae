"""Memory of a training step on each device and host: estimated from its trace, and as compiled.

```python
estimate = estimate_memory(step, batch)
compiled = read_memory(step.compile(batch))
print(MemoryReport(parse_topology("v5e:16x16"), estimate, compiled))
```

The estimate is the training state, known to the byte from the plan, and the peak of the traced
step's buffers (`spmd.analysis.liveness`). It has no knowledge of a model, an optimizer or a remat
policy.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.analysis.bf16_operands import narrow_operands
from spmd.analysis.liveness import Buffer, find_buffers, heap_bytes, peak_buffers, saved_activations
from spmd.analysis.topology import Topology
from spmd.jaxpr.propagation import place, propagate
from spmd.jaxpr.traced_program import TracedProgram, TracedValue, matmul_flops, read_program
from spmd.pipeline.executor import SLOTS
from spmd.plan.plan import ShardingPlan
from spmd.training.state import abstract_arguments
from spmd.training.step import TrainStep
from spmd.tree import human_bytes

CATEGORIES = {
    "params": "parameters",
    "master": "master weights",
    "optimizer": "optimizer state",
    "variables": "variables",
    "batch": "batch",
    "whole": "arrays without examples",
    "grads": "gradients",
    "activations": "saved activations",
    "stages": "slots of stages",
    "logits": "logits and loss",
    "collectives": "gathered arrays",
    "temporaries": "temporaries",
}
"""Category → its label."""

_TRANSIENT = ("grads", "activations", "stages", "logits", "collectives", "temporaries")
"""Categories of arrays that live in a step only."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a step, from its trace.

    `held`, `at_peak` and `host` are category → bytes on one device (or in host memory for it).

    Attributes:
        held: Bytes of each array once, in shards, without copies, gathers and conversions; not at
            any one time.
        at_peak: Bytes of all arrays that are live at the peak, copies included, such as whole
            gradients before their reduction.
        copies: Gradients and logits at the peak: category → (global shape, bytes of one) → number
            of buffers.
        saved: Activation → bytes that the forward pass saves for the backward pass on one device;
            unnamed ones together under the empty name.
        matmul_flops: FLOPs of all matmuls on all devices together, those that a remat policy
            recomputes included.
        lifetimes: Category → (bytes, first time, last time) of each buffer on one device, besides
            arguments.
    """

    held: Mapping[str, int]
    at_peak: Mapping[str, int]
    saved: Mapping[str, int]
    host: Mapping[str, int]
    matmul_flops: int = 0
    copies: Mapping[str, Mapping[tuple[str, int], int]] = dataclasses.field(default_factory=dict)
    lifetimes: Mapping[str, Sequence[tuple[int, int, int]]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    @property
    def total(self) -> int:
        """Bytes on one device at the peak."""
        return sum(self.at_peak.values())

    def over_time(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the times of changes, and category → bytes in use from each of them on.

        Times count the operations of the traced step; the body of a loop counts once. Without the
        fragmentation of the heap, the largest sum is that of `at_peak`.
        """
        moments = [0]
        for buffers in self.lifetimes.values():
            for _, start, end in buffers:
                moments += [start, end + 1]
        times = np.unique(moments)
        used = {}
        for name, peak in self.at_peak.items():
            if name in self.lifetimes:
                used[name] = _bytes_in_use(times, self.lifetimes[name])
            else:
                used[name] = np.full(len(times), peak)
        return times, used

    def to_json(self) -> dict[str, Any]:
        """Return all bytes as JSON values."""
        copies: dict[str, list[dict[str, Any]]] = {}
        for name, found in self.copies.items():
            copies[name] = []
            for (shape, size), count in found.items():
                copies[name].append({"shape": shape, "bytes": size, "count": count})
        return {
            **self.held,
            "total": self.total,
            "at_peak": dict(self.at_peak),
            "copies": copies,
            "saved": {name or "unnamed": size for name, size in self.saved.items()},
            "host": dict(self.host),
        }


def _bytes_in_use(times: np.ndarray, buffers: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return the bytes in use from each time on, by buffers (bytes, first time, last time)."""
    sizes, starts, ends = np.array(buffers, dtype=np.int64).reshape(-1, 3).T
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, np.searchsorted(times, starts), sizes)
    np.add.at(change, np.searchsorted(times, ends + 1), -sizes)
    return change.cumsum()


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of a compiled step, in bytes on one device.

    `aliased` are outputs that overwrite arguments.

    `peak` is the most in use at once, of device and host together; None if the backend does not
    report it.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host_arguments: int
    host_temporaries: int
    peak: int | None = None

    @property
    def total(self) -> int:
        """Bytes on one device: arguments and temporaries.

        Outputs that overwrite no argument are a few metrics.
        """
        return self.arguments + self.temporaries

    def to_json(self) -> dict[str, int | None]:
        """Return all bytes as JSON values."""
        return {**dataclasses.asdict(self), "total": self.total}


_Row = tuple[str, str, str]
"""Label, bytes of each array once, and bytes at the peak."""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Estimated and compiled memory compared with the memory of the chip; `print` shows a table."""

    topology: Topology
    estimated: Estimate
    compiled: CompiledMemory | None = None

    @property
    def total(self) -> int:
        """Bytes on one device, as compiled if known."""
        if self.compiled:
            return self.compiled.total
        return self.estimated.total

    @property
    def fits(self) -> bool | None:
        """True if the step fits the chip; None for simulated devices."""
        if self.topology.memory is None:
            return None
        return self.total <= self.topology.memory

    @property
    def largest(self) -> str:
        """Category with the most bytes at the peak."""
        return max(self.estimated.at_peak, key=self.estimated.at_peak.__getitem__)

    def to_json(self) -> dict[str, Any]:
        """Return all bytes as JSON values."""
        return {
            "estimated": self.estimated.to_json(),
            "compiled": self.compiled.to_json() if self.compiled else None,
            "limit": self.topology.memory,
        }

    def __str__(self) -> str:
        rows = [("", "each array once", "live at the peak")]
        for name, label in CATEGORIES.items():
            rows += self._category_rows(name, label)
        rows.append(("estimated on each device", "", human_bytes(self.estimated.total)))
        host = sum(self.estimated.host.values())
        if self.compiled:
            rows.append(_compiled_row(self.compiled))
            host = self.compiled.host_arguments + self.compiled.host_temporaries or host
        limit = self.topology.memory
        if limit is not None:
            left = human_bytes(limit - self.total).replace("-", "−")
            rows.append((_limit_label(self.topology), human_bytes(limit), left))
        if host:
            each = self.topology.devices // self.topology.hosts
            label = f"in host memory: for a device, on a host of {each}"
            rows.append((label, human_bytes(host), human_bytes(host * each)))
        width = max(len(label) for label, _, _ in rows)
        lines = []
        for label, held, now in rows:
            lines.append(f"{label.ljust(width)}  {held.rjust(15)}  {now.rjust(16)}".rstrip())
        return "\n".join(lines)

    def _category_rows(self, name: str, label: str) -> Iterator[_Row]:
        """Yield the row of a category, and rows of its largest parts."""
        held = self.estimated.held.get(name, 0)
        now = self.estimated.at_peak.get(name, 0)
        if held or now:
            once = human_bytes(held)
            if name in ("collectives", "temporaries"):
                once = ""
            yield label, once, human_bytes(now)
        if now > held:
            yield from _copy_rows(self.estimated.copies.get(name, {}))
        if name == "activations":
            yield from _saved_rows(self.estimated.saved)


def _limit_label(topology: Topology) -> str:
    fraction = topology.memory_fraction
    if fraction == 1:
        return f"{topology.kind} has, and is left"
    return f"JAX takes {fraction:g} of {topology.kind}, and is left"


def _copy_rows(copies: Mapping[tuple[str, int], int]) -> Iterator[_Row]:
    """Yield rows of the three groups of equal buffers with the most bytes."""
    largest = sorted(copies.items(), key=lambda item: -item[0][1] * item[1])
    for (shape, size), count in largest[:3]:
        yield f"  {count} × [{shape}] of {human_bytes(size)}", "", human_bytes(count * size)


def _saved_rows(saved: Mapping[str, int]) -> Iterator[_Row]:
    """Yield rows of saved activations, the largest first."""
    for name, size in sorted(saved.items(), key=lambda item: -item[1]):
        if size:
            yield f"  {name or 'without a name'}", human_bytes(size), ""


def _compiled_row(compiled: CompiledMemory) -> _Row:
    arguments = human_bytes(compiled.arguments)
    temporaries = human_bytes(compiled.temporaries)
    label = f"compiled: {arguments} arguments + {temporaries} temporaries"
    return label, "", human_bytes(compiled.total)


def estimate_memory(step: TrainStep, batch: Any, platform: str = "cpu") -> Estimate:
    """Estimate the memory of a step from its trace; the platform's compiler is modelled.

    Nothing is compiled, and the plan's mesh needs no devices. The batch has arrays or
    `jax.ShapeDtypeStruct`s.
    """
    plan = step.plan
    axes = dict(plan.mesh.shape)
    program, count = trace_program(step, batch, platform)
    buffers = find_buffers(program, axes, program.outputs[:count], platform)
    buffers += _results_beside_arguments(program, axes, count, buffers)
    logits = _logits(program)
    shapes = _shapes(plan, logits)
    now, copies = _at_peak(buffers, shapes)
    now["temporaries"] += heap_bytes(buffers) - sum(now.values())  # fragmentation
    arguments, host = _state_bytes(plan)
    arguments |= _batch_bytes(plan, batch, program.inputs[count:])
    saved = collections.Counter[str]()
    for buffer in saved_activations(program, axes):
        if buffer.on_host:
            host["activations"] += buffer.bytes
        elif _category(buffer, shapes) == "activations":
            saved[buffer.name] += buffer.bytes
    held = arguments | {
        "grads": sum(leaf.bytes_per_device for leaf in plan.gradients),
        "activations": sum(saved.values()),
        "stages": _stage_bytes(buffers, shapes),
        "logits": max((value.bytes(axes) for value in logits), default=0),
        "collectives": now["collectives"],
        "temporaries": now["temporaries"],
    }
    return Estimate(
        held=held,
        at_peak=arguments | now,
        saved=saved,
        host=host,
        matmul_flops=matmul_flops(program),
        copies=copies,
        lifetimes=_lifetimes(buffers, shapes),
    )


def _batch_bytes(plan: ShardingPlan, batch: Any, inputs: Sequence[TracedValue]) -> dict[str, int]:
    """Return the bytes of a batch's arrays with examples, and of those without any."""
    axes = dict(plan.mesh.shape)
    sizes = {"batch": 0, "whole": 0}
    splits = plan.rules.batch_table.arrays(batch).values()
    for value, split in zip(inputs, splits, strict=True):
        if split.examples is None:
            sizes["whole"] += value.bytes(axes)
        else:
            sizes["batch"] += value.bytes(axes)
    return sizes


def trace_program(step: TrainStep, batch: Any, platform: str) -> tuple[TracedProgram, int]:
    """Return the traced step with its shardings, and the number of arrays of the state.

    The state comes first among the inputs and the outputs of the program.
    """
    state, batch = abstract_arguments(step.plan, batch)
    program = read_program(step.trace(batch).jaxpr, eager=platform == "cpu")
    for value, leaf in zip(program.inputs, jax.tree.leaves((state, batch)), strict=True):
        place(value, leaf.sharding)
    propagate(program)
    if platform == "tpu":
        narrow_operands(program)
    return program, len(jax.tree.leaves(state))


def _results_beside_arguments(
    program: TracedProgram, axes: Mapping[str, int], count: int, buffers: Sequence[Buffer]
) -> list[Buffer]:
    """Return the gathered results in memory beside the donated arguments at the end of the step.

    XLA cannot gather into a donated argument: results that are computed in shards and returned
    whole, as in ZeRO stages 1 and 2, all exist twice then.
    """
    end = 1 + max(buffer.end for buffer in buffers)
    found = []
    for old, new in zip(program.inputs[:count], program.outputs[:count], strict=True):
        size = old.bytes(axes)
        if not old.on_host and new.bytes(axes) < size:
            found.append(Buffer("gathered", "", old.shape, size, False, end, end))
    return found


def _logits(program: TracedProgram) -> list[TracedValue]:
    """Return the values named `logits` by a model."""
    found = []
    for operation in program.walk():
        for value in operation.outputs:
            if value.name == "logits":
                found.append(value)
    return found


def _shapes(plan: ShardingPlan, logits: Iterable[TracedValue]) -> dict[tuple[int, ...], str]:
    """Return shape → `"params"` or `"logits"`, to tell their buffers from others."""
    shapes = {}
    for leaf in plan.params:
        if len(leaf.shape) > 1:
            shapes[leaf.shape] = "params"
    for value in logits:
        shapes[value.shape] = "logits"
    return shapes


def _lifetimes(
    buffers: Iterable[Buffer], shapes: Mapping[tuple[int, ...], str]
) -> dict[str, list[tuple[int, int, int]]]:
    """Return category → (bytes, first time, last time) of each buffer on one device."""
    lifetimes: dict[str, list[tuple[int, int, int]]] = {name: [] for name in _TRANSIENT}
    for buffer in buffers:
        if not buffer.on_host:
            lifetime = (buffer.bytes, buffer.start, buffer.end)
            lifetimes[_category(buffer, shapes)].append(lifetime)
    return lifetimes


def _at_peak(
    buffers: Sequence[Buffer], shapes: Mapping[tuple[int, ...], str]
) -> tuple[dict[str, int], dict[str, collections.Counter[tuple[str, int]]]]:
    """Return category → bytes at the peak, and the number of equal buffers as in `Estimate`."""
    now = dict.fromkeys(_TRANSIENT, 0)
    copies = {name: collections.Counter[tuple[str, int]]() for name in ("grads", "logits")}
    for buffer in peak_buffers(buffers):
        if buffer.on_host:
            continue
        category = _category(buffer, shapes)
        now[category] += buffer.bytes
        if category in copies:
            shape = "×".join(map(str, buffer.shape))
            copies[category][shape, buffer.bytes] += 1
    return now, copies


def _stage_bytes(buffers: Iterable[Buffer], shapes: Mapping[tuple[int, ...], str]) -> int:
    """Return the bytes of the slots of pipeline stages, on the device or in host memory."""
    size = 0
    for buffer in buffers:
        if _category(buffer, shapes) == "stages":
            size += buffer.bytes
    return size


def read_memory(compiled: jax.stages.Compiled) -> CompiledMemory | None:
    """Return the compiler's memory analysis; None if the backend has none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return CompiledMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host_arguments=stats.host_argument_size_in_bytes,
        host_temporaries=stats.host_temp_size_in_bytes,
        peak=getattr(stats, "peak_memory_in_bytes", 0) or None,
    )


def _state_bytes(plan: ShardingPlan) -> tuple[dict[str, int], collections.Counter[str]]:
    """Return category → bytes of one device's state: on the device, and in host memory."""
    device = dict.fromkeys(("params", "master", "optimizer", "variables"), 0)
    host = collections.Counter[str]()
    tables = {
        "params": plan.params,
        "optimizer": plan.optimizer_state,
        "variables": (*plan.variables, *plan.transform_states),
    }
    for name, leaves in tables.items():
        for leaf in leaves:
            category = name
            if name == "optimizer" and "master" in leaf.path.split("/"):
                category = "master"
            if leaf.memory_kind == "device":
                device[category] += leaf.bytes_per_device
            else:
                host[category] += leaf.bytes_per_device
    return device, host


def _category(buffer: Buffer, shapes: Mapping[tuple[int, ...], str]) -> str:
    """Return the category of a buffer besides arguments; `shapes` are from `_shapes`."""
    of = shapes.get(buffer.shape)
    if buffer.name == SLOTS:
        return "stages"
    if "logits" in (of, shapes.get(buffer.shape[1:])):  # or stacked gradients of all chunks'
        return "logits"
    if buffer.kind in ("gathered", "converted"):
        return "collectives"
    # Forward loops save gathered parameters and activations, backward loops make gradients.
    if buffer.kind == "saved":
        return "collectives" if of == "params" else "activations"
    return "grads" if of == "params" else "temporaries"
