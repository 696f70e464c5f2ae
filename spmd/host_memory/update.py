"""The optimizer's update of state and parameters in host memory, in chunks.

They are streamed through the device. An offloaded array is stored in `pinned_host`. A chunk, one
layer of a stack or a bounded part of a large array, is copied to the device, updated, and written
back into the donated host buffer. Moving the whole state in and out needs more device memory than
no offload at all (decision 0012).
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from spmd import tree
from spmd.host_memory.chunks import UpdateChunk
from spmd.optim.extra_args import OF_PARTS, update_with
from spmd.optim.owned_matrices import layout_argument
from spmd.optim.storage import Update
from spmd.optim.two_phase import phases


def make_update(plan: Any, chunks: Sequence[UpdateChunk]) -> Update:
    """Return the update of parameters and optimizer state under a `ShardingPlan`, in chunks."""
    global_phase, param_phase = phases(plan.optimizer)
    updates = [_ChunkedUpdate(plan, param_phase, chunk) for chunk in chunks]
    layout = layout_argument(plan)

    def streamed(gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        gradients, scalars = global_phase(gradients)
        given: dict[str, Any] = {**scalars, **layout}
        for name in OF_PARTS:
            if name in extra:
                given[name] = extra[name]
        before = tree.flatten(state)
        moved: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for update_chunk in updates:
            part, changed = update_chunk(gradients, before, params, given)
            moved = tree.merge(moved, part)
            after |= changed
        return moved, tree.map_with_path(lambda path, _: after[path], state)

    return streamed


class _ChunkedUpdate:
    """The update of the parameters of an `UpdateChunk`, chunk by chunk."""

    def __init__(
        self, plan: Any, param_phase: optax.GradientTransformationExtraArgs, chunk: UpdateChunk
    ) -> None:
        self.chunk = chunk
        self.mesh = plan.mesh
        self.param_phase = param_phase
        self.leaves = _by_path(plan.optimizer_state)
        self.weights = _by_path(plan.params)
        self.like = jax.eval_shape(param_phase.init, chunk.abstract_params(plan.abstract_params))
        """The structure of the state of one chunk."""
        self.paths = list(tree.flatten(self.like))
        """The paths of the state."""
        self.chunked: list[str] = []
        """The paths of state that is chunked with the parameters."""
        self.shared: list[str] = []
        """The paths of other state, which each chunk has in full."""
        for path, leaf in tree.flatten(self.like).items():
            if leaf.shape != self.leaves[path].shape:
                self.chunked.append(path)
            else:
                self.shared.append(path)

    def __call__(
        self, gradients: Any, state: Mapping[str, Any], params: Any, scalars: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the parameters and the state of the chunk after the update.

        `state`, by path, and the other arguments are those of all parameters.
        """
        chunk = self.chunk
        gradients = tree.select(gradients, lambda path: path in chunk.paths)
        params = tree.select(params, lambda path: path in chunk.paths)
        known = _pick(state, self.paths)
        if chunk.chunks == 1:
            return self.update_one(gradients, known, params, scalars)
        shared = _pick(known, self.shared)

        def body(index: jax.Array, carry: Any) -> Any:
            params, streams, _ = carry
            take = functools.partial(_take, chunk, index=index)
            held = {}
            for path, x in streams.items():
                held[path] = take(x)
            held |= shared
            moved, after = self.update_one(
                jax.tree.map(take, gradients), held, jax.tree.map(take, params), scalars
            )
            params = jax.tree.map(lambda x, new: _put(chunk, x, new, index), params, moved)
            written = {}
            for path, x in streams.items():
                written[path] = _put(chunk, x, after[path], index)
            return params, written, _pick(after, self.shared)

        streams = _pick(known, self.chunked)
        carry = (params, streams, shared)
        params, streams, after = jax.lax.fori_loop(0, chunk.chunks, body, carry)
        return params, streams | after

    def update_one(
        self, gradients: Any, state: Mapping[str, Any], params: Any, scalars: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Update one chunk on the device; the results are again where the arrays are stored."""
        part = {path: self.place(self.leaves[path], x) for path, x in state.items()}
        params = tree.map_with_path(lambda path, x: self.place(self.weights[path], x), params)
        before = tree.map_with_path(lambda path, _: part[path], self.like)
        updates, after = update_with(self.param_phase, gradients, before, params, scalars)
        moved = optax.apply_updates(params, updates)
        moved = tree.map_with_path(lambda path, x: self.store(self.weights[path], x), moved)
        stored = {}
        for path, x in tree.flatten(after).items():
            stored[path] = self.store(self.leaves[path], x)
        return moved, stored

    def place(self, leaf: Any, x: jax.Array, memory_kind: str = "device") -> jax.Array:
        """Copy an array to another memory if it is stored in host memory."""
        if leaf.memory_kind == "device":
            return x
        sharding = NamedSharding(self.mesh, leaf.spec, memory_kind=memory_kind)
        return jax.device_put(x, sharding)

    def store(self, leaf: Any, x: jax.Array) -> jax.Array:
        """Copy an array to the memory where it is stored."""
        return self.place(leaf, x, leaf.memory_kind)


def _by_path(table: Iterable[Any]) -> dict[str, Any]:
    """Return the arrays of a plan by path."""
    return {leaf.path: leaf for leaf in table}


def _pick(arrays: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return some of the arrays."""
    return {path: arrays[path] for path in paths}


def _take(chunk: UpdateChunk, x: jax.Array, index: jax.Array) -> jax.Array:
    """Read one chunk of an array."""
    local, axis, size = _local(chunk, x)
    part = jax.lax.dynamic_slice_in_dim(local, index * size, size, axis)
    return part.reshape(chunk.shape(x.shape))


def _put(chunk: UpdateChunk, x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Write one chunk of an array."""
    local, axis, size = _local(chunk, x)
    part = part.reshape(*local.shape[:axis], size, *local.shape[axis + 1 :])
    written = jax.lax.dynamic_update_slice_in_dim(local, part, index * size, axis)
    return written.reshape(x.shape)


def _local(chunk: UpdateChunk, x: jax.Array) -> tuple[jax.Array, int, int]:
    """Return an array with a dimension for shards, the dimension of chunks, and their size."""
    size = x.shape[chunk.dim] // chunk.shards
    if chunk.shards == 1:
        return x, chunk.dim, size // chunk.chunks
    before = x.shape[: chunk.dim]
    after = x.shape[chunk.dim + 1 :]
    local = x.reshape(*before, chunk.shards, size, *after)
    return local, chunk.dim + 1, size // chunk.chunks
