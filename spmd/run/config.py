"""A training run as one frozen value, written in a Python file and overridden field by field from the command line.

```python
# my_run.py                          spmd train my_run.py --out runs/mine --mesh.fsdp 8 --optimizer.learning-rate 1e-3
config = spmd.TrainConfig(
    model=spmd.models.llama.PRESETS["tinyllama-1b"],
    rules=spmd.partition_rules.llama.LLAMA,
    mesh=spmd.MeshShape(fsdp=8),
    steps=1000,
)
```

A CONFIG file is Python and runs as the user who starts it.
"""

import dataclasses
import json
import operator
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import tyro
from flax import nnx

from spmd.data.loader import DataConfig
from spmd.distributed.xla_flags import PRESET, flag_problems
from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean
from spmd.layers.lm_head import CHUNK
from spmd.model_api.attention_config import attention_problems
from spmd.model_api.precision import make_precision
from spmd.model_api.remat import make_remat
from spmd.optim.config import OptimizerConfig
from spmd.pipeline.schedules import SCHEDULES
from spmd.plan.lora import LoRAConfig
from spmd.sharding.mesh import MeshShape
from spmd.sharding.rules import Rules

SHIPPED = Path(__file__).resolve().parent.parent / "examples"
"""The folder of the configs that ship with the package."""


class ModelConfig(Protocol):
    """What `TrainConfig.model` must be: a frozen dataclass that builds an NNX language model."""

    @property
    def vocab(self) -> int:
        """Vocabulary size."""

    @property
    def layers(self) -> int:
        """Layers with attention."""

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""

    @property
    def matmul_params(self) -> int:
        """Parameters that each token is multiplied with, for the FLOP count."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model: tokens `[batch, seq]` in, logits `[batch, seq, vocab]` or `spmd.model_api.model.Outputs` out."""


_OF_LANGUAGE_MODELS = ("vocab", "layers", "attention_width", "matmul_params", "build")

M = TypeVar("M", bound=ModelConfig)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How layers go in stages over mesh.pipe; without a pipeline, microbatches are accumulated one by one."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, pipedream, or a CSV file with a row of tasks for each stage; only drawn:
    zero-bubble, zb-h2, zb-v."""
    microbatches: int = 0
    """How many parts of the batch go through the stages; 0: up to four for each stage, as the batch allows."""
    chunks: int = 0
    """Groups of layers that each stage has; 0: two under interleaved, else one."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """When and on how much of the validation half the model is evaluated."""

    every: int = 0
    """Steps between evaluations; the last step is always evaluated. 0: only the last."""
    tokens: int = 65_536
    """Tokens of the validation half to evaluate on."""


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Text that the trained model writes at the end of training."""

    prompt: str = ""
    """What the sample continues; empty for no sample."""
    tokens: int = 200
    """How many tokens to add."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 40
    """Draw among the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability; 1 for all."""


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """What is done about faults of a long run."""

    on_spike: Literal["ignore", "stop", "skip", "roll-back"] = "ignore"
    """What a loss that leaps does: stop the run; skip leaves out updates whose gradient norm leaps; roll-back goes on
    from the last checkpoint, behind the batches since."""
    spike_factor: float = 3.0
    """A loss (for skip: a gradient norm) above so many times its usual value is a spike."""
    spike_window: int = 50
    """How many losses the usual value is the median of; for skip: about how many gradient norms it is the mean of."""
    rollbacks: int = 3
    """How often a run may be rolled back before it stops."""
    deadline: float = 1800.0
    """Seconds in which a step, an evaluation batch or a checkpoint must finish, or the run ends with 70; 0: none."""
    start_deadline: float = 7200.0
    """The same for what comes between the meeting of the processes and the first finished step, with compilation."""


@dataclasses.dataclass(frozen=True)
class SDCConfig:
    """How often training is checked for silent data corruption, which stops it."""

    replicas_every: int = 0
    """Steps between comparisons of what devices hold that should be equal, bit for bit. 0: never."""
    repeat_every: int = 0
    """Steps between checks that the gradients of one batch come out the same twice, bit for bit. 0: never."""


_LEAST = {
    "steps": 1,
    "accumulate": 1,
    "logits_chunk": 1,
    "pipeline.microbatches": 0,
    "pipeline.chunks": 0,
    "log_every": 1,
    "checkpoint_every": 0,
    "max_to_keep": 1,
    "keep_best": 0,
    "devices": 0,
    "seed": 0,
    "recovery.spike_factor": 1,
    "recovery.spike_window": 2,
    "recovery.rollbacks": 0,
    "recovery.deadline": 0,
    "recovery.start_deadline": 0,
    "evaluate.every": 0,
    "evaluate.tokens": 1,
    "sdc_checks.replicas_every": 0,
    "sdc_checks.repeat_every": 0,
    "sample.tokens": 0,
    "sample.temperature": 0,
    "sample.top_k": 0,
}
"""Dotted field of `TrainConfig` → its least value."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(Generic[M]):
    """Everything that makes a training run what it is.

    Raises:
        ConfigError: Fields that cannot be used, all at once.
    """

    model: M
    """The model's shape."""
    rules: tyro.conf.Suppress[Rules]
    """The partition rule table of the model's family."""
    mesh: MeshShape = MeshShape(fsdp=-1)
    """The size of each mesh axis; one may be -1."""
    slices: MeshShape = MeshShape()
    """How many times each axis crosses the slow network, between TPU slices or hosts of GPUs; it divides the axis."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: which of optimizer state (1), gradients (2), parameters (3) are split over fsdp."""
    remat: str = "none"
    """What the backward pass keeps of each layer: none (all of it), full (its input), save:NAME,NAME."""
    precision: Literal["float32", "bf16", "bf16-params", "bf16-params-stochastic", "fp16"] = "float32"
    """float32; bf16 or fp16: compute in it; bf16-params: parameters are stored in it too, with float32 master weights,
    or rounded stochastically. Gradients are summed in float32. fp16 scales the loss."""
    attention: Literal["auto", "xla", "chunked", "cudnn", "splash"] = "auto"
    """The kernel of attention: auto (by the devices and the sequence), xla, chunked (long sequences, anywhere), cudnn
    (GPUs, 16-bit floats), splash (TPUs)."""
    context: Literal["ring", "all-to-all"] = "ring"
    """How a sequence split over mesh.sequence attends to itself: ring (keys and values travel), all-to-all (heads are
    exchanged for tokens)."""
    offload: tuple[str, ...] = ()
    """What lives in host memory: optimizer_state, params (those of stacked layers)."""
    xla: tuple[str, ...] = (PRESET,)
    """XLA's flags for the step: preset (those that spmd plan lists, with reasons), NAME=VALUE; nothing: XLA's own."""
    pipeline: PipelineConfig = PipelineConfig()
    """The schedule of a pipeline over mesh.pipe."""
    lora: LoRAConfig = LoRAConfig()
    """Train adapters beside frozen parameters instead of all parameters."""
    init: str = ""
    """A run folder, or one from Hugging Face, whose parameters training starts with; empty: drawn from the seed."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer, its schedule and its clipping."""
    data: DataConfig = DataConfig()
    """The corpus, the tokenizer and the shape of a batch."""
    steps: int = 1000
    """How many steps to take in all."""
    seed: int = 0
    """Of the parameters, the shuffling and the sample."""
    accumulate: int = 1
    """Microbatches that a batch is cut into, to need less memory; the numbers stay the same, but for
    auxiliary losses that are of a whole batch."""
    logits_chunk: int = CHUNK
    """Tokens of a device whose logits are there at once, to need less memory; the numbers stay the same."""
    on_nan: Literal["stop", "skip", "roll-back"] = "stop"
    """What a non-finite loss or gradient does: stop the run; skip that step and count it; roll-back goes on from the
    last checkpoint, behind the batches since. fp16 always skips, and stops or rolls back only where the loss scale
    cannot get any lower."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Loss spikes, rolling back, deadlines."""
    sdc_checks: SDCConfig = SDCConfig()
    """Checks for silent data corruption."""
    evaluate: EvaluationConfig = EvaluationConfig()
    """Validation."""
    sample: SampleConfig = SampleConfig()
    """A sample at the end."""
    out: str = ""
    """The run folder; empty for runs/NAME."""
    log_every: int = 10
    """Steps between lines of metrics."""
    checkpoint_every: int = 0
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    max_to_keep: int = 3
    """How many of the newest checkpoints to keep."""
    keep_best: int = 1
    """How many of those with the lowest validation loss to keep besides."""
    compilation_cache_dir: str = ""
    """The folder for compiled programs, so that a restart compiles nothing; none: keep none; empty: JAX's own setting
    (JAX_COMPILATION_CACHE_DIR), or ~/.cache/spmd/programs."""
    devices: int = 0
    """Simulate this many CPU devices (0: use the real ones)."""

    def __post_init__(self) -> None:
        problems = [
            Problem(field, f"is {value}", fix=f"{least} or more")
            for field, least in _LEAST.items()
            if not (value := operator.attrgetter(field)(self)) >= least
        ]
        for axis, count in self.slices.sizes.items():
            size = self.mesh.sizes[axis]
            if count < 1 or (size > 0 and size % count):
                fix = "a positive number that divides the axis"
                problems.append(Problem(f"slices.{axis}", f"is {count}, and mesh.{axis} is {size}", fix=fix))
        if not 0 < self.sample.top_p <= 1:
            problems.append(Problem("sample.top_p", f"is {self.sample.top_p}", fix="above 0, and at most 1"))
        if self.seed >= 2**32:
            problems.append(Problem("seed", f"is {self.seed}", fix="below 2**32"))
        problems += [
            Problem(field, f"is {value!r}", fix=did_you_mean(str(value), map(str, choices)))
            for field, choices in (
                ("zero", (0, 1, 2, 3)),
                ("on_nan", ("stop", "skip", "roll-back")),
                ("recovery.on_spike", ("ignore", "stop", "skip", "roll-back")),
            )
            if (value := operator.attrgetter(field)(self)) not in choices
        ]
        if (longest := getattr(self.model, "context", self.data.sequence)) < self.data.sequence:
            arithmetic = f"{self.data.sequence} tokens > {longest} positions"
            problems.append(Problem("data.sequence", "is longer than the model", arithmetic, f"{longest} or less"))
        if missing := [name for name in _OF_LANGUAGE_MODELS if not hasattr(self.model, name)]:
            what = f"{type(self.model).__name__} has no {', '.join(missing)}: a TrainConfig is for language models"
            problems.append(Problem("model", what, fix="spmd.make_train_step trains any other, in a program"))
        problems += attention_problems(self.attention, self.context)
        problems += flag_problems(self.xla)
        if self.pipeline.schedule not in SCHEDULES and not self.pipeline.schedule.endswith(".csv"):
            fix = did_you_mean(self.pipeline.schedule, (*SCHEDULES, "FILE.csv"))
            problems.append(Problem("pipeline.schedule", f"there is no {self.pipeline.schedule!r}", fix=fix))
        for make, field in ((make_remat, self.remat), (make_precision, self.precision)):
            try:
                make(field)
            except ConfigError as error:
                problems += error.problems
        if self.recovery.on_spike == "skip" and self.precision == "fp16":
            what = "cannot be skip with fp16, whose loss scale leaves out steps already"
            problems.append(Problem("recovery.on_spike", what, fix="roll-back or stop"))
        if self.accumulate > 0 and self.data.batch % self.accumulate:
            arithmetic = f"{self.data.batch} / {self.accumulate} = {self.data.batch / self.accumulate:.4g}"
            problems.append(Problem("accumulate", "does not divide data.batch", arithmetic, "change one of them"))
        if problems:
            raise ConfigError("This configuration cannot be used:", problems)


def shipped() -> dict[str, Path]:
    """The configs that ship with the package, by name."""
    return {
        path.stem.replace("_", "-"): path
        for path in sorted(SHIPPED.glob("*.py"))
        if "\nconfig = " in path.read_text(encoding="utf-8")
    }


def load_config(name: str) -> TrainConfig:
    """The value of `config` in a Python file.

    Args:
        name: A path, or the name of a shipped config such as `demo`.

    Raises:
        ConfigError: There is no such file, it fails, or it defines no `TrainConfig` named `config`.
    """
    path = Path(name)
    if path.suffix != ".py":
        path = shipped().get(name, path)
    if not path.is_file():
        inside = path / "config.py"
        fix = f"{inside}, which is the run's" if inside.is_file() else did_you_mean(name, shipped())
        raise ConfigError("There is no such config:", [Problem(name, "is no file and no shipped config", fix=fix)])
    try:
        config = runpy.run_path(str(path)).get("config")
    except SpmdError:
        raise
    except SyntaxError as error:
        problem = Problem(f"{path}:{error.lineno}", f"is not Python: {error.msg}")
        raise ConfigError("The config cannot be read:", [problem]) from error
    except (NameError, AttributeError, TypeError, LookupError, ValueError, OSError, ArithmeticError) as error:
        what = f"fails: {type(error).__name__}: {error}"
        raise ConfigError("The config cannot be read:", [Problem(_line_of(error, path), what)]) from error
    except ImportError as error:
        raise ConfigError(
            "The config cannot be read:", [Problem(str(path), f"imports what is missing: {error}")]
        ) from error
    if not isinstance(config, TrainConfig):
        what = f"defines config = {config!r}" if config is not None else "defines no config"
        fix = "config = spmd.TrainConfig(...)"
        raise ConfigError("The config cannot be read:", [Problem(str(path), what, fix=fix)])
    return config


def _line_of(error: BaseException, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def config_values(config: Any) -> dict[str, Any]:
    """The config as JSON values, without its rules, which the config file keeps.

    Raises:
        ConfigError: A field holds a value that JSON has no word for.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules):
            values[field.name] = config_values(value)
        elif not isinstance(value, Rules):
            try:
                values[field.name] = json.loads(json.dumps(value))
            except TypeError as error:
                where = f"{type(config).__name__}.{field.name}"
                problem = Problem(
                    where, f"cannot be kept in the run folder: {error}", fix="a number, a word or a tuple"
                )
                raise ConfigError("This configuration cannot be used:", [problem]) from error
    return values


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """The config with the fields that `values`, from `config_values`, gives."""

    def restore(old: Any, value: Any) -> Any:
        if isinstance(value, Mapping) and dataclasses.is_dataclass(old):
            return with_values(old, value)
        return tuple(restore(None, item) for item in value) if isinstance(value, list) else value

    return dataclasses.replace(config, **{name: restore(getattr(config, name), v) for name, v in values.items()})


def config_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted path → [before, after], for the values that differ.

    Example:
        >>> config_difference({"mesh": {"fsdp": 1}, "steps": 5}, {"mesh": {"fsdp": 4}, "steps": 5})
        {'mesh.fsdp': [1, 4]}
    """
    out: dict[str, list[Any]] = {}
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            out |= {f"{name}.{path}": pair for path, pair in config_difference(old, new).items()}
        elif old != new:
            out[name] = [old, new]
    return out
