"""Batches of several shapes: sizes that grow, and rows of similar lengths; both are functions of the step."""

import dataclasses

import numpy as np
import pytest

from spmd.data.batch_order import ConsecutiveRows
from spmd.data.batch_sizes import BatchSizes
from spmd.data.length_groups import LengthGroups, group_lengths
from spmd.data.loader import DataConfig, Windows
from spmd.data.packing import PackedDocuments
from spmd.data.sampler import ShuffledSampler
from spmd.diloco.config import DiLoCoConfig
from spmd.errors import ConfigError
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.run.config import TrainConfig

SIZES = BatchSizes.parse(8, ("2:3", "4:5"))


def documents(count: int, longest: int) -> PackedDocuments:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(2.5, 0.8, count).astype(int) + 2, longest + 1)
    ends = np.cumsum(lengths)
    return PackedDocuments(np.arange(ends[-1]), ends, longest, alone=True)


def test_sizes_add_up() -> None:
    """Rows before a batch are the sum of those of the batches before it."""
    rows = [SIZES.rows(number) for number in range(9)]
    assert rows == [2, 2, 2, 4, 4, 8, 8, 8, 8]
    for number in range(9):
        assert SIZES.rows_before(number) == sum(rows[:number])
        assert SIZES.steps_within(SIZES.rows_before(number)) == number
        assert SIZES.steps_within(SIZES.rows_before(number + 1) - 1) == number
    assert SIZES.distinct(0, 9) == [2, 4, 8]
    assert SIZES.distinct(3, 5) == [4]
    assert SIZES.distinct(4, 6) == [4, 8]


def test_growing_batches_have_each_row_once() -> None:
    """An epoch of 40 rows in batches of 2, 4 and 8, as in batches of 8."""
    rows = Windows(np.arange(40 * 4 + 1), sequence=4)
    order = ConsecutiveRows(ShuffledSampler(rows, seed=0), SIZES)
    found = []
    for number in range(20):
        size, length = order.shape(number)
        batch = order.read(number, np.arange(size))
        assert batch["tokens"].shape == (size, length)
        found += batch["tokens"][:, 0].tolist()
    assert sorted(found[:40]) == sorted(range(0, 160, 4))
    alone = order.read(6, np.array([3]))["tokens"]
    np.testing.assert_array_equal(alone, order.read(6, np.arange(8))["tokens"][3:4])


@pytest.mark.parametrize("batch", [8, 7])
def test_groups_have_each_document_once(batch: int) -> None:
    """In each epoch, in another order; rows of one batch fit its length, and the last is filled with nothing."""
    rows = documents(100, longest=64)
    order = LengthGroups(rows, batch, seed=0, groups=4)
    per_epoch = -(-len(rows) // batch)
    epochs = []
    for epoch in range(2):
        found = []
        for number in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            size, length = order.shape(number)
            read = order.read(number, np.arange(size))
            assert read["tokens"].shape == (batch, length)
            assert "segments" not in read
            is_real = read["weights"].any(axis=1)
            longest = int(read["weights"].sum(axis=1).max())
            assert longest <= length
            found += read["tokens"][is_real, 0].tolist()
            np.testing.assert_array_equal(
                order.read(number, np.array([1, 4]))["targets"], read["targets"][[1, 4]]
            )
        starts = np.concatenate([[0], rows.ends[:-1]])
        assert sorted(found) == starts.tolist()
        epochs.append(found)
    assert epochs[0] != epochs[1]
    again = LengthGroups(rows, batch, seed=0, groups=4)
    other = LengthGroups(rows, batch, seed=1, groups=4)
    first = order.read(0, np.arange(batch))["tokens"]
    np.testing.assert_array_equal(again.read(0, np.arange(batch))["tokens"], first)
    assert not np.array_equal(other.read(0, np.arange(batch))["tokens"], first)


def test_lengths_are_those_of_least_padding() -> None:
    """Of all choices; few documents, or few groups, have fewer."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 64, 200) ** 2 // 64 + 1
    chosen = group_lengths(lengths, longest=64, groups=3)

    def padded(groups: tuple[int, ...]) -> int:
        bounds = np.array(groups)
        return int(bounds[np.searchsorted(bounds, lengths)].sum())

    tried = [(a, b, 64) for a in range(4, 64, 4) for b in range(a + 4, 64, 4)]
    assert padded(chosen) == min(map(padded, tried)) < padded((64,))
    assert group_lengths(np.array([64, 63]), longest=64, groups=3) == (64,)
    assert group_lengths(np.array([3]), longest=5, groups=4) == (3, 5)
    assert group_lengths(lengths, longest=64, groups=3, multiple=16) == (16, 48, 64)
    long = group_lengths(np.arange(1, 2049), longest=2049, groups=4)
    assert all(length % 128 == 0 for length in long[:-1])
    few = group_lengths(np.arange(1, 32), longest=31, groups=16)
    assert len(few) == 16
    assert all(length % 2 == 0 for length in few[:-1])


def test_what_a_ramp_and_groups_do_not_go_with() -> None:
    """A ramp that does not grow, other fields, tasks and methods; all problems at once."""
    with pytest.raises(ConfigError) as raised:
        DataConfig(batch=8, batch_ramp=("4:10", "2:20", "x", "8:30"))
    found = [problem.where for problem in raised.value.problems]
    assert found == [f"data.batch_ramp[{index}]" for index in (1, 2, 3)]
    with pytest.raises(ConfigError, match="is 0:10: no sequences"):
        DataConfig(batch_ramp=("0:10",))
    with pytest.raises(ConfigError, match=r"data\.streaming"):
        DataConfig(packing="grouped", streaming=True)
    with pytest.raises(ConfigError, match=r"data\.batch_ramp"):
        DataConfig(packing="grouped", batch_ramp=("2:3",))
    with pytest.raises(ConfigError, match=r"data\.length_groups"):
        DataConfig(length_groups=3)
    config = TrainConfig(model=PRESETS["test"], rules=LLAMA)
    ramp = DataConfig(batch_ramp=("2:10",))
    with pytest.raises(ConfigError, match="replicas have batches of one size"):
        dataclasses.replace(config, data=ramp, diloco=DiLoCoConfig(every=10))
    with pytest.raises(ConfigError, match="side by side"):
        dataclasses.replace(config, data=DataConfig(packing="grouped"), task="dpo")
