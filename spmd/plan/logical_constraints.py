"""Sharding constraints with logical names in models of Flax, as by `nn.with_logical_constraint`.

Flax resolves them by the rules in its own context, and skips them without rules or without a mesh.
Under a plan it gets both: the rules are the logical rows of the plan's table, and a name without a
row is an error.
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
    """Give Flax the plan's mesh and logical rows while a model is traced.

    Outside a plan, do nothing. Axes that are manual around the model are removed from the rows.
    """
    context = current()
    if context.mesh is None:
        yield
        return
    manual = get_abstract_mesh().manual_axes
    rows = []
    for name, axes in context.logical:
        rows.append((name, _without(axes, manual)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(nn.logical_axis_rules(_Rows(rows)))
        if rows and not manual:
            stack.enter_context(use_abstract_mesh(context.mesh.abstract_mesh))
        yield


class _Rows(list[tuple[Any, Any]]):
    """Logical rules with a first rule to catch names without a row.

    Flax compares the name of the first rule with each name of a constraint (`_Known.__eq__`).
    """

    def __init__(self, rows: list[tuple[str, Any]]) -> None:
        known = _Known([name for name, _ in rows])
        super().__init__([(known, None), *rows])


class _Known:
    """The names with a row; equal to nothing, and a comparison with another name is an error."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str) or other in self.names:
            return False
        known = "the table has no logical rows"
        if self.names:
            known = f"the rows are for {', '.join(self.names)}"
        fix = (
            f"Rules(logical=[({other!r}, axis)]), or ({other!r}, None) to leave the dimension whole"
        )
        problem = Problem(f"logical name {other!r}", "has no row", known, fix)
        raise AnnotationError(_TITLE, [problem])


def _without(axes: tuple[str, ...], manual: frozenset[str]) -> tuple[str, ...] | None:
    return tuple(axis for axis in axes if axis not in manual) or None
