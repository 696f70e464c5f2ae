"""Texts of a config's functions, for the record of a run.

They tell functions apart by their contents, not by their place.
"""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_NAMED = "optax"
"""Package with functions told apart by name and arguments; a checkpoint records its version."""


def describe_callable(f: Callable[..., Any]) -> str:
    """Return a function's name, captured values, and, if it is not of optax, a digest of its code.

    The text does not depend on the process, the folder or the line of the function. Captured
    objects other than numbers, texts, collections, arrays, dataclasses and functions count by their
    type.

    Example:
        >>> import optax
        >>> describe_callable(optax.constant_schedule(1e-3))
        'optax.constant_schedule(value=0.001)'
    """
    return _text(f, ())


def _text(value: Any, outer: tuple[Any, ...]) -> str:
    """Return the text of a captured value; `outer` are the functions around it."""
    inner = functools.partial(_text, outer=(*outer, value))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {inner(x)}" for key, x in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, functools.partial):
        arguments = [inner(x) for x in value.args]
        arguments += _named(value.keywords, inner)
        return f"{inner(value.func)}({', '.join(arguments)})"
    if isinstance(value, types.FunctionType):
        if value in outer:
            return value.__qualname__
        return _function_text(value, inner)
    if isinstance(value, type) or inspect.isbuiltin(value):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__}({', '.join(_named(fields, inner))})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array_text(np.asarray(value))
    return type(value).__qualname__


def _array_text(array: np.ndarray) -> str:
    """Return dtype, shape and a digest of an array, or the value of a scalar."""
    if array.ndim == 0:
        return repr(array.item())
    return f"{array.dtype}{list(array.shape)} #{_digest(array.tobytes())}"


def _function_text(f: types.FunctionType, inner: Callable[[Any], str]) -> str:
    """Return name, captured values and digest of a function."""
    captured = inspect.getclosurevars(f)
    values = dict(captured.nonlocals)
    name = f.__qualname__.partition(".<locals>")[0]
    package = f.__module__.partition(".")[0]
    if package == _NAMED:
        return f"{_NAMED}.{name}({', '.join(_named(values, inner))})"
    for other, value in captured.globals.items():
        if isinstance(value, types.ModuleType):
            continue
        if isinstance(value, types.FunctionType) and value.__module__ != f.__module__:
            values[other] = value.__qualname__
        else:
            values[other] = value
    for number, value in enumerate(f.__defaults__ or ()):
        values[f"default {number}"] = value
    values |= f.__kwdefaults__ or {}
    return f"{name}({', '.join(_named(values, inner))}) #{_digest(_code(f.__code__))}"


def _named(values: Mapping[str, Any], inner: Callable[[Any], str]) -> list[str]:
    return [f"{name}={inner(value)}" for name, value in sorted(values.items())]


def _code(code: types.CodeType) -> bytes:
    """Return bytecode, names and constants."""
    parts = [code.co_code, repr(code.co_names).encode()]
    parts += [_constant(value) for value in code.co_consts]
    return b"\0".join(parts)


def _constant(value: Any) -> bytes:
    """Return a constant of a function; sets in the order of their texts, for any hash seed."""
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        value = sorted(map(repr, value))
    return repr(value).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
