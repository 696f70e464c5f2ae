"""Pairs of answers packed into rows of one length, both answers of a pair in one row.

Each answer, with its prompt before it, is a document of its own: a segment that sees no other one
(`spmd.data.packing`). A pair takes as many tokens as both have targets, and is never cut.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from spmd.data.log_probs import LogProbs
from spmd.data.packing import PlacedDocument, fill_rows, pack, target_places
from spmd.errors import DataError, Problem, check_fields
from spmd.settings.dpo import most_pairs


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPairs:
    """Pairs of documents as rows of `sequence` tokens.

    Args:
        tokens: Ids `[n]` of all documents, one after the other; may be memory-mapped.
        ends: Where each document ends; the preferred answer of a pair comes before the other.
        sequence: Tokens of a row.
        mask: True for the tokens of answers `[n]`. The weight of other targets is 0.
        alone: A row for each pair.
        vocab: Size of the tokenizer's vocabulary: other ids are an error when they are read.
        reference: Log-probabilities of the tokens under a reference model; None for rows without.

    Example:
        >>> packed = PackedPairs(np.arange(9), np.array([4, 9]), 8, np.ones(9, bool))
        >>> rows = packed.rows(np.array([0]))
        >>> rows["segments"].tolist(), rows["pairs"].tolist()
        ([[0, 0, 0, 3, 3, 3, 3, 7]], [[1, 1, 1, -1, -1, -1, -1, 0]])
    """

    tokens: np.ndarray
    ends: np.ndarray
    sequence: int
    mask: np.ndarray
    alone: bool = False
    vocab: int | None = None
    reference: LogProbs | None = None

    def __post_init__(self) -> None:
        problems = check_fields(self, {"sequence": "at least 1"})
        longest = int(self._lengths.sum(axis=1).max(initial=0))
        if not problems and longest > self.sequence:
            detail = f"{longest} targets > {self.sequence}"
            problems.append(Problem("pairs", "have one that is longer than a row", detail))
        if problems:
            raise DataError("no rows:", problems)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """First token of both documents of each pair, int64 `[pairs, 2]`."""
        starts = np.concatenate([[0], self.ends[:-1]])[: len(self.ends)]
        return starts.astype(np.int64).reshape(-1, 2)

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        """Number of targets of both documents of each pair, int64 `[pairs, 2]`."""
        return self.ends.astype(np.int64).reshape(-1, 2) - self._starts - 1

    @functools.cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs in the order of their rows, and the first place of each row, with the last end."""
        lengths = self._lengths.sum(axis=1)
        if self.alone:
            return np.arange(len(lengths)), np.arange(len(lengths) + 1)
        return pack(lengths, self.sequence, most_pairs(self.sequence))

    def __len__(self) -> int:
        return len(self._rows[1]) - 1

    @property
    def wasted(self) -> float:
        """Fraction of padding among all positions."""
        return 1 - float(self._lengths.sum()) / (len(self) * self.sequence)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Return the place of each target among all tokens, −1 of padding.

        It is int64 `[len(indices), sequence]`.
        """
        documents = [document for document, _ in self._documents(indices)]
        return target_places(documents, (len(indices), self.sequence))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return `tokens`, `targets`, `segments`, `pairs`, `weights` and `reference`.

        Each is `[len(indices), sequence]`, int32, the last two float32. A token of the preferred
        answer of a row's pair n, from 1, or of its prompt, has n in `pairs`; of the other answer
        −n. Padding has id 0, weight 0, pair 0 and its own segment. `reference` is there if there
        are log-probabilities.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        shape = (len(indices), self.sequence)
        numbered = list(self._documents(indices))
        documents = [document for document, _ in numbered]
        found = fill_rows(documents, shape, self.tokens, self.mask, self.vocab)
        found["pairs"] = np.zeros(shape, np.int32)
        for document, number in numbered:
            found["pairs"][document.positions] = number
        if self.reference is not None:
            known = self.reference.values[target_places(documents, shape)]
            found["reference"] = np.where(found["weights"] > 0, known, np.float32(0))
        return found

    def _documents(self, indices: np.ndarray) -> Iterator[tuple[PlacedDocument, int]]:
        """Yield the documents of rows, each with the number of its pair, negative of the other."""
        order, begins = self._rows
        for row, index in enumerate(indices.tolist()):
            at = 0
            pairs = order[begins[index] : begins[index + 1]].tolist()
            for number, pair in enumerate(pairs, 1):
                for side, sign in enumerate((1, -1)):
                    length = int(self._lengths[pair, side])
                    document = PlacedDocument(row, at, int(self._starts[pair, side]), length)
                    yield document, sign * number
                    at += length
