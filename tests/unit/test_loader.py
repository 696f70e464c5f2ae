"""What a data config may say, which corpora are too short for it, and the loss of a bigram count model."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from spmd.data.loader import DataConfig, Windows, bigram_loss, load_corpus
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import ConfigError, DataError
from spmd.partition_rules.llama import LLAMA
from spmd.run.config import TrainConfig
from spmd.run.evaluate import open_sets
from tests import tiny


def test_bigram_loss_is_the_formula_written_out() -> None:
    """The loss equals −mean log((c(a, b) + 1) / (c(a) + V)) computed pair by pair."""
    train, validation = np.random.default_rng(0).integers(0, 5, (2, 200)).astype(np.uint16)
    pairs = list(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))

    def p(a: int, b: int) -> float:
        return (pairs.count((a, b)) + 1) / (sum(first == a for first, _ in pairs) + 5)

    expected = -np.mean([math.log(p(int(a), int(b))) for a, b in itertools.pairwise(validation)])
    assert bigram_loss(train, validation, vocab=5) == pytest.approx(expected, rel=1e-12)


def test_bigram_counts_do_not_lose_pairs_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting in pieces of seven gives the same loss as counting all at once."""
    train, validation = np.random.default_rng(1).integers(0, 5, (2, 200)).astype(np.uint16)
    whole = bigram_loss(train, validation, vocab=5)
    monkeypatch.setattr("spmd.data.loader._COUNTED_AT_ONCE", 7)
    assert bigram_loss(train, validation, vocab=5) == whole


def test_a_bigram_table_that_is_too_large_is_refused() -> None:
    """A vocabulary whose square does not fit is an error with its size."""
    with pytest.raises(ConfigError, match="50000 > 4096"):
        bigram_loss(np.arange(5), np.arange(5), vocab=50_000)


def test_all_bad_fields_are_reported_at_once() -> None:
    """Every field that cannot be used is named in one error."""
    numbers = {"sequence": 0, "batch": 0, "validation": 1.0, "threads": -1, "prefetch": -1}
    with pytest.raises(ConfigError) as caught:
        DataConfig(
            (),
            ("a=0:b", "code"),
            "",
            "",
            packing="tight",  # type: ignore[arg-type]
            batch_ramp=("x",),
            length_groups=0,
            **numbers,
        )
    names = {problem.where for problem in caught.value.problems}
    names = {name.removesuffix(" a.weight").partition("[")[0] for name in names}
    every = {f"data.{field.name}" for field in dataclasses.fields(DataConfig)}
    assert names == every - {"data.cache", "data.streaming"}
    with pytest.raises(ConfigError, match="name a file or folder"):
        DataConfig(source=("a", ""))


def test_a_corpus_shorter_than_a_sequence_is_refused_for_both_halves(tmp_path: Path) -> None:
    """Both halves that are too short are named with their lengths; one token more is enough."""
    (tmp_path / "one.txt").write_text("0123456789" * 2)
    config = DataConfig(
        source=(str(tmp_path / "one.txt"),),
        validation=0.5,
        sequence=11,
        cache=str(tmp_path / "cache"),
    )
    with pytest.raises(DataError) as caught:
        load_corpus(config)
    assert [problem.where for problem in caught.value.problems] == ["train", "validation"]
    assert all("11 < data.sequence + 1 = 12" in problem.detail for problem in caught.value.problems)
    corpus = load_corpus(dataclasses.replace(config, sequence=10))
    assert len(corpus.train) == len(corpus.validation) == 11


def test_wrong_evaluation_sets_are_reported_at_once(tmp_path: Path) -> None:
    """Missing text, names that are there twice and the name of the run's own set are named with the flag."""
    (tmp_path / "a.txt").write_text("some text of a set\n" * 9)
    text, data = tmp_path / "a.txt", DataConfig(cache=str(tmp_path / "cache"), sequence=8)
    config = TrainConfig(model=tiny.CONFIG, rules=LLAMA, data=data)
    named = (f"val={text}", f"a={text}", f"a={text}", f"b={tmp_path / 'none'}")
    with pytest.raises(ConfigError) as caught:
        open_sets(config, named, load_tokenizer("bytes"), "evaluate.sets", taken=("val",))
    where = [problem.where for problem in caught.value.problems]
    assert where == [str(tmp_path / "none"), "evaluate.sets", "evaluate.sets"]
    assert [
        each.name for each in open_sets(config, named[:2], load_tokenizer("bytes"), "--data")
    ] == ["val", "a"]


@pytest.mark.parametrize("stride", [1, 3, 4, 8])
def test_windows_with_a_stride_weigh_each_target_once(stride: int) -> None:
    """All but the first window's are preceded by at least `sequence - stride` tokens of their window."""
    windows = Windows(np.arange(30), sequence=8, stride=stride)
    rows = windows.rows(np.arange(len(windows)))
    weighed = rows["targets"][rows["weights"] > 0]
    assert sorted(weighed.tolist()) == list(range(1, 30))
    for row, weights in enumerate(rows["weights"][1:], start=1):
        assert not weights[: 8 - stride].any()
        assert rows["tokens"][row, 0] == row * stride
    with pytest.raises(DataError, match="a window has 8 tokens"):
        Windows(np.arange(30), sequence=8, stride=9)
