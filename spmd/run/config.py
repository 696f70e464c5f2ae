"""Training run as one frozen dataclass, written in a Python file.

Any field can be overridden on the command line:
`spmd train my_run.py --out runs/mine --mesh.fsdp 8 --optimizer.learning-rate 1e-3`.

```python
# my_run.py
config = spmd.TrainConfig(
    model=spmd.models.llama.PRESETS["tinyllama-1b"],
    rules=spmd.partition_rules.llama.LLAMA,
    mesh=spmd.MeshShape(fsdp=8),
    steps=1000,
)
```
"""

import ast
import dataclasses
import inspect
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    runtime_checkable,
)

import tyro
from flax import nnx

from spmd.data.chat import ChatConfig
from spmd.data.hub import source_problems
from spmd.data.loader import DataConfig
from spmd.diloco.config import DiLoCoConfig
from spmd.distributed.xla_flags import PRESET, flag_problems
from spmd.errors import ConfigError, Problem, check_type, did_you_mean
from spmd.layers.lm_head import CHUNK
from spmd.lora.config import LoRAConfig
from spmd.model_interface.activation_clips import form_problems
from spmd.model_interface.attention_config import ContextChoice, KernelChoice, attention_problems
from spmd.model_interface.model_config import context_of, heads_of
from spmd.model_interface.remat import make_remat
from spmd.optim.config import OptimizerConfig
from spmd.pipeline.schedules import SCHEDULES
from spmd.precision import canonical_precision, make_precision
from spmd.run.callables import describe_callable
from spmd.run.run_config import EvaluationInterval, FieldRules, RunConfig
from spmd.settings.compress import NO_COMPRESSION, CompressConfig, powersgd_rank
from spmd.settings.distillation import DistillationConfig
from spmd.settings.dpo import DPOConfig
from spmd.settings.quantize import table_problems
from spmd.sharding.mesh import MeshShape
from spmd.sharding.optimizer_state import ZeroStage
from spmd.sharding.rules import Rules
from spmd.storage.address import location_problems

Task = Literal["pretrain", "sft", "dpo"]
ExchangeOnce = Literal["auto", "none", "data", "data+fsdp"]
PrecisionName = Literal[
    "float32",
    "bf16",
    "bf16-params",
    "bf16-params-stochastic",
    "fp16",
    "fp32",
    "bfloat16",
    "float16",
]


class ModelConfig(Protocol):
    """Interface of `TrainConfig.model`: a frozen dataclass to build an NNX language model.

    Its fields are flags, `--model.FIELD`, and are recorded in checkpoints: numbers, strings, tuples
    and dataclasses. With the properties of `CountsFlops` it has a utilization and a predicted step
    time. Others are in `spmd.model_interface.model_config`: `context`, if there, is the longest sequence;
    `router`, a `spmd.layers.router.RouterConfig`, adds a line about experts.
    """

    @property
    def vocab(self) -> int:
        """Vocabulary size."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build a model: tokens `[batch, seq]` → logits `[batch, seq, vocab]`.

        Instead of logits it may return `spmd.model_interface.model.Outputs`.
        """


@runtime_checkable
class CountsFlops(Protocol):
    """Optional numbers of a model's config, to count the model FLOPs of a token."""

    @property
    def layers(self) -> int:
        """Number of layers with attention."""

    @property
    def attention_width(self) -> int:
        """Total width of the query heads."""

    @property
    def matmul_params(self) -> int:
        """Number of parameters multiplied with each token."""


M = TypeVar("M", bound=ModelConfig)


Kept = Literal["saved", "inputs"]
KEPT: tuple[Kept, ...] = get_args(Kept)
"""What a stage may keep: see `PipelineConfig.keep`."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Pipeline schedule over mesh.pipe.

    Without a pipeline, gradients are accumulated over the microbatches.
    """

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, pipedream, or a CSV file with a row of tasks per stage."""
    microbatches: int = 0
    """Microbatches per batch; 0: up to four per stage, as the batch allows."""
    chunks: int = 0
    """Groups of layers per stage; 0: two for interleaved, otherwise one."""
    keep: Kept = "saved"
    """What a stage keeps of a microbatch from its forward to its backward task: saved, what remat
    saves; inputs, its input alone, from which the backward task runs the forward pass again: less
    memory, a quarter more time. pipedream keeps inputs."""

    @property
    def stage_chunks(self) -> int:
        """Groups of layers per stage, with the default in place of 0."""
        if self.chunks:
            return self.chunks
        if self.schedule == "interleaved":
            return 2
        return 1

    @property
    def recomputes(self) -> bool:
        """Whether a backward task runs the forward pass of its stage again."""
        return self.keep == "inputs" or self.schedule == "pipedream"


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(EvaluationInterval):
    """Evaluation on the validation split."""

    tokens: int = 65_536
    """Number of validation tokens to evaluate on."""
    sets: tuple[str, ...] = ()
    """More texts to evaluate on, NAME=SOURCE, as many tokens of each: NAME_loss and
    NAME_accuracy."""


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Text generated after the last step."""

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


EXECUTION_FIELDS = ("stacked", "unroll")
"""Model fields without an influence on the function of a model."""
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
    """Number of TPU slices or GPU hosts that each axis spans over the slow network; it divides the
    axis."""
    zero: ZeroStage = 3
    """ZeRO stage: shard optimizer state (1), also gradients (2), also parameters (3) over fsdp and
    sequence."""
    remat: str = "none"
    """Activations that each layer saves for the backward pass: none (all of them), full (its
    input), save:NAME,NAME."""
    precision: PrecisionName = "float32"
    """float32; bf16 or fp16: compute dtype; bf16-params: parameters are also stored in it, with
    float32 master weights or stochastic rounding. Gradients are accumulated in float32. fp16 scales
    the loss. bfloat16 is bf16, float16 is fp16, and fp32 is float32."""
    compress: CompressConfig = NO_COMPRESSION
    """Fewer bits for what devices send to each other: gathered parameters, and gradients."""
    quantize: str = ""
    """Matmuls of linear layers in fewer bits: fp8, fp8-delayed, fp8-block, mxfp8, int8 for all
    layers of blocks, or rows PATTERN=RECIPE,PATTERN=RECIPE of kernels' paths, of which the first
    that matches decides; empty: none."""
    attention: KernelChoice = "auto"
    """Attention kernel: auto (by device and sequence length), xla, chunked (long sequences, any
    device), cudnn (GPUs, 16-bit floats), splash (TPUs)."""
    context: ContextChoice = "auto"
    """Attention over a sequence split over mesh.sequence: gather (keys and values, with splash),
    ring (rotates them), all-to-all (exchanges heads for tokens); auto by kernel."""
    offload: tuple[str, ...] = ()
    """State in host memory: optimizer_state, params (of stacked layers)."""
    xla: tuple[str, ...] = (PRESET,)
    """XLA flags of the step: preset (listed by spmd plan, with reasons), quick (without those that
    lengthen compilation), NAME=VALUE; empty: XLA's defaults."""
    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline schedule over mesh.pipe."""
    lora: LoRAConfig = LoRAConfig()
    """Train LoRA adapters of frozen parameters instead of all parameters."""
    init: str = ""
    """Run folder or Hugging Face folder with the initial parameters; empty: random
    initialization."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, learning rate schedule and clipping."""
    data: DataConfig = DataConfig()
    """Corpus, tokenizer and batch shape."""
    task: Task = "pretrain"
    """What is trained: pretrain, all of a text; sft (supervised fine-tuning), what the assistant
    says in conversations, rows of JSON; dpo, to prefer one of two answers, pairs in rows of
    JSON."""
    chat: ChatConfig = ChatConfig()
    """Conversations, with task sft or dpo."""
    accumulate: int = 1
    """Gradient accumulation: microbatches per batch, to save memory. Only auxiliary losses that are
    computed over a whole batch change."""
    defer_grad_reduction: ExchangeOnce = "auto"
    """Mesh axes over which gradients are exchanged once a step, not in each microbatch, of
    accumulation or a pipeline: auto (those that take no memory, with a reason where there are
    none), none, data, data+fsdp (holds gradients and parameters whole over fsdp)."""
    logits_chunk: int = CHUNK
    """Tokens per device whose logits are computed at once, to save memory; the results stay the
    same."""
    evaluate: EvaluationConfig = dataclasses.field(default=EvaluationConfig(), kw_only=True)
    """Validation."""
    sample: SampleConfig = SampleConfig()
    """Sample after the last step."""
    out: str = ""
    """Run folder; empty for runs/NAME. For `spmd report`, the file of the report."""
    devices: int = 0
    """Number of CPU devices to simulate (0: use the real devices)."""
    diloco: DiLoCoConfig = DiLoCoConfig()
    """Replicas along mesh.data, each with steps of its own, synchronized every few steps."""
    mup: tuple[str, ...] = ()
    """Maximal update parametrization: fields of the narrower model whose learning rate is used,
    FIELD=VALUE, such as d_model=256 heads=4; empty: the same rate for all parameters."""
    dpo: DPOConfig = DPOConfig()
    """Loss of pairs of answers, with task dpo."""
    logit_z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits, added to the loss in training so that they
    do not drift, such as 1e-4; the metric logit_z_loss is this part of the loss."""
    norms: bool = False
    """Add norms of parameters, gradients and updates to the metrics, by module and layer."""
    teacher: str = ""
    """Run folder or Hugging Face folder of a frozen model with the same tokens, to distil: what it
    predicts is trained beside the targets. Empty: none."""
    distillation: DistillationConfig = DistillationConfig()
    """Loss beside the teacher."""
    clip_activations: str = ""
    """Activations whose gradients are clipped, token by token, with the largest norm of each, such as
    residual=1; empty: none."""

    field_rules: ClassVar[FieldRules] = {
        **RunConfig.field_rules,
        "accumulate": "at least 1",
        "logits_chunk": "at least 1",
        "logit_z_loss": "at least 0",
        "devices": "at least 0",
        "zero": get_args(ZeroStage),
        "task": get_args(Task),
        "defer_grad_reduction": get_args(ExchangeOnce),
        "pipeline.microbatches": "at least 0 and at most 65536",
        "pipeline.chunks": "at least 0 and at most 65536",
        "evaluate.tokens": "at least 1",
        "sample.tokens": "at least 0",
        "sample.temperature": "at least 0",
        "sample.top_k": "at least 0",
        "sample.top_p": "above 0 and at most 1",
    }

    def __post_init__(self) -> None:
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", canonical_precision(self.precision))
        super().__post_init__()

    def wrong_types(self) -> Iterator[Problem]:
        """Yield a problem for `rules` of another type, and those of `RunConfig.wrong_types`."""
        yield from check_type("rules", self.rules, Rules, "spmd.Rules(…)")
        yield from super().wrong_types()

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the values, alone and together."""
        yield from super().problems()
        yield from _large_numbers(self)
        yield from location_problems("out", self.out)
        yield from location_problems("init", self.init)
        yield from location_problems("teacher", self.teacher)
        yield from source_problems("evaluate.sets", self.evaluate.sets)
        yield from attention_problems(self.attention, self.context)
        yield from flag_problems(self.xla)
        yield from self.compress.problems()
        yield from table_problems(self.quantize)
        yield from _problems_of_making(make_remat, self.remat)
        yield from _problems_of_making(make_precision, self.precision)
        yield from self._problems_of_layout()
        yield from self._problems_of_task()
        yield from _model_problems(self.model)
        yield from self._problems_of_steps()
        yield from self._problems_of_norms()
        yield from self._problems_of_replicas()
        yield from self._problems_of_mup()
        yield from self._problems_of_teacher()
        yield from form_problems(self.clip_activations)

    @property
    def narrow_model(self) -> M:
        """The config of the narrow model of `mup`."""
        changes = dict[str, Any]()
        for row in self.mup:
            field, _, value = row.partition("=")
            changes[field] = ast.literal_eval(value)
        model: Any = self.model
        return dataclasses.replace(model, **changes)

    def _problems_of_layout(self) -> Iterator[Problem]:
        schedule = self.pipeline.schedule
        if schedule not in SCHEDULES and not schedule.endswith(".csv"):
            fix = did_you_mean(schedule, (*SCHEDULES, "FILE.csv"))
            yield Problem("pipeline.schedule", f"is {schedule!r}", fix=fix)
        for axis, count in self.slices.sizes.items():
            size = self.mesh.sizes[axis]
            if count < 1 or (size > 0 and size % count):
                what = f"is {count}, and mesh.{axis} is {size}"
                fix = "a positive number that divides the axis"
                yield Problem(f"slices.{axis}", what, fix=fix)

    def _problems_of_task(self) -> Iterator[Problem]:
        is_chat = self.task != "pretrain"
        if not is_chat and self.chat != ChatConfig():
            yield Problem("chat", "is for conversations, and task is pretrain", fix="--task sft")
        if self.task != "dpo" and self.dpo != DPOConfig():
            what = f"is for pairs of answers, and task is {self.task}"
            yield Problem("dpo", what, fix="--task dpo")
        if self.task == "dpo" and self.chat.turns != ChatConfig.turns:
            what = f"is {self.chat.turns}, and an answer is what comes after the prompt"
            yield Problem("chat.turns", what, fix="together")
        if self.task == "dpo" and self.logit_z_loss:
            what = f"is {self.logit_z_loss:g}, and the loss of pairs has none"
            yield Problem("logit_z_loss", what, fix="--logit-z-loss 0")
        if is_chat and self.data.packing == "windows":
            fix = "--data.packing documents or padded"
            yield Problem("data.packing", "is windows, which cut conversations anywhere", fix=fix)
        if self.task == "dpo" and self.data.packing == "grouped":
            what = "is grouped, and two answers of a pair are side by side"
            yield Problem("data.packing", what, fix="documents or padded")
        if is_chat and self.data.streaming:
            what = f"is for text, and task is {self.task}"
            yield Problem("data.streaming", what, fix="no --data.streaming")
        sequence = self.data.sequence
        model: Any = self.model
        longest = context_of(model)
        if longest is not None and longest < sequence:
            yield Problem(
                "data.sequence",
                "exceeds the model's context length",
                f"{sequence} tokens > {longest} positions",
                f"at most {longest}",
            )

    def _problems_of_norms(self) -> Iterator[Problem]:
        """Yield a problem where norms cannot be computed in the step."""
        if not self.norms:
            return
        if "params" in self.offload:
            what = "is true, and offload has params in host memory, where nothing is computed"
            yield Problem("norms", what, fix="--no-norms")
        if self.diloco.every:
            what = "is true, and each replica has norms of its own"
            yield Problem("norms", what, fix="--no-norms")

    def _problems_of_steps(self) -> Iterator[Problem]:
        if self.recovery.on_spike == "skip" and self.precision == "fp16":
            what = "cannot be skip with fp16: its loss scaling already skips steps"
            yield Problem("recovery.on_spike", what, fix="roll-back or stop")
        batch = self.data.batch
        if self.accumulate > 0 and batch % self.accumulate:
            detail = f"{batch} / {self.accumulate} = {batch / self.accumulate:.4g}"
            yield Problem("accumulate", "does not divide data.batch", detail, "change one of them")

    def _problems_of_mup(self) -> Iterator[Problem]:
        """Yield the problems of the rows of `mup`, then those of the narrow model."""
        if not self.mup:
            return
        problems = list(_problems_of_rows(self.mup, self.model))
        yield from problems
        if self.lora.targets:
            what = "is given, and adapters are trained, which have widths of their own"
            yield Problem("mup", what, fix="leave it out")
        if not problems and dataclasses.is_dataclass(self.model):
            yield from _problems_of_heads(self.narrow_model, self.model)

    def _problems_of_teacher(self) -> Iterator[Problem]:
        """Yield the settings in conflict with a teacher, or without effect."""
        if not self.teacher:
            if self.distillation != DistillationConfig():
                fix = "--teacher RUN or FOLDER"
                yield Problem("distillation", "is given, and there is no teacher", fix=fix)
            return
        others = {
            "task": (self.task == "dpo", "the loss of pairs has none", "sft or pretrain"),
            "logit_z_loss": (bool(self.logit_z_loss), "its loss has none beside a teacher", "0"),
            "mesh.pipe": (self.mesh.pipe > 1, "stages are of one model", "1"),
            "diloco.every": (bool(self.diloco.every), "replicas hold no other model", "0"),
        }
        for field, (is_wrong, why, fix) in others.items():
            if is_wrong:
                value = operator.attrgetter(field)(self)
                what = f"is {value}, and a teacher is given: {why}"
                yield Problem(field, what, fix=f"{fix}, or no --teacher")

    def _problems_of_replicas(self) -> Iterator[Problem]:
        """Yield the settings in conflict with DiLoCo."""
        every = self.diloco.every
        if not every:
            return
        for field in ("steps", "checkpoint_every", "keep_every", "evaluate.every"):
            steps = operator.attrgetter(field)(self)
            if steps % every:
                detail = f"{steps} / {every} = {steps / every:.4g}"
                what = "is no multiple of diloco.every: its parameters would be of an earlier step"
                yield Problem(field, what, detail, f"a multiple of {every}")
        if self.data.batch_ramp:
            what = "is given, and replicas have batches of one size"
            yield Problem("data.batch_ramp", what, fix="a --data.batch alone")
        if powersgd_rank(self.compress.gradients):
            what = "is PowerSGD over data, along which replicas exchange no gradients"
            yield Problem("compress.gradients", what, fix="diloco.codec=int4")
        if "skip" in (self.on_nan, self.recovery.on_spike):
            what = "are skip, and a replica would skip a step that others take"
            yield Problem("on_nan, recovery.on_spike", what, fix="stop or roll-back")
        if self.precision == "fp16":
            what = "is fp16, whose loss scale skips steps of one replica alone"
            yield Problem("precision", what, fix="bf16")


def _problems_of_rows(rows: Sequence[str], model: Any) -> Iterator[Problem]:
    """Yield the problems of rows FIELD=NUMBER of a model's config."""
    if not dataclasses.is_dataclass(model):  # that is another problem
        return
    fields = [field.name for field in dataclasses.fields(model)]
    for index, row in enumerate(rows):
        where = f"mup[{index}]"
        field, _, value = row.partition("=")
        if field not in fields:
            what = f"is {row!r}, and the model has no field {field}"
            yield Problem(where, what, fix=did_you_mean(field, fields))
            continue
        try:
            number = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            number = None
        if type(number) is not type(getattr(model, field)):
            fix = f"{field}={getattr(model, field)!r} or another value of this type"
            yield Problem(where, f"is {row!r}", fix=fix)


def _problems_of_heads(narrow: Any, wide: Any) -> Iterator[Problem]:
    """Yield a problem if the attention heads of two models have other sizes."""
    if not isinstance(narrow, CountsFlops) or not isinstance(wide, CountsFlops):
        return
    before = narrow.attention_width / heads_of(narrow)[0]
    after = wide.attention_width / heads_of(wide)[0]
    if before != after:
        what = f"has attention heads of {before:g}, and the model of {after:g}"
        yield Problem("mup", what, fix="more heads of the same size in the wide model")


def _problems_of_making(make: Callable[[str], Any], name: str) -> Iterator[Problem]:
    """Yield the problems of `make` with a name."""
    try:
        make(name)
    except ConfigError as error:
        yield from error.problems


def _model_problems(model: Any) -> Iterator[Problem]:
    """Yield the members of `ModelConfig` missing from a model's config."""
    kind = type(model)
    missing = list[str]()
    for name in vars(ModelConfig):
        if not name.startswith("_") and not hasattr(model, name):
            missing.append(name)
    if missing:
        yield Problem(
            "model",
            f"{kind.__name__} has no {', '.join(missing)}: TrainConfig is for language models",
            fix="spmd.Run(folder, step, batches, config=spmd.RunConfig(…)) for others",
        )
    elif not callable(model.build):
        yield Problem(
            "model",
            f"{kind.__name__}.build is no method",
            fix="def build(self, rngs: nnx.Rngs) -> nnx.Module",
        )
    decorate = "write @dataclasses.dataclass(frozen=True) above the class"
    if isinstance(model, type):
        yield Problem("model", f"{model} is no dataclass instance", fix=decorate)
    elif not dataclasses.is_dataclass(model):
        yield Problem("model", f"{kind.__name__} is no dataclass instance", fix=decorate)
    elif "__dataclass_fields__" not in vars(kind):
        # A class without the decorator inherits the fields of its base, and its own are none.
        own = inspect.get_annotations(kind)
        if own:
            what = f"{kind.__name__} is no dataclass itself, so {', '.join(own)} cannot be set"
            yield Problem("model", what, fix=decorate)


def _large_numbers(config: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each integer beyond JAX's 32 bits; `seed` has a rule of its own."""
    for field in dataclasses.fields(config):
        where = f"{prefix}{field.name}"
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules | type):
            yield from _large_numbers(value, f"{where}.")
        elif isinstance(value, int) and abs(value) > _LARGEST and field.name != "seed":
            fix = f"at most {_LARGEST:,}, the largest 32-bit integer"
            yield Problem(where, f"is {value:,}", fix=fix)


def config_values(config: Any) -> dict[str, Any]:
    """Return the config as JSON values, without its rules.

    Of a class, these are the defaults, without the fields that have none. A function is a text to
    tell it from others (`describe_callable`).

    Raises:
        ConfigError: JSON has no such value.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not hasattr(config, field.name):
            continue
        value = getattr(config, field.name)
        if isinstance(value, Rules):
            continue
        try:
            values[field.name] = _json_value(value)
        except TypeError as error:
            problem = Problem(
                f"{type(config).__name__}.{field.name}",
                f"cannot be saved as JSON: {error}",
                fix="a number, a string or a tuple",
            )
            raise ConfigError("Invalid configuration:", [problem]) from error
    return values


def _json_value(value: Any) -> Any:
    """Return a field's value as JSON has it; raise `TypeError` if JSON has none."""
    if dataclasses.is_dataclass(value):
        return config_values(value)
    if isinstance(value, tuple | list):
        return [_json_value(item) for item in value]
    if callable(value):
        return describe_callable(value)
    return json.loads(json.dumps(value))


_EARLIER_NAMES = {"exchange_once": "defer_grad_reduction"}
"""Name of a field in older records of runs → its name."""


def by_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded values of a config by the current names of their fields.

    Example:
        >>> by_current_names({"exchange_once": "data", "steps": 5})
        {'defer_grad_reduction': 'data', 'steps': 5}
    """
    renamed = {_EARLIER_NAMES.get(name, name): value for name, value in values.items()}
    model = renamed.get("model")
    if isinstance(model, Mapping) and _is_unscaled(model.get("rope_scaling")):
        renamed["model"] = {**model, "rope_scaling": {}}
    return renamed


def _is_unscaled(scaling: Any) -> bool:
    """Return whether a record has the fields of `Llama3Scaling` without scaling.

    Earlier versions had them in every model with rotary embeddings.
    """
    if not isinstance(scaling, Mapping):
        return False
    return scaling.get("factor") == 1 and "high_frequency_factor" in scaling


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the config with other values of fields, in the format of `config_values`.

    Functions stay as they are.
    """
    changes = dict[str, Any]()
    for name, value in values.items():
        changes[name] = _restored_value(getattr(config, name), value)
    return dataclasses.replace(config, **changes)


def _restored_value(old: Any, value: Any) -> Any:
    """Return a field's value from its JSON value and its old value."""
    if callable(old) and isinstance(value, str):
        return old
    if isinstance(value, Mapping) and dataclasses.is_dataclass(old):
        return with_values(old, value)
    if isinstance(value, list):
        before: Sequence[Any] = (None,) * len(value)
        if isinstance(old, tuple) and len(old) == len(value):
            before = old
        return tuple(map(_restored_value, before, value))
    return value


def config_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return dotted path → [before, after] for the different values.

    Example:
        >>> config_difference({"mesh": {"fsdp": 1}, "steps": 5}, {"mesh": {"fsdp": 4}, "steps": 5})
        {'mesh.fsdp': [1, 4]}
    """
    out: dict[str, list[Any]] = {}
    for name in dict.fromkeys((*before, *after)):
        old = before.get(name)
        new = after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for path, pair in config_difference(old, new).items():
                out[f"{name}.{path}"] = pair
        elif old != new:
            out[name] = [old, new]
    return out
