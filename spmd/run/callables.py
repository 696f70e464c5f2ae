"""Text that tells functions of a config apart, for the record of a run: what they are made of, not where they are."""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_NAMED = "optax"
"""Package whose functions are told apart by name and arguments; versions are in the record of a checkpoint."""


def describe_callable(f: Callable[..., Any]) -> str:
    """Return the name of a function, the values that it captures, and a digest of its code if it is not of optax.

    The text does not depend on the process, the folder or the line of the function. Captured objects other than
    numbers, texts, collections, arrays, dataclasses and functions count by their type.

    Example:
        >>> import optax
        >>> describe_callable(optax.linear_schedule(1e-3, 0.0, 100))
        'optax.polynomial_schedule(end_value=0.0, init_value=0.001, power=1, transition_begin=0, transition_steps=100)'
    """
    return _text(f, ())


def _text(value: Any, outer: tuple[Any, ...]) -> str:
    """Return the text of a captured value; `outer` are the functions that contain it."""
    inner = functools.partial(_text, outer=(*outer, value))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {inner(x)}' for key, x in value.items())}}}"
    if isinstance(value, functools.partial):
        return f"{inner(value.func)}({', '.join([*map(inner, value.args), *_named(value.keywords, inner)])})"
    if isinstance(value, types.FunctionType):
        return value.__qualname__ if value in outer else _function_text(value, inner)
    if isinstance(value, type) or inspect.isbuiltin(value):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__}({', '.join(_named(fields, inner))})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} #{_digest(array.tobytes())}" if array.ndim else repr(array.item())
    return type(value).__qualname__


def _function_text(f: types.FunctionType, inner: Callable[[Any], str]) -> str:
    """Return name, captured values and digest of a function."""
    captured = inspect.getclosurevars(f)
    values = dict(captured.nonlocals)
    name, package = f.__qualname__.partition(".<locals>")[0], f.__module__.partition(".")[0]
    if package == _NAMED:
        return f"{_NAMED}.{name}({', '.join(_named(values, inner))})"
    for other, value in captured.globals.items():
        is_foreign = isinstance(value, types.FunctionType) and value.__module__ != f.__module__
        if not isinstance(value, types.ModuleType):
            values[other] = value.__qualname__ if is_foreign else value
    values |= {f"default {n}": value for n, value in enumerate(f.__defaults__ or ())} | (f.__kwdefaults__ or {})
    return f"{name}({', '.join(_named(values, inner))}) #{_digest(_code(f.__code__))}"


def _named(values: Mapping[str, Any], inner: Callable[[Any], str]) -> list[str]:
    return [f"{name}={inner(value)}" for name, value in sorted(values.items())]


def _code(code: types.CodeType) -> bytes:
    """Return bytecode, names and constants; sets in the order of their text, which no hash seed changes."""

    def constant(value: Any) -> bytes:
        if isinstance(value, types.CodeType):
            return _code(value)
        return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode()

    return b"\0".join([code.co_code, repr(code.co_names).encode(), *map(constant, code.co_consts)])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
