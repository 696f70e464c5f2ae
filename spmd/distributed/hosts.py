"""What several processes know as one: process 0 looks, and all of them go by what it saw.

Files change while they are looked at, so processes that each look for themselves may each see something else, and
would then wait for one another for ever.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmd.errors import Problem


def broadcast_from_first(look: Callable[[], Any]) -> Any:
    """What `look` returns on process 0, on every process; the others do not call it.

    Every process calls this, in the same order, from its main thread.

    Args:
        look: Returns JSON values, and does not raise: an error that one process meets alone keeps the others waiting.

    Example:
        >>> from_first(lambda: {"steps": [1, 2]})
        {'steps': [1, 2]}
    """
    if jax.process_count() == 1:
        return look()
    text = json.dumps(look()).encode() if jax.process_index() == 0 else b""
    with jax.transfer_guard("allow"):  # it may be called from inside the training loop
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        # Powers of two, so that few lengths are compiled for.
        padded = np.zeros(1 << max(size - 1, 0).bit_length(), np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        sent = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(np.asarray(sent)[:size].tobytes())


def broadcast_problems(look: Callable[[], Sequence[Problem]]) -> tuple[Problem, ...]:
    """The problems that `look` finds on process 0, on every process, as for `broadcast_from_first`."""
    return read_problems(broadcast_from_first(lambda: plain_problems(look())))


def plain_problems(problems: Sequence[Problem]) -> list[list[str]]:
    """Problems as JSON values."""
    return [list(dataclasses.astuple(problem)) for problem in problems]


def read_problems(plain: Sequence[Sequence[str]]) -> tuple[Problem, ...]:
    """The inverse of `plain_problems`."""
    return tuple(Problem(*words) for words in plain)
