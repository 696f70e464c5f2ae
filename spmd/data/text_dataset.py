"""Text of a run: one corpus, or the sets of a mixture, each with a held-out part of its own."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable

from spmd.data.batch_order import BatchOrder, ConsecutiveRows
from spmd.data.batch_sizes import BatchSizes
from spmd.data.corpus import Corpus
from spmd.data.length_groups import LengthGroups
from spmd.data.loader import DataConfig, load_corpus, make_rows, split_rows
from spmd.data.packed_pairs import PackedPairs
from spmd.data.packing import PackedDocuments
from spmd.data.sampler import (
    MixtureSampler,
    MixtureSchedule,
    RandomAccessDataset,
    Sampler,
    ShuffledSampler,
)
from spmd.data.sources import find_files
from spmd.data.streaming import Streamed, StreamedText
from spmd.data.token_cache import TokenCache, cut_blocks
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.errors import DataError, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class TextSet:
    """One text as rows of tokens, for training and for evaluation.

    Without a mixture it has no name.

    Args:
        text: Tokenized text, or one that is tokenized while it is read.
        train: Rows for training; None of a streamed text, whose rows are not counted.
    """

    name: str
    weight: float
    epochs: int
    text: Corpus | StreamedText
    train: RandomAccessDataset | None
    validation: RandomAccessDataset

    def order(self, seed: int) -> Sampler:
        """Return the endless order of training rows."""
        if isinstance(self.text, StreamedText):
            return Streamed(self.text, seed, self.name)
        assert self.train is not None
        return ShuffledSampler(self.train, seed, self.name)

    @property
    def rows_at_most(self) -> float:
        """Largest number of rows for a run."""
        if not self.train or not self.epochs:
            return math.inf
        return len(self.train) * self.epochs

    def describe(self) -> str:
        """Return the numbers of documents or blocks, and of tokens."""
        if isinstance(self.text, StreamedText):
            return f"{self.text}; {len(self.validation):,} validation sequences"
        kind = "conversations"
        if self.text.pairs:
            kind = "pairs of answers"
        elif self.text.train_mask is None:
            kind = "documents"
        line = f"{self.text.documents:,} {kind}"
        if self.text.skipped:
            line += f" ({self.text.skipped:,} without text skipped)"
        line += f", {len(self.text.train):,} training tokens"
        line += f", {len(self.text.validation):,} validation tokens"
        return "\n".join([line, *self.text.notes])

    def describe_packing(self) -> str:
        """Return a line about packed documents.

        Empty for windows, and for one document or pair in each sequence.
        """
        packed = (PackedDocuments, PackedPairs)
        if not isinstance(self.train, packed) or self.train.alone:
            return ""
        count = len(self.train)
        wasted = self.train.wasted
        return f"packed into {count:,} training sequences, {wasted:.2%} of them padding\n"


@dataclasses.dataclass(frozen=True, eq=False)
class TextDataset:
    """Sets in the order of the config."""

    sets: tuple[TextSet, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all sets."""
        return self.sets[0].text.tokenizer

    @property
    def is_mixture(self) -> bool:
        """True if the sets have names."""
        return bool(self.sets[0].name)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the order's inputs, but for the seed, the batch and the length of a row."""
        if not self.is_mixture:
            return self.sets[0].text.fingerprint
        parts = [(each.name, each.text.fingerprint, each.weight) for each in self.sets]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def shares(self) -> list[float]:
        """Share of each set in the draws."""
        total = sum(each.weight for each in self.sets)
        return [each.weight / total for each in self.sets]

    @property
    def parts(self) -> list[RandomAccessDataset]:
        """Rows of all sets: for training, unless they are streamed, and for validation."""
        parts = list[RandomAccessDataset]()
        for each in self.sets:
            if each.train is not None:
                parts.append(each.train)
            parts.append(each.validation)
        return parts

    def order(self, seed: int) -> Sampler:
        """Return the endless order of training rows."""
        orders = [each.order(seed) for each in self.sets]
        if not self.is_mixture:
            return orders[0]
        return MixtureSampler(orders, self.shares)

    def draws(self, rows: int) -> list[int]:
        """Return the number of rows of each set among the first `rows` of the order."""
        return MixtureSchedule(self.shares).counts(rows)

    def batch_order(self, config: DataConfig, seed: int, multiple: int = 1) -> BatchOrder:
        """Return the endless order of training batches.

        Args:
            multiple: Lengths of groups are multiples of this.
        """
        if config.packing == "grouped":
            (only,) = self.sets
            assert isinstance(only.train, PackedDocuments), "rows of documents"
            groups = config.length_groups
            return LengthGroups(only.train, config.batch, seed, groups, multiple)
        return ConsecutiveRows(self.order(seed), config.batch_sizes)

    def check_epochs(self, steps: int, sizes: BatchSizes) -> None:
        """Raise `DataError` if a set ends before so many steps, whatever is drawn of the others."""
        problems = []
        all_draws = self.draws(sizes.rows_before(steps))
        for each, share, draws in zip(self.sets, self.shares, all_draws, strict=True):
            if each.train is None or draws <= each.rows_at_most:
                continue
            rows = len(each.train)
            taken = f"{steps:,} steps × {sizes.last:,} sequences"
            if sizes.stages:
                taken = f"{sizes.rows_before(steps):,} sequences of {steps:,} steps"
            needed = f"{taken} × {share:.4g} = {draws:,} draws"
            has = f"{rows:,} sequences × {_epochs(each.epochs)} = {rows * each.epochs:,}"
            fitting_steps = sizes.steps_within(int(each.rows_at_most / share))
            least_epochs = math.ceil(draws / rows)
            fix = f"epochs={least_epochs} or more, a smaller weight, or more text"
            if fitting_steps:
                fix = f"--steps {fitting_steps} or less, {fix}"
            where = f"data.mixture {each.name}"
            problems.append(Problem(where, "ends before the run", f"{needed} > {has}", fix))
        if problems:
            raise DataError("a set of the mixture is too short:", problems)

    def describe(self, rows: int) -> str:
        """Return lines with the number of documents and tokens, and a run's part of each set.

        Args:
            rows: Sequences that the run draws.
        """
        if not self.is_mixture:
            (only,) = self.sets
            return f"corpus: {only.describe()}\n{only.describe_packing()}"
        width = max(len(each.name) for each in self.sets)
        lines = [f"mixture of {len(self.sets)} sets:\n"]
        all_draws = self.draws(rows)
        for each, share, draws in zip(self.sets, self.shares, all_draws, strict=True):
            taken = f"{share:.4g} of the sequences: {draws * each.validation.sequence:,} tokens"
            if each.train:
                taken += f", {draws / len(each.train):.3g} epochs"
            if each.epochs:
                taken += f" of at most {each.epochs}"
            lines.append(f"  {each.name:<{width}}  {each.describe()}\n")
            lines.append(f"  {'':<{width}}  {taken}\n")
            packing = each.describe_packing()
            if packing:
                lines.append(f"  {'':<{width}}  {packing}")
        return "".join(lines)


def open_text(
    config: DataConfig, load: Callable[[DataConfig], Corpus] = load_corpus
) -> TextDataset:
    """Return the text of a config, by `load` unless it is streamed.

    Raise the problems of all sets at once.
    """
    open_set: Callable[..., TextSet] = functools.partial(_open_corpus, load)
    if config.streaming:
        open_set = _open_stream
    if not config.mixture:
        return TextDataset((open_set(config, "", 1.0, 0),))
    sets: list[TextSet] = []
    problems: list[Problem] = []
    for each in config.sets:
        alone = dataclasses.replace(config, source=(each.source,), mixture=())
        try:
            sets.append(open_set(alone, each.name, each.weight, each.epochs))
        except DataError as error:
            for problem in error.problems:
                where = f"{each.name}: {problem.where}"
                problems.append(dataclasses.replace(problem, where=where))
    if problems:
        raise DataError("invalid sets of the mixture:", problems)
    return TextDataset(tuple(sets))


def _open_corpus(
    load: Callable[[DataConfig], Corpus], config: DataConfig, name: str, weight: float, epochs: int
) -> TextSet:
    corpus = load(config)
    train, validation = split_rows(config, corpus)
    return TextSet(name, weight, epochs, corpus, train, validation)


def _open_stream(config: DataConfig, name: str, weight: float, epochs: int) -> TextSet:
    cache = TokenCache(config.cache_folder, load_tokenizer(config.tokenizer), config.text_field)
    blocks = tuple(cut_blocks(find_files(config.source)))
    rows = functools.partial(make_rows, config, vocab=cache.tokenizer.vocab)
    text = StreamedText(blocks, cache, rows, config.sequence, config.threads)
    text, validation = text.hold_out(config.validation)
    return TextSet(name, weight, epochs, text, None, validation)


def _epochs(count: int) -> str:
    if count == 1:
        return "1 epoch"
    return f"{count} epochs"
