"""Scan a directory of checkpoints, and decide which of them to keep."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from spmd.checkpoint.manifest import read_object, verify_manifest
from spmd.errors import Problem

Metrics = Mapping[str, float]

_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
_LEFTOVER = re.compile(rf"({_STEP.pattern})(\.[1-9][0-9]{{0,17}})?\.(saving|pruned)")
_METRICS_MAX_BYTES = 1 << 20


def scan(directory: Path) -> tuple[list[str], dict[int, Metrics], dict[int, list[Problem]]]:
    """Return the names that interrupted saves left, the metrics of undamaged steps and the problems of damaged ones.

    Of large files, only the size is verified.
    """
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    valid: dict[int, Metrics] = {}
    damaged: dict[int, list[Problem]] = {}
    for name in names:
        if _STEP.fullmatch(name):
            folder = directory / name
            problems = verify_manifest(folder, contents=False)
            try:
                numbers = {} if problems else read_object(folder / "metrics.json", _METRICS_MAX_BYTES)
                metrics = {key: float(number) for key, number in numbers.items()}
            except (OSError, ValueError, TypeError, OverflowError) as error:
                problems = [Problem("metrics.json", f"cannot be read: {error}")]
            if not problems:
                valid[int(name)] = metrics
            elif os.path.lexists(folder):  # the run that owns it may be removing it
                damaged[int(name)] = problems
    return [name for name in names if _LEFTOVER.fullmatch(name)], valid, damaged


def quarantine(folder: Path) -> None:
    """Rename a damaged checkpoint to a name that is not a step, if it still exists."""
    names = [f"damaged-{folder.name}", *(f"damaged-{folder.name}.{n}" for n in range(2, 1000))]
    free = next(name for name in names if not os.path.lexists(folder.with_name(name)))
    if os.path.lexists(folder):
        folder.rename(folder.with_name(free))


@dataclasses.dataclass(frozen=True)
class RetentionPolicy:
    """Policy that keeps the `max_to_keep` newest checkpoints and the `keep_best` with the lowest finite `metric`."""

    max_to_keep: int
    keep_best: int
    metric: str

    def best(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """Return the steps with a finite metric, the lowest first; of equal ones, the later first."""
        values = {step: numbers.get(self.metric, math.inf) for step, numbers in metrics.items()}
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (values[step], -step))

    def kept(self, metrics: Mapping[int, Metrics]) -> set[int]:
        """Return the steps to keep."""
        return {*sorted(metrics)[-self.max_to_keep :], *self.best(metrics)[: self.keep_best]}
