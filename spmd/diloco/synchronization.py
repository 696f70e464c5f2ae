"""Synchronization of a fragment: the outer update, and the replicas' new parameters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from spmd import tree
from spmd.diloco.exchange import OuterExchange
from spmd.diloco.fragments import Fragment
from spmd.diloco.replicas import Replicas
from spmd.optim.extra_args import update_with
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import OPTIMIZER, comm_scope, in_scope
from spmd.sharding.optimizer_state import followed_params
from spmd.training.state import TrainState

Table = dict[str, Array]
"""Path → array."""

_VARIABLES = comm_scope("variables of replicas, averaged")


class Arrays(NamedTuple):
    """Arrays of one synchronization, by path.

    Attributes:
        params: θ, of the fragment's parameters.
        optimizer: The outer optimizer's state of these parameters.
        variables: Variables that the model changes; those of no parameter, with the first fragment.
        own_params: The replicas' parameters w, `[replica, …]`.
        own_variables: The replicas' variables, `[replica, …]`.
    """

    params: Table
    optimizer: Table
    variables: Table
    own_params: Table
    own_variables: Table


@dataclasses.dataclass(frozen=True)
class Synchronization:
    """Synchronization of one fragment.

    Attributes:
        plan: The plan of all replicas, with the outer optimizer.
        keep: The share of its own parameters that a replica keeps.
    """

    fragment: Fragment
    plan: ShardingPlan
    exchange: OuterExchange
    keep: float
    replicas: Replicas

    def read(self, state: TrainState, own: Mapping[str, Array]) -> Arrays:
        """Return the arrays to change, of the outer state and of the replicas' own."""
        arrays = Arrays({}, {}, {}, {}, {})
        for path, x in tree.flatten(state.params).items():
            if path in self.fragment:
                arrays.params[path] = x
                arrays.own_params[path] = own[f"params/{path}"]
        for path, x in tree.flatten(state.optimizer_state).items():
            if self._has_state(path):
                arrays.optimizer[path] = x
        if self.fragment.is_first:
            for path, x in tree.flatten(state.variables).items():
                if f"variables/{path}" in own and self.replicas.is_averaged(path):
                    arrays.variables[path] = x
                    arrays.own_variables[path] = own[f"variables/{path}"]
        return arrays

    def _has_state(self, path: str) -> bool:
        """Return whether an array of the outer optimizer's state belongs to the fragment."""
        if path in self._followed:
            return self._followed[path] in self.fragment
        return self.fragment.is_first

    def write(
        self, state: TrainState, own: Mapping[str, Array], arrays: Arrays
    ) -> tuple[TrainState, Table]:
        """Return the outer state and the replicas' own arrays, with changed ones."""
        state = dataclasses.replace(
            state,
            params=_replaced(state.params, arrays.params),
            variables=_replaced(state.variables, arrays.variables),
            optimizer_state=_replaced(state.optimizer_state, arrays.optimizer),
        )
        changed = dict(own)
        for path, x in arrays.own_params.items():
            changed[f"params/{path}"] = x
        for path, x in arrays.own_variables.items():
            changed[f"variables/{path}"] = x
        return state, changed

    def run(self, arrays: Arrays) -> Arrays:
        """Return the arrays after the synchronization."""
        fragment = self.fragment
        params, own, moved = Table(), Table(), Table()
        for path, x in arrays.params.items():
            params[path] = fragment.take(path, x)
            own[path] = fragment.take(path, arrays.own_params[path], leading=1)
            moved[path] = self.exchange.mean(params[path], own[path], self._specs[path])
        changed = Arrays({}, {}, {}, {}, {})
        with jax.named_scope(OPTIMIZER):
            after, optimizer = self._outer_update(params, arrays.optimizer, moved)
            changed.optimizer.update(optimizer)
            for path, x in after.items():
                target = self._own_after(x, own[path])
                before = arrays.own_params[path]
                changed.params[path] = fragment.put(path, arrays.params[path], x)
                changed.own_params[path] = fragment.put(path, before, target, leading=1)
        for path, x in arrays.own_variables.items():
            with in_scope(_VARIABLES):
                mean = self.replicas.mean(path, x)
            changed.variables[path] = mean
            changed.own_variables[path] = jnp.broadcast_to(mean, x.shape)
        return changed

    @functools.cached_property
    def _specs(self) -> dict[str, Any]:
        return {entry.path: entry.spec for entry in self.plan.params}

    @functools.cached_property
    def _followed(self) -> dict[str, str]:
        """Path of an array of the outer optimizer's state → its parameter, if it has one."""
        return followed_params(self.plan.abstract_optimizer_state, self._specs)

    def _own_after(self, param: Array, own: Array) -> Array:
        """Return the parameters of each replica for new outer ones."""
        target = jnp.broadcast_to(param, own.shape)
        if not self.keep:
            return target
        return self.keep * own + (1 - self.keep) * target

    def _outer_update(self, params: Table, optimizer: Table, moved: Table) -> tuple[Table, Table]:
        """Return the fragment's parameters, and the optimizer's arrays, after an outer update."""
        nested = tree.nested(params)

        def taken(path: str, _: Any) -> Array:
            if path in self._followed:
                return self.fragment.take(self._followed[path], optimizer[path])
            return optimizer[path]

        abstract = jax.eval_shape(self.plan.optimizer.init, nested)
        state = tree.map_with_path(taken, abstract)
        updates, state = update_with(self.plan.optimizer, tree.nested(moved), state, nested, {})
        after = tree.flatten(optax.apply_updates(nested, updates))
        changed = Table()
        for path, x in tree.flatten(state).items():
            changed[path] = x
            if path in self._followed:
                changed[path] = self.fragment.put(self._followed[path], optimizer[path], x)
        return after, changed


def _replaced(before: Any, table: Mapping[str, Array]) -> Any:
    """Return a tree with the arrays of a table in place of its own."""
    return tree.map_with_path(lambda path, x: table.get(path, x), before)
