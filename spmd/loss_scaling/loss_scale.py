"""Dynamic loss scaling, for gradients in the range of float16.

The loss of every differentiation is multiplied by the scale, and the gradients of the whole batch
are divided by it once. It is the outermost transform: a step whose gradients overflow leaves
everything as it was, the states of the others and the variables of the model, and only lowers the
scale.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd import tree
from spmd.errors import ConfigError, Problem, check_fields
from spmd.model_interface.grad_transform import Carry, Entered, GradTransform, StateArray

_REASON = "every device scales by the same number"
_LARGEST = 2.0**100  # float32 holds it, and its products with small gradients


@dataclasses.dataclass(frozen=True)
class LossScale(GradTransform):
    """Dynamic loss scaling, so that float16 holds small gradients.

    The loss is multiplied before the backward pass. A step with non-finite gradients is skipped and
    uses up one unit of hysteresis; once that is used up, each such step lowers the scale. After a
    finite step and `growth_interval` more in a row the scale grows and the hysteresis is restored;
    after each `growth_interval` more it grows again (Micikevicius et al., arXiv:1710.03740, section
    3.2; as DeepSpeed's `FP16_Optimizer` counts; the hysteresis is `delayed_shift` of its loss
    scaler).

    The loss is a sum over tokens here: scales are smaller, by the number of tokens of a microbatch,
    than those of trainers that scale the mean.

    Attributes:
        backoff_interval: Fewest steps from one lowering to the next; until then non-finite steps
            are only skipped.
        hysteresis: The n-th non-finite step lowers the scale.
        floor: The smallest scale.
        ceiling: The largest scale: without one, gradients that stay zero would drive it to infinity
            for good.

    Example:
        >>> scaling = LossScale(initial=16, growth_interval=2, hysteresis=1)
        >>> state = scaling.after(scaling.start(), finite=jnp.array(False))
        >>> float(state["scale"])
        8.0
    """

    name = "loss_scale"
    is_outermost = True

    initial: float = 2.0**10
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    backoff_interval: int = 1
    hysteresis: int = 2
    floor: float = 1.0
    ceiling: float = _LARGEST

    def __post_init__(self) -> None:
        rules = {
            "initial": f"at least {self.floor} and at most {self.ceiling}",
            "growth_interval": "at least 1",
            "growth_factor": "above 1 and finite",
            "backoff_factor": "above 0 and below 1",
            "backoff_interval": "at least 1",
            "hysteresis": "at least 1",
            "floor": "above 0 and finite",
            "ceiling": f"at least {self.floor} and at most {_LARGEST}",
        }
        problems = check_fields(self, rules, "loss_scale.")
        if problems:
            raise ConfigError("Invalid loss scaling:", problems)

    def start(self) -> dict[str, jax.Array]:
        """Return the initial state: `scale`, `good_steps` and `hysteresis`.

        `good_steps` are those in a row since the scale changed. `hysteresis` is what remains of it.
        After the scale was lowered, `hysteresis` is below 1 and counts up until the next lowering
        is possible.
        """
        good_steps = jnp.int32(0)
        hysteresis = jnp.int32(self.hysteresis)
        scale = jnp.float32(self.initial)
        return {"scale": scale, "good_steps": good_steps, "hysteresis": hysteresis}

    def after(self, state: Mapping[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
        """Return the state after a step; `finite` (boolean scalar): its gradients are finite."""
        scale = state["scale"]
        hysteresis = state["hysteresis"]
        good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
        grows = good_steps > self.growth_interval
        waits = hysteresis < 1
        lowers = ~finite & (hysteresis == 1)
        grown = jnp.minimum(scale * self.growth_factor, self.ceiling)
        lowered = jnp.maximum(scale * self.backoff_factor, self.floor)
        spent = hysteresis - ~finite
        remaining = jnp.where(lowers, 2 - self.backoff_interval, spent)
        remaining = jnp.where(grows, self.hysteresis, remaining)
        lowered_or_same = jnp.where(lowers, lowered, scale)
        return {
            "scale": jnp.where(grows, grown, lowered_or_same),
            "good_steps": jnp.where(grows, 1, good_steps),
            "hysteresis": jnp.where(waits, hysteresis + 1, remaining),
        }

    def state(self, plan: Any) -> dict[str, StateArray]:
        """Return the three scalars; every device has them."""
        del plan
        arrays = {}
        for name, x in jax.eval_shape(self.start).items():
            arrays[name] = StateArray((), x.dtype, reason=_REASON)
        return arrays

    def init(self, plan: Any, key: jax.Array, params: Any) -> dict[str, jax.Array]:
        """Return the state before the first step."""
        del plan, key, params
        return self.start()

    def enter(self, state: Mapping[str, jax.Array]) -> Entered:
        """Multiply the loss by the scale."""
        return Entered(seed=state["scale"])

    def wrap(self, grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Divide the gradients of a batch by the scale.

        If they overflow, undo all but the scale's own state.

        Example:
            >>> scaling = LossScale(initial=8)
            >>> def grad_fn(params, carry, batch, key):
            ...     return 8 * params, {}, carry
            >>> carry = Carry({}, {"loss_scale": scaling.start()})
            >>> float(scaling.wrap(grad_fn)(jnp.float32(2), carry, None, None)[0])
            2.0
        """

        def unscaled(
            params: Any, carry: Carry, batch: Any, key: jax.Array
        ) -> tuple[Any, Any, Carry]:
            state = carry.transforms[self.name]
            gradients, sums, after = grad_fn(params, carry, batch, key)
            gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
            finite = tree.all_finite(gradients)
            kept = tree.where(finite, after, carry)
            return gradients, sums, kept.with_state(self.name, self.after(state, finite))

        return unscaled

    def problems(self, plan: Any) -> list[Problem]:
        """Return the reasons against scaling gradients."""
        where = "precision"
        what = f"is {plan.precision.name}, with a loss scale"
        problems = []
        if any(other.exchanges for other in plan.transforms):
            why = "the scale changes between steps, and errors are of gradients without it"
            problems.append(Problem(where, what, why, 'precision="bf16"'))
        if any(other.overlapping_steps for other in plan.transforms):
            why = "the scale may change while microbatches are in flight"
            fix = 'precision="bf16", or a schedule with a flush'
            problems.append(Problem(where, what, why, fix))
        if plan.activation_clips:
            why = "gradients of activations would be clipped at norms multiplied by the scale"
            fix = 'precision="bf16", or no clip_activations'
            problems.append(Problem(where, what, why, fix))
        return problems
