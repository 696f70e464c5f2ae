"""One training run in its folder: what is written where, and how it goes on after a stop.

```
runs/demo/
  config.py            the config file as it was
  config.json          every field as resolved, and its difference from the file
  plan.txt             the sharding plan
  metrics.jsonl        one JSON object for each logged step and each evaluation
  checkpoints/         Orbax: state, and beside it data position, seed, config, plan, mesh, versions
  tensorboard/
```
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.checkpoint import Checkpoints
from spmd.config import TrainConfig, config_difference, config_values, load_config, with_values
from spmd.data import Windows, batches, evaluation_batches
from spmd.errors import CheckpointError, Problem
from spmd.generate import generate
from spmd.mesh import batch_sharding, shards_of
from spmd.metrics import (
    Console,
    JsonLines,
    StepClock,
    TensorBoard,
    Writers,
    device_memory,
    process_peak_rss,
    utilization,
)
from spmd.model import as_outputs
from spmd.recipe import Recipe
from spmd.state import TrainState, abstract_state, init_state
from spmd.step import make_eval_step
from spmd.trainer import Hook, StopOnNonFinite, fit
from spmd.versions import library_versions


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Args:
        path: The folder; made by `describe`.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Where the numbers are."""
        return self.path / "metrics.jsonl"

    def check_use(self, *, resume: bool) -> None:
        """Refuses a folder that holds another run, and to resume in one that holds none.

        Call it before processes meet: afterwards the folder may hold this run's own files.

        Raises:
            CheckpointError: It holds a run and `resume` is false, or it holds none and `resume` is true.
        """
        holds_a_run = self.metrics.exists() or any(self.checkpoints.glob("*"))
        if resume and not holds_a_run:
            fix = "name the folder of the run, or leave out --resume to start one"
            raise CheckpointError("Nothing was resumed:", [Problem(str(self.path), "holds no run", fix=fix)])
        if not resume and holds_a_run:
            fix = "--resume to go on with it, or another --out"
            raise CheckpointError("Nothing was started:", [Problem(str(self.path), "already holds a run", fix=fix)])

    def describe(self, config: TrainConfig, source: Path, plan: str) -> None:
        """Makes the folder, and writes the config, as file and as values, and the plan."""
        self.path.mkdir(parents=True, exist_ok=True)
        before, after = config_values(load_config(str(source))), config_values(config)
        values = {"config": after, "changed": config_difference(before, after)}
        kept = self.path / "config.py"
        if source.resolve() != kept.resolve():
            shutil.copyfile(source, kept)
        (self.path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (self.path / "plan.txt").write_text(plan + "\n", encoding="utf-8")

    def config(self) -> TrainConfig:
        """The run's config as it was resolved.

        Raises:
            CheckpointError: The folder holds no run.
        """
        try:
            values = json.loads((self.path / "config.json").read_text(encoding="utf-8"))["config"]
        except (OSError, ValueError, KeyError) as error:
            fix = "give the folder that `spmd train` wrote, such as runs/demo"
            raise CheckpointError("There is no run:", [Problem(str(self.path), f"{error}", fix=fix)]) from error
        return with_values(load_config(str(self.path / "config.py")), values)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run has to show.

    Attributes:
        state: The state after the last step.
        val_loss: Nats per token on the validation half, None if it was not evaluated.
        val_tokens: How many tokens that is over.
        checkpoint: The step of the newest checkpoint.
        loss: The training loss of the last step that was logged, None if none was.
        mfu: Model FLOPs utilization at that step, None where the chip's peak is not known.
        seconds: Wall-clock time of the loop, with compilation, evaluation and checkpoints.
        steps: Steps taken by this process.
    """

    state: TrainState
    val_loss: float | None
    val_tokens: int
    checkpoint: int | None
    loss: float | None
    mfu: float | None
    seconds: float
    steps: int


def train(recipe: Recipe, folder: RunFolder, source: Path, console: Console | None, *, resume: bool = False) -> Outcome:
    """Trains to the config's last step, from the beginning or from the newest checkpoint.

    Args:
        recipe: On a mesh with devices.
        folder: Holds no other run, or the one to resume.
        source: The config file.
        console: What a person sees; None for nothing.
        resume: Go on from the newest checkpoint in the folder.
    """
    config, plan = recipe.config, recipe.plan
    sharding = batch_sharding(recipe.mesh)
    corpus = recipe.corpus
    train_windows = Windows(corpus.train, config.data.sequence)
    first = jax.process_index() == 0
    with Checkpoints(folder.checkpoints, keep=config.keep, keep_best=config.keep_best) as checkpoints:
        start, state = 0, None
        if resume and (checkpoints.steps() or checkpoints.lost):
            state, record = checkpoints.restore(None, abstract_state(plan))
            start = _resumable(record, recipe, folder)
            if console and first:
                for step, problems in checkpoints.lost.items():
                    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
                    console.say(f"skipped checkpoint {step}: {problems[0].where} {problems[0].what}{more}")
                console.say(f"resuming after step {start}")
                for name, (old, new) in config_difference(record["config"], config_values(config)).items():
                    console.say(f"  {name} was {old} and is {new} from here on")
        state = state if state is not None else init_state(plan, config.seed)
        if first:
            folder.describe(config, source, f"{plan}{recipe.pipeline_line}")
        writers = Writers(
            [
                *([JsonLines(folder.metrics, start), TensorBoard(folder.path / "tensorboard", start)] if first else []),
                *([console] if console and first else []),
            ]
        )
        clock = StepClock()
        evaluate = Evaluate(recipe, Windows(corpus.validation, config.data.sequence), writers, clock)
        log = Log(recipe, writers, clock)
        hooks = [log, evaluate, Save(recipe, checkpoints, evaluate, clock)]
        if config.on_nan == "stop":
            scaling = recipe.precision.loss_scale
            floor = scaling.floor if scaling else 0.0
            hooks.insert(0, StopOnNonFinite(config.data.batch, checkpoints.latest, floor))
        began = time.perf_counter()
        stream = batches(
            train_windows,
            batch=config.data.batch,
            sharding=sharding,
            seed=config.seed,
            start=start,
            steps=config.steps,
            threads=config.data.threads,
            prefetch=config.data.prefetch,
        )
        try:
            with stream:
                state = fit(state, recipe.step, stream, steps=config.steps, start=start, hooks=hooks)
            checkpoints.wait()
        finally:
            writers.close()
        return Outcome(
            state=state,
            val_loss=evaluate.last.get("val_loss"),
            val_tokens=evaluate.tokens,
            checkpoint=checkpoints.latest(),
            loss=log.last.get("loss"),
            mfu=log.last.get("mfu"),
            seconds=time.perf_counter() - began,
            steps=config.steps - start,
        )


def _resumable(record: Mapping[str, Any], recipe: Recipe, folder: RunFolder) -> int:
    """The step that the checkpoint is of, once its data are known to be the same."""
    config = recipe.config
    expected = {
        "data": recipe.corpus.fingerprint,
        "seed": config.seed,
        "batch": config.data.batch,
        "sequence": config.data.sequence,
    }
    problems = [
        Problem(name, f"was {record.get(name)} and is {value}", fix="give the value that the run was started with")
        for name, value in expected.items()
        if record.get(name) != value
    ]
    if config.steps < record["step"]:
        arithmetic = f"the checkpoint is of step {record['step']}"
        problems.append(Problem("steps", f"is {config.steps}", arithmetic, "ask for more steps"))
    if problems:
        raise CheckpointError(f"{folder.path} cannot go on with other data:", problems)
    return int(record["step"])


class Log(Hook):
    """Writes the metrics of every `log_every`-th step, and of the last."""

    def __init__(self, recipe: Recipe, writers: Writers, clock: StepClock) -> None:
        self.recipe, self.writers, self.clock = recipe, writers, clock
        self.positions = recipe.config.data.batch * recipe.config.data.sequence
        self.last: dict[str, Any] = {}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Adds throughput and memory to what the step reports."""
        self.clock.finished()
        config = self.recipe.config
        if step % config.log_every and step != config.steps:
            return
        self.last = values = {**metrics, "tokens": int(metrics["tokens"])}
        median, p95 = self.clock.median, self.clock.p95
        if median is not None and p95 is not None:
            rate = self.positions / median
            mfu = utilization(self.recipe.flops, rate, self.recipe.mesh.devices.flat)
            values |= {"tokens_per_s": rate, "step_s": median, "step_s_p95": p95}
            values |= {"mfu": mfu} if mfu is not None else {}
        memory = device_memory()
        values |= {"device_peak_bytes": memory} if memory is not None else {}
        values["host_peak_bytes"] = process_peak_rss()
        self.writers.write(step, values)


class Evaluate(Hook):
    """Loss and accuracy on the validation half, every `evaluate.every` steps and after the last."""

    def __init__(self, recipe: Recipe, windows: Windows, writers: Writers, clock: StepClock) -> None:
        self.recipe, self.windows, self.writers, self.clock = recipe, windows, writers, clock
        self.step = make_eval_step(recipe.plan, recipe.evaluation_loss_fn)
        self.last: dict[str, float] = {}
        self.last_step, self.tokens = -1, 0

    def wants_state(self, step: int) -> bool:
        """At the interval and at the end."""
        config = self.recipe.config
        return step == config.steps or bool(config.evaluate.every and step % config.evaluate.every == 0)

    def on_state(self, step: int, state: TrainState) -> None:
        """Writes `val_loss` and `val_accuracy`, weighted by token."""
        config = self.recipe.config
        stream = evaluation_batches(
            self.windows,
            batch=config.data.batch,
            sharding=batch_sharding(self.recipe.mesh),
            tokens_at_most=config.evaluate.tokens,
        )
        parts = [jax.device_get(self.step(state.params, state.variables, batch)) for batch in stream]
        sums = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
        self.tokens, self.last_step = int(sums["weight"]), step
        self.last = {f"val_{name}": total / sums["weight"] for name, total in sums.items() if name != "weight"}
        self.writers.write(step, self.last)
        self.clock.restart()


class Save(Hook):
    """A checkpoint every `checkpoint_every` steps and after the last."""

    def __init__(self, recipe: Recipe, checkpoints: Checkpoints, evaluate: Evaluate, clock: StepClock) -> None:
        self.recipe, self.checkpoints, self.evaluate, self.clock = recipe, checkpoints, evaluate, clock

    def wants_state(self, step: int) -> bool:
        """At the interval and at the end."""
        config = self.recipe.config
        return step == config.steps or bool(config.checkpoint_every and step % config.checkpoint_every == 0)

    def on_state(self, step: int, state: TrainState) -> None:
        """Starts an asynchronous save of everything that must resume together."""
        config, plan = self.recipe.config, self.recipe.plan
        record = {
            "step": step,
            "position": step * config.data.batch,
            "data": self.recipe.corpus.fingerprint,
            "seed": config.seed,
            "batch": config.data.batch,
            "sequence": config.data.sequence,
            "config": config_values(config),
            "plan": str(plan),
            "mesh": dict(plan.mesh.shape),
            "versions": library_versions(),
        }
        metrics = self.evaluate.last if self.evaluate.last_step == step else {}
        self.checkpoints.save(step, state, record, metrics)
        self.clock.restart()


def write_sample(recipe: Recipe, state: TrainState, prompt: str, **options: Any) -> str:
    """A text that goes on from `prompt`, generated on the recipe's mesh.

    Args:
        recipe: The run.
        state: Its training state.
        prompt: What to go on from.
        **options: As for `generate`: `tokens`, `temperature`, `top_k`, `seed`.
    """
    tokenizer = recipe.tokenizer
    ids = np.asarray(tokenizer.encode(prompt), np.int32)
    rows = shards_of(batch_sharding(recipe.mesh).spec[0], recipe.mesh.shape)
    window = recipe.config.data.sequence

    def apply(params: Any, ids: Any) -> Any:
        return as_outputs(recipe.plan.model.forward(params, state.variables, None, ids, train=False)[0]).logits

    done = generate(recipe.plan, apply, state.params, np.tile(ids, (rows, 1)), window=window, **options)
    return tokenizer.decode(done[0].tolist())
