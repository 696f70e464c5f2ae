"""A technique in one file: only large gradients cross `data`, and what is not sent is added to the next ones.

    plan = spmd.make_plan(mesh, rules, model, optimizer, transforms=[ThresholdExchange()])

Of its gradients a device sends the elements above a multiple of their root mean square (after
Strom, Interspeech 2015).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.errors import Problem
from spmd.gradients.base import GradFn
from spmd.gradients.deferred_reduction import LocalGradients, reduce_local
from spmd.model_interface.grad_transform import StateArray


@dataclasses.dataclass(frozen=True)
class ThresholdExchange(spmd.GradTransform):
    """Exchange of large gradients over `data`, once a step.

    `factor` is the threshold over the root mean square.
    """

    name = "threshold_exchange"
    exchanges = True

    factor: float = 1.0

    def state(self, plan: spmd.ShardingPlan) -> dict[str, StateArray]:
        """Return an array of unsent values for each device of `data` and each gradient."""
        devices = plan.mesh.shape["data"]
        return {
            g.path: StateArray((devices, *g.shape), jnp.float32, P("data", *g.spec))
            for g in plan.gradients
        }

    def init(self, plan: spmd.ShardingPlan, key: jax.Array, params: Any) -> Any:
        """Return zeros."""
        return tree.nested(
            {path: jnp.zeros(x.shape, x.dtype) for path, x in self.state(plan).items()}
        )

    def wrap(self, grad_fn: GradFn) -> GradFn:
        """Exchange the gradients of `grad_fn` once a step, by `_send_large`."""
        return spmd.defer_grad_reduction(grad_fn, ("data",), self._send_large, own=self.name)

    def _send_large(self, local: LocalGradients, carry: spmd.Carry) -> tuple[Any, spmd.Carry]:
        wanted = jax.tree.map(jnp.add, local.gradients, carry.transforms[self.name])
        sent = jax.tree.map(self._large, wanted)
        summed = tree.map_with_path(lambda path, x: reduce_local(path, x, local), sent)
        return summed, carry.with_state(self.name, jax.tree.map(jnp.subtract, wanted, sent))

    def _large(self, x: jax.Array) -> jax.Array:
        """Return `[device, …]` with zeros where an element is small among those of its device."""
        mean_square = jnp.mean(x**2, axis=range(1, x.ndim), keepdims=True)
        return jnp.where(x**2 >= self.factor**2 * mean_square, x, 0)

    def problems(self, plan: spmd.ShardingPlan) -> list[Problem]:
        """Return the problems of a mesh without replicas, or with a sum over stages besides."""
        found = []
        if plan.mesh.shape["data"] == 1:
            found.append(Problem(self.name, "sends nothing", "mesh.data = 1", "data=2 or more"))
        if plan.mesh.shape["pipe"] > 1:
            what = "sums over data alone"
            found.append(Problem(self.name, what, "stages share parameters", "pipe=1"))
        return found
