"""How an update is cut into pieces that fit beside the model: a layer at a time, or a part of a large array.

It is decided here, from shapes alone, which optimizer state can live in host memory, and checked that the optimizer can
be run piece by piece at all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from spmd import tree
from spmd.errors import Problem
from spmd.optim.layerwise import trace_update
from spmd.sharding.layer_paths import stacks_of
from spmd.sharding.mesh import shards_of
from spmd.sharding.optimizer_state import DerivedSpec, shard_bytes

CHUNK_BYTES = 4 * 2**20
"""The largest piece of an array outside a stack on one device, in float32, where its shape allows."""

SMALL_BYTES = 2**20
"""State of fewer bytes on each device stays there, if it cannot be cut: moving it would save nothing."""

ROWS, LANES = 8, 128
"""The tile of an array in a TPU's memory. A slice of one in host memory is made of whole rows of tiles."""


@dataclasses.dataclass(frozen=True)
class UpdateChunk:
    """How the arrays of some parameters are cut into equal pieces.

    Attributes:
        paths: The parameters that are updated together.
        dim: The dimension that is cut: 0 for the layers of a stack.
        pieces: Into how many pieces; 1 leaves them whole.
        shards: Over how many devices that dimension is split; each device cuts its own shard.
        host: The paths of the optimizer state that lives in host memory.
        host_params: The paths of the parameters that do.
    """

    paths: tuple[str, ...]
    dim: int = 0
    pieces: int = 1
    shards: int = 1
    host: frozenset[str] = frozenset()
    host_params: frozenset[str] = frozenset()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one piece of an array."""
        return tuple(size // self.pieces if dim == self.dim else size for dim, size in enumerate(shape))

    def piece(self, params: Any) -> Any:
        """The abstract values of one piece of the parameters."""
        chosen = tree.select(params, lambda path: path in self.paths)
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(self.shape(tuple(p.shape)), p.dtype), chosen)


def plan_chunks(
    rule: optax.GradientTransformation,
    params: Any,
    state: Mapping[str, DerivedSpec],
    specs: Mapping[str, Any],
    axes: Mapping[str, int],
    stacked: Sequence[str],
    offload: Sequence[str],
) -> tuple[tuple[UpdateChunk, ...], list[Problem]]:
    """Cuts the update of all parameters into pieces.

    Args:
        rule: The optimizer without what it does to the whole gradient.
        params: The parameters' abstract values: a nested dictionary.
        state: Path of the optimizer's state → how it is split.
        specs: Parameter path → the spec that optimizer state of its shape has.
        axes: Mesh axis → size.
        stacked: Path components whose parameters are stacked.
        offload: What is to live in host memory: `optimizer_state`, `params`.

    Returns:
        The cuts, each parameter in one of them, and why the optimizer cannot be run by pieces.
    """
    flat = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in tree.flatten(params).items()}
    abstract = tree.map_with_path(lambda path, _: flat[path], params)
    problems = [
        Problem(
            path,
            f"its update depends on {sorted(seen.others)[0]}, and on {len(seen.others) - 1} other parameters",
            fix="let spmd.optim.two_phase compute what needs the whole gradient, such as a global norm",
        )
        for path, seen in trace_update(rule, abstract, {}, totals=False).items()
        if seen.others
    ]
    if problems:
        return (), problems

    stacks: dict[tuple[str, int], list[str]] = {}
    single = []
    for path, leaf in flat.items():
        if own := stacks_of(path, stacked):
            stacks.setdefault((own[0], leaf.shape[0]), []).append(path)
        else:
            single.append(path)
    cuts = []
    for (_, length), paths in stacks.items():  # a piece is one layer, of each stage of a pipeline
        stages = _shards(flat[paths[0]].shape, specs[paths[0]], axes)[0]
        cuts.append(UpdateChunk(tuple(paths), 0, length // stages, stages))
    ranks = {path: len(flat[path].shape) for path in single}
    elementwise = {
        path
        for path, seen in trace_update(rule, abstract, ranks).items()
        if path in ranks and not seen.mixed and not seen.random and {shape for _, shape in seen.state} <= {()}
    }
    parts = [
        (path, chunk_large_array(path, flat[path], specs[path], axes) if path in elementwise else None)
        for path in single
    ]
    cuts += [cut for _, cut in parts if cut]
    if whole := tuple(path for path, cut in parts if not cut):
        cuts.append(UpdateChunk(whole))
    if "optimizer_state" in offload:
        cuts = [dataclasses.replace(cut, host=_host(cut, rule, abstract, state, axes)) for cut in cuts]
    if "params" in offload:
        layers = len(stacks)
        cuts[:layers] = [dataclasses.replace(cut, host_params=_host_params(cut, flat)) for cut in cuts[:layers]]
        if not any(cut.host_params for cut in cuts):
            what = "there is no stack of layers with parameters of two dimensions"
            problems.append(Problem("offload params", what, fix="stack the layers, and name them in Rules(stacked=…)"))
    return tuple(cuts), problems


def chunk_large_array(path: str, leaf: Any, spec: Any, axes: Mapping[str, int]) -> UpdateChunk | None:
    """The cut of one large array into pieces of whole rows of tiles, the finest if none is small enough; None for one
    that is small or has no such cut."""
    shape = tuple(leaf.shape)
    shards = _shards(shape, spec, axes)
    local = [size // n for size, n in zip(shape, shards, strict=True)]
    total = 4
    for size in local:
        total *= size
    if total <= CHUNK_BYTES or len(shape) < 2:
        return None
    dim = len(shape) + _row_dim(local)
    rows, left = divmod(local[dim], ROWS)
    counts = [] if left else [pieces for pieces in range(2, rows + 1) if rows % pieces == 0]
    small = (pieces for pieces in counts if total // pieces <= CHUNK_BYTES)
    return UpdateChunk((path,), dim, next(small, counts[-1]), shards[dim]) if counts else None


def _shards(shape: Sequence[int], spec: Any, axes: Mapping[str, int]) -> list[int]:
    """Over how many devices each dimension is split."""
    return [shards_of(entry, axes) for entry in (*spec, *(None,) * (len(shape) - len(spec)))]


def _row_dim(local: Sequence[int]) -> int:
    """Which of the last two dimensions of an array on one device runs along the rows of tiles, as -2 or -1.

    A TPU lays an array out the other way round where that pads less.
    """

    def padded(rows: int, columns: int) -> int:
        return -(-rows // ROWS) * ROWS * (-(-columns // LANES)) * LANES

    return -2 if padded(*local[-2:]) <= padded(*local[:-3:-1]) else -1


def _host_params(cut: UpdateChunk, params: Mapping[str, Any]) -> frozenset[str]:
    """Which parameters of a stack live in host memory: those of which one layer is made of whole tiles."""
    return frozenset(path for path in cut.paths if len(params[path].shape) > 2)


def _host(
    cut: UpdateChunk,
    rule: optax.GradientTransformation,
    params: Any,
    state: Mapping[str, DerivedSpec],
    axes: Mapping[str, int],
) -> frozenset[str]:
    """Which state of a cut lives in host memory: pieces of at least two dimensions, and arrays no larger than a piece.

    What is larger and cannot be cut stays on the device: moved whole, it was seen to cost more than it saves.
    """
    found = set()
    for path, piece in tree.flatten(jax.eval_shape(rule.init, cut.piece(params))).items():
        whole, rank = state[path], len(piece.shape)
        if piece.shape == whole.shape:
            fits = SMALL_BYTES <= shard_bytes(whole.shape, whole.dtype, whole.spec, axes) <= CHUNK_BYTES
        elif cut.dim < rank - 2:
            fits = True
        else:
            local = [size // n for size, n in zip(whole.shape, _shards(whole.shape, whole.spec, axes), strict=True)]
            rows = piece.shape[cut.dim] // cut.shards
            fits = rank > 1 and cut.dim == rank + _row_dim(local) and rows % ROWS == 0
        found |= {path} if fits else set()
    return frozenset(found)
