"""The type of gradient functions, and reverse-mode differentiation of a whole batch.

A `GradFn` returns gradients *of the summed loss* and the sums. Sums add up, so accumulation,
pipelines and loss scaling compose independently; the step divides by the weight once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from spmd.errors import ConfigError, Problem, check_call
from spmd.gradients.additive import LossReader, has_part_of_batch
from spmd.gradients.losses import LossFn, Sums, check_returned
from spmd.gradients.weights import check_weight
from spmd.model_interface.grad_transform import Carry, enter_all, leave_all
from spmd.plan.context import current
from spmd.plan.fsdp import grad_targets, params_for_forward
from spmd.plan.partition_safe import trace_call

GradFn = Callable[[Any, Carry, Any, jax.Array], tuple[Any, Sums, Carry]]
"""`(params, carry, batch, key) -> (gradients of sums["loss"], sums, updated carry)`.

The carry has the model's variables and the states of transforms
(`spmd.model_interface.grad_transform`).
"""

_ONCE = "Gradients cannot be exchanged once a step:"


@dataclasses.dataclass(frozen=True, eq=False)
class LossGradFn:
    """A `GradFn` made from a loss function, with the reader of the loss's structure.

    Attributes:
        grad_fn: The gradient function itself.
        loss: The reader of the loss's dependence on the examples of a batch.
        tick_table: The tasks of a pipeline (`spmd.pipeline.tick_table`); None without one.
    """

    grad_fn: GradFn
    loss: LossReader
    tick_table: Any = None

    def __call__(
        self, params: Any, carry: Carry, batch: Any, key: jax.Array
    ) -> tuple[Any, Sums, Carry]:
        """Return the gradients, the sums and the updated carry."""
        return self.grad_fn(params, carry, batch, key)


def with_loss_of(grad_fn: GradFn, wrapped: GradFn) -> GradFn:
    """Return a wrapped gradient function with the loss and pipeline of `grad_fn`, if it has them."""
    if isinstance(grad_fn, LossGradFn):
        return dataclasses.replace(grad_fn, grad_fn=wrapped)
    return wrapped


def value_and_grad(loss_fn: LossFn, *, additive: bool = False) -> LossGradFn:
    """Return the gradient function of the whole batch.

    Under a plan, gradients have the dtype in which the plan's precision sums them, whatever the
    dtype of the parameters. The plan's transforms enter the differentiation: with a loss scale, the
    gradients are those of the scaled loss.

    Args:
        additive: Whether the sums of `loss_fn` are declared to be sums over the examples. By
            default this is read from the traced loss where accumulation, a pipeline or an exchange
            once a step needs it.

    Raises:
        ConfigError: At trace time: the loss is a mean, and its weight a count; or the weight is
            trained.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss_fn(w, variables, x, key):
        ...     return {"loss": (w * x).sum(), "weight": jnp.float32(x.size)}, variables
        >>> grad_fn = value_and_grad(loss_fn)
        >>> grads, sums, _ = grad_fn(jnp.float32(2), Carry(), jnp.ones(3), jax.random.key(0))
        >>> float(grads), float(sums["loss"])
        (3.0, 6.0)
    """
    fix = "a function of (params, variables, batch, key), such as spmd.next_token_loss(model)"
    problems = check_call("loss_fn", loss_fn, "params, variables, batch, key", fix)
    if isinstance(loss_fn, LossGradFn):
        what = "is a gradient function, which is differentiated already"
        problems.append(Problem("loss_fn", what, fix="make_train_step(plan, grad_fn=…)"))
    if problems:
        raise ConfigError("Invalid loss function:", problems)

    loss = LossReader(loss_fn, additive=additive)

    def grad_fn(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        own = carry.variables
        transforms = current().transforms
        _check_not_in_stage()
        entered = enter_all(transforms, carry)

        def checked(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
            return check_returned(loss_fn(params, variables, batch, key), own)

        def objective(targets: Any, riders: Any) -> tuple[jax.Array, tuple[Sums, Any]]:
            given = params_for_forward(params, targets, riders)
            call = trace_call(checked, given, own, batch, key)
            check_weight(call)
            sums, after = call.evaluate()
            return entered.scaled(sums["loss"]), (sums, after)

        loss.check_mean(params, own, batch, key)
        if has_part_of_batch():
            fix = 'defer_grad_reduction="none"'
            loss.check_additive(_ONCE, params, own, batch, key, fix=fix)
        differentiate = jax.grad(objective, argnums=(0, 1), has_aux=True)
        found, (sums, after) = differentiate(grad_targets(params), entered.riders)
        gradients, seen = found
        return gradients, sums, leave_all(transforms, carry, after, seen)

    return LossGradFn(grad_fn, loss)


def _check_not_in_stage() -> None:
    """Raise a `ConfigError` inside a stage of a pipeline."""
    around = get_abstract_mesh()
    if "pipe" not in around.manual_axes or around.shape["pipe"] == 1:
        return
    problem = Problem(
        "mesh.pipe",
        "splits the layers of the model",
        fix="spmd.pipeline.grad_fn.pipeline",
    )
    raise ConfigError("A stage has no gradient function of its own:", [problem])


def check_first_batch(
    grad_fn: GradFn, params: Any, variables: Any, batch: Any, key: jax.Array
) -> None:
    """Raise a `ConfigError` if the first batch shows a mean as loss and a count as its weight.

    A gradient function that is not made from a loss function is not checked
    (`LossReader.check_numbers`).
    """
    if isinstance(grad_fn, LossGradFn):
        grad_fn.loss.check_numbers(params, variables, batch, key)


def check_results(returned: Any) -> tuple[Any, Sums, Carry]:
    """Check and return the results of a gradient function.

    Raises:
        ConfigError: They are those of a loss function.
    """
    is_triple = isinstance(returned, tuple) and len(returned) == 3
    if is_triple and isinstance(returned[2], Carry):
        return returned
    what = "does not return gradients, sums and the carry"
    fix = "spmd.value_and_grad(loss_fn)"
    if is_triple:
        fix = (
            "take (params, carry, batch, key), and return the carry; the model's variables "
            "are carry.variables"
        )
    raise ConfigError("Invalid gradient function:", [Problem("grad_fn", what, fix=fix)])
