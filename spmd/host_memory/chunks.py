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
from spmd.optim.layerwise import trace_update
from spmd.sharding.layer_paths import Stack, dims_of, stacks_of
from spmd.sharding.mesh import shards_of
from spmd.sharding.optimizer_state import DerivedSpec, shard_bytes

CHUNK_BYTES = 4 * 2**20
"""Largest chunk of an array outside a stack on one device, in float32, if its shape permits."""

SMALL_BYTES = 2**20
"""State that is not chunked and has fewer bytes on each device stays there, as moving it would save nothing."""

ROWS, LANES = 8, 128
"""Tile of an array in TPU memory. A slice of an array in host memory must consist of whole rows of tiles."""


@dataclasses.dataclass(frozen=True)
class UpdateChunk:
    """Parameters that are updated together, in equal chunks."""

    paths: tuple[str, ...]
    dim: int = 0  # the dimension that is chunked: 0 for the layers of a stack
    chunks: int = 1  # the number of chunks; 1 for whole arrays
    shards: int = 1  # the number of devices that split that dimension; each chunks its own shard
    host: frozenset[str] = frozenset()  # the paths of optimizer state in host memory
    host_params: frozenset[str] = frozenset()  # the paths of parameters in host memory

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one chunk of an array."""
        return tuple(size // self.chunks if dim == self.dim else size for dim, size in enumerate(shape))

    def abstract_params(self, params: Any) -> Any:
        """Return the abstract values of one chunk of the parameters."""
        chosen = tree.select(params, lambda path: path in self.paths)
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(self.shape(tuple(p.shape)), p.dtype), chosen)


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

    `state` and `specs` are those of `optimizer_specs`; `offload` contains `optimizer_state`, `params`, or both. Return
    the chunks, each parameter in one of them, and the problems that prevent a chunked update.
    """
    flat = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in tree.flatten(params).items()}
    abstract = tree.map_with_path(lambda path, _: flat[path], params)
    problems = []
    for path, traced in trace_update(param_phase, abstract, {}, totals=False).items():
        if traced.others:
            what = f"its update depends on {min(traced.others)}, and on {len(traced.others) - 1} other parameters"
            fix = "let spmd.optim.two_phase compute what needs the whole gradient, such as a global norm"
            problems.append(Problem(path, what, fix=fix))
    if problems:
        return (), problems

    by_stack: dict[tuple[str, int], list[str]] = {}
    single = []
    for path, leaf in flat.items():
        if own := stacks_of(path, stacks):
            by_stack.setdefault((own[0], leaf.shape[0]), []).append(path)
            if dim := dims_of(path, stacks)[0]:
                what, fix = f"is stacked along dimension {dim}, and chunks are of dimension 0", "offload nothing"
                problems.append(Problem(path, what, fix=f"{fix}, or stack along dimension 0"))
        else:
            single.append(path)
    if problems:
        return (), problems
    layers = []
    for (_, length), paths in by_stack.items():  # a chunk is one layer of each pipeline stage
        stages = _shards(flat[paths[0]].shape, specs[paths[0]], axes)[0]
        # Only parameters whose layers have whole tiles can be in host memory.
        on_host = frozenset(path for path in paths if "params" in offload and len(flat[path].shape) > 2)
        layers.append(UpdateChunk(tuple(paths), 0, length // stages, stages, host_params=on_host))
    if "params" in offload and not any(chunk.host_params for chunk in layers):
        what = "there is no stack of layers with parameters of two dimensions"
        problems.append(Problem("offload params", what, fix="stack the layers, and name them in Rules(stacked=…)"))
    all_dims = {path: range(len(flat[path].shape)) for path in single}
    elementwise = {
        path
        for path, traced in trace_update(param_phase, abstract, all_dims).items()
        if path in all_dims and not traced.mixed and not traced.random and {shape for _, shape in traced.state} <= {()}
    }
    large = {path: chunk_large_array(path, flat[path], specs[path], axes) for path in single if path in elementwise}
    chunks = [*layers, *(chunk for chunk in large.values() if chunk)]
    if rest := tuple(path for path in single if not large.get(path)):
        chunks.append(UpdateChunk(rest))
    if "optimizer_state" in offload:
        host = (_host_state(chunk, param_phase, abstract, state, axes) for chunk in chunks)
        chunks = [dataclasses.replace(chunk, host=paths) for chunk, paths in zip(chunks, host, strict=True)]
        if not any(chunk.host for chunk in chunks):
            what = "moves nothing: no state is of a stack of layers, or large enough"
            detail = f"a whole array has at least {SMALL_BYTES:,} bytes on a device"
            problems.append(Problem("offload optimizer_state", what, detail, "leave it out"))
    return tuple(chunks), problems


def chunk_large_array(path: str, leaf: Any, spec: Any, axes: Mapping[str, int]) -> UpdateChunk | None:
    """Split a large array into chunks of whole rows of tiles, of at most `CHUNK_BYTES` or else as small as possible.

    Return None for a small array, and for one without such chunks.
    """
    shape = tuple(leaf.shape)
    shards = _shards(shape, spec, axes)
    local = [size // n for size, n in zip(shape, shards, strict=True)]
    nbytes = 4 * math.prod(local)
    if nbytes <= CHUNK_BYTES or len(shape) < 2:
        return None
    dim = len(shape) + _row_dim(local)
    rows, remainder = divmod(local[dim], ROWS)
    counts = [] if remainder else [count for count in range(2, rows + 1) if rows % count == 0]
    fitting = (count for count in counts if nbytes // count <= CHUNK_BYTES)
    return UpdateChunk((path,), dim, next(fitting, counts[-1]), shards[dim]) if counts else None


def _shards(shape: Sequence[int], spec: Any, axes: Mapping[str, int]) -> list[int]:
    """Return the number of shards of each dimension."""
    return [shards_of(entry, axes) for entry in (*spec, *(None,) * (len(shape) - len(spec)))]


def _row_dim(local: Sequence[int]) -> int:
    """Return the dimension of an array on one device along the rows of tiles, -2 or -1: a TPU chooses by padding."""

    def padded(rows: int, columns: int) -> int:
        return -(-rows // ROWS) * ROWS * (-(-columns // LANES)) * LANES

    return -2 if padded(*local[-2:]) <= padded(*local[:-3:-1]) else -1


def _host_state(
    chunk: UpdateChunk,
    param_phase: optax.GradientTransformation,
    params: Any,
    state: Mapping[str, DerivedSpec],
    axes: Mapping[str, int],
) -> frozenset[str]:
    """Return the state of a chunk for host memory: chunks of two or more dimensions, and whole arrays of that size."""
    found = set()
    for path, part in tree.flatten(jax.eval_shape(param_phase.init, chunk.abstract_params(params))).items():
        whole, rank = state[path], len(part.shape)
        if part.shape == whole.shape:  # moving larger ones was measured to use more memory than it saves
            fits = SMALL_BYTES <= shard_bytes(whole.shape, whole.dtype, whole.spec, axes) <= CHUNK_BYTES
        elif chunk.dim < rank - 2:
            fits = True
        else:
            local = [size // n for size, n in zip(whole.shape, _shards(whole.shape, whole.spec, axes), strict=True)]
            rows = part.shape[chunk.dim] // chunk.shards
            fits = rank > 1 and chunk.dim == rank + _row_dim(local) and rows % ROWS == 0
        found |= {path} if fits else set()
    return frozenset(found)
