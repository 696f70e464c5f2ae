"""What a compiled step sends between devices: a table, warnings, and an assertion for tests.

```python
with compiler_log() as log:
    compiled = step.compile(batch)
audit = audit_collectives(compiled, plan.mesh, log=log)
print(audit)
expect_collectives(audit, all_gather={"fsdp": 64_000_000}, all_to_all=0)
```

What counts as payload, and what backends write in place of something else, stands in `spmd.analysis.collectives`.
"""

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from spmd.analysis.collectives import Collective, find_collectives
from spmd.analysis.hlo import parse
from spmd.errors import MeshError, Problem
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, slice_numbers
from spmd.train.step import TrainStep
from spmd.tree import human_bytes

Expected = int | Mapping[str, int | EllipsisType] | None
"""Bytes over all axes, or axes → bytes (`...` for any amount), or None for no opinion."""

SMALL = 1024
"""Bytes of one execution: below it, what a step sends is the loss and its like, which no one plans."""

WORTH_A_WARNING = 0.01
"""The part of all bytes of a step that a gathered activation must have to be warned of."""

REMATERIALIZATION = "Involuntary full rematerialization"

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True)
class CollectiveAudit:
    """All collectives of one compiled program, and what is wrong with them; `print` shows the table.

    Attributes:
        mesh: Axis → size, of those axes that are larger than 1.
        backend: The platform it was compiled for, as far as known.
        records: In the order in which the program runs them.
        warnings: What costs more than it should.
        slices: Axis → how many times it crosses the slow network, of those that do.
    """

    mesh: Mapping[str, int]
    backend: str
    records: tuple[Collective, ...]
    warnings: tuple[Problem, ...]
    slices: Mapping[str, int]

    def bytes(self, kind: str | None = None, axes: str | None = None, *, crossing: bool = False) -> int:
        """Bytes of one step on one device.

        Args:
            kind: Of this kind only, such as `"all-gather"`.
            axes: Over exactly these axes only, such as `"fsdp"` or `"data+fsdp"`.
            crossing: Only of collectives whose groups have devices in several slices.
        """
        over = axes and _in_order(axes, self.mesh)
        chosen = (r for r in self.records if r.crosses or not crossing)
        return sum(r.bytes for r in chosen if kind in (None, r.kind) and over in (None, r.over))

    def crossing(self) -> str:
        """What goes over the slow network: a line, and one for each kind and axes; nothing where there is none."""
        if not self.slices:
            return ""
        named = " ".join(f"{axis}={count}" for axis, count in self.slices.items())
        lines = [f"over the slow network, slices {named}: {human_bytes(self.bytes(crossing=True))} in each step"]
        groups = _grouped([r for r in self.records if r.crosses], lambda r: (r.kind, r.over))
        rows = [_row(records, *key) for key, records in groups.items()]
        return "\n".join([*lines, *([_aligned(rows)] if rows else [])])

    def by_axes(self) -> dict[tuple[str, str], list[Collective]]:
        """(kind, axes) → records, the most bytes first."""
        return _grouped(self.records, lambda r: (r.kind, r.over))

    def by_source(self) -> dict[tuple[str, str, str, str], list[Collective]]:
        """(kind, axes, what is moved, where in the source) → records, the most bytes first."""
        return _grouped(self.records, lambda r: (r.kind, r.over, r.array or r.op_name, r.source))

    def table(self) -> str:
        """Two tables, by axis and by source, at most 120 columns wide, then notes and warnings."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        parts = [f"mesh {axes}   {self.backend}   {human_bytes(self.bytes())} in each step on each device"]
        parts += [self.crossing()] if self.slices else []
        if self.records:
            heading: tuple[str, ...] = ("bytes", "kind", "over", "runs", "each")
            parts.append(_aligned([heading, *(_row(records, *key) for key, records in self.by_axes().items())]))
            heading = (*heading, "of", "at")
            parts.append(_aligned([heading, *(_row(records, *key) for key, records in self.by_source().items())]))
        notes = [f"{r.kind} is written as {r.written_as}" for r in self.records if r.written_as]
        notes += ["≥: a loop of unknown length is counted once"] * any(not r.is_counted for r in self.records)
        notes += ["?: in a branch that may not be taken"] * any(r.is_conditional for r in self.records)
        parts += ["\n".join(sorted(set(notes)))] if notes else []
        return "\n\n".join([*parts, *(f"warning: {warning}" for warning in self.warnings)])

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """Records and warnings as JSON values."""
        return {
            "mesh": dict(self.mesh),
            "backend": self.backend,
            "bytes": self.bytes(),
            "slices": dict(self.slices),
            "crossing_bytes": self.bytes(crossing=True),
            "collectives": [{**dataclasses.asdict(record), "bytes": record.bytes} for record in self.records],
            "warnings": [dataclasses.asdict(warning) for warning in self.warnings],
        }


def audit_collectives(
    program: jax.stages.Compiled | str,
    mesh: AnyMesh,
    *,
    backend: str | None = None,
    log: Sequence[str] = (),
    slices: Mapping[str, int] | None = None,
) -> CollectiveAudit:
    """Reads the collectives of a compiled program.

    Args:
        program: The compiled function, or its text.
        mesh: The mesh it was compiled for: partition *i* is the *i*-th device of `mesh.devices.flat`.
        backend: `"cpu"`, `"tpu"`, …; by default that of the mesh's devices.
        log: What the compiler said while it compiled, from `compiler_log`.
        slices: Axis → how many times it crosses the slow network.

    Raises:
        MeshError: The program is for another number of devices.
    """
    parsed = parse(program if isinstance(program, str) else program.as_text() or "")
    devices = parsed.partitions * parsed.replicas
    apart = mesh.size // math.prod((slices or {}).values())  # a TPU has one program for each slice
    if devices not in (1, mesh.size, apart):
        problem = Problem("mesh", "has another number of devices", f"the program {devices}, the mesh {mesh.size}")
        raise MeshError("The program cannot be audited:", [problem])
    if backend is None:
        backend = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else "an unknown backend"
    places = slice_numbers(mesh.shape, slices or {})
    records = find_collectives(parsed, mesh.shape, cpu=backend == "cpu", slices=places)
    axes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    crossing = {axis: count for axis, count in (slices or {}).items() if count > 1}
    return CollectiveAudit(axes, backend, records, tuple(_warnings(records, backend, log)), crossing)


def _warnings(records: Sequence[Collective], backend: str, log: Sequence[str]) -> Iterator[Problem]:
    total = sum(record.bytes for record in records)
    for record in records:
        where = f"{record.array or record.op_name or record.instruction}" + (
            f" ({record.source})" if record.source else ""
        )
        amount = f"{record.kind} over {record.over}: {record.executions} × {human_bytes(record.payload)}"
        axes, asked = record.axes or (), record.op_name.rpartition("/")[2]
        if record.kind == "all-gather" and record.array.startswith("params/"):
            if "tensor" in axes:
                fix = "split the activation that it meets, so that each device needs its own part"
                yield Problem(where, "is a parameter gathered over tensor", amount, fix)
        elif record.kind == "all-gather" and not record.array and record.operand[0] in "bf" and asked != "all_gather":
            # What a rule's constraint asks for inside of one example is a plan; all examples together never are.
            whole = set(axes) & {*BATCH_AXES, *(("sequence", "tensor") if asked != "sharding_constraint" else ())}
            if whole and record.bytes >= WORTH_A_WARNING * total:
                fix = "name it in the rule table, with the axes it arrives with"
                yield Problem(where, "is no parameter and is made whole on every device", amount, fix)
        elif record.kind == "reduce-scatter" and record.written_as and not record.is_fused and backend != "cpu":
            fix = "constrain the sum to the sharding of its use right where it is made"
            yield Problem(where, "is an all-reduce of which each device keeps one part", amount, fix)
        if not record.is_counted:
            yield Problem(where, "runs in a loop of unknown length", amount, "multiply by what you know of the loop")
    for line in dict.fromkeys(line for line in log if REMATERIALIZATION in line):
        what = line.partition(REMATERIALIZATION)[2].strip(" .")
        fix = "give the array in between a sharding that leads from the first to the second in steps"
        yield Problem("the partitioner", "copies an array whole to every device", what, fix)


class CompilerLog(list[str]):
    """The lines that the compiler wrote, filled when the `with` block ends."""


@contextlib.contextmanager
def compiler_log(*, pass_on: bool = True) -> Iterator[CompilerLog]:
    """Collects what XLA writes to the process's standard error inside the block, and passes it on at its end.

    With `pass_on=False` it is passed on only if the block fails.

    The partitioner speaks of an involuntary full rematerialization there and nowhere else. JAX 0.10 prints such lines;
    with JAX 0.12 the same programs have not been seen to, and the copies then show as gathered activations. A program
    that comes from JAX's compilation cache is not compiled, so nothing is said.

    Example:
        >>> with compiler_log() as log:
        ...     _ = os.write(2, b"W0000 from C++\\n")
        >>> log
        ['W0000 from C++']
    """
    log = CompilerLog()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        before = os.dup(2)
        os.dup2(caught.fileno(), 2)
        failed = True
        try:
            yield log
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            caught.seek(0)
            said = caught.read()
            log.extend(said.decode(errors="replace").splitlines())
            while said and (pass_on or failed):
                said = said[os.write(2, said) :]


def expect_collectives(
    step: CollectiveAudit | TrainStep,
    batch: Any = None,
    *,
    tolerance: float = 0.01,
    ignore_below: int = SMALL,
    all_gather: Expected = None,
    all_reduce: Expected = None,
    reduce_scatter: Expected = None,
    all_to_all: Expected = None,
    ragged_all_to_all: Expected = None,
    collective_permute: Expected = None,
    collective_broadcast: Expected = None,
) -> CollectiveAudit:
    """Asserts what a step sends between devices; a kind that is not named is not looked at.

    Args:
        step: An audit, or a train step.
        batch: With a train step: arrays or `jax.ShapeDtypeStruct`s of the batch shape to look at; by default that which
            the step was last compiled for.
        tolerance: How far bytes may differ, relative to those expected.
        ignore_below: Collectives of fewer bytes in one execution do not count.
        all_gather: Bytes per step on one device, over all axes; 0 for none at all. Or a dictionary from axes
            (`"fsdp"`, `"data+fsdp"`) to bytes, or to `...` for any amount: then exactly these axes occur.
        all_reduce: The same, and so for the rest.
        reduce_scatter: Also where the program writes an all-reduce in its place.
        all_to_all: As above.
        ragged_all_to_all: As above.
        collective_permute: As above.
        collective_broadcast: As above.

    Returns:
        The audit.

    Raises:
        AssertionError: The message lists all that differs, and the table.
    """
    if isinstance(step, TrainStep):
        assert batch is not None or step.programs, "the step is not compiled yet: give a batch"
        step = audit_collectives(step.programs[-1] if batch is None else step.compile(batch), step.plan.mesh)
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
        records = [record for record in step.records if record.kind == kind and record.payload >= ignore_below]
        found: dict[str, int] = {}
        for record in records:
            found[record.over] = found.get(record.over, 0) + record.bytes
        if isinstance(wanted, int):
            found, wanted = {"all axes": sum(found.values())}, {"all axes": wanted}
        if wanted is None:
            continue
        wanted = {_in_order(axes, step.mesh): amount for axes, amount in wanted.items()}
        for axes in {**wanted, **found}:
            amount, limit = found.get(axes, 0), wanted.get(axes, 0)
            if limit is ... and amount == 0:
                wrong.append(f"{kind} over {axes}: expected, and there is none")
            elif limit is not ... and abs(amount - limit) > tolerance * limit:
                wrong.append(f"{kind} over {axes}: {amount:,} bytes in each step; expected {limit:,} ± {tolerance:.2%}")
        if any(limit is not ... for limit in wanted.values()):
            unknown = [record.instruction for record in records if not record.is_counted]
            wrong += [f"{kind}: {name} runs in a loop of unknown length" for name in unknown]
    if wrong:
        raise AssertionError("\n".join(["The step's collectives are not as expected:", *wrong, "", step.table()]))
    return step


def _in_order(axes: str, mesh: Mapping[str, int]) -> str:
    """Axes as text in the order of the mesh."""
    names = axes.split("+")
    known = [axis for axis in mesh if axis in names]
    return "+".join(known) if len(known) == len(names) else axes


def _grouped(records: Sequence[Collective], key: Callable[[Collective], _Key]) -> dict[_Key, list[Collective]]:
    groups: dict[_Key, list[Collective]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return dict(sorted(groups.items(), key=lambda item: (-sum(r.bytes for r in item[1]), item[0])))


def _row(records: list[Collective], kind: str, over: str, *rest: str) -> tuple[str, ...]:
    """The cells of one line: bytes, kind, axes, runs, payloads, and the rest."""
    mark = "≥ " * any(not r.is_counted for r in records) + "? " * any(r.is_conditional for r in records)
    sizes = sorted({r.payload for r in records})
    each = human_bytes(sizes[0]) + (f" to {human_bytes(sizes[-1])}" if len(sizes) > 1 else "")
    total, runs = sum(r.bytes for r in records), sum(r.executions for r in records)
    return (mark + human_bytes(total), kind, over, str(runs), each, *rest)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns: numbers to the right, text to the left; the next to last is cut so that a line has 120 characters."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if len(widths) > 5:
        widths[5] = max(12, min(widths[5], 120 - sum(widths[:5]) - widths[6] - 2 * len(widths) + 2))
    lines = []
    for row in rows:
        cut = [cell if len(cell) <= width else "…" + cell[1 - width :] for cell, width in zip(row, widths, strict=True)]
        cells = [
            cell.rjust(w) if i in (0, 3) else cell.ljust(w) for i, (cell, w) in enumerate(zip(cut, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
