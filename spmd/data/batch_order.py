"""Endless orders of batches of several shapes, as functions of the step."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spmd.data.batch_sizes import BatchSizes
from spmd.data.sampler import Sampler


class BatchOrder(Protocol):
    """Endless order of batches; any process reads any rows of any of them."""

    def shape(self, number: int) -> tuple[int, int]:
        """Return the rows of a batch, and the tokens of each."""

    def shapes(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the different shapes of the batches `start`, …, `stop - 1`."""

    def read(self, number: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return some rows of a batch, arrays `[len(rows), …]` by name; from any thread."""

    def stop_ahead(self) -> None:
        """Prepare no later rows any longer, until the next read."""


class ConsecutiveRows(BatchOrder):
    """Batches of the rows of an order, one after the other.

    Args:
        sizes: Rows of each batch.
    """

    def __init__(self, order: Sampler, sizes: BatchSizes) -> None:
        self._order = order
        self._sizes = sizes

    def shape(self, number: int) -> tuple[int, int]:
        """Return the rows of a batch, and the tokens of each."""
        return self._sizes.rows(number), self._order.sequence

    def shapes(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the different shapes of some batches."""
        return [(rows, self._order.sequence) for rows in self._sizes.distinct(start, stop)]

    def read(self, number: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return some rows of a batch."""
        return self._order.read(self._sizes.rows_before(number) + rows)

    def stop_ahead(self) -> None:
        """Prepare no later rows."""
        self._order.stop_ahead()
