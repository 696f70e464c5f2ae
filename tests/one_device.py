"""The comparison of layouts with one device, for what the table of the parity suite does not say."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import optax

from spmd.gradients.base import GradFn
from spmd.model_api.model import Model
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules
from spmd.testing import Parity, Record, Tolerance, compare, record_run
from tests import tiny

SGD = optax.sgd(0.1)
"""Hides no factor, and makes no whole step of a gradient near zero."""
REORDERED = Tolerance(
    loss=2e-6,
    gradients=3e-5,
    params=3e-5,
    why="float32 loses at most 3e-7, 5e-6 and 5e-6 in two steps of any row of the parity suite's table; six times that",
)
"""How far two orders of summation may be apart after two steps of SGD."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Some steps of training, which one device takes once.

    Args:
        model: What is trained.
        rules: Its table.
        grad_fn: How a batch becomes gradients.
        batches: Host arrays, one batch for each step.
        optimizer: Its optimizer.
        options: Further arguments of `make_plan`, here and on any mesh.
    """

    model: Model
    rules: Rules
    grad_fn: GradFn
    batches: Sequence[Any]
    optimizer: optax.GradientTransformation = SGD
    options: tuple[tuple[str, Any], ...] = ()

    def on(
        self,
        *,
        grad_fn: GradFn | None = None,
        rules: Rules | None = None,
        options: tuple[tuple[str, Any], ...] = (),
        **sizes: int,
    ) -> Record:
        """The steps on a mesh of these sizes, with another gradient function, table or options where they are given."""
        chosen = dict(self.options + options)
        plan = make_plan(tiny.mesh(**sizes), rules or self.rules, self.model, self.optimizer, **chosen)
        return record_run(plan, grad_fn or self.grad_fn, self.batches)

    @functools.cached_property
    def alone(self) -> Record:
        """The steps on one device."""
        return self.on()

    def parity(self, *, tolerance: Tolerance | None = None, **layout: Any) -> Parity:
        """The comparison of a layout with one device."""
        return compare(self.on(**layout), self.alone, tolerance)

    def assert_parity(self, **layout: Any) -> Record:
        """Fails where a layout differs from one device, with every leaf that does; what it recorded otherwise."""
        found = self.on(**layout)
        result = compare(found, self.alone)
        assert result.ok, f"\n{result}"
        return found
