"""The changes of a model's variables by its forward pass, read from the traced loss.

| | such as | its next value depends on |
|---|---|---|
| unchanged | tables, masks | |
| changed by itself | random state of dropout | variables alone |
| changed by the examples | batch statistics | the batch or the parameters, too |

Values of the second kind are known before any microbatch runs.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from spmd import tree
from spmd.gradients.losses import LossFn, check_returned
from spmd.jaxpr.dependence import changed_inputs, needed_inputs
from spmd.plan.fsdp import params_for_forward


@dataclasses.dataclass(frozen=True, eq=False)
class VariableChanges:
    """The changes of variables by a loss.

    Attributes:
        by_itself: Paths of the variables whose next value depends on variables alone.
        by_examples: Paths of those whose next value depends on the batch or the parameters, too.
    """

    by_itself: Sequence[str]
    by_examples: Sequence[str]
    _program: ClosedJaxpr
    _others: Sequence[Any]

    def before_each(self, variables: Any, microbatches: int) -> tuple[Any, Any]:
        """Return the variables that change by themselves: before each microbatch, and after all.

        Args:
            variables: All variables, before the first microbatch.

        Returns:
            Arrays `[…, microbatch]`, and arrays `[…]`.
        """
        first = tree.flatten(variables)
        own = {path: first[path] for path in self.by_itself}

        def advance(now: dict[str, Any], _: None) -> tuple[dict[str, Any], dict[str, Any]]:
            given = (first | now).values()
            results = jaxpr_as_fun(self._program)(*given, *self._others)
            return dict(zip(self.by_itself, results, strict=True)), now

        after, before = jax.lax.scan(advance, own, length=microbatches)
        last = {path: jnp.moveaxis(x, 0, -1) for path, x in before.items()}
        return tree.nested(last), tree.nested(after)


def read_changes(
    loss_fn: LossFn, params: Any, variables: Any, batch: Any, key: jax.Array
) -> VariableChanges:
    """Trace a loss, and return how it changes the variables."""

    def after(variables: Any, others: Any) -> Any:
        params, batch, key = others
        returned = loss_fn(params_for_forward(params), variables, batch, key)
        _, found = check_returned(returned, variables)
        return found

    others = params, batch, key
    program = jax.make_jaxpr(after)(variables, others)
    paths = list(tree.flatten(variables))
    by_itself = list[str]()
    by_examples = list[str]()
    for number in itertools.compress(range(len(paths)), changed_inputs(program)):
        needed = needed_inputs(program, [other == number for other in range(len(paths))])
        if any(needed[len(paths) :]):
            by_examples.append(paths[number])
        else:
            by_itself.append(paths[number])
    is_own = [path in by_itself for path in paths]
    part, _ = dce_jaxpr(program.jaxpr, is_own, instantiate=True)
    own_program = ClosedJaxpr(part, program.consts)
    return VariableChanges(by_itself, by_examples, own_program, jax.tree.leaves(others))
