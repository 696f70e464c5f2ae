"""Audit of the collectives of a compiled step: a table, warnings, and an assertion for tests.

```python
with compiler_log() as log:
    compiled = step.compile(batch)
audit = audit_collectives(compiled, plan.mesh, log=log)
print(audit)
expect_collectives(audit, all_gather={"fsdp": {"bf16": 64_000_000}}, all_to_all=0)
```

Bytes are those on the wire: an all-reduce is twice its buffer (`spmd.analysis.collective_record`). Backends write some
collectives in other forms (`spmd.analysis.collectives`).
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import EllipsisType, MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from spmd.analysis.annotated import find_annotated
from spmd.analysis.causes import NO_RULE, add_causes
from spmd.analysis.collective_record import MIN_BYTES, Collective
from spmd.analysis.collectives import find_collectives
from spmd.analysis.hlo import HloModule, parse
from spmd.analysis.promises import broken_promises, find_promises
from spmd.errors import MeshError, Problem
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import read_names
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, slice_numbers
from spmd.training.step import TrainStep
from spmd.tree import human_bytes

Amount = int | EllipsisType
Expected = int | Mapping[str, Amount | Mapping[str, Amount]] | None
"""Bytes over all axes, or axes → bytes or dtype → bytes (`...` for any amount), or None for no expectation."""

LARGE = 2**20
"""Smallest payload of a collective that should run beside compute."""

MIN_SHARE = 0.01
"""Smallest share of a step's bytes for which a gather is reported."""

_REMATERIALIZATION = "Involuntary full rematerialization"

_EVEN = "experts have one pass, as with even load; those that follow with uneven load are not counted"

_Groups = Mapping[tuple[str, ...], list[Collective]]


@dataclasses.dataclass(frozen=True)
class CollectiveAudit:
    """Collectives of one compiled program, in execution order, and warnings; `print` shows tables.

    Attributes:
        mesh: Axis → size, of the axes larger than 1.
        slices: Axis → number of slices, of the axes that cross the slow network.
        broken: Transfers that are wider than the plan promises (`spmd.analysis.promises`).
    """

    mesh: Mapping[str, int]
    backend: str
    records: tuple[Collective, ...]
    warnings: tuple[Problem, ...]
    slices: Mapping[str, int]
    broken: tuple[Problem, ...] = ()

    def bytes(
        self, kind: str | None = None, axes: str | None = None, dtype: str | None = None, *, crossing: bool = False
    ) -> int:
        """Return the bytes that one device sends in one step, of all collectives or only of some.

        Those of a kind (`"all-gather"`), over exactly some axes (`"data+fsdp"`), of a dtype (`"bf16"`), or between
        slices (`crossing`).
        """
        over = axes and _in_order(axes, self.mesh)
        chosen = (r for r in self.records if dtype in (None, r.dtype) and (r.crosses or not crossing))
        return sum(r.bytes for r in chosen if kind in (None, r.kind) and over in (None, r.over))

    def slice_bytes(self) -> int:
        """Return the bytes that all devices of a slice together get from other slices in one step."""
        return sum(r.slice_bytes for r in self.records)

    def by_axes(self, *, crossing: bool = False) -> _Groups:
        """Return (kind, axes) → records that are executed, or only those between slices; the most bytes first."""
        chosen = (r for r in self.records if r.executions and (r.crosses or not crossing))
        return _grouped(chosen, lambda r: (r.kind, r.over))

    def __str__(self) -> str:
        # At most 120 columns wide.
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        parts = [f"mesh {axes}   {self.backend}   each device sends {human_bytes(self.bytes())} in each step"]
        if self.slices:
            axes = " ".join(f"{axis}={count}" for axis, count in self.slices.items())
            head = f"over the slow network, slices {axes}: {human_bytes(self.bytes(crossing=True))} in each step"
            head += f", {human_bytes(self.slice_bytes())} into each slice"
            parts.append("\n".join([head, *_lines(self.by_axes(crossing=True))]))
        if self.records:
            heading = ("sent", "kind", "over", "runs", "buffer")
            executed = [r for r in self.records if r.executions]
            by_source = _grouped(executed, lambda r: (r.kind, r.over, r.array or r.op_name, r.source))
            parts.append("\n".join(_lines(self.by_axes(), heading)))
            by_dtype = _grouped(executed, lambda r: (r.dtype, r.over))
            parts.append("\n".join(_lines(by_dtype, (heading[0], "dtype", *heading[2:]))))
            parts.append("\n".join(_lines(by_source, (*heading, "of", "at"))))
            if causes := _grouped((r for r in executed if r.cause), lambda r: (r.kind, r.over, str(r.cause))):
                parts.append("\n".join(_lines(causes, (*heading, "cause"))))
        notes = {f"{r.kind} is written as {r.written_as}" for r in self.records if r.written_as}
        in_vain = (r for r in self.records if r.kind == "all-reduce" and r.stands_for and r.payload >= MIN_BYTES)
        for (means, over), records in _grouped(in_vain, lambda r: (r.stands_for, r.over)).items():
            sent = human_bytes(sum(r.bytes for r in records))
            notes.add(f"of all-reduce over {over}, {sent} stand for {means}s, with twice their bytes")
        notes |= set(_overlaps(self.records)) if self.backend != "cpu" else set()
        notes |= {"≥: a loop of unknown length is counted once" for r in self.records if not r.is_counted}
        notes |= {_EVEN for r in self.records if not r.executions}
        if undecided := [r for r in self.records if r.cause and r.cause.kind == "none"]:
            sent = human_bytes(sum(r.bytes for r in undecided))
            notes.add(f"{NO_RULE}: the compiler chose {len(undecided)} collectives, {sent}; name activations there")
        notes |= {"?: in a branch, counted as always taken" for r in self.records if r.is_conditional}
        parts += ["\n".join(sorted(notes))] if notes else []
        broken = (f"BROKEN PROMISE: {promise}" for promise in self.broken)
        return "\n\n".join([*parts, *(f"warning: {warning}" for warning in self.warnings), *broken])

    def to_json(self) -> dict[str, Any]:
        """Return records and warnings as JSON values."""
        return {
            "mesh": dict(self.mesh),
            "backend": self.backend,
            "bytes": self.bytes(),
            "slices": dict(self.slices),
            "crossing_bytes": self.bytes(crossing=True),
            "slice_bytes": self.slice_bytes(),
            "dtype_bytes": {dtype: self.bytes(dtype=dtype) for dtype in sorted({r.dtype for r in self.records})},
            "collectives": [{**dataclasses.asdict(record), "bytes": record.bytes} for record in self.records],
            "warnings": [dataclasses.asdict(warning) for warning in self.warnings],
            "broken_promises": [dataclasses.asdict(promise) for promise in self.broken],
        }


def audit_collectives(
    program: jax.stages.Compiled | str | HloModule,
    mesh: AnyMesh,
    *,
    backend: str | None = None,
    log: Sequence[str] = (),
    slices: Mapping[str, int] | None = None,
    taken: Mapping[str, Fraction] = MappingProxyType({}),
    plan: ShardingPlan | None = None,
    jaxpr: Any = None,
) -> CollectiveAudit:
    """Read the collectives of a compiled program, or of its text, parsed or not.

    Args:
        mesh: Partition *i* is the *i*-th device of `mesh.devices.flat`.
        backend: By default that of the mesh's devices.
        log: From `compiler_log`.
        slices: Axis → number of slices that it spans.
        taken: How often a pipeline takes the branches of a tick: `TickTable.taken`.
        plan: The plan of the step, for the cause of each collective, and for broken promises.
        jaxpr: The traced step, `step.trace(batch).jaxpr`. With it, a collective of what is annotated right after has
            the annotation as its cause.

    Raises:
        MeshError: The program is for another number of devices.
    """
    if not isinstance(program, HloModule):
        program = parse(program if isinstance(program, str) else program.as_text() or "")
    devices, slices = program.partitions * program.replicas, slices or {}
    per_slice = mesh.size // math.prod(slices.values())  # a TPU has one program for each slice
    if devices not in (1, mesh.size, per_slice):
        problem = Problem("mesh", "has another number of devices", f"the program {devices}, the mesh {mesh.size}")
        raise MeshError("The program cannot be audited:", [problem])
    if backend is None:
        backend = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else "an unknown backend"
    numbers = slice_numbers(mesh.shape, slices)
    records = find_collectives(program, mesh.shape, cpu=backend == "cpu", slices=numbers, taken=taken)
    if plan:
        records = add_causes(records, plan, {} if jaxpr is None else find_annotated(jaxpr))
    axes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    crossing = {axis: count for axis, count in slices.items() if count > 1}
    broken = tuple(broken_promises(records, find_promises(plan))) if plan else ()
    return CollectiveAudit(axes, backend, records, tuple(_warnings(records, backend, log)), crossing, broken)


def _warnings(records: Sequence[Collective], backend: str, log: Sequence[str]) -> Iterator[Problem]:
    total = sum(record.bytes for record in records)
    for record in records:
        where = record.array or record.op_name or record.instruction
        where += f" ({record.source})" if record.source else ""
        amount = f"{record.kind} over {record.over}: {record.executions} × {human_bytes(record.payload)}"
        axes = record.axes or ()
        # Of a collective that the compiler made of several, the name is those of all, with colons between them.
        operations = {name.rpartition("/")[2] for name in read_names(record.op_name)}
        is_float = record.dtype[0] in "bf"
        if record.kind == "all-gather" and record.array.startswith("params/"):
            if "tensor" in axes and record.bytes >= MIN_SHARE * total:
                fix = "split the activation that it meets, so that each device needs its own part"
                yield Problem(where, "is a parameter gathered over tensor", amount, fix)
        elif record.kind == "all-gather" and not record.array and "all_gather" not in operations and is_float:
            # A rule's constraint may gather within an example on purpose, but never all examples.
            inner = () if "sharding_constraint" in operations else ("sequence", "tensor")
            if {*BATCH_AXES, *inner}.intersection(axes) and record.bytes >= MIN_SHARE * total:
                fix = "name it in the rule table, with the axes it arrives with"
                yield Problem(where, "is no parameter and is made whole on every device", amount, fix)
        elif record.kind == "all-reduce" and record.stands_for and backend != "tpu":
            # On TPUs it is the compiler's choice for whole slices and small arrays, so the tables have a note instead.
            fix = "constrain the sum to the sharding of its use right where it is made"
            yield Problem(
                where, f"is an all-reduce where {record.stands_for} would send half of the bytes", amount, fix
            )
        if not record.is_counted:
            yield Problem(where, "runs in a loop of unknown length", amount, "multiply by what you know of the loop")
    for line in dict.fromkeys(line for line in log if _REMATERIALIZATION in line):
        detail = line.partition(_REMATERIALIZATION)[2].strip(" .")
        fix = "give the array in between a sharding that leads from the first to the second in steps"
        yield Problem("the partitioner", "copies an array whole to every device", detail, fix)


def expect_collectives(
    step: CollectiveAudit | TrainStep,
    batch: Any = None,
    *,
    tolerance: float = 0.01,
    ignore_below: int = MIN_BYTES,
    all_gather: Expected = None,
    all_reduce: Expected = None,
    reduce_scatter: Expected = None,
    all_to_all: Expected = None,
    ragged_all_to_all: Expected = None,
    collective_permute: Expected = None,
    collective_broadcast: Expected = None,
) -> CollectiveAudit:
    """Assert the collectives of a step, and return its audit; kinds that are not named are not checked.

    `step` is an audit or a train step; `batch` has arrays or `jax.ShapeDtypeStruct`s, by default of the shapes that the
    step was last compiled for. An expectation is the bytes that one device sends in a step over all axes, 0 for none at
    all; or a dictionary from axes (`"fsdp"`, `"data+fsdp"`) to bytes, or to `...` for any amount: then exactly these
    axes occur; or to a dictionary from dtypes as XLA names them (`"s8"`, `"bf16"`) to bytes, with no other dtype over
    these axes. An all-reduce is twice its buffer, others are their whole array once, whatever the size of the group.
    Bytes may differ by `tolerance`, relative to those expected; collectives with a payload of fewer than `ignore_below`
    bytes do not count. XLA:CPU writes reduce-scatters as all-reduces, which count as reduce-scatters there, and only
    there.

    Raises:
        AssertionError: The message lists all differences, and the tables.
    """
    if isinstance(step, TrainStep):
        assert batch is not None or step.programs, "the step is not compiled yet: give a batch"
        program = step.programs[-1] if batch is None else step.compile(batch)
        step = audit_collectives(program, step.plan.mesh, plan=step.plan)
    expected = {
        "all-gather": all_gather,
        "all-reduce": all_reduce,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
        "ragged-all-to-all": ragged_all_to_all,
        "collective-permute": collective_permute,
        "collective-broadcast": collective_broadcast,
    }
    wrong: list[str] = []
    for kind, wanted in expected.items():
        if wanted is None:
            continue
        records = [record for record in step.records if record.kind == kind and record.payload >= ignore_below]
        named = {"all axes": wanted} if isinstance(wanted, int) else wanted
        named = {_in_order(axes, step.mesh): amounts for axes, amounts in named.items()}
        limits: dict[str, Amount] = {}
        for axes, amounts in named.items():
            by_dtype = amounts.items() if isinstance(amounts, Mapping) else [("", amounts)]
            limits |= {f"{axes} in {dtype}" if dtype else axes: amount for dtype, amount in by_dtype}
        found = collections.Counter[str]()
        for record in records:
            axes = "all axes" if isinstance(wanted, int) else record.over
            found[f"{axes} in {record.dtype}" if isinstance(named.get(axes), Mapping) else axes] += record.bytes
        for over in {**limits, **found}:
            amount, limit = found[over], limits.get(over, 0)
            if isinstance(limit, EllipsisType):
                wrong += [f"{kind} over {over}: expected, and there is none"] if amount == 0 else []
            elif abs(amount - limit) > tolerance * limit:
                wrong.append(f"{kind} over {over}: {amount:,} bytes in each step; expected {limit:,} ± {tolerance:.2%}")
        if any(limit is not ... for limit in limits.values()):
            unknown = [record.instruction for record in records if not record.is_counted]
            wrong += [f"{kind}: {name} runs in a loop of unknown length" for name in unknown]
    if wrong:
        raise AssertionError("\n".join(["The step's collectives are not as expected:", *wrong, "", str(step)]))
    return step


def _overlaps(records: Sequence[Collective]) -> Iterator[str]:
    for (kind,), large in _grouped((r for r in records if r.payload >= LARGE), lambda r: (r.kind,)).items():
        runs, beside = sum(r.executions for r in large), sum(r.executions * r.is_overlapped for r in large)
        cycles = sum(r.executions * r.overlapped_cycles for r in large)
        each = f", {cycles / beside:,.0f} cycles each" if cycles else ""
        yield f"of {runs} {kind}s of {human_bytes(LARGE)} or more, {beside} run beside compute{each}"


def _in_order(axes: str, mesh: Mapping[str, int]) -> str:
    """Return axes as text in the order of the mesh."""
    names = axes.split("+")
    known = [axis for axis in mesh if axis in names]
    return "+".join(known) if len(known) == len(names) else axes


def _grouped(records: Iterable[Collective], key: Callable[[Collective], tuple[str, ...]]) -> _Groups:
    groups = collections.defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return dict(sorted(groups.items(), key=lambda item: (-sum(r.bytes for r in item[1]), item[0])))


def _row(records: list[Collective], kind: str, over: str, *rest: str) -> tuple[str, ...]:
    mark = "≥ " * any(not r.is_counted for r in records) + "? " * any(r.is_conditional for r in records)
    sizes = sorted({r.payload for r in records})
    each = human_bytes(sizes[0]) + (f" to {human_bytes(sizes[-1])}" if len(sizes) > 1 else "")
    total, runs = sum(r.bytes for r in records), sum(r.executions for r in records)
    return (mark + human_bytes(total), kind, over, str(runs), each, *rest)


def _lines(groups: _Groups, *heading: tuple[str, ...]) -> list[str]:
    """Align columns of 120 characters: bytes and runs to the right, text to the left, the end of arrays' names."""
    rows = [*heading, *(_row(records, *key) for key, records in groups.items())]
    if heading and heading[0][-1] == "cause":  # buffers are in the other tables
        rows = [(*row[:4], *row[5:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if len(widths) > 6:
        widths[5] = max(12, min(widths[5], 120 - sum(widths[:5]) - widths[6] - 2 * len(widths) + 2))
    lines = []
    for row in rows:
        cut = [cell if len(cell) <= width else "…" + cell[1 - width :] for cell, width in zip(row, widths, strict=True)]
        cells = [cut[i].rjust(width) if i in (0, 3) else cut[i].ljust(width) for i, width in enumerate(widths)]
        lines.append("  ".join(cells).rstrip())
    return [line if len(line) <= 120 else f"{line[:119]}…" for line in lines]
