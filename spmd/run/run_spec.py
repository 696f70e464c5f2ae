"""Definition of a run: a step, its batches, evaluation sets, and the record of it."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.data.process_batches import (
    ProcessBatches,
    ProcessShard,
    check_ended_together,
    process_shard,
)
from spmd.errors import ConfigError, DataError, Problem, check_call, check_type, describe_value
from spmd.gradients.losses import LossFn
from spmd.observe.metrics import Writer
from spmd.optim.skip_updates import counts_skips
from spmd.plan.plan import ShardingPlan
from spmd.run.compiled_step import LoadResult
from spmd.run.external_state import ExternalState
from spmd.run.hooks import Telemetry, Throughput
from spmd.run.loader import SavedLoader, loader_problems
from spmd.run.run_config import RunConfig
from spmd.run.run_dir import RunDir
from spmd.storage.address import Location, locate
from spmd.training.alternating import AlternatingStep
from spmd.training.batch import count_examples
from spmd.training.loop import Hook
from spmd.training.step import TrainStep

OpenBatches = Callable[[int, int], Iterable[Any]]
"""`(start, steps)` → the batches of the steps `start + 1 … steps`; they are closed where they can
be."""


@dataclasses.dataclass(frozen=True, eq=False)
class RunSpec:
    """Definition of a training run.

    Args:
        folder: The run folder, made if it does not exist; local, or `gs://…` or `s3://…`.
        step: The train step, with its plan; or an `spmd.AlternatingStep` of several networks.
        batches: `(start, steps)` → the batches of those steps; or a loader with a state, which is
            saved in checkpoints and restored with them: an iterable with `get_state` and
            `set_state`, or with `state_dict` and `load_state_dict`, or whose iterator has them.
        config: When to log, evaluate and save, and how to recover; its fields are recorded in
            checkpoints.
        evaluation: Name → a function that returns the batches of an evaluation set, the same at
            each call. Checkpoints are ranked by the loss on the first.
        evaluation_loss: Loss of these sets, such as that of the step without dropout.
        process_batches: Whether each of several processes gives its own rows of a batch, NumPy
            arrays of the part that `spmd.process_shard` names, in training and evaluation; by
            default, each gives the global batch. All processes stop after the same step when the
            batches of one of them end.
        data: Fingerprint of the data, which a resumed run and all processes must agree on.
        inputs: Config field → fingerprint of a further input, such as a frozen model. A resumed run
            must have the same.
        hooks: Further hooks, called after those of the run and before the one that saves.
        writers: Further writers of metrics, called on the first process; all are closed at the end
            of the run.
        throughput: What a step processes; by default, examples: the length of the batch's first
            array.
        batch: Arrays or shapes of a batch, for compilation; by default, of the first one.
        other_batches: `(start, steps)` → batches of other shapes among those of the steps
            `start + 1 … steps`, arrays or shapes: the step is compiled for them before it is taken.
        reloaded: Part of the state that is not saved, but loaded again.
        load_result: Result of `spmd.run.compiled_step.load_compiled_step`, if it was called for the
            step; by default, the run calls it.
        initial_state: Makes the state of a run that is not resumed; by default,
            `step.init_state(config.seed)`.
        on_initial_state: Is called with this state and the process's `Telemetry`, before the first
            step of a run that is not resumed.
        text: What is printed at the start and written to `plan.txt`; by default, the plan.
        notes: What is printed after it.
        source: Config file that is copied into the folder.

    Raises:
        ConfigError: An argument cannot be used.
    """

    folder: str | Location
    step: TrainStep | AlternatingStep
    batches: OpenBatches | Iterable[Any]
    _: dataclasses.KW_ONLY
    config: RunConfig
    evaluation: Mapping[str, Callable[[], Iterable[Any]]] = dataclasses.field(default_factory=dict)
    evaluation_loss: LossFn | None = None
    process_batches: bool = False
    data: str = ""
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hooks: Sequence[Hook] = ()
    writers: Sequence[Writer] = ()
    throughput: Throughput | None = None
    batch: Any = None
    other_batches: Callable[[int, int], Sequence[Any]] | None = None
    reloaded: ExternalState | None = None
    load_result: LoadResult | None = None
    initial_state: Callable[[], Any] | None = None
    on_initial_state: Callable[[Any, Telemetry], None] | None = None
    text: str = ""
    notes: Sequence[str] = ()
    source: Path | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("Invalid run:", problems)

    def _problems(self) -> Iterator[Problem]:
        """Yield the problems of the arguments."""
        yield from check_type("config", self.config, RunConfig, "config=spmd.RunConfig(steps=…)")
        kinds = TrainStep, AlternatingStep
        yield from check_type("step", self.step, kinds, "spmd.make_train_step(plan, loss_fn)")
        example = "def batches(start, steps): return (make_batch(n) for n in range(start, steps))"
        if callable(self.batches):
            yield from check_call("batches", self.batches, "start, steps", example)
        else:
            yield from loader_problems(self.batches)
        if self.process_batches and not isinstance(self.step, TrainStep):
            what = f"is true, and the step is {describe_value(self.step)}"
            fix = "a step of spmd.make_train_step, or process_batches=False and global batches"
            yield Problem("process_batches", what, fix=fix)
        yield from self._problems_of_evaluation()
        yield from _problems_of_items("hooks", self.hooks, Hook)
        yield from _problems_of_items("writers", self.writers, Writer)
        if isinstance(self.config, RunConfig) and isinstance(self.step, kinds):
            yield from self._problems_of_skips()

    def _problems_of_skips(self) -> Iterator[Problem]:
        """Yield a problem for each network without skips, if the config asks for them."""
        if "skip" not in (self.config.on_nan, self.config.recovery.on_spike):
            return
        for prefix, part in self.step.parts.items():
            if counts_skips(part.plan.abstract_optimizer_state):
                continue
            what = "is skip, and the optimizer skips no update"
            if prefix:
                what = f"is skip, and the optimizer of {prefix.removesuffix('/')} skips no update"
            fix = "make the plan with spmd.skip_bad_updates(optimizer), or on_nan roll-back"
            yield Problem("on_nan, recovery.on_spike", what, fix=fix)

    def _problems_of_evaluation(self) -> Iterator[Problem]:
        sets = self.evaluation if isinstance(self.evaluation, Mapping) else {"": self.evaluation}
        for name, batches in sets.items():
            if not callable(batches):
                where = f"evaluation {name}".strip()
                fix = '{"val": lambda: held_out_batches}'
                yield Problem(where, f"is {describe_value(batches)}", fix=fix)
        if bool(self.evaluation) != (self.evaluation_loss is not None):
            what = "is there without the other"
            yield Problem("evaluation, evaluation_loss", what, fix="give both or none")

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({str(self.folder)!r}, {self.config.steps:,} steps, {self.step!r})"

    @functools.cached_property
    def run_dir(self) -> RunDir:
        """The folder."""
        return RunDir(locate(self.folder))

    @functools.cached_property
    def abstract_batch(self) -> Any:
        """Shapes and dtypes of a batch."""
        batch = self.read_first() if self.batch is None else self.batch
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    @property
    def description(self) -> str:
        """Text to print at the start, and to write to the folder."""
        return self.text or self.step.text

    @functools.cached_property
    def rate(self) -> Throughput:
        """Amount of work of a step."""
        return self.throughput or Throughput(self.examples)

    @functools.cached_property
    def examples(self) -> int:
        """Number of examples in a batch."""
        part = self.step.evaluated_part
        state = self.step.abstract_state()
        _, batch = self.step.part_inputs(part, state, self.abstract_batch)
        return count_examples(self.step.parts[part].plan, batch)

    def read_first(self) -> Any:
        """Return the first batch of training, on the mesh.

        With `process_batches` every process makes this call.
        """
        with self.open_batches(0, 1) as opened:
            batches = self.as_global(opened, 0)
            batch = next(iter(batches), None)
        if batch is None:
            problem = Problem("batches", "has none for the first step", fix="one for each step")
            reasons: Sequence[Problem] = getattr(batches, "end_problems", ())
            raise DataError("No training data:", [problem, *reasons])
        return self.step.place_batch(batch)

    def open_batches(
        self, start: int, steps: int, saved: Mapping[str, Any] | None = None
    ) -> contextlib.AbstractContextManager[Iterable[Any]]:
        """Return a context with the batches of some steps.

        Args:
            saved: State of the loader in the record of a checkpoint.
        """
        if self.loader is not None:
            return closing(self.loader.open(saved, start))
        assert callable(self.batches)
        return closing(self.batches(start, steps))

    @functools.cached_property
    def loader(self) -> SavedLoader | None:
        """Loader with a state; None if batches are a function of the step."""
        if callable(self.batches):
            return None
        return SavedLoader(self.batches, self.shard)

    @functools.cached_property
    def shard(self) -> ProcessShard:
        """Part of each batch for this process to give; without `process_batches`, all of it."""
        if self.process_batches:
            return process_shard(self._plan)
        return ProcessShard(0, 1, tuple(range(jax.process_count())))

    def as_global(self, batches: Iterable[Any], start: int) -> Iterable[Any]:
        """Return the global batches after step `start`; unchanged without `process_batches`."""
        if not self.process_batches:
            return batches
        needed = itertools.islice(batches, self.config.steps - start)
        return ProcessBatches(self._plan, needed, start + 1)

    @property
    def evaluation_sets(self) -> Mapping[str, Callable[[], Iterable[Any]]]:
        """Functions for the global batches of each evaluation set."""
        if not self.process_batches:
            return self.evaluation
        sets = {}
        for name, batches in self.evaluation.items():
            sets[name] = functools.partial(self._evaluation_batches, batches)
        return sets

    def _evaluation_batches(self, batches: Callable[[], Iterable[Any]]) -> Iterable[Any]:
        return check_ended_together(ProcessBatches(self._plan, batches()))

    @property
    def _plan(self) -> ShardingPlan:
        """Plan of a step of one network."""
        return self.step.parts[self.step.evaluated_part].plan


def _problems_of_items(name: str, items: Iterable[Any], kind: type) -> Iterator[Problem]:
    """Yield a problem for each item of another type."""
    for item in items:
        if not isinstance(item, kind):
            fix = f"instances of spmd.{kind.__name__}"
            yield Problem(name, f"has {describe_value(item)}", fix=fix)


def closing(batches: Iterable[Any]) -> contextlib.AbstractContextManager[Iterable[Any]]:
    """Return a context to close batches, if they have a `close`."""
    if getattr(batches, "close", None):
        return contextlib.closing(batches)  # type: ignore[type-var]
    return contextlib.nullcontext(batches)
