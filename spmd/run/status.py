"""The state of a run, as another terminal or machine sees it; nothing is written."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.checkpoint.manifest import read_object
from spmd.observe.json_lines import read_json_lines
from spmd.observe.metrics import human_duration
from spmd.resilience.lease import LeaseState, read_lease
from spmd.run.run_dir import RunDir, check_has_run
from spmd.storage.address import Location, address_of

_MAX_CONFIG_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        where: The run folder.
        lease: Who writes to it.
        step: The last step with metrics; 0 before the first.
        steps: The steps of the whole run; None if its config does not say.
        metrics: Name → last value of each metric.
        measured_at: Name → the step of that value.
        checkpoints: The steps of the checkpoints, in order; they were not verified.
        saved: Unix time of the newest checkpoint; None for a run in a bucket, or without one.
    """

    where: str
    lease: LeaseState
    step: int
    steps: int | None
    metrics: Mapping[str, float]
    measured_at: Mapping[str, int]
    checkpoints: Sequence[int]
    saved: float | None

    @property
    def is_done(self) -> bool:
        """Whether the last step has metrics."""
        return self.steps is not None and self.step >= self.steps

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, at the last speed, without evaluations and saves.

        None if the speed or the last step is not known.
        """
        seconds = self.metrics.get("step_s")
        if seconds is None or self.steps is None:
            return None
        return max(0, self.steps - self.step) * seconds

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        values = dataclasses.asdict(self)
        values["lease"]["is_alive"] = self.lease.is_alive
        values["is_done"] = self.is_done
        values["seconds_left"] = self.seconds_left
        return values

    def __str__(self) -> str:
        rows = [("run", f"{self.where}   {self._activity()}"), ("step", self._progress())]
        losses = self._losses()
        if losses:
            rows.append(("loss", losses))
        speed = self._speed()
        if speed:
            rows.append(("speed", speed))
        rows.append(("last save", self._last_save()))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}   {text}" for name, text in rows)

    def _activity(self) -> str:
        """Return the state of its process, in words."""
        holder = self.lease.holder
        if self.lease.is_alive:
            age = human_duration(self.lease.beat_age)
            return f"training: {holder}, last heartbeat {age} ago"
        if self.is_done:
            return "done"
        if holder is None:
            return "stopped; --resume auto goes on"
        age = human_duration(self.lease.beat_age)
        return f"ended without a word: {holder}, last heartbeat {age} ago; --resume auto goes on"

    def _progress(self) -> str:
        if self.steps is None:
            return f"{self.step:,}"
        return f"{self.step:,} of {self.steps:,}"

    def _losses(self) -> str:
        """Return the last value of each loss, and its step if it is an earlier one."""
        texts = []
        for name, value in self.metrics.items():
            if not name.endswith("loss"):
                continue
            text = f"{name} {value:.4f}"
            if self.measured_at[name] != self.step:
                text += f" at step {self.measured_at[name]:,}"
            texts.append(text)
        return "   ".join(texts)

    def _speed(self) -> str:
        """Return the last speed, and the time left while a process trains."""
        if "step_s" not in self.metrics:
            return ""
        texts = [f"{human_duration(self.metrics['step_s'])} a step"]
        for name, value in self.metrics.items():
            if name.endswith("_per_s"):
                texts.append(f"{value:,.0f} {name.removesuffix('_per_s')}/s")
        left = self.seconds_left
        if left and self.lease.is_alive:
            texts.append(f"{human_duration(left)} left, without evaluations and saves")
        return "   ".join(texts)

    def _last_save(self) -> str:
        if not self.checkpoints:
            return "none yet"
        text = f"step {self.checkpoints[-1]:,}"
        if self.saved is not None:
            text += f", {human_duration(max(0.0, time.time() - self.saved))} ago"
        if len(self.checkpoints) > 1:
            text += f"; {len(self.checkpoints)} checkpoints"
        return text


def read_status(location: Location) -> RunStatus:
    """Read the state of a run, in a folder or a bucket.

    Raises:
        CheckpointError: There is no run.
    """
    run = RunDir(location)
    check_has_run(run, address_of(location))
    metrics, measured_at = _last_metrics(read_json_lines(run.metrics))
    checkpoints = run.checkpoint_steps()
    return RunStatus(
        where=address_of(location),
        lease=read_lease(location),
        step=max(measured_at.values(), default=0),
        steps=_planned_steps(run.path / "config.json"),
        metrics=metrics,
        measured_at=measured_at,
        checkpoints=checkpoints,
        saved=_saved(run, checkpoints),
    )


def _last_metrics(
    records: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the last value of each metric, and the step of each."""
    metrics = dict[str, float]()
    measured_at = dict[str, int]()
    for record in records:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                metrics[name] = value
                measured_at[name] = record["step"]
    return metrics, measured_at


def _planned_steps(config_file: Path) -> int | None:
    """Return the steps in a run's config; None if there are none."""
    try:
        config = read_object(config_file, _MAX_CONFIG_BYTES).get("config")
    except (OSError, ValueError):
        return None
    if not isinstance(config, Mapping) or not isinstance(config.get("steps"), int):
        return None
    return config["steps"]


def _saved(run: RunDir, checkpoints: Sequence[int]) -> float | None:
    """Return when the newest checkpoint of a local run was written."""
    if not checkpoints:
        return None
    newest = run.checkpoint(checkpoints[-1])
    if not isinstance(newest, Path):
        return None
    try:
        return os.stat(newest).st_mtime
    except OSError:
        return None
