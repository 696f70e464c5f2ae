"""Mixtures: what a config says of them, and which set each position of their order is from."""

import dataclasses
from pathlib import Path

import grain
import numpy as np
import pytest
from jax.sharding import NamedSharding

from spmd.data.batch_sizes import BatchSizes
from spmd.data.loader import DataConfig
from spmd.data.mixture import MixtureSource
from spmd.data.packing import PackedDocuments
from spmd.data.sampler import PERIOD, MixtureSampler, MixtureSchedule, ShuffledSampler
from spmd.data.text_dataset import open_text
from spmd.errors import ConfigError, DataError
from spmd.run.evaluate import held_out_sets, set_batches
from spmd.sharding.mesh import BATCH_SPEC, make_mesh

WEIGHTS = [(0.7, 0.3), (1.0, *[1.0099] * 9), (5, 3, 1, 1), (0.9, 0.07, 0.03)]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("code=0.7:src", MixtureSource("code", "src", 0.7)),
        ("books=3,epochs=2:b/*.txt", MixtureSource("books", "b/*.txt", 3.0, 2)),
        ("web=1:C:/x=y/*.jsonl", MixtureSource("web", "C:/x=y/*.jsonl")),
    ],
)
def test_a_set_is_written_as_it_is_read(text, source):
    """Name, weight, epochs and source; a source may have colons and equals signs."""
    assert MixtureSource.parse(text) == source
    assert MixtureSource.parse(str(source)) == source


@pytest.mark.parametrize(
    "text", ["code", "code=src", "code=x:src", "=1:src", "code=1:", "code=1,epoch=2:src", "a/b=1:c"]
)
def test_another_form_is_refused(text):
    """With the form that is expected."""
    with pytest.raises(ConfigError, match="NAME=WEIGHT:SOURCE"):
        DataConfig(mixture=(text,))


def test_all_wrong_sets_are_named():
    """A weight that is not above 0, a name that is there twice or the run's own, and a source beside the mixture."""
    sets = ("a=0:x", "b=-1:x", "c=nan:x", "d=1:x", "d=1:y", "val=1:z")
    with pytest.raises(ConfigError) as caught:
        DataConfig(source=("s",), mixture=sets)
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("data.mixture", "has d twice"),
        ("data.mixture", "has val, the name of the run's own validation split"),
        *(
            (f"data.mixture {name}.weight", f"is {value}")
            for name, value in (("a", "0.0"), ("b", "-1.0"), ("c", "nan"))
        ),
        ("data.source", "is given, and data.mixture too"),
    ]


def off(which, weights):
    """The largest relative error of the weights that sets were drawn with."""
    exact = np.array(weights) / sum(weights)
    return np.abs(np.bincount(which, minlength=len(weights)) / len(which) / exact - 1).max()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_realised(weights):
    """After 10,000 draws each set has its share to 0.5 %, of itself, and any first n are off by less than two draws."""
    which, index = MixtureSchedule(weights).split(np.arange(10_000))
    assert off(which, weights) < 0.005
    share = np.array(weights) / sum(weights)
    drawn = np.cumsum(which[:, None] == np.arange(len(weights)), axis=0)
    assert np.abs(drawn - np.arange(1, 10_001)[:, None] * share).max() < 2
    for number in range(len(weights)):
        np.testing.assert_array_equal(index[which == number], np.arange(drawn[-1, number]))


def test_weights_are_realised_control():
    """Weights in whole hundredths of the smallest, as grain's own mixture has them, are found out."""
    sets = [grain.MapDataset.source([number]).repeat() for number in range(10)]
    mixed = grain.MapDataset.mix(sets, weights=WEIGHTS[1])
    assert off([mixed[position] for position in range(10_000)], WEIGHTS[1]) > 0.005


@pytest.mark.parametrize("weights", WEIGHTS)
def test_counts_are_those_of_the_draws(weights):
    """Counts of the first n, far out too, are what drawing them gives; draws go on evenly after a period."""
    shares = MixtureSchedule(weights)
    start, rest = 3 * PERIOD - 50, np.arange(100)
    which, index = shares.split(start + rest)
    before = np.array(shares.counts(start))
    after = np.array(shares.counts(start + 100))
    np.testing.assert_array_equal(after - before, np.bincount(which, minlength=len(weights)))
    assert sum(shares.counts(start)) == start
    for number in set(which.tolist()):
        np.testing.assert_array_equal(
            index[which == number], np.arange(before[number], after[number])
        )


def test_weights_too_far_apart_are_refused():
    """A set that would never be drawn is an error."""
    with pytest.raises(ConfigError, match="less than one draw in 16,777,216"):
        MixtureSchedule([1, 1e-9])


def packed(first, documents):
    """Packed documents of ids from `first` on."""
    lengths = np.random.default_rng(first).integers(3, 14, documents)
    return PackedDocuments(np.arange(first, first + lengths.sum()), np.cumsum(lengths), sequence=8)


def test_each_set_keeps_its_own_epochs():
    """Every pass over a set has each of its packed rows once, in another order, whatever the other set does."""
    sets = [packed(0, 20), packed(10_000, 30)]
    names = ("a", "b")
    mixed = MixtureSampler(
        [ShuffledSampler(rows, 7, name) for rows, name in zip(sets, names, strict=True)], [0.6, 0.4]
    )
    which, _ = MixtureSchedule([0.6, 0.4]).split(np.arange(200))
    rows = mixed.read(np.arange(200))
    assert set(rows) == {"tokens", "targets", "weights", "segments"}
    for number, each in enumerate(sets):
        found = [row.tobytes() for row in rows["tokens"][which == number]]
        size, whole = (
            len(each),
            sorted(row.tobytes() for row in each.rows(np.arange(len(each)))["tokens"]),
        )
        epochs = [found[first : first + size] for first in range(0, len(found) - size + 1, size)]
        assert len(epochs) >= 2
        assert all(sorted(epoch) == whole for epoch in epochs)
        assert epochs[0] != epochs[1]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Two sets of 40 and 20 documents."""
    for name, count in (("one", 40), ("two", 20)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 10)
    sets = (f"one=3:{tmp_path / 'one'}", f"two=1,epochs=2:{tmp_path / 'two'}")
    return DataConfig(mixture=sets, sequence=16, validation=0.2, cache=str(tmp_path / "cache"))


def test_a_set_that_ends_is_named_before_training(config):
    """With the draws that the run needs, those that there are, and what to change; one draw fewer is enough."""
    text = open_text(config)
    two = text.sets[1]
    most = 4 * 2 * len(two.train)  # every fourth draw is from it
    text.check_epochs(most // 8, BatchSizes(8))
    with pytest.raises(DataError) as caught:
        text.check_epochs(most // 8 + 1, BatchSizes(8))
    (problem,) = caught.value.problems
    assert problem.where == "data.mixture two"
    assert problem.detail == (
        f"{most // 8 + 1} steps × 8 sequences × 0.25 = {2 * len(two.train) + 2} draws > "
        f"{len(two.train)} sequences × 2 epochs = {2 * len(two.train)}"
    )
    assert f"--steps {most // 8} or less, epochs=3 or more" in problem.fix
    assert "of at most 2" in text.describe(10 * 8)


def test_what_the_order_depends_on_is_in_the_fingerprint(config):
    """Another weight, name or text is another order; the limit of epochs is not part of it."""
    one, two = config.mixture

    def fingerprint(*sets):
        return open_text(dataclasses.replace(config, mixture=sets)).fingerprint

    same = fingerprint(one, two)
    assert fingerprint(one, two.replace(",epochs=2", "")) == same
    others = [
        (one, two.replace("=1", "=2")),
        (one, two.replace("two=", "too=")),
        (one, one.replace("one=", "two=")),
    ]
    assert same not in {fingerprint(*sets) for sets in (*others, (two, one))}


def test_every_set_that_cannot_be_read_is_named(config):
    """With the set's name, all of them at once."""
    with pytest.raises(DataError) as caught:
        open_text(
            dataclasses.replace(config, mixture=("x=1:nowhere", config.mixture[0], "y=1:neither"))
        )
    assert [problem.where for problem in caught.value.problems] == ["x: nowhere", "y: neither"]


def test_the_whole_is_weighted(config):
    """Means over `val` are the sets' own means by weight, however many held-out tokens each has."""
    sharding = NamedSharding(make_mesh(data=8), BATCH_SPEC)
    whole, *own = held_out_sets(open_text(config))
    assert [each.name for each in (whole, *own)] == ["val", "one", "two"]

    def mean(each, tokens):
        batches = list(set_batches(each, 8, sharding, tokens))
        total = sum(np.asarray(x["weights"]).sum() for x in batches)
        return sum(
            (np.asarray(x["weights"]) * np.asarray(x["targets"])).sum() for x in batches
        ) / total, total

    (all_of_it, total), *parts = (mean(each, 0) for each in (whole, *own))
    assert all_of_it == pytest.approx(0.75 * parts[0][0] + 0.25 * parts[1][0], rel=1e-6)
    assert total == pytest.approx(sum(size for _, size in parts), rel=1e-6)
    # not that of all tokens
    assert abs(all_of_it - sum(x * size for x, size in parts) / total) > 1e-3 * all_of_it
    assert mean(whole, 64)[1] == 64
