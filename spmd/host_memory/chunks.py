"""Chunks of an offloaded update: one layer of a stack, or a part of a large array.

Chunks, and the optimizer state that can be in host memory, are chosen from shapes alone.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from spmd import tree
from spmd.errors import Problem
from spmd.optim.layerwise import Traced, trace_update
from spmd.sharding.layer_paths import Stack, dims_of, stacks_of
from spmd.sharding.mesh import shards_of
from spmd.sharding.optimizer_state import DerivedSpec, shard_bytes

CHUNK_BYTES = 4 * 2**20
"""Largest chunk of an array outside a stack on one device, in float32, if its shape permits."""

SMALL_BYTES = 2**20
"""State that is not chunked and has fewer bytes on each device stays there, as moving it would save
nothing."""

ROWS, LANES = 8, 128
"""Tile of an array in TPU memory. A slice of an array in host memory must consist of whole rows of
tiles."""


@dataclasses.dataclass(frozen=True)
class UpdateChunk:
    """Parameters updated together, in equal chunks."""

    paths: tuple[str, ...]
    dim: int = 0  # the dimension that is chunked: 0 for the layers of a stack
    chunks: int = 1  # the number of chunks; 1 for whole arrays
    shards: int = 1  # the number of devices that split that dimension; each chunks its own shard
    host: frozenset[str] = frozenset()  # the paths of optimizer state in host memory
    host_params: frozenset[str] = frozenset()  # the paths of parameters in host memory

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one chunk of an array."""
        sizes = list(shape)
        if self.dim < len(sizes):
            sizes[self.dim] //= self.chunks
        return tuple(sizes)

    def abstract_params(self, params: Any) -> Any:
        """Return the abstract values of one chunk of the parameters."""
        chosen = tree.select(params, lambda path: path in self.paths)

        def one_chunk(p: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(self.shape(tuple(p.shape)), p.dtype)

        return jax.tree.map(one_chunk, chosen)


def plan_chunks(
    param_phase: optax.GradientTransformation,
    params: Any,
    state: Mapping[str, DerivedSpec],
    specs: Mapping[str, Any],
    axes: Mapping[str, int],
    stacks: Mapping[str, Stack],
    offload: Sequence[str],
) -> tuple[tuple[UpdateChunk, ...], list[Problem]]:
    """Divide the update of all parameters into chunks.

    `state` and `specs` are from `optimizer_specs`; `offload` contains `optimizer_state`, `params`,
    or both. Return the chunks, each parameter in one of them, and the problems that prevent a
    chunked update.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    flat = tree.flatten(abstract)
    problems = _dependent_updates(param_phase, abstract)
    if problems:
        return (), problems
    by_stack, single, problems = _group_by_stack(flat, stacks)
    if problems:
        return (), problems

    chunks = []
    for (_, length), paths in by_stack.items():
        chunks.append(_layer_chunk(paths, length, flat, specs, axes, offload))
    if "params" in offload and not any(chunk.host_params for chunk in chunks):
        what = "there is no stack of layers with parameters of two dimensions"
        fix = "stack the layers, and name them in Rules(stacked=…)"
        problems.append(Problem("offload params", what, fix=fix))
    chunks += _single_chunks(single, param_phase, abstract, specs, axes)
    if "optimizer_state" in offload:
        for index, chunk in enumerate(chunks):
            host = _host_state(chunk, param_phase, abstract, state, axes)
            chunks[index] = dataclasses.replace(chunk, host=host)
        if not any(chunk.host for chunk in chunks):
            problem = Problem(
                "offload optimizer_state",
                "moves nothing: no state is of a stack of layers, or large enough",
                f"a whole array has at least {SMALL_BYTES:,} bytes on a device",
                "leave it out",
            )
            problems.append(problem)
    return tuple(chunks), problems


def _dependent_updates(param_phase: optax.GradientTransformation, params: Any) -> list[Problem]:
    """Return a problem for each parameter with an update dependent on other parameters."""
    problems = []
    for path, traced in trace_update(param_phase, params, {}, totals=False).items():
        if traced.others:
            first = min(traced.others)
            count = len(traced.others) - 1
            what = f"its update depends on {first}, and on {count} other parameters"
            fix = (
                "let spmd.optim.two_phase compute what needs the whole gradient, such as a "
                "global norm"
            )
            problems.append(Problem(path, what, fix=fix))
    return problems


def _group_by_stack(
    flat: Mapping[str, Any], stacks: Mapping[str, Stack]
) -> tuple[dict[tuple[str, int], list[str]], list[str], list[Problem]]:
    """Group the parameters of each stack, by its path and number of layers.

    Return the groups, the parameters outside of stacks, and the problems of the stacks.
    """
    by_stack: dict[tuple[str, int], list[str]] = {}
    single = []
    problems = []
    for path, leaf in flat.items():
        own = stacks_of(path, stacks)
        if not own:
            single.append(path)
            continue
        by_stack.setdefault((own[0], leaf.shape[0]), []).append(path)
        dim = dims_of(path, stacks)[0]
        if dim != 0:
            what = f"is stacked along dimension {dim}, and chunks are of dimension 0"
            fix = "offload nothing, or stack along dimension 0"
            problems.append(Problem(path, what, fix=fix))
    return by_stack, single, problems


def _layer_chunk(
    paths: Sequence[str],
    length: int,
    flat: Mapping[str, Any],
    specs: Mapping[str, Any],
    axes: Mapping[str, int],
    offload: Sequence[str],
) -> UpdateChunk:
    """Return the chunks of a stack of `length` layers: one layer of each pipeline stage."""
    first = paths[0]
    stages = _shards(flat[first].shape, specs[first], axes)[0]
    host_params = set()
    for path in paths:
        # Only parameters whose layers have whole tiles can be in host memory.
        if "params" in offload and len(flat[path].shape) > 2:
            host_params.add(path)
    chunks = length // stages
    return UpdateChunk(tuple(paths), 0, chunks, stages, host_params=frozenset(host_params))


def _single_chunks(
    paths: Sequence[str],
    param_phase: optax.GradientTransformation,
    params: Any,
    specs: Mapping[str, Any],
    axes: Mapping[str, int],
) -> list[UpdateChunk]:
    """Return the chunks of parameters outside of stacks.

    Each large one has chunks of its own; all others are one chunk.
    """
    flat = tree.flatten(params)
    all_dims = {}
    for path in paths:
        all_dims[path] = range(len(flat[path].shape))
    traced = trace_update(param_phase, params, all_dims)
    chunks = []
    rest = []
    for path in paths:
        chunk = None
        if _is_elementwise(traced[path]):
            chunk = chunk_large_array(path, flat[path], specs[path], axes)
        if chunk is None:
            rest.append(path)
        else:
            chunks.append(chunk)
    if rest:
        chunks.append(UpdateChunk(tuple(rest)))
    return chunks


def _is_elementwise(traced: Traced) -> bool:
    """Return whether an update is elementwise and deterministic, with state of the same shape."""
    if traced.mixed or traced.random:
        return False
    return all(shape == () for _, shape in traced.state)


def chunk_large_array(
    path: str, leaf: Any, spec: Any, axes: Mapping[str, int]
) -> UpdateChunk | None:
    """Split a large array into chunks of whole rows of tiles.

    They have at most `CHUNK_BYTES`, or else are as small as possible. Return None for a small
    array, and for one without such chunks.
    """
    shape = tuple(leaf.shape)
    shards = _shards(shape, spec, axes)
    local = _local_shape(shape, shards)
    nbytes = 4 * math.prod(local)
    if nbytes <= CHUNK_BYTES or len(shape) < 2:
        return None
    dim = len(shape) + _row_dim(local)
    rows, remainder = divmod(local[dim], ROWS)
    if remainder or rows < 2:
        return None
    return UpdateChunk((path,), dim, _chunk_count(nbytes, rows), shards[dim])


def _chunk_count(nbytes: int, rows: int) -> int:
    """Return the fewest chunks of at most `CHUNK_BYTES`, of whole rows of tiles.

    If all are larger, each chunk is one row of tiles.
    """
    for count in range(2, rows):
        if rows % count == 0 and nbytes // count <= CHUNK_BYTES:
            return count
    return rows


def _shards(shape: Sequence[int], spec: Any, axes: Mapping[str, int]) -> list[int]:
    """Return the number of shards of each dimension."""
    unnamed = (None,) * (len(shape) - len(spec))
    return [shards_of(entry, axes) for entry in (*spec, *unnamed)]


def _local_shape(shape: Sequence[int], shards: Sequence[int]) -> list[int]:
    """Return the shape of one shard."""
    return [size // n for size, n in zip(shape, shards, strict=True)]


def _row_dim(local: Sequence[int]) -> int:
    """Return the dimension of an array on one device along the rows of tiles, -2 or -1.

    A TPU chooses by padding.
    """
    rows, columns = local[-2:]
    if _padded_size(rows, columns) <= _padded_size(columns, rows):
        return -2
    return -1


def _padded_size(rows: int, columns: int) -> int:
    """Return the elements of a matrix in whole tiles."""
    row_tiles = math.ceil(rows / ROWS)
    column_tiles = math.ceil(columns / LANES)
    return row_tiles * ROWS * column_tiles * LANES


def _host_state(
    chunk: UpdateChunk,
    param_phase: optax.GradientTransformation,
    params: Any,
    state: Mapping[str, DerivedSpec],
    axes: Mapping[str, int],
) -> frozenset[str]:
    """Return the paths of the state of a chunk for host memory."""
    parts = jax.eval_shape(param_phase.init, chunk.abstract_params(params))
    host = set()
    for path, part in tree.flatten(parts).items():
        if _fits_host(chunk, part.shape, state[path], axes):
            host.add(path)
    return frozenset(host)


def _fits_host(
    chunk: UpdateChunk, part: tuple[int, ...], whole: DerivedSpec, axes: Mapping[str, int]
) -> bool:
    """Return whether an array of the state can be in host memory, and moving it saves memory.

    Such are chunks of two or more dimensions, and whole arrays of the size of a chunk. `part` is
    the shape of one chunk.
    """
    if part == whole.shape:
        # Moving larger ones was measured to use more memory than it saves.
        nbytes = shard_bytes(whole.shape, whole.dtype, whole.spec, axes)
        return SMALL_BYTES <= nbytes <= CHUNK_BYTES
    rank = len(part)
    if chunk.dim < rank - 2:
        return True
    if rank < 2:
        return False
    shards = _shards(whole.shape, whole.spec, axes)
    local = _local_shape(whole.shape, shards)
    rows = part[chunk.dim] // chunk.shards
    return chunk.dim == rank + _row_dim(local) and rows % ROWS == 0
