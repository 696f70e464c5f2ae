"""Order of the kinds of layers: first ones, a repeated group, and last ones."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Pattern(Generic[T]):
    """Kinds of layers in order: `first + repeats * group + last`."""

    first: tuple[T, ...]
    group: tuple[T, ...]
    repeats: int
    last: tuple[T, ...]

    @property
    def kinds(self) -> tuple[T, ...]:
        """The kind of each layer."""
        return self.first + self.repeats * self.group + self.last

    @property
    def counted(self) -> list[tuple[T, int]]:
        """Kinds with their numbers of layers; a file may claim more layers than fit in memory."""
        counts = [1] * len(self.first) + [self.repeats] * len(self.group) + [1] * len(self.last)
        return list(zip(self.first + self.group + self.last, counts, strict=True))

    @property
    def distinct(self) -> tuple[T, ...]:
        """The different kinds, in the order of their first layers."""
        return tuple(dict.fromkeys(self.first + self.group + self.last))


def find_pattern(
    kinds: Sequence[T], may_be_first: Callable[[T], bool] = lambda kind: True
) -> Pattern[T]:
    """Return the pattern of the kinds of all layers, with as many layers in repeats as possible.

    Of several such patterns, it is the one with the shortest group, then the fewest first layers.
    Without any repeat all layers are one group. Only kinds that `may_be_first` are before the
    repeats.

    Example:
        >>> find_pattern("dsssfsssfs")
        Pattern(first=('d',), group=('s', 's', 's', 'f'), repeats=2, last=('s',))
    """
    count = len(kinds)
    leading = len(list(itertools.takewhile(may_be_first, kinds)))
    best = Pattern((), tuple(kinds), 1, ())
    covered = 0
    for size in range(1, count // 2 + 1):
        for start in range(min(leading, count - 2 * size) + 1):
            if (count - start) // size * size <= covered:
                break  # not more than before, even if all the others repeat
            repeats = _repeats(kinds, start, size)
            if repeats > 1 and repeats * size > covered:
                covered = repeats * size
                best = _pattern(kinds, start, size, repeats)
    return best


def _repeats(kinds: Sequence[T], start: int, size: int) -> int:
    """Return how often the `size` kinds from `start` on follow each other."""
    same = 0
    for here, next_one in zip(kinds[start:], kinds[start + size :], strict=False):
        if here != next_one:
            break
        same += 1
    return same // size + 1


def _pattern(kinds: Sequence[T], start: int, size: int, repeats: int) -> Pattern[T]:
    end = start + repeats * size
    group = kinds[start : start + size]
    return Pattern(tuple(kinds[:start]), tuple(group), repeats, tuple(kinds[end:]))


def runs(kinds: Sequence[T]) -> list[tuple[T, int]]:
    """Return consecutive equal kinds with their number.

    Example:
        >>> runs("aab")
        [('a', 2), ('b', 1)]
    """
    return [(kind, len(list(equal))) for kind, equal in itertools.groupby(kinds)]
