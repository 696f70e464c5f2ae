"""Audit of the collectives of a compiled step: a table, warnings, and an assertion for tests.

```python
with compiler_log() as log:
    compiled = step.compile(batch)
audit = audit_collectives(compiled, plan.mesh, log=log)
print(audit)
expect_collectives(audit, all_gather={"fsdp": {"bf16": 64_000_000}}, all_to_all=0)
```

Bytes are those on the wire: an all-reduce is twice its buffer (`spmd.analysis.collective_record`).
Backends write some collectives in other forms (`spmd.analysis.collectives`).
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import EllipsisType, MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from spmd.analysis.annotated import Annotated, find_annotated
from spmd.analysis.causes import NO_RULE, add_causes
from spmd.analysis.collective_record import MIN_BYTES, Collective
from spmd.analysis.collectives import find_collectives
from spmd.analysis.comm_dtypes import comm_dtype_checks, wider_transfers
from spmd.analysis.hlo import HloModule, parse
from spmd.distributed.native_output import REMATERIALIZATION
from spmd.errors import MeshError, Problem
from spmd.model_interface.kernels import LOOKUP
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.plan.scopes import read_names
from spmd.sharding.dims import spec_dims
from spmd.sharding.mesh import AXES, BATCH_AXES, TOKEN_AXES, AnyMesh, nontrivial_axes, slice_numbers
from spmd.sharding.rules import spec_text
from spmd.training.step import TrainStep
from spmd.tree import human_bytes

Amount = int | EllipsisType
Expected = int | Mapping[str, Amount | Mapping[str, Amount]] | None
"""Bytes over all axes, or axes → bytes or dtype → bytes (`...` for any amount).

None for no expectation.
"""

LARGE = 2**20
"""Smallest payload of a collective that should run beside compute."""

MIN_SHARE = 0.01
"""Smallest share of a step's bytes for which a gather is reported."""

_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[[\d,]*\]")
_CHANGE = re.compile(r"from sharding (\{.*?\}) to (\{.*?\}) efficiently")

_WIDTH = 120
"""Columns of the tables."""
_SENT, _RUNS, _BUFFER, _OF = 0, 3, 4, 5
"""Numbers of columns in the tables."""

_ALL_AXES = "all axes"
_CONSTRAINTS = ("reshard", "sharding_constraint")
"""Operations by which a program decides a layout."""

_EVEN = (
    "experts have one pass, as with even load; those that follow with uneven load are not counted"
)

_Groups = Mapping[tuple[str, ...], list[Collective]]


@dataclasses.dataclass(frozen=True)
class CollectiveAudit:
    """Collectives of one compiled program, in execution order, and warnings; `print` shows tables.

    Attributes:
        mesh: Axis → size, of the axes larger than 1.
        slices: Axis → number of slices, of the axes that cross the slow network.
        broken: Transfers that are wider than the plan promises (`spmd.analysis.comm_dtypes`).
    """

    mesh: Mapping[str, int]
    backend: str
    records: tuple[Collective, ...]
    warnings: tuple[Problem, ...]
    slices: Mapping[str, int]
    broken: tuple[Problem, ...] = ()

    def bytes(
        self,
        kind: str | None = None,
        axes: str | None = None,
        dtype: str | None = None,
        *,
        crossing: bool = False,
    ) -> int:
        """Return the bytes sent by one device per step, by all collectives or a selection.

        Select a kind (`"all-gather"`), exact axes (`"data+fsdp"`), a dtype (`"bf16"`), or only
        transfers between slices (`crossing`).
        """
        over = axes
        if axes:
            over = _in_order(axes, self.mesh)
        total = 0
        for record in self.records:
            is_of_kind = kind in (None, record.kind) and dtype in (None, record.dtype)
            is_there = over in (None, record.over) and (record.crosses or not crossing)
            if is_of_kind and is_there:
                total += record.bytes
        return total

    def slice_bytes(self) -> int:
        """Return the bytes per step from other slices to all devices of one slice together."""
        return sum(record.slice_bytes for record in self.records)

    def by_axes(self, *, crossing: bool = False) -> _Groups:
        """Return (kind, axes) → executed records, the most bytes first.

        With `crossing` only the records of transfers between slices.
        """
        chosen = []
        for record in self._executed():
            if record.crosses or not crossing:
                chosen.append(record)
        return _grouped(chosen, lambda r: (r.kind, r.over))

    def _executed(self) -> list[Collective]:
        return [record for record in self.records if record.executions]

    def __str__(self) -> str:
        parts = [self._title()]
        if self.slices:
            parts.append(self._slow_table())
        if self.records:
            parts += self._tables()
        notes = sorted(self._notes())
        if notes:
            parts.append("\n".join(notes))
        for warning in self.warnings:
            parts.append(f"warning: {warning}")
        for problem in self.broken:
            parts.append(f"WIDER THAN PLANNED: {problem}")
        return "\n\n".join(parts)

    def _title(self) -> str:
        axes = _sizes_text(self.mesh) or "one device"
        sent = human_bytes(self.bytes())
        return f"mesh {axes}   {self.backend}   each device sends {sent} in each step"

    def _slow_table(self) -> str:
        """Return a table of the transfers between slices."""
        sent = human_bytes(self.bytes(crossing=True))
        head = f"over the slow network, slices {_sizes_text(self.slices)}: {sent} in each step"
        head += f", {human_bytes(self.slice_bytes())} into each slice"
        return "\n".join([head, *_lines(_rows(self.by_axes(crossing=True)))])

    def _tables(self) -> Iterator[str]:
        """Yield tables by axes, dtype, moved array and cause."""
        heading = ("sent", "kind", "over", "runs", "buffer")
        executed = self._executed()
        yield "\n".join(_lines([heading, *_rows(self.by_axes())]))
        by_dtype = _grouped(executed, lambda r: (r.dtype, r.over))
        yield "\n".join(_lines([("sent", "dtype", "over", "runs", "buffer"), *_rows(by_dtype)]))
        by_source = _grouped(executed, lambda r: (r.kind, r.over, r.array or r.op_name, r.source))
        rows = [(*heading, "of", "at"), *_rows(by_source)]
        yield "\n".join(_lines(rows, stretched=_OF))
        known = []
        for record in executed:
            if record.cause:
                known.append(record)
        by_cause = _grouped(known, lambda r: (r.kind, r.over, str(r.cause)))
        if by_cause:
            rows = [(*heading, "cause"), *_rows(by_cause)]
            # buffers are in the other tables
            yield "\n".join(_lines([(*row[:_BUFFER], *row[_BUFFER + 1 :]) for row in rows]))

    def _notes(self) -> set[str]:
        """Return the notes below the tables."""
        notes: set[str] = set()
        for record in self.records:
            notes.update(_notes_on(record))
        notes.update(_doubled(self.records))
        if self.backend != "cpu":
            notes.update(_overlaps(self.records))
        undecided = []
        for record in self.records:
            if record.cause and record.cause.kind == "none":
                undecided.append(record)
        if undecided:
            chosen = f"{len(undecided)} collectives, {human_bytes(_total(undecided))}"
            notes.add(f"{NO_RULE}: the compiler chose {chosen}; name activations there")
        return notes

    def to_json(self) -> dict[str, Any]:
        """Return records and warnings as JSON values."""
        dtype_bytes = {}
        for dtype in sorted({record.dtype for record in self.records}):
            dtype_bytes[dtype] = self.bytes(dtype=dtype)
        collectives = []
        for record in self.records:
            collectives.append({**dataclasses.asdict(record), "bytes": record.bytes})
        return {
            "mesh": dict(self.mesh),
            "backend": self.backend,
            "bytes": self.bytes(),
            "slices": dict(self.slices),
            "crossing_bytes": self.bytes(crossing=True),
            "slice_bytes": self.slice_bytes(),
            "dtype_bytes": dtype_bytes,
            "collectives": collectives,
            "warnings": _problems_json(self.warnings),
            "wider_transfers": _problems_json(self.broken),
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
        jaxpr: The traced step, `step.trace(batch).jaxpr`. With it, a transfer of an operand of an
            annotated activation has the annotation as its cause.

    Raises:
        MeshError: The program is for another number of devices.
    """
    module = _parsed(program)
    slices = slices or {}
    _check_devices(module, mesh, slices)
    if backend is None:
        backend = _backend_of(mesh)
    records = find_collectives(
        module,
        mesh.shape,
        cpu=backend == "cpu",
        slices=slice_numbers(mesh.shape, slices),
        taken=taken,
    )
    broken: tuple[Problem, ...] = ()
    if plan:
        annotated: Annotated = {}
        if jaxpr is not None:
            annotated = find_annotated(jaxpr)
        records = add_causes(records, plan, annotated)
        broken = tuple(wider_transfers(records, comm_dtype_checks(plan)))
    return CollectiveAudit(
        mesh=nontrivial_axes(mesh.shape),
        backend=backend,
        records=records,
        warnings=(*_warnings(records, backend), *_copied_arrays(log, plan)),
        slices=nontrivial_axes(slices),
        broken=broken,
    )


def _parsed(program: jax.stages.Compiled | str | HloModule) -> HloModule:
    if isinstance(program, HloModule):
        return program
    if isinstance(program, str):
        return parse(program)
    return parse(program.as_text() or "")


def _check_devices(program: HloModule, mesh: AnyMesh, slices: Mapping[str, int]) -> None:
    """Raise `MeshError` for a program for another number of devices."""
    devices = program.partitions * program.replicas
    per_slice = mesh.size // math.prod(slices.values())  # a TPU has one program for each slice
    if devices in (1, mesh.size, per_slice):
        return
    problem = Problem(
        "mesh",
        "has another number of devices",
        f"the program {devices}, the mesh {mesh.size}",
    )
    raise MeshError("Audit of collectives not possible:", [problem])


def _backend_of(mesh: AnyMesh) -> str:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return "an unknown backend"


def _warnings(records: Sequence[Collective], backend: str) -> Iterator[Problem]:
    """Yield warnings on oversized and on uncounted collectives."""
    total = _total(records)
    for record in records:
        if record.kind == "all-gather" and record.bytes >= MIN_SHARE * total:
            yield from _gather_warnings(record)
        elif record.kind == "all-reduce" and record.equivalent_kind and backend != "tpu":
            # A TPU's compiler chooses all-reduces for whole slices and small arrays, so the tables
            # have a note instead.
            yield Problem(
                _where(record),
                f"is an all-reduce where {record.equivalent_kind} would send half of the bytes",
                _amount(record),
                "constrain the sum to the sharding of its use right where it is made",
            )
        if not record.is_counted:
            yield Problem(
                _where(record),
                "runs in a loop of unknown length",
                _amount(record),
                "multiply by what you know of the loop",
            )


def _copied_arrays(log: Sequence[str], plan: ShardingPlan | None) -> Iterator[Problem]:
    """Yield a warning for each array that the partitioner copies whole to change its sharding.

    It may be the rows of a lookup: they arrive split by features, and are used split by examples.
    """
    what = "copies an array whole to every device, to change its sharding"
    for array, detail in _copies(log).items():
        cause = ""
        fix = "give the array in between a sharding that leads from one to the other in steps"
        table = _looked_up(array, plan)
        if table:
            cause = (
                f", rows of the lookup {table.path}, whose features {spec_text(table.spec)} splits"
            )
            fix = f'split the rows of {table.path}, such as P("fsdp"), not its features'
        yield Problem("the partitioner", what, f"{array}{cause}: {detail}", fix)


def _copies(log: Sequence[str]) -> dict[str, str]:
    """Return array → the change of its sharding, in lines of XLA about copies."""
    found: dict[str, str] = {}
    for line in log:
        _, said, rest = line.partition(REMATERIALIZATION)
        if not said:
            continue
        array = _ARRAY.search(rest)
        shardings = _CHANGE.search(rest)
        detail = rest.strip(" .")
        if shardings:
            detail = f"from {shardings[1]} to {shardings[2]}"
        found.setdefault(array[0] if array else "an array", detail)
    return found


def _looked_up(array: str, plan: ShardingPlan | None) -> PlanEntry | None:
    """Return the table whose rows an array may have; None if there is no such table.

    Its features are split by axes of the batch alone.
    """
    if plan is None:
        return None
    roles = plan.model.info().no_matrix
    widths = re.findall(r"\d+", array.partition("[")[2])
    for entry in plan.params:
        if roles.get(entry.path) != LOOKUP:
            continue
        *_, features = spec_dims(entry.spec, len(entry.shape), AXES)
        is_split = features and set(features) <= set(TOKEN_AXES)
        if is_split and str(entry.shape[-1]) in widths:
            return entry
    return None


def _gather_warnings(record: Collective) -> Iterator[Problem]:
    """Yield a warning on a parameter gathered over tensor, or on a split activation made whole."""
    axes = record.axes or ()
    if record.array.startswith("params/"):
        if "tensor" in axes:
            yield Problem(
                _where(record),
                "is a parameter gathered over tensor",
                _amount(record),
                "split the activation that it meets, so that each device needs its own part",
            )
        return
    # A collective that the compiler combined from several has all their names, joined by colons.
    operations = {name.rpartition("/")[2] for name in read_names(record.op_name)}
    is_float = record.dtype[0] in "bf"
    if record.array or "all_gather" in operations or not is_float:
        return
    # A rule's constraint may gather within an example on purpose, but never all examples.
    unwanted = set(BATCH_AXES)
    if operations.isdisjoint(_CONSTRAINTS):
        unwanted = {*axes} - {"pipe"}
    if unwanted.intersection(axes):
        yield Problem(
            _where(record),
            "is no parameter and is made whole on every device",
            _amount(record),
            "name it in the rule table, with the axes it arrives with",
        )


def _where(record: Collective) -> str:
    """Return the name of a collective in a warning, with its source line."""
    where = record.array or record.op_name or record.instruction
    if record.source:
        where += f" ({record.source})"
    return where


def _amount(record: Collective) -> str:
    payload = human_bytes(record.payload)
    return f"{record.kind} over {record.over}: {record.executions} × {payload}"


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
    """Assert the collectives of a step, and return its audit; kinds not named are not checked.

    `step` is an audit or a train step; `batch` has arrays or `jax.ShapeDtypeStruct`s, by default of
    the shapes that the step was last compiled for. An expectation is the bytes that one device
    sends in a step over all axes, 0 for none at all; or a dictionary from axes (`"fsdp"`,
    `"data+fsdp"`) to bytes, or to `...` for any amount: then exactly these axes occur; or to a
    dictionary from dtypes as XLA names them (`"s8"`, `"bf16"`) to bytes, with no other dtype over
    these axes. An all-reduce is twice its buffer, others are their whole array once, whatever the
    size of the group. Bytes may differ by `tolerance`, relative to those expected; collectives with
    a payload of fewer than `ignore_below` bytes do not count. XLA:CPU writes reduce-scatters as
    all-reduces, which count as reduce-scatters there, and only there.

    Raises:
        AssertionError: The message lists all differences, and the tables.
    """
    audit = _audit_of(step, batch)
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
        records = []
        for record in audit.records:
            if record.kind == kind and record.payload >= ignore_below:
                records.append(record)
        wrong += _differences(kind, wanted, records, audit.mesh, tolerance)
    if wrong:
        title = "The step's collectives are not as expected:"
        raise AssertionError("\n".join([title, *wrong, "", str(audit)]))
    return audit


def _audit_of(step: CollectiveAudit | TrainStep, batch: Any) -> CollectiveAudit:
    """Return an audit as it is, or the audit of a compiled step."""
    if isinstance(step, CollectiveAudit):
        return step
    assert batch is not None or step.programs, "the step is not compiled yet: give a batch"
    program = step.programs[-1] if batch is None else step.compile(batch)
    return audit_collectives(program, step.plan.mesh, plan=step.plan)


def _differences(
    kind: str,
    wanted: int | Mapping[str, Amount | Mapping[str, Amount]],
    records: Sequence[Collective],
    mesh: Mapping[str, int],
    tolerance: float,
) -> Iterator[str]:
    """Yield a line for each difference between the records of one kind and their expectation."""
    named: dict[str, Amount | Mapping[str, Amount]] = {}
    if isinstance(wanted, int):
        named[_ALL_AXES] = wanted
    else:
        for axes, amounts in wanted.items():
            named[_in_order(axes, mesh)] = amounts
    limits = _limits(named)
    found = _sent(records, named)
    for over in {**limits, **found}:
        amount = found[over]
        limit = limits.get(over, 0)
        if isinstance(limit, EllipsisType):
            if amount == 0:
                yield f"{kind} over {over}: expected, and there is none"
        elif abs(amount - limit) > tolerance * limit:
            allowed = f"{limit:,} ± {tolerance:.2%}"
            yield f"{kind} over {over}: {amount:,} bytes in each step; expected {allowed}"
    if any(limit is not ... for limit in limits.values()):
        for record in records:
            if not record.is_counted:
                yield f"{kind}: {record.instruction} runs in a loop of unknown length"


def _sent(
    records: Iterable[Collective], named: Mapping[str, Amount | Mapping[str, Amount]]
) -> collections.Counter[str]:
    """Return axes → bytes sent, for axes with expectations by dtype: axes and dtype → bytes."""
    found = collections.Counter[str]()
    for record in records:
        over = record.over
        if _ALL_AXES in named:
            over = _ALL_AXES
        if isinstance(named.get(over), Mapping):
            over = f"{over} in {record.dtype}"
        found[over] += record.bytes
    return found


def _limits(named: Mapping[str, Amount | Mapping[str, Amount]]) -> dict[str, Amount]:
    """Return axes → expected bytes, with expectations by dtype: axes and dtype → bytes."""
    limits: dict[str, Amount] = {}
    for axes, amounts in named.items():
        if not isinstance(amounts, Mapping):
            limits[axes] = amounts
            continue
        for dtype, amount in amounts.items():
            limits[f"{axes} in {dtype}"] = amount
    return limits


def _notes_on(record: Collective) -> Iterator[str]:
    """Yield notes on one record: its form, a loop of unknown length, a conditional branch."""
    if record.hlo_form:
        yield f"{record.kind} is written as {record.hlo_form}"
    if not record.is_counted:
        yield "≥: a loop of unknown length is counted once"
    if not record.executions:
        yield _EVEN
    if record.is_conditional:
        yield "?: in a branch, counted as always taken"


def _doubled(records: Iterable[Collective]) -> Iterator[str]:
    """Yield notes on all-reduces in place of collectives with half of their bytes."""
    doubled = []
    for record in records:
        if record.kind == "all-reduce" and record.equivalent_kind and record.payload >= MIN_BYTES:
            doubled.append(record)
    groups = _grouped(doubled, lambda r: (r.equivalent_kind, r.over))
    for (means, over), group in groups.items():
        sent = human_bytes(_total(group))
        yield f"of all-reduce over {over}, {sent} stand for {means}s, with twice their bytes"


def _overlaps(records: Iterable[Collective]) -> Iterator[str]:
    """Yield notes on large collectives of each kind: how many of them run beside compute."""
    large = []
    for record in records:
        if record.payload >= LARGE:
            large.append(record)
    for (kind,), group in _grouped(large, lambda r: (r.kind,)).items():
        runs = beside = cycles = 0
        for record in group:
            runs += record.executions
            beside += record.executions * record.is_overlapped
            cycles += record.executions * record.overlapped_cycles
        text = f"of {runs} {kind}s of {human_bytes(LARGE)} or more, {beside} run beside compute"
        if cycles:
            text += f", {cycles / beside:,.0f} cycles each"
        yield text


def _in_order(axes: str, mesh: Mapping[str, int]) -> str:
    """Return axes as text in the order of the mesh."""
    names = axes.split("+")
    known = [axis for axis in mesh if axis in names]
    if len(known) < len(names):
        return axes
    return "+".join(known)


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def _problems_json(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(problem) for problem in problems]


def _total(records: Iterable[Collective]) -> int:
    """Return the bytes sent by one device per step."""
    return sum(record.bytes for record in records)


def _grouped(
    records: Iterable[Collective], key: Callable[[Collective], tuple[str, ...]]
) -> _Groups:
    """Group records by a key; the group with the most bytes is first."""
    groups = collections.defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return dict(sorted(groups.items(), key=lambda item: (-_total(item[1]), item[0])))


def _row(records: list[Collective], kind: str, over: str, *rest: str) -> tuple[str, ...]:
    """Return the cells of one group: bytes, kind, axes, executions, buffers, and others."""
    mark = ""
    if not all(record.is_counted for record in records):
        mark += "≥ "
    if any(record.is_conditional for record in records):
        mark += "? "
    runs = 0
    sizes = set()
    for record in records:
        runs += record.executions
        sizes.add(record.payload)
    each = human_bytes(min(sizes))
    if len(sizes) > 1:
        each += f" to {human_bytes(max(sizes))}"
    return (mark + human_bytes(_total(records)), kind, over, str(runs), each, *rest)


def _rows(groups: _Groups) -> list[tuple[str, ...]]:
    """Return the cells of each group."""
    return [_row(records, *key) for key, records in groups.items()]


def _lines(rows: Sequence[Sequence[str]], stretched: int | None = None) -> list[str]:
    """Align the rows of a table in lines of at most 120 characters.

    Args:
        stretched: A column that gets the remaining width.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if stretched is not None:
        others = sum(widths) - widths[stretched] + 2 * (len(widths) - 1)
        widths[stretched] = max(12, min(widths[stretched], _WIDTH - others))
    lines = []
    for row in rows:
        line = _line(row, widths)
        if len(line) > _WIDTH:
            line = f"{line[: _WIDTH - 1]}…"
        lines.append(line)
    return lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Align one row: bytes and runs to the right, text to the left; long names keep their end."""
    cells = []
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        if len(cell) > width:
            cell = "…" + cell[1 - width :]
        if column in (_SENT, _RUNS):
            cells.append(cell.rjust(width))
        else:
            cells.append(cell.ljust(width))
    return "  ".join(cells).rstrip()
