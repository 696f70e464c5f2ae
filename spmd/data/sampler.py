"""Endless orders of rows, functions of the position: one shuffled set, or several by weight.

The row at a position depends on nothing that was read before, so any process can read any part of
an order, and a run resumes from a position.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

from spmd.errors import ConfigError, Problem

PERIOD = 2**24
"""Draws after which the sets of a mixture come in the same order again; a weight is a whole
number of them."""


class RandomAccessDataset(Protocol):
    """Rows of batches: `Windows` or `PackedDocuments` of tokens, `Images`, or one's own."""

    @property
    def sequence(self) -> int:
        """Targets of a row: its tokens, or 1."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return arrays `[len(indices), …]` by name, with `weights` where rows may be evaluated."""


class Sampler(Protocol):
    """Endless order of rows."""

    @property
    def sequence(self) -> int:
        """Tokens of a row."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions, arrays `[len(positions), …]` by name.

        From any thread.
        """

    def stop_ahead(self) -> None:
        """Prepare no later rows any longer, until the next read."""


class ShuffledSampler:
    """Order with each row once in an epoch; each epoch is shuffled differently.

    Args:
        seed: Seed of the shuffles.
        name: Name of the set in a mixture; each set has shuffles of its own.
    """

    def __init__(self, rows: RandomAccessDataset, seed: int, name: str = "") -> None:
        self._rows = rows
        self._order = (
            grain.MapDataset.range(len(rows)).shuffle(seed=hashed_seed(seed, name)).repeat()
        )
        self._order[0]  # grain's first read initializes statistics, which is not thread-safe

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._rows.sequence

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions."""
        indices = [self._order[position] for position in positions.tolist()]
        return self._rows.rows(np.array(indices, np.int64))

    def stop_ahead(self) -> None:
        """Do nothing: all rows are there."""


def hashed_seed(seed: int, name: str) -> int:
    """Return grain's seed.

    It shuffles epoch e by seed + e, so that unhashed, seed 1 would repeat seed 0's epochs.
    """
    text = str(seed)
    if name:
        text = f"{seed}/{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class MixtureSchedule:
    """Positions of a mixture, each given to one set; any first n are split as evenly as possible.

    The draws among sets of weights w₀, w₁, … that set 0 does not get, n − ⌈n·w₀/Σw⌉ of the first n,
    are split among the others in the same way. Counts are exact integers: grain's own `mix` rounds
    weights down to hundredths of the smallest.

    Example:
        >>> schedule = MixtureSchedule([3, 1])
        >>> schedule.split(np.arange(8))[0].tolist(), schedule.counts(8)
        ([0, 0, 0, 1, 0, 0, 0, 1], [6, 2])
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        exact = np.array([weight / total * PERIOD for weight in weights])
        draws = np.floor(exact).astype(np.int64)
        draws[np.argsort(draws - exact, kind="stable")[: PERIOD - int(draws.sum())]] += 1
        if not draws.all():
            detail = f"{min(weights):g} of {total:g} is less than one draw in {PERIOD:,}"
            problem = Problem("weights", "are too far apart", detail, "closer weights")
            raise ConfigError("invalid mixture:", [problem])
        self._draws = draws.tolist()

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the set of each position, and the number of earlier positions of the same set.

        Both int64.
        """
        periods, before = np.divmod(positions.astype(np.int64), PERIOD)
        after = before + 1
        left = PERIOD
        which = np.full(len(positions), -1)
        index = np.zeros(len(positions), np.int64)
        for number, draws in enumerate(self._draws):
            # Of the first `before` and `after` draws among the sets that are left, those of the
            # sets after this one.
            others_before = before * (left - draws) // left
            others_after = after * (left - draws) // left
            mine = (which < 0) & (others_after == others_before)
            which[mine] = number
            index[mine] = (periods * draws + before - others_before)[mine]
            before = others_before
            after = others_after
            left -= draws
        return which, index

    def counts(self, draws: int) -> list[int]:
        """Return the number of each set's positions among the first `draws`."""
        periods, rest = divmod(draws, PERIOD)
        left = PERIOD
        counts = []
        for each in self._draws:
            others = rest * (left - each) // left
            counts.append(periods * each + rest - others)
            rest = others
            left -= each
        return counts


class MixtureSampler:
    """Order of rows from several orders, in proportion to their weights."""

    def __init__(self, orders: Sequence[Sampler], weights: Sequence[float]) -> None:
        self._orders = tuple(orders)
        self._shares = MixtureSchedule(weights)

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._orders[0].sequence

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions."""
        which, index = self._shares.split(positions)
        arrays: dict[str, np.ndarray] = {}
        for number, order in enumerate(self._orders):
            mine = which == number
            if not mine.any() and len(positions):
                continue
            for name, values in order.read(index[mine]).items():
                if name not in arrays:
                    arrays[name] = np.empty((len(positions), *values.shape[1:]), values.dtype)
                arrays[name][mine] = values
        return arrays

    def stop_ahead(self) -> None:
        """Prepare no later rows of any set."""
        for order in self._orders:
            order.stop_ahead()
