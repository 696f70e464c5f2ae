"""Batches of rows with similar lengths, padded to one of a few lengths.

Each epoch has every row once. Its rows are shuffled, then grouped: what is left of a group after whole
batches joins the next longer one, and the last batch of all is filled with rows of weight 0. The
batches of all groups come in a shuffled order.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from spmd.data.batch_order import BatchOrder
from spmd.data.packing import PackedDocuments
from spmd.data.sampler import hashed_seed

_UNITS = 16
"""Lengths of groups are multiples of this part of the longest."""
_BLOCK = 128
"""Long rows are in whole blocks of attention kernels, on every platform."""
_EMPTY = -1
"""Number of a row that is padding alone."""


def group_lengths(
    lengths: np.ndarray, longest: int, groups: int, multiple: int = 1
) -> tuple[int, ...]:
    """Return up to so many lengths, the last one `longest`, with the least padding.

    Args:
        lengths: Tokens of each row, at most `longest`.
        multiple: The shorter lengths are multiples of this.

    Example:
        >>> group_lengths(np.array([3, 4, 4, 15, 16]), longest=16, groups=2)
        (4, 16)
    """
    unit = -(-longest // _UNITS)
    if unit >= _BLOCK:
        multiple = math.lcm(multiple, _BLOCK)
    unit = -(-unit // multiple) * multiple
    rounded = np.minimum(-(-lengths // unit) * unit, longest)
    sizes, counts = np.unique(rounded, return_counts=True)
    shorter = sizes[sizes < longest].tolist()
    count = min(groups - 1, len(shorter))
    best = (longest,)
    least = _padded(sizes, counts, best)
    for chosen in itertools.combinations(shorter, count):
        total = _padded(sizes, counts, (*chosen, longest))
        if total < least:
            best = (*chosen, longest)
            least = total
    return best


def _padded(sizes: np.ndarray, counts: np.ndarray, groups: Sequence[int]) -> int:
    """Return the tokens of all rows, so many of each size, padded to the length of their group."""
    bounds = np.array(groups)
    return int((bounds[np.searchsorted(bounds, sizes)] * counts).sum())


class LengthGroups(BatchOrder):
    """Batches of documents, each by itself in a row, grouped by length.

    Args:
        rows: Documents alone in their rows.
        batch: Rows of a batch.
        groups: The most lengths that there are.
        multiple: Lengths are multiples of this, but for the longest.

    Attributes:
        lengths: Tokens of a row in each group.
    """

    def __init__(
        self, rows: PackedDocuments, batch: int, seed: int, groups: int, multiple: int = 1
    ) -> None:
        self._rows = rows
        self._batch = batch
        self._seed = seed
        self._own = rows.lengths
        self.lengths = group_lengths(self._own, rows.sequence, groups, multiple)
        self._count = -(-len(rows) // batch)
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def __str__(self) -> str:
        named = ", ".join(f"{length:,}" for length in self.lengths)
        batches = self._epoch(0)
        held = 0
        for length, _ in batches:
            held += length * self._batch
        whole = self._count * self._batch * self._rows.sequence
        used = int(self._own.sum())
        return (
            f"batches of {named} tokens a row: {1 - used / held:.1%} of them padding, "
            f"{1 - used / whole:.1%} without groups"
        )

    def shape(self, number: int) -> tuple[int, int]:
        """Return the rows of a batch, and the tokens of each."""
        length, _ = self._batch_of(number)
        return self._batch, length

    def shapes(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the shapes of all groups."""
        del start, stop
        return [(self._batch, length) for length in self.lengths]

    def read(self, number: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return some rows of a batch."""
        length, members = self._batch_of(number)
        wanted = members[rows]
        is_real = wanted != _EMPTY
        found = self._rows.rows(wanted[is_real])
        arrays = {}
        for name, values in found.items():
            arrays[name] = np.zeros((len(rows), length), values.dtype)
            arrays[name][is_real] = values[:, :length]
        return arrays

    def stop_ahead(self) -> None:
        """Do nothing: all rows are there."""

    def _batch_of(self, number: int) -> tuple[int, np.ndarray]:
        """Return the length of a batch, and its rows, int64 `[batch]`."""
        epoch, index = divmod(number, self._count)
        return self._epoch(epoch)[index]

    def _make_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Return the length and the rows of each batch of an epoch."""
        # The stream of `RandomState` is the same in all versions of NumPy.
        random = np.random.RandomState(hashed_seed(self._seed, f"length groups {epoch}"))
        shuffled = random.permutation(len(self._rows))
        group_of = np.searchsorted(np.array(self.lengths), self._own[shuffled])
        left = np.zeros(0, np.int64)
        batches = []
        for group, length in enumerate(self.lengths):
            members = np.concatenate([left, shuffled[group_of == group]])
            whole = len(members) // self._batch * self._batch
            for rows in members[:whole].reshape(-1, self._batch):
                batches.append((length, rows))
            left = members[whole:]
        if len(left):
            filled = np.full(self._batch, _EMPTY)
            filled[: len(left)] = left
            batches.append((self.lengths[-1], filled))
        shuffled_batches = []
        for index in random.permutation(len(batches)):
            shuffled_batches.append(batches[index])
        return shuffled_batches
