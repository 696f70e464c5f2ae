"""Documents packed into rows of one length, separate from each other, with little padding.

A document of n tokens has n − 1 targets. One with more than fit into a row is cut into full rows
and a rest; rests and short documents are placed by best fit, the longest first (Ding et al.,
arXiv:2404.10830, section 3).
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from spmd.data.array_record import check_ids
from spmd.errors import DataError, Problem, check_fields


def best_fit(lengths: np.ndarray, size: int, most: int = 0) -> np.ndarray:
    """Return the row of each piece, int64 `[pieces]`: the longest first, into the fullest row.

    No row is longer than `size`, or has more than `most` pieces; 0 for any number.

    Example:
        >>> best_fit(np.array([3, 6, 4, 1]), size=7).tolist()
        [1, 0, 1, 0]
    """
    rows = np.empty(len(lengths), np.int64)
    pieces = [0] * len(lengths)  # of each row
    open_rows: list[list[int]] = [[] for _ in range(size + 1)]  # by what is left in them
    nonempty = 0  # bit n: some row has n left
    count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = nonempty >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                nonempty &= ~(1 << left)
        else:
            row = count
            left = size
            count += 1
        rows[piece] = row
        pieces[row] += 1
        left -= length
        if left and pieces[row] != most:
            open_rows[left].append(row)
            nonempty |= 1 << left
    return rows


def pack(lengths: np.ndarray, size: int, most: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces in the order of their rows, and the first place of each row, with the end.

    Full rows come first. The arguments are those of `best_fit`.

    Example:
        >>> order, begins = pack(np.array([3, 7, 4]), size=7)
        >>> order.tolist(), begins.tolist()
        ([1, 0, 2], [0, 1, 3])
    """
    is_full = lengths == size
    rows = np.cumsum(is_full) - 1
    rows[~is_full] = best_fit(lengths[~is_full], size, most) + is_full.sum()
    ends = np.cumsum(np.bincount(rows))
    return np.argsort(rows, kind="stable"), np.concatenate([[0], ends])


class PlacedDocument(NamedTuple):
    """A document, or a piece of one, in a row.

    Attributes:
        row: Number of the row.
        at: First position in the row.
        first: Place of its first token among all tokens.
        length: Number of its targets.
    """

    row: int
    at: int
    first: int
    length: int

    @property
    def positions(self) -> tuple[int, slice]:
        """Its positions in an array `[row, position]`."""
        return self.row, slice(self.at, self.at + self.length)


def target_places(documents: Iterable[PlacedDocument], shape: tuple[int, int]) -> np.ndarray:
    """Return the place of each target among all tokens, int64 `[row, position]`, −1 of padding."""
    places = np.full(shape, -1, np.int64)
    for each in documents:
        places[each.positions] = np.arange(each.first + 1, each.first + each.length + 1)
    return places


def fill_rows(
    documents: Iterable[PlacedDocument],
    shape: tuple[int, int],
    tokens: np.ndarray,
    mask: np.ndarray | None,
    vocab: int | None,
) -> dict[str, np.ndarray]:
    """Return `tokens`, `targets`, `segments` and `weights` of documents, each `[row, position]`.

    The arguments are as in `PackedDocuments`, and so are the arrays. The documents of a row come
    one behind the other.
    """
    out = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments")}
    weights = np.zeros(shape, np.float32)
    for each in documents:
        to = each.positions
        after = slice(each.first + 1, each.first + each.length + 1)
        ids = tokens[each.first : after.stop]
        check_ids(ids, vocab)
        out["tokens"][to] = ids[:-1]
        out["targets"][to] = ids[1:]
        weights[to] = 1 if mask is None else mask[after]
        out["segments"][each.row, each.at :] = each.at
        out["segments"][each.row, each.at + each.length :] = each.at + each.length
    return {**out, "weights": weights}


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDocuments:
    """Documents as rows of `sequence` tokens.

    Each token that follows another one of its document is a target once.

    Args:
        tokens: Ids `[n]` of all documents, one after the other; may be memory-mapped.
        ends: Where each document ends, increasing, the last one n.
        sequence: Tokens of a row.
        mask: True for the tokens that are trained `[n]`; None for all. The weight of other targets
            is 0.
        alone: A row for each piece, and no segments.
        vocab: Size of the tokenizer's vocabulary: other ids are an error when they are read.

    Example:
        >>> packed = PackedDocuments(np.arange(9), np.array([4, 9]), sequence=8)
        >>> rows = packed.rows(np.array([0]))
        >>> rows["targets"].tolist(), rows["segments"].tolist()
        ([[1, 2, 3, 5, 6, 7, 8, 0]], [[0, 0, 0, 3, 3, 3, 3, 7]])
    """

    tokens: np.ndarray
    ends: np.ndarray
    sequence: int
    mask: np.ndarray | None = None
    alone: bool = False
    vocab: int | None = None

    def __post_init__(self) -> None:
        problems = check_fields(self, {"sequence": "at least 1"})
        if not problems and not len(self._pieces[0]):
            what = "have one token at most, and no target"
            problems.append(Problem("documents", what, f"{len(self.ends)} documents"))
        if problems:
            raise DataError("no rows:", problems)

    @functools.cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """First token and number of targets of each piece of a document."""
        first = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
        targets = np.maximum(self.ends - first - 1, 0)
        parts = -(-targets // self.sequence)
        first_parts = np.repeat(np.cumsum(parts) - parts, parts)
        before = (np.arange(parts.sum()) - first_parts) * self.sequence  # within its document
        starts = np.repeat(first, parts) + before
        return starts, np.minimum(np.repeat(targets, parts) - before, self.sequence)

    @functools.cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Pieces in the order of their rows, and the first place of each row, with the last end."""
        lengths = self._pieces[1]
        if self.alone:
            return np.arange(len(lengths)), np.arange(len(lengths) + 1)
        return pack(lengths, self.sequence)

    def __len__(self) -> int:
        return len(self._rows[1]) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of targets of each row, int64 `[rows]`, where each piece is alone."""
        assert self.alone, "rows of several pieces are full"
        return self._pieces[1]

    @property
    def wasted(self) -> float:
        """Fraction of padding among all positions."""
        return 1 - float(self._pieces[1].sum()) / (len(self) * self.sequence)

    def _documents(self, indices: np.ndarray) -> Iterator[PlacedDocument]:
        """Yield the pieces of rows."""
        order, begins = self._rows
        starts, lengths = self._pieces
        for row, index in enumerate(indices.tolist()):
            at = 0
            for piece in order[begins[index] : begins[index + 1]].tolist():
                length = int(lengths[piece])
                yield PlacedDocument(row, at, int(starts[piece]), length)
                at += length

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Return the place of each target among all tokens, −1 of padding.

        It is int64 `[len(indices), sequence]`.
        """
        return target_places(self._documents(indices), (len(indices), self.sequence))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return `tokens`, `targets` and `segments`, int32, and `weights`, float32.

        Each is `[len(indices), sequence]`. A segment is the position in the row at which the
        document begins. Padding has id 0, weight 0 and its own segment. Rows of pieces that are
        alone have no `segments`.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        shape = (len(indices), self.sequence)
        found = fill_rows(self._documents(indices), shape, self.tokens, self.mask, self.vocab)
        if self.alone:
            del found["segments"]
        return found
