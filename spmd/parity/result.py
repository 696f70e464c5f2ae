"""Result of a parity test: for each leaf its difference, what is allowed, and why."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed difference relative to the largest value of a leaf, and why; initial values must be bitwise equal.

    Attributes:
        loss: Of the mean loss.
        gradients: Of gradients, and of the model's variables.
        updates: Of the changes of parameters, and of the optimizer's state, from equal gradients.
    """

    loss: float
    gradients: float
    updates: float
    why: str = ""


_ORDER = "sums over devices are taken in another order: a float32 rounding is 6e-8, and n terms gather about √n"
_NARROW = "this shows gross errors of gradients only; check a layout in float32"
TOLERANCES = {
    "float32": Tolerance(loss=1e-5, gradients=1e-4, updates=1e-4, why=_ORDER),
    "bfloat16": Tolerance(loss=1e-2, gradients=1e-1, updates=1e-4, why=f"a bfloat16 rounding is 4e-3: {_NARROW}"),
    "float16": Tolerance(loss=1e-2, gradients=1e-1, updates=1e-4, why=f"a float16 rounding is 5e-4: {_NARROW}"),
}
"""Tolerances by the dtype of computation."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: the largest difference relative to the largest value, the tolerance, and why it is special.

    Attributes:
        step: The step, from 1; 0 for what is before the first.
        error: Infinite if one side alone has a value that is not finite.
        nan: Number of elements that are not finite on both sides, which are not compared.
    """

    what: str
    path: str
    error: float
    tolerance: float
    why: str = ""
    step: int = 0
    nan: int = 0

    @property
    def ok(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Parity:
    """Comparison of a layout with one device, with a row for each leaf: that of the step where it differs most.

    Attributes:
        losses: Mean loss of each compared step on the mesh.
        reference_losses: That of the same steps on one device, each from the mesh's own state.
        stopped: The step that left parameters which are not finite on both sides, where the comparison ended; or 0.
    """

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    rows: tuple[Row, ...]
    tolerance: Tolerance
    stopped: int = 0

    @property
    def ok(self) -> bool:
        """True if every row is ok."""
        return all(row.ok for row in self.rows)

    def worst(self) -> list[Row]:
        """Return the row of each kind with the largest error relative to its tolerance."""
        kinds = dict.fromkeys(row.what for row in self.rows)
        return [max((row for row in self.rows if row.what == kind), key=badness) for kind in kinds]

    @property
    def ending(self) -> str:
        """Say that the comparison ended before its last step; empty if it did not."""
        what = "leaves parameters that are nan on both sides: nothing can be compared from there"
        return f"step {self.stopped} {what}" if self.stopped and self.ok else ""

    def __str__(self) -> str:
        shown = self.worst()
        shown += [row for row in self.rows if not row.ok and row not in shown]
        blunt = [row for row in self.rows if row.why and row.tolerance > BLUNT and row not in shown]
        others = f"\n{len(blunt)} more with a tolerance above {BLUNT:.0e}: {_names(blunt)}" if blunt else ""
        return self.lines(shown) + others

    def lines(self, rows: Sequence[Row]) -> str:
        """Return one line for each of `rows`."""
        width = max(len(row.path) for row in rows)
        return "\n".join(
            f"{row.what:<18} {row.path:<{width}}  {f'step {row.step}' if row.step else '':<7}  {row.error:9.2e}  "
            + f"allowed {row.tolerance:7.0e}  {'ok' if row.ok else 'FAIL'}"
            + (f"  ({row.why})" if row.why else "")
            for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a NaN or infinite error is a string."""

        def number(x: float) -> float | str:
            return x if math.isfinite(x) else str(x)

        rows = [
            {"what": r.what, "path": r.path, "step": r.step, "error": number(r.error)}
            | {"tolerance": number(r.tolerance), "ok": r.ok}
            | ({"why": r.why} if r.why else {})
            for r in self.rows
        ]
        losses = {"losses": list(map(number, self.losses)), "reference": list(map(number, self.reference_losses))}
        tolerance = dataclasses.asdict(self.tolerance)
        return {"ok": self.ok, "stopped": self.stopped or None, **losses, "tolerance": tolerance, "rows": rows}


BLUNT = 1e-2
"""Tolerance above which a leaf is named, since an error of 1 % would not show there."""


def badness(row: Row) -> tuple[bool, int, float, float]:
    """Return the order of rows: failures, then NaN, then the error in units of the tolerance, then the tightest."""
    return not row.ok, row.nan, row.error / row.tolerance if row.tolerance else row.error * 1e12, -row.tolerance


def worst_of_each(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return of each kind and path the row with the largest error relative to its tolerance."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        before = worst.setdefault((row.what, row.path), row)
        if badness(row) > badness(before):
            worst[row.what, row.path] = row
    return tuple(worst.values())


def largest(x: np.ndarray) -> float:
    """Return the largest finite magnitude of an array, 0 of an empty one."""
    x = np.abs(x.astype(np.float64))
    return float(np.where(np.isfinite(x), x, 0.0).max(initial=0.0))


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference of two arrays; infinite if one alone is not finite in some place."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any():
        return math.inf
    return float(np.abs(np.where(finite, x, 0.0) - np.where(finite, y, 0.0)).max(initial=0.0))


def compare_leaf(row: Row, found: np.ndarray, expected: np.ndarray, scale: float, allowed: dict[str, float]) -> Row:
    """Return the row with its error and tolerance, both relative to `scale`.

    Args:
        row: Kind, path and step, and the tolerance that the kind has.
        scale: What differences are relative to; if 0, they are absolute.
        allowed: Further reasons for a difference → its size, absolute.
    """
    scale = scale or 1.0
    error = distance(found, expected) / scale
    ours, theirs = (int((~np.isfinite(x.astype(np.float64))).sum()) for x in (found, expected))
    if math.isinf(error):
        why = f"not finite: {ours} of {found.size} on the mesh, {theirs} on one device"
        return dataclasses.replace(row, error=error, why=why)
    why, most = max(allowed.items(), key=lambda item: item[1], default=("", 0.0))
    if ours:
        row = dataclasses.replace(row, nan=ours, why=f"nan on both sides, in {ours} of {found.size}")
    if most / scale > row.tolerance:
        row = dataclasses.replace(row, tolerance=most / scale, why=", ".join(filter(None, [row.why, why])))
    return dataclasses.replace(row, error=error)


def _names(rows: list[Row]) -> str:
    shown = [f"{row.what} of {row.path}" for row in rows[:3]]
    return ", ".join(shown) + (f" and {len(rows) - 3} others" if len(rows) > 3 else "")
