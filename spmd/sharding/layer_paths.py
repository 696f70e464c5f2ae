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


def read_stacked(stacked: Any) -> dict[str, Stack]:
    """Return the stacks by path component, from a sequence of components, or from the form of `Rules.stacked`.

    Example:
        >>> read_stacked(["layers"]) == read_stacked({"layers": None}) == {"layers": Stack(axis=None, dim=0)}
        True
    """
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
