"""Calls of Flax modules: their arguments, and errors of Flax and JAX in words."""

import contextlib
import inspect
import pathlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from spmd import tree
from spmd.errors import (
    AnnotationError,
    ConfigError,
    Problem,
    describe_value,
    did_you_mean,
)
from spmd.plan.logical_constraints import read_logical_constraints

INVALID_MODEL = "Invalid model:"
"""Title of errors about a module."""

_NO_CALL = "Invalid call of the module:"

_NO_MESH = (
    "non-empty mesh in context",
    "not under a mesh context",
    "axis names that are of type Auto",
)
"""Words of JAX's errors about a `PartitionSpec` without a mesh."""

_FOREIGN = frozenset(("jax", "flax", "contextlib.py"))
"""Parts of the paths of files outside of a model, to skip in a traceback."""

_UNBOUND = re.compile(r"unbound axis name:? (\w+)")


def called_method(module: Any, keywords: Mapping[str, Any]) -> Any:
    """Return the method of a call with these keywords."""
    return _method(module, keywords.get("method", "__call__"))


def checked_method(
    module: Any,
    method: str | Callable[..., Any],
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return a method of the module, or raise a `ConfigError` if it does not take these arguments.

    Args:
        method: The name of a method, or a function whose first argument is the module.
    """
    kind = type(module)
    run = _method(module, method)
    if not callable(run):
        what = f"is {describe_value(method)}, which {kind.__name__} does not have"
        fix = did_you_mean(str(method), _own_methods(kind))
        raise ConfigError(_NO_CALL, [Problem("method", what, fix=fix)])
    try:
        inspect.signature(run).bind(module, *inputs, **keywords)
    except TypeError as error:
        name = method
        if not isinstance(method, str):
            name = getattr(method, "__name__", describe_value(method))
        problem = Problem(
            f"{kind.__name__}.{name}",
            f"cannot be called with {len(inputs)} inputs and the keywords {sorted(keywords)}: "
            f"{error}",
            fix="give the arguments to model.apply or model.forward (the losses of tokens give a "
            "batch with documents as tokens and segments: the module needs a second parameter); "
            'those of a mode once: train={"deterministic": False}, evaluate={…}',
        )
        raise ConfigError(_NO_CALL, [problem]) from None
    return run


def _method(module: Any, method: str | Callable[..., Any]) -> Any:
    """Return a method as a function of the module and its arguments; None for an unknown name."""
    run: Any = method
    if isinstance(method, str):
        run = getattr(type(module), method, None)
    return getattr(run, "__func__", run)  # of a bound method, which Flax takes, too


def _own_methods(kind: type) -> list[str]:
    """Return the names of a module's methods besides Flax's own."""
    of_flax = {*dir(nnx.Module), *dir(nn.Module)}
    names = []
    for name in dir(kind):
        if name not in of_flax and callable(getattr(kind, name)):
            names.append(name)
    return names


@contextlib.contextmanager
def no_shardings_inside() -> Iterator[None]:
    """Read logical shardings from the plan, and explain JAX's errors about any others."""
    try:
        with read_logical_constraints():
            yield
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in _NO_MESH):
            raise
        where, line = own_line(error)
        problem = Problem(
            where,
            f"names a sharding by itself: {line or error}",
            "JAX has no mesh for it here; the plan shards arrays, on any mesh",
            'spmd.annotate(x, "name") in its place, and the spec in the table: '
            'Rules(activations=[("name", P(…))])',
        )
        title = "The model names shardings outside of the rule table:"
        raise AnnotationError(title, [problem]) from error
    except NameError as error:
        axis = _UNBOUND.search(str(error))
        if not axis:
            raise
        where, line = own_line(error)
        problem = Problem(
            where,
            f"reduces over an axis {axis[1]!r} that nothing maps: {line or error}",
            "the model is called with the global batch, so its means are over the examples of "
            "all devices already",
            f"leave out axis_name={axis[1]!r}, as of a BatchNorm",
        )
        title = "Unknown axis of a mapped function:"
        raise AnnotationError(title, [problem]) from error


def own_line(error: BaseException) -> tuple[str, str | None]:
    """Return file and number of an error's innermost line outside of JAX and Flax, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        parts = pathlib.PurePath(frame.filename).parts
        if _FOREIGN.isdisjoint(parts):
            return f"{frame.filename}:{frame.lineno}", frame.line
    return "the module", None


def check_all_sown(unsown: Iterable[str]) -> None:
    """Raise a `ConfigError` with all losses without a sown value, if there are any."""
    what = "is nothing that the module sows in training"
    problems = [Problem(f"losses {name!r}", what) for name in unsown]
    if problems:
        raise ConfigError("Unknown losses:", problems)


def check_no_variables(variables: Any) -> None:
    """Raise a `ConfigError` with all variables of a model that has some."""
    fix = "call model.forward(params, variables, key, *inputs, train=False)"
    problems = [Problem(path, "is a variable", fix=fix) for path in tree.flatten(variables)]
    if problems:
        raise ConfigError("This model cannot be applied to parameters alone:", problems)


def as_array(leaf: Any) -> jax.Array:
    """Convert a number, such as in `nnx.Param(0.07)`; its dtype is JAX's default, and not weak."""
    if hasattr(leaf, "dtype"):
        return leaf
    return jnp.asarray(leaf, jnp.result_type(leaf))
