"""One compiled train step: a gradient function, an optimizer and a plan, composed. It knows of no parallelism."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.loss_scale import unscale
from spmd.gradients.losses import LossFn, Sums
from spmd.model_api.model import PRNG
from spmd.model_api.precision import split_loss_scale
from spmd.plan.annotate import check_annotations
from spmd.plan.context import use_plan
from spmd.plan.fsdp import params_for_forward
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import batch_sharding
from spmd.train.offloaded_update import make_update
from spmd.train.state import TrainState, abstract_state

Metrics = dict[str, Any]
"""Scalars of one step, still on the devices; and its gradients, if the step was asked to keep them."""


class TrainStep:
    """`(state, batch) -> (state, metrics)`, compiled ahead of time on its first batch; the state is donated.

    Metrics are the loss function's sums divided by the weight (`loss` in nats per token), and `tokens`,
    `gradient_norm` (before clipping), what `watch` adds and, with `keep_gradients`, `gradients`.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        grad_fn: GradFn,
        watch: Mapping[str, Callable[[TrainState], Any]],
        keep_gradients: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan, self.grad_fn, self.watch, self.keep_gradients = plan, grad_fn, dict(watch), keep_gradients
        self.compiler_options = dict(compiler_options or {})
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Dispatches one step and returns at once; `state` must not be used again."""
        return self.compile(batch)(state, batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The compiled step for batches of this shape; compiled once for each shape.

        Args:
            batch: Arrays, or `jax.ShapeDtypeStruct`s.

        Raises:
            ConfigError: XLA refuses a compile option.
        """
        signature = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
        if signature not in self._compiled:
            self._compiled[signature] = self._compile(self.lower(batch))
        return self._compiled[signature]

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        try:
            return lowered.compile(compiler_options=self.compiler_options or None)
        except jax.errors.JaxRuntimeError as error:
            said = str(error).partition("\n")[0]
            refused = [name for name in self.compiler_options if name in said] if "INVALID_ARGUMENT" in said else []
            if not refused:
                raise
            fix = "see whether this version of XLA has it, and with what values"
            problems = [Problem(name, f"is {self.compiler_options[name]!r}", said, fix) for name in refused]
            raise ConfigError("XLA refuses a compile option:", problems) from error

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """What has been compiled so far, one program for each shape of batch."""
        return tuple(self._compiled.values())

    def arguments(self, batch: Any) -> tuple[TrainState, Any]:
        """The training state and a batch of this shape as `jax.ShapeDtypeStruct`s with shardings."""

        def place(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(self.plan.mesh, len(x.shape)))

        return abstract_state(self.plan), jax.tree.map(place, batch)

    def trace(self, batch: Any) -> jax.stages.Traced:
        """The traced step; the plan's mesh needs no devices.

        Raises:
            AnnotationError: The rule table names an activation that the model never marks.
        """
        traced = self._jitted.trace(*self.arguments(batch))
        check_annotations(self.plan, traced.jaxpr)
        return traced

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The traced and lowered step, before XLA.

        Raises:
            AnnotationError: The rule table names an activation that the model never marks.
        """
        return self.trace(batch).lower()

    @functools.cached_property
    def _jitted(self) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(self.plan))
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl=PRNG), state.step)
        with use_plan(self.plan):
            gradients, sums, variables = self.grad_fn(state.params, state.variables, batch, key)
        weight = sums.pop("weight")
        divisor = jnp.where(weight > 0, weight, 1.0)  # a batch of nothing but padding has zero gradients, not NaN
        gradients = jax.tree.map(lambda g: g / divisor, gradients)
        gradients = jax.lax.with_sharding_constraint(gradients, self.plan.gradient_shardings)
        params, optimizer_state = make_update(self.plan)(gradients, state.optimizer_state, state.params)
        metrics = {name: total / divisor for name, total in sums.items()}
        metrics |= {"tokens": weight, "gradient_norm": optax.tree.norm(gradients)}
        metrics |= {name: watched(state) for name, watched in self.watch.items()}
        if self.keep_gradients:
            metrics["gradients"] = gradients
        return TrainState(state.step + 1, params, variables, optimizer_state, state.key), metrics


def make_eval_step(plan: ShardingPlan, loss_fn: LossFn) -> Callable[[Any, Any, Any], Sums]:
    """`(params, variables, batch) -> Sums`, compiled under `plan`; nothing is donated, no variable changes."""

    def evaluate(params: Any, variables: Any, batch: Any) -> Sums:
        with use_plan(plan):
            own, _ = split_loss_scale(variables)
            return loss_fn(params_for_forward(params), own, batch, jax.random.key(0, impl=PRNG))[0]

    return jax.jit(evaluate)


def make_train_step(
    plan: ShardingPlan,
    loss_fn: LossFn | None = None,
    *,
    grad_fn: GradFn | None = None,
    watch: Mapping[str, Callable[[TrainState], Any]] | None = None,
    keep_gradients: bool = False,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
) -> TrainStep:
    """The train step of `plan`.

    Args:
        plan: From `make_plan`.
        loss_fn: `(params, variables, batch, key) -> (Sums, variables)`.
        grad_fn: Instead of `loss_fn`: any composition of `spmd.gradients`.
        watch: Name → a function of the state before the step, reported as a metric.
        keep_gradients: Whether the metrics have `gradients`, as the optimizer gets them: those of the mean loss.
        compiler_options: XLA's flags for this step, by name.

    Returns:
        A `TrainStep`. An equal plan with the same functions gives the same object, so nothing compiles twice.
    """
    assert (loss_fn is None) != (grad_fn is None), "give loss_fn or grad_fn, one of them"
    options = tuple((compiler_options or {}).items())
    return _train_step(plan, loss_fn, grad_fn, tuple((watch or {}).items()), keep_gradients, options)


@functools.lru_cache(maxsize=16)
def _train_step(
    plan: ShardingPlan,
    loss_fn: LossFn | None,
    grad_fn: GradFn | None,
    watch: tuple[tuple[str, Any], ...],
    keep_gradients: bool,
    compiler_options: tuple[tuple[str, Any], ...],
) -> TrainStep:
    grad_fn = grad_fn or value_and_grad(loss_fn)  # type: ignore[arg-type]
    return TrainStep(
        plan, unscale(grad_fn, plan.precision.loss_scale), dict(watch), keep_gradients, dict(compiler_options)
    )
