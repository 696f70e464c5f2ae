"""Config of a run of any model: logging, evaluation, checkpoints, checks and recovery."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from spmd.errors import ConfigError, Problem, check_fields, check_local, check_type, did_you_mean
from spmd.observe.mlflow_writer import MLflowConfig
from spmd.observe.wandb_writer import WandBConfig
from spmd.observe.writers import WriterConfig, WriterName
from spmd.storage.address import location_problems

FieldRules = Mapping[str, str | Sequence[Any]]
"""Rules of fields by their dotted names, as `spmd.errors.check_fields` reads them."""

OnNaN = Literal["stop", "skip", "roll-back"]
OnSpike = Literal["ignore", OnNaN]
MemoryPeer = Literal["hosts", "always", "never"]


@runtime_checkable
class HasModel(Protocol):
    """A run's config with the config of a model, as `spmd.run.config.TrainConfig` is."""

    @property
    def model(self) -> Any:
        """The config of the model."""


@dataclasses.dataclass(frozen=True)
class EvaluationInterval:
    """When a run is evaluated."""

    every: int = 0
    """Steps between evaluations; the last step is always evaluated. 0: only the last."""
    patience: int = 0
    """Stop early: number of evaluations without a lower loss on the first set, after which one more
    step is taken and training ends. 0: never."""


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """Loss spikes, rollback, the watchdog's deadlines, and the supervisor's copies of the state."""

    on_spike: OnSpike = "ignore"
    """Response to a loss spike: stop the run; skip updates whose gradient norm is a spike;
    roll-back to the last checkpoint and skip the batches since."""
    spike_factor: float = 3.0
    """A loss (for skip: a gradient norm) above this multiple of its running value is a spike."""
    spike_window: int = 50
    """Steps in the running median of the loss; for skip: time constant of the running mean of the
    gradient norm."""
    skips_in_a_row: int = 20
    """Maximum number of consecutive skipped steps before the run stops; the search of fp16 for its
    loss scale skips up to 11."""
    skipped_share: float = 0.25
    """Maximum fraction of all steps that are skipped, after the first skips_in_a_row of them, or at
    a last step that is skipped, before the run stops."""
    rollbacks: int = 3
    """Maximum number of rollbacks before the run stops."""
    deadline: float = 1800.0
    """Seconds in which a step, an evaluation batch or a checkpoint must finish, or the run exits
    with 70; 0: none."""
    start_deadline: float = 7200.0
    """Seconds from the start of the process group to the end of the first step, compilation
    included; 0: none."""
    supervisor: bool = True
    """Whether spmd train runs under a supervisor, which starts a crashed process again."""
    memory_every: int = 0
    """Steps between copies of the state in memory of the supervisor; 0: the fewest that cost at most
    2 % of the time; -1: no copies."""
    memory_peer: MemoryPeer = "hosts"
    """Other processes with a second copy: hosts: one on another host; always: on any; never: none."""


@dataclasses.dataclass(frozen=True)
class SDCConfig:
    """Checks for silent data corruption; a failed one stops the run."""

    replicas_every: int = 0
    """Steps between bitwise comparisons of replicated arrays across devices. 0: never."""
    repeat_every: int = 0
    """Steps between computing the gradients of one batch twice, which must agree bitwise. 0:
    never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a run of any model.

    A frozen dataclass that extends it adds fields of its own. All fields are recorded in
    checkpoints. A resumed run may change those of this class, except for `seed`, and must have the
    others as they were.

    Raises:
        ConfigError: Invalid fields, all of them in one error.
    """

    steps: int = 1000
    """Total number of steps."""
    seed: int = 0
    """Seed of parameters, shuffling and sample."""
    on_nan: OnNaN = "stop"
    """Response to a non-finite loss or gradient: stop the run; skip the step and count it;
    roll-back to the last checkpoint and skip the batches since. fp16 always skips; it stops or
    rolls back only at the minimum loss scale."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Loss spikes, rollback, deadlines."""
    sdc_checks: SDCConfig = SDCConfig()
    """Checks for silent data corruption."""
    evaluate: EvaluationInterval = EvaluationInterval()
    """Validation."""
    log_every: int = 10
    """Steps between lines of metrics."""
    metrics_to: tuple[WriterName, ...] = ("tensorboard",)
    """Writers of metrics beside metrics.jsonl: tensorboard, wandb, mlflow. The latter two are
    extras, spmd[wandb] and spmd[mlflow]; they write into the run folder, or to a server."""
    wandb: WandBConfig = WandBConfig()
    """Settings of Weights & Biases."""
    mlflow: MLflowConfig = MLflowConfig()
    """Settings of MLflow."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none by steps. The last step is always saved."""
    checkpoint_minutes: float = 15.0
    """Minutes from a checkpoint, or from the start, to the next one; 0: none by time. Several
    processes save at a step whose metrics are logged, up to two times log_every late."""
    keep_every: int = 0
    """Steps between milestones: checkpoints that are saved, whatever checkpoint_every is, and never
    removed. 0: none."""
    max_to_keep: int = 3
    """Number of most recent checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the lowest validation loss to keep in addition."""
    compilation_cache_dir: str = ""
    """JAX's persistent compilation cache, a folder or gs:// or s3:// path; none: disabled; empty:
    JAX_COMPILATION_CACHE_DIR, or ~/.cache/spmd/programs."""
    compiled_step: str = ""
    """File of the compiled step, as `spmd compile` writes it; it is unpickled, so who can write to it
    executes code. none: nothing is loaded or written; empty: that of the run folder, written when
    the step was compiled, and loaded where it fits when the run resumes."""

    field_rules: ClassVar[FieldRules] = {
        "steps": "at least 1",
        "log_every": "at least 1",
        "max_to_keep": "at least 1",
        "checkpoint_every": "at least 0",
        "checkpoint_minutes": "at least 0",
        "keep_every": "at least 0",
        "keep_best": "at least 0",
        "evaluate.every": "at least 0",
        "evaluate.patience": "at least 0",
        "seed": "at least 0 and below 4294967296",
        "on_nan": get_args(OnNaN),
        "recovery.on_spike": get_args(OnSpike),
        "recovery.spike_factor": "at least 1",
        "recovery.spike_window": "at least 2",
        "recovery.skips_in_a_row": "at least 1",
        "recovery.skipped_share": "above 0 and at most 1",
        "recovery.rollbacks": "at least 0",
        "recovery.deadline": "at least 0",
        "recovery.start_deadline": "at least 0",
        "recovery.memory_every": "at least -1",
        "recovery.memory_peer": get_args(MemoryPeer),
        "sdc_checks.replicas_every": "at least 0",
        "sdc_checks.repeat_every": "at least 0",
    }

    def __post_init__(self) -> None:
        # Values of another type have no fields to check.
        problems = list(self.wrong_types()) or list(self.problems())
        if problems:
            raise ConfigError("Invalid configuration:", problems)

    def wrong_types(self) -> Iterator[Problem]:
        """Yield a problem for `metrics_to` and each dataclass field, if it has another type."""
        yield from check_type(
            "metrics_to", self.metrics_to, (tuple, list), f'("{self.metrics_to}",)'
        )
        for field in dataclasses.fields(self):
            kind = type(field.default)
            if dataclasses.is_dataclass(kind):
                package = "spmd." if kind.__module__.startswith("spmd.") else ""
                fix = f"{package}{kind.__name__}(…)"
                yield from check_type(field.name, getattr(self, field.name), kind, fix)

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the values; subclasses add their own."""
        yield from check_fields(self, self.field_rules)
        yield from location_problems("compilation_cache_dir", self.compilation_cache_dir)
        yield from check_local("compiled_step", self.compiled_step)
        names = get_args(WriterName)
        for name in self.metrics_to:
            if name not in names:
                yield Problem("metrics_to", f"names {name!r}", fix=did_you_mean(str(name), names))
        yield from self.writers.problems()

    @property
    def writers(self) -> WriterConfig:
        """Writers of metrics, and their settings."""
        return WriterConfig(self.metrics_to, self.wandb, self.mlflow)
