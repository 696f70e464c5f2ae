"""Loaders with a state: what is saved of them, how they are set to it, and what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest

from spmd.data.process_batches import ProcessShard
from spmd.errors import CheckpointError, ConfigError
from spmd.run.loader import SavedLoader, _decode, _encode

ALONE = ProcessShard(0, 1, (0,))


class Stateful:
    """A loader in the form of torchdata's: the methods are the loader's, and each `iter` is another iterator."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.drawn += 1
            yield self.drawn, self.draws.normal(size=2).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.bit_generator.state, "drawn": np.int64(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.bit_generator.state = state["draws"]
        self.drawn = int(state["drawn"])


class Walk:
    """An iterator with a state."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)

    def __iter__(self) -> "Walk":
        return self

    def __next__(self) -> float:
        return self.draws.normal()

    def get_state(self) -> Any:
        return self.draws.bit_generator.state

    def set_state(self, state: Any) -> None:
        self.draws.bit_generator.state = state


def filtered() -> grain.IterDataset:
    """A dataset of grain, whose iterators have a state."""
    dataset = grain.MapDataset.range(100).seed(0).shuffle().repeat().to_iter_dataset()
    return dataset.filter(lambda number: number % 3 == 0).batch(2)


def text(batch: Any) -> str:
    return json.dumps(np.asarray(batch, dtype=object).tolist(), default=str)


def take(batches: Iterator[Any], count: int) -> list[str]:
    return [text(next(batches)) for _ in range(count)]


@pytest.mark.parametrize(
    "make",
    [Stateful, Walk, filtered, lambda: iter(filtered())],
    ids=["torchdata", "own", "ds", "it"],
)
def test_a_loader_goes_on_from_its_state(make: Any) -> None:
    """A new loader, set to the state after three batches by way of JSON, gives the fourth; one begun anew the first."""
    whole = take(SavedLoader(make(), ALONE).open(None, 0), 8)
    assert len(set(whole)) == 8
    first = SavedLoader(make(), ALONE)
    assert take(first.open(None, 0), 4) == whole[:4]  # one is drawn ahead
    saved = json.loads(json.dumps(first.record(3)))
    assert saved["batches"] == 3
    again = SavedLoader(make(), ALONE)
    assert take(again.open(saved, 3), 5) == whole[3:]
    assert take(again.open(saved, 5), 3) == whole[5:]  # batches that a rollback skips
    assert take(again.open(None, 0), 2) == whole[:2]  # and a rollback to the beginning
    assert take(SavedLoader(make(), ALONE).open(None, 6), 2) == whole[6:]


def test_states_are_saved_as_they_are() -> None:
    """JSON, and what it lacks: tuples, bytes, arrays, keys that are no strings."""
    state = {
        "plain": [1, -2.5, True, None, "text", {"a": []}],
        "tuple": (1, (2, [3])),
        "bytes": b"\x00\xff",
        "array": np.arange(6, dtype=np.uint64).reshape(2, 3),
        "scalar": np.float32(0.1),
        3: {"$bytes": "a name", "big": 2**127},
    }
    found = _decode(json.loads(_encode(state)))
    np.testing.assert_array_equal(found.pop("array"), state.pop("array"))
    assert found == state
    assert (type(found["scalar"]), type(found["tuple"])) == (np.float32, tuple)


@pytest.mark.soak
def test_tensors_of_torch_are_saved() -> None:
    """The state of a generator, which samplers of torchdata have in theirs."""
    import torch

    tensor = torch.Generator().manual_seed(1).get_state()
    assert torch.equal(_decode(json.loads(_encode({"t": tensor})))["t"], tensor)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()])])
def test_a_state_that_cannot_be_saved_is_named(value: Any) -> None:
    """By its place in the state; nothing is pickled."""
    with pytest.raises(ConfigError, match=r"state\['a'\]\[1\]: is "):
        _encode({"a": [1, value]})


def test_loaders_without_a_state_are_refused() -> None:
    """A list, or an iterator with one of the two methods."""
    for loader in ([1, 2], iter([1]), (number for number in range(3))):
        with pytest.raises(ConfigError, match="without a state to save"):
            next(SavedLoader(loader, ALONE).open(None, 0))


def test_states_of_other_parts_are_refused() -> None:
    """A run that was saved by two parts of a batch is not resumed with one."""
    saved = {"batches": 2, "states": ["{}", "{}"]}
    with pytest.raises(
        CheckpointError, match="was saved for 2 parts of each batch, and there are 1"
    ):
        SavedLoader(Walk(), ALONE).check_record(saved)
    SavedLoader(Walk(), ALONE).check_record({"batches": 2, "states": ["{}"]})
