"""The old carry of a gradient function, kept in steps with non-finite gradients."""

import dataclasses
from typing import Any

import jax

from spmd import tree
from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.model_interface.grad_transform import Carry, GradTransform


@dataclasses.dataclass(frozen=True)
class KeepCarry(GradTransform):
    """Keeps the model's variables, such as batch statistics, and the states of inner transforms.

    The counterpart for parameters is `skip_bad_updates`.
    """

    name = "keep_carry"
    is_outermost = True

    def wrap(self, grad_fn: GradFn) -> GradFn:
        """Return a gradient function with the carry unchanged if gradients are not finite."""

        def wrapped(
            params: Any, carry: Carry, batch: Any, key: jax.Array
        ) -> tuple[Any, Sums, Carry]:
            gradients, sums, after = grad_fn(params, carry, batch, key)
            return gradients, sums, tree.where(tree.all_finite(gradients), after, carry)

        return wrapped
