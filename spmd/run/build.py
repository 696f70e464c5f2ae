"""Build what a `TrainConfig` describes: model, optimizer, plan, gradient function and step.

Each function builds one thing, from the config and what was built before; `make_setup` builds what a run needs.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spmd.data.chat import find_template
from spmd.data.chat_corpus import make_chat_corpus
from spmd.data.corpus import Corpus, make_corpus
from spmd.data.loader import DataConfig, load_corpus, packing_of
from spmd.data.tokenizer import TOKENIZER, ByteTokenizer, Tokenizer, load_tokenizer
from spmd.data.training_text import TrainingText, open_text
from spmd.distributed.initialize import compiler_environment
from spmd.distributed.xla_flags import Flag, compiler_options, flags_for
from spmd.errors import ConfigError, DataError, Problem, RuleError, Together
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.exchange import Exchange, choose_exchange, exchange_once
from spmd.gradients.keep_carry import KeepCarry
from spmd.gradients.losses import LossFn, next_token_loss
from spmd.lora.adapters import lora_rules, with_lora
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_api.grad_transform import GradTransform
from spmd.model_api.model import Model
from spmd.observe.metrics import Flops, mean_keys, transformer_flops
from spmd.optim.config import check_patterns, make_learning_rate, make_optimizer
from spmd.optim.skip_updates import skip_bad_updates, skipped_steps
from spmd.pipedream.grad_fn import InFlight, pipedream
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.schedule_files import read_schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.flax import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.powersgd.transform import PowerSGD
from spmd.precision import Precision, make_precision
from spmd.run.config import CountsFlops, TrainConfig
from spmd.run.recipes import device_kind, recipe_problems, untuned_problems
from spmd.settings.compress import CompressConfig, powersgd_rank
from spmd.settings.quantize import RECIPES, parse_table
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, MeshShape, abstract_mesh, check_slices, mesh_of, shards_of
from spmd.training.step import TrainStep, Watch, make_train_step

MICROBATCHES = 4
"""For each stage, at most, by default: enough for a negligible bubble (Huang et al., arXiv:1811.06965, section 4)."""


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """Parts of a run, built from its config on one mesh; the step is not yet compiled."""

    config: TrainConfig
    plan: ShardingPlan
    schedule: Schedule | None
    exchange: Exchange
    grad_fn: GradFn
    evaluation_loss_fn: LossFn
    step: TrainStep

    @property
    def mesh(self) -> AnyMesh:
        """The mesh, with devices or abstract."""
        return self.plan.mesh


def make_setup(config: TrainConfig, mesh: AnyMesh, chip: str = "") -> TrainSetup:
    """Build what a run needs, on a mesh from `config_mesh` or `planned_mesh`; `chip` is the kind of an abstract one."""
    model, schedule = build_model(config), build_schedule(config, mesh)
    loss_fn = next_token_loss(model, chunk=config.logits_chunk)
    with Together("This plan cannot be made:") as errors:
        problems = [*_problems_of_chip(config, mesh, chip), *_problems_once(config, schedule)]
        problems += _problems_without_flush(config, schedule)
        errors.add(ConfigError("These settings do not go together:", problems))
        plan = build_plan(config, mesh, model, build_transforms(config, loss_fn, schedule))
    grad_fn, exchange = build_grad_fn(config, loss_fn, schedule, plan)
    evaluation = next_token_loss(model, train=False, chunk=config.logits_chunk)
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    options = compiler_options(build_flags(config, device.platform, device.device_kind) if device else ())
    return TrainSetup(
        config,
        plan,
        schedule,
        exchange,
        grad_fn,
        pipelined(evaluation, schedule.stages, schedule.microbatches) if schedule else evaluation,
        make_train_step(plan, grad_fn=grad_fn, watch=build_watch(config), compiler_options=options),
    )


def build_precision(config: TrainConfig) -> Precision:
    """Return the precision policy, with the dtypes of moments and of exchanged gradients that the config names."""
    policy = config.compress.precision(make_precision(config.precision), config.slices.sizes)
    return dataclasses.replace(policy, moments=config.optimizer.moments)


def applicable_compression(config: TrainConfig) -> CompressConfig:
    """Return the compression of what a config with this mesh, without -1, sends: nothing over axes of size 1."""
    return config.compress.on(config.mesh.sizes, config.slices.sizes, config.zero)


def build_powersgd(config: TrainConfig) -> PowerSGD | None:
    """Return the compression of gradients that the config names, if any."""
    rank = powersgd_rank(config.compress.gradients)
    axes = ("data", "fsdp") if config.exchange_once == "data+fsdp" else ("data",)
    return PowerSGD(rank, config.slices.data, axes=axes) if rank else None


def build_transforms(config: TrainConfig, loss_fn: LossFn, schedule: Schedule | None) -> tuple[GradTransform, ...]:
    """Return what keeps a state around the gradient, besides what the precision policy and recipes bring."""
    transforms = list[GradTransform]()
    if powersgd := build_powersgd(config):
        transforms.append(powersgd)
    if schedule and not schedule.flush:
        transforms.append(InFlight.of(loss_fn, tabulate(schedule), abstract_batch(config)))
    if skips_updates(config) and not build_precision(config).loss_scale:
        transforms.append(KeepCarry())
    return tuple(transforms)


def build_base_model(config: TrainConfig) -> Model:
    """Return the model that the config names, without adapters."""
    return from_nnx(config.model.build)


def build_model(config: TrainConfig) -> Model:
    """Return the trained model: the config's, or adapters beside it."""
    model, precision = build_base_model(config), build_precision(config)
    if config.lora.targets:
        # Frozen parameters need no more bits than they are computed with.
        dtype = precision.compute if precision.compute == "bfloat16" else precision.params
        model = with_lora(model, config.lora, config.rules, dtype)
    return model


def skips_updates(config: TrainConfig) -> bool:
    """Return whether updates that are not finite, or too large, are skipped and counted."""
    return "skip" in (config.on_nan, config.recovery.on_spike) or build_precision(config).loss_scale is not None


def build_optimizer(config: TrainConfig, model: Model) -> optax.GradientTransformation:
    """Return the model's optimizer; it skips bad updates where the config says so (plans for fp16 always do)."""
    optimizer = make_optimizer(config.optimizer, config.steps, config.rules.stacked, model=model)
    if not skips_updates(config) or build_precision(config).loss_scale:
        return optimizer
    factor = config.recovery.spike_factor if config.recovery.on_spike == "skip" else 0.0
    return skip_bad_updates(optimizer, factor, config.recovery.spike_window)


def build_plan(
    config: TrainConfig, mesh: AnyMesh, model: Model, transforms: Sequence[GradTransform] = ()
) -> ShardingPlan:
    """Resolve every decision for the trained model on a mesh, with transforms of the gradient."""
    rules = lora_rules(build_base_model(config), config.lora, config.rules) if config.lora.targets else config.rules
    plan = make_plan(
        mesh,
        rules,
        model,
        build_optimizer(config, model),
        zero=config.zero,
        remat=config.remat,
        precision=build_precision(config),
        compress=config.compress.of_plan,
        quantize=config.quantize,
        slices=config.slices.sizes,
        offload=config.offload,
        attention=config.attention,
        context=config.context,
        transforms=transforms,
    )
    paths, tied = [entry.path for entry in plan.params], plan.model.info().tied
    if problems := check_patterns(config.optimizer, paths, plan.rules.stacked, tied):
        raise RuleError("The optimizer's table does not fit the model:", problems)
    return plan


def _problems_of_chip(config: TrainConfig, mesh: AnyMesh, chip: str) -> list[Problem]:
    """Return why the chips of a mesh, or of this kind, do not multiply as the config's recipes say."""
    recipes = [RECIPES[name] for _, name in parse_table(config.quantize) if name in RECIPES]
    is_here = isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices()  # devices to compile for run nothing
    runs_on = jax.default_backend() if is_here else ""
    flags = [*compiler_environment().get("XLA_FLAGS", "").split(), *config.xla]
    problems = recipe_problems(recipes, chip or device_kind(mesh))
    return problems + untuned_problems(recipes, runs_on, flags)


def build_schedule(config: TrainConfig, mesh: AnyMesh) -> Schedule | None:
    """Return the schedule of the pipeline over `mesh.pipe`; None where it is 1."""
    stages = mesh.shape["pipe"]
    if stages == 1:
        return None
    name, microbatches, chunks = dataclasses.astuple(config.pipeline)
    if not name.endswith(".csv"):
        count = microbatches or _default_microbatches(config, mesh)
        return make_schedule(name, stages, count, chunks or (2 if name == "interleaved" else 1))
    schedule = read_schedule(name, microbatches=microbatches or None, chunks=chunks or None)
    if schedule.stages != stages:
        detail = f"rows = {schedule.stages}, mesh.pipe = {stages}"
        problem = Problem("pipeline.schedule", f"{name} is for another pipeline", detail, "a row for each stage")
        raise ConfigError("This configuration cannot be used:", [problem])
    return schedule


def _default_microbatches(config: TrainConfig, mesh: AnyMesh) -> int:
    """Return up to `MICROBATCHES` for each stage, as many as divide the batch and are split over the mesh."""
    devices = shards_of(BATCH_AXES, mesh.shape)
    stages = mesh.shape["pipe"]
    most, step = MICROBATCHES * stages, stages if config.pipeline.schedule == "interleaved" else 1
    fitting = (n for n in range(most, 0, -step) if config.data.batch % (config.accumulate * n * devices) == 0)
    return next(fitting, most)


def count_microbatches(config: TrainConfig, schedule: Schedule | None) -> int:
    """Return into how many parts a batch is split, for a pipeline or for accumulation in its place."""
    return schedule.microbatches if schedule else config.pipeline.microbatches or 1


def _problems_without_flush(config: TrainConfig, schedule: Schedule | None) -> list[Problem]:
    """Return what a schedule cannot do whose microbatches are in flight between steps."""
    if schedule is None or schedule.flush:
        return []
    ends, skip = "a batch does not end", "a step cannot be skipped"
    other = "--pipeline.schedule 1f1b"
    checks = [
        ("accumulate", config.accumulate > 1, ends, "--accumulate 1 and more --pipeline.microbatches"),
        ("exchange_once", "data" in config.exchange_once, ends, "--exchange-once auto"),
        ("on_nan", config.on_nan == "skip", skip, f"--on-nan stop, or {other}"),
        ("recovery.on_spike", config.recovery.on_spike == "skip", skip, f"--recovery.on-spike stop, or {other}"),
    ]
    return [
        Problem(name, f"is {operator.attrgetter(name)(config)}: {why} while microbatches are in flight", fix=fix)
        for name, is_wrong, why, fix in checks
        if is_wrong
    ]


def _problems_once(config: TrainConfig, schedule: Schedule | None) -> list[Problem]:
    """Return why a config cannot exchange its gradients once a step, as compression does."""
    parts = config.accumulate * count_microbatches(config, schedule)
    if not build_powersgd(config) or config.exchange_once != "none" or parts == 1:
        return []
    why, fix = "PowerSGD compresses the sum of a step", "--exchange-once auto, data or data+fsdp"
    return [Problem("exchange_once", "is none", why, fix)]


def build_grad_fn(
    config: TrainConfig, loss_fn: LossFn, schedule: Schedule | None, plan: ShardingPlan
) -> tuple[GradFn, Exchange]:
    """Return the gradient function of a batch, a pipeline or microbatches one after the other, and its exchange."""
    if schedule:
        grad_fn = (pipeline if schedule.flush else pipedream)(loss_fn, tabulate(schedule))
    else:
        grad_fn = accumulate(value_and_grad(loss_fn), count_microbatches(config, schedule))
    grad_fn, exchange = accumulate(grad_fn, config.accumulate), Exchange()
    if powersgd := build_powersgd(config):
        exchange = Exchange(powersgd.axes)
    elif schedule and not schedule.flush:
        exchange = Exchange((), "the schedule has no flush")
    elif config.accumulate * count_microbatches(config, schedule) > 1:
        exchange = choose_exchange(grad_fn, plan, abstract_batch(config), config.exchange_once)
        grad_fn = exchange_once(grad_fn, exchange.axes)
    return grad_fn, exchange


def build_watch(config: TrainConfig) -> dict[str, Watch]:
    """Return the metrics from the states around a step: its learning rate and loss scale, and steps skipped so far."""
    learning_rate = make_learning_rate(config.optimizer, config.steps)
    if not skips_updates(config):
        return {"learning_rate": lambda before, _: learning_rate(before.step)}
    watch: dict[str, Watch] = {
        "learning_rate": lambda before, _: learning_rate(before.step - skipped_steps(before.optimizer_state)),
        "skipped_steps": lambda _, after: skipped_steps(after.optimizer_state),
    }
    if build_precision(config).loss_scale:
        watch["loss_scale"] = lambda before, _: before.transforms[LossScale.name]["scale"]
    return watch


def build_flags(config: TrainConfig, platform: str, kind: str) -> tuple[Flag, ...]:
    """Return XLA's flags for the step, for one platform's compiler and kind of device."""
    return flags_for(config.xla, platform, kind, crossing=max(config.slices.sizes.values()) > 1)


def count_flops(config: TrainConfig) -> Flops | None:
    """Return the model FLOPs of each token, with their formula; None if the model's config does not count them."""
    model = config.model
    if not isinstance(model, CountsFlops):
        return None
    return transformer_flops(model.matmul_params, model.layers, model.attention_width, keys_of(config))


def keys_of(config: TrainConfig) -> float:
    """Return the keys that a query sees, on average over positions and layers."""
    windows = getattr(config.model, "windows", ()) or (getattr(config.model, "window", 0),)
    return mean_keys(config.data.sequence, windows)


def open_training_text(config: TrainConfig) -> TrainingText:
    """Return the tokenized text or conversations of a run.

    Raises:
        ConfigError: The model's vocabulary is smaller than the tokenizer's.
        DataError: The text cannot be used, or a set of a mixture ends before the run.
    """
    text = open_text(config.data, functools.partial(_open_chats, config) if config.task == "sft" else load_corpus)
    vocab = text.tokenizer.vocab
    if vocab > config.model.vocab:
        detail = f"tokenizer {vocab} > model {config.model.vocab}"
        problem = Problem("model.vocab", "is smaller than the tokenizer's vocabulary", detail, f"--model.vocab {vocab}")
        raise ConfigError("The model cannot read this corpus:", [problem])
    text.check_epochs(config.steps, config.data.batch)
    return text


def _open_chats(config: TrainConfig, data: DataConfig) -> Corpus:
    """Return the tokenized conversations of a set; there must be some for training and some for validation."""
    corpus = read_source(config, data.source, load_tokenizer(data.tokenizer))
    if not len(corpus.validation_ends):
        problem = Problem("data.source", "holds one conversation", "one is for validation", "two or more")
        raise DataError("There is nothing to train on:", [problem])
    return corpus


def read_source(config: TrainConfig, source: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """Return the corpus of some files: text, or conversations where these are trained."""
    data, cache = config.data, config.data.cache_folder
    if config.task == "pretrain":
        return make_corpus(source, tokenizer, text_field=data.text_field, validation=data.validation, cache=cache)
    is_bytes, init = isinstance(tokenizer, ByteTokenizer), [Path(config.init)] if config.init else []
    if is_bytes and (theirs := [folder / TOKENIZER for folder in init if (folder / TOKENIZER).exists()]):
        what, fix = f"is bytes, and {config.init} has its own", f"--data.tokenizer {theirs[0]}"
        problem = Problem("data.tokenizer", what, fix=fix)
        raise ConfigError("The model cannot read these conversations:", [problem])
    folders = [] if is_bytes else [Path(data.tokenizer).expanduser().parent, *init]
    ends = {"eos_token": tokenizer.decode([tokenizer.eos])} if is_bytes else {}
    template = find_template(config.chat, folders, ends)
    return make_chat_corpus(
        source,
        tokenizer,
        template,
        config=config.chat,
        sequence=data.sequence,
        validation=data.validation,
        cache=cache,
    )


def abstract_batch(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a batch's shapes and dtypes."""
    shape = (config.data.batch, config.data.sequence)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    packing = packing_of(config.data, is_chat=config.task == "sft")
    dtypes |= {"segments": jnp.int32} if packing == "documents" else {}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def config_mesh(config: TrainConfig) -> AnyMesh:
    """Return the config's mesh over the devices of this machine."""
    return mesh_of(config.mesh, jax.devices(), config.slices.sizes)


def one_device_mesh() -> AnyMesh:
    """Return a mesh of the first device alone, with which every layout is compared."""
    return mesh_of(MeshShape(), jax.devices()[:1])


def planned_mesh(config: TrainConfig) -> AnyMesh:
    """Return the config's mesh without devices; a -1 is filled in from `config.devices`."""
    total = config.devices or config.mesh.total()
    if total is None:
        fix = "give --devices N, or each axis a size"
        raise ConfigError("The number of devices is unknown:", [Problem("mesh", "has an axis of -1", fix=fix)])
    shape = config.mesh.resolve(total)
    check_slices(shape, config.slices.sizes)
    return abstract_mesh(shape)
