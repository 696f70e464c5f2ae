"""The compiled train step: a gradient function, an optimizer and a plan, without parallelism."""

import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from spmd.errors import ConfigError, Problem, check_type
from spmd.gradients.base import GradFn, check_first_batch, check_results, value_and_grad
from spmd.gradients.losses import VALUES, LossFn, Sums
from spmd.model_interface.grad_transform import Carry, StepFn, step_within, wrap_all
from spmd.model_interface.model import PRNG
from spmd.optim.extra_args import extra_args
from spmd.plan.annotate import check_annotations
from spmd.plan.context import constrain, use_plan
from spmd.plan.fsdp import params_for_forward
from spmd.plan.partition_safe import check_replaced, partition_safe
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import METRICS, OPTIMIZER
from spmd.sharding.mesh import AnyMesh
from spmd.training.batch import place_batch
from spmd.training.compilation_cache import watch_cache_hits, without_faulty_cache
from spmd.training.norms import no_norms
from spmd.training.stage_permutes import check_permutes
from spmd.training.state import (
    TrainState,
    abstract_arguments,
    abstract_state,
    as_stored,
    check_state,
    from_stored,
    init_state,
    place_state,
)
from spmd.tree import with_noun

Watch = Callable[[TrainState, TrainState], Any]
"""Metric of a step: a function of the states before and after it."""
Norms = Callable[[Any, Any, Any], Mapping[str, jax.Array]]
"""Metrics of a step: a function of the parameters before and after it, and of its gradients."""
Metrics = dict[str, Any]
"""Scalars of one step, still on the devices; and its gradients, if the step keeps them."""


class StepProgram(NamedTuple):
    """Compiled program of a step.

    Attributes:
        text: The StableHLO text that it was compiled from, compressed by zlib.
        is_read: Whether an earlier process compiled it: it was read from a cache or a file.
    """

    compiled: jax.stages.Compiled
    text: bytes
    is_read: bool


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep:
    """`(state, batch) -> (state, metrics)`, compiled ahead of time; the state is donated.

    Each shape of batch is compiled at its first use. Metrics are the loss function's sums
    divided by the weight (`loss` in nats per token), its values, and `tokens`, `gradient_norm`
    (before clipping), what `watch` and `norms` add and, with `keep_gradients`, `gradients`.
    """

    plan: ShardingPlan
    grad_fn: GradFn
    watch: Mapping[str, Watch]
    keep_gradients: bool
    compiler_options: Mapping[str, Any]
    check_first_batch: bool = True
    norms: Norms = no_norms
    _compiled: dict[Any, StepProgram] = dataclasses.field(default_factory=dict, init=False)
    _newest: weakref.ref[TrainState] | None = dataclasses.field(default=None, init=False)

    def __repr__(self) -> str:
        count = len(self._compiled)
        return f"TrainStep(compiled for {with_noun(count, 'shape')} of batches; {self.plan!r})"

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Dispatch one step and return at once; `state` is donated.

        It must not be used again: that is an error. Host arrays of the batch are placed as
        `spmd.place_batch` does. Inside a transformation of JAX, such as a `jax.lax.scan` over
        batches, the step becomes a part of that program. A state that such a program returns in
        another layout is moved into the plan's.
        """
        if _are_traced(state, batch):
            return self._traced(state, batch)
        if not self._is_newest(state):
            check_state(self.plan, state)
            state = place_state(self.plan, state)
        batch = place_batch(self.plan, batch)
        if self.check_first_batch and not self._compiled:
            with use_plan(self.plan):
                check_first_batch(self.grad_fn, state.params, state.variables, batch, state.key)
        state, metrics = self.compile(batch)(state, batch)
        self._newest = weakref.ref(state)
        return state, metrics

    def _is_newest(self, state: TrainState) -> bool:
        """Return whether a state is the last result of this step, and so is known to fit."""
        if not self._newest or self._newest() is not state:
            return False
        return not state.step.is_deleted()

    def _traced(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take a step inside another traced program, checked as a step of its own is."""
        if self.compiler_options:
            problem = Problem(
                "compiler_options",
                "are options of a program, and the step is a part of another",
                fix="jax.jit(…, compiler_options=…)",
            )
            raise ConfigError("Untraceable train step:", [problem])
        check_state(self.plan, state)
        batch = jax.tree.map(jnp.asarray, batch)
        self.trace(batch)
        batch = jax.lax.with_sharding_constraint(batch, self.plan.batch_shardings(batch))
        return self._jitted(state, batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """Return the compiled step for batches of this shape, arrays or abstract ones.

        Each shape is compiled once.
        """
        return self.program(batch).compiled

    def program(self, batch: Any) -> StepProgram:
        """Return the program for batches of this shape, compiled at the first call."""
        signature = _signature(batch)
        if signature not in self._compiled:
            lowered = self.lower(batch)
            text = compressed_text(lowered)
            with watch_cache_hits() as hits:
                compiled = self._compile(lowered)
            self._compiled[signature] = StepProgram(compiled, text, is_read=bool(hits))
        return self._compiled[signature]

    def has_program(self, batch: Any) -> bool:
        """Return whether there is a program for batches of this shape."""
        return _signature(batch) in self._compiled

    def install(self, batch: Any, program: StepProgram) -> None:
        """Use a program, such as one of an earlier process, for batches of this shape."""
        self._compiled[_signature(batch)] = program

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        options = dict(self.compiler_options) or None
        try:
            with without_faulty_cache(self.plan.mesh.shape["pipe"]):
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            said = str(error).partition("\n")[0]
            problems = self._refused_options(said)
            if not problems:
                raise
            raise ConfigError("XLA refuses a compile option:", problems) from error
        check_permutes(compiled, self.plan.mesh)
        return compiled

    def _refused_options(self, said: str) -> list[Problem]:
        """Return a problem for each compile option refused in a message of XLA."""
        if "INVALID_ARGUMENT" not in said:
            return []
        fix = "see whether this version of XLA has it, and with what values"
        problems = list[Problem]()
        for name, value in self.compiler_options.items():
            if name in said:
                problems.append(Problem(name, f"is {value!r}", said, fix))
        return problems

    @property
    def mesh(self) -> AnyMesh:
        """The plan's mesh."""
        return self.plan.mesh

    @property
    def text(self) -> str:
        """The plan as text."""
        return str(self.plan)

    @property
    def parts(self) -> dict[str, "TrainStep"]:
        """Prefix of metrics and of paths in a checkpoint → train step: this one, without any.

        The parts of several networks are those of `spmd.training.alternating.AlternatingStep`.
        """
        return {"": self}

    @property
    def evaluated_part(self) -> str:
        """Prefix of the part for evaluations."""
        return ""

    def part_state(self, prefix: str, state: Any) -> TrainState:
        """Return the state of one of `parts`."""
        del prefix
        return state

    def part_inputs(self, prefix: str, state: Any, batch: Any) -> tuple[TrainState, Any]:
        """Return the state and the batch of one of `parts`, arrays or abstract ones."""
        del prefix
        return state, batch

    def place_batch(self, batch: Any) -> Any:
        """Place a batch as `spmd.place_batch` does."""
        return place_batch(self.plan, batch)

    def init_state(self, seed: int = 0) -> TrainState:
        """Create the state at step 0 as `spmd.init_state` does."""
        return init_state(self.plan, seed)

    def abstract_state(self) -> TrainState:
        """Return the state as `jax.ShapeDtypeStruct`s with shardings."""
        return abstract_state(self.plan)

    def as_stored(self, state: Any) -> TrainState:
        """Return a state in the form of checkpoints."""
        return as_stored(state)

    def from_stored(self, stored: TrainState) -> TrainState:
        """Return a state from the form of `as_stored`."""
        return from_stored(stored, self.plan)

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs compiled so far, one for each shape of batch."""
        return tuple(program.compiled for program in self._compiled.values())

    def part_batches(self, batch: Any) -> list[tuple[str, "TrainStep", Any]]:
        """Return prefix, train step and batch of each program of `compile`."""
        return [("", self, batch)]

    def trace(self, batch: Any) -> jax.stages.Traced:
        """Trace the step, and check that the model marks every activation of the rule table.

        No devices are needed.

        Raises:
            AnnotationError: An activation is not marked, or XLA would compute an operation wrongly.
        """
        arguments = abstract_arguments(self.plan, batch)
        traced = self._jitted.trace(*arguments)
        check_annotations(self.plan, traced.jaxpr)
        specs = [leaf.sharding.spec for leaf in jax.tree.leaves(arguments)]
        check_replaced(traced.jaxpr, specs, self.plan.mesh)
        return traced

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """Trace and lower the step, before XLA; raises as `trace`."""
        return self.trace(batch).lower()

    @functools.cached_property
    def _transformed(self) -> GradFn:
        """The gradient function within the transforms of the plan: the gradients of a step."""
        return wrap_all(self.grad_fn, self.plan.transforms)

    @functools.cached_property
    def _jitted(self) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(self.plan))
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))

    @property
    def step_fn(self) -> StepFn:
        """The function of a step for a program being traced: not compiled, checked or donating."""
        return self._step

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        step = step_within(self._plain_step, self.plan.transforms, self.plan)
        after, metrics = step(state, batch)
        with jax.named_scope(METRICS):
            watched = {name: watch(state, after) for name, watch in self.watch.items()}
        return after, metrics | watched

    def _plain_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        gradients, metrics, weight, carry = self._mean_gradients(state, batch, state.params)
        params, optimizer_state = self.update(state, batch, gradients, metrics["loss"])
        after = TrainState(
            step=state.step + 1,
            params=params,
            variables=carry.variables,
            optimizer_state=optimizer_state,
            key=state.key,
            transforms=carry.transforms,
        )
        with jax.named_scope(METRICS):
            metrics["tokens"] = weight
            metrics["gradient_norm"] = optax.tree.norm(gradients)
            norms = self.norms(state.params, params, gradients)
        metrics = _with_values(metrics, norms)
        if self.keep_gradients:
            metrics["gradients"] = gradients
        return after, metrics

    def update(
        self, state: TrainState, batch: Any, gradients: Any, loss: jax.Array
    ) -> tuple[Any, Any]:
        """Return parameters and optimizer state after an update with gradients of the mean loss.

        Pure and not compiled; `batch` matters only to an optimizer that computes the loss again, as
        a line search does.
        """
        value_fn = functools.partial(self._mean_loss, state, batch)
        extra = extra_args(loss, gradients, value_fn)
        with jax.named_scope(OPTIMIZER):
            update = self.plan.storage.make_update(self.plan)
            return update(gradients, state.optimizer_state, state.params, **extra)

    def _mean_gradients(
        self, state: TrainState, batch: Any, params: Any
    ) -> tuple[Any, Metrics, jax.Array, Carry]:
        """Return the gradients of the mean loss, the means, their weight, and the updated carry."""
        with use_plan(self.plan):
            returned = self._transformed(params, state.carry, batch, state.step_key())
        gradients, sums, carry = check_results(returned)
        weight = sums.pop("weight")
        # A batch of nothing but padding has zero gradients, not NaN.
        divisor = jnp.where(weight > 0, weight, 1.0)
        gradients = jax.tree.map(lambda g: g / divisor, gradients)
        gradients = jax.tree.map(self._as_planned, gradients, self.plan.gradient_shardings)
        values = sums.pop(VALUES, {})
        means = jax.tree.map(lambda total: total / divisor, sums)
        arrays = means.get("arrays", {})
        variables = self.plan.model.update_variables(carry.variables, arrays)
        carry = dataclasses.replace(carry, variables=variables)
        return gradients, _with_values(means, values), weight, carry

    def _as_planned(self, gradient: jax.Array, sharding: NamedSharding) -> jax.Array:
        return constrain(gradient, self.plan.mesh, sharding.spec, "a gradient")

    def _mean_loss(self, state: TrainState, batch: Any, params: Any) -> jax.Array:
        """Return the mean loss at any parameters, for line searches.

        Its derivative is taken from the gradient function. Nothing is traced unless the optimizer
        calls it.
        """

        @jax.custom_vjp
        def loss_at(params: Any) -> jax.Array:
            _, means, _, _ = self._mean_gradients(state, batch, params)
            return means["loss"]

        def forward(params: Any) -> tuple[jax.Array, Any]:
            gradients, means, _, _ = self._mean_gradients(state, batch, params)
            return means["loss"], gradients

        def backward(gradients: Any, cotangent: jax.Array) -> tuple[Any]:
            d_params = jax.tree.map(
                lambda p, g: (cotangent * g).astype(p.dtype), state.params, gradients
            )
            return (d_params,)

        loss_at.defvjp(forward, backward)
        cast = jax.tree.map(lambda p, like: p.astype(like.dtype), params, state.params)
        return loss_at(cast)


def _signature(batch: Any) -> Any:
    """Return the structure of a batch, and the shape and dtype of each array."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def compressed_text(lowered: jax.stages.Lowered) -> bytes:
    """Return the StableHLO text of a lowered step, compressed by zlib."""
    return zlib.compress(lowered.as_text().encode(), 1)


def _with_values(means: Metrics, values: Mapping[str, jax.Array]) -> Metrics:
    """Add metrics other than means: numbers by name, arrays among `arrays`."""
    arrays: Metrics = {}
    numbers: Metrics = {}
    for name, value in values.items():
        if value.ndim:
            arrays[name] = value
        else:
            numbers[name] = value
    metrics = dict(means)
    if arrays:
        metrics["arrays"] = {**means.get("arrays", {}), **arrays}
    return metrics | numbers


def make_eval_step(plan: ShardingPlan, loss_fn: LossFn) -> Callable[..., Sums]:
    """Return `(params, variables, batch, name="", number=0) -> Sums`, jitted under `plan`.

    Nothing is donated, and no variable changes. Host arrays of the batch are placed as
    `spmd.place_batch` does. The loss function's key follows from the name of the set and the
    batch's number in it: batches draw different numbers, and each evaluation the same ones.
    """

    def evaluate(params: Any, variables: Any, batch: Any, place: jax.Array) -> Sums:
        with use_plan(plan):
            key = jax.random.key(0, impl=PRNG)
            for part in place:
                key = jax.random.fold_in(key, part)
            loss = partition_safe(loss_fn)
            found, _ = loss(params_for_forward(params), variables, batch, key)
            sums = dict(found)
            sums.pop(VALUES, None)  # of one batch, and an evaluation adds batches up
            return sums

    cache = without_faulty_cache(plan.mesh.shape["pipe"])
    compiled = cache(jax.jit(evaluate))

    def evaluate_batch(
        params: Any, variables: Any, batch: Any, name: str = "", number: int = 0
    ) -> Sums:
        if not _are_traced(params, variables, batch):
            batch = place_batch(plan, batch)
        place = np.array([zlib.crc32(name.encode()), number], np.uint32)
        return compiled(params, variables, batch, place)

    return evaluate_batch


def _are_traced(*trees: Any) -> bool:
    """Return whether any leaf is part of another traced program."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def _kept_gradients_problems(plan: ShardingPlan) -> list[Problem]:
    """Return a problem for each transform with steps of its own, which keep no gradients."""
    problems = list[Problem]()
    for transform in plan.transforms:
        if transform.has_own_optimizer:
            what = f"is true, and {transform.name} takes the gradients in steps of its own"
            problems.append(Problem("keep_gradients", what, fix="False; or in the inner step"))
    return problems


def make_train_step(
    plan: ShardingPlan,
    loss_fn: LossFn | None = None,
    *,
    grad_fn: GradFn | None = None,
    watch: Mapping[str, Watch] | None = None,
    keep_gradients: bool = False,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
    check_first_batch: bool = True,
    norms: Norms = no_norms,
) -> TrainStep:
    """Return the train step of `plan`.

    Args:
        loss_fn: `(params, variables, batch, key) -> (Sums, variables)`.
        grad_fn: Instead of `loss_fn`: any composition of `spmd.gradients`.
        watch: Name → a function of the states before and after the step, reported as a metric.
        keep_gradients: Whether the metrics have `gradients`, as the optimizer gets them: those of
            the mean loss.
        compiler_options: XLA's flags for this step, by name.
        check_first_batch: Whether to test a loss on the first batch where its structure does not
            tell a sum from a mean: it is evaluated on half of the batch, alone and twice over. A
            mean beside a weight that is a count is an error.
        norms: Metrics from parameters and gradients, such as `spmd.training.norms.ModuleNorms`.
    """
    fix = "make_train_step(plan, loss_fn), with plan from spmd.make_plan"
    problems = check_type("plan", plan, ShardingPlan, fix)
    if (loss_fn is None) == (grad_fn is None):
        what = "are both there, or neither is"
        problems.append(Problem("loss_fn, grad_fn", what, fix="give one of them"))
    if not problems and keep_gradients:
        problems += _kept_gradients_problems(plan)
    if problems:
        raise ConfigError("Invalid train step:", problems)
    grad_fn = grad_fn or value_and_grad(loss_fn)  # type: ignore[arg-type]
    return TrainStep(
        plan,
        grad_fn,
        watch or {},
        keep_gradients,
        compiler_options or {},
        check_first_batch,
        norms,
    )
