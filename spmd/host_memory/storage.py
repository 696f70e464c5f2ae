"""The storage of a plan with `offload`: which arrays are in host memory, and why some cannot be."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from spmd.errors import Problem, check_type, did_you_mean
from spmd.host_memory.chunks import UpdateChunk, plan_chunks
from spmd.host_memory.param import HostParam
from spmd.host_memory.update import make_update
from spmd.model_api.remat import Remat
from spmd.optim.extra_args import check_update
from spmd.optim.storage import State, Storage, Update
from spmd.optim.two_phase import phases
from spmd.sharding.mesh import AnyMesh, without_host_memory

OFFLOADABLE = ("optimizer_state", "params")
"""What can be in host memory."""


@dataclasses.dataclass(frozen=True)
class HostMemory(Storage):
    """Some tables of the training state are in host memory.

    Attributes:
        tables: Some of `OFFLOADABLE`.
        chunks: The chunks in which their arrays are updated.
        frozen: The paths of frozen variables in host memory.
    """

    tables: tuple[str, ...]
    chunks: tuple[UpdateChunk, ...] = ()
    frozen: frozenset[str] = frozenset()

    @property
    def off_device_params(self) -> frozenset[str]:
        """Matrices of stacked layers, trained or frozen."""
        return self.frozen.union(*(chunk.host_params for chunk in self.chunks))

    @property
    def off_device_state(self) -> frozenset[str]:
        """The optimizer state of chunks, where moving it saves memory."""
        return frozenset().union(*(chunk.host for chunk in self.chunks))

    def problems(self, mesh: AnyMesh, remat: Remat) -> list[Problem]:
        """Return unknown tables, and what keeps parameters from being fetched layer by layer."""
        problems = check_type("offload", self.tables, (tuple, list), f'("{self.tables}",)')
        if problems:
            return problems
        for name in self.tables:
            if name not in OFFLOADABLE:
                fix = did_you_mean(name, OFFLOADABLE)
                problems.append(Problem(f"offload {name!r}", "cannot be in host memory", fix=fix))
        if (stages := mesh.shape["pipe"]) > 1 and "params" in self.tables:
            what = "does not go with a pipeline: stages would fetch each layer in every task"
            problems.append(Problem("offload params", what, f"pipe={stages}", "offload the optimizer_state"))
        if "params" in self.tables and (remat.kind in ("none", "selective") or remat.every > 1):
            what = f"needs every layer to be recomputed, and remat is {remat}"
            why = "a layer that is not would keep its parameters on the device until the backward pass"
            problems.append(Problem("offload params", what, why, "remat full, dots, save:NAME or offload:NAME"))
        return problems + without_host_memory(mesh, "offload")

    def resolved(self, optimizer: optax.GradientTransformation, state: State) -> tuple[Storage, list[Problem]]:
        """Return the storage with the chunks of an update; beside frozen parameters, the trained ones stay."""
        frozen = _frozen_matrices(state) if "params" in self.tables else frozenset()
        updated = tuple(name for name in self.tables if name != "params" or not state.info.frozen)
        if not updated:
            return dataclasses.replace(self, frozen=frozen), []
        param_phase = phases(optimizer)[1]
        if problems := check_update(param_phase, state.params, whole=False):
            return self, problems
        chunks, problems = plan_chunks(
            param_phase,
            state.params,
            state.optimizer_state,
            state.specs,
            state.axes,
            state.rules.stacks,
            updated,
        )
        return dataclasses.replace(self, chunks=chunks, frozen=frozen), problems

    def at_forward(self, path: str, param: jax.Array, target: jax.Array | None, sharding: NamedSharding) -> Any:
        """Return the parameter as its layer fetches it."""
        return HostParam(param, target, sharding, path)

    def make_update(self, plan: Any) -> Update:
        """Return the update that streams chunks through the device."""
        return make_update(plan, self.chunks) if self.chunks else super().make_update(plan)


def _frozen_matrices(state: State) -> frozenset[str]:
    """Return the frozen variables that live in host memory where parameters do: matrices of stacked layers."""
    found = set()
    for path in state.info.frozen:
        leading = len(state.rules.layer_path(path)[1])
        is_matrix = len(state.variables[path].shape) - leading >= 2
        if path not in state.info.merged and leading > 0 and is_matrix:
            found.add(path)
    return frozenset(found)
