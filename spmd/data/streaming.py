"""Text tokenized while a run trains, in an order of seed and position.

The blocks of a text (`spmd.data.token_cache`) are shuffled in each epoch, and taken a window of
several at a time, of which all rows are shuffled together. While the rows of one window are read,
the blocks of the next are tokenized in threads. A position is found by the rows of the windows
before
it: a resumed run finds their blocks in the cache, or makes them.
"""

import dataclasses
import functools
import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from spmd.data.sampler import RandomAccessDataset
from spmd.data.token_cache import LEAST_BYTES, TextBlock, TokenCache
from spmd.data.tokenizer import Tokenizer
from spmd.errors import DataError, Problem
from spmd.tree import human_bytes

WINDOW = 16
"""Blocks whose rows are shuffled together."""

HELD_OUT = 2**20
"""Tokens of validation text after which no more blocks are held out."""
_WINDOWS_KEPT = 3  # batches that are read at once may be of neighbouring windows

MakeRows = Callable[[np.ndarray, np.ndarray], RandomAccessDataset]
"""Ids and documents' ends of a block → its rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of several blocks, one block after the other."""

    blocks: tuple[RandomAccessDataset, ...]
    sequence: int

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(rows) for rows in self.blocks], dtype=np.int64)

    def __len__(self) -> int:
        if not self.blocks:
            return 0
        return int(self._ends[-1])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some indices."""
        which = np.searchsorted(self._ends, indices, side="right")
        numbers = np.unique(which).tolist() or [0]  # no index: the arrays of no row
        arrays: dict[str, np.ndarray] = {}
        for number in numbers:
            rows = self.blocks[number]
            start = self._ends[number] - len(rows)
            mine = which == number
            _scatter(arrays, mine, rows.rows(indices[mine] - start))
        return arrays


def _scatter(arrays: dict[str, np.ndarray], mine: np.ndarray, part: dict[str, np.ndarray]) -> None:
    """Write the rows of a part to where `mine` is true; arrays are made by the first part."""
    for name, values in part.items():
        if name not in arrays:
            arrays[name] = np.empty((len(mine), *values.shape[1:]), values.dtype)
        arrays[name][mine] = values


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedText:
    """Blocks of one text, and how they become rows.

    Args:
        threads: Threads that tokenize blocks ahead; with 0, reading does.
    """

    blocks: tuple[TextBlock, ...]
    cache: TokenCache
    make_rows: MakeRows
    sequence: int
    threads: int

    def __str__(self) -> str:
        size = human_bytes(sum(block.size for block in self.blocks))
        return f"{size} in {len(self.blocks):,} blocks, tokenized while training"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.cache.tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the blocks, the tokenizer and the window."""
        digests = [block.digest for block in self.blocks]
        parts = [WINDOW, self.cache.tokenizer.name, self.cache.text_field, *digests]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def rows_of(self, blocks: Sequence[TextBlock]) -> BlockRows:
        """Return the rows of blocks, after tokenizing the ones missing in the cache."""
        rows = []
        for ids, ends in map(self.cache.get, blocks):
            if len(ends):
                rows.append(self.make_rows(ids, ends))
        return BlockRows(tuple(rows), self.sequence)

    def hold_out(self, fraction: float) -> tuple["StreamedText", BlockRows]:
        """Return the text without some blocks, and the rows of these.

        They are up to a fraction of all, or `HELD_OUT` tokens. Blocks are taken in the order of
        their hashes, so these are a sample.
        """
        ordered = sorted(self.blocks, key=lambda block: block.digest)
        tokens = 0
        count = 0
        most = min(max(1, int(fraction * len(ordered))), len(ordered) - 1)
        while count < most and tokens < HELD_OUT:
            tokens += len(self.cache.get(ordered[count])[0])
            count += 1
        if not tokens:
            what = "is too short to be streamed, as a block of it is held out"
            size = sum(block.size for block in self.blocks)
            detail = f"{size:,} bytes; a block has {LEAST_BYTES:,} or more"
            fix = "no --data.streaming: it is for text that takes long to tokenize"
            raise DataError("invalid text:", [Problem("data.source", what, detail, fix)])
        taken = set(ordered[:count])
        rest = tuple(block for block in self.blocks if block not in taken)
        return dataclasses.replace(self, blocks=rest), self.rows_of(ordered[:count])


@dataclasses.dataclass(frozen=True, eq=False)
class _Window:
    """Rows of some blocks in a shuffled order, from a position on."""

    start: int
    rows: BlockRows
    order: np.ndarray

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        return self.rows.rows(self.order[positions - self.start])


class Streamed:
    """Endless order of a streamed text.

    Each epoch has every row once, and the blocks in another order.
    """

    def __init__(self, text: StreamedText, seed: int, name: str = "") -> None:
        self._text = text
        self._seed = seed
        self._name = name
        self._starts = [0]  # of the windows so far, and of the next one
        self._recent: dict[int, _Window] = {}
        self._epoch = -1  # the last one asked for
        self._blocks_in_order = np.zeros(0, np.int64)  # of that epoch
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        if text.threads:
            self._pool = ThreadPoolExecutor(text.threads, "spmd-tokenize")
        self._ahead: dict[int, list[Future[bool]]] = {}

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._text.sequence

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows at some positions, after waiting for their blocks."""
        if not len(positions):
            return {name: rows[:0] for name, rows in self.read(np.zeros(1, np.int64)).items()}
        with self._lock:
            last = int(positions.max())
            while self._starts[-1] <= last:
                self._window(len(self._starts) - 1)
            which = np.searchsorted(self._starts, positions, side="right") - 1
            windows = {number: self._window(number) for number in np.unique(which).tolist()}
        arrays: dict[str, np.ndarray] = {}
        for number, window in windows.items():
            mine = which == number
            _scatter(arrays, mine, window.read(positions[mine]))
        return arrays

    def stop_ahead(self) -> None:
        """Tokenize nothing until the next read.

        A tokenizer's settings may change after this.
        """
        with self._lock:
            started = []
            for futures in self._ahead.values():
                started += [future for future in futures if not future.cancel()]
            self._ahead.clear()
        wait(started)

    def _window(self, number: int) -> _Window:
        """Return a window and begin to tokenize the next one; the lock is held."""
        if number in self._recent:
            return self._recent[number]
        for future in self._tokenize(number):
            future.result()
        if number + 1 not in self._ahead:
            self._ahead[number + 1] = self._tokenize(number + 1)
        rows = self._text.rows_of(self._blocks_of(number))
        if number == len(self._starts) - 1:
            self._starts.append(self._starts[-1] + len(rows))
            if number == self._count - 1 and not self._starts[-1]:
                problem = Problem("data.source", "holds no text")
                raise DataError("invalid text:", [problem])
        window = _Window(self._starts[number], rows, self._shuffle(len(rows), "rows", number))
        self._recent[number] = window
        while len(self._recent) > _WINDOWS_KEPT:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
        return window

    @property
    def _count(self) -> int:
        """Windows of an epoch."""
        return math.ceil(len(self._text.blocks) / WINDOW)

    def _blocks_of(self, number: int) -> list[TextBlock]:
        epoch, window = divmod(number, self._count)
        if self._epoch != epoch:
            self._epoch = epoch
            self._blocks_in_order = self._shuffle(len(self._text.blocks), "blocks", epoch)
        numbers = self._blocks_in_order[window * WINDOW : (window + 1) * WINDOW]
        return [self._text.blocks[number] for number in numbers.tolist()]

    def _shuffle(self, count: int, what: str, number: int) -> np.ndarray:
        """Return a permutation of the numbers below `count`.

        Grain's takes 0.4 ms for each of a hundred numbers.
        """
        key = hashlib.sha256(json.dumps([self._seed, self._name, what, number]).encode()).digest()
        bits = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(count)
        return np.argsort(bits, kind="stable")

    def _tokenize(self, number: int) -> list[Future[bool]]:
        """Start to tokenize the blocks of a window, and return the futures.

        Blocks that another run is at are left to it.
        """
        if number in self._ahead:
            return self._ahead.pop(number)
        if self._pool is None:
            return []
        make = functools.partial(self._text.cache.make, wait=False)
        futures = []
        for block in self._blocks_of(number):
            if not self._text.cache.path(block).exists():
                futures.append(self._pool.submit(make, block))
        return futures
