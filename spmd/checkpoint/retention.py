"""Which checkpoints a directory holds, which of them are damaged, and which of them stay."""

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
_LEFTOVER = re.compile(rf"({_STEP.pattern})\.(saving|pruned)")
_METRICS_AT_MOST = 1 << 20


@dataclasses.dataclass(frozen=True)
class ScanResult:
    """What is in a directory of checkpoints.

    Attributes:
        leftovers: Names of what a save that was interrupted has left.
        metrics: Step → metrics, of the checkpoints in which no damage was found.
        lost: Step → what is wrong, of the others.
    """

    leftovers: tuple[str, ...]
    metrics: dict[int, Metrics]
    lost: dict[int, list[Problem]]


def scan(directory: Path) -> ScanResult:
    """Goes through a directory: big files are asked for their size only, so that it takes no time.

    Raises:
        OSError: The directory cannot be read.
    """
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    found = ScanResult(tuple(name for name in names if _LEFTOVER.fullmatch(name)), {}, {})
    for name in names:
        if _STEP.fullmatch(name):
            folder = directory / name
            problems = verify_manifest(folder, contents=False)
            try:
                numbers = {} if problems else read_object(folder / "metrics.json", _METRICS_AT_MOST)
                metrics = {key: float(number) for key, number in numbers.items()}
            except (OSError, ValueError, TypeError, OverflowError) as error:
                problems = [Problem("metrics.json", f"cannot be read: {error}")]
            if not problems:
                found.metrics[int(name)] = metrics
            elif os.path.lexists(folder):  # the run that owns it may be removing it
                found.lost[int(name)] = problems
    return found


def quarantine(folder: Path) -> None:
    """Gives a damaged checkpoint a name that is no step, for a person to look at; done already is done."""
    names = [f"damaged-{folder.name}", *(f"damaged-{folder.name}.{n}" for n in range(2, 1000))]
    free = next(name for name in names if not os.path.lexists(folder.with_name(name)))
    if os.path.lexists(folder):
        folder.rename(folder.with_name(free))


@dataclasses.dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the newest, and those with the lowest finite metric.

    Args:
        newest: How many of the newest.
        lowest: How many of those with the lowest `metric`.
        metric: The name of the number that ranks them.
    """

    newest: int
    lowest: int
    metric: str

    def rank(self, metrics: Metrics) -> float:
        """The number to rank a checkpoint by; infinite where there is no finite one."""
        value = metrics.get(self.metric, math.inf)
        return value if math.isfinite(value) else math.inf

    def best(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """The steps that were measured, the lowest first; of two equals the later."""
        measured = [step for step, numbers in metrics.items() if self.rank(numbers) < math.inf]
        return sorted(measured, key=lambda step: (self.rank(metrics[step]), -step))

    def kept(self, metrics: Mapping[int, Metrics]) -> set[int]:
        """The steps that stay."""
        return {*sorted(metrics)[-self.newest :], *self.best(metrics)[: self.lowest]}
