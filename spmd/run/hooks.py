"""Hooks of a training run: log metrics, evaluate, save checkpoints."""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.checkpoint.manager import CheckpointManager
from spmd.distributed.async_gather import AsyncGather
from spmd.errors import DataError, Problem
from spmd.gradients.losses import Sums, split_arrays
from spmd.observe.goodput import Stopwatch
from spmd.observe.metrics import (
    Flops,
    StepClock,
    Writers,
    device_memory,
    process_peak_rss,
    utilization,
)
from spmd.resilience.lease import Lease
from spmd.resilience.watchdog import Watchdog
from spmd.run.loader import SavedLoader
from spmd.training.loop import Hook
from spmd.training.state import ModelState

LOADER = "loader"
"""Key in the record of a checkpoint: the state of the loader."""


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """Clocks, watchdog, lease and log of a process.

    `say` writes a line to the log, `notes` get events.
    """

    clock: StepClock
    stopwatch: Stopwatch
    watchdog: Watchdog
    lease: Lease
    say: Callable[[str], None]
    notes: Sequence[Callable[[str], None]]

    def note(self, event: str) -> None:
        """Write an event to the log, and show it on a terminal."""
        for show in self.notes:
            show(event)

    @contextlib.contextmanager
    def during(self, activity: str, doing: str) -> Iterator[None]:
        """Account the block to an activity of the stopwatch instead of to a step.

        `doing` is for the watchdog.
        """
        self.watchdog.set_activity(doing)
        with self.stopwatch.measure(activity):
            yield
        self.clock.restart()


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Amount of work of a step, for metrics.

    Args:
        count: How many units a batch has.
        unit: What is counted: examples, tokens.
        flops: Model FLOPs of one unit, if they are known.
        weighed: What has a weight of 1 in the loss, if it is not the unit.
        count_of: Number of a batch → how many units it has, where that varies.
    """

    count: int
    unit: str = "examples"
    flops: Flops | None = None
    weighed: str = ""
    count_of: Callable[[int], int] | None = None

    @property
    def unit_of_weights(self) -> str:
        """What has a weight of 1 in the loss."""
        return self.weighed or self.unit

    def total(self, batches: range) -> int:
        """Return the units of some batches, the first one of all 0."""
        if self.count_of is None:
            return self.count * len(batches)
        return sum(map(self.count_of, batches))

    def values(
        self, step_s: float, devices: Iterable[jax.Device], batches: range
    ) -> dict[str, float]:
        """Return the rate of some batches at `step_s` seconds a step, and the utilization if known."""
        rate = self.total(batches) / (len(batches) * step_s)
        values = {f"{self.unit}_per_s": rate}
        if self.flops:
            mfu = utilization(self.flops, rate, devices)
            if mfu is not None:
                values["mfu"] = mfu
        return values


@dataclasses.dataclass(eq=False)
class Log(Hook):
    """Writes the metrics of every `every`-th step and of the last one.

    The last is step `steps`, or the step of a stop.

    Args:
        goodput_dir: Folder of the goodput records; None to write none.
        skipped_batches: Batches of the data that rollbacks have skipped.
    """

    every: int
    steps: int
    throughput: Throughput
    devices: Sequence[jax.Device]
    writers: Writers
    telemetry: Telemetry
    goodput_dir: Path | None
    skipped_batches: int

    def __post_init__(self) -> None:
        self.last: dict[str, Any] = {}
        self._exchange = AsyncGather() if jax.process_count() > 1 else None
        self._row: list[float] = []
        self._rows: np.ndarray | None = None
        self._seconds = dict(self.telemetry.stopwatch.seconds)
        self._step = 0

    def on_start(self, step: int) -> None:
        """Start the interval of the first line."""
        self._interval(step)

    def on_dispatch(self, step: int) -> None:
        """Exchange step times between processes: all are between the same two steps here."""
        if self._exchange and self._row and step % self.every == 0:
            self._rows = self._exchange.gather(self._row)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the step's metrics with throughput and memory."""
        clock = self.telemetry.clock
        clock.finished()
        if step % self.every and step != self.steps:
            return
        values = self._metric_values(metrics)
        self.last = values
        if self.skipped_batches:
            values["skipped_batches"] = self.skipped_batches
        if clock.median is not None and clock.p95 is not None:
            values["step_s"] = clock.median
            values["step_s_p95"] = clock.p95
            seconds = clock.median
            if self.throughput.count_of:  # steps of several sizes have no typical time
                seconds = self._seconds_of_step(step) or seconds
            first = min(self._step, step - 1) + self.skipped_batches
            batches = range(first, step + self.skipped_batches)
            values |= self.throughput.values(seconds, self.devices, batches)
        memory = device_memory()
        if memory is not None:
            values["device_peak_bytes"] = memory
        values["host_peak_bytes"] = process_peak_rss()
        own = self._interval(step)
        self._row = [own["step"], own["data"]]
        values["data_s"] = own["data"]
        if self._rows is not None:
            # [process, (step, data)] seconds of all processes, two lines ago
            times, waits = self._rows.T
            values["process_step_s_least"] = float(times.min())
            values["process_step_s_most"] = float(times.max())
            values["process_data_s_most"] = float(waits.max())
            values["process_of_data_s_most"] = int(waits.argmax())
        self.writers.write(step, values)
        self.telemetry.say(f"step {step}   loss {metrics['loss']:.6g}   {own['step']:.4g} s/step")

    def _metric_values(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the step's own metrics, with the sum of weights by the name of its unit."""
        scalars, arrays = split_arrays(metrics)
        values: dict[str, Any] = {}
        for name, value in scalars.items():
            prefix, slash, metric = name.rpartition("/")
            if metric == "tokens":
                name = f"{prefix}{slash}{self.throughput.unit_of_weights}"
                value = int(value) if value.is_integer() else value
            values[name] = value
        return values | arrays

    def on_stop(self, step: int) -> None:
        """Write the metrics of this step, too."""
        self.steps = step

    def finish(self, step: int) -> None:
        """Write the last goodput record, after the last checkpoint."""
        self._interval(step)

    def _seconds_of_step(self, step: int) -> float:
        """Return the mean seconds of a step and of its batch, since the last line."""
        self.telemetry.stopwatch.switch_to("step")  # which adds the time up to now
        now = self.telemetry.stopwatch.seconds
        spent = sum(now[name] - self._seconds[name] for name in ("step", "data"))
        return spent / max(step - self._step, 1)

    def _interval(self, step: int) -> dict[str, float]:
        """Return this process's seconds per step by activity since the previous call."""
        stopwatch = self.telemetry.stopwatch
        stopwatch.switch_to("step")
        self.telemetry.lease.renew_at_once()  # each line of metrics follows
        if self.goodput_dir:
            stopwatch.write(self.goodput_dir, step)
        now = dict(stopwatch.seconds)
        steps = max(step - self._step, 1)
        own = {name: (now[name] - self._seconds[name]) / steps for name in now}
        self._seconds = now
        self._step = step
        return own


@dataclasses.dataclass(eq=False)
class Evaluate(Hook):
    """Evaluates every `every` steps (0: never) and after the last, step `steps`.

    Args:
        evaluate: `(params, variables, batch, name of the set, number of the batch)` → sums; None
            without sets.
        model: The training state → the parameters to evaluate, and the variables.
        sets: Name → a function that returns the batches of an evaluation set, the same at each
            call.
        patience: Evaluations without a lower loss on the first set, after which to stop; 0 for any
            number.
        best: Lowest loss on the first set so far; None before the first evaluation.
        since: Evaluations since then.
    """

    every: int
    steps: int
    patience: int
    evaluate: Callable[..., Sums] | None
    model: Callable[[Any], ModelState]
    sets: Mapping[str, Callable[[], Iterable[Any]]]
    writers: Writers
    telemetry: Telemetry
    best: float | None = None
    since: int = 0

    def __post_init__(self) -> None:
        self.last: dict[str, float] = {}
        self.last_step = -1
        self.weights = dict[str, float]()

    def wants_state(self, step: int) -> bool:
        """Return true at the interval and at the last step."""
        if not self.sets:
            return False
        return step == self.steps or _is_multiple(step, self.every)

    def on_state(self, step: int, state: Any) -> None:
        """Write the mean of each sum over each set, such as `val_loss` of the set `val`."""
        with self.telemetry.during("evaluate", f"evaluating after step {step}"):
            model = self.model(state)
            totals = dict[str, dict[str, float]]()
            for name, batches in self.sets.items():
                totals[name] = self._sums(name, batches(), step, model)
        self.last_step = step
        self.weights = {name: sums.pop("weight") for name, sums in totals.items()}
        self.last = {}
        for name, sums in totals.items():
            weight = self.weights[name]
            for metric, total in sums.items():
                self.last[f"{name}_{metric}"] = total / weight if weight else math.nan
        self.telemetry.lease.renew_at_once()
        self.writers.write(step, self.last)
        first_set = next(iter(self.sets))
        loss = self.last[f"{first_set}_loss"]
        if self.best is None or loss < self.best:
            self.best = loss
            self.since = 0
        else:
            self.since += 1

    def wants_stop(self, step: int) -> bool:
        """Return true if the loss has not fallen for too long."""
        return self.since >= self.patience > 0

    def _sums(
        self, name: str, batches: Iterable[Any], step: int, model: ModelState
    ) -> dict[str, float]:
        """Return the sums over the batches of one set."""
        assert self.evaluate is not None, "sets have a loss"
        totals = collections.defaultdict[str, float](float)
        watchdog = self.telemetry.watchdog
        for number, batch in enumerate(batches, 1):
            watchdog.set_activity(f"evaluating {name} after step {step}")
            found = self.evaluate(model.params, model.variables, batch, name, number)
            sums, _ = split_arrays(jax.device_get(found))
            for metric, value in sums.items():
                totals[metric] += float(value)
            watchdog.reset(f"batch {number} of {name} after step {step}")
        if not totals:
            problem = Problem(name, "has no batches", fix="one or more")
            raise DataError("No evaluation data:", [problem])
        return dict(totals)


class CommonClock(Hook):
    """Seconds since the start of training and requests to save, the same on all processes.

    One process has its own. Of several, those of process 0 count: they are exchanged every `every`
    steps without waiting, and are known at the next exchange.

    Args:
        requests: Returns how many requests to save there were so far.

    Attributes:
        seconds: Since the start.
        save_requests: The requests so far.
    """

    def __init__(
        self,
        every: int,
        now: Callable[[], float] = time.monotonic,
        requests: Callable[[], int] = lambda: 0,
    ) -> None:
        self._every = every
        self._now = now
        self._requests = requests
        self._began = now()
        self._gather = AsyncGather() if jax.process_count() > 1 else None
        self.seconds = 0.0
        self.save_requests = 0

    def on_dispatch(self, step: int) -> None:
        """Read the clock and the requests."""
        seconds = self._now() - self._began
        requests = self._requests()
        if self._gather is None:
            self.seconds = seconds
            self.save_requests = requests
        elif step % self._every == 0:
            rows = self._gather.gather([seconds, requests])
            if rows is not None:
                self.seconds = float(rows[0, 0])
                self.save_requests = int(rows[0, 1])


@dataclasses.dataclass(eq=False)
class Save(Hook):
    """Saves a checkpoint every `every` steps (0: never), by time, and after the last step.

    The last is step `last_step` or that of a stop.

    Args:
        minutes: Time from a save or the start to the next save; 0 for none by time.
        milestones: Steps between checkpoints that are never removed; 0 for none.
        clock: Time since the start; it must come before this hook, to be read at the same step.
        batch: Examples of a batch.
        record: Metadata of the run, saved with the step and the data position.
        evaluate: Provides the metrics by which checkpoints are ranked.
        skipped_batches: Batches of the data that rollbacks have skipped.
        saved: State → the part of it to save.
        loader: Loader whose state is saved in the record.
    """

    every: int
    minutes: float
    milestones: int
    clock: CommonClock
    last_step: int
    batch: int
    record: Mapping[str, Any]
    checkpoints: CheckpointManager
    evaluate: Evaluate
    telemetry: Telemetry
    skipped_batches: int
    saved: Callable[[Any], Any]
    loader: SavedLoader | None

    def __post_init__(self) -> None:
        self._saved_at = 0.0
        self._answered = 0

    def on_stop(self, step: int) -> None:
        """Save after this step."""
        self.last_step = step

    def wants_state(self, step: int) -> bool:
        """Return true at the intervals, after the minutes, when asked to, and at the end."""
        if _is_multiple(step, self.every) or _is_multiple(step, self.milestones):
            return True
        if self.clock.save_requests > self._answered:
            return True
        elapsed = self.clock.seconds - self._saved_at
        is_late = self.minutes > 0 and elapsed >= 60 * self.minutes
        return is_late or step == self.last_step

    def on_state(self, step: int, state: Any) -> None:
        """Start an asynchronous save of the state and record for a resumed run."""
        self._saved_at = self.clock.seconds
        self._answered = self.clock.save_requests
        metrics = self.evaluate.last if self.evaluate.last_step == step else {}
        with self.telemetry.during(
            "checkpoint", f"saving step {step}, or waiting for the previous save"
        ):
            record = self.record_at(step)
            self.checkpoints.save(step, self.saved(state), record, metrics)
        self.telemetry.watchdog.reset(f"copying the state of step {step} for its checkpoint")
        self.telemetry.note(f"saving step {step}")

    def record_at(self, step: int) -> dict[str, Any]:
        """Return the record of the state after a step."""
        record = {
            **self.record,
            "step": step,
            "position": (step + self.skipped_batches) * self.batch,
            "evaluation": {"best": self.evaluate.best, "since": self.evaluate.since},
        }
        if self.loader is not None:
            record[LOADER] = self.loader.record(step + self.skipped_batches)
        return record


def _is_multiple(step: int, every: int) -> bool:
    """Return true at an interval; 0 is never."""
    return every != 0 and step % every == 0
