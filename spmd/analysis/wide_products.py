"""Products of a step left in float32 under a policy with a narrower compute dtype, by line."""

import dataclasses
from collections import Counter
from typing import Any

from spmd import tree
from spmd.jaxpr.promoted import split_products
from spmd.jaxpr.source import equation_line
from spmd.plan.scopes import OPTIMIZER
from spmd.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class WideProducts:
    """The products of a step by the dtype of their operands.

    Attributes:
        compute: The compute dtype of the plan.
        narrow: Number of products, forward and backward, with an operand in it.
        wide: `(primitive, file:line)` of the others → their number.
    """

    compute: str
    narrow: int
    wide: dict[tuple[str, str], int]

    def __str__(self) -> str:
        total = self.narrow + sum(self.wide.values())
        lines = [f"{self.narrow} of {total} products of this step are in {self.compute}"]
        if self.wide:
            lines[0] += "; wider are:"
        for (primitive, line), count in self.wide.items():
            lines.append(f"{primitive} ×{count} at {line}")
        return "\n  ".join(lines)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the wide products as JSON values."""
        records = []
        for (primitive, line), count in self.wide.items():
            records.append({"primitive": primitive, "source": line, "count": count})
        return records


def find_wide_products(step: TrainStep, batch: Any) -> WideProducts:
    """List the products of a step wider than the plan's compute dtype.

    Nothing is compiled. Products of the optimizer, which works in its own dtype, are not listed.

    Args:
        batch: A batch, which may be abstract.
    """
    dtype = step.plan.precision.compute_dtype
    narrow, wide = split_products(step.trace(batch).jaxpr, dtype, outside=OPTIMIZER)
    counts = Counter[tuple[str, str]]()
    for equation in wide:
        counts[equation.primitive.name, equation_line([equation])] += 1
    return WideProducts(dtype.name, len(narrow), dict(counts))


def is_listed(step: TrainStep) -> bool:
    """Return whether a plan should list its wide products.

    It should if its compute dtype is narrower than float32 and some layers do not cast their
    parameters themselves.
    """
    plan = step.plan
    if plan.precision.compute_dtype.itemsize >= 4:
        return False
    params = tree.flatten(plan.abstract_params)
    return not plan.model.info().cast_by_layer.issuperset(params)
