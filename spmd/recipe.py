"""From a `TrainConfig` to the things it describes: mesh, model, plan, corpus, step."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from spmd import flax
from spmd.annotate import check_marks, within
from spmd.config import TrainConfig, config_values
from spmd.data import Corpus, Tokenizer, check_batch, load_corpus, load_tokenizer
from spmd.errors import ConfigError, Problem, RuleError
from spmd.foresight.collectives import CollectiveAudit, audit_collectives, compiler_log
from spmd.generate import check_window
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.loss import LossFn, next_token_loss
from spmd.mesh import AnyMesh, MeshShape, abstract_mesh, batch_sharding, mesh_of
from spmd.metrics import Flops, transformer_flops
from spmd.model import Model
from spmd.optim import check_no_decay, make_optimizer, make_schedule
from spmd.plan import ShardingPlan, make_plan
from spmd.skip import skip_nonfinite
from spmd.state import TrainState
from spmd.step import TrainStep, make_train_step


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a config describes, on one mesh; each part is made when it is first asked for.

    Args:
        config: The run.
        mesh: Where it runs; from `config_mesh` or `planned_mesh`.
    """

    config: TrainConfig
    mesh: AnyMesh

    @functools.cached_property
    def model(self) -> Model:
        """The model as functions."""
        return flax.from_nnx(self.config.model.build)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The path components whose parameters are stacked layers."""
        return tuple(name for name, _ in self.config.rules.stacked)

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """Step number → learning rate."""
        return make_schedule(self.config.optimizer, self.config.steps)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer; with `on_nan="skip"` it leaves out updates that are not finite."""
        optimizer = make_optimizer(self.config.optimizer, self.config.steps, self.stacked)
        if self.config.on_nan == "skip":
            return skip_nonfinite(optimizer)
        return optimizer

    @functools.cached_property
    def plan(self) -> ShardingPlan:
        """Every decision, resolved."""
        config = self.config
        plan = make_plan(
            self.mesh,
            config.rules,
            self.model,
            self.optimizer,
            zero=config.zero,
            remat=config.remat,
            precision=config.precision,
            offload=config.offload,
        )
        problems = check_no_decay(config.optimizer, [leaf.path for leaf in plan.params], self.stacked)
        if problems:
            raise RuleError("The optimizer's table does not fit the model:", problems)
        return plan

    @functools.cached_property
    def loss_fn(self) -> LossFn:
        """Next-token cross-entropy of the model."""
        return next_token_loss(self.model)

    @functools.cached_property
    def grad_fn(self) -> GradFn:
        """How a batch becomes gradients."""
        return accumulate(value_and_grad(self.loss_fn), self.config.accumulate)

    @functools.cached_property
    def step(self) -> TrainStep:
        """The train step, not yet compiled."""
        return make_train_step(self.plan, grad_fn=self.grad_fn, watch=self.watch)

    @functools.cached_property
    def watch(self) -> dict[str, Callable[[TrainState], jax.Array]]:
        """What the step reports besides: the learning rate, and how many earlier steps were left out."""
        if self.config.on_nan == "stop":
            return {"learning_rate": lambda state: self.schedule(state.step)}
        return {
            "learning_rate": lambda state: self.schedule(state.step - state.optimizer_state.skipped),
            "skipped_steps": lambda state: state.optimizer_state.skipped,
        }

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

    def collectives(self) -> CollectiveAudit:
        """What the compiled step sends between devices; compiles it."""
        with compiler_log() as log:
            compiled = self.step.compile(self.abstract_batch())
        return audit_collectives(compiled, self.mesh, log=log)

    def audit(self) -> None:
        """Finds what is wrong before anything is allocated or compiled: the batch, the table, every activation.

        Raises:
            SpmdError: The batch, or a microbatch of it, does not divide over the mesh; the rule table does not fit; the
                model marks an activation that cannot be split as its table says.
        """
        data, sample = self.config.data, self.config.sample
        config_values(self.config)
        if sample.prompt:
            check_window(len(self.tokenizer.encode(sample.prompt)), sample.tokens, data.sequence)
        check_batch(data.batch // self.config.accumulate, data.sequence, batch_sharding(self.mesh))
        key = jax.eval_shape(lambda: jax.random.key(0))
        plan = self.plan
        with within(plan):
            check_marks(
                plan,
                jax.make_jaxpr(self.loss_fn)(plan.abstract_params, plan.abstract_variables, self.abstract_batch(), key),
            )


def config_mesh(config: TrainConfig) -> AnyMesh:
    """The config's mesh over the devices of this machine."""
    return mesh_of(config.mesh, jax.devices())


def one_device_mesh() -> AnyMesh:
    """A mesh of the first device alone, which every layout is compared with."""
    return mesh_of(MeshShape(), jax.devices()[:1])


def planned_mesh(config: TrainConfig) -> AnyMesh:
    """The config's mesh with no devices behind it; a -1 is filled in from `config.devices`.

    Raises:
        ConfigError: An axis is -1 and `devices` is 0, so nothing says how large it is.
    """
    shape: MeshShape = config.mesh
    total = config.devices or shape.total()
    if total is None:
        fix = "give --devices N, or each axis a size"
        raise ConfigError("Nothing says how many devices there are:", [Problem("mesh", "has an axis of -1", fix=fix)])
    return abstract_mesh(shape.resolve(total))
