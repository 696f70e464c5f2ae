"""The variables of a model in a pipeline, before each of its microbatches.

Variables that change by themselves, such as the random state of dropout, are computed for all
microbatches before the first one enters. So each task reads those of its microbatch, in any order
of tasks, and again in its backward task.

Variables that the examples change, such as batch statistics, are kept by the stage of their layers:
each forward task takes those that its last one left. Training does not read them, so they are not
kept for backward tasks.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
        changing: Those that change by themselves, `[…, microbatch]`.
        statistics: Those that the examples change, before the first microbatch, or before the one
            of a forward task. Only their next values depend on them.
    """

    fixed: Any
    changing: Any
    statistics: Any

    def at(self, i: jax.Array | int) -> Any:
        """Return the variables before a microbatch."""

        def read(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, i, axis=-1, keepdims=False)

        return tree.merge(self.fixed, jax.tree.map(read, self.changing), self.statistics)

    def with_statistics(self, statistics: Any) -> "MicrobatchVariables":
        """Return the same variables with other statistics."""
        return dataclasses.replace(self, statistics=statistics)

    def statistics_of(self, variables: Any) -> Any:
        """Return the statistics among the variables after a microbatch."""
        return tree.part_like(variables, self.statistics)

    def map(self, function: Callable[[Any], Any]) -> "MicrobatchVariables":
        """Apply a function to each nested dictionary."""
        return MicrobatchVariables(
            function(self.fixed), function(self.changing), function(self.statistics)
        )


def variables_by_microbatch(
    loss_fn: ModelLoss, params: Any, variables: Any, batch: Any, key: jax.Array, microbatches: int
) -> tuple[MicrobatchVariables, Any]:
    """Return the variables before each microbatch, and those after the last one.

    The latter are without statistics.

    Raises:
        ConfigError: The loss reads variables that the examples change.
    """
    # Around a stage, an exchange once a step has refused variables that change.
    if not may_change(loss_fn, variables) or AXIS in get_abstract_mesh().manual_axes:
        return MicrobatchVariables(variables, {}, {}), variables
    first = first_microbatch(batch, microbatches)
    changes = read_changes(loss_fn, params, variables, first, key)

    def has(paths: Sequence[str], leaf: str) -> bool:  # a list of arrays is one leaf
        return any(f"{path}/".startswith(f"{leaf}/") for path in paths)

    def is_statistic(leaf: str) -> bool:
        return has(changes.by_examples, leaf)

    def is_changing(leaf: str) -> bool:
        return has(changes.by_itself, leaf) and not is_statistic(leaf)

    statistics = tree.select(variables, is_statistic)
    problems = list(_problems(changes, statistics))
    if problems:
        raise ConfigError(NO_PIPELINE, problems)
    changing = tree.select(variables, is_changing)
    fixed = tree.select(variables, lambda leaf: not (is_statistic(leaf) or is_changing(leaf)))
    before, after = changes.before_each(changing, microbatches)
    return MicrobatchVariables(fixed, before, statistics), tree.merge(fixed, after)


def check_no_statistics(variables: MicrobatchVariables) -> None:
    """Raise a `ConfigError` for variables that the examples of an evaluation change."""
    problems = []
    for path in tree.flatten(variables.statistics):
        what = "is changed by the examples of an evaluation, which keeps no variables"
        problems.append(Problem(path, what, fix="the loss in evaluation mode, train=False"))
    if problems:
        raise ConfigError(NO_PIPELINE, problems)


def _problems(changes: VariableChanges, statistics: Any) -> Iterator[Problem]:
    """Yield a problem for each variable that examples change and training reads.

    A list is carried whole.
    """
    for path in changes.read_among(tree.flatten(statistics).keys()):
        what = "is in a list with variables that the examples change, and the loss reads it"
        fix = "outside of this list"
        if path in changes.by_examples:
            what = "changes with each microbatch, and the loss or another variable reads it"
            fix = "pipe=1"
        detail = "its stage may have gone on to later microbatches when a backward task reads it"
        yield Problem(path, what, detail, fix)
