"""Evaluation of a language model on texts, and of any train step on batches.

Of texts: loss, perplexity, bits per byte and accuracy. Of batches: the means of the loss function.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmd.data.corpus import SPLITS, Corpus
from spmd.data.loader import (
    Batch,
    RandomAccessDataset,
    Windows,
    corpus_rows,
    evaluation_batches,
)
from spmd.data.mixture import VALIDATION, name_problems, split_name
from spmd.data.text_dataset import TextDataset
from spmd.data.tokenizer import ByteTokenizer, Tokenizer
from spmd.errors import ConfigError, DataError, Problem
from spmd.gradients.base import LossGradFn
from spmd.gradients.losses import split_arrays
from spmd.run.build import TrainSetup
from spmd.run.config import TrainConfig
from spmd.run.open_text import read_source
from spmd.training.batch import place_batch
from spmd.training.state import ModelState
from spmd.training.step import TrainStep, make_eval_step

_COUNTED_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Named text as rows of tokens, in one or several parts.

    Args:
        shares: Share of each part in the means over the set; empty for that of its tokens.
    """

    name: str
    parts: tuple[RandomAccessDataset, ...]
    shares: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result on one set: sums in nats, of `tokens` targets for `bytes` of text.

    Where targets have weights other than 1, all of these are weighted.
    """

    name: str
    nats: float
    correct: float
    tokens: float
    bytes: float

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
        """Loss in bits for each byte of the text, comparable between tokenizers."""
        if not self.bytes:
            return math.nan
        return self.nats / math.log(2) / self.bytes

    @property
    def accuracy(self) -> float:
        """Share of the targets with the highest probability of all tokens."""
        return self.correct / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        figures = ("loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "bytes")
        return {"set": self.name, **{name: getattr(self, name) for name in figures}}


def open_sets(
    config: TrainConfig,
    named: Sequence[str],
    tokenizer: Tokenizer,
    where: str,
    taken: Collection[str] = (),
) -> list[EvaluationSet]:
    """Return the texts of `NAME=SOURCE`, whole; raise all problems at once.

    A source is as in `data.source`; without a name, it is its own. No set may have a name that is
    `taken`. Problems are reported at `where`, the name of the field or flag.
    """
    sets = list[EvaluationSet]()
    problems = list[Problem]()
    for entry in named:
        name, source = split_name(entry)
        try:
            corpus = read_source(config, (source,), tokenizer)
            sets.append(EvaluationSet(name or source, _all_rows(config, corpus)))
        except DataError as error:
            problems += error.problems
    names = [each.name for each in sets]
    problems += name_problems(where, names, taken, "NAME=SOURCE with another name")
    if problems:
        raise ConfigError("No evaluation data:", problems)
    return sets


def _all_rows(config: TrainConfig, corpus: Corpus) -> tuple[RandomAccessDataset, ...]:
    """Return the rows of each split of a corpus, without splits of fewer than two tokens."""
    parts = list[RandomAccessDataset]()
    for split, tokens in zip(SPLITS, (corpus.train, corpus.validation), strict=True):
        if len(tokens) > 1:
            parts.append(corpus_rows(config.data, corpus, split))
    return tuple(parts)


def with_stride(sets: Sequence[EvaluationSet], stride: int) -> list[EvaluationSet]:
    """Return sets with windows every `stride` tokens, for more context of each token.

    Raises:
        ConfigError: A set is not in windows.
        DataError: The stride is longer than a window.
    """
    found = list[EvaluationSet]()
    for each in sets:
        parts = list[RandomAccessDataset]()
        for part in each.parts:
            if not isinstance(part, Windows):
                what = "is for windows of text, and this set is packed"
                problem = Problem("--stride", what, each.name, "leave it out")
                raise ConfigError("Nothing can be evaluated:", [problem])
            parts.append(dataclasses.replace(part, stride=stride))
        found.append(dataclasses.replace(each, parts=tuple(parts)))
    return found


def held_out_sets(text: TextDataset) -> list[EvaluationSet]:
    """Return the validation split; of a mixture, its weighted whole, then each set's own."""
    parts = tuple(each.validation for each in text.sets)
    if not text.is_mixture:
        return [EvaluationSet(VALIDATION, parts)]
    sets = [EvaluationSet(VALIDATION, parts, tuple(text.shares))]
    for each in text.sets:
        sets.append(EvaluationSet(each.name, (each.validation,)))
    return sets


def evaluate(
    setup: TrainSetup,
    model: ModelState,
    sets: Iterable[EvaluationSet],
    tokenizer: Tokenizer,
    tokens: int,
) -> Iterator[Evaluation]:
    """Yield the result on each set, of at most about `tokens` tokens; 0 for all."""
    listed = list(sets)
    for each, sums in zip(listed, evaluate_sums(setup, model, listed, tokens), strict=True):
        yield Evaluation(
            each.name,
            nats=sums["loss"],
            correct=sums["accuracy"],
            tokens=_whole(sums["weight"]),
            bytes=_whole(_size_in_bytes(each, tokens, tokenizer)),
        )


def evaluate_sums(
    setup: TrainSetup, model: ModelState, sets: Iterable[EvaluationSet], tokens: int
) -> Iterator[dict[str, float]]:
    """Yield the sums of the loss function over each set; `tokens` is as in `evaluate`."""
    step = make_eval_step(setup.plan, setup.evaluation_loss_fn)
    sharding = setup.plan.batch_sharding("tokens")
    for each in sets:
        sums = collections.defaultdict[str, float](float)
        batches = set_batches(each, setup.config.data.batch, sharding, tokens)
        for number, batch in enumerate(batches, 1):
            found = step(model.params, model.variables, batch, each.name, number)
            scalars, _ = split_arrays(jax.device_get(found))
            for name, value in scalars.items():
                sums[name] += float(value)
        yield dict(sums)


@dataclasses.dataclass(frozen=True)
class PairEvaluation:
    """Result on one set of pairs: the means of the loss function's sums over `pairs` pairs."""

    name: str
    pairs: int
    means: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        return {"set": self.name, **self.means, "pairs": self.pairs}


def evaluate_pairs(
    setup: TrainSetup, model: ModelState, sets: Iterable[EvaluationSet], tokens: int
) -> Iterator[PairEvaluation]:
    """Yield the result on each set of pairs; `tokens` is as in `evaluate`."""
    listed = list(sets)
    for each, sums in zip(listed, evaluate_sums(setup, model, listed, tokens), strict=True):
        weight = sums.pop("weight")
        means = {name: total / weight for name, total in sums.items()}
        yield PairEvaluation(each.name, round(weight), means)


def evaluate_batches(
    step: TrainStep, model: ModelState, batches: Iterable[Any]
) -> dict[str, float]:
    """Return the means of a step's loss function over batches, and their weight.

    Raises:
        ConfigError: The step has a gradient function of its own, without a loss function.
    """
    if not isinstance(step.grad_fn, LossGradFn):
        fix = "spmd.make_train_step(plan, loss_fn), or spmd.value_and_grad(loss_fn)"
        problem = Problem("step", "has a gradient function, and no loss function", fix=fix)
        raise ConfigError("Nothing can be evaluated:", [problem])
    evaluate_batch = make_eval_step(step.plan, step.grad_fn.loss.loss_fn)
    totals = collections.defaultdict[str, float](float)
    for number, batch in enumerate(batches, 1):
        placed = place_batch(step.plan, batch)
        found = evaluate_batch(model.params, model.variables, placed, "eval", number)
        scalars, _ = split_arrays(jax.device_get(found))
        for name, value in scalars.items():
            totals[name] += float(value)
    weight = totals.pop("weight")
    means = dict.fromkeys(totals, math.nan)
    if weight:
        means = {name: total / weight for name, total in totals.items()}
    return {**means, "weight": weight}


def _size_in_bytes(each: EvaluationSet, tokens: int, tokenizer: Tokenizer) -> float:
    """Return the bytes of text of the evaluated targets, weighted as these are."""
    size = 0.0
    for part, count, weight in _counts(each, tokens):
        for targets, of_targets in _targets(part, count):
            size += weight * of_targets * count_bytes(targets, tokenizer)
    return size


def _whole(total: float) -> float:
    """Return a sum of weights, as an integer if it is one but for rounding."""
    nearest = round(total)
    if math.isclose(total, nearest, rel_tol=1e-6):
        return nearest
    return total


def set_batches(
    each: EvaluationSet, batch: int, sharding: NamedSharding, tokens: int
) -> Iterator[Batch]:
    """Yield batches of the first `tokens` tokens of a set, rounded up to rows; 0 for all."""
    for part, count, weight in _counts(each, tokens):
        yield from evaluation_batches(
            part,
            batch=batch,
            sharding=sharding,
            tokens_at_most=count * part.sequence,
            weight=weight,
        )


def _counts(each: EvaluationSet, tokens: int) -> Iterator[tuple[RandomAccessDataset, int, float]]:
    """Yield each part of a set with the number of its rows, and the weight of each target."""
    if each.shares:
        yield from _shared_counts(each, tokens)
        return
    left = tokens or sum(len(part) * _targets_of_row(part) for part in each.parts)
    for part in each.parts:
        count = min(len(part), math.ceil(left / _targets_of_row(part)))
        if count:
            yield part, count, 1.0
        left -= count * _targets_of_row(part)


def _targets_of_row(part: RandomAccessDataset) -> int:
    """Return the number of counted targets of a row: with a stride, fewer than its tokens."""
    if isinstance(part, Windows):
        return part.step
    return part.sequence


def _shared_counts(
    each: EvaluationSet, tokens: int
) -> Iterator[tuple[RandomAccessDataset, int, float]]:
    """Yield the same as `_counts` for a set with shares; weights make up for other sizes."""
    sequence = _targets_of_row(each.parts[0])
    counts = list[int]()
    sizes = list[float]()  # in weights of targets, or pairs
    for part, share in zip(each.parts, each.shares, strict=True):
        wanted = math.ceil(tokens * share / sequence) or len(part)
        count = min(len(part), wanted)
        counts.append(count)
        sizes.append(_weight(part, count))
    total = sum(sizes)
    weights = [share * total / size for share, size in zip(each.shares, sizes, strict=True)]
    yield from zip(each.parts, counts, weights, strict=True)


def _weight(part: RandomAccessDataset, count: int) -> float:
    """Return the sum of the weights of the first rows' targets, or the number of their pairs."""
    weight = 0.0
    for rows in _first_rows(part, count):
        if "pairs" in rows:
            weight += int(rows["pairs"].max(axis=1).sum())
        else:
            weight += float(rows["weights"].sum(dtype=np.float64))
    return weight


def _targets(part: RandomAccessDataset, count: int) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the targets of the first rows with a weight, and this weight, some rows at a time."""
    for rows in _first_rows(part, count):
        for weight in np.unique(rows["weights"]).tolist():
            if weight:
                yield rows["targets"][rows["weights"] == weight], weight


def _first_rows(part: RandomAccessDataset, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first rows, some at a time."""
    for first in range(0, count, _COUNTED_AT_ONCE):
        yield part.rows(np.arange(first, min(first + _COUNTED_AT_ONCE, count)))


def count_bytes(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the number of bytes of text of token ids; tokens around documents have none.

    Example:
        >>> count_bytes(np.array([104, 195, 169, 0]), ByteTokenizer())
        3
    """
    text = ids[~np.isin(ids, [*tokenizer.starts, tokenizer.eos])]
    if isinstance(tokenizer, ByteTokenizer):
        return len(text)
    return len(tokenizer.decode(text).encode("utf-8"))
