"""Evaluation of a language model on texts: loss, perplexity, bits per byte and accuracy."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmd.data.loader import Batch, Rows, evaluation_batches, make_rows
from spmd.data.mixture import VALIDATION, name_problems, split_name
from spmd.data.tokenizer import ByteTokenizer, Tokenizer
from spmd.data.training_text import TrainingText
from spmd.errors import ConfigError, DataError, Problem
from spmd.run.build import TrainSetup, read_source
from spmd.run.config import TrainConfig
from spmd.training.state import ModelState
from spmd.training.step import make_eval_step

_COUNTED_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Named text as rows of tokens, in one or several parts.

    Args:
        shares: Share of each part in the means over the set; empty for that of its tokens.
    """

    name: str
    parts: tuple[Rows, ...]
    shares: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result on one set: sums in nats, of `tokens` targets that stand for `bytes` of text."""

    name: str
    nats: float
    correct: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Loss that tokenizers do not change: bits for each byte of the text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def accuracy(self) -> float:
        """Share of the tokens that are the most likely ones."""
        return self.correct / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        figures = ("loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "bytes")
        return {"set": self.name, **{name: getattr(self, name) for name in figures}}


def open_sets(
    config: TrainConfig, named: Sequence[str], tokenizer: Tokenizer, where: str, taken: Collection[str] = ()
) -> list[EvaluationSet]:
    """Return the texts of `NAME=SOURCE`, whole; raise all problems at once.

    A source is as in `data.source`; without a name, it is its own. No set may have a name that is `taken`. Problems are
    reported at `where`, the name of the field or flag.
    """
    sets, problems = list[EvaluationSet](), list[Problem]()
    for entry in named:
        name, source = split_name(entry)
        try:
            corpus = read_source(config, (source,), tokenizer)
            splits = (
                (corpus.train, corpus.train_ends, corpus.train_mask),
                (corpus.validation, corpus.validation_ends, corpus.validation_mask),
            )
            parts = tuple(make_rows(config.data, *split) for split in splits if len(split[0]) > 1)
            sets.append(EvaluationSet(name or source, parts))
        except DataError as error:
            problems += error.problems
    problems += name_problems(where, [each.name for each in sets], taken, "NAME=SOURCE with another name")
    if problems:
        raise ConfigError("There is nothing to evaluate on:", problems)
    return sets


def held_out_sets(text: TrainingText) -> list[EvaluationSet]:
    """Return the validation split; of a mixture, its weighted whole, then each set's own."""
    parts = tuple(each.validation for each in text.sets)
    if not text.is_mixture:
        return [EvaluationSet(VALIDATION, parts)]
    return [
        EvaluationSet(VALIDATION, parts, tuple(text.shares)),
        *(EvaluationSet(each.name, (each.validation,)) for each in text.sets),
    ]


def evaluate(
    setup: TrainSetup, model: ModelState, sets: Iterable[EvaluationSet], tokenizer: Tokenizer, tokens: int
) -> Iterator[Evaluation]:
    """Yield the result on each set, of at most about `tokens` tokens; 0 for all."""
    config, step = setup.config, make_eval_step(setup.plan, setup.evaluation_loss_fn)
    sharding = setup.plan.batch_sharding("tokens")
    for each in sets:
        sums, size = dict.fromkeys(("loss", "accuracy", "weight"), 0.0), 0.0
        for number, batch in enumerate(set_batches(each, config.data.batch, sharding, tokens), 1):
            found = jax.device_get(step(model.params, model.variables, batch, each.name, number))
            sums = {name: total + float(found[name]) for name, total in sums.items()}
        for part, count, weight in _counts(each, tokens):
            size += weight * sum(count_bytes(targets, tokenizer) for targets in _targets(part, count))
        yield Evaluation(each.name, sums["loss"], sums["accuracy"], round(sums["weight"]), round(size))


def set_batches(each: EvaluationSet, batch: int, sharding: NamedSharding, tokens: int) -> Iterator[Batch]:
    """Yield batches of the first `tokens` tokens of a set, rounded up to rows; 0 for all."""
    for part, count, weight in _counts(each, tokens):
        at_most = count * part.sequence
        yield from evaluation_batches(part, batch=batch, sharding=sharding, tokens_at_most=at_most, weight=weight)


def _counts(each: EvaluationSet, tokens: int) -> Iterator[tuple[Rows, int, float]]:
    """Yield each part of a set with the number of its rows, and the weight of each of their targets."""
    if each.shares:
        wanted = [math.ceil(tokens * share / each.parts[0].sequence) for share in each.shares]
        counts = [min(len(part), rows or len(part)) for part, rows in zip(each.parts, wanted, strict=True)]
        sizes = [sum(map(len, _targets(*pair))) for pair in zip(each.parts, counts, strict=True)]
        weights = [share * sum(sizes) / size for share, size in zip(each.shares, sizes, strict=True)]
        yield from zip(each.parts, counts, weights, strict=True)
        return
    left = tokens or sum(len(part) * part.sequence for part in each.parts)
    for part in each.parts:
        if count := min(len(part), math.ceil(left / part.sequence)):
            yield part, count, 1.0
        left -= count * part.sequence


def _targets(part: Rows, count: int) -> Iterator[np.ndarray]:
    """Yield the targets of the first rows that have a weight, some rows at a time."""
    for first in range(0, count, _COUNTED_AT_ONCE):
        rows = part.rows(np.arange(first, min(first + _COUNTED_AT_ONCE, count)))
        yield rows["targets"][rows["weights"] > 0]


def count_bytes(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the number of bytes of text that token ids stand for; tokens around documents stand for none.

    Example:
        >>> count_bytes(np.array([104, 195, 169, 0]), ByteTokenizer())
        3
    """
    text = ids[~np.isin(ids, [*tokenizer.starts, tokenizer.eos])]
    return len(text) if isinstance(tokenizer, ByteTokenizer) else len(tokenizer.decode(text).encode("utf-8"))
