"""Values sown by modules in a call: auxiliary losses and metrics."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem, describe_value
from spmd.jaxpr.dependence import made_by_scan
from spmd.model_interface.model import as_outputs


@dataclasses.dataclass(frozen=True)
class Sown:
    """A sown value.

    Attributes:
        name: Its collection and path, `losses/block_0/balance`.
        value: A tuple of arrays, one for each call of `sow`, or the result of the module's
            `reduce_fn`.
        is_loss: Whether training adds it to the loss.
    """

    name: str
    value: Any
    is_loss: bool


def add_sown(returned: Any, sown: Sequence[Sown], is_stacked: Callable[[], Sequence[bool]]) -> Any:
    """Return a module's outputs, as `Outputs` with the sown values if there are any.

    A loss is summed over calls of `sow` and over layers. Other scalars become metrics, and scalars
    stacked by scanned layers become arrays, all under their name; several values of one name get a
    number.

    Args:
        is_stacked: Returns for each array in `sown` whether scanned layers have stacked it.

    Raises:
        ConfigError: As `check_sown` does.
    """
    if not sown:
        return returned
    stacked = check_sown(sown, is_stacked)
    outputs = as_outputs(returned)
    losses = dict(outputs.losses)
    metrics = dict(outputs.metrics)
    layers = dict(outputs.arrays)
    others = {}
    for each in sown:
        if each.is_loss:
            losses[each.name] = _sum_of_times(each)
            continue
        for name, x in _numbered(each):
            if jnp.ndim(x) == 0:
                metrics[name] = jnp.asarray(x, jnp.float32)
            elif stacked[id(x)]:
                layers[name] = jnp.asarray(x, jnp.float32)
            else:
                others[name] = x
    return dataclasses.replace(
        outputs, losses=losses, metrics=metrics, arrays=layers, intermediates=others
    )


def _sum_of_times(sown: Sown) -> jax.Array:
    sums = [jnp.sum(x, dtype=jnp.float32) for x in _times(sown)]
    return jnp.stack(sums).sum()


def _numbered(sown: Sown) -> list[tuple[str, Any]]:
    """Return name and value for each call of `sow`; several get a number."""
    values = _times(sown)
    if len(values) == 1:
        return [(sown.name, values[0])]
    numbered = []
    for number, x in enumerate(values):
        numbered.append((f"{sown.name}/{number}", x))
    return numbered


def check_sown(sown: Sequence[Sown], is_stacked: Callable[[], Sequence[bool]]) -> dict[int, bool]:
    """Return `id` of an array → whether it is stacked by scanned layers.

    Arrays may be abstract.

    Raises:
        ConfigError: All values whose reduction is neither a tuple nor a scalar, and all losses that
            are no scalars.
    """
    arrays = jax.tree.leaves([each.value for each in sown])
    stacked = dict.fromkeys(map(id, arrays), False)
    if any(_rank(x) == 1 for x in arrays):
        stacked = dict(zip(map(id, arrays), is_stacked(), strict=True))
    problems = []
    for each in sown:
        problem = _problem(each, stacked)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError("Invalid sown values:", problems)
    return stacked


def _times(sown: Sown) -> tuple[Any, ...]:
    """Return one value for each call of `sow`, or the reduced one."""
    if isinstance(sown.value, tuple):
        return sown.value
    return (sown.value,)


def _rank(x: Any) -> int:
    return len(getattr(x, "shape", ()))


def _problem(sown: Sown, stacked: Mapping[int, bool]) -> Problem | None:
    """Return the problem of a sown value, or None."""
    values = _times(sown)
    is_reduced = not isinstance(sown.value, tuple)
    is_known = all(hasattr(x, "dtype") or isinstance(x, int | float) for x in values)
    if not is_known or (is_reduced and _rank(sown.value)):
        what = f"is reduced to {describe_value(sown.value)}"
        fix = "sow it without reduce_fn, or let reduce_fn add scalars"
        return Problem(sown.name, what, "neither a tuple of arrays nor a scalar", fix)
    if not sown.is_loss:
        return None
    for x in values:
        if _rank(x) and not stacked[id(x)]:
            return Problem(
                sown.name, f"is a loss: {describe_value(x)}", fix="sow its mean or its sum"
            )
    return None


def stacked_by_scan(f: Callable[..., Any], *arguments: Any) -> list[bool]:
    """Return for each output of a function whether a scan stacks it, one value for each step."""
    return made_by_scan(jax.make_jaxpr(f)(*arguments))
