"""Structure of a module's parameters, as `ModelInfo` has it: matrices, what is added, and stacks of layers.

It is read from what layers say (`spmd.plan.flax_layers`) and from how parameters were created (`spmd.plan.created`),
never from names.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from flax import nnx

from spmd.model_api.kernels import LOGITS, LOOKUP, VECTOR, Said
from spmd.model_api.model import ModelInfo
from spmd.plan.flax_layers import said_of
from spmd.sharding.layer_paths import dims_of, find_stacks, without_dims

Shapes = Mapping[str, Sequence[int]]


def nnx_said(module: nnx.Module) -> dict[str, Said]:
    """Return the path of each parameter of an NNX module → what its layer says of it."""
    said = {}
    for prefix, layer in nnx.iter_modules(module):
        for name, value in vars(layer).items():
            if not isinstance(value, nnx.Param):
                continue
            statement = said_of(layer, name, value.get_metadata())
            if statement is not None:
                said["/".join(map(str, (*prefix, name)))] = statement
    return said


def describe(
    shapes: Shapes,
    said: Mapping[str, Said],
    drawn: Callable[[], Mapping[str, tuple[int | None, ...]]] = dict,
    tied: Sequence[Sequence[str]] = (),
) -> ModelInfo:
    """Return what is known of the structure of a module's parameters.

    Args:
        shapes: Path → the shape as stored.
        said: Path → what the layer says of it.
        drawn: Returns path → the shape as created, from random draws; called if some layer does not say it.
        tied: Groups of paths of one array, the first path in `shapes`.
    """
    said = {**said, **_merged(said, tied)}
    created = {path: own.shape for path, own in said.items() if path in shapes and own.shape is not None}
    if any(path not in created for path in shapes):
        created = {**drawn(), **created}
    stacks = find_stacks(shapes, created)
    layer = {path: without_dims(shape, dims_of(path, stacks)) for path, shape in shapes.items()}
    matrices, no_matrix = {}, {}
    for path, shape in layer.items():
        own = said.get(path, Said())
        if own.role:
            no_matrix[path] = own.role
        elif own.matrix is not None and own.shape is not None and len(own.shape) == len(shape):
            matrices[path] = own.matrix
        elif sum(size > 1 for size in shape) < 2 <= len(shape):
            no_matrix[path] = VECTOR
    info = ModelInfo(
        matrices=matrices,
        no_matrix=no_matrix,
        added=frozenset(path for path in shapes if path in said and said[path].is_added),
        stacks=stacks,
        created={path: len(own) for path, own in created.items() if path in shapes and len(own) < len(shapes[path])},
    )
    return dataclasses.replace(info, no_matrix=no_matrix | dict.fromkeys(_heads(info, layer), LOGITS))


def _merged(said: Mapping[str, Said], tied: Sequence[Sequence[str]]) -> dict[str, Said]:
    """Return the first path of each array with several paths → what a layer says of it; a lookup decides."""
    merged = {}
    for paths in tied:
        statements = [said[path] for path in paths if path in said]
        if statements:
            merged[paths[0]] = max(statements, key=lambda statement: statement.role == LOOKUP)
    return merged


def _heads(info: ModelInfo, layer: Shapes) -> list[str]:
    """Return the kernels that make logits: as many outputs as a lookup has rows, outside of all repeated layers.

    Where several have, it is those with the shortest paths: a kernel of a block may be as wide by chance.
    """
    lookups = [layer[path] for path, role in info.no_matrix.items() if role == LOOKUP]
    rows = {shape[0] for shape in lookups if len(shape) == 2}
    found = []
    for path, matrix in info.matrices.items():
        is_repeated = bool(dims_of(path, info.stacks or {})) or any(part.isdigit() for part in path.split("/"))
        if not is_repeated and matrix.sides(layer[path])[1] in rows:
            found.append(path)
    shortest = min((path.count("/") for path in found), default=0)
    return [path for path in found if path.count("/") == shortest]
