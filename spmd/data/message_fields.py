"""Fields of a conversation's messages: flags of trained turns, and fields read by a template."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

WEIGHT = "weight"
"""Field with the weight of a message's tokens in the loss; OpenAI and Mistral write 0 or 1."""
FLAGS = (WEIGHT, "train", "training", "loss", "trainable")
"""Fields that say whether a message is trained: 0 or false, 1 or true."""
_MOST = 1e6
"""Largest weight of a message."""
READ_HERE = ("role", "content", *FLAGS)
"""Fields that are read without a template."""


def flag_problems(message: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the problems of a message's flags: other values, contradictions, a turn without mask.

    Example:
        >>> list(flag_problems({"role": "assistant", "train": 0.5}, "message 2"))
        ['message 2 has "train": 0.5, which is none of 0, 1, false and true']
    """
    values = set()
    flags = []
    for name in FLAGS:
        if name not in message:
            continue
        value = message[name]
        flags.append(f'"{name}": {value!r}')
        if _is_flag(value) or (name == WEIGHT and _is_weight(value)):
            values.add(bool(value))
        elif name == WEIGHT:
            yield f'{where} has "{name}": {value!r}, which is no number from 0 to {_MOST:g}'
        else:
            yield f'{where} has "{name}": {value!r}, which is none of 0, 1, false and true'
    written = " and ".join(flags)
    if len(values) > 1:
        yield f"{where} has {written}, which disagree"
    elif values == {True} and message.get("role") != "assistant":
        yield f"{where} is marked to be trained ({written}), and only messages of the assistant are"


def is_turned_off(message: Mapping[str, Any]) -> bool:
    """Return whether a flag excludes a message from training.

    Example:
        >>> is_turned_off({"role": "assistant", "content": "no", "train": False})
        True
    """
    return any(not message[name] for name in FLAGS if name in message)


def weight_of(message: Mapping[str, Any]) -> float:
    """Return the weight in the loss of a message's tokens, by its flags.

    Example:
        >>> weight_of({"role": "assistant", "content": "perhaps", "weight": 0.5})
        0.5
    """
    if is_turned_off(message):
        return 0.0
    return float(message.get(WEIGHT, 1))


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _MOST and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in (0, 1)


class RecordedMessage(dict[str, Any]):
    """A message; the names of its fields go into the set `read` as they are read.

    A loop over the message adds all names.
    """

    def __init__(self, message: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(message)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field, or the default."""
        self._read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        """Return names and fields."""
        self._read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        """Return the fields."""
        self._read.update(super().keys())
        return super().values()


def map_texts(function: Callable[[str], str], message: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a function to the texts of a message, at any depth, but role and kinds (`type`).

    Example:
        >>> calls = [{"type": "function", "id": "a"}]
        >>> map_texts(str.upper, {"role": "user", "content": "hi", "tool_calls": calls})
        {'role': 'user', 'content': 'HI', 'tool_calls': [{'type': 'function', 'id': 'A'}]}
    """

    def mapped(value: Any) -> Any:
        if isinstance(value, str) and value:
            return function(value)
        if isinstance(value, list):
            return [mapped(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        fields = dict(value)
        for name in fields.keys() - {"role", "type"}:
            fields[name] = mapped(fields[name])
        return fields

    result: dict[str, Any] = mapped(message)
    return result
