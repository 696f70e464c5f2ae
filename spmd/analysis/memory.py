"""Memory of a training step on each device and each host: estimated from its trace, and as compiled.

```python
estimate = estimate_memory(step, batch)
compiled = read_memory(step.compile(batch))
print(MemoryReport(parse_topology("v5e:16x16"), estimate, compiled))
```

The estimate is the training state, known to the byte from the plan, and the peak of the traced step's buffers
(`spmd.analysis.liveness`). It has no knowledge of a model, an optimizer or a remat policy.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.analysis.bf16_operands import narrow_operands
from spmd.analysis.liveness import Buffer, find_buffers, heap_bytes, peak_buffers, saved_activations
from spmd.analysis.topology import Topology
from spmd.jaxpr.propagation import place, propagate
from spmd.jaxpr.traced_program import matmul_flops, read_program
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
    "grads": "gradients",
    "activations": "saved activations",
    "stages": "stage inputs",
    "logits": "logits and loss",
    "collectives": "gathered arrays",
    "temporaries": "temporaries",
}
"""Category → its label."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a step, from its trace.

    `held`, `at_peak` and `host` are category → bytes on one device (or in host memory for it).

    Attributes:
        held: Each array once, in shards, as if none were copied, gathered or converted; not of any one moment.
        at_peak: All copies that are live at the moment of the most use, such as whole gradients before their reduction.
        copies: Gradients and logits at the peak: category → (global shape, bytes of one) → number of buffers.
        saved: Activation → bytes that the forward pass saves for the backward pass on one device; unnamed ones together
            under the empty name.
        matmul_flops: FLOPs of all matmuls on all devices together, those that a remat policy recomputes included.
        lifetimes: Category → (bytes, first time, last time) of each buffer on one device, besides arguments.
    """

    held: Mapping[str, int]
    at_peak: Mapping[str, int]
    saved: Mapping[str, int]
    host: Mapping[str, int]
    matmul_flops: int = 0
    copies: Mapping[str, Mapping[tuple[str, int], int]] = dataclasses.field(default_factory=dict)
    lifetimes: Mapping[str, Sequence[tuple[int, int, int]]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def total(self) -> int:
        """Bytes on one device at the peak."""
        return sum(self.at_peak.values())

    def over_time(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the times at which the memory in use changes, and category → bytes in use from each of them on.

        Times count the operations of the traced step; the body of a loop counts once. Without the fragmentation of the
        heap, the largest sum is that of `at_peak`.
        """
        flat = [buffer for buffers in self.lifetimes.values() for buffer in buffers]
        times = np.unique([0, *(start for _, start, _ in flat), *(end + 1 for _, _, end in flat)])
        used = {}
        for name, peak in self.at_peak.items():
            change = np.zeros(len(times), dtype=np.int64)
            sizes, starts, ends = np.array(self.lifetimes.get(name, ()), dtype=np.int64).reshape(-1, 3).T
            np.add.at(change, np.searchsorted(times, starts), sizes)
            np.add.at(change, np.searchsorted(times, ends + 1), -sizes)
            used[name] = change.cumsum() if name in self.lifetimes else np.full(len(times), peak)
        return times, used

    def to_json(self) -> dict[str, Any]:
        """Return all bytes as JSON values."""
        return {
            **self.held,
            "total": self.total,
            "at_peak": dict(self.at_peak),
            "copies": {
                name: [{"shape": shape, "bytes": size, "count": n} for (shape, size), n in found.items()]
                for name, found in self.copies.items()
            },
            "saved": {name or "unnamed": size for name, size in self.saved.items()},
            "host": dict(self.host),
        }


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Memory of a compiled step, in bytes on one device; `aliased` are outputs that overwrite arguments.

    `peak` is the most in use at once, of device and host together; None if the backend does not report it.
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
        """Bytes on one device: arguments and temporaries. Outputs that overwrite no argument are a few metrics."""
        return self.arguments + self.temporaries

    def to_json(self) -> dict[str, int | None]:
        """Return all bytes as JSON values."""
        return {**dataclasses.asdict(self), "total": self.total}


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Estimated and compiled memory compared with the memory of the chip; `print` shows a table."""

    topology: Topology
    estimated: Estimate
    compiled: CompiledMemory | None = None

    @property
    def total(self) -> int:
        """Bytes on one device, as compiled if known."""
        return self.compiled.total if self.compiled else self.estimated.total

    @property
    def fits(self) -> bool | None:
        """True if the step fits the chip; None for simulated devices."""
        return None if self.topology.memory is None else self.total <= self.topology.memory

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
            held, now = self.estimated.held.get(name, 0), self.estimated.at_peak.get(name, 0)
            if held or now:
                once = "" if name in ("collectives", "temporaries") else human_bytes(held)
                rows.append((label, once, human_bytes(now)))
            copies = self.estimated.copies.get(name, {}) if now > held else {}
            for (shape, size), count in sorted(copies.items(), key=lambda item: -item[0][1] * item[1])[:3]:
                rows.append((f"  {count} × [{shape}] of {human_bytes(size)}", "", human_bytes(count * size)))
            if name == "activations":
                named = sorted(self.estimated.saved.items(), key=lambda item: -item[1])
                rows += [(f"  {key or 'without a name'}", human_bytes(size), "") for key, size in named if size]
        rows.append(("estimated on each device", "", human_bytes(self.estimated.total)))
        host = sum(self.estimated.host.values())
        if self.compiled:
            arguments, temporaries = human_bytes(self.compiled.arguments), human_bytes(self.compiled.temporaries)
            label = f"compiled: {arguments} arguments + {temporaries} temporaries"
            rows.append((label, "", human_bytes(self.compiled.total)))
            host = self.compiled.host_arguments + self.compiled.host_temporaries or host
        if self.topology.memory is not None:
            left = human_bytes(self.topology.memory - self.total).replace("-", "−")
            rows.append((f"{self.topology.kind} has, and is left", human_bytes(self.topology.memory), left))
        if host:
            each = self.topology.devices // self.topology.hosts
            label = f"in host memory: for a device, on a host of {each}"
            rows.append((label, human_bytes(host), human_bytes(host * each)))
        width = max(len(label) for label, _, _ in rows)
        return "\n".join(f"{label.ljust(width)}  {a.rjust(15)}  {b.rjust(16)}".rstrip() for label, a, b in rows)


def estimate_memory(step: TrainStep, batch: Any, platform: str = "cpu") -> Estimate:
    """Estimate the memory of a step from its trace: nothing is compiled, and the plan's mesh needs no devices.

    The batch has arrays or `jax.ShapeDtypeStruct`s; the platform's compiler is modelled.
    """
    plan, axes = step.plan, dict(step.plan.mesh.shape)
    state, batch = abstract_arguments(step.plan, batch)
    program = read_program(step.trace(batch).jaxpr, eager=platform == "cpu")
    for value, leaf in zip(program.inputs, jax.tree.leaves((state, batch)), strict=True):
        place(value, leaf.sharding)
    propagate(program)
    if platform == "tpu":
        narrow_operands(program)
    count = len(jax.tree.leaves(state))
    buffers = find_buffers(program, axes, program.outputs[:count], platform)
    end = 1 + max(buffer.end for buffer in buffers)
    # XLA cannot gather into a donated argument: results that are computed in shards and returned whole, as in ZeRO
    # stages 1 and 2, all exist twice when the step ends.
    buffers += [
        Buffer("gathered", "", old.shape, old.bytes(axes), False, end, end)
        for old, new in zip(program.inputs[:count], program.outputs[:count], strict=True)
        if not old.on_host and new.bytes(axes) < old.bytes(axes)
    ]
    logits = [value for o in program.walk() for value in o.outputs if value.name == "logits"]
    shapes = {leaf.shape: "params" for leaf in plan.params if len(leaf.shape) > 1}
    shapes |= {value.shape: "logits" for value in logits}
    now = dict.fromkeys(("grads", "activations", "stages", "logits", "collectives", "temporaries"), 0)
    lifetimes: dict[str, list[tuple[int, int, int]]] = {name: [] for name in now}
    for buffer in buffers:
        if not buffer.on_host:
            lifetimes[_category(buffer, shapes)].append((buffer.bytes, buffer.start, buffer.end))
    copies = {name: collections.Counter[tuple[str, int]]() for name in ("grads", "logits")}
    for buffer in peak_buffers(buffers):
        if not buffer.on_host:
            category = _category(buffer, shapes)
            now[category] += buffer.bytes
            if category in copies:
                copies[category]["×".join(map(str, buffer.shape)), buffer.bytes] += 1
    now["temporaries"] += heap_bytes(buffers) - sum(now.values())  # fragmentation
    saved = collections.Counter[str]()
    arguments, host = _state_bytes(plan)
    arguments["batch"] = sum(value.bytes(axes) for value in program.inputs[count:])
    for buffer in saved_activations(program, axes):
        if buffer.on_host:
            host["activations"] += buffer.bytes
        elif _category(buffer, shapes) == "activations":
            saved[buffer.name] += buffer.bytes
    held = arguments | {
        "grads": sum(leaf.bytes_per_device for leaf in plan.gradients),
        "activations": sum(saved.values()),
        "stages": sum(b.bytes for b in buffers if _category(b, shapes) == "stages"),
        "logits": max((value.bytes(axes) for value in logits), default=0),
        "collectives": now["collectives"],
        "temporaries": now["temporaries"],
    }
    return Estimate(held, arguments | now, saved, host, matmul_flops(program), copies, lifetimes)


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
    """Return the bytes of one device's training state by category: on the device, and in host memory."""
    device = dict.fromkeys(("params", "master", "optimizer", "variables"), 0)
    host = collections.Counter[str]()
    variables = (*plan.variables, *plan.transform_states)
    tables = {"params": plan.params, "optimizer": plan.optimizer_state, "variables": variables}
    for name, leaves in tables.items():
        for leaf in leaves:
            category = "master" if name == "optimizer" and "master" in leaf.path.split("/") else name
            memory = device if leaf.memory_kind == "device" else host
            memory[category] += leaf.bytes_per_device
    return device, host


def _category(buffer: Buffer, shapes: Mapping[tuple[int, ...], str]) -> str:
    """Return the category of a buffer that is no argument; `shapes` has those of `"params"` and `"logits"`."""
    of = shapes.get(buffer.shape)
    if buffer.name == SLOTS:
        return "stages"
    if "logits" in (of, shapes.get(buffer.shape[1:])):  # or the gradients of those of all chunks
        return "logits"
    if buffer.kind in ("gathered", "converted"):
        return "collectives"
    if of == "params":  # forward loops save gathered parameters, backward loops make gradients
        return "collectives" if buffer.kind == "saved" else "grads"
    return "activations" if buffer.kind == "saved" else "temporaries"
