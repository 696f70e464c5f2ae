"""Batches: every token once, the same order for any process count, resumed by number, placed where they belong."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.data.loader import (
    Batch,
    DataConfig,
    Windows,
    batches,
    check_batch_size,
    evaluation_batches,
    load_corpus,
    local_rows,
    ordered_batches,
)
from spmd.data.sampler import MixtureSampler, Sampler, ShuffledSampler
from spmd.data.text_dataset import open_text
from spmd.errors import ConfigError, DataError, MeshError

SEQUENCE = 6
BATCH = 8


@pytest.fixture
def sharding() -> NamedSharding:
    """Rows over 2 × 2 devices and columns over 2."""
    assert jax.device_count() >= 8
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "sequence"))
    return NamedSharding(mesh, P(("data", "fsdp"), "sequence"))


@pytest.fixture
def replicated() -> NamedSharding:
    """Rows over 2 devices, each half on 4 of them."""
    assert jax.device_count() >= 8
    return NamedSharding(
        Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor")), P("data")
    )


def make_windows(n: int = 20 * SEQUENCE + 3) -> Windows:
    """Windows whose ids are 1, 2, …, n, so that an id says where it is from."""
    return Windows(np.arange(1, n + 1, dtype=np.uint16), SEQUENCE)


def first_ids(batch: Batch) -> list[int]:
    """The window number of every row."""
    return ((np.asarray(batch["tokens"])[:, 0] - 1) // SEQUENCE).tolist()


def run(
    windows: Windows,
    sharding: NamedSharding,
    start: int,
    steps: int,
    *,
    seed: int = 0,
    threads: int = 2,
) -> list[dict[str, np.ndarray]]:
    """The batches of some steps on the host."""
    with batches(
        windows,
        batch=BATCH,
        sharding=sharding,
        seed=seed,
        start=start,
        steps=steps,
        threads=threads,
    ) as found:
        return [{name: np.asarray(value) for name, value in batch.items()} for batch in found]


@pytest.mark.parametrize(
    "n", [2, 3, SEQUENCE, SEQUENCE + 1, SEQUENCE + 2, 5 * SEQUENCE, 5 * SEQUENCE + 1, 47]
)
def test_every_token_is_predicted_exactly_once(n: int) -> None:
    """Over all windows the weighted targets are the tokens 1 … n-1 in order, each after its own predecessor."""
    tokens = np.arange(100, 100 + n, dtype=np.uint16)
    windows = Windows(tokens, SEQUENCE)
    assert len(windows) == math.ceil((n - 1) / SEQUENCE)
    rows = windows.rows(np.arange(len(windows)))
    real = rows["weights"] == 1
    np.testing.assert_array_equal(rows["targets"][real], tokens[1:])
    np.testing.assert_array_equal(rows["tokens"][real], tokens[:-1])
    assert rows["weights"].sum() == n - 1
    assert not rows["targets"][~real].any()
    assert {name: (v.dtype, v.shape) for name, v in rows.items()} == {
        "tokens": (np.int32, (len(windows), SEQUENCE)),
        "targets": (np.int32, (len(windows), SEQUENCE)),
        "weights": (np.float32, (len(windows), SEQUENCE)),
    }


def test_windows_refuse_what_they_cannot_read() -> None:
    """Too few tokens, a bad length and a window past the end are errors."""
    with pytest.raises(DataError) as caught:
        Windows(np.arange(1), 0)
    assert len(caught.value.problems) == 2
    with pytest.raises(IndexError):
        make_windows().rows(np.array([len(make_windows())]))


def test_an_epoch_is_every_window_once_and_the_next_in_another_order(
    sharding: NamedSharding,
) -> None:
    """Three epochs read in batches that straddle their ends are three different permutations of all windows."""
    windows = make_windows()
    assert len(windows) % BATCH
    steps = math.ceil(3 * len(windows) / BATCH)
    order = [i for batch in run(windows, sharding, 0, steps) for i in first_ids(batch)]
    epochs = [order[e * len(windows) : (e + 1) * len(windows)] for e in range(3)]
    assert all(sorted(epoch) == list(range(len(windows))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tuple(range(len(windows))) not in {tuple(epoch) for epoch in epochs}


def test_seeds_are_orders_of_their_own(sharding: NamedSharding) -> None:
    """One seed is one order, and another seed is not the first one an epoch later."""
    windows = make_windows(16 * SEQUENCE + 1)
    epochs = {
        seed: [first_ids(b) for b in run(windows, sharding, 0, 6, seed=seed)] for seed in (0, 1)
    }
    assert epochs[0] == [first_ids(b) for b in run(windows, sharding, 0, 6)]
    assert epochs[0] != epochs[1]
    assert epochs[0][2:4] != epochs[1][0:2]


@pytest.mark.parametrize("start", [0, 1, 4, 7])
@pytest.mark.parametrize("threads", [0, 3])
def test_a_resumed_run_sees_exactly_the_remaining_batches(
    start: int, threads: int, sharding: NamedSharding
) -> None:
    """Batches from step k on are those of the uninterrupted run, to the last id, in any number of threads."""
    whole = run(make_windows(), sharding, 0, 7)
    rest = run(make_windows(), sharding, start, 7, threads=threads)
    assert len(rest) == 7 - start
    for expected, found in zip(whole[start:], rest, strict=True):
        assert expected.keys() == found.keys()
        for name in expected:
            np.testing.assert_array_equal(expected[name], found[name])


def test_batches_do_not_depend_on_the_mesh(
    sharding: NamedSharding, replicated: NamedSharding
) -> None:
    """Two ways to split a batch hold the same global batch, and each array has the sharding asked for."""
    for one, other in zip(
        run(make_windows(), sharding, 0, 3), run(make_windows(), replicated, 0, 3), strict=True
    ):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    with batches(make_windows(), batch=BATCH, sharding=sharding, seed=0, start=0, steps=1) as found:
        for value in next(found).values():
            assert value.sharding == sharding
            assert value.shape == (BATCH, SEQUENCE)
            assert len(value.addressable_shards) == 8
            for shard in value.addressable_shards:
                assert shard.data.shape == (2, 3)
                np.testing.assert_array_equal(shard.data, np.asarray(value)[shard.index])


def test_two_processes_read_disjoint_rows_that_make_the_batch(sharding: NamedSharding) -> None:
    """Rows of two halves of the devices are disjoint and their union is every row, once."""
    blocks = sharding.devices_indices_map((BATCH, SEQUENCE))
    devices = list(sharding.mesh.devices.flat)
    parts = [
        local_rows([blocks[d] for d in half], BATCH).tolist() for half in (devices[:4], devices[4:])
    ]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Interleaved processes hold rows that are not neighbours.
    parts = [
        local_rows([blocks[d] for d in half], BATCH).tolist()
        for half in (devices[::4], devices[2::4])
    ]
    assert parts == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # Processes that split only the columns both read every row.
    parts = [
        local_rows([blocks[d] for d in half], BATCH).tolist()
        for half in (devices[::2], devices[1::2])
    ]
    assert parts == [list(range(BATCH))] * 2


class ProcessSharding:
    """What a sharding looks like in a process that has some of the devices only."""

    def __init__(self, sharding: NamedSharding, devices: set[jax.Device]) -> None:
        self.spec, self.mesh, self.whole, self.devices = (
            sharding.spec,
            sharding.mesh,
            sharding,
            devices,
        )

    def addressable_devices_indices_map(
        self, shape: tuple[int, int]
    ) -> dict[jax.Device, tuple[slice, ...]]:
        blocks = self.whole.addressable_devices_indices_map(shape)
        return {device: block for device, block in blocks.items() if device in self.devices}


def make_mixture() -> MixtureSampler:
    """Three sets of different lengths, whose ids say which row of which set they are."""
    sets = [
        Windows(np.arange(10_000 * n + 1, 10_000 * n + 6 * n * SEQUENCE + 2), SEQUENCE)
        for n in (1, 2, 3)
    ]
    return MixtureSampler(
        [ShuffledSampler(each, 5, str(n)) for n, each in enumerate(sets)], [0.5, 0.3, 0.2]
    )


def read_as(
    order: Sampler, sharding: NamedSharding, processes: int, start: int, steps: int
) -> list[list[int]]:
    """The first ids of the rows of each step, put together from what each of several processes reads."""
    devices, size = list(sharding.mesh.devices.flat), sharding.mesh.size // processes
    whole = [[0] * BATCH for _ in range(start, steps)]
    for process in range(processes):
        mine = ProcessSharding(sharding, set(devices[process * size : (process + 1) * size]))
        blocks = mine.addressable_devices_indices_map((BATCH, SEQUENCE)).values()
        rows = local_rows(blocks, BATCH)
        found: list[np.ndarray] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                jax,
                "make_array_from_process_local_data",
                lambda *call, found=found: found.append(call[1]),
            )
            kind = cast("NamedSharding", mine)
            options = {"batch": BATCH, "start": start, "steps": steps, "threads": 0}
            with ordered_batches(order, sharding=kind, **options) as stream:  # type: ignore[arg-type]
                list(stream)
        for step, tokens in enumerate(found[::3]):
            for row, first in zip(rows.tolist(), tokens[:, 0].tolist(), strict=True):
                assert whole[step][row] in (0, first)
                whole[step][row] = first
    return whole


def make_stream(folder: Path, cache: str) -> Sampler:
    """A streamed mixture of two sets, of blocks that no other run has tokenized."""
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
        for number in range(20):
            (folder / name / f"{number}.txt").write_text(f"{name} {number}: {number**9} " * 9)
    sets = (f"a=2:{folder / 'one'}", f"b=1:{folder / 'two'}")
    return open_text(
        DataConfig(mixture=sets, sequence=SEQUENCE, streaming=True, cache=str(folder / cache))
    ).order(0)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", ["mixture", "stream"])
def test_an_order_is_the_same_for_any_number_of_processes(
    kind: str,
    processes: int,
    sharding: NamedSharding,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that two or four processes read make the batches of one, which are those of the order."""
    monkeypatch.setattr("spmd.data.token_cache.LEAST_BYTES", 500)
    one, many, plain = (
        make_mixture() if kind == "mixture" else make_stream(tmp_path, name) for name in "abc"
    )
    expected = plain.read(np.arange(6 * BATCH))["tokens"][:, 0].reshape(6, BATCH).tolist()
    assert read_as(one, sharding, 1, 0, 6) == expected
    assert read_as(many, sharding, processes, 0, 6) == expected


def test_a_mixture_control(sharding: NamedSharding) -> None:
    """An order that counts what it has handed out, as a queue does, is another one for two processes."""

    class Queue(MixtureSampler):
        taken = 0

        def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
            self.taken += len(positions)
            return super().read(np.arange(self.taken - len(positions), self.taken))

    one, two = (Queue(make_mixture()._orders, [0.5, 0.3, 0.2]) for _ in range(2))
    expected = read_as(make_mixture(), sharding, 1, 0, 6)
    assert read_as(one, sharding, 1, 0, 6) == expected
    assert read_as(two, sharding, 2, 0, 6) != expected


@pytest.mark.parametrize("start", [1, 5])
def test_a_mixture_resumes_from_the_step(start: int, sharding: NamedSharding) -> None:
    """Batches from step k on are those of the uninterrupted run, to the last id."""
    options = {"batch": BATCH, "sharding": sharding, "steps": 6}
    with ordered_batches(make_mixture(), start=0, **options) as stream:  # type: ignore[arg-type]
        whole = [{name: np.asarray(x) for name, x in batch.items()} for batch in stream]
    with ordered_batches(make_mixture(), start=start, **options) as stream:  # type: ignore[arg-type]
        rest = [{name: np.asarray(x) for name, x in batch.items()} for batch in stream]
    assert len(rest) == 6 - start
    for expected, found in zip(whole[start:], rest, strict=True):
        for name in expected:
            np.testing.assert_array_equal(expected[name], found[name])


@dataclasses.dataclass(frozen=True, eq=False)
class CountingWindows(Windows):
    """Windows that remember what was read."""

    read: list[int] = dataclasses.field(default_factory=list)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.read.extend(indices.tolist())
        return super().rows(indices)


def test_a_process_reads_only_its_rows(
    sharding: NamedSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with half of the rows reads those windows of the global order, and hands JAX these rows alone."""
    expected = [first_ids(batch) for batch in run(make_windows(), sharding, 0, 3)]
    local: list[tuple[np.ndarray, tuple[int, int]]] = []
    monkeypatch.setattr(
        jax,
        "make_array_from_process_local_data",
        lambda sharding, rows, shape: local.append((rows, shape)),
    )
    windows, devices = (
        CountingWindows(make_windows().tokens, SEQUENCE),
        list(sharding.mesh.devices.flat),
    )
    half = ProcessSharding(sharding, {*devices[2:4], *devices[6:]})
    with batches(windows, batch=BATCH, sharding=half, seed=0, start=0, steps=3, threads=0) as found:  # type: ignore[arg-type]
        list(found)
    mine = [[order[row] for row in (2, 3, 6, 7)] for order in expected]
    assert windows.read == [i for order in mine for i in order]
    tokens, shape = local[0]
    np.testing.assert_array_equal((tokens[:, 0] - 1) // SEQUENCE, mine[0])
    assert (tokens.shape, shape) == ((4, SEQUENCE), (BATCH, SEQUENCE))


def test_each_row_is_read_once_however_often_it_is_replicated(replicated: NamedSharding) -> None:
    """Eight devices that hold each row four times cause one read a row."""
    windows = CountingWindows(make_windows().tokens, SEQUENCE)
    run(windows, replicated, 0, 2)
    assert len(windows.read) == 2 * BATCH


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_come_without_implicit_transfers(threads: int, sharding: NamedSharding) -> None:
    """Under a global ban on implicit transfers batches of both kinds arrive and can be used."""
    step = jax.jit(lambda batch: (batch["tokens"] * batch["weights"]).sum())
    before = jax.config.jax_transfer_guard
    # Set for all threads: the context manager would guard the consuming thread only.
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            jax.numpy.sin(np.ones(3))
        with batches(
            make_windows(),
            batch=BATCH,
            sharding=sharding,
            seed=0,
            start=0,
            steps=3,
            threads=threads,
        ) as found:
            values = [step(batch) for batch in found]
        values += [
            step(batch)
            for batch in evaluation_batches(
                make_windows(), batch=BATCH, sharding=sharding, tokens_at_most=60
            )
        ]
    finally:
        jax.config.update("jax_transfer_guard", before)
    assert all(float(value) > 0 for value in values)
    assert len(values) == 5


def grain_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grain")}


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails when threads that read ahead outlive the test by more than 30 s."""
    before = grain_threads()
    yield
    deadline = time.monotonic() + 30
    while (left := grain_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.mark.usefixtures("no_thread_is_left")
def test_closing_stops_the_threads(sharding: NamedSharding) -> None:
    """After an early exit from the loop no thread is left, and a closed iterator says that it is closed."""
    with batches(
        make_windows(), batch=BATCH, sharding=sharding, seed=0, start=0, steps=10**6
    ) as found:
        assert iter(found) is found
        next(found)
        assert grain_threads()
    with pytest.raises(ValueError, match="closed"):
        next(found)
    found.close()


@pytest.mark.usefixtures("no_thread_is_left")
def test_an_error_while_reading_reaches_the_loop(sharding: NamedSharding) -> None:
    """What goes wrong in a reading thread is raised where the batch is asked for."""

    class Broken(Windows):
        def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            raise OSError("the disk is gone")

    windows = Broken(make_windows().tokens, SEQUENCE)
    with (
        batches(windows, batch=BATCH, sharding=sharding, seed=0, start=0, steps=3) as found,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        next(found)


def test_no_more_than_the_prefetched_batches_are_read_ahead(sharding: NamedSharding) -> None:
    """With a buffer of two, after one batch at most three have been read."""
    windows = CountingWindows(make_windows().tokens, SEQUENCE)
    with batches(
        windows, batch=BATCH, sharding=sharding, seed=0, start=0, steps=50, prefetch=2
    ) as found:
        next(found)
        time.sleep(0.1)
        assert BATCH <= len(windows.read) <= 3 * BATCH


@pytest.mark.parametrize(("start", "steps"), [(-1, 3), (4, 3)])
def test_a_start_outside_the_run_is_refused(
    start: int, steps: int, sharding: NamedSharding
) -> None:
    """Resuming before step 0 or past the end is an error, not an empty run."""
    with pytest.raises(ConfigError, match="is outside the run"):
        run(make_windows(), sharding, start, steps)


@pytest.mark.parametrize(
    ("n", "at_most", "windows_read", "weight"),
    [
        (123, 10**9, 21, 122),  # all of them, the last window and the last batch padded
        (123, 1, 1, SEQUENCE),
        (123, 2 * SEQUENCE, 2, 2 * SEQUENCE),
        (123, 2 * SEQUENCE + 1, 3, 3 * SEQUENCE),
        (16 * SEQUENCE + 1, 10**9, 16, 16 * SEQUENCE),
    ],
)
def test_evaluation_reads_the_first_windows_in_order(
    n: int, at_most: int, windows_read: int, weight: int, sharding: NamedSharding
) -> None:
    """The first tokens come in order, in batches of one shape, rounded up to windows, padded with weight 0."""
    found = list(
        evaluation_batches(make_windows(n), batch=BATCH, sharding=sharding, tokens_at_most=at_most)
    )
    assert len(found) == math.ceil(windows_read / BATCH)
    assert {value.shape for batch in found for value in batch.values()} == {(BATCH, SEQUENCE)}
    assert {value.sharding for batch in found for value in batch.values()} == {sharding}
    weights = np.concatenate([np.asarray(batch["weights"]) for batch in found])
    targets = np.concatenate([np.asarray(batch["targets"]) for batch in found])
    assert weights.sum() == weight
    np.testing.assert_array_equal(targets[weights == 1], np.arange(2, weight + 2))
    assert not targets[weights == 0].any()


def test_batches_that_do_not_divide_are_refused_with_the_arithmetic(
    sharding: NamedSharding,
) -> None:
    """Rows and columns that do not split evenly are both reported, before anything is read."""
    with pytest.raises(MeshError) as caught:
        check_batch_size(10, 7, sharding)
    message = str(caught.value)
    assert "10 / (data=2 × fsdp=2) = 2.5" in message
    assert "fix: batch 8 or 12" in message
    assert "7 / (sequence=2) = 3.5" in message
    with pytest.raises(MeshError, match="3 / "):
        check_batch_size(3, 8, sharding)
    with pytest.raises(MeshError, match="3 > 2"):
        check_batch_size(8, 8, NamedSharding(sharding.mesh, P("data", None, "fsdp")))
    check_batch_size(4, 2, sharding)
    check_batch_size(1, 1, NamedSharding(sharding.mesh, P()))
    check_batch_size(7, 2, NamedSharding(sharding.mesh, P(None, "sequence")))
    windows = make_windows()
    with pytest.raises(MeshError):
        batches(windows, batch=9, sharding=sharding, seed=0, start=0, steps=1)
    with pytest.raises(MeshError):
        evaluation_batches(windows, batch=9, sharding=sharding, tokens_at_most=1)
    with pytest.raises(ConfigError, match="at least 1"):
        evaluation_batches(windows, batch=8, sharding=sharding, tokens_at_most=0)


def test_a_loaded_corpus_becomes_batches(tmp_path: Path, sharding: NamedSharding) -> None:
    """From files to placed batches: the ids of a step decode to text of the training files."""
    for i in range(10):
        (tmp_path / f"{i}.md").write_text(f"text number {i} " * 8)
    corpus = load_corpus(
        DataConfig(source=(str(tmp_path),), sequence=SEQUENCE, cache=str(tmp_path / "cache"))
    )
    whole = corpus.tokenizer.decode(corpus.train)
    for batch in run(Windows(corpus.train, SEQUENCE), sharding, 0, 3):
        for tokens, weights in zip(batch["tokens"], batch["weights"], strict=True):
            assert corpus.tokenizer.decode(tokens[weights == 1]) in whole
