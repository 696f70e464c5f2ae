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
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

import tyro
from flax import nnx

from spmd.data.chat import ChatConfig
from spmd.data.loader import DataConfig
from spmd.distributed.xla_flags import PRESET, flag_problems
from spmd.errors import ConfigError, Problem, check_type, did_you_mean
from spmd.layers.lm_head import CHUNK
from spmd.lora.adapters import LoRAConfig
from spmd.model_api.attention_config import attention_problems
from spmd.model_api.remat import make_remat
from spmd.optim.config import OptimizerConfig
from spmd.pipeline.schedules import SCHEDULES
from spmd.precision import make_precision
from spmd.run.callables import describe_callable
from spmd.run.run_config import EvaluationInterval, FieldRules, RunConfig
from spmd.settings.compress import NO_COMPRESSION, CompressConfig
from spmd.settings.quantize import table_problems
from spmd.sharding.mesh import MeshShape
from spmd.sharding.rules import Rules


class ModelConfig(Protocol):
    """Interface of `TrainConfig.model`: a frozen dataclass that builds an NNX language model.

    Its fields are flags, `--model.FIELD`, and are recorded in checkpoints: numbers, strings, tuples and dataclasses.
    With the properties of `CountsFlops` it has a utilization and a predicted step time. `context`, if there, is the
    longest sequence; `router`, a `spmd.layers.router.RouterConfig`, adds a line about experts.
    """

    @property
    def vocab(self) -> int:
        """Vocabulary size."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build a model: tokens `[batch, seq]` → logits `[batch, seq, vocab]` or `spmd.model_api.model.Outputs`."""


@runtime_checkable
class CountsFlops(Protocol):
    """What a model's config may say besides, to count the model FLOPs of a token."""

    @property
    def layers(self) -> int:
        """Number of layers with attention."""

    @property
    def attention_width(self) -> int:
        """Total width of the query heads."""

    @property
    def matmul_params(self) -> int:
        """Number of parameters that each token is multiplied with."""


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
class EvaluationConfig(EvaluationInterval):
    """Evaluation on the validation split."""

    tokens: int = 65_536
    """Number of validation tokens to evaluate on."""
    sets: tuple[str, ...] = ()
    """More texts to evaluate on, NAME=SOURCE, as many tokens of each: NAME_loss and NAME_accuracy."""


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


_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TrainConfig(RunConfig, Generic[M]):
    """Complete configuration of a language model's training run.

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
    task: Literal["pretrain", "sft"] = "pretrain"
    """What is trained: pretrain, all of a text; sft (supervised fine-tuning), what the assistant says in
    conversations, lines of .jsonl files."""
    chat: ChatConfig = ChatConfig()
    """Conversations, with task sft."""
    accumulate: int = 1
    """Gradient accumulation: microbatches per batch, to save memory. Only auxiliary losses that are computed over a
    whole batch change."""
    exchange_once: Literal["auto", "none", "data", "data+fsdp"] = "auto"
    """Mesh axes over which gradients are exchanged once a step, not in each microbatch, of accumulation or a pipeline:
    auto (those that take no memory, with a reason where there are none), none, data, data+fsdp (holds gradients and
    parameters whole over fsdp)."""
    logits_chunk: int = CHUNK
    """Tokens per device whose logits are computed at once, to save memory; the results stay the same."""
    evaluate: EvaluationConfig = dataclasses.field(default=EvaluationConfig(), kw_only=True)
    """Validation."""
    sample: SampleConfig = SampleConfig()
    """Sample after the last step."""
    out: str = ""
    """Run folder; empty for runs/NAME. For `spmd report`, the file of the report."""
    devices: int = 0
    """Number of CPU devices to simulate (0: use the real devices)."""

    field_rules: ClassVar[FieldRules] = {
        **RunConfig.field_rules,
        **dict.fromkeys(("accumulate", "logits_chunk"), "at least 1"),
        "devices": "at least 0",
        "zero": (0, 1, 2, 3),
        "task": ("pretrain", "sft"),
        "exchange_once": ("auto", "none", "data", "data+fsdp"),
        **dict.fromkeys(("pipeline.microbatches", "pipeline.chunks"), "at least 0 and at most 65536"),
        "evaluate.tokens": "at least 1",
        **dict.fromkeys(("sample.tokens", "sample.temperature", "sample.top_k"), "at least 0"),
        "sample.top_p": "above 0 and at most 1",
    }

    def wrong_types(self) -> Iterator[Problem]:
        """Yield a problem for each field that should have fields of its own and has not, and for the rules."""
        yield from check_type("rules", self.rules, Rules, "spmd.Rules(…)")
        yield from super().wrong_types()

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the values, alone and together."""
        yield from super().problems()
        yield from _large_numbers(self)
        yield from attention_problems(self.attention, self.context)
        yield from (*flag_problems(self.xla), *self.compress.problems(), *table_problems(self.quantize))
        for make, name in ((make_remat, self.remat), (make_precision, self.precision)):
            try:
                make(name)
            except ConfigError as error:
                yield from error.problems
        yield from self._inconsistencies()

    def _inconsistencies(self) -> Iterator[Problem]:
        if self.pipeline.schedule not in SCHEDULES and not self.pipeline.schedule.endswith(".csv"):
            fix = did_you_mean(self.pipeline.schedule, (*SCHEDULES, "FILE.csv"))
            yield Problem("pipeline.schedule", f"is {self.pipeline.schedule!r}", fix=fix)
        for axis, count in self.slices.sizes.items():
            size = self.mesh.sizes[axis]
            if count < 1 or (size > 0 and size % count):
                fix = "a positive number that divides the axis"
                yield Problem(f"slices.{axis}", f"is {count}, and mesh.{axis} is {size}", fix=fix)
        if self.task == "pretrain" and self.chat != ChatConfig():
            yield Problem("chat", "is for conversations, and task is pretrain", fix="--task sft")
        if self.task == "sft" and self.data.packing == "windows":
            fix = "--data.packing documents or padded"
            yield Problem("data.packing", "is windows, which cut conversations anywhere", fix=fix)
        if self.task == "sft" and self.data.streaming:
            yield Problem("data.streaming", "is for text, and task is sft", fix="no --data.streaming")
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
        yield Problem("model", what, fix="spmd.Run(folder, step, batches, config=spmd.RunConfig(…)) for others")
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

    A function is text that tells it apart (`describe_callable`). A value that JSON does not have is a `ConfigError`.
    """
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(config) if hasattr(config, field.name)):
        value = getattr(config, name)
        if isinstance(value, Rules):
            continue
        try:
            if dataclasses.is_dataclass(value):
                values[name] = config_values(value)
            else:
                values[name] = describe_callable(value) if callable(value) else json.loads(json.dumps(value))
        except TypeError as error:
            what = f"cannot be saved as JSON: {error}"
            problem = Problem(f"{type(config).__name__}.{name}", what, fix="a number, a string or a tuple")
            raise ConfigError("This configuration cannot be used:", [problem]) from error
    return values


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the config with the fields in `values`, in the format of `config_values`; functions stay as they are."""

    def restore(old: Any, value: Any) -> Any:
        if callable(old) and isinstance(value, str):
            return old
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
