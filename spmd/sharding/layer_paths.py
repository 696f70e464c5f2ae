"""Stacks of layers: their paths (`layers/kernel`; `layers/0/kernel` unrolled) and dimensions.

A path component (or several: `encoder/layers`) whose parameters are stacked adds one dimension to
every array below it, except where a layer number follows it: that layer is unrolled.
"""

import dataclasses
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd.errors import Problem, RuleError


@dataclasses.dataclass(frozen=True)
class Stack:
    """The added dimension of a stack's arrays, and its mesh axis.

    Args:
        axis: The mesh axis that splits the dimension, or None for whole.
        dim: The index of the added dimension: that of `nn.scan(variable_axes={"params": dim})`.
        is_even: Whether the axis splits this dimension where arrays are stored. Stages of unequal
            numbers of layers are stored split along another one
            (`spmd.sharding.uneven_stages`).

    Example:
        An array (b, c) is (b, inner, c) in the inner stack, then (outer, b, inner, c):

        >>> stored_dims([Stack(dim=0), Stack(dim=1)])
        (0, 2)
    """

    axis: str | None = None
    dim: int = 0
    is_even: bool = dataclasses.field(default=True, repr=False)

    @property
    def stored_axis(self) -> str | None:
        """The axis along this dimension of an array as stored."""
        if self.is_even:
            return self.axis
        return None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim < 0:
            what = f"is along dimension {self.dim!r}"
            problem = Problem(f"{self}", what, fix="a number from 0 on, as in nn.scan")
            raise RuleError("Invalid stack:", [problem])


DEFAULT_STACKED = (("layers", "pipe"),)
"""The stacks of a table without `stacked`, for a model without recorded stacks.

Such a model consists of functions, without a module.
"""


def read_stacked(stacked: Any) -> dict[str, Stack]:
    """Return the stacks by path component, from the components or the form of `Rules.stacked`.

    Example:
        >>> read_stacked(["layers"])
        {'layers': Stack(axis=None, dim=0)}
        >>> read_stacked({"layers": "pipe"})
        {'layers': Stack(axis='pipe', dim=0)}
    """
    if stacked is None:
        stacked = DEFAULT_STACKED
    if isinstance(stacked, Mapping):
        stacked = stacked.items()
    stacks = {}
    for item in stacked:
        if isinstance(item, str):
            stacks[item] = Stack()
            continue
        name, value = item
        if not isinstance(value, Stack):
            value = Stack(value)
        stacks[name] = value
    return stacks


def stacks_of(path: str, stacked: Collection[str]) -> list[str]:
    """Return the paths of the stacks around a parameter, the outermost first.

    Example:
        >>> stacks_of("decoder/layers/kernel", ["layers"]), stacks_of("layers/0/kernel", ["layers"])
        (['decoder/layers'], [])
    """
    return [prefix for prefix, _ in _find_stacked(path, stacked)]


def _find_stacked(path: str, stacked: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of each stack around a parameter, the outermost first."""
    for prefix, name, child in _find(path, stacked):
        if not child.isdigit():
            yield prefix, name


def _find(path: str, stacked: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the path up to each stacked component, its name, and the component after it."""
    parts = path.split("/")
    for end in range(1, len(parts)):
        prefix = "/".join(parts[:end])
        for name in stacked:
            if prefix == name or prefix.endswith(f"/{name}"):
                yield prefix, name, parts[end]
                break


def own_stacks(path: str, stacks: Mapping[str, Stack]) -> tuple[Stack, ...]:
    """Return the stacks around a parameter, the outermost first."""
    own = []
    for _, name in _find_stacked(path, stacks):
        own.append(stacks[name])
    return tuple(own)


def is_staged(stacks: Sequence[Stack]) -> bool:
    """Return whether each stage of a pipeline has its own layers of the outermost of some stacks."""
    return bool(stacks) and stacks[0].axis == "pipe"


def dims_of(path: str, stacks: Mapping[str, Stack]) -> tuple[int, ...]:
    """Return the stacked dimensions of a parameter as stored, one for each of its stacks."""
    return stored_dims(own_stacks(path, stacks))


def stored_dims(stacks: Sequence[Stack]) -> tuple[int, ...]:
    """Return the dimensions of stacks in a parameter as stored.

    An outer stack shifts the dimensions of inner ones.
    """
    dims: list[int] = []
    for stack in reversed(stacks):
        for index, dim in enumerate(dims):
            if dim >= stack.dim:
                dims[index] = dim + 1
        dims.insert(0, stack.dim)
    return tuple(dims)


def insert_stacked(
    layer: Iterable[Any], values: Iterable[Any], dims: Iterable[int]
) -> tuple[Any, ...]:
    """Insert the values of stacked dimensions between those of one layer; pad with None.

    Example:
        >>> insert_stacked(["fsdp", "tensor"], ["pipe"], [1]), insert_stacked([], ["pipe"], [1])
        (('fsdp', 'pipe', 'tensor'), (None, 'pipe'))
    """
    entries = list(layer)
    pairs = zip(dims, values, strict=True)
    for dim, value in sorted(pairs, key=operator.itemgetter(0)):
        entries += [None] * (dim - len(entries))
        entries.insert(dim, value)
    return tuple(entries)


def without_dims(values: Iterable[Any], dims: Collection[int]) -> tuple[Any, ...]:
    """Return the values, such as sizes, without those at the positions `dims`."""
    return tuple(value for dim, value in enumerate(values) if dim not in dims)


def audit_stacks(shapes: Mapping[str, Sequence[int]], stacks: Mapping[str, Stack]) -> list[Problem]:
    """Return a problem for each stack with arrays of different sizes along its dimension.

    This size is the number of layers.

    Example:
        >>> shapes = {"h/up": (64, 4, 256), "h/down": (256, 4, 64)}
        >>> print(*audit_stacks(shapes, {"h": Stack()}))
        h: is stacked along dimension 0, where its arrays have different sizes
            64 in h/up (64, 4, 256), 256 in h/down (256, 4, 64); along dimension 1 all have 4
            fix: stacked={"h": spmd.Stack(axis, dim=1)}, or, for what is no stack, without 'h'
    """
    members: dict[tuple[str, str], dict[str, int]] = {}
    for path in shapes:
        for stack, name, dim in _stacked_dims(path, stacks):
            members.setdefault((stack, name), {})[path] = dim
    problems = []
    for (stack, name), dims in members.items():
        first = _first_with_each_size(dims, shapes)
        if len(first) == 1 and None not in first:
            continue
        shown = []
        for size, path in list(first.items())[:3]:
            shown.append(f"{size} in {path} {tuple(shapes[path])}")
        detail = ", ".join(shown)
        fix = (
            f"name in stacked= what is a stack of equal layers, and nothing else: {name!r} is in it"
        )
        common = _common_dims(dims, shapes)
        if common:
            dim, size = min(common)
            detail += f"; along dimension {dim} all have {size}"
            fix = (
                f'stacked={{"{name}": spmd.Stack(axis, dim={dim})}}, or, for what is no stack, '
                f"without {name!r}"
            )
        problem = Problem(
            stack,
            f"is stacked along dimension {min(dims.values())}, where its arrays have different "
            "sizes",
            detail,
            fix,
        )
        problems.append(problem)
    return problems


def undivided_stacks(
    shapes: Mapping[str, Sequence[int]], stacks: Mapping[str, Stack], axes: Mapping[str, int]
) -> dict[str, Problem]:
    """Return stack → problem, for numbers of layers not divisible by their axis.

    Stacks of groups of layers have the number of groups.

    Example:
        >>> shapes = {"h/up": (3, 4, 256), "h/down": (3, 256, 4)}
        >>> print(undivided_stacks(shapes, {"h": Stack("pipe")}, {"pipe": 2})["h"])
        h: has a number of layers or groups of layers that pipe does not divide
            3 / (pipe=2) = 1.5
            fix: a multiple of 2, or another size of pipe
    """
    problems = {}
    for path, shape in shapes.items():
        for stack, name, dim in _stacked_dims(path, stacks):
            axis = stacks[name].stored_axis
            if axis is None or axis not in axes or dim >= len(shape):
                continue
            size = shape[dim]
            shards = axes[axis]
            if size % shards == 0:
                continue
            what = f"has a number of layers or groups of layers that {axis} does not divide"
            detail = f"{size} / ({axis}={shards}) = {size / shards:.4g}"
            fix = f"a multiple of {shards}, or another size of {axis}"
            problems[stack] = Problem(stack, what, detail, fix)
    return problems


def uneven_stacks(
    shapes: Mapping[str, Sequence[int]], stacks: Mapping[str, Stack], axis: str, parts: int
) -> set[str]:
    """Return the names of stacks over an axis with more layers than its parts, not a multiple.

    Where stacks share a name, none has fewer layers.

    Example:
        >>> stacks = {"h": Stack("pipe")}
        >>> uneven_stacks({"h/up": (3, 4)}, stacks, "pipe", 2)
        {'h'}
        >>> uneven_stacks({"h/up": (3, 4)}, stacks, "pipe", 4)
        set()
    """
    counts: dict[str, set[int]] = {}
    for path, shape in shapes.items():
        for _, name, dim in _stacked_dims(path, stacks):
            if stacks[name].axis == axis and dim < len(shape):
                counts.setdefault(name, set()).add(shape[dim])
    names = set()
    for name, layers in counts.items():
        if min(layers) >= parts and any(count % parts for count in layers):
            names.add(name)
    return names


def drop_stacks(
    spec: Sequence[Any], path: str, stacks: Mapping[str, Stack], dropped: Collection[str]
) -> tuple[Any, ...]:
    """Return the entries of a parameter's spec as stored, with None for dimensions of some stacks."""
    entries = list(spec)
    for stack, _, dim in _stacked_dims(path, stacks):
        if stack in dropped and dim < len(entries):
            entries[dim] = None
    return tuple(entries)


def _stacked_dims(path: str, stacks: Mapping[str, Stack]) -> list[tuple[str, str, int]]:
    """Return the path, the name and the dimension as stored of each stack around a parameter."""
    found = []
    for (stack, name), dim in zip(_find_stacked(path, stacks), dims_of(path, stacks), strict=True):
        found.append((stack, name, dim))
    return found


def _first_with_each_size(
    dims: dict[str, int], shapes: Mapping[str, Sequence[int]]
) -> dict[int | None, str]:
    """Return size along the stacked dimension → the first path with it.

    The size of an array without this dimension is None.
    """
    first: dict[int | None, str] = {}
    for path, dim in reversed(list(dims.items())):
        size = dict(enumerate(shapes[path])).get(dim)
        first[size] = path
    return dict(reversed(list(first.items())))


def _common_dims(paths: Iterable[str], shapes: Mapping[str, Sequence[int]]) -> set[tuple[int, int]]:
    """Return the dimensions of equal size in all arrays, as pairs of index and size."""
    dims = [set(enumerate(shapes[path])) for path in paths]
    return set.intersection(*dims)


def find_stacks(
    shapes: Mapping[str, Sequence[int]], created: Mapping[str, Sequence[int | None]]
) -> dict[str, Stack]:
    """Return the stacks of a module, from the shapes of its arrays as stored and as created.

    A stack is the outermost component below which all arrays have one more dimension, of one size.
    An array of unknown origin belongs to the stack around it, if it has the size there. The
    outermost stacks are split over `pipe`.

    Args:
        shapes: Path → the shape as stored.
        created: Path → the shape as created, where its rank is known; None for an unknown size.

    Example:
        >>> shapes = {"embed/w": (8, 4), "blocks/mlp/w": (3, 4, 4), "blocks/scale": (3, 4)}
        >>> find_stacks(shapes, {"embed/w": (8, 4), "blocks/mlp/w": (4, 4)})
        {'blocks': Stack(axis='pipe', dim=0)}
    """
    found: dict[str, Stack] = {}
    _find_stacks_below("", shapes, created, "pipe", found)
    return found


def _find_stacks_below(
    parent: str,
    shapes: Mapping[str, Sequence[int]],
    created: Mapping[str, Sequence[int | None]],
    axis: str | None,
    found: dict[str, Stack],
) -> None:
    """Add the stacks below a component; shapes lack the dimensions of the stacks around it."""
    nodes: dict[str, dict[str, Sequence[int]]] = {}
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
            layer = {}
            for path, shape in members.items():
                layer[path] = without_dims(shape, (dim,))
            _find_stacks_below(f"{node}/", layer, created, None, found)


def _added_dim(
    node: str,
    shapes: Mapping[str, Sequence[int]],
    created: Mapping[str, Sequence[int | None]],
) -> int | None:
    """Return the added dimension of all arrays below a component; None if there is none."""
    if not created.keys() & shapes.keys():
        return None
    choices = []
    for path, shape in shapes.items():
        child = path.removeprefix(f"{node}/").partition("/")[0]
        if child.isdigit():
            return None
        choices.append(_possibly_added(shape, created.get(path)))
    common = set.intersection(*choices)
    if not common:
        return None
    dim, _ = min(common)
    return dim


def _possibly_added(
    shape: Sequence[int], created: Sequence[int | None] | None
) -> set[tuple[int, int]]:
    """Return the index and size of each dimension possibly added since creation."""
    found = set()
    for dim, size in enumerate(shape):
        if created is None or _contains(without_dims(shape, (dim,)), created):
            found.add((dim, size))
    return found


def _contains(shape: Iterable[int], created: Sequence[int | None]) -> bool:
    """Return whether a shape has the sizes `created` as a subsequence; None is any size."""
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
        value = "None"
        if stack.axis is not None:
            value = f'"{stack.axis}"'
        if stack.dim:
            value = f"spmd.Stack({value}, dim={stack.dim})"
        entries.append(f'"{name}": {value}')
    return f"stacked={{{', '.join(entries)}}}"


def audit_recorded(
    shapes: Mapping[str, Sequence[int]],
    stacks: Mapping[str, Stack],
    recorded: Mapping[str, Stack],
    created: Mapping[str, int],
) -> list[Problem]:
    """Return a problem for each recorded stack missing in a table or along another dimension.

    Args:
        shapes: Path → the shape as stored.
        stacks: Those of the table.
        recorded: Those recorded where the module created its parameters.
        created: As in `ModelInfo`.

    Example:
        >>> shapes, recorded = {"blocks/w": (3, 4, 8)}, {"blocks": Stack("pipe")}
        >>> print(*audit_recorded(shapes, {"layers": Stack("pipe")}, recorded, {"blocks/w": 2}))
        blocks: is a stack of layers that the table does not name
            blocks/w was created with 2 dimensions and is stored as (3, 4, 8)
            fix: Rules(…, stacked={"blocks": "pipe"})
    """
    complete = {**_used_stacks(shapes, stacks), **recorded}
    fix = f"Rules(…, {stacked_text(complete)})"
    problems = []
    for name in recorded:
        problem = _audit_recorded_stack(name, shapes, stacks, recorded, created, fix)
        if problem is not None:
            problems.append(problem)
    for path, rank in created.items():
        if "/" not in path or path not in shapes:
            continue
        is_named = any(path.startswith(f"{problem.where}/") for problem in problems)
        added = len(shapes[path]) - rank
        if is_named or added <= len(dims_of(path, stacks)):
            continue
        shape = tuple(shapes[path])
        problem = Problem(
            path,
            f"was created with {rank} dimensions and is stored as {shape}, and is in no stack",
            detail="arrays beside it have no dimension of that size",
            fix="give what is stacked an attribute of its own",
        )
        problems.append(problem)
    return problems


def _used_stacks(paths: Iterable[str], stacks: Mapping[str, Stack]) -> dict[str, Stack]:
    """Return the stacks with parameters, in the order of the table."""
    used = set()
    for path in paths:
        for _, name in _find_stacked(path, stacks):
            used.add(name)
    found = {}
    for name, stack in stacks.items():
        if name in used:
            found[name] = stack
    return found


def _audit_recorded_stack(
    name: str,
    shapes: Mapping[str, Sequence[int]],
    stacks: Mapping[str, Stack],
    recorded: Mapping[str, Stack],
    created: Mapping[str, int],
    fix: str,
) -> Problem | None:
    """Return the problem of one recorded stack, with a parameter as evidence."""
    members = [path for path in shapes if path.startswith(f"{name}/")]
    for path in members:
        ours = dims_of(path, stacks)
        theirs = dims_of(path, recorded)
        if set(theirs) <= set(ours):
            continue
        what = "is a stack of layers that the table does not name"
        if len(ours) >= len(theirs):
            what = f"is stacked along dimension {recorded[name].dim}, and the table says another"
        first = next((member for member in members if member in created), path)
        rank = created.get(first, len(shapes[first]) - len(theirs))
        shape = tuple(shapes[first])
        detail = f"{first} was created with {rank} dimensions and is stored as {shape}"
        return Problem(name, what, detail, fix)
    return None


def strip_layer_numbers(path: str, stacked: Collection[str]) -> str:
    """Return the path without the numbers of unrolled layers, the same for all layers.

    Example:
        >>> strip_layer_numbers("layers/3/experts/0/kernel", ["layers"])
        'layers/experts/0/kernel'
    """
    numbered = set()
    for prefix, _, child in _find(path, stacked):
        if child.isdigit():
            numbered.add(prefix.count("/") + 1)  # the index of the number after the prefix
    return "/".join(without_dims(path.split("/"), numbered))


def names_of(path: str, stacked: Collection[str]) -> tuple[str, ...]:
    """Return the path without the numbers of unrolled layers, and the unchanged path, each once."""
    return tuple(dict.fromkeys((strip_layer_numbers(path, stacked), path)))


def insert_layer_numbers(path: str, numbers: Iterable[int], stacked: Collection[str]) -> str:
    """Return the path of a parameter in one layer of its stacks, when these are unrolled.

    Example:
        >>> insert_layer_numbers("decoder/layers/kernel", [3], ["layers"])
        'decoder/layers/3/kernel'
    """
    numbered = list(zip(stacks_of(path, stacked), numbers, strict=True))
    for stack, number in reversed(numbered):  # the innermost first: outer paths stay as they are
        path = f"{stack}/{number}{path.removeprefix(stack)}"
    return path
