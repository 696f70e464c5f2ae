"""The variables of a model in a pipeline, before each of its microbatches.

Variables that change by themselves, such as the random state of dropout, are computed for all
microbatches before the first one enters. So each task reads those of its microbatch, in any order
of tasks, and again in its backward task.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import first_microbatch
from spmd.gradients.losses import ModelLoss
from spmd.gradients.variable_changes import VariableChanges, may_change, read_changes
from spmd.model_interface.model import NO_PIPELINE
from spmd.pipeline.interleave import AXIS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicrobatchVariables:
    """Variables of some parts of a model.

    Attributes:
        fixed: Those that are the same for all microbatches.
        changing: Others, `[…, microbatch]`.
    """

    fixed: Any
    changing: Any

    def at(self, i: jax.Array | int) -> Any:
        """Return the variables before a microbatch."""

        def read(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, i, axis=-1, keepdims=False)

        return tree.merge(self.fixed, jax.tree.map(read, self.changing))

    def map(self, function: Callable[[Any], Any]) -> "MicrobatchVariables":
        """Apply a function to both nested dictionaries."""
        return MicrobatchVariables(function(self.fixed), function(self.changing))


def variables_by_microbatch(
    loss_fn: ModelLoss, params: Any, variables: Any, batch: Any, key: jax.Array, microbatches: int
) -> tuple[MicrobatchVariables, Any]:
    """Return the variables before each microbatch, and those after the last one.

    Raises:
        ConfigError: Examples change some of the variables, such as batch statistics.
    """
    # Around a stage, an exchange once a step has refused variables that change.
    if not may_change(loss_fn, variables) or AXIS in get_abstract_mesh().manual_axes:
        return MicrobatchVariables(variables, {}), variables
    first = first_microbatch(batch, microbatches)
    changes = read_changes(loss_fn, params, variables, first, key)
    problems = list(_problems(changes))
    if problems:
        raise ConfigError(NO_PIPELINE, problems)

    def changes_below(path: str) -> bool:  # a list of arrays is one leaf of `tree.select`
        return any(f"{own}/".startswith(f"{path}/") for own in changes.by_itself)

    changing = tree.select(variables, changes_below)
    fixed = tree.select(variables, lambda path: not changes_below(path))
    before, after = changes.before_each(changing, variables, microbatches)
    return MicrobatchVariables(fixed, before), tree.merge(fixed, after)


def _problems(changes: VariableChanges) -> Iterator[Problem]:
    """Yield a problem for each variable changed by the examples."""
    for path in changes.by_examples:
        yield Problem(
            path,
            "is a variable that the examples of each microbatch change, such as a batch statistic",
            "stages run several microbatches at the same time",
            "pipe=1",
        )
