"""Hooks of a training run: log metrics, evaluate, save checkpoints."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmd.checkpoint.manager import CheckpointManager
from spmd.data.loader import Batch, Windows, evaluation_batches
from spmd.gradients.losses import Sums, split_arrays
from spmd.observe.goodput import Stopwatch
from spmd.observe.metrics import StepClock, Writers, device_memory, process_peak_rss
from spmd.observe.stragglers import StepTimeExchange
from spmd.resilience.lease import Lease
from spmd.resilience.preemption import Preemption
from spmd.resilience.watchdog import Watchdog
from spmd.run.config import TrainConfig
from spmd.train.loop import Hook
from spmd.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """Clocks, watchdog, lease and log of a process; `say` writes a line to the log."""

    clock: StepClock
    stopwatch: Stopwatch
    watchdog: Watchdog
    lease: Lease
    say: Callable[[str], None]

    @contextlib.contextmanager
    def during(self, activity: str, doing: str) -> Iterator[None]:
        """Account the block to an activity of the stopwatch instead of to a step; `doing` is for the watchdog."""
        self.watchdog.set_activity(doing)
        with self.stopwatch.measure(activity):
            yield
        self.clock.restart()


@dataclasses.dataclass(eq=False)
class Log(Hook):
    """Writes the metrics of every `log_every`-th step and of the last.

    Args:
        mfu: Tokens per second → model FLOPs utilization; None if the chip's peak is unknown.
        goodput_dir: Folder of the goodput records; None to write none.
        skipped_batches: Batches of the data that rollbacks have skipped.
    """

    config: TrainConfig
    mfu: Callable[[float], float | None]
    writers: Writers
    telemetry: Telemetry
    goodput_dir: Path | None
    skipped_batches: int

    def __post_init__(self) -> None:
        self.last: dict[str, Any] = {}
        self._exchange = StepTimeExchange() if jax.process_count() > 1 else None
        self._row: list[float] = []
        self._rows: np.ndarray | None = None
        self._seconds, self._step = dict(self.telemetry.stopwatch.seconds), 0

    def on_start(self, step: int) -> None:
        """Start the interval of the first line."""
        self._interval(step)

    def on_dispatch(self, step: int) -> None:
        """Exchange step times between processes: at this point all are between the same two steps."""
        if self._exchange and self._row and step % self.config.log_every == 0:
            with jax.transfer_guard("allow"):
                self._rows = self._exchange.exchange(self._row)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the step's metrics with throughput and memory."""
        clock = self.telemetry.clock
        clock.finished()
        if step % self.config.log_every and step != self.config.steps:
            return
        scalars, arrays = split_arrays(metrics)
        tokens = scalars["tokens"]
        self.last = values = {**scalars, **arrays, "tokens": int(tokens) if math.isfinite(tokens) else tokens}
        values |= {"skipped_batches": self.skipped_batches} if self.skipped_batches else {}
        if clock.median is not None and clock.p95 is not None:
            rate = self.config.data.batch * self.config.data.sequence / clock.median
            values |= {"tokens_per_s": rate, "step_s": clock.median, "step_s_p95": clock.p95}
            values |= {"mfu": mfu} if (mfu := self.mfu(rate)) is not None else {}
        values |= {"device_peak_bytes": memory} if (memory := device_memory()) is not None else {}
        values["host_peak_bytes"] = process_peak_rss()
        own = self._interval(step)
        self._row = [own["step"], own["data"]]
        values["data_s"] = own["data"]
        if self._rows is not None:
            times, waits = self._rows.T  # of all processes, two lines ago
            values |= {"process_step_s_least": float(times.min()), "process_step_s_most": float(times.max())}
            values |= {"process_data_s_most": float(waits.max()), "process_of_data_s_most": int(waits.argmax())}
        self.writers.write(step, values)
        self.telemetry.say(f"step {step}   loss {metrics['loss']:.6g}   {own['step']:.4g} s/step")

    def finish(self, step: int) -> None:
        """Write the last goodput record, after the last checkpoint."""
        self._interval(step)

    def _interval(self, step: int) -> dict[str, float]:
        """Return this process's seconds per step by activity since the previous call."""
        stopwatch = self.telemetry.stopwatch
        stopwatch.switch_to("step")
        self.telemetry.lease.renew()  # each line of metrics follows
        if self.goodput_dir:
            stopwatch.write(self.goodput_dir, step)
        now, count = dict(stopwatch.seconds), max(step - self._step, 1)
        own = {name: (now[name] - self._seconds[name]) / count for name in now}
        self._seconds, self._step = now, step
        return own


@dataclasses.dataclass(eq=False)
class Evaluate(Hook):
    """Evaluates on the validation split every `evaluate.every` steps and after the last."""

    config: TrainConfig
    step: Callable[[Any, Any, Batch], Sums]
    windows: Windows
    sharding: NamedSharding
    writers: Writers
    telemetry: Telemetry

    def __post_init__(self) -> None:
        self.last: dict[str, float] = {}
        self.last_step, self.tokens = -1, 0

    def wants_state(self, step: int) -> bool:
        """Return true at the interval and at the last step."""
        every = self.config.evaluate.every
        return step == self.config.steps or bool(every and step % every == 0)

    def on_state(self, step: int, state: TrainState) -> None:
        """Write `val_loss` and `val_accuracy`, averaged over tokens."""
        size, tokens = self.config.data.batch, self.config.evaluate.tokens
        stream = evaluation_batches(self.windows, batch=size, sharding=self.sharding, tokens_at_most=tokens)
        parts, watchdog = [], self.telemetry.watchdog
        with self.telemetry.during("evaluate", doing := f"evaluating after step {step}"):
            for number, batch in enumerate(stream, 1):
                watchdog.set_activity(doing)
                parts.append(jax.device_get(self.step(state.params, state.variables, batch)))
                watchdog.reset(f"evaluation batch {number} after step {step}")
        sums = {name: float(sum(part[name] for part in parts)) for name in split_arrays(parts[0])[0]}
        self.tokens, self.last_step = int(sums["weight"]), step
        self.last = {f"val_{name}": total / sums["weight"] for name, total in sums.items() if name != "weight"}
        self.telemetry.lease.renew()
        self.writers.write(step, self.last)


@dataclasses.dataclass(eq=False)
class Save(Hook):
    """Saves a checkpoint every `checkpoint_every` steps, after the last step and on preemption.

    Args:
        record: Metadata of the run, saved with the step and the data position.
        evaluate: Provides the metrics by which checkpoints are ranked.
        skipped_batches: Batches of the data that rollbacks have skipped.
    """

    config: TrainConfig
    record: Mapping[str, Any]
    checkpoints: CheckpointManager
    evaluate: Evaluate
    preemption: Preemption
    telemetry: Telemetry
    skipped_batches: int

    def wants_state(self, step: int) -> bool:
        """Return true at the interval and at the end."""
        every = self.config.checkpoint_every
        return step in (self.config.steps, self.preemption.stop_step) or bool(every and step % every == 0)

    def on_state(self, step: int, state: TrainState) -> None:
        """Start an asynchronous save of everything that a resumed run needs."""
        position = (step + self.skipped_batches) * self.config.data.batch
        metrics = self.evaluate.last if self.evaluate.last_step == step else {}
        with self.telemetry.during("checkpoint", f"saving step {step}, or waiting for the previous save"):
            self.checkpoints.save(step, state, {**self.record, "step": step, "position": position}, metrics)
        self.telemetry.watchdog.reset(f"copying the state of step {step} for its checkpoint")
        self.telemetry.say(f"saving step {step}")
