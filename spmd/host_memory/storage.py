"""The storage of a plan with `offload`: the arrays in host memory, and reasons against others."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from spmd.errors import Problem, check_type, did_you_mean
from spmd.host_memory.chunks import UpdateChunk, plan_chunks
from spmd.host_memory.param import HostParam
from spmd.host_memory.update import make_update
from spmd.model_interface.remat import Remat
from spmd.optim.extra_args import check_update
from spmd.optim.storage import State, Storage, Update
from spmd.optim.two_phase import phases
from spmd.sharding.mesh import AnyMesh, without_host_memory

OFFLOADABLE = ("optimizer_state", "params")
"""Tables that can be in host memory."""


@dataclasses.dataclass(frozen=True)
class HostMemory(Storage):
    """Storage of some tables of the training state in host memory.

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
        paths = set(self.frozen)
        for chunk in self.chunks:
            paths |= chunk.host_params
        return frozenset(paths)

    @property
    def off_device_state(self) -> frozenset[str]:
        """The optimizer state of chunks, where moving it saves memory."""
        paths = set[str]()
        for chunk in self.chunks:
            paths |= chunk.host
        return frozenset(paths)

    def problems(self, mesh: AnyMesh, remat: Remat) -> list[Problem]:
        """Return unknown tables, and reasons against fetching parameters layer by layer."""
        problems = check_type("offload", self.tables, (tuple, list), f'("{self.tables}",)')
        if problems:
            return problems
        for name in self.tables:
            if name not in OFFLOADABLE:
                fix = did_you_mean(name, OFFLOADABLE)
                problems.append(Problem(f"offload {name!r}", "cannot be in host memory", fix=fix))
        if "params" in self.tables:
            problems += self._fetch_problems(mesh, remat)
        return problems + without_host_memory(mesh, "offload")

    def _fetch_problems(self, mesh: AnyMesh, remat: Remat) -> list[Problem]:
        """Return the reasons against fetching parameters layer by layer."""
        problems = []
        stages = mesh.shape["pipe"]
        if stages > 1:
            what = "does not go with a pipeline: stages would fetch each layer in every task"
            fix = "offload the optimizer_state"
            problems.append(Problem("offload params", what, f"pipe={stages}", fix))
        if remat.kind in ("none", "selective") or remat.every > 1:
            problem = Problem(
                "offload params",
                f"needs every layer to be recomputed, and remat is {remat}",
                "a layer that is not would keep its parameters on the device until the backward "
                "pass",
                "remat full, dots, save:NAME or offload:NAME",
            )
            problems.append(problem)
        return problems

    def resolved(
        self, optimizer: optax.GradientTransformation, state: State
    ) -> tuple[Storage, list[Problem]]:
        """Return the storage with the chunks of an update.

        Beside frozen parameters, the trained ones stay on the device.
        """
        frozen = frozenset[str]()
        if "params" in self.tables:
            frozen = _frozen_matrices(state)
        updated = list(self.tables)
        if state.info.frozen:
            updated = [name for name in updated if name != "params"]
        if not updated:
            return dataclasses.replace(self, frozen=frozen), []
        _, param_phase = phases(optimizer)
        problems = check_update(param_phase, state.params, whole=False)
        if problems:
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

    def at_forward(
        self, path: str, param: jax.Array, target: jax.Array | None, sharding: NamedSharding
    ) -> Any:
        """Return the operand; its layer copies it to the device."""
        return HostParam(param, target, sharding, path)

    def make_update(self, plan: Any) -> Update:
        """Return the update, in chunks streamed through the device."""
        if not self.chunks:
            return super().make_update(plan)
        return make_update(plan, self.chunks)


def _frozen_matrices(state: State) -> frozenset[str]:
    """Return the frozen matrices of stacked layers: in host memory, if parameters are."""
    found = set()
    for path in state.info.frozen:
        _, layer_numbers = state.rules.layer_path(path)
        leading = len(layer_numbers)
        is_matrix = len(state.variables[path].shape) - leading >= 2
        if path not in state.info.merged and leading > 0 and is_matrix:
            found.add(path)
    return frozenset(found)
