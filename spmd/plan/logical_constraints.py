"""Sharding constraints that a model of Flax writes with logical names, such as `nn.with_logical_constraint`.

Flax resolves them by the rules in its own context, and skips them without rules or without a mesh. Under a plan both
are there: the rules are the logical rows of the plan's table, and a name without a row is an error.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
from jax.sharding import get_abstract_mesh, use_abstract_mesh

from spmd.errors import AnnotationError, Problem
from spmd.plan.context import current

_TITLE = "The model constrains activations by names that the plan does not know:"


@contextlib.contextmanager
def read_logical_constraints() -> Iterator[None]:
    """Give Flax the plan's mesh and logical rows while a model is traced; outside a plan, do nothing.

    Axes that are manual around the model split nothing there.
    """
    context = current()
    if context.mesh is None:
        yield
        return
    around = get_abstract_mesh()
    rows = [(name, _without(axes, around.manual_axes)) for name, axes in context.logical]
    with contextlib.ExitStack() as stack:
        stack.enter_context(nn.logical_axis_rules(_Rows(rows)))
        if rows and not around.manual_axes:
            stack.enter_context(use_abstract_mesh(context.mesh.abstract_mesh))
        yield


class _Rows(list[tuple[Any, Any]]):
    """Logical rules, behind one that Flax compares with the names of a constraint: it knows those with a row."""

    def __init__(self, rows: list[tuple[str, Any]]) -> None:
        super().__init__([(_Known([name for name, _ in rows]), None), *rows])


class _Known:
    """The names with a row; equal to nothing, and a comparison with another name is an error."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other not in self.names:
            known = f"the rows are for {', '.join(self.names)}" if self.names else "the table has no logical rows"
            fix = f"Rules(logical=[({other!r}, axis)]), or ({other!r}, None) to leave the dimension whole"
            raise AnnotationError(_TITLE, [Problem(f"logical name {other!r}", "has no row", known, fix)])
        return False


def _without(axes: tuple[str, ...], manual: frozenset[str]) -> tuple[str, ...] | None:
    return tuple(axis for axis in axes if axis not in manual) or None
