"""Checks for silent data corruption during training, as hooks.

```python
hooks = [ReplicaCheck(plan, every=500), DeterminismCheck(plan, grad_fn, probe, every=500), *hooks]
```

They precede the hook that saves, so that no corrupt state is saved.
"""

import abc
import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import DataCorruptionError, Problem
from spmd.gradients.base import GradFn
from spmd.model_interface.grad_transform import wrap_all
from spmd.plan.context import use_plan
from spmd.plan.plan import ShardingPlan
from spmd.resilience.digests import digest_shards, make_digest, name_device, replica_differences
from spmd.training.batch import place_batch
from spmd.training.compilation_cache import without_faulty_cache
from spmd.training.loop import Hook
from spmd.training.state import TrainState, abstract_state

_Around = Callable[[], AbstractContextManager[None]]


def _own_state(state: Any) -> TrainState:
    return state


def _own_inputs(state: Any, batch: Any) -> tuple[TrainState, Any]:
    return state, batch


class _Check(Hook, abc.ABC):
    """Check of the state, every so many steps (0: never); training stops if it fails.

    `around` makes a context for each check, such as one that measures its time. `part_state`
    returns the plan's part of a state of several networks.
    """

    title: str

    def __init__(
        self,
        plan: ShardingPlan,
        every: int,
        around: _Around = contextlib.nullcontext,
        part_state: Callable[[Any], TrainState] = _own_state,
    ) -> None:
        self.plan = plan
        self.every = every
        self.around = around
        self.part_state = part_state

    @functools.cached_property
    def abstract(self) -> TrainState:
        return abstract_state(self.plan)

    def wants_state(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def on_state(self, step: int, state: Any) -> None:
        """Raise `DataCorruptionError` with each corrupt array and its devices.

        The error is the same on every process.
        """
        with self.around():
            problems = self.problems(state)
        if problems:
            raise DataCorruptionError(f"{self.title} after step {step}:", problems)

    @abc.abstractmethod
    def problems(self, state: Any) -> list[Problem]:
        """Return a problem for each array with differences."""


class ReplicaCheck(_Check):
    """Compare the replicas of every shard of the state, bit for bit."""

    title = "Replicas differ"

    @functools.cached_property
    def digest(self) -> Callable[[TrainState], jax.Array]:
        """Digest program of the state, compiled at the first check."""
        return make_digest(self.abstract, self.plan.mesh)

    def problems(self, state: Any) -> list[Problem]:
        """Return a problem for each array, with the devices in the minority."""
        digests = np.asarray(self.digest(self.part_state(state)))
        return replica_differences(digests, self.abstract, self.plan.mesh)


class DeterminismCheck(_Check):
    """Compute the gradients of one batch twice and compare them bit for bit.

    A difference is a device that miscomputes, a link that flips bits, or a nondeterministic
    operation. Nothing is donated and only digests are returned, so it needs the memory of a step
    without its update. `probe` is the batch, on the devices; it is kept. `part_inputs` returns the
    plan's part of a state of several networks, and of the batch.
    """

    title = "Gradients are not reproducible"

    def __init__(
        self,
        plan: ShardingPlan,
        grad_fn: GradFn,
        probe: Any,
        every: int,
        around: _Around = contextlib.nullcontext,
        part_inputs: Callable[[Any, Any], tuple[TrainState, Any]] = _own_inputs,
    ) -> None:
        super().__init__(plan, every, around)
        self.grad_fn = grad_fn
        self.probe = probe
        self.part_inputs = part_inputs

    @functools.cached_property
    def program(self) -> Callable[..., jax.Array]:
        """Program `(state, batch) -> uint32[devices, leaves, 2]`, replicated.

        It is compiled at the first check.
        """
        cache = without_faulty_cache(self.plan.mesh.shape["pipe"])
        replicated = NamedSharding(self.plan.mesh, P())
        return cache(jax.jit(self._digests, out_shardings=replicated))

    def digests(self, state: Any) -> jax.Array:
        """Compute the gradients once, and return their digests."""
        own, batch = self.part_inputs(state, self.probe)
        return self.program(own, place_batch(self.plan, batch))

    def problems(self, state: Any) -> list[Problem]:
        """Return a problem for each array with different bits the second time, and the devices."""
        first = np.asarray(self.digests(state))
        second = np.asarray(self.digests(state))
        devices = list(self.plan.mesh.devices.flat)
        fix = "replace the device if it is one; if it is all, look for a nondeterministic operation"
        problems = []
        for number, leaf in enumerate(self.plan.gradients):
            is_different = first[:, number] != second[:, number]  # [device, 2]
            differs = np.flatnonzero(is_different.any(axis=-1))
            if differs.size == 0:
                continue
            where = ", ".join(name_device(devices[i]) for i in differs)
            if differs.size == len(devices):
                where = f"all {len(devices)} devices"
            what = f"its gradient differs when it is computed again, on {where}"
            problems.append(Problem(leaf.path, what, "the same program, parameters and batch", fix))
        return problems

    def _digests(self, state: TrainState, batch: Any) -> jax.Array:
        with use_plan(self.plan):
            grad_fn = wrap_all(self.grad_fn, self.plan.transforms)
            gradients, _, _ = grad_fn(state.params, state.carry, batch, state.step_key())
        shardings = self.plan.gradient_shardings
        gradients = jax.lax.with_sharding_constraint(gradients, shardings)
        return digest_shards(gradients, shardings)
