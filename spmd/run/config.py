"""Training run as one frozen dataclass, written in a Python file; any field can be overridden on the command line.

```python
# my_run.py                          spmd train my_run.py --out runs/mine --mesh.fsdp 8 --optimizer.learning-rate 1e-3
config = spmd.TrainConfig(
    model=spmd.models.llama.PRESETS["tinyllama-1b"],
    rules=spmd.partition_rules.llama.LLAMA,
    mesh=spmd.MeshShape(fsdp=8),
    steps=1000,
)
```
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import tyro
from flax import nnx

from spmd.data.loader import DataConfig
from spmd.distributed.xla_flags import PRESET, flag_problems
from spmd.errors import ConfigError, Problem, check_fields, check_type, did_you_mean
from spmd.layers.lm_head import CHUNK
from spmd.model_api.attention_config import attention_problems
from spmd.model_api.compress import NO_COMPRESSION, CompressConfig
from spmd.model_api.precision import make_precision
from spmd.model_api.quantize import table_problems
from spmd.model_api.remat import make_remat
from spmd.optim.config import OptimizerConfig
from spmd.pipeline.schedules import SCHEDULES
from spmd.plan.lora import LoRAConfig
from spmd.sharding.mesh import MeshShape
from spmd.sharding.rules import Rules


class ModelConfig(Protocol):
    """Interface of `TrainConfig.model`: a frozen dataclass that builds an NNX language model.

    Its fields are flags, `--model.FIELD`, and are recorded in checkpoints: numbers, strings, tuples and dataclasses.
    """

    @property
    def vocab(self) -> int:
        """Vocabulary size."""

    @property
    def layers(self) -> int:
        """Number of layers with attention."""

    @property
    def attention_width(self) -> int:
        """Total width of the query heads."""

    @property
    def matmul_params(self) -> int:
        """Number of parameters that each token is multiplied with, for the FLOP count."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build a model: tokens `[batch, seq]` → logits `[batch, seq, vocab]` or `spmd.model_api.model.Outputs`."""


M = TypeVar("M", bound=ModelConfig)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Pipeline schedule over mesh.pipe. Without a pipeline, gradients are accumulated over the microbatches."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, pipedream, or a CSV file with a row of tasks per stage. Only for plots: zero-bubble,
    zb-h2, zb-v, v-half, v-min."""
    microbatches: int = 0
    """Microbatches per batch; 0: up to four per stage, as the batch allows."""
    chunks: int = 0
    """Groups of layers per stage; 0: two for interleaved, otherwise one."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split."""

    every: int = 0
    """Steps between evaluations; the last step is always evaluated. 0: only the last."""
    tokens: int = 65_536
    """Number of validation tokens to evaluate on."""


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Text that is generated after the last step."""

    prompt: str = ""
    """Prompt of the sample; empty for no sample."""
    tokens: int = 200
    """Number of tokens to generate; fewer where the training sequences end before."""
    temperature: float = 0.8
    """Sampling temperature; 0 for greedy decoding."""
    top_k: int = 40
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose total probability is at least this; 1 for all."""


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """Loss spikes, rollback and the watchdog's deadlines."""

    on_spike: Literal["ignore", "stop", "skip", "roll-back"] = "ignore"
    """Response to a loss spike: stop the run; skip updates whose gradient norm is a spike; roll-back to the last
    checkpoint and skip the batches since."""
    spike_factor: float = 3.0
    """A loss (for skip: a gradient norm) above this multiple of its running value is a spike."""
    spike_window: int = 50
    """Steps in the running median of the loss; for skip: time constant of the running mean of the gradient norm."""
    skips_in_a_row: int = 20
    """Maximum number of consecutive skipped steps before the run stops; the search of fp16 for its loss scale skips up
    to 11."""
    skipped_share: float = 0.25
    """Maximum fraction of all steps that are skipped, after the first skips_in_a_row of them, or at a last step that is
    skipped, before the run stops."""
    rollbacks: int = 3
    """Maximum number of rollbacks before the run stops."""
    deadline: float = 1800.0
    """Seconds in which a step, an evaluation batch or a checkpoint must finish, or the run exits with 70; 0: none."""
    start_deadline: float = 7200.0
    """Seconds from the start of the process group to the end of the first step, compilation included; 0: none."""


@dataclasses.dataclass(frozen=True)
class SDCConfig:
    """Checks for silent data corruption, which stops the run."""

    replicas_every: int = 0
    """Steps between bitwise comparisons of replicated arrays across devices. 0: never."""
    repeat_every: int = 0
    """Steps between computing the gradients of one batch twice, which must agree bitwise. 0: never."""


_LARGEST = 2**31 - 1
_FIELD_RULES: Mapping[str, str | Sequence[Any]] = {
    **dict.fromkeys(("steps", "accumulate", "logits_chunk", "log_every", "max_to_keep"), "at least 1"),
    **dict.fromkeys(("checkpoint_every", "keep_best", "devices"), "at least 0"),
    "seed": "at least 0 and below 4294967296",
    "zero": (0, 1, 2, 3),
    "exchange_once": ("auto", "none", "data", "data+fsdp"),
    "on_nan": ("stop", "skip", "roll-back"),
    **dict.fromkeys(("pipeline.microbatches", "pipeline.chunks"), "at least 0 and at most 65536"),
    "evaluate.every": "at least 0",
    "evaluate.tokens": "at least 1",
    **dict.fromkeys(("sample.tokens", "sample.temperature", "sample.top_k"), "at least 0"),
    "sample.top_p": "above 0 and at most 1",
    "recovery.on_spike": ("ignore", "stop", "skip", "roll-back"),
    "recovery.spike_factor": "at least 1",
    "recovery.spike_window": "at least 2",
    "recovery.skips_in_a_row": "at least 1",
    "recovery.skipped_share": "above 0 and at most 1",
    **dict.fromkeys(("recovery.rollbacks", "recovery.deadline", "recovery.start_deadline"), "at least 0"),
    **dict.fromkeys(("sdc_checks.replicas_every", "sdc_checks.repeat_every"), "at least 0"),
}


@dataclasses.dataclass(frozen=True)
class TrainConfig(Generic[M]):
    """Complete configuration of a training run.

    Raises:
        ConfigError: Invalid fields, all of them in one error.
    """

    model: M
    """Hyperparameters of the model."""
    rules: tyro.conf.Suppress[Rules]
    """Partition rules of the model family."""
    mesh: MeshShape = MeshShape(fsdp=-1)
    """Size of each mesh axis; one may be -1."""
    slices: MeshShape = MeshShape()
    """Number of TPU slices or GPU hosts that each axis spans over the slow network; it divides the axis."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: shard optimizer state (1), also gradients (2), also parameters (3) over fsdp."""
    remat: str = "none"
    """Activations that each layer saves for the backward pass: none (all of them), full (its input), save:NAME,NAME."""
    precision: Literal["float32", "bf16", "bf16-params", "bf16-params-stochastic", "fp16"] = "float32"
    """float32; bf16 or fp16: compute dtype; bf16-params: parameters are also stored in it, with float32 master weights
    or stochastic rounding. Gradients are accumulated in float32. fp16 scales the loss."""
    compress: CompressConfig = NO_COMPRESSION
    """Fewer bits for what devices send to each other: gathered parameters, and gradients."""
    quantize: str = ""
    """Matmuls of linear layers in fewer bits: fp8, fp8-delayed, fp8-block, mxfp8, int8 for all layers of blocks, or
    rows PATTERN=RECIPE,PATTERN=RECIPE of kernels' paths, of which the first that matches decides; empty: none."""
    attention: Literal["auto", "xla", "chunked", "cudnn", "splash"] = "auto"
    """Attention kernel: auto (by device and sequence length), xla, chunked (long sequences, any device), cudnn (GPUs,
    16-bit floats), splash (TPUs)."""
    context: Literal["ring", "all-to-all"] = "ring"
    """Attention over a sequence split over mesh.sequence: ring (rotates keys and values), all-to-all (exchanges heads
    for tokens)."""
    offload: tuple[str, ...] = ()
    """State in host memory: optimizer_state, params (of stacked layers)."""
    xla: tuple[str, ...] = (PRESET,)
    """XLA flags of the step: preset (listed by spmd plan, with reasons), NAME=VALUE; empty: XLA's defaults."""
    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline schedule over mesh.pipe."""
    lora: LoRAConfig = LoRAConfig()
    """Train LoRA adapters of frozen parameters instead of all parameters."""
    init: str = ""
    """Run folder or Hugging Face folder with the initial parameters; empty: random initialization."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, learning rate schedule and clipping."""
    data: DataConfig = DataConfig()
    """Corpus, tokenizer and batch shape."""
    steps: int = 1000
    """Total number of steps."""
    seed: int = 0
    """Seed of parameters, shuffling and sample."""
    accumulate: int = 1
    """Gradient accumulation: microbatches per batch, to save memory. Only auxiliary losses that are computed over a
    whole batch change."""
    exchange_once: Literal["auto", "none", "data", "data+fsdp"] = "auto"
    """Mesh axes over which gradients are exchanged once a step, not in each microbatch, of accumulation or a pipeline:
    auto (those that take no memory, with a reason where there are none), none, data, data+fsdp (holds gradients and
    parameters whole over fsdp)."""
    logits_chunk: int = CHUNK
    """Tokens per device whose logits are computed at once, to save memory; the results stay the same."""
    on_nan: Literal["stop", "skip", "roll-back"] = "stop"
    """Response to a non-finite loss or gradient: stop the run; skip the step and count it; roll-back to the last
    checkpoint and skip the batches since. fp16 always skips; it stops or rolls back only at the minimum loss scale."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Loss spikes, rollback, deadlines."""
    sdc_checks: SDCConfig = SDCConfig()
    """Checks for silent data corruption."""
    evaluate: EvaluationConfig = EvaluationConfig()
    """Validation."""
    sample: SampleConfig = SampleConfig()
    """Sample after the last step."""
    out: str = ""
    """Run folder; empty for runs/NAME."""
    log_every: int = 10
    """Steps between lines of metrics."""
    checkpoint_every: int = 0
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    max_to_keep: int = 3
    """Number of most recent checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the lowest validation loss to keep in addition."""
    compilation_cache_dir: str = ""
    """JAX's persistent compilation cache; none: disabled; empty: JAX_COMPILATION_CACHE_DIR, or
    ~/.cache/spmd/programs."""
    devices: int = 0
    """Number of CPU devices to simulate (0: use the real devices)."""

    def __post_init__(self) -> None:
        if problems := list(self._wrong_types()):
            raise ConfigError("This configuration cannot be used:", problems)
        problems = check_fields(self, _FIELD_RULES) + list(_large_numbers(self))
        problems += attention_problems(self.attention, self.context)
        problems += [*flag_problems(self.xla), *self.compress.problems(), *table_problems(self.quantize)]
        for make, name in ((make_remat, self.remat), (make_precision, self.precision)):
            try:
                make(name)
            except ConfigError as error:
                problems += error.problems
        if problems := [*problems, *self._inconsistencies()]:
            raise ConfigError("This configuration cannot be used:", problems)

    def _wrong_types(self) -> Iterator[Problem]:
        yield from check_type("rules", self.rules, Rules, "spmd.Rules(…)")
        for field in dataclasses.fields(self):
            if dataclasses.is_dataclass(kind := type(field.default)):
                yield from check_type(field.name, getattr(self, field.name), kind, f"spmd.{kind.__name__}(…)")

    def _inconsistencies(self) -> Iterator[Problem]:
        if self.pipeline.schedule not in SCHEDULES and not self.pipeline.schedule.endswith(".csv"):
            fix = did_you_mean(self.pipeline.schedule, (*SCHEDULES, "FILE.csv"))
            yield Problem("pipeline.schedule", f"is {self.pipeline.schedule!r}", fix=fix)
        for axis, count in self.slices.sizes.items():
            size = self.mesh.sizes[axis]
            if count < 1 or (size > 0 and size % count):
                fix = "a positive number that divides the axis"
                yield Problem(f"slices.{axis}", f"is {count}, and mesh.{axis} is {size}", fix=fix)
        longest = getattr(self.model, "context", self.data.sequence)
        if longest < self.data.sequence:
            detail = f"{self.data.sequence} tokens > {longest} positions"
            yield Problem("data.sequence", "exceeds the model's context length", detail, f"at most {longest}")
        yield from _model_problems(self.model)
        if self.recovery.on_spike == "skip" and self.precision == "fp16":
            what = "cannot be skip with fp16: its loss scaling already skips steps"
            yield Problem("recovery.on_spike", what, fix="roll-back or stop")
        if self.accumulate > 0 and self.data.batch % self.accumulate:
            detail = f"{self.data.batch} / {self.accumulate} = {self.data.batch / self.accumulate:.4g}"
            yield Problem("accumulate", "does not divide data.batch", detail, "change one of them")


def _model_problems(model: Any) -> Iterator[Problem]:
    """Yield what a model's config lacks of `ModelConfig`."""
    name, see = type(model).__name__, "write @dataclasses.dataclass(frozen=True) above the class"
    wanted = [name for name in vars(ModelConfig) if not name.startswith("_")]
    if missing := [name for name in wanted if not hasattr(model, name)]:
        what = f"{name} has no {', '.join(missing)}: TrainConfig is for language models"
        yield Problem("model", what, fix="train other models with spmd.make_train_step")
    elif not callable(model.build):
        yield Problem("model", f"{name}.build is no method", fix="def build(self, rngs: nnx.Rngs) -> nnx.Module")
    if not dataclasses.is_dataclass(model) or isinstance(model, type):
        yield Problem("model", f"{model if isinstance(model, type) else name} is no dataclass instance", fix=see)
    elif "__dataclass_fields__" not in vars(type(model)) and (own := inspect.get_annotations(type(model))):
        yield Problem("model", f"{name} is no dataclass itself, so {', '.join(own)} cannot be set", fix=see)


def _large_numbers(config: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each integer of a config that JAX's 32 bits do not hold; `seed` has a rule of its own."""
    for name in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules | type):
            yield from _large_numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int) and abs(value) > _LARGEST and name != "seed":
            yield Problem(f"{prefix}{name}", f"is {value:,}", fix=f"at most {_LARGEST:,}, the largest 32-bit integer")


def config_values(config: Any) -> dict[str, Any]:
    """Return the config as JSON values, without its rules; of a class, the defaults of those fields that have one.

    A value that JSON does not have is a `ConfigError`.
    """
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(config) if hasattr(config, field.name)):
        value = getattr(config, name)
        if isinstance(value, Rules):
            continue
        try:
            is_config = dataclasses.is_dataclass(value)
            values[name] = config_values(value) if is_config else json.loads(json.dumps(value))
        except TypeError as error:
            what = f"cannot be saved as JSON: {error}"
            problem = Problem(f"{type(config).__name__}.{name}", what, fix="a number, a string or a tuple")
            raise ConfigError("This configuration cannot be used:", [problem]) from error
    return values


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the config with the fields in `values`, in the format of `config_values`."""

    def restore(old: Any, value: Any) -> Any:
        if isinstance(value, Mapping) and dataclasses.is_dataclass(old):
            return with_values(old, value)
        return tuple(restore(None, item) for item in value) if isinstance(value, list) else value

    return dataclasses.replace(config, **{name: restore(getattr(config, name), v) for name, v in values.items()})


def config_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return dotted path → [before, after] for the values that differ.

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
