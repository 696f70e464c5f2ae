"""Batches for any mesh, in one global order for any number of processes.

The step is the state.

    corpus = load_corpus(DataConfig(source=("books/",)))
    windows = Windows(corpus.train, sequence=256)
    with batches(windows, batch=16, sharding=sharding, seed=0, start=0, steps=1000) as train:
        for batch in train: ...

A batch is a dictionary of global arrays `[batch, sequence]`: `tokens`, `targets` (the next tokens)
and `weights` (0 for padding and prompts); of packed documents also `segments`, where the document
of each token begins; of pairs of answers `pairs` and `reference` (`spmd.data.packed_pairs`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.data.array_record import check_ids
from spmd.data.batch_order import BatchOrder, ConsecutiveRows
from spmd.data.batch_sizes import BatchSizes, ramp_problems
from spmd.data.cache_folder import CacheFolder
from spmd.data.corpus import SPLITS, Corpus, make_corpus
from spmd.data.hub import source_problems
from spmd.data.mixture import MixtureSource, mixture_problems
from spmd.data.packed_pairs import PackedPairs
from spmd.data.packing import PackedDocuments
from spmd.data.sampler import RandomAccessDataset, Sampler, ShuffledSampler
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import ConfigError, DataError, MeshError, Problem, check_fields
from spmd.sharding.mesh import entry_axes
from spmd.storage.address import location_problems

Batch = dict[str, jax.Array]
BatchIndex = tuple[slice, ...]
"""Rows and columns of a batch that one device holds."""

_DEFAULT_SOURCE = ("stdlib",)
Packing = Literal["auto", "windows", "documents", "padded", "grouped"]
PACKINGS = get_args(Packing)
_ALONE = ("padded", "grouped")
"""Packings with a document in each row."""
_MAX_BIGRAM_VOCAB = 4096
_COUNTED_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data configuration: source, tokenizer and batch shape."""

    source: tuple[str, ...] = _DEFAULT_SOURCE
    """Files of text, JSON, Parquet or Arrow, also compressed (.gz, .zst), folders or globs;
    "stdlib" is Python's own source."""
    mixture: tuple[str, ...] = ()
    """Sets to train on in place of source, NAME=WEIGHT:SOURCE or NAME=WEIGHT,epochs=N:SOURCE,
    with a weight above 0 and at most N passes over the set's training text: code=0.7:src
    books=0.3,epochs=2:books/*.txt."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json."""
    text_field: str = "text"
    """Field of rows of JSON, or column of Parquet and Arrow files, that holds the text."""
    sequence: int = 256
    """Tokens per sequence."""
    packing: Packing = "auto"
    """How text becomes sequences: windows cut it every `sequence` tokens, across documents;
    documents puts whole ones side by side, of which none sees another, and cuts those that are
    longer; padded gives each a sequence of its own; grouped does, too, in batches of similar
    lengths, padded to one of length_groups lengths; auto is windows for text and documents for
    conversations."""
    streaming: bool = False
    """Tokenize the text while training, in blocks that are kept in the cache, not all of it
    before; blocks are shuffled, and sequences within a window of several."""
    batch: int = 16
    """Sequences per global batch, over all processes."""
    validation: float = 0.05
    """Fraction of documents used for validation, between 0 and 1; with streaming, fraction of
    blocks at most."""
    cache: str = ""
    """Folder for tokenized text, or its address in a bucket, where all hosts find what one has
    tokenized; empty means ~/.cache/spmd."""
    threads: int = 2
    """Threads that prefetch; 0 reads in the training loop."""
    prefetch: int = 2
    """Batches to prefetch; 0 reads in the training loop."""
    batch_ramp: tuple[str, ...] = ()
    """Smaller batches in the first steps, ROWS:STEP, so many sequences before this step: 16:1000
    32:3000. A step of fewer sequences has fewer microbatches."""
    length_groups: int = 4
    """With packing grouped: the most lengths to which sequences are padded, so that there is the
    least padding. The step is compiled for each."""

    def __post_init__(self) -> None:
        rules: dict[str, str | tuple[str, ...]] = {
            "sequence": "at least 1 and at most 16777216",
            "batch": "at least 1",
            "threads": "at least 0 and at most 1024",
            "prefetch": "at least 0",
            "validation": "above 0 and below 1",
            "packing": PACKINGS,
            "length_groups": "at least 2 and at most 16",
        }
        problems = check_fields(self, rules, "data.")
        problems += ramp_problems(self.batch, self.batch_ramp)
        problems += self._problems_of_groups()
        if not self.source or not all(self.source):
            what = f"is {self.source!r}"
            problems.append(Problem("data.source", what, fix="name a file or folder"))
        for field in ("cache", "tokenizer"):
            problems += location_problems(f"data.{field}", getattr(self, field))
        for field in ("source", "mixture"):
            problems += source_problems(f"data.{field}", getattr(self, field))
        problems += mixture_problems(self.mixture)
        if self.mixture and self.source != _DEFAULT_SOURCE:
            fix = "leave one of them out, or name the source in the mixture"
            problems.append(Problem("data.source", "is given, and data.mixture too", fix=fix))
        if self.streaming and any(",epochs=" in entry.partition(":")[0] for entry in self.mixture):
            what = "limits epochs, which cannot be checked before a streamed text is tokenized"
            problems.append(Problem("data.mixture", what, fix="no epochs=, or no --data.streaming"))
        for field in ("tokenizer", "text_field"):
            if not getattr(self, field):
                problems.append(Problem(f"data.{field}", "is empty"))
        if problems:
            raise ConfigError("invalid data config:", problems)

    def _problems_of_groups(self) -> Iterator[Problem]:
        """Yield the settings in conflict with batches of similar lengths, or without effect."""
        if self.packing != "grouped":
            if self.length_groups != DataConfig.length_groups:
                what = f"is {self.length_groups}, and data.packing is {self.packing}"
                yield Problem("data.length_groups", what, fix="--data.packing grouped")
            return
        why = "which batches of similar lengths are not made of"
        for field in ("mixture", "streaming", "batch_ramp"):
            value = getattr(self, field)
            if value:
                fix = "--data.packing padded or documents"
                yield Problem(f"data.{field}", f"is {value}, {why}", fix=fix)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Sequences of each step's batch."""
        return BatchSizes.parse(self.batch, self.batch_ramp)

    @property
    def cache_folder(self) -> CacheFolder:
        """Folder for tokenized text."""
        return CacheFolder.of(self.cache)

    @property
    def sets(self) -> tuple[MixtureSource, ...]:
        """Sets of the mixture."""
        return tuple(map(MixtureSource.parse, self.mixture))


def load_corpus(config: DataConfig) -> Corpus:
    """Load the corpus of a config, tokenizing it unless it is cached.

    Safe to call from several processes.
    """
    corpus = make_corpus(
        config.source,
        load_tokenizer(config.tokenizer),
        text_field=config.text_field,
        validation=config.validation,
        cache=config.cache_folder,
    )
    short = []
    for split, ids in (("train", corpus.train), ("validation", corpus.validation)):
        if len(ids) <= config.sequence:
            what = "holds fewer tokens than one sequence and its last target"
            detail = f"{len(ids)} < data.sequence + 1 = {config.sequence + 1}"
            fix = "add text, a shorter --data.sequence, or another --data.validation"
            short.append(Problem(split, what, detail, fix))
    if short:
        raise DataError(f"the corpus is too short ({corpus.documents} documents):", short)
    return corpus


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Token ids `[n]`, n ≥ 2 (may be memory-mapped) as windows.

    Every token but the first is a target exactly once. `vocab` is the tokenizer's, if it is known:
    other ids are an error when they are read. With a `stride`, windows begin every so many tokens,
    and a target has the weight 1 in the first window with it alone: others precede it as context.

    Example:
        >>> windows = Windows(np.arange(6), sequence=4)
        >>> len(windows), windows.rows(np.array([1]))["targets"].tolist()
        (2, [[5, 0, 0, 0]])
    """

    tokens: np.ndarray
    sequence: int
    vocab: int | None = None
    stride: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.stride <= self.sequence:
            what = f"is {self.stride}, and a window has {self.sequence} tokens"
            problems.append(Problem("stride", what, fix="at most as many; 0 for as many"))
        if self.tokens.ndim != 1 or len(self.tokens) < 2:
            what = "must be 1-D with at least 2 elements"
            problems.append(Problem("tokens", what, f"shape {self.tokens.shape}"))
        problems += check_fields(self, {"sequence": "at least 1"})
        if problems:
            raise DataError("no windows:", problems)

    def __len__(self) -> int:
        after_first = max(0, len(self.tokens) - 1 - self.sequence)
        return 1 + math.ceil(after_first / self.step)

    @property
    def step(self) -> int:
        """Tokens between the beginnings of two windows."""
        return self.stride or self.sequence

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return `tokens` and `targets`, int32, and `weights`, float32, of windows.

        Each is `[len(indices), sequence]`.

        Padding after the last token has id 0 and weight 0.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"windows {indices.min()} to {indices.max()} of {len(self)}")
        positions = indices[:, None].astype(np.int64) * self.step + np.arange(self.sequence + 1)
        inside = positions < len(self.tokens)
        last = len(self.tokens) - 1
        found = self.tokens[np.minimum(positions, last)]
        check_ids(found, self.vocab)
        ids = np.where(inside, found, 0).astype(np.int32)
        is_new = np.arange(self.sequence) >= self.sequence - self.step
        counts = inside[:, 1:] & (is_new | (indices[:, None] == 0))
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "weights": counts.astype(np.float32),
        }


def check_batch_size(
    batch: int,
    sequence: int,
    sharding: NamedSharding,
    microbatches: int = 1,
    name: str = "batch",
) -> None:
    """Check that microbatches of a batch `[batch, sequence]` divide over the axes of a sharding.

    `name` is that of the number of rows in an error.
    """
    spec = sharding.spec
    problems = []
    if len(spec) > 2:
        what = "has more entries than a batch has dimensions"
        problems.append(Problem(str(spec), what, f"{len(spec)} > 2"))
    batch_entry, sequence_entry, *_ = (*spec, None, None)
    of_batch: dict[str, int] = {}
    if microbatches > 1:
        of_batch["microbatches"] = microbatches
    of_batch |= {axis: sharding.mesh.shape[axis] for axis in entry_axes(batch_entry)}
    of_sequence = {axis: sharding.mesh.shape[axis] for axis in entry_axes(sequence_entry)}
    problems += _division_problems(name, batch, of_batch)
    problems += _division_problems("sequence", sequence, of_sequence)
    if problems:
        raise MeshError("a batch does not fit the mesh:", problems)


def _division_problems(name: str, size: int, factors: Mapping[str, int]) -> list[Problem]:
    """Return a problem if the product of the factors does not divide a size."""
    parts = math.prod(factors.values())
    if size % parts == 0:
        return []
    product = " × ".join(f"{factor}={count}" for factor, count in factors.items())
    arithmetic = f"{size} / ({product}) = {size / parts:g}"
    lower = size // parts * parts
    fix = f"{name} {lower + parts}"
    if lower:
        fix = f"{name} {lower} or {lower + parts}"
    return [Problem(name, "does not divide over its mesh axes", arithmetic, fix)]


def local_rows(blocks: Iterable[BatchIndex], batch: int) -> np.ndarray:
    """Return the rows of a batch on the devices of a process, each once, in order: int64 `[rows]`.

    Example:
        >>> local_rows([(slice(2, 4), slice(0, 8)), (slice(2, 4), slice(8, 16))], batch=8).tolist()
        [2, 3]
    """
    held = np.zeros(batch, bool)
    for rows, *_ in blocks:
        held[rows] = True
    return np.flatnonzero(held)


def make_rows(
    config: DataConfig,
    tokens: np.ndarray,
    ends: np.ndarray,
    mask: np.ndarray | None = None,
    vocab: int | None = None,
) -> RandomAccessDataset:
    """Return the rows of one split of a corpus, as the config packs them.

    Of conversations, with a mask. Ids that are not in the vocabulary are an error when they are
    read, if it is given.
    """
    packing = packing_of(config, is_chat=mask is not None)
    if packing == "windows":
        return Windows(tokens, config.sequence, vocab)
    alone = packing in _ALONE
    return PackedDocuments(tokens, ends, config.sequence, mask, alone, vocab)


def packing_of(config: DataConfig, *, is_chat: bool) -> str:
    """Return the packing of a config for text or for conversations."""
    if config.packing != "auto":
        return config.packing
    if is_chat:
        return "documents"
    return "windows"


def corpus_rows(config: DataConfig, corpus: Corpus, split: str) -> RandomAccessDataset:
    """Return the rows of one split of a corpus: `"train"` or `"validation"`."""
    number = SPLITS.index(split)
    tokens = (corpus.train, corpus.validation)[number]
    ends = (corpus.train_ends, corpus.validation_ends)[number]
    mask = (corpus.train_mask, corpus.validation_mask)[number]
    vocab = corpus.tokenizer.vocab
    if not corpus.pairs:
        return make_rows(config, tokens, ends, mask, vocab)
    assert mask is not None, "answers are marked"
    reference = None
    if corpus.references:
        reference = corpus.references[number]
    alone = config.packing in _ALONE
    return PackedPairs(tokens, ends, config.sequence, mask, alone, vocab, reference)


def split_rows(
    config: DataConfig, corpus: Corpus
) -> tuple[RandomAccessDataset, RandomAccessDataset]:
    """Return the rows of a corpus for training and for validation."""
    return corpus_rows(config, corpus, "train"), corpus_rows(config, corpus, "validation")


class Batches(Iterator[Batch], contextlib.AbstractContextManager["Batches"]):
    """Iterator over prefetched batches.

    `close()` or the end of a `with` block stops its threads.
    """

    def __init__(self, ahead: grain.DatasetIterator, order: BatchOrder) -> None:
        self._ahead = ahead
        self._order = order

    def __next__(self) -> Batch:
        return next(self._ahead)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop prefetching; `next` raises ValueError afterwards. May be called again."""
        self._ahead.close()
        self._order.stop_ahead()


def batches(
    windows: RandomAccessDataset,
    *,
    batch: int,
    sharding: NamedSharding,
    seed: int,
    start: int,
    steps: int,
    threads: int = 2,
    prefetch: int = 2,
) -> Batches:
    """Return the training batches of steps `start`, …, `steps - 1`, reshuffled every epoch.

    Every epoch has each window exactly once; a batch may span two. Otherwise as `ordered_batches`.
    """
    order = ShuffledSampler(windows, seed)
    return ordered_batches(
        order,
        batch=batch,
        sharding=sharding,
        start=start,
        steps=steps,
        threads=threads,
        prefetch=prefetch,
    )


def ordered_batches(
    order: Sampler,
    *,
    batch: int,
    sharding: NamedSharding,
    start: int,
    steps: int,
    threads: int = 2,
    prefetch: int = 2,
) -> Batches:
    """Return the batches of steps `start`, …, `steps - 1` of an endless order.

    Row `r` of step `s` is the row at position `s * batch + r`, whatever the number of processes, so
    the step is the only state. The iterator must be closed. It works under
    `jax.transfer_guard("disallow")`.

    Args:
        batch: Rows of the global batch.
        sharding: Sharding of `[batch, sequence]`, by its first entries of arrays of other ranks; if
            it spans processes, each reads only its own rows.
        steps: The step at which the run ends (not a number of batches).
        threads: Threads that read and place batches; 0 does so in `next`.
        prefetch: Batches kept ready, and the maximum of threads in use; 0 as for `threads`.
    """
    return batches_in_order(
        ConsecutiveRows(order, BatchSizes(batch)),
        sharding=sharding,
        start=start,
        steps=steps,
        threads=threads,
        prefetch=prefetch,
    )


def batches_in_order(
    order: BatchOrder,
    *,
    sharding: NamedSharding,
    start: int,
    steps: int,
    threads: int = 2,
    prefetch: int = 2,
) -> Batches:
    """Return the batches of steps `start`, …, `steps - 1`, otherwise as `ordered_batches`."""
    shapes = order.shapes(start, steps)
    for shape in shapes:
        check_batch_size(*shape, sharding)
    if not 0 <= start <= steps:
        problem = Problem("start", "is outside the run", f"not 0 <= {start} <= {steps}")
        raise ConfigError("no batches:", [problem])
    rows = {shape: _process_rows(sharding, shape) for shape in shapes}

    def read(step: int) -> Batch:
        shape = order.shape(step)
        return _to_global(order.read(step, rows[shape]), sharding, shape[0])

    ahead = grain.ReadOptions(num_threads=min(threads, prefetch), prefetch_buffer_size=prefetch)
    dataset = grain.MapDataset.range(start, steps).map(read).to_iter_dataset(ahead)
    return Batches(iter(dataset), order)


def evaluation_batches(
    windows: RandomAccessDataset,
    *,
    batch: int,
    sharding: NamedSharding,
    tokens_at_most: int,
    weight: float = 1.0,
) -> Iterator[Batch]:
    """Return the first windows in order, as batches of one shape; padding rows have weight 0.

    `tokens_at_most` is the number of targets, rounded up to whole windows; `weight` that of each in
    a mean; the other arguments are as for `batches`.
    """
    check_batch_size(batch, windows.sequence, sharding)
    if tokens_at_most < 1:
        problem = Problem("tokens_at_most", f"is {tokens_at_most}", fix="at least 1")
        raise ConfigError("no evaluation batches:", [problem])
    count = min(len(windows), math.ceil(tokens_at_most / windows.sequence))
    rows = _process_rows(sharding, (batch, windows.sequence))

    def read(step: int) -> Batch:
        indices = step * batch + rows
        real = windows.rows(indices[indices < count])
        real["weights"] = real["weights"] * np.float32(weight)
        missing = int((indices >= count).sum())
        padded = {}
        for name, x in real.items():
            whole = ((0, 0),) * (x.ndim - 1)
            padded[name] = np.pad(x, ((0, missing), *whole))
        return _to_global(padded, sharding, batch)

    return (read(step) for step in range(math.ceil(count / batch)))


def _process_rows(sharding: NamedSharding, shape: tuple[int, int]) -> np.ndarray:
    blocks = sharding.addressable_devices_indices_map(shape).values()
    return local_rows([block for block in blocks if block is not None], shape[0])


def _to_global(local: dict[str, np.ndarray], sharding: NamedSharding, batch: int) -> Batch:
    """Assemble the global batch from this process's rows, without communication."""
    # With several processes, JAX implements this by implicit transfers.
    arrays = {}
    with jax.transfer_guard_host_to_device("allow"):
        for name, rows in local.items():
            shape = (batch, *rows.shape[1:])
            placed = _sharding_of(sharding, rows.ndim)
            arrays[name] = jax.make_array_from_process_local_data(placed, rows, shape)
    return arrays


def _sharding_of(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Return the sharding of an array of a batch, without entries beyond its dimensions.

    Labels `[batch]` have no dimension for the second entry.
    """
    if len(sharding.spec) <= ndim:
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[:ndim]))


def bigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Return the validation loss of a bigram model with add-one smoothing, as a baseline.

    The loss is the mean of −log p(token | previous token) over the ids in `validation`, in nats per
    token. `vocab` is the vocabulary size, at most 4096: the counts are a table of `vocab` squared.

    Example:
        >>> round(bigram_loss(np.array([0, 1] * 50), np.array([0, 1, 0, 1]), vocab=2), 3)
        0.02
    """
    if vocab > _MAX_BIGRAM_VOCAB:
        detail = f"{vocab} > {_MAX_BIGRAM_VOCAB}"
        raise ConfigError(
            "no bigram model:", [Problem("vocab", "is too large for a bigram table", detail)]
        )
    counts = _pair_counts(train, vocab) + 1
    log_p = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    seen = _pair_counts(validation, vocab)
    return float(-(seen * log_p).sum() / seen.sum())


def _pair_counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Count token pairs, int64 `[vocab, vocab]`; read in chunks, since ids may be memory-mapped."""
    counts = np.zeros(vocab * vocab, np.int64)
    for first in range(0, len(tokens) - 1, _COUNTED_AT_ONCE):
        piece = tokens[first : first + _COUNTED_AT_ONCE + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * vocab + piece[1:], minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)
