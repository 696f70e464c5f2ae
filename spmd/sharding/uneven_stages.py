"""Storage of layers in unequal stages: split over `pipe` along another dimension.

126 layers on 8 stages are 16 on six of them and 15 on two. JAX splits a dimension into equal parts
alone, so each parameter of such a stack is stored split over `pipe` along a dimension of one layer,
after the axes of its row; a pipeline moves the layers to their stages
(`spmd.pipeline.layer_split`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

from spmd.sharding.layer_paths import dims_of, own_stacks, uneven_stacks, without_dims
from spmd.sharding.mesh import GATHERED_AXES, entry_axes, shards_of
from spmd.sharding.rules import Rules


def with_uneven_stages(
    rules: Rules, shapes: Mapping[str, Sequence[int]], axes: Mapping[str, int]
) -> Rules:
    """Return the table with another storage for layers in unequal stages.

    Where there are fewer layers than stages, the audit of the table reports it.

    Args:
        shapes: Path → the shape as stored.
        axes: Axis → size.

    Example:
        >>> rules = Rules([("up/kernel", P("fsdp", "tensor"))], stacked={"layers": "pipe"})
        >>> axes = {"pipe": 2, "fsdp": 4, "tensor": 2}
        >>> uneven = with_uneven_stages(rules, {"layers/up/kernel": (5, 16, 64)}, axes)
        >>> uneven.match("layers/up/kernel").spec == P(None, ("fsdp", "pipe"), "tensor")
        True
    """
    if not all(stack.is_even for stack in rules.stacks.values()):  # of a plan of another mesh
        rules = _as_written(rules)
    names = uneven_stacks(shapes, rules.stacks, "pipe", axes.get("pipe", 1))
    if not names:
        return rules
    stacks = dict(rules.stacks)
    for name in names:
        stacks[name] = dataclasses.replace(stacks[name], is_even=False)
    over_stages = {}
    for path, shape in shapes.items():
        match = rules.match(path)
        around = own_stacks(path, stacks)
        is_even = not around or around[0].is_even
        if is_even or match is None or not isinstance(match.requested, P):
            continue
        layer = without_dims(shape, dims_of(path, stacks))
        dim = _dim_over_stages(layer, match.requested, axes)
        if dim is not None:
            over_stages[path] = dim
    return dataclasses.replace(rules, stacked=stacks, over_stages=FrozenDict(over_stages))


def _as_written(rules: Rules) -> Rules:
    """Return a table without the storage that a plan added to it."""
    stacks = {}
    for name, stack in rules.stacks.items():
        stacks[name] = dataclasses.replace(stack, is_even=True)
    return dataclasses.replace(rules, stacked=stacks, over_stages=FrozenDict())


def _dim_over_stages(shape: Sequence[int], spec: P, axes: Mapping[str, int]) -> int | None:
    """Return the dimension of a layer to split over stages too; None if none divides.

    A dimension that is gathered for its use comes first, then a whole one: those are used whole,
    so a shard stays one block.
    """
    choices = list[tuple[int, int]]()
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for dim, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        own = entry_axes(entry)
        if not axes.keys() >= {*own} or size % (shards_of(entry, axes) * axes["pipe"]):
            continue
        rank = 2
        if not own:
            rank = 1
        if not {*own}.isdisjoint(GATHERED_AXES):
            rank = 0
        choices.append((rank, dim))
    if not choices:
        return None
    return min(choices)[1]
