"""Save the state of a loader in the checkpoints of a run.

A loader is an iterable that says its state and can be set to one: by `get_state` and `set_state`, as
iterators of grain do, or by `state_dict` and `load_state_dict`, as `StatefulDataLoader` of torchdata
does. The methods are the loader's, or its iterator's.
"""

import base64
import collections
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.data.process_batches import ProcessShard
from spmd.distributed.hosts import gather_json
from spmd.errors import CheckpointError, ConfigError, Problem, describe_value

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_STATES_KEPT = 4
"""States of the last batches: a step is saved after the batch of the next one was drawn."""
_FIX = (
    "def batches(start, steps): return (make_batch(n) for n in range(start, steps)); or a loader "
    "with get_state() and set_state(state)"
)


class SavedLoader:
    """Loader of a run; its state after each of the last batches is known.

    Args:
        loader: The loader of this process.
        shard: Part of each batch that it gives. States are saved once for each part.
    """

    def __init__(self, loader: Iterable[Any], shard: ProcessShard) -> None:
        self._loader = loader
        self._shard = shard
        self._states: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._beginning: str | None = None

    def open(self, saved: Mapping[str, Any] | None, start: int) -> Iterator[Any]:
        """Yield the batches after the first `start`, from a state in a record on.

        Without one, the loader begins anew. The batches between are drawn and dropped.
        """
        iterator, get_state = self._start(saved)
        drawn = 0
        if saved is not None:
            drawn = int(saved["batches"])
        self._states.clear()
        for batch in iterator:
            drawn += 1
            if drawn <= start:
                continue
            self._states[drawn] = _encode(get_state())
            while len(self._states) > _STATES_KEPT:
                self._states.popitem(last=False)
            yield batch

    def record(self, batches: int) -> dict[str, Any]:
        """Return the states of all parts after so many batches, for a checkpoint.

        Every process makes this call.
        """
        states: dict[int, str] = {}
        for index, state in gather_json([self._shard.index, self._states[batches]]):
            states.setdefault(index, state)
        return {"batches": batches, "states": [states[index] for index in sorted(states)]}

    def check_record(self, saved: Mapping[str, Any]) -> None:
        """Raise a `CheckpointError` for states of another number of parts."""
        before = len(saved["states"])
        if before == self._shard.count:
            return
        what = f"was saved for {before} parts of each batch, and there are {self._shard.count}"
        fix = f"as many processes as before, so that spmd.process_shard(plan).count is {before}"
        raise CheckpointError(
            "Nothing was resumed:", [Problem("state of the loader", what, fix=fix)]
        )

    def _start(self, saved: Mapping[str, Any] | None) -> tuple[Iterator[Any], Callable[[], Any]]:
        """Return an iterator at a state, and the method to read its state."""
        state = self._beginning
        if saved is not None:
            state = saved["states"][self._shard.index]
        owner: Any = self._loader
        methods = _state_methods(owner)
        if methods is None:
            # A new iterator begins anew.
            owner = iter(self._loader)
            methods = _state_methods(owner)
            if saved is None:
                state = None
        if methods is None:
            raise ConfigError("Invalid run:", [_without_state(self._loader)])
        get_state, set_state = methods
        if self._beginning is None:
            self._beginning = _encode(get_state())
        if state is not None:
            set_state(_decode(json.loads(state)))
        return iter(owner), get_state


def loader_problems(loader: Any) -> list[Problem]:
    """Return a problem for an object without batches, or with batches and without a state.

    Only iterating tells whether the iterator of another object has a state.
    """
    if _state_methods(loader) is not None:
        return []
    if isinstance(loader, Iterator | Sequence | Mapping) or not isinstance(loader, Iterable):
        return [_without_state(loader)]
    return []


def _without_state(loader: Any) -> Problem:
    return Problem("batches", f"is {describe_value(loader)}, without a state to save", fix=_FIX)


def _state_methods(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the methods to read and to set a state; None without them."""
    for read, write in _METHODS:
        get_state = getattr(owner, read, None)
        set_state = getattr(owner, write, None)
        if callable(get_state) and callable(set_state):
            return get_state, set_state
    return None


def _encode(state: Any) -> str:
    """Return a state as JSON.

    Raises:
        ConfigError: It has a value of another kind than JSON, bytes and arrays.
    """
    return json.dumps(_plain(state, "state"))


def _plain(value: Any, path: str) -> Any:
    """Return a value in terms of JSON: other values as objects with one key, such as $bytes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(value, path)
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": items}
        return items
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic):
        return {"$array": _array_text(np.asarray(value), path)}
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy"):
        return {"$tensor": _array_text(value.numpy(), path)}
    raise _unknown_value(value, path)


def _plain_mapping(value: Mapping[Any, Any], path: str) -> dict[str, Any]:
    plain = {key: _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in plain):
        return plain
    return {"$pairs": [[_plain(key, path), item] for key, item in plain.items()]}


def _array_text(array: np.ndarray, path: str) -> str:
    content = io.BytesIO()
    try:
        np.save(content, array, allow_pickle=False)
    except ValueError as error:
        raise _unknown_value(array, path) from error
    return base64.b64encode(content.getvalue()).decode()


def _unknown_value(value: Any, path: str) -> ConfigError:
    what = f"is {describe_value(value)}, which is not saved"
    fix = "a state of JSON, bytes and NumPy arrays"
    return ConfigError("The state of the loader cannot be saved:", [Problem(path, what, fix=fix)])


def _decode(plain: Any) -> Any:
    """Invert `_plain`."""
    if isinstance(plain, list):
        return list(map(_decode, plain))
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((key, value),) = plain.items()
        if key in _DECODERS:
            return _DECODERS[key](value)
    return {key: _decode(value) for key, value in plain.items()}


def _array_of(text: str) -> Any:
    array = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if array.ndim == 0:
        return array[()]
    return array


def _tensor_of(text: str) -> Any:
    # Of a loader made with torch, which is imported then.
    torch = sys.modules["torch"]
    return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(map(_decode, items)),
    "$bytes": base64.b64decode,
    "$array": _array_of,
    "$tensor": _tensor_of,
    "$pairs": lambda pairs: {_decode(key): _decode(value) for key, value in pairs},
}
