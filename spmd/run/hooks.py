"""What a training run does beside its steps: it logs, evaluates and saves."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.versions import library_versions
from spmd.data.loader import Windows, evaluation_batches
from spmd.observe.goodput import Stopwatch
from spmd.observe.metrics import StepClock, Writers, device_memory, process_peak_rss, utilization
from spmd.observe.stragglers import StepTimeExchange
from spmd.resilience.preemption import Preemption
from spmd.resilience.watchdog import Watchdog
from spmd.run.build import TrainSetup
from spmd.run.config import config_values
from spmd.run.run_dir import ProcessLog
from spmd.sharding.mesh import batch_sharding
from spmd.train.loop import Hook
from spmd.train.state import TrainState
from spmd.train.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """What the hooks of one process share: its clocks, its log, and who watches over it."""

    clock: StepClock
    stopwatch: Stopwatch
    watchdog: Watchdog
    preemption: Preemption
    log: ProcessLog


class Log(Hook):
    """Writes the metrics of every `log_every`-th step, and of the last.

    Args:
        setup: The run.
        telemetry: Of this process.
        writers: Where the numbers go.
        folder: Where goodput is kept; None where another process keeps it.
        skipped_batches: How many batches of the data were passed over.
    """

    def __init__(
        self, setup: TrainSetup, telemetry: Telemetry, writers: Writers, folder: Path | None, skipped_batches: int
    ) -> None:
        self.setup, self.telemetry, self.writers = setup, telemetry, writers
        self.folder, self.skipped_batches = folder, skipped_batches
        self.positions = setup.config.data.batch * setup.config.data.sequence
        self.last: dict[str, Any] = {}
        self._spread = StepTimeExchange() if jax.process_count() > 1 else None
        self._row: list[float] = []
        self._rows: np.ndarray | None = None
        self._seconds, self._step = dict(telemetry.stopwatch.seconds), 0

    def on_start(self, step: int) -> None:
        """The first line of this session, which later ones are compared with."""
        self._since(step)

    def on_dispatch(self, step: int) -> None:
        """Exchanges the figures of processes: here every process is between the same two steps."""
        if self._spread and self._row and step % self.setup.config.log_every == 0:
            with jax.transfer_guard("allow"):
                self._rows = self._spread.exchange(self._row)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Adds throughput and memory to what the step reports."""
        clock = self.telemetry.clock
        clock.finished()
        config = self.setup.config
        if step % config.log_every and step != config.steps:
            return
        self.last = values = {**metrics, "tokens": int(metrics["tokens"])}
        values |= {"left_out_batches": self.skipped_batches} if self.skipped_batches else {}
        if clock.median is not None and clock.p95 is not None:
            rate = self.positions / clock.median
            mfu = utilization(self.setup.flops, rate, self.setup.mesh.devices.flat)
            values |= {"tokens_per_s": rate, "step_s": clock.median, "step_s_p95": clock.p95}
            values |= {"mfu": mfu} if mfu is not None else {}
        memory = device_memory()
        values |= {"device_peak_bytes": memory} if memory is not None else {}
        values["host_peak_bytes"] = process_peak_rss()
        own = self._since(step)
        self._row = [own["step"], own["data"]]
        values |= {"data_s": own["data"], **self._apart()}
        self.writers.write(step, values)
        self.telemetry.log.say(f"step {step}   loss {metrics['loss']:.6g}   {own['step']:.4g} s/step")

    def finish(self, step: int) -> None:
        """The last line of this session, with its last checkpoint."""
        self._since(step)

    def _since(self, step: int) -> dict[str, float]:
        """Seconds by activity for each step since the call before, on this process."""
        watch = self.telemetry.stopwatch
        watch.switch_to("step")
        if self.folder:
            watch.write(self.folder, step)
        now, count = dict(watch.seconds), max(step - self._step, 1)
        own = {name: (now[name] - self._seconds[name]) / count for name in now}
        self._seconds, self._step = now, step
        return own

    def _apart(self) -> dict[str, float]:
        """How far processes were apart two lines ago: in step time, and which one waited the longest for data."""
        if self._rows is None:
            return {}
        step, data = self._rows.T
        spread = {"process_step_s_least": float(step.min()), "process_step_s_most": float(step.max())}
        return {**spread, "process_data_s_most": float(data.max()), "process_of_data_s_most": int(data.argmax())}


class Evaluate(Hook):
    """Loss and accuracy on the validation half, every `evaluate.every` steps and after the last."""

    def __init__(self, setup: TrainSetup, telemetry: Telemetry, writers: Writers, windows: Windows) -> None:
        self.setup, self.telemetry, self.writers, self.windows = setup, telemetry, writers, windows
        self.step = make_eval_step(setup.plan, setup.evaluation_loss_fn)
        self.last: dict[str, float] = {}
        self.last_step, self.tokens = -1, 0

    def wants_state(self, step: int) -> bool:
        """At the interval and at the end."""
        config = self.setup.config
        return step == config.steps or bool(config.evaluate.every and step % config.evaluate.every == 0)

    def on_state(self, step: int, state: TrainState) -> None:
        """Writes `val_loss` and `val_accuracy`, weighted by token."""
        config, watchdog = self.setup.config, self.telemetry.watchdog
        stream = evaluation_batches(
            self.windows,
            batch=config.data.batch,
            sharding=batch_sharding(self.setup.mesh),
            tokens_at_most=config.evaluate.tokens,
        )
        parts = []
        with self.telemetry.stopwatch.measure("evaluate"):
            for number, batch in enumerate(stream, 1):
                watchdog.set_activity(f"evaluating after step {step}")
                parts.append(jax.device_get(self.step(state.params, state.variables, batch)))
                watchdog.reset(f"evaluation batch {number} after step {step}")
        sums = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
        self.tokens, self.last_step = int(sums["weight"]), step
        self.last = {f"val_{name}": total / sums["weight"] for name, total in sums.items() if name != "weight"}
        self.writers.write(step, self.last)
        self.telemetry.clock.restart()


class Save(Hook):
    """A checkpoint every `checkpoint_every` steps, after the last, and where training is told to stop.

    Args:
        setup: The run.
        telemetry: Of this process.
        checkpoints: Where they go.
        evaluate: Has the metrics to rank them by.
        skipped_batches: How many batches of the data were passed over.
    """

    def __init__(
        self,
        setup: TrainSetup,
        telemetry: Telemetry,
        checkpoints: CheckpointManager,
        evaluate: Evaluate,
        skipped_batches: int,
    ) -> None:
        self.setup, self.telemetry, self.checkpoints = setup, telemetry, checkpoints
        self.evaluate, self.skipped_batches = evaluate, skipped_batches

    def wants_state(self, step: int) -> bool:
        """At the interval and at the end."""
        config = self.setup.config
        ends = step in (config.steps, self.telemetry.preemption.stop_step)
        return ends or bool(config.checkpoint_every and step % config.checkpoint_every == 0)

    def on_state(self, step: int, state: TrainState) -> None:
        """Starts an asynchronous save of everything that must resume together."""
        config, plan = self.setup.config, self.setup.plan
        record = {
            "step": step,
            "position": (step + self.skipped_batches) * config.data.batch,
            "data": self.setup.corpus.fingerprint,
            "seed": config.seed,
            "batch": config.data.batch,
            "sequence": config.data.sequence,
            "config": config_values(config),
            "plan": str(plan),
            "mesh": dict(plan.mesh.shape),
            "versions": library_versions(),
        }
        metrics = self.evaluate.last if self.evaluate.last_step == step else {}
        self.telemetry.watchdog.set_activity(f"saving step {step}, or waiting for the save before it")
        with self.telemetry.stopwatch.measure("checkpoint"):
            self.checkpoints.save(step, state, record, metrics)
        self.telemetry.watchdog.reset(f"the copy of step {step} for its checkpoint")
        self.telemetry.log.say(f"saving step {step}")
        self.telemetry.clock.restart()
