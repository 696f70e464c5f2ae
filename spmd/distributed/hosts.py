"""JSON values exchanged between processes.

Files can change while several processes read them. Processes that decide differently deadlock in
the next collective, so process 0 reads, and all act on its result. Every process makes each call,
in the same order, from its main thread.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmd.distributed.barrier import all_reach
from spmd.distributed.differences import differences
from spmd.errors import AgreementError, Problem, SpmdError

_START_SECONDS = 60.0


def broadcast_from_first(f: Callable[[], Any]) -> Any:
    """Call `f` on process 0 alone, and return its JSON value on every process.

    `f` must not raise: the other processes would wait forever.

    Example:
        >>> broadcast_from_first(lambda: {"steps": [1, 2]})
        {'steps': [1, 2]}
    """
    if jax.process_count() == 1:
        return f()
    _require_equal_devices()
    text = b""
    if jax.process_index() == 0:
        text = json.dumps(f()).encode()
    with jax.transfer_guard("allow"):  # the training loop disallows transfers
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        padded = np.asarray(multihost_utils.broadcast_one_to_all(_pad(text, size)))
    return json.loads(padded[:size].tobytes())


def gather_json(value: Any) -> list[Any]:
    """Return the JSON values of all processes, in order, on every process.

    Example:
        >>> gather_json({"steps": [1, 2]})
        [{'steps': [1, 2]}]
    """
    if jax.process_count() == 1:
        return [value]
    _require_equal_devices()
    text = json.dumps(value).encode()
    with jax.transfer_guard("allow"):
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text)))).tolist()
        rows = np.asarray(multihost_utils.process_allgather(_pad(text, max(sizes))))
    values = []
    for row, size in zip(rows, sizes, strict=True):
        values.append(json.loads(row[:size].tobytes()))
    return values


def _require_equal_devices() -> None:
    """Raise `AgreementError` if processes have other numbers of devices than the most common one.

    JAX has told every process the devices of all, and exchanges no values where they differ.
    """
    counts = collections.Counter(device.process_index for device in jax.devices())
    problems = differences([{"devices": count} for _, count in sorted(counts.items())])
    if problems:
        # Devices of others may still be starting, which an exit of process 0 would interrupt.
        all_reach("unequal devices", _START_SECONDS)
        raise AgreementError("Processes disagree, none starts:", problems)


def _pad(text: bytes, size: int) -> np.ndarray:
    """Pad to a power of two, so that few lengths are compiled."""
    padded = np.zeros(1 << max(size - 1, 0).bit_length(), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return padded


def run_on_first(f: Callable[[], object]) -> None:
    """Call `f` on process 0 alone; raise its `SpmdError` on every process."""
    raised: list[SpmdError] = []

    def attempt() -> Any:
        try:
            f()
        except SpmdError as error:
            raised.append(error)
            return [error.title, plain_problems(error.problems)]
        return None

    failed = broadcast_from_first(attempt)
    if raised:
        raise raised[0]
    if failed:
        title, problems = failed
        raise SpmdError(title, read_problems(problems))


def broadcast_problems(f: Callable[[], Sequence[Problem]]) -> tuple[Problem, ...]:
    """Call `f` on process 0 alone, and return its problems on every process."""
    return read_problems(broadcast_from_first(lambda: plain_problems(f())))


def plain_problems(problems: Sequence[Problem]) -> list[list[str]]:
    """Convert problems to JSON values."""
    return [list(dataclasses.astuple(problem)) for problem in problems]


def read_problems(plain: Sequence[Sequence[str]]) -> tuple[Problem, ...]:
    """Invert `plain_problems`."""
    return tuple(Problem(*words) for words in plain)
