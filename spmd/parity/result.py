"""Result of a parity test: for each leaf its difference, its tolerance, and the reason."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed difference relative to the largest value of a leaf, and its reason.

    Initial values must be bitwise equal.

    Attributes:
        loss: Of the mean loss.
        gradients: Of gradients, and of the model's variables.
        updates: Of the changes of parameters, and of the optimizer's state, from equal gradients.
    """

    loss: float
    gradients: float
    updates: float
    why: str = ""


_ORDER = (
    "sums over devices are taken in another order: a float32 rounding is 6e-8, and n terms gather "
    "about √n"
)
_NARROW = "this shows gross errors of gradients only; check a layout in float32"
TOLERANCES = {
    "float32": Tolerance(
        loss=1e-5,
        gradients=1e-4,
        updates=1e-4,
        why=_ORDER,
    ),
    "bfloat16": Tolerance(
        loss=1e-2,
        gradients=1e-1,
        updates=1e-4,
        why=f"a bfloat16 rounding is 4e-3: {_NARROW}",
    ),
    "float16": Tolerance(
        loss=1e-2,
        gradients=1e-1,
        updates=1e-4,
        why=f"a float16 rounding is 5e-4: {_NARROW}",
    ),
}
"""Tolerances by the dtype of computation."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: the largest difference relative to the largest value, and its tolerance.

    Attributes:
        why: A reason for the tolerance, or for elements that are not compared.
        step: The step, from 1; 0 for the state before the first.
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
    """Comparison of a layout with one device, with a row for each leaf of its worst step.

    Attributes:
        losses: Mean loss of each compared step on the mesh.
        reference_losses: That of the same steps on one device, each from the mesh's own state.
        stopped: The step that left parameters which are not finite on both sides, where the
            comparison ended; or 0.
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
        rows_of: dict[str, list[Row]] = {}
        for row in self.rows:
            rows_of.setdefault(row.what, []).append(row)
        return [max(rows, key=badness) for rows in rows_of.values()]

    @property
    def ending(self) -> str:
        """Sentence about an end before the last step; empty without one, or if a row failed."""
        if not self.stopped or not self.ok:
            return ""
        return (
            f"step {self.stopped} leaves parameters that are nan on both sides: "
            "nothing can be compared from there"
        )

    def __str__(self) -> str:
        shown = self.worst()
        failed = []
        for row in self.rows:
            if not row.ok and row not in shown:
                failed.append(row)
        shown += failed
        text = self.lines(shown)
        blunt = []
        for row in self.rows:
            if row.why and row.tolerance > BLUNT and row not in shown:
                blunt.append(row)
        if blunt:
            text += f"\n{len(blunt)} more with a tolerance above {BLUNT:.0e}: {_names(blunt)}"
        return text

    def lines(self, rows: Sequence[Row]) -> str:
        """Return one line for each of `rows`."""
        width = max(len(row.path) for row in rows)
        lines = []
        for row in rows:
            lines.append(_line(row, width))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a NaN or infinite error is a string."""
        return {
            "ok": self.ok,
            "stopped": self.stopped or None,
            "losses": list(map(_json_number, self.losses)),
            "reference": list(map(_json_number, self.reference_losses)),
            "tolerance": dataclasses.asdict(self.tolerance),
            "rows": list(map(_json_row, self.rows)),
        }


def _line(row: Row, width: int) -> str:
    """Return the line of a row; `width` is the longest path."""
    step = ""
    if row.step:
        step = f"step {row.step}"
    verdict = "FAIL"
    if row.ok:
        verdict = "ok"
    text = f"{row.what:<18} {row.path:<{width}}  {step:<7}  {row.error:9.2e}  "
    text += f"allowed {row.tolerance:7.0e}  {verdict}"
    if row.why:
        text += f"  ({row.why})"
    return text


def _json_row(row: Row) -> dict[str, Any]:
    values = {
        "what": row.what,
        "path": row.path,
        "step": row.step,
        "error": _json_number(row.error),
        "tolerance": _json_number(row.tolerance),
        "ok": row.ok,
    }
    if row.why:
        values["why"] = row.why
    return values


def _json_number(x: float) -> float | str:
    """Return a number for JSON, or a string for NaN and infinity."""
    if math.isfinite(x):
        return x
    return str(x)


BLUNT = 1e-2
"""Tolerance above which a leaf is named, since an error of 1 % would not show there."""


def badness(row: Row) -> tuple[bool, int, float, float]:
    """Return the sort key of a row; the worst row has the largest.

    Failures are worst, then the most NaN, then the largest error in units of the tolerance, then
    the tightest tolerance.
    """
    error = row.error * 1e12
    if row.tolerance:
        error = row.error / row.tolerance
    return not row.ok, row.nan, error, -row.tolerance


def worst_of_each(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the row of each kind and path with the largest error relative to its tolerance."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        before = worst.setdefault((row.what, row.path), row)
        if badness(row) > badness(before):
            worst[row.what, row.path] = row
    return tuple(worst.values())


def largest(x: np.ndarray) -> float:
    """Return the largest finite magnitude of an array, 0 of an empty one."""
    sizes = np.abs(x.astype(np.float64))
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    return float(finite.max(initial=0.0))


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference of two arrays; infinite if only one is finite somewhere."""
    x = x.astype(np.float64)
    y = y.astype(np.float64)
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any():
        return math.inf
    differences = np.where(finite, x, 0.0) - np.where(finite, y, 0.0)
    return float(np.abs(differences).max(initial=0.0))


def compare_leaf(
    row: Row,
    found: np.ndarray,
    expected: np.ndarray,
    scale: float,
    allowed: dict[str, float],
) -> Row:
    """Return the row with its error and tolerance, both relative to `scale`.

    Args:
        row: Kind, path and step, and the tolerance that the kind has.
        scale: What differences are relative to; if 0, they are absolute.
        allowed: Further reasons for a difference → its size, absolute.
    """
    scale = scale or 1.0
    error = distance(found, expected) / scale
    ours = _count_non_finite(found)
    if math.isinf(error):
        theirs = _count_non_finite(expected)
        why = f"not finite: {ours} of {found.size} on the mesh, {theirs} on one device"
        return dataclasses.replace(row, error=error, why=why)
    nan = row.nan
    why = row.why
    tolerance = row.tolerance
    if ours:
        nan = ours
        why = f"nan on both sides, in {ours} of {found.size}"
    reason, most = max(allowed.items(), key=lambda item: item[1], default=("", 0.0))
    if most / scale > tolerance:
        tolerance = most / scale
        why = ", ".join(filter(None, [why, reason]))
    return dataclasses.replace(row, error=error, tolerance=tolerance, why=why, nan=nan)


def _count_non_finite(x: np.ndarray) -> int:
    finite = np.isfinite(x.astype(np.float64))
    return int((~finite).sum())


def _names(rows: list[Row]) -> str:
    """Return the kinds and paths of the first three rows, and the number of others."""
    shown = [f"{row.what} of {row.path}" for row in rows[:3]]
    text = ", ".join(shown)
    if len(rows) > 3:
        text += f" and {len(rows) - 3} others"
    return text
