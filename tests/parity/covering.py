"""Tables of choices in which every pair that can go together does, written as text."""

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Space:
    """Choices, and the combinations of them that are possible.

    Attributes:
        path: File of the committed table.
        choices: Column → its choices.
        is_possible: Whether a row is possible.
        beside: Rows with the most permissive choices: a pair is possible if it is in one of them.
        is_proven: Whether a row proves a pair in it.
    """

    path: Path
    choices: Mapping[str, tuple[str, ...]]
    is_possible: Callable[[Row], bool]
    beside: Sequence[Row]
    is_proven: Callable[[Row, Pair], bool] = lambda row, pair: True

    def pairs(self, row: Row) -> Iterator[Pair]:
        """The pairs of choices that a row proves."""
        for pair in itertools.combinations(row.items(), 2):
            if self.is_proven(row, pair):
                yield pair

    def proven(self, table: Sequence[Row]) -> set[Pair]:
        """The pairs of choices that the rows of a table prove."""
        return {pair for row in table for pair in self.pairs(row)}

    def possible_pairs(self) -> set[Pair]:
        """The pairs that some possible row has."""
        every = (
            ((one, a), (other, b))
            for one, other in itertools.combinations(self.choices, 2)
            for a, b in itertools.product(self.choices[one], self.choices[other])
        )
        return {pair for pair in every if self._fits_some_row(pair)}

    def _fits_some_row(self, pair: Pair) -> bool:
        return any(self.is_possible(rest | dict(pair)) for rest in self.beside)

    def make_table(
        self, seed: int = 0, tries: int = 200, wanted: Collection[Pair] | None = None
    ) -> list[Row]:
        """Rows that together have every possible pair, or all wanted ones.

        Each is the best of some random ones around a missing pair.
        """
        rng, table = random.Random(seed), list[Row]()
        missing = set(self.possible_pairs() if wanted is None else wanted)

        def draw(pair: Pair) -> Row:
            while True:
                row = {name: rng.choice(choices) for name, choices in self.choices.items()}
                row |= dict(pair)
                if self.is_possible(row):
                    return row

        while missing:
            start = min(missing)
            scarce = collections.Counter(first for (first, _), _ in missing)
            drawn = (draw(start) for _ in range(tries))
            best = max(drawn, key=lambda row: self._gain(row, missing, scarce))
            table.append(self._improved(best, start, missing, scarce))
            missing -= set(self.pairs(table[-1]))
        return table

    def _gain(self, row: Row, missing: Collection[Pair], scarce: Mapping[str, int]) -> int:
        """The missing pairs that a row proves; those of columns with many missing ones count more."""
        return sum(scarce[pair[0][0]] for pair in self.pairs(row) if pair in missing)

    def _improved(
        self, row: Row, pair: Pair, missing: Collection[Pair], scarce: Mapping[str, int]
    ) -> Row:
        """The row with other choices, one at a time, as long as it proves more; it keeps a pair."""
        for name, choices in self.choices.items():
            if name in dict(pair):
                continue
            others = [row | {name: choice} for choice in choices]
            row = max(
                filter(self.is_possible, others), key=lambda row: self._gain(row, missing, scarce)
            )
        return row

    def smallest_table(
        self, wanted: Collection[Pair] | None = None, seeds: int = 20, tries: int = 200
    ) -> list[Row]:
        """The table of the seed with the fewest rows, in the order of choices."""
        best = min((self.make_table(seed, tries, wanted) for seed in range(seeds)), key=len)
        order = self.choices.items()
        return sorted(best, key=lambda row: [choices.index(row[name]) for name, choices in order])

    def read_table(self) -> list[Row]:
        """The committed table."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        names, *rows = (line.split() for line in lines)
        assert names == list(self.choices), "the table has other columns; write it anew"
        return [dict(zip(names, row, strict=True)) for row in rows]

    def text(self, table: Sequence[Row]) -> str:
        """One line for each row, in columns."""
        cells = [list(self.choices), *(list(row.values()) for row in table)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
