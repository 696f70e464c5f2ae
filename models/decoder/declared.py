"""Rows of a rule table, declared by the parts of a layer, and the error for a part of another kind."""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Replicate

Axes = str | tuple[str, ...]
"""Axes over which parameters are split and gathered: `fsdp`, `sequence`, and `expert` in models with
experts."""

TOKENS = P(BATCH_AXES, "sequence")
"""`[batch, seq, …]`: all channels on each device of `tensor`."""
HIDDEN = P(BATCH_AXES, "sequence", "tensor")
"""`[batch, seq, hidden, …]`: hidden units, heads or channels are split over `tensor`."""


ParamRow = tuple[str, P | Replicate]
"""Pattern of paths, and their spec."""


class MissingPartError(Exception):
    """A decoder has no part of the kind that is asked for, such as experts."""


@dataclasses.dataclass(frozen=True)
class TableRows:
    """TableRows of a rule table: pattern of paths → spec, and activation → spec."""

    params: tuple[ParamRow, ...] = ()
    activations: tuple[tuple[str, P], ...] = ()

    def __add__(self, other: "TableRows") -> "TableRows":
        """Return both tables' rows, each once."""
        params = dict.fromkeys((*self.params, *other.params))
        activations = dict.fromkeys((*self.activations, *other.activations))
        return TableRows(tuple(params), tuple(activations))


def each_axis(axes: Axes) -> tuple[str, ...]:
    """Return the names of axes one by one."""
    if isinstance(axes, str):
        return (axes,)
    return axes


def hidden(*names: str) -> tuple[tuple[str, P], ...]:
    """Return rows of activations split over `tensor`."""
    return tuple((name, HIDDEN) for name in names)
