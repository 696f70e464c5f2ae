"""The optimizer's update, with state and parameters in host memory streamed through the device in chunks.

An offloaded array is stored in `pinned_host`. A chunk, one layer of a stack or a bounded part of a large array, is
copied to the device, updated, and written back into the donated host buffer. Moving the whole state in and out needs
more device memory than no offload at all (decision 0012).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from spmd import tree
from spmd.host_memory.chunks import UpdateChunk
from spmd.optim.extra_args import OF_PARTS, update_with
from spmd.optim.storage import Update
from spmd.optim.two_phase import phases


def make_update(plan: Any, chunks: Sequence[UpdateChunk]) -> Update:
    """Return the update of parameters and optimizer state under a `ShardingPlan`, in chunks."""
    global_phase, param_phase = phases(plan.optimizer)
    updates = [_chunked(plan, param_phase, chunk) for chunk in chunks]

    def streamed(gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        gradients, scalars = global_phase(gradients)
        scalars = scalars | {name: extra[name] for name in OF_PARTS if name in extra}
        before = tree.flatten(state)
        moved: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for update_chunk in updates:
            part, changed = update_chunk(gradients, before, params, scalars)
            moved = tree.merge(moved, part)
            after |= changed
        return moved, tree.map_with_path(lambda path, _: after[path], state)

    return streamed


def _chunked(plan: Any, param_phase: optax.GradientTransformationExtraArgs, chunk: UpdateChunk) -> Callable[..., Any]:
    mesh = plan.mesh
    like = jax.eval_shape(param_phase.init, chunk.abstract_params(plan.abstract_params))
    leaves, weights = ({leaf.path: leaf for leaf in table} for table in (plan.optimizer_state, plan.params))
    chunked = [path for path, leaf in tree.flatten(like).items() if leaf.shape != leaves[path].shape]

    def place(leaf: Any, x: jax.Array, memory_kind: str = "device") -> jax.Array:
        if leaf.memory_kind == "device":
            return x
        return jax.device_put(x, NamedSharding(mesh, leaf.spec, memory_kind=memory_kind))

    def one(gradients: Any, state: Mapping[str, Any], params: Any, scalars: Any) -> tuple[Any, dict[str, Any]]:
        part = {path: place(leaves[path], x) for path, x in state.items()}
        params = tree.map_with_path(lambda path, x: place(weights[path], x), params)
        before = tree.map_with_path(lambda path, _: part[path], like)
        updates, after = update_with(param_phase, gradients, before, params, scalars)
        moved = optax.apply_updates(params, updates)
        moved = tree.map_with_path(lambda path, x: place(weights[path], x, weights[path].memory_kind), moved)
        after = tree.flatten(after)
        return moved, {path: place(leaves[path], x, leaves[path].memory_kind) for path, x in after.items()}

    def run(gradients: Any, state: Mapping[str, Any], params: Any, scalars: Any) -> tuple[Any, dict[str, Any]]:
        gradients, params = (tree.select(x, lambda path: path in chunk.paths) for x in (gradients, params))
        known = {path: state[path] for path in tree.flatten(like)}
        if chunk.chunks == 1:
            return one(gradients, known, params, scalars)
        shared = {path: x for path, x in known.items() if path not in chunked}

        def body(index: jax.Array, carry: Any) -> Any:
            params, streams, _ = carry
            take = functools.partial(_take, chunk, index=index)
            held = {path: take(x) for path, x in streams.items()}
            moved, after = one(jax.tree.map(take, gradients), held | shared, jax.tree.map(take, params), scalars)
            params = jax.tree.map(lambda x, new: _put(chunk, x, new, index), params, moved)
            streams = {path: _put(chunk, x, after[path], index) for path, x in streams.items()}
            return params, streams, {path: after[path] for path in shared}

        streams = {path: known[path] for path in chunked}
        params, streams, after = jax.lax.fori_loop(0, chunk.chunks, body, (params, streams, shared))
        return params, streams | after

    return run


def _take(chunk: UpdateChunk, x: jax.Array, index: jax.Array) -> jax.Array:
    local, axis, size = _local(chunk, x)
    return jax.lax.dynamic_slice_in_dim(local, index * size, size, axis).reshape(chunk.shape(x.shape))


def _put(chunk: UpdateChunk, x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    local, axis, size = _local(chunk, x)
    part = part.reshape(*local.shape[:axis], size, *local.shape[axis + 1 :])
    return jax.lax.dynamic_update_slice_in_dim(local, part, index * size, axis).reshape(x.shape)


def _local(chunk: UpdateChunk, x: jax.Array) -> tuple[jax.Array, int, int]:
    """Return the array with its shards in a dimension of their own, the dimension to split, and a chunk's size."""
    size = x.shape[chunk.dim] // chunk.shards
    if chunk.shards == 1:
        return x, chunk.dim, size // chunk.chunks
    shape = (*x.shape[: chunk.dim], chunk.shards, size, *x.shape[chunk.dim + 1 :])
    return x.reshape(shape), chunk.dim + 1, size // chunk.chunks
