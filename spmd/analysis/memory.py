"""The ledger: what each device and each host holds during a step, estimated without compiling and as compiled.

```python
estimate = estimate_memory(step, batch)
compiled = read_memory(step.compile(batch))
print(Ledger(parse_topology("v5e:16x16"), estimate, compiled))
```

The estimate adds the training state, which the plan knows to the byte, and what the traced step has in memory at its
fullest moment (`spmd.analysis.liveness`). Nothing in it knows of a model, an optimizer or a remat policy.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from spmd.analysis.bf16_operands import narrow_operands
from spmd.analysis.jaxpr import TracedProgram, TracedValue, read_program
from spmd.analysis.liveness import Buffer, find_buffers, heap_bytes, peak_buffers, saved_activations
from spmd.analysis.propagation import place, propagate
from spmd.analysis.topology import Topology
from spmd.pipeline.executor import SLOTS
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.train.state import abstract_arguments
from spmd.train.step import TrainStep
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
"""What a ledger tells apart, and how it is printed."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step holds, from its trace.

    Attributes:
        held: Category → bytes of it on one device, whenever they are there.
        at_peak: Category → bytes on one device at the moment when the most are in use.
        saved: Activation → bytes that the forward pass saves for the backward pass on one device; the unnamed together
            under the empty name.
        host: Category → bytes in host memory for one device.
    """

    held: Mapping[str, int]
    at_peak: Mapping[str, int]
    saved: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes on one device at the fullest moment."""
        return sum(self.at_peak.values())

    def to_json(self) -> dict[str, Any]:
        """Bytes by category, the total of the fullest moment, and what makes it up."""
        return {
            **self.held,
            "total": self.total,
            "at_peak": dict(self.at_peak),
            "saved": {name or "unnamed": size for name, size in self.saved.items()},
            "host": dict(self.host),
        }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says that a step needs, in bytes on one device.

    Attributes:
        arguments: The training state and the batch.
        outputs: The training state afterwards and the metrics.
        aliased: Outputs that are written over arguments.
        temporaries: All that is allocated besides.
        host_arguments: Arguments in host memory; a backend without host memory reports 0.
        host_temporaries: Temporaries in host memory.
        peak: The most bytes in use at once, of device and host together; a backend may not report it.
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
        """Bytes on one device: arguments and temporaries. Outputs that are no arguments are a few metrics."""
        return self.arguments + self.temporaries

    def to_json(self) -> dict[str, int | None]:
        """All figures and their total."""
        return {**dataclasses.asdict(self), "total": self.total}


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Both columns beside what the chip has; `print` shows them.

    Attributes:
        topology: The machine.
        estimated: From the trace.
        compiled: From the compiler; None where it was not asked.
    """

    topology: Topology
    estimated: Estimate
    compiled: Compiled | None = None

    @property
    def limit(self) -> int | None:
        """Bytes that a program may use on one device; None for simulated devices."""
        return self.topology.memory

    @property
    def total(self) -> int:
        """Bytes on one device, as compiled where that is known."""
        return self.compiled.total if self.compiled else self.estimated.total

    @property
    def fits(self) -> bool | None:
        """Whether the chip has that many bytes; None for simulated devices, which have no memory of their own."""
        return None if self.limit is None else self.total <= self.limit

    @property
    def largest(self) -> str:
        """The category with the most bytes at the fullest moment."""
        return max(self.estimated.at_peak, key=lambda name: self.estimated.at_peak[name])

    def to_json(self) -> dict[str, Any]:
        """The values of `memory` in a plan's JSON."""
        return {
            "estimated": self.estimated.to_json(),
            "compiled": self.compiled.to_json() if self.compiled else None,
            "limit": self.limit,
        }

    def __str__(self) -> str:
        rows = [("", "all of it", "at the peak")]
        for name, label in CATEGORIES.items():
            held, now = self.estimated.held.get(name, 0), self.estimated.at_peak.get(name, 0)
            if held or now:
                rows.append((label, human_bytes(held), human_bytes(now)))
            if name == "activations":
                named = sorted(self.estimated.saved.items(), key=lambda item: -item[1])
                rows += [(f"  {key or 'without a name'}", human_bytes(size), "") for key, size in named if size]
        rows.append(("estimated on each device", "", human_bytes(self.estimated.total)))
        if self.compiled:
            arguments, temporaries = human_bytes(self.compiled.arguments), human_bytes(self.compiled.temporaries)
            rows.append(
                (f"compiled: {arguments} arguments + {temporaries} temporaries", "", _human(self.compiled.total))
            )
        if self.limit is not None:
            left = self.limit - self.total
            rows.append((f"{self.topology.kind} has, and is left", human_bytes(self.limit), _human(left)))
        host = sum(self.estimated.host.values())
        if self.compiled and self.compiled.host_arguments + self.compiled.host_temporaries:
            host = self.compiled.host_arguments + self.compiled.host_temporaries
        if host:
            each = self.topology.devices // self.topology.hosts
            rows.append((f"in host memory: for a device, on a host of {each}", human_bytes(host), _human(host * each)))
        width = max(len(label) for label, _, _ in rows)
        return "\n".join(f"{label.ljust(width)}  {a.rjust(10)}  {b.rjust(11)}".rstrip() for label, a, b in rows)


def _human(size: int) -> str:
    return human_bytes(size) if size >= 0 else f"−{human_bytes(-size)}"


def estimate_memory(step: TrainStep, batch: Any, platform: str = "cpu") -> Estimate:
    """What `step` holds, from its trace: nothing is compiled, and the plan's mesh needs no devices.

    Args:
        step: From `make_train_step`.
        batch: Arrays, or `jax.ShapeDtypeStruct`s.
        platform: Whose compiler it will be: `"tpu"`, `"cuda"` or `"cpu"`.
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
    buffers += _gathered_results(program.inputs[:count], program.outputs[:count], axes, 1 + max(b.end for b in buffers))
    peak = peak_buffers(buffers)
    names = _Names(plan, program)
    now = dict.fromkeys(("grads", "activations", "stages", "logits", "collectives", "temporaries"), 0)
    for buffer in peak:
        if not buffer.on_host:
            now[names.category(buffer)] += buffer.bytes
    now["temporaries"] += heap_bytes(buffers) - sum(now.values())  # the holes between buffers
    saved: dict[str, int] = {}
    arguments, host = _arguments(plan, batch, axes)
    for buffer in saved_activations(program, axes):
        if buffer.on_host:
            host["activations"] = host.get("activations", 0) + buffer.bytes
        elif names.category(buffer) == "activations":
            saved[buffer.name] = saved.get(buffer.name, 0) + buffer.bytes
    held = arguments | {
        "grads": sum(leaf.bytes_per_device for leaf in plan.gradients),
        "activations": sum(saved.values()),
        "stages": sum(b.bytes for b in buffers if names.category(b) == "stages"),
        "logits": names.logits(axes),
        "collectives": now["collectives"],
        "temporaries": now["temporaries"],
    }
    return Estimate(held, arguments | now, saved, host)


def _gathered_results(
    donated: Sequence[TracedValue], results: Sequence[TracedValue], axes: Mapping[str, int], moment: int
) -> list[Buffer]:
    """Results that are computed in parts and returned whole, as parameters of ZeRO stages 1 and 2.

    XLA cannot gather into a donated argument: all of them are there once more when the step ends.
    """
    return [
        Buffer("gathered", "", old.shape, old.bytes(axes), False, moment, moment)
        for old, new in zip(donated, results, strict=True)
        if not old.on_host and new.bytes(axes) < old.bytes(axes)
    ]


def read_memory(compiled: jax.stages.Compiled) -> Compiled | None:
    """What the compiler says of a program; None where the backend says nothing."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Compiled(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host_arguments=stats.host_argument_size_in_bytes,
        host_temporaries=stats.host_temp_size_in_bytes,
        peak=getattr(stats, "peak_memory_in_bytes", 0) or None,
    )


def _arguments(plan: ShardingPlan, batch: Any, axes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one device's arguments by category: on the device, and in host memory."""
    tables: dict[str, list[PlanEntry]] = {"params": list(plan.params), "master": [], "optimizer": []}
    tables["variables"] = list(plan.variables)
    for leaf in plan.optimizer_state:
        tables["master" if "master" in leaf.path.split("/") else "optimizer"].append(leaf)
    device, host = {}, {}
    for name, leaves in tables.items():
        device[name] = sum(leaf.bytes_per_device for leaf in leaves if leaf.memory_kind == "device")
        elsewhere = sum(leaf.bytes_per_device for leaf in leaves if leaf.memory_kind != "device")
        if elsewhere:
            host[name] = elsewhere
    values = [TracedValue(leaf.shape, leaf.dtype.itemsize) for leaf in jax.tree.leaves(batch)]
    for value, leaf in zip(values, jax.tree.leaves(batch), strict=True):
        place(value, leaf.sharding)
    return device | {"batch": sum(value.bytes(axes) for value in values)}, host


class _Names:
    """What a buffer is, by its shape and by where it comes from."""

    def __init__(self, plan: ShardingPlan, program: TracedProgram) -> None:
        self._params = {leaf.shape for leaf in plan.params if len(leaf.shape) > 1}
        self._logits = list(_named("logits", program))

    def category(self, buffer: Buffer) -> str:
        """The category of a buffer that is no argument."""
        if buffer.name == SLOTS:
            return "stages"
        if buffer.shape in {value.shape for value in self._logits}:
            return "logits"
        if buffer.kind in ("gathered", "converted"):
            return "collectives"
        if buffer.shape in self._params:  # a loop forward saves what it gathered, a loop backward makes gradients
            return "collectives" if buffer.kind == "saved" else "grads"
        return "activations" if buffer.kind == "saved" else "temporaries"

    def logits(self, axes: Mapping[str, int]) -> int:
        """The bytes of the array that the model marks as its logits."""
        return max((value.bytes(axes) for value in self._logits), default=0)


def _named(name: str, program: TracedProgram) -> Iterator[TracedValue]:
    """The values that a model marks so, wherever they are."""
    for operation in program.operations:
        yield from (value for value in operation.outputs if value.name == name)
        for body in operation.bodies:
            yield from _named(name, body)
