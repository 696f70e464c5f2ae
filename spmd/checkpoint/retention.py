"""Scan a directory of checkpoints, and decide on the ones to keep."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from spmd.checkpoint.manifest import other_step, read_object, recorded_step, verify_manifest
from spmd.errors import Problem

Metrics = Mapping[str, float]

_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
_LEFTOVER = re.compile(rf"({_STEP.pattern})(\.[1-9][0-9]{{0,17}})?\.(saving|pruned)")
_METRICS_MAX_BYTES = 1 << 20
_RECORD_MAX_BYTES = 64 << 20


def scan(directory: Path) -> tuple[list[str], dict[int, Metrics], dict[int, list[Problem]]]:
    """Return leftovers of interrupted saves, metrics of undamaged steps, problems of damaged ones.

    Of large files, only the size is verified.
    """
    leftovers = list[str]()
    valid: dict[int, Metrics] = {}
    damaged: dict[int, list[Problem]] = {}
    for name in _names(directory):
        if _LEFTOVER.fullmatch(name):
            leftovers.append(name)
        if not _STEP.fullmatch(name):
            continue
        folder = directory / name
        metrics, problems = _read_metrics(folder)
        if not problems:
            valid[int(name)] = metrics
        elif os.path.lexists(folder):  # the run that owns it may be removing it
            damaged[int(name)] = problems
    return leftovers, valid, damaged


def _names(directory: Path) -> list[str]:
    if not directory.exists():
        return []
    return sorted(path.name for path in directory.iterdir())


def _read_metrics(folder: Path) -> tuple[dict[str, float], list[Problem]]:
    """Return the metrics of a checkpoint, or its problems."""
    problems = verify_manifest(folder, contents=False) or _record_problems(folder)
    if problems:
        return {}, problems
    metrics = dict[str, float]()
    try:
        for name, number in read_object(folder / "metrics.json", _METRICS_MAX_BYTES).items():
            metrics[name] = float(number)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        return {}, [Problem("metrics.json", f"cannot be read: {error}")]
    return metrics, []


def _record_problems(folder: Path) -> list[Problem]:
    """Return a problem if the record of a run is of another step than the folder's name.

    Manifests from before 27 November 2026 have no step. The record of a run has one, beside the
    position in its data; the `step` of any other record may mean anything.
    """
    if recorded_step(folder) is not None:
        return []
    try:
        record = read_object(folder / "record.json", _RECORD_MAX_BYTES)
    except (OSError, ValueError):
        return []  # it is an error where the record is read
    step = record.get("step")
    if type(step) is int and "position" in record and step != int(folder.name):
        return [other_step(step)]
    return []


def quarantine(folder: Path) -> None:
    """Rename a damaged checkpoint to a name other than a step, if it still exists.

    Step 100 becomes `damaged-100`, or `damaged-100.2` if that name is taken.
    """
    target = folder.with_name(f"damaged-{folder.name}")
    number = 1
    while os.path.lexists(target):
        number += 1
        target = folder.with_name(f"damaged-{folder.name}.{number}")
    if os.path.lexists(folder):
        folder.rename(target)


@dataclasses.dataclass(frozen=True)
class RetentionPolicy:
    """The checkpoints to keep: the `max_to_keep` newest, the `keep_best` with the lowest `metric`.

    A metric that is not finite does not count. Milestones, every `keep_every` steps, are always
    kept; 0 is for none.
    """

    max_to_keep: int
    keep_best: int
    metric: str
    keep_every: int = 0

    def best(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """Return the steps with a finite metric, the lowest first.

        Of equal ones, the later is first.
        """
        finite = dict[int, float]()
        for step, numbers in metrics.items():
            value = numbers.get(self.metric, math.inf)
            if math.isfinite(value):
                finite[step] = value
        return sorted(finite, key=lambda step: (finite[step], -step))

    def kept(self, metrics: Mapping[int, Metrics]) -> set[int]:
        """Return the steps to keep."""
        newest = sorted(metrics)[-self.max_to_keep :]
        best = self.best(metrics)[: self.keep_best]
        milestones = set[int]()
        if self.keep_every:
            milestones = {step for step in metrics if step % self.keep_every == 0}
        return {*newest, *best, *milestones}
