"""Stacks of layers: their paths (`layers/kernel` stacked, `layers/0/kernel` unrolled) and dimensions.

A path component (or several: `encoder/layers`) whose parameters are stacked adds one dimension to every array below it,
except where a layer number follows it: that layer is unrolled.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd.errors import Problem, RuleError


@dataclasses.dataclass(frozen=True)
class Stack:
    """The dimension that stacking adds to each array of one layer, and the mesh axis that splits it.

    Args:
        axis: A mesh axis, or None for whole.
        dim: The index of the added dimension: that of `nn.scan(variable_axes={"params": dim})`.

    Example:
        >>> stored_dims([Stack(dim=0), Stack(dim=1)])  # (b, c) in the inner stack: (b, inner, c), then (outer, …)
        (0, 2)
    """

    axis: str | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim < 0:
            what, fix = f"is along dimension {self.dim!r}", "a number from 0 on, as in nn.scan"
            raise RuleError("A stack cannot be read:", [Problem(f"{self}", what, fix=fix)])


DEFAULT_STACKED = (("layers", "pipe"),)
"""The stacks of a table that names none, for a model that recorded none: of functions without a module."""


def read_stacked(stacked: Any) -> dict[str, Stack]:
    """Return the stacks by path component, from a sequence of components, or from the form of `Rules.stacked`.

    Example:
        >>> read_stacked(["layers"]) == read_stacked({"layers": None}) == {"layers": Stack(axis=None, dim=0)}
        True
    """
    stacked = DEFAULT_STACKED if stacked is None else stacked
    pairs = stacked.items() if isinstance(stacked, Mapping) else stacked
    named = ((pair, None) if isinstance(pair, str) else pair for pair in pairs)
    return {name: value if isinstance(value, Stack) else Stack(value) for name, value in named}


def stacks_of(path: str, stacked: Collection[str]) -> list[str]:
    """Return the paths of the stacks that hold a parameter, the outermost first.

    Example:
        >>> stacks_of("decoder/layers/kernel", ["layers"]), stacks_of("layers/0/kernel", ["layers"])
        (['decoder/layers'], [])
    """
    return [prefix for prefix, _, child in _find(path, stacked) if not child.isdigit()]


def _find(path: str, stacked: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the path up to each stacked component, its name in `stacked`, and the component after it."""
    parts = path.split("/")
    for end in range(1, len(parts)):
        prefix = "/".join(parts[:end])
        for name in stacked:
            if prefix == name or prefix.endswith(f"/{name}"):
                yield prefix, name, parts[end]
                break


def own_stacks(path: str, stacks: Mapping[str, Stack]) -> tuple[Stack, ...]:
    """Return the stacks that hold a parameter, the outermost first."""
    return tuple(stacks[name] for _, name, child in _find(path, stacks) if not child.isdigit())


def dims_of(path: str, stacks: Mapping[str, Stack]) -> tuple[int, ...]:
    """Return the stacked dimensions of a parameter as stored, one for each of its stacks."""
    return stored_dims(own_stacks(path, stacks))


def stored_dims(stacks: Sequence[Stack]) -> tuple[int, ...]:
    """Return the dimensions that stacks have in a parameter as stored; an outer stack shifts those of inner ones."""
    dims: list[int] = []
    for stack in reversed(stacks):
        dims = [stack.dim, *(dim + (dim >= stack.dim) for dim in dims)]
    return tuple(dims)


def insert_stacked(layer: Iterable[Any], values: Iterable[Any], dims: Iterable[int]) -> tuple[Any, ...]:
    """Insert the values of stacked dimensions between those of one layer; missing ones are None.

    Example:
        >>> insert_stacked(["fsdp", "tensor"], ["pipe"], [1]), insert_stacked([], ["pipe"], [1])
        (('fsdp', 'pipe', 'tensor'), (None, 'pipe'))
    """
    entries = list(layer)
    for dim, value in sorted(zip(dims, values, strict=True), key=lambda pair: pair[0]):
        entries += [None] * (dim - len(entries))
        entries.insert(dim, value)
    return tuple(entries)


def without_dims(values: Iterable[Any], dims: Collection[int]) -> tuple[Any, ...]:
    """Return the values, such as sizes, of the dimensions that are not stacked."""
    return tuple(value for dim, value in enumerate(values) if dim not in dims)


def audit_stacks(shapes: Mapping[str, Sequence[int]], stacks: Mapping[str, Stack]) -> list[Problem]:
    """Return a problem for each stack whose arrays do not have one size along its dimension: its number of layers.

    Example:
        >>> print(*audit_stacks({"layers/up": (64, 4, 256), "layers/down": (256, 4, 64)}, {"layers": Stack()}))
        layers: is stacked along dimension 0, where its arrays have different sizes
            64 in layers/up (64, 4, 256), 256 in layers/down (256, 4, 64); along dimension 1 all have 4
            fix: stacked={"layers": spmd.Stack(axis, dim=1)}, or, for what is no stack, without 'layers'
    """
    members: dict[tuple[str, str], dict[str, int]] = {}
    for path in shapes:
        own = [(stack, name) for stack, name, child in _find(path, stacks) if not child.isdigit()]
        for key, dim in zip(own, dims_of(path, stacks), strict=True):
            members.setdefault(key, {})[path] = dim
    problems = []
    for (stack, name), dims in members.items():
        sizes = {path: dict(enumerate(shapes[path])).get(dim) for path, dim in dims.items()}
        first = {size: path for path, size in reversed(sizes.items())}
        if len(first) == 1 and None not in first:
            continue
        detail = ", ".join(f"{size} in {path} {tuple(shapes[path])}" for size, path in list(first.items())[:-4:-1])
        fix = f"name in stacked= what is a stack of equal layers, and nothing else: {name!r} is in it"
        others = set.intersection(*({*enumerate(shapes[path])} for path in dims))
        if others:
            dim, size = min(others)
            detail += f"; along dimension {dim} all have {size}"
            fix = f'stacked={{"{name}": spmd.Stack(axis, dim={dim})}}, or, for what is no stack, without {name!r}'
        what = f"is stacked along dimension {min(dims.values())}, where its arrays have different sizes"
        problems.append(Problem(stack, what, detail, fix))
    return problems


def find_stacks(shapes: Mapping[str, Sequence[int]], created: Mapping[str, Sequence[int | None]]) -> dict[str, Stack]:
    """Return the stacks of a module from the shapes of its arrays as stored and as they were created.

    A stack is the outermost component below which all arrays have one more dimension, of one size. An array of unknown
    origin belongs to the stack around it, if it has the size there. The outermost stacks are split over `pipe`.

    Args:
        shapes: Path → the shape as stored.
        created: Path → the shape as created, with None for an unknown size, where its rank is known.

    Example:
        >>> shapes = {"embed/w": (8, 4), "blocks/mlp/w": (3, 4, 4), "blocks/scale": (3, 4)}
        >>> find_stacks(shapes, {"embed/w": (8, 4), "blocks/mlp/w": (4, 4)})
        {'blocks': Stack(axis='pipe', dim=0)}
    """
    found: dict[str, Stack] = {}
    _find_stacks_below("", {path: tuple(shape) for path, shape in shapes.items()}, created, "pipe", found)
    return found


def _find_stacks_below(
    parent: str,
    shapes: Mapping[str, tuple[int, ...]],
    created: Mapping[str, Sequence[int | None]],
    axis: str | None,
    found: dict[str, Stack],
) -> None:
    """Add the stacks below a component; shapes are without the dimensions of the stacks around it."""
    nodes: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, shape in shapes.items():
        name, slash, _ = path.removeprefix(parent).partition("/")
        if slash:
            nodes.setdefault(parent + name, {})[path] = shape
    for node, members in nodes.items():
        dim = _added_dim(node, members, created)
        if dim is None:
            _find_stacks_below(f"{node}/", members, created, axis, found)
        else:
            found[node] = Stack(axis, dim)
            layer = {path: without_dims(shape, (dim,)) for path, shape in members.items()}
            _find_stacks_below(f"{node}/", layer, created, None, found)


def _added_dim(
    node: str, shapes: Mapping[str, tuple[int, ...]], created: Mapping[str, Sequence[int | None]]
) -> int | None:
    """Return the dimension that was added to all arrays below a component; None if there is none."""
    is_numbered = any(path.removeprefix(f"{node}/").partition("/")[0].isdigit() for path in shapes)
    if is_numbered or not created.keys() & shapes.keys():
        return None
    choices = []
    for path, shape in shapes.items():
        own = created.get(path)
        dims = [dim for dim in range(len(shape)) if own is None or _contains(without_dims(shape, (dim,)), own)]
        choices.append({(dim, shape[dim]) for dim in dims})
    return min((dim for dim, _ in set.intersection(*choices)), default=None)


def _contains(shape: Iterable[int], created: Sequence[int | None]) -> bool:
    """Return whether a shape has the dimensions of another one in their order, perhaps with others between them."""
    left = list(created)
    for size in shape:
        if left and left[0] in (size, None):
            left.pop(0)
    return not left


def stacked_text(stacks: Mapping[str, Stack]) -> str:
    """Return stacks as the argument of a table.

    Example:
        >>> stacked_text({"blocks": Stack("pipe"), "blocks/experts": Stack(None, dim=1)})
        'stacked={"blocks": "pipe", "blocks/experts": spmd.Stack(None, dim=1)}'
    """

    entries = []
    for name, stack in stacks.items():
        axis = "None" if stack.axis is None else f'"{stack.axis}"'
        value = f"spmd.Stack({axis}, dim={stack.dim})" if stack.dim else axis
        entries.append(f'"{name}": {value}')
    return f"stacked={{{', '.join(entries)}}}"


def audit_recorded(
    shapes: Mapping[str, Sequence[int]],
    stacks: Mapping[str, Stack],
    recorded: Mapping[str, Stack],
    created: Mapping[str, int],
) -> list[Problem]:
    """Return a problem for each stack of a module that a table does not name, or along another dimension.

    Args:
        shapes: Path → the shape as stored.
        stacks: Those of the table.
        recorded: Those that were recorded where the module created its parameters.
        created: As in `ModelInfo`.

    Example:
        >>> shapes, recorded = {"blocks/w": (3, 4, 8)}, {"blocks": Stack("pipe")}
        >>> print(*audit_recorded(shapes, {"layers": Stack("pipe")}, recorded, {"blocks/w": 2}))
        blocks: is a stack of layers that the table does not name
            blocks/w was created with 2 dimensions and is stored as (3, 4, 8)
            fix: Rules(…, stacked={"blocks": "pipe"})
    """
    problems = []
    used = {name for path in shapes for _, name, child in _find(path, stacks) if not child.isdigit()}
    fix = f"Rules(…, {stacked_text({**{name: stacks[name] for name in stacks if name in used}, **recorded})})"
    for name in recorded:
        members = [path for path in shapes if path.startswith(f"{name}/")]
        for path in members:
            ours, theirs = dims_of(path, stacks), dims_of(path, recorded)
            if set(theirs) <= set(ours):
                continue
            what = "is a stack of layers that the table does not name"
            if len(ours) >= len(theirs):
                what = f"is stacked along dimension {recorded[name].dim}, and the table says another"
            first = next((member for member in members if member in created), path)
            rank = created.get(first, len(shapes[first]) - len(theirs))
            detail = f"{first} was created with {rank} dimensions and is stored as {tuple(shapes[first])}"
            problems.append(Problem(name, what, detail, fix))
            break
    for path, rank in created.items():
        is_named = any(path.startswith(f"{problem.where}/") for problem in problems)
        added = len(shapes[path]) - rank if path in shapes else 0
        if "/" not in path or is_named or added <= len(dims_of(path, stacks)):
            continue
        what = f"was created with {rank} dimensions and is stored as {tuple(shapes[path])}, and is in no stack"
        detail = "arrays beside it have no dimension of that size"
        problems.append(Problem(path, what, detail, "give what is stacked an attribute of its own"))
    return problems


def strip_layer_numbers(path: str, stacked: Collection[str]) -> str:
    """Return the path without the numbers of unrolled layers, which is the same for all layers.

    Example:
        >>> strip_layer_numbers("layers/3/experts/0/kernel", ["layers"])
        'layers/experts/0/kernel'
    """
    numbered = {prefix.count("/") + 1 for prefix, _, child in _find(path, stacked) if child.isdigit()}
    return "/".join(without_dims(path.split("/"), numbered))


def names_of(path: str, stacked: Collection[str]) -> tuple[str, ...]:
    """Return the path without the numbers of unrolled layers, and the path itself if it has some."""
    return tuple(dict.fromkeys((strip_layer_numbers(path, stacked), path)))


def insert_layer_numbers(path: str, numbers: Iterable[int], stacked: Collection[str]) -> str:
    """Return the path that one layer of a stack has when it is unrolled.

    Example:
        >>> insert_layer_numbers("decoder/layers/kernel", [3], ["layers"])
        'decoder/layers/3/kernel'
    """
    for stack, number in reversed(list(zip(stacks_of(path, stacked), numbers, strict=True))):
        path = f"{stack}/{number}{path.removeprefix(stack)}"
    return path
