"""Batches for any mesh: the same global order for any number of processes, resumed by the step number alone.

    corpus = load_corpus(DataConfig(source=("books/",)))
    windows = Windows(corpus.train, sequence=256)
    with batches(windows, batch=16, sharding=sharding, seed=0, start=0, steps=1000) as train:
        for batch in train: ...

A batch is a dictionary of global arrays `[batch, sequence]`: `tokens`, `targets` (the tokens that follow) and
`weights` (0 where there is nothing to predict).
"""

import dataclasses
import hashlib
import math
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from spmd.data.corpus import Corpus, make_corpus
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.errors import ConfigError, DataError, MeshError, Problem
from spmd.sharding.mesh import entry_axes

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "DataConfig",
    "Tokenizer",
    "Windows",
    "batches",
    "bigram_loss",
    "check_batch",
    "evaluation_batches",
    "load_corpus",
    "load_tokenizer",
    "local_rows",
]

Batch = dict[str, jax.Array]
# The rows and columns of a batch that one device holds.
Block = tuple[slice, slice]

_LARGEST_BIGRAM_VOCAB = 4096
_COUNTED_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes batches.

    Raises:
        ConfigError: A field cannot be used; all such fields are named.

    Example:
        >>> DataConfig(sequence=128).batch
        16
    """

    source: tuple[str, ...] = ("stdlib",)
    """Text files, folders, globs or .jsonl files; "stdlib" is the source of Python's standard library."""
    tokenizer: str = "bytes"
    """The word bytes, or the path of a Hugging Face tokenizer.json."""
    text_field: str = "text"
    """The field of a .jsonl line that holds its text."""
    sequence: int = 256
    """Tokens in one sequence."""
    batch: int = 16
    """Sequences in one global batch, over all processes."""
    validation: float = 0.05
    """The fraction of documents kept for validation, between 0 and 1."""
    cache: str = ""
    """The folder for tokenised text; empty means ~/.cache/spmd."""
    threads: int = 2
    """Threads that read ahead; 0 reads in the training loop."""
    prefetch: int = 2
    """Batches read ahead; 0 reads in the training loop."""

    def __post_init__(self) -> None:
        problems = []
        if not self.source or not all(self.source):
            problems.append(Problem("data.source", "names nothing", f"it is {self.source!r}", "name a file or folder"))
        for field in ("tokenizer", "text_field"):
            if not getattr(self, field):
                problems.append(Problem(f"data.{field}", "is empty"))
        for field, least in (("sequence", 1), ("batch", 1), ("threads", 0), ("prefetch", 0)):
            if (value := getattr(self, field)) < least:
                problems.append(Problem(f"data.{field}", f"must be at least {least}", f"it is {value}"))
        if not 0 < self.validation < 1:
            problems.append(Problem("data.validation", "must be above 0 and below 1", f"it is {self.validation}"))
        if problems:
            raise ConfigError("the data settings cannot be used:", problems)


def load_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config` describes, tokenised now if it never was.

    Any number of processes may call this at once.

    Raises:
        DataError: A source or the tokenizer cannot be read, or either half is shorter than one sequence.
    """
    corpus = make_corpus(
        config.source,
        load_tokenizer(config.tokenizer),
        text_field=config.text_field,
        validation=config.validation,
        cache=Path(config.cache or "~/.cache/spmd").expanduser(),
    )
    needed = config.sequence + 1
    short = [
        Problem(
            half,
            "holds fewer tokens than one sequence and its last target",
            f"{len(ids)} < data.sequence + 1 = {needed}",
            "add text, shorten data.sequence or change data.validation",
        )
        for half, ids in (("train", corpus.train), ("validation", corpus.validation))
        if len(ids) < needed
    ]
    if short:
        raise DataError(f"the corpus is too short ({corpus.documents} documents):", short)
    return corpus


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """A row of tokens as windows of one length; every token but the first is a target exactly once.

    Args:
        tokens: Ids `[n]`, in memory or memory-mapped.
        sequence: Tokens in one window.

    Raises:
        DataError: There is nothing to predict.

    Example:
        >>> windows = Windows(np.arange(6), sequence=4)
        >>> len(windows), windows.rows(np.array([1]))["targets"].tolist()
        (2, [[5, 0, 0, 0]])
    """

    tokens: np.ndarray
    sequence: int

    def __post_init__(self) -> None:
        problems = []
        if self.tokens.ndim != 1 or len(self.tokens) < 2:
            problems.append(Problem("tokens", "must be one row of at least 2", f"shape {self.tokens.shape}"))
        if self.sequence < 1:
            problems.append(Problem("sequence", "must be at least 1", f"it is {self.sequence}"))
        if problems:
            raise DataError("there are no windows:", problems)

    def __len__(self) -> int:
        return math.ceil((len(self.tokens) - 1) / self.sequence)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The windows at `indices`.

        Args:
            indices: Window numbers `[rows]`, each in `[0, len(self))`.

        Returns:
            `tokens` and `targets`, int32 `[rows, sequence]`, and `weights`, float32 `[rows, sequence]`. What
            lies past the last token has id 0 and weight 0.
        """
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"windows {indices.min()} to {indices.max()} of {len(self)}")
        positions = indices[:, None].astype(np.int64) * self.sequence + np.arange(self.sequence + 1)
        inside = positions < len(self.tokens)
        ids = np.where(inside, self.tokens[np.minimum(positions, len(self.tokens) - 1)], 0).astype(np.int32)
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": inside[:, 1:].astype(np.float32)}


def check_batch(batch: int, sequence: int, sharding: NamedSharding, microbatches: int = 1) -> None:
    """Whether a batch `[batch, sequence]`, or each of its microbatches, splits evenly over a mesh.

    Args:
        batch: How many examples.
        sequence: How many tokens each has.
        sharding: How a microbatch is split.
        microbatches: Into how many the batch is cut.

    Raises:
        MeshError: Either dimension does not divide by the axes that split it, or the spec is not for two.
    """
    spec, mesh = sharding.spec, sharding.mesh
    problems = []
    if len(spec) > 2:
        problems.append(Problem(str(spec), "has more entries than a batch has dimensions", f"{len(spec)} > 2"))
    cut = [("microbatches", microbatches)] if microbatches > 1 else []
    entries = [*(entry_axes(entry) for entry in spec), (), ()]
    for name, size, axes, factors in (("batch", batch, entries[0], cut), ("sequence", sequence, entries[1], [])):
        factors = [*factors, *((axis, mesh.shape[axis]) for axis in axes)]
        parts = math.prod(count for _, count in factors)
        if size % parts:
            arithmetic = f"{size} / ({' × '.join(f'{what}={count}' for what, count in factors)}) = {size / parts:g}"
            lower, upper = size // parts * parts, math.ceil(size / parts) * parts
            fix = f"{name} {lower} or {upper}" if lower else f"{name} {upper}"
            problems.append(Problem(name, "does not divide over its mesh axes", arithmetic, fix))
    if problems:
        raise MeshError("a batch does not fit the mesh:", problems)


def local_rows(blocks: Iterable[Block], batch: int) -> np.ndarray:
    """The rows of a batch that a process reads: those its devices hold, each once, int64 `[rows]` in order.

    Args:
        blocks: Of each device of the process, the rows and columns it holds.
        batch: Rows of the global batch.

    Example:
        >>> local_rows([(slice(2, 4), slice(0, 8)), (slice(2, 4), slice(8, 16))], batch=8).tolist()
        [2, 3]
    """
    held = np.zeros(batch, bool)
    for rows, _ in blocks:
        held[rows] = True
    return np.flatnonzero(held)


class Batches(Iterator[Batch]):
    """Batches read ahead by threads, which stop at `close()` or at the end of a `with` block."""

    def __init__(self, ahead: grain.DatasetIterator) -> None:
        self._ahead = ahead

    def __next__(self) -> Batch:
        return next(self._ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead; a batch asked for later is a `ValueError`. Closing twice is fine."""
        self._ahead.close()


def batches(
    windows: Windows,
    *,
    batch: int,
    sharding: NamedSharding,
    seed: int,
    start: int,
    steps: int,
    threads: int = 2,
    prefetch: int = 2,
) -> Batches:
    """The training batches of steps `start`, …, `steps - 1`, shuffled anew in every epoch.

    Row `r` of step `s` is position `s * batch + r` of one endless shuffled order, whatever the number of
    processes, so the step is all there is to save. Batches run on across the end of an epoch: in each, every
    window comes exactly once.

    Args:
        windows: What to read.
        batch: Rows of the global batch.
        sharding: How `[batch, sequence]` is split; may span processes, each of which reads its own rows only.
        seed: Any integer; another one is another order.
        start: The first step, 0 or where to resume.
        steps: The step at which the run ends (not a number of batches).
        threads: Threads that read and place batches; 0 does it when a batch is asked for.
        prefetch: Batches kept ready, which also bounds the threads in use; 0 as above.

    Returns:
        An iterator to be closed. Its transfers are explicit, as `jax.transfer_guard("disallow")` demands.

    Raises:
        MeshError: The batch does not divide over the mesh.
        ConfigError: `start` is negative or past `steps`.
    """
    check_batch(batch, windows.sequence, sharding)
    if not 0 <= start <= steps:
        raise ConfigError("no batches:", [Problem("start", "lies outside the run", f"not 0 <= {start} <= {steps}")])
    # grain shuffles epoch e by seed + e: unhashed, seed 1 would repeat seed 0 from its second epoch on.
    shuffle_seed = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")
    order = grain.MapDataset.range(len(windows)).shuffle(seed=shuffle_seed).repeat()
    order[0]  # grain prepares its statistics at the first read, which is not safe in two threads at once
    placement = _Placement(sharding, (batch, windows.sequence))

    def read(step: int) -> Batch:
        indices = [order[step * batch + row] for row in placement.rows.tolist()]
        return placement.place(windows.rows(np.array(indices, np.int64)))

    ahead = grain.ReadOptions(num_threads=min(threads, prefetch), prefetch_buffer_size=prefetch)
    return Batches(iter(grain.MapDataset.range(start, steps).map(read).to_iter_dataset(ahead)))


def evaluation_batches(
    windows: Windows, *, batch: int, sharding: NamedSharding, tokens_at_most: int
) -> Iterator[Batch]:
    """The first windows in order, as batches of one shape; rows past the last window have weight 0.

    Args:
        windows: What to read.
        batch: Rows of the global batch.
        sharding: How `[batch, sequence]` is split; may span processes, each of which reads its own rows only.
        tokens_at_most: How many tokens to predict, rounded up to whole windows.

    Raises:
        MeshError: The batch does not divide over the mesh.
        ConfigError: `tokens_at_most` is not positive.
    """
    check_batch(batch, windows.sequence, sharding)
    if tokens_at_most < 1:
        problem = Problem("tokens_at_most", "must be at least 1", f"it is {tokens_at_most}")
        raise ConfigError("nothing to evaluate on:", [problem])
    count = min(len(windows), math.ceil(tokens_at_most / windows.sequence))
    placement = _Placement(sharding, (batch, windows.sequence))

    def read(step: int) -> Batch:
        indices = step * batch + placement.rows
        real = windows.rows(indices[indices < count])
        missing = ((0, int((indices >= count).sum())), (0, 0))
        return placement.place({name: np.pad(values, missing) for name, values in real.items()})

    return (read(step) for step in range(math.ceil(count / batch)))


class _Placement:
    """Puts the rows that this process read onto its devices, as part of a global batch."""

    def __init__(self, sharding: NamedSharding, shape: tuple[int, int]) -> None:
        blocks: dict[jax.Device, Block] = {}
        for device, block in sharding.addressable_devices_indices_map(shape).items():
            assert block is not None
            rows, columns = block
            blocks[device] = rows, columns
        self.sharding = sharding
        self.shape = shape
        self.devices = list(blocks)
        self.rows = local_rows(blocks.values(), shape[0])
        # Where a device's rows lie among the rows of this process.
        self.blocks = [
            (np.searchsorted(self.rows, range(*rows.indices(shape[0]))), columns) for rows, columns in blocks.values()
        ]

    def place(self, local: dict[str, np.ndarray]) -> Batch:
        """The global batch whose rows `self.rows` are `local`; never waits for another process."""
        shards = {
            name: jax.device_put([values[rows, columns] for rows, columns in self.blocks], self.devices)
            for name, values in local.items()
        }
        return {
            name: jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards[name]) for name in shards
        }


def bigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """What a model that looks one token back is expected to reach: a yardstick for a first training run.

    Token pairs of `train` are counted, one is added to every count, and the result predicts `validation`.

    Args:
        train: Ids `[n]`, n ≥ 2.
        validation: Ids `[m]`, m ≥ 2.
        vocab: One more than the largest id; at most 4096, for the counts are a table of `vocab` squared.

    Returns:
        The mean of −log p(token | the token before) over `validation`, in nats per token.

    Example:
        >>> round(bigram_loss(np.array([0, 1] * 50), np.array([0, 1, 0, 1]), vocab=2), 3)
        0.02
    """
    if vocab > _LARGEST_BIGRAM_VOCAB:
        problem = Problem("vocab", "is too large for a table of pairs", f"{vocab} > {_LARGEST_BIGRAM_VOCAB}")
        raise ConfigError("no bigram model:", [problem])
    counts = _pair_counts(train, vocab) + 1
    log_p = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    seen = _pair_counts(validation, vocab)
    return float(-(seen * log_p).sum() / seen.sum())


def _pair_counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """How often each token follows each, int64 `[vocab, vocab]`; read piecewise, as ids may be on disk."""
    counts = np.zeros(vocab * vocab, np.int64)
    for first in range(0, len(tokens) - 1, _COUNTED_AT_ONCE):
        piece = tokens[first : first + _COUNTED_AT_ONCE + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * vocab + piece[1:], minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)
