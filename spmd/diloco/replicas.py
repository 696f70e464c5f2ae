"""Steps of replicas, in a region manual over `data`.

A replica is planned on a mesh of its own, that of `replica_mesh`, on which `data` has size 1. Its
train step is any train step of such a plan. Here one program runs it for all replicas at once: its
sharding constraints and regions are those of the other axes, and nothing is sent over `data`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import MeshError, Problem
from spmd.model_interface.model import PRNG
from spmd.plan.manual import shard_map_over
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import REPLICAS, in_scope
from spmd.sharding.dims import dims_spec, spec_dims
from spmd.sharding.mesh import AnyMesh, MeshShape, abstract_mesh
from spmd.training.state import TrainState, abstract_state
from spmd.training.step import Metrics, TrainStep

AXIS = "data"
"""The axis of the replicas."""


def replica_mesh(mesh: AnyMesh) -> AnyMesh:
    """Return the mesh of one replica: the first devices along `data`.

    Raises:
        MeshError: There is one replica.

    Example:
        >>> from spmd.sharding.mesh import MeshShape, abstract_mesh
        >>> dict(replica_mesh(abstract_mesh(MeshShape(data=2, fsdp=4))).shape)
        {'pipe': 1, 'data': 1, 'fsdp': 4, 'expert': 1, 'sequence': 1, 'tensor': 1}
    """
    if mesh.shape[AXIS] == 1:
        problem = Problem(f"mesh.{AXIS}", "is 1: there are no replicas", fix=f"{AXIS}=2 or more")
        raise MeshError("No replicas:", [problem])
    if not isinstance(mesh, Mesh):
        return abstract_mesh(MeshShape(**{**mesh.shape, AXIS: 1}))
    place = mesh.axis_names.index(AXIS)
    devices = mesh.devices.take([0], axis=place)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The steps of all replicas.

    Attributes:
        mesh: The mesh of all replicas.
        inner: The train step of one.
    """

    mesh: AnyMesh
    inner: TrainStep

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self.mesh.shape[AXIS]

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return path → abstract array of `own`, of one replica."""
        return self.own(abstract_state(self.inner.plan))

    @property
    def rules(self) -> dict[str, str]:
        """Path of `own` → the rule that decides the spec of one replica's array."""
        plan = self.inner.plan
        tables = {
            "params": plan.params,
            "optimizer": plan.optimizer_state,
            "transforms": plan.transform_states,
            "variables": plan.variables,
        }
        rules = dict[str, str]()
        for name, entries in tables.items():
            for entry in entries:
                rules[f"{name}/{entry.path}"] = entry.rule
        return rules

    def own(self, state: TrainState) -> dict[str, Any]:
        """Return path → array of a replica's own part of its state.

        Step, key and constant variables are the same for all.
        """
        variables = tree.flatten(state.variables)
        parts = {
            "params": state.params,
            "optimizer": state.optimizer_state,
            "transforms": state.transforms,
            "variables": {path: x for path, x in variables.items() if self._changes(path)},
        }
        return tree.flatten(parts)

    def _changes(self, path: str) -> bool:
        """Return whether a variable may change in a step."""
        info = self.inner.plan.model.info()
        return path not in info.frozen and path not in info.constants

    def copies(self, path: str, x: jax.Array) -> jax.Array:
        """Return an array of each replica, `[replica, …]`: the same, but for random keys."""
        same = jnp.broadcast_to(x, (self.count, *x.shape))
        if not self._is_key(path, x):
            return same
        keys = jax.random.wrap_key_data(same, impl=PRNG)
        numbers = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 0)
        own = jnp.vectorize(jax.random.fold_in)(keys, numbers)
        return jax.random.key_data(own)

    def _is_key(self, path: str, x: jax.Array) -> bool:
        """Return whether an array is the data of keys in the random state of a module."""
        own = path.removeprefix("variables/")
        is_random = own in self.inner.plan.model.info().random_state
        return is_random and x.dtype == jnp.uint32 and x.shape[-1:] == (2,)

    def mean(self, path: str, x: jax.Array) -> jax.Array:
        """Return the mean over replicas of an array `[replica, …]`.

        Of integers, and of the scales of an optimizer's codes, it is the first replica's.
        """
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        is_coded = path.startswith("optimizer/") and self._has_codes
        if is_float and not is_coded:
            return x.mean(axis=0)
        return x[0]

    @property
    def _has_codes(self) -> bool:
        """Whether the inner optimizer's moments are codes and scales."""
        for entry in self.inner.plan.optimizer_state:
            if entry.shape and jnp.issubdtype(entry.dtype, jnp.integer):
                return True
        return False

    def is_averaged(self, path: str) -> bool:
        """Return whether a variable of the model is averaged in a synchronization."""
        return path not in self.inner.plan.model.info().random_state

    def state_of(self, own: Mapping[str, Any], shared: TrainState) -> TrainState:
        """Return the state of a replica, from its own part and the common one."""
        like = abstract_state(self.inner.plan)

        def part(name: str, abstract: Any) -> Any:
            return tree.map_with_path(lambda path, _: own[f"{name}/{path}"], abstract)

        def variable(path: str, x: Any) -> Any:
            return own.get(f"variables/{path}", x)

        return TrainState(
            step=shared.step,
            params=part("params", like.params),
            variables=tree.map_with_path(variable, shared.variables),
            optimizer_state=part("optimizer", like.optimizer_state),
            key=shared.key,
            transforms=part("transforms", like.transforms),
        )

    def step(
        self, own: Mapping[str, jax.Array], shared: TrainState, batch: Any, plan: ShardingPlan
    ) -> tuple[dict[str, jax.Array], Metrics]:
        """Take a step of each replica on its part of the batch.

        Args:
            own: Path → array `[replica, …]`.
            shared: The state for what replicas have in common; its parameters are not used.
            plan: The plan of all replicas, for the split of the batch.

        Returns:
            The arrays after it, and the metrics, `[replica]` each.
        """

        def local(
            own: Mapping[str, jax.Array], shared: Mapping[str, Any], batch: Any
        ) -> tuple[dict[str, jax.Array], Metrics]:
            first = {path: x[0] for path, x in own.items()}
            state = TrainState(
                shared["step"], {}, shared["variables"], {}, _replica_key(shared["key"])
            )
            after, metrics = self.inner.step_fn(self.state_of(first, state), batch)
            stacked = {path: x[None] for path, x in self.own(after).items()}
            return stacked, jax.tree.map(lambda x: jnp.asarray(x)[None], metrics)

        common = {"step": shared.step, "variables": shared.variables, "key": shared.key}
        in_specs = P(AXIS), P(), _batch_specs(plan, batch)
        region = shard_map_over(self.mesh, (AXIS,), local, in_specs, P(AXIS))
        with in_scope(REPLICAS):
            return region(own, common, batch)


def _replica_key(key: jax.Array) -> jax.Array:
    """Return the data of a replica's own key, so that replicas draw different numbers."""
    wrapped = jax.random.wrap_key_data(key, impl=PRNG)
    own = jax.random.fold_in(wrapped, jax.lax.axis_index(AXIS))
    return jax.random.key_data(own)


def _batch_specs(plan: ShardingPlan, batch: Any) -> Any:
    """Return the spec of each array of the batch, restricted to the axis of the replicas."""
    arrays = plan.rules.batch_table.arrays(batch)

    def spec(path: str, x: Any) -> P:
        return dims_spec(spec_dims(arrays[path].compute_spec, x.ndim, (AXIS,)))

    return tree.map_with_path(spec, batch)


def mean_metrics(metrics: Metrics) -> Metrics:
    """Return the metrics of all replicas, given `[replica]` each: `tokens` is a sum.

    All others are means over the tokens.
    """
    tokens = metrics.pop("tokens")
    total = tokens.sum()
    share = tokens / jnp.where(total > 0, total, 1.0)

    def mean(x: jax.Array) -> jax.Array:
        others = tuple(range(1, x.ndim))
        return (x * jnp.expand_dims(share, others)).sum(axis=0)

    return {**jax.tree.map(mean, metrics), "tokens": total}
