"""Paths of layers, which are stacked in one array (`layers/kernel`) or unrolled (`layers/0/kernel`).

`stacked` holds the path components whose parameters are stacked. Such a component adds one leading dimension to every
array below it, except where a layer number follows it: that layer is unrolled.
"""

from collections.abc import Collection, Iterable


def stacks_of(path: str, stacked: Collection[str]) -> list[str]:
    """Return the paths of the stacks that hold a parameter, one for each of its leading dimensions.

    Example:
        >>> stacks_of("decoder/layers/kernel", ["layers"]), stacks_of("layers/0/kernel", ["layers"])
        (['decoder/layers'], [])
    """
    parts = path.split("/")
    ends = [i for i in range(1, len(parts)) if parts[i - 1] in stacked and not parts[i].isdigit()]
    return ["/".join(parts[:end]) for end in ends]


def strip_layer_numbers(path: str, stacked: Collection[str]) -> str:
    """Return the path without the numbers of unrolled layers, which is the same for all layers.

    Example:
        >>> strip_layer_numbers("layers/3/experts/0/kernel", ["layers"])
        'layers/experts/0/kernel'
    """
    parts = path.split("/")
    pairs = zip(("", *parts), parts, strict=False)
    return "/".join(part for before, part in pairs if not (before in stacked and part.isdigit()))


def insert_layer_numbers(path: str, numbers: Iterable[int], stacked: Collection[str]) -> str:
    """Return the path that one layer of a stack has when it is unrolled.

    Example:
        >>> insert_layer_numbers("decoder/layers/kernel", [3], ["layers"])
        'decoder/layers/3/kernel'
    """
    for stack, number in reversed(list(zip(stacks_of(path, stacked), numbers, strict=True))):
        path = f"{stack}/{number}{path.removeprefix(stack)}"
    return path
