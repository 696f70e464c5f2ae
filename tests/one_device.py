"""The comparison of layouts with one device, for what the table of the parity suite does not say."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optax

from spmd.gradients.base import GradFn
from spmd.model_interface.model import Model
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.sharding.rules import Rules
from spmd.testing import Parity, Reference, Tolerance
from spmd.training.state import TrainState
from tests import tiny

SGD = optax.sgd(0.1)
"""Hides no factor, and makes no whole step of a gradient near zero."""
REORDERED = Tolerance(
    loss=2e-6,
    gradients=3e-5,
    updates=3e-5,
    why="float32 loses at most 3e-7 and 5e-6 in two steps of any row of the parity suite's table; six times that",
)
"""How far two orders of summation may be apart in a step."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Some steps of training, which one device compiles once.

    Args:
        model: What is trained.
        rules: Its table.
        grad_fn: How a batch becomes gradients.
        batches: Host arrays, one batch for each step.
        optimizer: Its optimizer.
        options: Further arguments of `make_plan`, here and on any mesh.
        initial: Makes the initial state under a plan, the same under each; by default the model does.
    """

    model: Model
    rules: Rules
    grad_fn: GradFn
    batches: Sequence[Any]
    optimizer: optax.GradientTransformation = SGD
    options: tuple[tuple[str, Any], ...] = ()
    initial: Callable[[ShardingPlan], TrainState] | None = None

    @functools.cached_property
    def alone(self) -> Reference:
        """The steps on one device."""
        plan = self._plan()
        return Reference(plan, self.grad_fn, self.batches, state=self._state(plan))

    def parity(
        self,
        *,
        grad_fn: GradFn | None = None,
        rules: Rules | None = None,
        options: tuple[tuple[str, Any], ...] = (),
        tolerance: Tolerance | None = None,
        **sizes: int,
    ) -> Parity:
        """The comparison of a mesh of these sizes, with another gradient function, table or options where given."""
        plan = self._plan(rules, options, **sizes)
        return self.alone.compare(plan, grad_fn, state=self._state(plan), tolerance=tolerance)

    def assert_parity(self, **layout: Any) -> Parity:
        """Fails where a layout differs from one device, with every leaf that does."""
        result = self.parity(**layout)
        assert result.ok, f"\n{result}"
        return result

    def _state(self, plan: ShardingPlan) -> TrainState | None:
        if self.initial is None:
            return None
        return self.initial(plan)

    def _plan(
        self, rules: Rules | None = None, options: tuple[tuple[str, Any], ...] = (), **sizes: int
    ) -> ShardingPlan:
        chosen = dict(self.options + options)
        return make_plan(
            tiny.mesh(**sizes), rules or self.rules, self.model, self.optimizer, **chosen
        )
