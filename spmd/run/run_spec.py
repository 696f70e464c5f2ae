"""Definition of a run: a step, its batches, evaluation sets, and the record of it."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.errors import ConfigError, Problem, check_call, check_type, describe_value
from spmd.gradients.losses import LossFn
from spmd.observe.metrics import Writer
from spmd.optim.skip_updates import counts_skips
from spmd.run.external_state import ExternalState
from spmd.run.hooks import Throughput
from spmd.run.run_config import RunConfig
from spmd.run.run_dir import RunDir
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
        folder: The run folder, made if it does not exist.
        step: The train step, with its plan; or an `spmd.AlternatingStep` of several networks.
        batches: `(start, steps)` → the batches of those steps.
        config: When to log, evaluate and save, and how to recover; its fields are recorded in
            checkpoints.
        evaluation: Name → a function that returns the batches of an evaluation set, the same at
            each call. Checkpoints are ranked by the loss on the first.
        evaluation_loss: Loss of these sets, such as that of the step without dropout.
        data: Fingerprint of the data, which a resumed run and all processes must agree on.
        hooks: Further hooks, called after those of the run and before the one that saves.
        writers: Further writers of metrics, called on the first process; all are closed at the end
            of the run.
        throughput: What a step processes; by default, examples: the length of the batch's first
            array.
        batch: Arrays or shapes of a batch, for compilation; by default, of the first one.
        reloaded: Part of the state that is not saved, but loaded again.
        initial_state: Makes the state of a run that is not resumed; by default,
            `step.init_state(config.seed)`.
        text: What is printed at the start and written to `plan.txt`; by default, the plan.
        notes: What is printed after it.
        source: Config file that is copied into the folder.

    Raises:
        ConfigError: An argument cannot be used.
    """

    folder: str | Path
    step: TrainStep | AlternatingStep
    batches: OpenBatches
    _: dataclasses.KW_ONLY
    config: RunConfig
    evaluation: Mapping[str, Callable[[], Iterable[Any]]] = dataclasses.field(default_factory=dict)
    evaluation_loss: LossFn | None = None
    data: str = ""
    hooks: Sequence[Hook] = ()
    writers: Sequence[Writer] = ()
    throughput: Throughput | None = None
    batch: Any = None
    reloaded: ExternalState | None = None
    initial_state: Callable[[], Any] | None = None
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
        yield from check_call("batches", self.batches, "start, steps", example)
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

    @property
    def run_dir(self) -> RunDir:
        """The folder."""
        return RunDir(Path(self.folder))

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
        """Return the first batch of training, on the mesh."""
        with closing(self.batches(0, 1)) as batches:
            return self.step.place_batch(next(iter(batches)))


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
