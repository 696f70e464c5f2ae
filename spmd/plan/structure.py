"""Structure of a module's parameters for `ModelInfo`: matrices, added ones, and stacks of layers.

It is read from statements of layers (`spmd.plan.flax_layers`) and from the creation of parameters
(`spmd.plan.created`), never from names.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from flax import nnx

from spmd.model_interface.kernels import LOGITS, LOOKUP, VECTOR, Matrix, Said
from spmd.model_interface.model import ModelInfo
from spmd.plan.flax_layers import said_of
from spmd.sharding.layer_paths import dims_of, find_stacks, without_dims

Shapes = Mapping[str, Sequence[int]]


def nnx_said(module: nnx.Module) -> dict[str, Said]:
    """Return path → the layer's statement about each parameter of an NNX module."""
    said = {}
    for prefix, layer in nnx.iter_modules(module):
        for name, value in vars(layer).items():
            if not isinstance(value, nnx.Param):
                continue
            statement = said_of(layer, name, value.get_metadata())
            if statement is not None:
                path = "/".join(map(str, (*prefix, name)))
                said[path] = statement
    return said


def describe(
    shapes: Shapes,
    said: Mapping[str, Said],
    drawn: Callable[[], Mapping[str, tuple[int | None, ...]]] = dict,
    tied: Sequence[Sequence[str]] = (),
) -> ModelInfo:
    """Return the known structure of a module's parameters.

    Args:
        shapes: Path → the shape as stored.
        said: Path → the layer's statement.
        drawn: Returns path → the shape as created, from random draws; called if the statements lack
            a shape.
        tied: Groups of paths of one array, the first path in `shapes`.
    """
    said = {**said, **_merged(said, tied)}
    created = _created_shapes(shapes, said, drawn)
    stacks = find_stacks(shapes, created)
    layer = {}
    for path, shape in shapes.items():
        layer[path] = without_dims(shape, dims_of(path, stacks))
    matrices, no_matrix = _matrices(layer, said)
    info = ModelInfo(
        matrices=matrices,
        no_matrix=no_matrix,
        added=_added(shapes, said),
        stacks=stacks,
        created=_ranks_of_stacked(shapes, created),
    )
    logits = dict.fromkeys(_heads(info, layer), LOGITS)
    return dataclasses.replace(info, no_matrix=no_matrix | logits)


def _added(shapes: Shapes, said: Mapping[str, Said]) -> frozenset[str]:
    added = []
    for path in shapes:
        if path in said and said[path].is_added:
            added.append(path)
    return frozenset(added)


def _created_shapes(
    shapes: Shapes,
    said: Mapping[str, Said],
    drawn: Callable[[], Mapping[str, tuple[int | None, ...]]],
) -> dict[str, tuple[int | None, ...]]:
    """Return path → shape as created: by the layer's statement, or else from random draws."""
    created = {}
    for path, statement in said.items():
        if path in shapes and statement.shape is not None:
            created[path] = statement.shape
    if created.keys() >= shapes.keys():
        return created
    return {**drawn(), **created}


def _matrices(layer: Shapes, said: Mapping[str, Said]) -> tuple[dict[str, Matrix], dict[str, str]]:
    """Return path → matrix of each kernel, and path → reason for other parameters.

    Args:
        layer: Path → shape in one layer.
    """
    matrices = {}
    no_matrix = {}
    for path, shape in layer.items():
        own = said.get(path, Said())
        if own.role:
            no_matrix[path] = own.role
        elif own.matrix is not None and own.shape is not None and len(own.shape) == len(shape):
            matrices[path] = own.matrix
        elif sum(size > 1 for size in shape) < 2 <= len(shape):
            no_matrix[path] = VECTOR
    return matrices, no_matrix


def _ranks_of_stacked(
    shapes: Shapes, created: Mapping[str, Sequence[int | None]]
) -> dict[str, int]:
    """Return path → number of dimensions as created, of the parameters stored with more."""
    ranks = {}
    for path, own in created.items():
        if path in shapes and len(own) < len(shapes[path]):
            ranks[path] = len(own)
    return ranks


def _merged(said: Mapping[str, Said], tied: Sequence[Sequence[str]]) -> dict[str, Said]:
    """Return first path → statement for each array with several paths; a lookup decides."""
    merged = {}
    for paths in tied:
        statements = [said[path] for path in paths if path in said]
        if statements:
            merged[paths[0]] = max(statements, key=lambda statement: statement.role == LOOKUP)
    return merged


def _heads(info: ModelInfo, layer: Shapes) -> list[str]:
    """Return the kernels of logits: as many outputs as a lookup has rows, in no repeated layer.

    Among several such kernels, only those with the shortest paths: a kernel of a block may be as
    wide by chance.
    """
    rows = set()
    for path, role in info.no_matrix.items():
        shape = layer[path]
        if role == LOOKUP and len(shape) == 2:
            rows.add(shape[0])
    found = []
    for path, matrix in info.matrices.items():
        if _is_repeated(path, info):
            continue
        _, outputs = matrix.sides(layer[path])
        if outputs in rows:
            found.append(path)
    shortest = min((path.count("/") for path in found), default=0)
    return [path for path in found if path.count("/") == shortest]


def _is_repeated(path: str, info: ModelInfo) -> bool:
    """Return whether a parameter is in a stack, or in a list of layers."""
    if dims_of(path, info.stacks or {}):
        return True
    return any(part.isdigit() for part in path.split("/"))
