"""Endless orders of rows, each a function of the position alone: one shuffled set, or several mixed by weight.

The row at a position depends on nothing that was read before, so any process can read any part of an order, and a run
resumes from a position.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

from spmd.errors import ConfigError, Problem

PERIOD = 2**24
"""Draws after which the sets of a mixture come in the same order again; a weight is a whole number of them."""


class Rows(Protocol):
    """Rows of which batches are made: `Windows` or `PackedDocuments` of tokens, `ImageFolder`, or one's own."""

    @property
    def sequence(self) -> int:
        """Targets of a row: its tokens, or 1."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return arrays `[len(indices), …]` by name, with `weights` where rows may be evaluated."""


class Order(Protocol):
    """Endless order of rows."""

    @property
    def sequence(self) -> int:
        """Tokens of a row."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions, arrays `[len(positions), …]` by name; from any thread."""

    def stop_ahead(self) -> None:
        """Prepare no later rows any longer, until the next read."""


class Shuffled:
    """Order in which every epoch has each row once; each epoch is shuffled differently.

    Args:
        seed: Seed of the shuffles.
        name: Name of the set in a mixture; each set has shuffles of its own.
    """

    def __init__(self, rows: Rows, seed: int, name: str = "") -> None:
        self._rows = rows
        self._order = grain.MapDataset.range(len(rows)).shuffle(seed=hashed_seed(seed, name)).repeat()
        self._order[0]  # grain's first read initializes statistics, which is not thread-safe

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._rows.sequence

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions."""
        return self._rows.rows(np.array([self._order[position] for position in positions.tolist()], np.int64))

    def stop_ahead(self) -> None:
        """Do nothing: all rows are there."""


def hashed_seed(seed: int, name: str) -> int:
    """Return grain's seed: it shuffles epoch e by seed + e, so that unhashed, seed 1 would repeat seed 0's epochs."""
    text = f"{seed}/{name}" if name else str(seed)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class Shares:
    """Positions of a mixture, each given to one set, so that any first n are split as evenly as whole draws can be.

    The draws among sets of weights w₀, w₁, … that set 0 does not get, n − ⌈n·w₀/Σw⌉ of the first n, are split among the
    others in the same way. Counts are exact integers: grain's own `mix` rounds weights down to hundredths of the
    smallest.

    Example:
        >>> Shares([3, 1]).split(np.arange(8))[0].tolist(), Shares([3, 1]).counts(8)
        ([0, 0, 0, 1, 0, 0, 0, 1], [6, 2])
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        exact = np.array([weight / total * PERIOD for weight in weights])
        draws = np.floor(exact).astype(np.int64)
        draws[np.argsort(draws - exact, kind="stable")[: PERIOD - int(draws.sum())]] += 1
        if not draws.all():
            detail = f"{min(weights):g} of {total:g} is less than one draw in {PERIOD:,}"
            raise ConfigError("no mixture:", [Problem("weights", "are too far apart", detail, "closer weights")])
        self._draws = draws.tolist()

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the set of each position, and the number of earlier positions of the same set; both int64."""
        periods, before = np.divmod(positions.astype(np.int64), PERIOD)
        after, left = before + 1, PERIOD
        which, index = np.full(len(positions), -1), np.zeros(len(positions), np.int64)
        for number, draws in enumerate(self._draws):
            # Of the first `before` and `after` draws among the sets that are left, those of the sets after this one.
            others_before, others_after = before * (left - draws) // left, after * (left - draws) // left
            mine = (which < 0) & (others_after == others_before)
            which[mine], index[mine] = number, (periods * draws + before - others_before)[mine]
            before, after, left = others_before, others_after, left - draws
        return which, index

    def counts(self, draws: int) -> list[int]:
        """Return the number of each set's positions among the first `draws`."""
        (periods, rest), left, counts = divmod(draws, PERIOD), PERIOD, []
        for each in self._draws:
            others = rest * (left - each) // left
            counts.append(periods * each + rest - others)
            rest, left = others, left - each
        return counts


class Mixed:
    """Order that takes its rows from several, in proportion to their weights."""

    def __init__(self, orders: Sequence[Order], weights: Sequence[float]) -> None:
        self._orders, self._shares = tuple(orders), Shares(weights)

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._orders[0].sequence

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions."""
        which, index = self._shares.split(positions)
        parts = [(which == number, order) for number, order in enumerate(self._orders)]
        found = [(mine, order.read(index[mine])) for mine, order in parts if mine.any() or not len(positions)]
        arrays = {name: np.empty((len(positions), *x.shape[1:]), x.dtype) for name, x in found[0][1].items()}
        for mine, rows in found:
            for name, values in rows.items():
                arrays[name][mine] = values
        return arrays

    def stop_ahead(self) -> None:
        """Prepare no later rows of any set."""
        for order in self._orders:
            order.stop_ahead()
