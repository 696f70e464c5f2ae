"""Storage of the arrays of a training state between steps.

They are on the devices, unless a technique keeps them elsewhere. `Storage` is the contract and its
plain form. A technique is a subclass, made where a user's setting is read
(`spmd.settings.offload`); the plan, the forward pass and the step call these methods and know none
of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from spmd.errors import Problem
from spmd.model_interface.model import ModelInfo
from spmd.model_interface.remat import Remat
from spmd.optim.extra_args import update_with
from spmd.optim.owned_matrices import layout_argument
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import DerivedSpec
from spmd.sharding.rules import Rules

Update = Callable[..., tuple[Any, Any]]
"""`(gradients, optimizer state, params, **extra) -> (params, optimizer state)`; see
`spmd.optim.extra_args`."""


@dataclasses.dataclass(frozen=True)
class State:
    """Arrays of a training state, before any is allocated, for a storage to place.

    Attributes:
        params: Abstract parameters, a tree.
        optimizer_state: Path → shape and spec of each array of the optimizer's state.
        specs: Path of a parameter → the spec of its optimizer state.
        variables: Path → abstract variable of the model.
        axes: Axis → size.
    """

    params: Any
    optimizer_state: Mapping[str, DerivedSpec]
    specs: Mapping[str, Any]
    variables: Mapping[str, Any]
    axes: Mapping[str, int]
    rules: Rules
    info: ModelInfo


@dataclasses.dataclass(frozen=True)
class Storage:
    """Storage of everything on the devices, and the base class of other kinds.

    It is a frozen value, hashable, and compared by value.
    """

    @property
    def off_device_params(self) -> frozenset[str]:
        """The paths of parameters and frozen variables outside of device memory."""
        return frozenset()

    @property
    def off_device_state(self) -> frozenset[str]:
        """The paths of optimizer state outside of device memory."""
        return frozenset()

    def problems(self, mesh: AnyMesh, remat: Remat) -> list[Problem]:
        """Return the reasons against its use on a mesh, for any model."""
        del mesh, remat
        return []

    def resolved(
        self, optimizer: optax.GradientTransformation, state: State
    ) -> tuple["Storage", list[Problem]]:
        """Return the storage with its decisions about these arrays, and their problems."""
        del optimizer, state
        return self, []

    def at_forward(
        self, path: str, param: jax.Array, target: jax.Array | None, sharding: NamedSharding
    ) -> Any:
        """Return a model's operand for a parameter outside of the devices.

        Args:
            target: The array on the devices to differentiate with respect to, if any.
            sharding: The sharding of one layer of it on the devices.
        """
        raise NotImplementedError(f"{path} is not on the devices, and {self} does not fetch it")

    def make_update(self, plan: Any) -> Update:
        """Return the update of parameters and optimizer state under a plan."""
        layout = layout_argument(plan)

        def update(gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
            extra |= layout
            updates, state = update_with(plan.optimizer, gradients, state, params, extra)
            return optax.apply_updates(params, updates), state

        return update


ON_DEVICES = Storage()
"""The default."""
