"""The kinds of models that the sweep draws from, filled by the modules beside it."""

import dataclasses
from collections.abc import Callable
from typing import Any

Pick = Callable[..., Any]
"""`pick(a, b, …)` chooses one of its arguments."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of small model.

    Attributes:
        build: Choices → the model and its inputs, NumPy arrays whose first dimension is the
            examples.
        orders: Derivatives to compare: 2, or 1 where JAX has no second one.
    """

    build: Callable[[Pick], tuple[Any, tuple[Any, ...]]]
    orders: int = 2


KINDS: dict[str, Kind] = {}
