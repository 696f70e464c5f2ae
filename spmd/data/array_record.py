"""Records of cached arrays, to notice a cache of other arrays.

A record has an array's dtype, its length, its largest element, and a checksum of pieces that are
spread over it. Opening a cache reads only these pieces, 4 MiB of an array at most; so ids are
compared with the vocabulary once more when rows are made of them (`check_ids`).
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spmd.errors import DataError, Problem

_PIECES = 64
_PIECE_BYTES = 2**16
_AT_ONCE = 2**22

Record = dict[str, Any]


def describe_array(array: np.ndarray) -> Record:
    """Return the record of a 1-D array of integers or booleans, after reading all of it.

    Example:
        >>> describe_array(np.array([3, 1, 4], np.uint16))["largest"]
        4
    """
    largest = -1
    for start in range(0, len(array), _AT_ONCE):
        largest = max(largest, int(array[start : start + _AT_ONCE].max()))
    return {
        "dtype": array.dtype.str,
        "length": len(array),
        "largest": largest,
        "pieces": _checksum(array),
    }


def check_array(name: str, array: np.ndarray, record: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if an array differs from its record; read some pieces of it."""
    if array.ndim != 1 or array.dtype.str != record["dtype"]:
        found = f"{array.dtype.str} of {array.ndim} dimensions"
        raise ValueError(f"{name} is {found}, and was written as {record['dtype']} of 1")
    if len(array) != record["length"]:
        raise ValueError(f"{name} has {len(array)} elements, and {record['length']} were written")
    if _checksum(array) != record["pieces"]:
        raise ValueError(f"{name} has other elements than were written")


def check_vocab(name: str, record: Mapping[str, Any], vocab: int) -> None:
    """Raise a `ValueError` if the largest id of a record is not in the vocabulary."""
    if record["largest"] >= vocab:
        raise ValueError(f"{name} has the id {record['largest']}, of a vocabulary of {vocab}")


def check_ids(ids: np.ndarray, vocab: int | None) -> None:
    """Raise if an id of rows is not in the vocabulary; None for an unknown vocabulary.

    Raises:
        DataError: The cache of the tokens was changed since it was opened, or where its record
            has no piece.
    """
    if vocab is None or not ids.size or int(ids.max()) < vocab:
        return
    what = f"have the id {int(ids.max())}, and the tokenizer's vocabulary is {vocab}"
    fix = "remove the folder of --data.cache, and start again: the text is tokenized anew"
    raise DataError("Damaged tokens:", [Problem("the cached tokens", what, fix=fix)])


def _checksum(array: np.ndarray) -> str:
    """Return the SHA-256 of pieces of an array, in hex; of a small one, of all its bytes."""
    digest = hashlib.sha256()
    for piece in _pieces(array):
        digest.update(np.ascontiguousarray(piece).tobytes())
    return digest.hexdigest()


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the first piece of an array, the last one, and others between them."""
    size = _PIECE_BYTES // array.dtype.itemsize
    last = len(array) - size
    if len(array) <= size * _PIECES:
        yield array
        return
    for number in range(_PIECES):
        start = last * number // (_PIECES - 1)
        yield array[start : start + size]
