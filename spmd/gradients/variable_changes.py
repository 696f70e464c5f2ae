"""The changes of a model's variables by its forward pass, read from the traced loss.

| | such as | its next value depends on |
|---|---|---|
| unchanged | tables, masks, biases of routers | |
| changed by itself | random state of dropout | variables alone |
| changed by the examples | batch statistics | the batch, the parameters or the step's key, too |

Values of the second kind are known before any microbatch runs. Those of the third are not read in
training, as a rule: of batch statistics the mean of the batch is used, and the running mean only
kept.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from spmd import tree
from spmd.gradients.losses import LossFn, ModelLoss, check_returned
from spmd.jaxpr.dependence import dependent_outputs, needed_inputs
from spmd.jaxpr.forwarding import forwarded_inputs
from spmd.plan.context import current
from spmd.plan.fsdp import params_for_forward


@dataclasses.dataclass(frozen=True, eq=False)
class VariableChanges:
    """The changes of variables by a loss.

    Attributes:
        by_itself: Paths of the variables whose next value depends on variables alone.
        by_examples: Paths of those whose next value depends on anything else, too.
        variables: All variables, before the first microbatch.
        program: The loss as a function from the leaves of `(variables, arguments)` to those of
            `(next variables, sums)`.
        arguments: All other arguments of the loss.
    """

    by_itself: Sequence[str]
    by_examples: Sequence[str]
    variables: Any
    program: ClosedJaxpr
    arguments: Any

    def read_among(self, carried: Collection[str]) -> list[str]:
        """Return the carried variables needed for the sums, or for any other variable.

        Args:
            carried: Paths of variables.
        """
        others = self._outputs(lambda path: path not in carried, sums=True)
        is_read = needed_inputs(self.program, others)
        found = []
        for number, path in enumerate(tree.flatten(self.variables)):  # these are the first inputs
            if is_read[number] and path in carried:
                found.append(path)
        return found

    def _outputs(self, is_wanted: Callable[[str], bool], *, sums: bool) -> list[bool]:
        """Return a flag for each output of the program: variables by their paths, and all sums."""
        flags = list(map(is_wanted, tree.flatten(self.variables)))
        flags += [sums] * (len(self.program.out_avals) - len(flags))
        return flags

    def before_each(self, changing: Any, microbatches: int) -> tuple[Any, Any]:
        """Return variables of `by_itself`: before each microbatch, and after all.

        Args:
            changing: The part of the variables to return.

        Returns:
            Trees like `changing` with arrays `[…, microbatch]`, and with arrays `[…]`.
        """
        first = tree.flatten(self.variables)
        own = tree.flatten(changing)
        is_own = self._outputs(own.__contains__, sums=False)
        part, _ = dce_jaxpr(self.program.jaxpr, is_own, instantiate=True)
        advanced = jaxpr_as_fun(ClosedJaxpr(part, self.program.consts))

        def advance(now: Any, _: None) -> tuple[Any, Any]:
            given = first | tree.flatten(now)
            results = advanced(*given.values(), *jax.tree.leaves(self.arguments))
            return jax.tree.unflatten(jax.tree.structure(now), results), now

        after, before = jax.lax.scan(advance, changing, length=microbatches)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), before), after


def may_change(loss_fn: LossFn, variables: Any) -> list[str]:
    """Return the paths of variables to read the changes of: a loss may change these.

    It changes neither frozen parameters nor what a model changes once a step
    (`ModelInfo.step_variables`).
    """
    constant = set(current().placements)
    if isinstance(loss_fn, ModelLoss):
        constant |= loss_fn.model.info().step_variables
    return [path for path in tree.flatten(variables) if path not in constant]


def read_changes(
    loss_fn: LossFn, params: Any, variables: Any, batch: Any, key: jax.Array
) -> VariableChanges:
    """Trace a loss, and return how it changes the variables."""

    def after(variables: Any, arguments: Any) -> Any:
        params, batch, key = arguments
        returned = loss_fn(params_for_forward(params), variables, batch, key)
        sums, found = check_returned(returned, variables)
        return found, sums

    arguments = params, batch, key
    program = jax.make_jaxpr(after)(variables, arguments)
    paths = list(tree.flatten(variables))
    is_other = [False] * len(paths) + [True] * len(jax.tree.leaves(arguments))
    by_itself = list[str]()
    by_examples = list[str]()
    sources = forwarded_inputs(program)
    of_examples = dependent_outputs(program, is_other)
    for number, path in enumerate(paths):  # sums follow the variables
        if sources[number] == number:
            continue
        changed = by_examples if of_examples[number] else by_itself
        changed.append(path)
    return VariableChanges(by_itself, by_examples, variables, program, arguments)
