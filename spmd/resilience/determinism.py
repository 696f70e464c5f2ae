"""Whether the devices compute the same thing twice: the gradients of one batch, from the same parameters, bit for bit.

A difference is a device that miscomputes, a link that changes bits, or a program that is not deterministic after all.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import Problem
from spmd.gradients.base import GradFn
from spmd.plan.context import use_plan
from spmd.plan.plan import ShardingPlan
from spmd.resilience.digests import digest_shards, name_device
from spmd.train.state import TrainState, abstract_arguments


class DeterminismCheck:
    """`(state, batch) -> digests` of the gradients, uint32[devices, leaves, 2], the same on every device.

    Nothing is donated, and nothing but the digests comes out, so it needs a step's memory less the update.

    Args:
        plan: On a mesh with devices.
        grad_fn: The gradient function of the step.
    """

    def __init__(self, plan: ShardingPlan, grad_fn: GradFn) -> None:
        self.plan, self.grad_fn = plan, grad_fn
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, state: TrainState, batch: Any) -> jax.Array:
        """Computes the gradients once; every batch must have the shapes of the first."""
        if self._compiled is None:
            self._compiled = self.compile(batch)
        return self._compiled(state, batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The compiled program for batches of this shape.

        Args:
            batch: Arrays, or `jax.ShapeDtypeStruct`s.
        """
        whole = NamedSharding(self.plan.mesh, P())
        return jax.jit(self._digests, out_shardings=whole).lower(*abstract_arguments(self.plan, batch)).compile()

    def differences(self, state: TrainState, batch: Any) -> list[Problem]:
        """Computes the gradients twice: a problem for each array of which a device did not get the same bits again."""
        once, twice = (np.asarray(self(state, batch)) for _ in range(2))
        devices = list(self.plan.mesh.devices.flat)
        problems = []
        for number, leaf in enumerate(self.plan.gradients):
            wrong = np.flatnonzero((once[:, number] != twice[:, number]).any(axis=-1))
            if wrong.size:
                named = _named([devices[i] for i in wrong], len(devices))
                what = f"its gradient is another when it is computed again, on {named}"
                problems.append(Problem(leaf.path, what, "the same program, parameters and batch", FIX))
        return problems

    def _digests(self, state: TrainState, batch: Any) -> jax.Array:
        with use_plan(self.plan):
            gradients, _, _ = self.grad_fn(state.params, state.variables, batch, state.step_key())
        gradients = jax.lax.with_sharding_constraint(gradients, self.plan.gradient_shardings)
        return digest_shards(gradients, self.plan.gradient_shardings)


FIX = "take the device out of service if it is one; if all differ, look for an operation that is not deterministic"


def _named(devices: list[jax.Device], of: int) -> str:
    return f"all {of} devices" if len(devices) == of else ", ".join(map(name_device, devices))
