"""Streamed text: blocks of documents, their cache, and an order that is a function of seed and position."""

import functools
import itertools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import spmd.data.streaming as streaming_module
import spmd.data.token_cache as blocks_module
from spmd.data import cache_folder
from spmd.data.cache_folder import CacheFolder
from spmd.data.loader import DataConfig, make_rows
from spmd.data.sources import find_files
from spmd.data.streaming import Streamed, StreamedText
from spmd.data.text_dataset import open_text
from spmd.data.token_cache import TextBlock, TokenCache, cut_blocks, tokenize
from spmd.data.tokenizer import ByteTokenizer
from spmd.errors import ConfigError, DataError

BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 400 bytes, of which three are shuffled together; written without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(blocks_module, "LEAST_BYTES", 400)
    monkeypatch.setattr(streaming_module, "WINDOW", 3)


def document(number: int) -> str:
    return f"document {number:03d} " * (3 + number % 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small files, and JSON lines that are larger than a block."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:03d}.txt").write_text(document(number))
    lines = [json.dumps({"text": document(number)}) for number in range(40, 80)]
    (folder / "more.jsonl").write_text("\n".join([*lines[:7], "", *lines[7:]]))
    return folder


def blocks_of(folder: Path) -> list[TextBlock]:
    return cut_blocks(find_files([str(folder)]))


def make_text(
    folder: Path, cache: Path, packing: str = "windows", threads: int = 2
) -> StreamedText:
    config = DataConfig(sequence=32, packing=packing)  # type: ignore[arg-type]
    rows = functools.partial(make_rows, config)
    return StreamedText(
        tuple(blocks_of(folder)), TokenCache(CacheFolder(cache), BYTES, "text"), rows, 32, threads
    )


@pytest.fixture
def text(folder: Path, tmp_path: Path) -> Callable[..., StreamedText]:
    return functools.partial(make_text, folder, tmp_path / "cache")


def test_every_document_is_in_one_block(folder: Path) -> None:
    """Blocks hold each document once; lines are cut apart only where one ends, and small files are put together."""
    blocks = blocks_of(folder)
    found = [BYTES.decode(tokenize(block, BYTES, "text")[0]).split("\0")[:-1] for block in blocks]
    assert sorted(itertools.chain.from_iterable(found)) == [
        document(number) for number in range(80)
    ]
    assert sum(block.size for block in blocks) == sum(
        path.stat().st_size for path in folder.iterdir()
    )
    ranges = [block for block in blocks if isinstance(block.parts[0], blocks_module.LineRange)]
    assert len(ranges) > 3
    assert all(400 <= block.size < 600 for block in ranges[:-1])
    assert all(len(block.parts) > 3 for block in blocks if block not in ranges[:] + blocks[-1:])
    first = [int(each[0].split()[1]) for each in found[len(ranges) :]]
    assert first != sorted(first)  # files are not in the order of their names


def test_blocks_do_not_depend_on_the_place(folder: Path, tmp_path: Path) -> None:
    """Digests and order are those of names and bytes, wherever the files are."""
    before = [block.digest for block in blocks_of(folder)]
    assert [block.digest for block in blocks_of(folder.rename(tmp_path / "elsewhere"))] == before


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_an_epoch_is_every_row_once(packing: str, text: Callable[..., StreamedText]) -> None:
    """Three epochs are three orders of all rows, each of which mixes blocks from the start."""
    streamed = text(packing)
    whole = streamed.rows_of(streamed.blocks)
    expected = sorted(row.tobytes() for row in whole.rows(np.arange(len(whole)))["tokens"])
    found = [
        row.tobytes() for row in Streamed(streamed, 3).read(np.arange(3 * len(whole)))["tokens"]
    ]
    epochs = [found[n * len(whole) : (n + 1) * len(whole)] for n in range(3)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert found[:20] != [
        row.tobytes() for row in Streamed(streamed, 4).read(np.arange(20))["tokens"]
    ]
    in_block = {
        row.tobytes(): n
        for n, rows in enumerate(whole.blocks)
        for row in rows.rows(np.arange(1))["tokens"]
    }
    assert len({in_block[row] for row in found[:60] if row in in_block}) > 1


@pytest.mark.parametrize("cache", ["warm", "cold"])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_position_is_enough_to_resume(
    cache: str, threads: int, folder: Path, tmp_path: Path
) -> None:
    """Rows from any position on are bitwise those of a run from the start, read in any order, with any cache."""
    whole = Streamed(make_text(folder, tmp_path / "warm"), 0).read(np.arange(200))
    order = Streamed(make_text(folder, tmp_path / cache, threads=threads), 0)
    for positions in (np.arange(150, 166), np.array([199, 2, 120, 121]), np.arange(0)):
        for name, rows in order.read(positions).items():
            np.testing.assert_array_equal(rows, whole[name][positions])
    order.stop_ahead()
    np.testing.assert_array_equal(
        order.read(np.arange(180, 190))["tokens"], whole["tokens"][180:190]
    )


def test_a_position_control(text: Callable[..., StreamedText]) -> None:
    """An order of other seeds, or of one block less, is another one."""
    whole = Streamed(text(), 0).read(np.arange(100))["tokens"]
    fewer = StreamedText(text().blocks[1:], text().cache, text().make_rows, 32, 0)
    for other in (Streamed(text(), 1), Streamed(text(), 0, "name"), Streamed(fewer, 0)):
        assert not np.array_equal(other.read(np.arange(100))["tokens"], whole)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the blocks that are tokenized from now on."""
    found = list[str]()

    def counted(block: TextBlock, *rest: object) -> tuple[np.ndarray, np.ndarray]:
        found.append(block.digest)
        return tokenize(block, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(blocks_module, "tokenize", counted)
    return found


def test_a_block_is_tokenized_once_for_all_runs(
    text: Callable[..., StreamedText], tokenized: list[str]
) -> None:
    """Runs at the same time, of other seeds and packings, share the work; one after them has none left."""
    orders = [
        Streamed(text("windows"), 0),
        Streamed(text("windows"), 1),
        Streamed(text("documents"), 2),
    ]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda order: order.read(np.arange(250)), orders))
    for order in orders:
        order.stop_ahead()
    assert sorted(tokenized) == sorted({block.digest for block in text().blocks})
    Streamed(text(), 5).read(np.arange(250))
    assert len(tokenized) == len(text().blocks)


def test_training_begins_before_all_is_tokenized(
    text: Callable[..., StreamedText], tokenized: list[str]
) -> None:
    """The first rows take the blocks of one window, and nothing more without threads."""
    Streamed(text(threads=0), 0).read(np.arange(8))
    assert len(tokenized) == 3


@pytest.mark.parametrize("damage", ["cut", "gone", "other", "ids", "type", "order"])
def test_a_damaged_block_is_made_again(
    damage: str, text: Callable[..., StreamedText], tokenized: list[str]
) -> None:
    """A truncated file, a missing one, one that does not fit its other, and one of other ids are made anew.

    The rows are the same.
    """
    whole = Streamed(text(threads=0), 0).read(np.arange(300))["tokens"]
    assert sorted(tokenized) == sorted(block.digest for block in text().blocks)
    cache, block, before = text().cache, text().blocks[0], len(tokenized)
    path = cache.path(block)
    ids = np.load(path / "ids.npy")
    ends = np.load(path / "ends.npy")
    if damage == "cut":
        content = (path / "ids.npy").read_bytes()
        (path / "ids.npy").write_bytes(content[:-3])
    elif damage == "gone":
        (path / "ends.npy").unlink()
    elif damage == "ids":
        np.save(path / "ids.npy", np.where(ids == 101, 300, ids).astype(np.uint16))
    elif damage == "type":
        np.save(path / "ids.npy", ids.astype(np.int64))
    elif damage == "order":
        ends[0] = ends[-1] + 1
        np.save(path / "ends.npy", ends)
    else:
        np.save(path / "ends.npy", np.array([1, 2]))
    np.testing.assert_array_equal(
        Streamed(text(threads=0), 0).read(np.arange(300))["tokens"], whole
    )
    assert tokenized[before:] == [block.digest]
    assert not list(path.parent.glob(".*"))


def test_a_block_that_another_process_is_at_is_left_to_it(
    text: Callable[..., StreamedText],
) -> None:
    """It is not waited for where other blocks can be made; its lock leaves no file behind."""
    cache, block = text().cache, text().blocks[0]
    lock = cache.path(block).with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with cache_folder._locked(lock, wait=False) as is_mine:
        assert is_mine
        assert not cache.make(block, wait=False)
        assert cache.open(block) is None
    assert cache.make(block, wait=False)
    assert not lock.exists()


@pytest.mark.parametrize(("name", "change"), [("003.txt", "whole file"), ("more.jsonl", "range")])
def test_a_file_that_changes_is_named(
    name: str, change: str, folder: Path, text: Callable[..., StreamedText]
) -> None:
    """Before its block is tokenized: an error in the loop that names the file; afterwards it is not read again."""
    del change
    streamed, later = text(threads=0), text(threads=0)  # no thread writes while files are removed
    whole = Streamed(streamed, 0).read(np.arange(100))["tokens"]
    path = folder / name
    path.write_text(path.read_text().replace("document", "DOCUMENT"))
    np.testing.assert_array_equal(Streamed(later, 0).read(np.arange(100))["tokens"], whole)
    for file in streamed.cache.cache.local.rglob("*.npy"):
        file.unlink()
    with pytest.raises(DataError) as caught:
        Streamed(streamed, 0).read(np.arange(300))
    assert any(
        problem.where == str(path) and "changed" in problem.what
        for problem in caught.value.problems
    )


def test_a_bad_line_is_named_by_its_number(folder: Path, text: Callable[..., StreamedText]) -> None:
    """A line that is no document is named as in the whole file, when its block is tokenized; a later one too."""
    path = folder / "more.jsonl"
    lines = path.read_text().split("\n")
    lines[30] = '{"txt": 1}'
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"more\.jsonl:31: is not a document"):
        Streamed(text(), 0).read(np.arange(300))


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    """A file in the place of the folder is an error with the fix."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="choose another folder"):
        Streamed(make_text(folder, tmp_path / "file"), 0).read(np.arange(4))


def stream(*source: Path, cache: Path, **fields: object) -> DataConfig:
    names = tuple(map(str, source))
    return DataConfig(names, sequence=32, streaming=True, cache=str(cache), **fields)  # type: ignore[arg-type]


def test_blocks_are_held_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation text is a fraction of the blocks, as many as hold enough tokens, and no part of training."""
    only = open_text(stream(folder, cache=tmp_path / "cache", validation=0.3)).sets[0]
    assert isinstance(only.text, StreamedText)
    whole = blocks_of(folder)
    held_out = [block for block in whole if block not in only.text.blocks]
    assert len(held_out) == int(0.3 * len(whole)) == len(whole) - len(only.text.blocks)
    own = only.text.rows_of(sorted(held_out, key=lambda block: block.digest))
    every = np.arange(len(only.validation))
    np.testing.assert_array_equal(only.validation.rows(every)["tokens"], own.rows(every)["tokens"])
    assert f"{len(own)} validation sequences" in only.describe()
    monkeypatch.setattr(streaming_module, "HELD_OUT", 100)
    few = open_text(stream(folder, cache=tmp_path / "cache", validation=0.3)).sets[0]
    assert isinstance(few.text, StreamedText)
    assert len(few.text.blocks) == len(whole) - 1


def test_text_of_one_block_is_refused(tmp_path: Path) -> None:
    """A text too short for a block to be held out is an error that says what to do."""
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match=r"no --data\.streaming"):
        open_text(stream(tmp_path / "short.txt", cache=tmp_path / "cache"))


def test_a_limit_of_epochs_is_refused() -> None:
    """It could not be checked before training."""
    with pytest.raises(ConfigError, match="cannot be checked before"):
        DataConfig(mixture=("a=1:x", "b=1,epochs=2:y"), streaming=True)


def test_a_mixture_is_streamed(folder: Path, tmp_path: Path) -> None:
    """Sets of a streamed mixture have shares as others do, and rows of their own."""
    sets = (f"lines=3:{folder / 'more.jsonl'}", f"files=1:{folder / '*.txt'}")
    text = open_text(
        DataConfig(mixture=sets, sequence=32, streaming=True, cache=str(tmp_path / "cache"))
    )
    found = text.order(0).read(np.arange(200))
    lines = text.sets[0].text
    assert isinstance(lines, StreamedText)
    rows = lines.rows_of(lines.blocks)
    own = {row.tobytes() for row in rows.rows(np.arange(len(rows)))["tokens"]}
    assert sum(row.tobytes() in own for row in found["tokens"]) == 150
    assert "0.75 of the sequences: 4,800 tokens\n" in text.describe(20 * 10)
