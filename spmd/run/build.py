"""From a `TrainConfig` to the things it describes: mesh, model, plan, corpus, step."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives
from spmd.analysis.compiler_log import compiler_log
from spmd.analysis.memory import CompiledMemory, Estimate, estimate_memory, read_memory
from spmd.analysis.topology import Topology, topology_devices
from spmd.data.corpus import Corpus
from spmd.data.loader import check_batch, load_corpus
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.distributed.compilation_cache import compilation_cache
from spmd.distributed.xla_flags import Flag, compiler_options, describe, flags_for
from spmd.errors import ConfigError, Problem, RuleError
from spmd.generate.generator import check_window
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.loss_scale import keep_variables
from spmd.gradients.losses import LossFn, next_token_loss
from spmd.model_api.model import Model
from spmd.model_api.precision import LOSS_SCALE, Precision, make_precision, with_loss_scale
from spmd.observe.metrics import Flops, transformer_flops
from spmd.optim.config import check_no_decay, make_learning_rate, make_optimizer
from spmd.optim.skip_updates import skip_bad_updates, skipped_steps
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.pipedream import pipedream, with_in_flight
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.schedule_files import read_schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import describe_execution, tabulate
from spmd.plan import flax
from spmd.plan.lora import lora_rules, with_lora
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.run.config import TrainConfig, config_values
from spmd.sharding.mesh import AnyMesh, MeshShape, abstract_mesh, batch_sharding, check_slices, mesh_of, shards_of
from spmd.sharding.rules import Rules
from spmd.train.state import TrainState
from spmd.train.step import TrainStep, make_train_step

MICROBATCHES = 4
"""For each stage, at most, by default: enough for a negligible bubble (Huang et al., arXiv:1811.06965, section 4)."""


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What a config describes, on one mesh; each part is made when it is first asked for.

    Args:
        config: The run.
        mesh: Where it runs; from `config_mesh` or `planned_mesh`.
    """

    config: TrainConfig
    mesh: AnyMesh

    @functools.cached_property
    def model(self) -> Model:
        """What is trained, as functions: the model, or adapters beside it. The state of loss scaling is a variable."""
        config, model = self.config, self.whole_model
        if config.lora.targets:
            narrow = self.precision.compute == "bfloat16"  # what is frozen needs no more than it is computed in
            dtype = self.precision.compute if narrow else self.precision.params
            model = with_lora(model, config.lora, config.rules, dtype)
        return with_loss_scale(model, self.precision.loss_scale)

    @functools.cached_property
    def whole_model(self) -> Model:
        """The model that the config names."""
        return flax.from_nnx(self.config.model.build)

    @functools.cached_property
    def rules(self) -> Rules:
        """The config's table, with a row for each adapter."""
        config = self.config
        return lora_rules(self.whole_model, config.lora, config.rules) if config.lora.targets else config.rules

    @functools.cached_property
    def precision(self) -> Precision:
        """Which dtype is where: the policy, with the moments as the optimizer keeps them."""
        return dataclasses.replace(make_precision(self.config.precision), moments=self.config.optimizer.moments)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The path components whose parameters are stacked layers."""
        return tuple(name for name, _ in self.config.rules.stacked)

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """Step number → learning rate."""
        return make_learning_rate(self.config.optimizer, self.config.steps)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer; it leaves out updates where the config says skip (plans for fp16 always do)."""
        optimizer = make_optimizer(self.config.optimizer, self.config.steps, self.stacked)
        if not self.skips or self.precision.loss_scale:
            return optimizer
        recovery = self.config.recovery
        factor = recovery.spike_factor if recovery.on_spike == "skip" else 0.0
        return skip_bad_updates(optimizer, factor, recovery.spike_window)

    @property
    def skips(self) -> bool:
        """Whether steps that are not finite, or too large, are left out and counted."""
        config = self.config
        return "skip" in (config.on_nan, config.recovery.on_spike) or self.precision.loss_scale is not None

    @functools.cached_property
    def plan(self) -> ShardingPlan:
        """Every decision, resolved."""
        plan = self._plan_of(self.model)
        if self.stages == 1 or self.pipeline.flush:
            return plan
        program = tabulate(self.pipeline)
        if problems := self._not_without_a_flush():
            raise ConfigError("A pipeline without a flush cannot do this:", problems)
        return self._plan_of(with_in_flight(self.model, plan, self.loss_fn, self.abstract_batch(), program))

    def _not_without_a_flush(self) -> list[Problem]:
        config, never = self.config, "while microbatches are under way"
        return [
            Problem(name, f"is {operator.attrgetter(name)(config)}: {why} {never}", fix=fix)
            for name, wrong, why, fix in (
                ("accumulate", config.accumulate > 1, "a batch does not end", "more pipeline.microbatches"),
                *(
                    (name, operator.attrgetter(name)(config) == "skip", "a step cannot be left out", "stop, or a flush")
                    for name in ("on_nan", "recovery.on_spike")
                ),
                (
                    "precision",
                    bool(self.precision.loss_scale),
                    "the loss scale may change",
                    "bf16, or a schedule with a flush",
                ),
            )
            if wrong
        ]

    def _plan_of(self, model: Model) -> ShardingPlan:
        config = self.config
        plan = make_plan(
            self.mesh,
            self.rules,
            model,
            self.optimizer,
            zero=config.zero,
            remat=config.remat,
            precision=self.precision,
            offload=config.offload,
            attention=config.attention,
            context=config.context,
        )
        problems = check_no_decay(config.optimizer, [leaf.path for leaf in plan.params], self.stacked)
        if problems:
            raise RuleError("The optimizer's table does not fit the model:", problems)
        return plan

    @functools.cached_property
    def loss_fn(self) -> LossFn:
        """Next-token cross-entropy of the model."""
        return next_token_loss(self.model, chunk=self.config.logits_chunk)

    @property
    def stages(self) -> int:
        """How many stages the layers are cut into."""
        return self.mesh.shape["pipe"]

    @property
    def microbatches(self) -> int:
        """Parts of a batch that go through the stages, or one by one through the model, before they are added up."""
        return self.pipeline.microbatches if self.stages > 1 else self.config.pipeline.microbatches or 1

    @functools.cached_property
    def pipeline(self) -> Schedule:
        """Which stage does what in which order."""
        name, microbatches, chunks = dataclasses.astuple(self.config.pipeline)
        if not name.endswith(".csv"):
            count = microbatches or self._most_microbatches(name)
            return make_schedule(name, self.stages, count, chunks or (2 if name == "interleaved" else 1))
        schedule = read_schedule(name, microbatches=microbatches or None, chunks=chunks or None)
        if schedule.stages != self.stages:
            arithmetic = f"rows = {schedule.stages}, mesh.pipe = {self.stages}"
            problem = Problem(
                "pipeline.schedule", f"{name} is for another pipeline", arithmetic, "a row for each stage"
            )
            raise ConfigError("This configuration cannot be used:", [problem])
        return schedule

    @property
    def pipeline_line(self) -> str:
        """What the plan is followed by: the schedule and how it is executed; nothing without a pipeline."""
        if self.stages == 1:
            return ""
        return f"\npipeline {self.pipeline.name}, {self.microbatches} microbatches; {describe_execution(self.pipeline)}"

    @property
    def slices_line(self) -> str:
        """What the plan is followed by: the axes on the slow network; nothing where there is one slice."""
        slices = {axis: count for axis, count in self.config.slices.sizes.items() if count > 1}
        if not slices:
            return ""
        total = math.prod(slices.values())
        named = ", ".join(f"{axis} {count} × {self.mesh.shape[axis] // count}" for axis, count in slices.items())
        return f"\nslices {total} of {self.mesh.size // total} devices; over the slow network, × inside: {named}"

    def _most_microbatches(self, schedule: str) -> int:
        """As many as divide the batch and are split over the mesh, up to `MICROBATCHES` for each stage."""
        batch, devices = self.config.data.batch, shards_of(batch_sharding(self.mesh).spec[0], self.mesh.shape)
        most, step = MICROBATCHES * self.stages, self.stages if schedule == "interleaved" else 1
        fitting = (n for n in range(most, 0, -step) if batch % (self.config.accumulate * n * devices) == 0)
        return next(fitting, most)

    @functools.cached_property
    def grad_fn(self) -> GradFn:
        """How a batch becomes gradients."""
        if self.stages > 1:
            program = tabulate(self.pipeline)
            grad_fn = pipeline(self.loss_fn, program) if self.pipeline.flush else pipedream(self.loss_fn, program)
        else:
            grad_fn = accumulate(value_and_grad(self.loss_fn), self.microbatches)
        grad_fn = accumulate(grad_fn, self.config.accumulate)
        return keep_variables(grad_fn) if self.skips and not self.precision.loss_scale else grad_fn

    @functools.cached_property
    def evaluation_loss_fn(self) -> LossFn:
        """The loss as in evaluation, of a whole batch."""
        loss_fn = next_token_loss(self.model, train=False, chunk=self.config.logits_chunk)
        return pipelined(loss_fn, self.stages, self.microbatches) if self.stages > 1 else loss_fn

    @functools.cached_property
    def step(self) -> TrainStep:
        """The train step, not yet compiled."""
        devices = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else ()
        options = compiler_options(self.flags(devices[0].platform) if devices else ())
        return make_train_step(self.plan, grad_fn=self.grad_fn, watch=self.watch, compiler_options=options)

    def flags(self, platform: str) -> tuple[Flag, ...]:
        """What XLA is told with the step.

        Args:
            platform: Whose compiler it will be.
        """
        return flags_for(self.config.xla, platform, crossing=max(self.config.slices.sizes.values()) > 1)

    def flags_text(self, platform: str) -> str:
        """What the plan is followed by: the flags with their reasons; nothing where there are none."""
        flags = self.flags(platform)
        return describe(f"\nflags for XLA on {platform}", flags) if flags else ""

    @functools.cached_property
    def watch(self) -> dict[str, Callable[[TrainState], jax.Array]]:
        """What the step reports besides: the learning rate, how many steps were left out before, and the loss scale."""
        if not self.skips:
            return {"learning_rate": lambda state: self.schedule(state.step)}
        watch: dict[str, Callable[[TrainState], jax.Array]] = {
            "learning_rate": lambda state: self.schedule(state.step - skipped_steps(state.optimizer_state)),
            "skipped_steps": lambda state: skipped_steps(state.optimizer_state),
        }
        if self.precision.loss_scale:
            watch["loss_scale"] = lambda state: state.variables[LOSS_SCALE]["scale"]
        return watch

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return load_tokenizer(self.config.data.tokenizer)

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The tokenised text."""
        corpus = load_corpus(self.config.data)
        if corpus.tokenizer.vocab > self.config.model.vocab:
            arithmetic = f"tokenizer {corpus.tokenizer.vocab} > model {self.config.model.vocab}"
            fix = f"--model.vocab {corpus.tokenizer.vocab}"
            problem = Problem("model.vocab", "is smaller than the tokenizer's vocabulary", arithmetic, fix)
            raise ConfigError("The model cannot read this corpus:", [problem])
        return corpus

    @functools.cached_property
    def flops(self) -> Flops:
        """Model FLOPs for each token, with their formula."""
        model = self.config.model
        return transformer_flops(model.matmul_params, model.layers, model.attention_width, self.config.data.sequence)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch's shapes and dtypes."""
        shape = (self.config.data.batch, self.config.data.sequence)
        dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}

    def compile(self) -> tuple[CollectiveAudit, CompiledMemory | None]:
        """What the compiled step sends between devices and what it holds; compiles it.

        Raises:
            MemoryError: The compiler says that the step does not fit the chip.
        """
        with compilation_cache(None), compiler_log() as log:  # a program from the cache says nothing of its compilation
            try:
                compiled = self.step.compile(self.abstract_batch())
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise MemoryError(str(error).partition("\n")[0]) from None
        audit = audit_collectives(compiled, self.mesh, log=log, slices=self.config.slices.sizes)
        return audit, read_memory(compiled)

    def audit(self) -> None:
        """Finds what is wrong before anything is allocated or compiled: the batch, the table, every activation.

        Raises:
            SpmdError: The batch, or a microbatch of it, does not divide over the mesh; the rule table does not fit; the
                model marks an activation that cannot be split as its table says.
        """
        data, sample = self.config.data, self.config.sample
        config_values(self.config)
        if sample.prompt:
            check_window([self.tokenizer.encode_prompt(sample.prompt)], sample.tokens, data.sequence)
        self.check_batch()
        self.step.trace(self.abstract_batch())

    def memory(self, platform: str = "cpu") -> Estimate:
        """What the step holds on each device by category, from its trace.

        Args:
            platform: Whose compiler it will be.
        """
        return estimate_memory(self.step, self.abstract_batch(), platform)

    def check_batch(self) -> None:
        """Whether the batch divides into microbatches, and a microbatch over the mesh.

        Raises:
            SpmdError: It does not.
        """
        parts = self.config.accumulate * self.microbatches
        check_batch(self.config.data.batch, self.config.data.sequence, batch_sharding(self.mesh), parts)


def topology_mesh(config: TrainConfig, topology: Topology) -> AnyMesh:
    """The config's mesh over the devices of a machine that is not here.

    Raises:
        ConfigError: The extra with its compiler is not installed.
        MeshError: The mesh does not fit the machine.
    """
    return mesh_of(config.mesh, topology_devices(topology), config.slices.sizes)


def config_mesh(config: TrainConfig) -> AnyMesh:
    """The config's mesh over the devices of this machine."""
    return mesh_of(config.mesh, jax.devices(), config.slices.sizes)


def one_device_mesh() -> AnyMesh:
    """A mesh of the first device alone, which every layout is compared with."""
    return mesh_of(MeshShape(), jax.devices()[:1])


def planned_mesh(config: TrainConfig) -> AnyMesh:
    """The config's mesh with no devices behind it; a -1 is filled in from `config.devices`.

    Raises:
        ConfigError: An axis is -1 and `devices` is 0, so nothing says how large it is.
        MeshError: The mesh does not fit so many devices, or an axis its slices.
    """
    shape: MeshShape = config.mesh
    total = config.devices or shape.total()
    if total is None:
        fix = "give --devices N, or each axis a size"
        raise ConfigError("Nothing says how many devices there are:", [Problem("mesh", "has an axis of -1", fix=fix)])
    shape = shape.resolve(total)
    check_slices(shape, config.slices.sizes)
    return abstract_mesh(shape)
