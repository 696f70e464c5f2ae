"""Checks of a running training for silent data corruption, as hooks.

```python
hooks = [CheckReplicas(plan, every=500), CheckRepeats(plan, grad_fn, probe, every=500), *hooks]
```

They come before the hook that saves, so that nothing is saved that was just seen to be damaged.
"""

import abc
import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from spmd.errors import DataCorruptionError, Problem
from spmd.gradients.base import GradFn
from spmd.plan.plan import ShardingPlan
from spmd.resilience.determinism import DeterminismCheck
from spmd.resilience.digests import make_digest, replica_differences
from spmd.train.loop import Hook
from spmd.train.state import TrainState, abstract_state


class _Check(Hook, abc.ABC):
    """Looks at the state every so many steps, and stops training where something is wrong with it.

    Args:
        every: Steps between two looks; 0 for never.
        around: Makes a context for each look, such as one that takes its time.
    """

    title: str
    """What the error begins with."""

    def __init__(self, every: int, around: Callable[[], AbstractContextManager[None]]) -> None:
        self.every, self.around = every, around

    def wants_state(self, step: int) -> bool:
        """At the interval."""
        return bool(self.every) and step % self.every == 0

    def on_state(self, step: int, state: TrainState) -> None:
        """Raises `DataCorruptionError` with each array and the devices that differ, the same on every process."""
        with self.around():
            problems = self.problems(state)
        if problems:
            raise DataCorruptionError(f"{self.title} after step {step}:", problems)

    @abc.abstractmethod
    def problems(self, state: TrainState) -> list[Problem]:
        """What is wrong."""


class CheckReplicas(_Check):
    """Stops training where devices that should hold the same bits of the state do not.

    Args:
        plan: On a mesh with devices.
        every: Steps between two checks; 0 for never.
        around: Makes a context for each check, such as one that takes its time.
    """

    title = "Replicas differ"

    def __init__(
        self,
        plan: ShardingPlan,
        every: int,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(every, around)
        self.mesh, self.abstract = plan.mesh, abstract_state(plan)

    @functools.cached_property
    def digest(self) -> Callable[[TrainState], jax.Array]:
        """The program, compiled at the first check."""
        return make_digest(self.abstract, self.mesh)

    def problems(self, state: TrainState) -> list[Problem]:
        """Each array, and the devices that hold other bits than the rest."""
        return replica_differences(np.asarray(self.digest(state)), self.abstract, self.mesh)


class CheckRepeats(_Check):
    """Stops training where the gradients of one batch come out differently when they are computed again.

    Args:
        plan: On a mesh with devices.
        grad_fn: The gradient function of the step.
        probe: The batch, already on the devices; it is kept.
        every: Steps between two checks; 0 for never.
        around: Makes a context for each check, such as one that takes its time.
    """

    title = "The same gradients came out differently"

    def __init__(
        self,
        plan: ShardingPlan,
        grad_fn: GradFn,
        probe: Any,
        every: int,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(every, around)
        self.repeat, self.probe = DeterminismCheck(plan, grad_fn), probe

    def problems(self, state: TrainState) -> list[Problem]:
        """Each array whose gradient is another, and the devices that have it."""
        return self.repeat.differences(state, self.probe)
