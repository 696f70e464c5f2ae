"""Build the parts of a `TrainConfig`: model, optimizer, plan, gradient function and step.

Each function builds one thing, from the config and from what was built before; `make_setup` builds
all that a run needs.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spmd.data.loader import packing_of
from spmd.diloco.config import DiLoCoConfig
from spmd.diloco.replicas import replica_mesh
from spmd.diloco.transform import DiLoCo
from spmd.distributed.initialize import compiler_environment, user_xla_flags
from spmd.distributed.xla_flags import Flag, Value, compiler_options, flags_for
from spmd.errors import ConfigError, Problem, RuleError, Together
from spmd.gradients.accumulate import accumulate, fewer_microbatches
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.deferred_reduction import (
    DeferredReduction,
    choose_deferred_reduction,
    defer_grad_reduction,
)
from spmd.gradients.distillation_loss import TEACHER, distillation_loss
from spmd.gradients.keep_carry import KeepCarry
from spmd.gradients.losses import LossFn, ModelLoss, next_token_loss
from spmd.gradients.preference_loss import preference_loss
from spmd.lora.adapters import lora_rules, with_lora
from spmd.lora.quantized_base import block_problems
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_interface.attention_config import SPLASH_BLOCK
from spmd.model_interface.grad_transform import GradTransform
from spmd.model_interface.model import Model
from spmd.model_interface.model_config import windows_of
from spmd.observe.metrics import Flops, mean_keys, transformer_flops
from spmd.optim.config import check_patterns, make_learning_rate, make_optimizer
from spmd.optim.mup import with_mup
from spmd.optim.skip_updates import skip_bad_updates, skipped_steps
from spmd.pipedream.grad_fn import InFlight, pipedream
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.schedule_files import read_schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.plan.records import PlanEntry
from spmd.powersgd.transform import PowerSGD
from spmd.precision import Precision, make_precision
from spmd.run.config import CountsFlops, TrainConfig
from spmd.run.planned_step import PlannedStep
from spmd.run.recipes import device_kind, precision_problems, recipe_problems, untuned_problems
from spmd.run.stages import check_stages
from spmd.run.teacher_plan import make_teacher_plan
from spmd.settings.compress import NO_COMPRESSION, CompressConfig, powersgd_rank
from spmd.settings.distillation import DistillationConfig
from spmd.settings.quantize import RECIPES, parse_table
from spmd.sharding.batch import whole
from spmd.sharding.mesh import (
    BATCH_AXES,
    AnyMesh,
    MeshShape,
    abstract_mesh,
    check_slices,
    mesh_of,
    platform_of,
    shards_of,
)
from spmd.training.norms import ModuleNorms, no_norms
from spmd.training.step import Norms, Watch, make_train_step

MICROBATCHES = 4
"""For each stage, at most, by default: enough for a negligible bubble (Huang et al.,
arXiv:1811.06965, section 4)."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TrainSetup(PlannedStep):
    """Parts of a run, built from its config on one mesh; the step is not yet compiled.

    `batch` has the shapes of the config's batches.
    """

    config: TrainConfig
    schedule: Schedule | None
    teacher: ShardingPlan | None
    exchange: DeferredReduction
    grad_fn: GradFn
    evaluation_loss_fn: LossFn


def make_setup(config: TrainConfig, mesh: AnyMesh, chip: str = "") -> TrainSetup:
    """Build the parts of a run.

    Args:
        config: Describes the run.
        mesh: From `config_mesh` or `planned_mesh`.
        chip: Kind of the devices of an abstract mesh.
    """
    if config.diloco.every:
        return _make_setup_of_replicas(config, mesh, chip)
    model = build_model(config)
    schedule = build_schedule(config, mesh)
    check_stages(config.model, schedule)
    teacher = make_teacher_plan(config, mesh)
    loss_fn = build_training_loss(config, model, teacher)
    batch = abstract_batch(config)
    if teacher is not None:
        batch[TEACHER] = whole(teacher.abstract_params)
    with Together("Invalid plan:") as errors:
        problems = _problems_of_chip(config, mesh, chip)
        problems += _problems_once(config, schedule)
        problems += _problems_without_flush(config, schedule)
        errors.add(ConfigError("Conflicting settings:", problems))
        plan = build_plan(config, mesh, model, build_transforms(config, loss_fn, schedule))
    grad_fn, exchange = build_grad_fn(config, loss_fn, schedule, plan, batch)
    options = _build_compiler_options(config, mesh)
    norms: Norms = no_norms
    if config.norms:
        norms = ModuleNorms(plan)
    step = make_train_step(
        plan,
        grad_fn=grad_fn,
        watch=build_watch(config),
        compiler_options=options,
        norms=norms,
    )
    return TrainSetup(
        config=config,
        schedule=schedule,
        teacher=teacher,
        exchange=exchange,
        grad_fn=grad_fn,
        evaluation_loss_fn=_build_evaluation_loss(config, model, schedule),
        step=step,
        batch=batch,
    )


def _make_setup_of_replicas(config: TrainConfig, mesh: AnyMesh, chip: str) -> TrainSetup:
    """Build the parts of a run of replicas: each is a run by itself on a part of each batch."""
    _check_replicas(config, mesh)
    alone = replica_mesh(mesh)
    batch = config.data.batch // mesh.shape["data"]
    replica = dataclasses.replace(
        config,
        diloco=DiLoCoConfig(),
        mesh=MeshShape(**alone.shape),
        slices=dataclasses.replace(config.slices, data=1),
        data=dataclasses.replace(config.data, batch=batch),
    )
    inner = make_setup(replica, alone, chip)
    fields = config.diloco
    diloco = DiLoCo(inner.step, fields.every, fields.fragments, fields.codec, fields.keep)
    plan = build_plan(config, mesh, inner.plan.model, [diloco])
    plan = _with_updates_of(inner.plan, plan)
    options = _build_compiler_options(config, mesh)
    step = make_train_step(plan, grad_fn=inner.grad_fn, compiler_options=options)
    return dataclasses.replace(inner, config=config, step=step, batch=abstract_batch(config))


def _with_updates_of(inner: ShardingPlan, plan: ShardingPlan) -> ShardingPlan:
    """Return a plan with the remarks about updates of the inner one."""
    updates = {entry.path: entry.update for entry in inner.params}
    params = list[PlanEntry]()
    for entry in plan.params:
        params.append(dataclasses.replace(entry, update=updates[entry.path]))
    return dataclasses.replace(plan, params=tuple(params))


def _check_replicas(config: TrainConfig, mesh: AnyMesh) -> None:
    """Raise `ConfigError` if there are no replicas, or their batches are unequal."""
    count = mesh.shape["data"]
    problems = list[Problem]()
    if count == 1:
        what = f"is {config.diloco.every}, and mesh.data is 1: there are no replicas"
        fix = "--mesh.data 2 or more, or --diloco.every 0"
        problems.append(Problem("diloco.every", what, fix=fix))
    batch = config.data.batch
    parts = count * config.accumulate
    if batch % parts:
        divisor = f"(mesh.data = {count})"
        if config.accumulate > 1:
            divisor += f" / (accumulate = {config.accumulate})"
        detail = f"{batch} / {divisor} = {batch / parts:.4g}"
        fix = f"--data.batch {batch // parts * parts or parts}"
        problems.append(Problem("data.batch", "does not divide over replicas", detail, fix))
    if problems:
        raise ConfigError("Invalid DiLoCo:", problems)


def evaluation_config(config: TrainConfig) -> TrainConfig:
    """Return a config for a model's evaluation: one model, and everything sent as it is stored."""
    return dataclasses.replace(
        config,
        compress=NO_COMPRESSION,
        quantize="",
        diloco=DiLoCoConfig(),
        teacher="",
        distillation=DistillationConfig(),
    )


def _build_evaluation_loss(config: TrainConfig, model: Model, schedule: Schedule | None) -> LossFn:
    """Return the loss without dropout, of a pipeline's microbatches if there is a schedule."""
    return in_stages(build_loss(config, model, train=False), schedule)


def build_training_loss(
    config: TrainConfig, model: Model, teacher: ShardingPlan | None = None
) -> LossFn:
    """Return the loss of training: the task's, or beside a teacher."""
    if teacher is None:
        return build_loss(config, model)
    # A run compares the tokenizers (`spmd.run.teacher`), so unlike heads are padded.
    return distillation_loss(
        model, teacher, config.distillation, chunk=config.logits_chunk, padded_heads=True
    )


def build_loss(config: TrainConfig, model: Model, *, train: bool = True) -> ModelLoss:
    """Return the loss of the config's task: of the next token, or of pairs of answers."""
    if config.task == "dpo":
        return preference_loss(model, config.dpo, train=train, chunk=config.logits_chunk)
    return next_token_loss(
        model, train=train, chunk=config.logits_chunk, z_loss=config.logit_z_loss
    )


def row_multiple(plan: ShardingPlan) -> int:
    """Return a divisor of the tokens of each row, for all kernels of a plan's attention.

    Along `sequence` each device has two equal parts of a row; splash attention takes whole blocks
    of each.
    """
    devices = plan.mesh.shape["sequence"]
    parts = 1
    if devices > 1:
        parts = 2 * devices
    on_tpu = isinstance(plan.mesh, Mesh) and platform_of(plan.mesh.devices.flat[0]) == "tpu"
    if plan.attention.kernel == "splash" or on_tpu:
        return SPLASH_BLOCK * parts
    return parts


def weighed_unit(config: TrainConfig) -> str:
    """Return the name of a weight of 1 in the loss of the config's task."""
    if config.task == "dpo":
        return "pairs"
    return "tokens"


def in_stages(loss_fn: LossFn, schedule: Schedule | None) -> LossFn:
    """Return a loss for evaluation, of a pipeline's microbatches if there is a schedule."""
    if schedule:
        return pipelined(loss_fn, schedule.stages, schedule.microbatches)
    return loss_fn


def _build_compiler_options(config: TrainConfig, mesh: AnyMesh) -> dict[str, Value]:
    """Return XLA's options for the step; an abstract mesh has no compiler, and so none."""
    if not isinstance(mesh, Mesh):
        return compiler_options(())
    device = mesh.devices.flat[0]
    return compiler_options(build_flags(config, device.platform, device.device_kind))


def build_precision(config: TrainConfig) -> Precision:
    """Return the precision policy, with the dtypes of moments and of exchanged gradients."""
    policy = config.compress.precision(make_precision(config.precision), config.slices.sizes)
    return dataclasses.replace(policy, moments=config.optimizer.moments)


def applicable_compression(config: TrainConfig) -> CompressConfig:
    """Return the config's compression, without fields of no effect on its mesh.

    Nothing is sent over axes of size 1. The config's mesh is without -1.
    """
    return config.compress.on(config.mesh.sizes, config.slices.sizes, config.zero)


def build_powersgd(config: TrainConfig) -> PowerSGD | None:
    """Return the config's compression of gradients, if any."""
    rank = powersgd_rank(config.compress.gradients)
    if not rank:
        return None
    axes = ("data", "fsdp") if config.defer_grad_reduction == "data+fsdp" else ("data",)
    start = config.compress.powersgd_start
    return PowerSGD(rank, config.slices.data, axes=axes, start=start)


def build_transforms(
    config: TrainConfig, loss_fn: LossFn, schedule: Schedule | None
) -> tuple[GradTransform, ...]:
    """Return the gradient transforms with a state.

    The precision policy and recipes bring others besides.
    """
    transforms = list[GradTransform]()
    powersgd = build_powersgd(config)
    if powersgd:
        transforms.append(powersgd)
    if schedule and not schedule.flush:
        transforms.append(InFlight.of(loss_fn, tabulate(schedule), abstract_batch(config)))
    if _optimizer_skips(config):
        transforms.append(KeepCarry())
    return tuple(transforms)


def build_base_model(config: TrainConfig) -> Model:
    """Return the config's model, without adapters."""
    model = from_nnx(config.model.build)
    if not config.mup:
        return model
    return with_mup(model, from_nnx(config.narrow_model.build))


def build_model(config: TrainConfig) -> Model:
    """Return the trained model: the config's, or adapters beside it."""
    model = build_base_model(config)
    precision = build_precision(config)
    if not config.lora.targets:
        return model
    dtype = precision.params
    if precision.compute == "bfloat16":
        # Frozen parameters need no more bits than they are computed with.
        dtype = precision.compute
    return with_lora(model, config.lora, config.rules, dtype)


def skips_updates(config: TrainConfig) -> bool:
    """Return true if updates are skipped and counted: those not finite, or too large."""
    if "skip" in (config.on_nan, config.recovery.on_spike):
        return True
    return build_precision(config).loss_scale is not None


def _optimizer_skips(config: TrainConfig) -> bool:
    """Return whether the optimizer skips bad updates; with a loss scale, the step skips them."""
    return skips_updates(config) and build_precision(config).loss_scale is None


def build_optimizer(config: TrainConfig, model: Model) -> optax.GradientTransformation:
    """Return the optimizer of the training state: with replicas, the outer one.

    It skips bad updates where the config says so; plans for fp16 always do.
    """
    if config.diloco.every:
        return config.diloco.outer_optimizer()
    optimizer = make_optimizer(config.optimizer, config.steps, config.rules.stacked, model=model)
    if not _optimizer_skips(config):
        return optimizer
    recovery = config.recovery
    factor = recovery.spike_factor if recovery.on_spike == "skip" else 0.0
    return skip_bad_updates(optimizer, factor, recovery.spike_window)


def build_plan(
    config: TrainConfig, mesh: AnyMesh, model: Model, transforms: Sequence[GradTransform] = ()
) -> ShardingPlan:
    """Resolve every decision for the trained model on a mesh, with transforms of the gradient."""
    rules = config.rules
    if config.lora.targets:
        base = build_base_model(config)
        problems = block_problems(base, config.lora.quantize, rules, mesh)
        if problems:
            raise ConfigError("The mesh splits blocks of quantized parameters:", problems)
        rules = lora_rules(base, config.lora, rules)
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
        clip_activations=config.clip_activations,
    )
    paths = [entry.path for entry in plan.params]
    tied = plan.model.info().tied
    problems = check_patterns(config.optimizer, paths, plan.rules.stacked, tied)
    if problems:
        raise RuleError("The optimizer's table does not fit the model:", problems)
    return plan


def _problems_of_chip(config: TrainConfig, mesh: AnyMesh, chip: str) -> list[Problem]:
    """List problems of the config's recipes on the chips of a mesh, or on chips of a kind."""
    recipes = [RECIPES[name] for _, name in parse_table(config.quantize) if name in RECIPES]
    runs_on = ""
    # Devices to compile for, of another machine, run nothing.
    if isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices():
        runs_on = jax.default_backend()
    flags = [*compiler_environment().get("XLA_FLAGS", "").split(), *config.xla]
    kind = chip or device_kind(mesh)
    compute = make_precision(config.precision).compute
    problems = precision_problems(compute, kind) + recipe_problems(recipes, kind)
    return problems + untuned_problems(recipes, runs_on, flags)


def build_schedule(config: TrainConfig, mesh: AnyMesh) -> Schedule | None:
    """Return the schedule of the pipeline over `mesh.pipe`; None where it is 1."""
    stages = mesh.shape["pipe"]
    if stages == 1:
        return None
    pipeline = config.pipeline
    if pipeline.schedule.endswith(".csv"):
        return _read_schedule(config, stages)
    microbatches = pipeline.microbatches or _default_microbatches(config, mesh)
    return make_schedule(pipeline.schedule, stages, microbatches, pipeline.stage_chunks)


def _read_schedule(config: TrainConfig, stages: int) -> Schedule:
    """Read the config's CSV file; raise `ConfigError` if it has another number of stages."""
    pipeline = config.pipeline
    schedule = read_schedule(
        pipeline.schedule,
        microbatches=pipeline.microbatches or None,
        chunks=pipeline.chunks or None,
    )
    if schedule.stages != stages:
        problem = Problem(
            "pipeline.schedule",
            f"{pipeline.schedule} is for another pipeline",
            f"rows = {schedule.stages}, mesh.pipe = {stages}",
            "a row for each stage",
        )
        raise ConfigError("Invalid configuration:", [problem])
    return schedule


def _default_microbatches(config: TrainConfig, mesh: AnyMesh) -> int:
    """Return the largest number of microbatches, up to a limit, for equal parts on all devices.

    The limit is `MICROBATCHES` for each stage. An interleaved schedule needs a multiple of the
    stages. If no number divides the batch, return the limit.
    """
    devices = shards_of(BATCH_AXES, mesh.shape)
    stages = mesh.shape["pipe"]
    most = MICROBATCHES * stages
    step = stages if config.pipeline.schedule == "interleaved" else 1
    for count in range(most, 0, -step):
        if config.data.batch % (config.accumulate * count * devices) == 0:
            return count
    return most


def count_microbatches(config: TrainConfig, schedule: Schedule | None) -> int:
    """Return the number of parts of a batch, for a pipeline or for accumulation in its place."""
    if schedule:
        return schedule.microbatches
    return config.pipeline.microbatches or 1


def microbatches_of(config: TrainConfig, schedule: Schedule | None, rows: int) -> int:
    """Return the number of parts of a batch of so many sequences, of accumulation and a pipeline."""
    of_batch = config.data.batch
    outer = fewer_microbatches(rows, config.accumulate, of_batch)
    inner = count_microbatches(config, schedule)
    if schedule:
        return outer * inner
    return outer * fewer_microbatches(rows // outer, inner, of_batch // config.accumulate)


def _problems_without_flush(config: TrainConfig, schedule: Schedule | None) -> list[Problem]:
    """List the settings in conflict with microbatches in flight between steps."""
    if schedule is None or schedule.flush:
        return []
    problems = list[Problem]()
    accumulates = config.accumulate > 1
    defers_reduction = "data" in config.defer_grad_reduction
    skips_nan = config.on_nan == "skip"
    skips_spike = config.recovery.on_spike == "skip"
    shapes = {
        "data.batch_ramp": bool(config.data.batch_ramp),
        "data.packing": config.data.packing == "grouped",
    }
    for field, varies in shapes.items():
        if varies:
            what = "has batches of several shapes, and microbatches in flight have one"
            fix = 'a --data.batch alone and another packing, or pipeline.schedule="1f1b"'
            problems.append(Problem(field, what, fix=fix))
    no_end = "a batch does not end"
    no_skip = "a step cannot be skipped"
    other = 'pipeline.schedule="1f1b"'
    checks = [
        ("accumulate", accumulates, no_end, "accumulate=1 and more pipeline.microbatches"),
        ("defer_grad_reduction", defers_reduction, no_end, 'defer_grad_reduction="auto"'),
        ("on_nan", skips_nan, no_skip, f'on_nan="stop", or {other}'),
        ("recovery.on_spike", skips_spike, no_skip, f'recovery.on_spike="stop", or {other}'),
    ]
    for field, is_wrong, reason, fix in checks:
        if is_wrong:
            value = operator.attrgetter(field)(config)
            what = f"is {value}: {reason} while microbatches are in flight"
            problems.append(Problem(field, what, fix=fix))
    return problems


def _problems_once(config: TrainConfig, schedule: Schedule | None) -> list[Problem]:
    """List the setting in conflict with compression: it needs one exchange of gradients a step."""
    parts = config.accumulate * count_microbatches(config, schedule)
    if not build_powersgd(config) or config.defer_grad_reduction != "none" or parts == 1:
        return []
    problem = Problem(
        "defer_grad_reduction",
        "is none",
        "PowerSGD compresses the sum of a step",
        'defer_grad_reduction="auto", "data" or "data+fsdp"',
    )
    return [problem]


def build_grad_fn(
    config: TrainConfig,
    loss_fn: LossFn,
    schedule: Schedule | None,
    plan: ShardingPlan,
    batch: Any,
) -> tuple[GradFn, DeferredReduction]:
    """Return the gradient function of a batch, and its exchange.

    It is a pipeline, or takes microbatches one after the other.
    """
    examples = config.data.batch // config.accumulate
    if not schedule:
        parts = count_microbatches(config, schedule)
        grad_fn = accumulate(value_and_grad(loss_fn), parts, examples=examples)
    elif schedule.flush:
        table = tabulate(schedule, recompute=config.pipeline.recomputes)
        grad_fn = pipeline(loss_fn, table)
    else:
        grad_fn = pipedream(loss_fn, tabulate(schedule))
    grad_fn = accumulate(grad_fn, config.accumulate, examples=config.data.batch)

    powersgd = build_powersgd(config)
    if powersgd:
        return grad_fn, DeferredReduction(powersgd.axes)
    if schedule and not schedule.flush:
        return grad_fn, DeferredReduction((), "the schedule has no flush")
    if config.accumulate * count_microbatches(config, schedule) > 1:
        exchange = choose_deferred_reduction(grad_fn, plan, batch, config.defer_grad_reduction)
        return defer_grad_reduction(grad_fn, exchange.axes), exchange
    return grad_fn, DeferredReduction()


def build_watch(config: TrainConfig) -> dict[str, Watch]:
    """Return the metrics from the states around a step.

    They are its learning rate and loss scale, and the number of steps skipped so far.
    """
    learning_rate = make_learning_rate(config.optimizer, config.steps)
    if not skips_updates(config):
        return {"learning_rate": lambda before, _: learning_rate(before.step)}
    watch: dict[str, Watch] = {
        "learning_rate": lambda before, _: learning_rate(
            before.step - skipped_steps(before.optimizer_state)
        ),
        "skipped_steps": lambda _, after: skipped_steps(after.optimizer_state),
    }
    if build_precision(config).loss_scale:
        watch["loss_scale"] = lambda before, _: before.transforms[LossScale.name]["scale"]
    return watch


def build_flags(config: TrainConfig, platform: str, kind: str) -> tuple[Flag, ...]:
    """Return XLA's flags for the step, for one platform's compiler and kind of device."""
    is_crossing_slices = max(config.slices.sizes.values()) > 1
    return flags_for(
        config.xla,
        platform,
        kind,
        crossing=is_crossing_slices,
        environment=user_xla_flags(),
    )


def count_flops(config: TrainConfig) -> Flops | None:
    """Return the model FLOPs of each token, with their formula.

    None if the model's config does not count them, a teacher's products are in the step as well, or
    batches have rows of several lengths.
    """
    model = config.model
    varies = config.data.packing == "grouped"
    if config.teacher or varies or not isinstance(model, CountsFlops):
        return None
    return transformer_flops(
        model.matmul_params, model.layers, model.attention_width, keys_of(config)
    )


def keys_of(config: TrainConfig) -> float:
    """Return the average number of keys of a query, over positions and layers."""
    return mean_keys(config.data.sequence, windows_of(config.model))


def abstract_batch(config: TrainConfig, shape: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the shapes and dtypes of a batch's tokens, by default those of the largest batch."""
    shape = shape or (config.data.batch, config.data.sequence)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if config.task == "dpo":
        dtypes |= {"segments": jnp.int32, "pairs": jnp.int32}
        if config.dpo.needs_reference:
            dtypes["reference"] = jnp.float32
    elif packing_of(config.data, is_chat=config.task == "sft") == "documents":
        dtypes["segments"] = jnp.int32
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def config_mesh(config: TrainConfig) -> AnyMesh:
    """Return the config's mesh over the devices of this machine."""
    return mesh_of(config.mesh, jax.devices(), config.slices.sizes)


def one_device_mesh() -> AnyMesh:
    """Return a mesh of one device alone, the reference of every layout.

    It is this process's own: each of several processes computes the reference.
    """
    return mesh_of(MeshShape(), jax.local_devices()[:1])


def planned_mesh(config: TrainConfig) -> AnyMesh:
    """Return the config's mesh without devices; a -1 is filled in from `config.devices`."""
    total = config.devices or config.mesh.total()
    if total is None:
        fix = "--devices N, or a size for each axis"
        problem = Problem("mesh", "has an axis of -1", fix=fix)
        raise ConfigError("Unknown number of devices:", [problem])
    shape = config.mesh.resolve(total)
    check_slices(shape, config.slices.sizes)
    return abstract_mesh(shape)
