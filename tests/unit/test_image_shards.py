"""Images of tar files and of Parquet files are the rows that the same images in folders are."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pyarrow import parquet

from spmd.data import image_tables
from spmd.data.image_shards import ImageShards, expand_range
from spmd.data.images import ImageFolder, Images
from spmd.data.loader import batches
from spmd.errors import ConfigError, DataError
from spmd.sharding.mesh import BATCH_AXES, make_mesh

CLASSES = ("cat", "dog", "emu")
LABELS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
CROPS = {"size": 5, "crop": "random", "views": 3, "seed": 4}


def encoded(number: int, form: str = "png") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (12, 16, 3)).astype(np.uint8)
    content = io.BytesIO()
    PIL.Image.fromarray(pixels).save(content, form)
    return content.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(number: int, label: Any, key: str = "") -> list[tuple[str, bytes]]:
    """Members with the label in `.cls`, or of every third sample in `.json`."""
    key = key or f"more/{number:04d}"
    if number % 3:
        return [(f"{key}.png", encoded(number)), (f"{key}.cls", str(label).encode())]
    record = json.dumps({"label": label, "width": 16})
    return [(f"{key}.json", record.encode()), (f"{key}.png", encoded(number))]


def write_table(path: Path, numbers: Sequence[int], labels: Sequence[Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded(number), "path": f"{number}.png"} for number in numbers]
    columns = {"image": images, "label": list(labels)}
    table = pa.table(columns)
    names = options.pop("names", CLASSES)
    if names:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, path, row_group_size=2, **options)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The same ten images in folders, in tar shards and in Parquet shards."""
    for number, label in enumerate(LABELS):
        path = tmp_path / "folder" / CLASSES[label] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number))
    for shard, numbers in enumerate((range(6), range(6, 10))):
        members = [each for number in numbers for each in sample(number, LABELS[number])]
        write_tar(tmp_path / "tar" / f"train-{shard:03d}.tar", members)
        labels = [LABELS[number] for number in numbers]
        write_table(tmp_path / "hub" / f"train-{shard:05d}-of-00002.parquet", numbers, labels)
    return tmp_path


def all_rows(images: Images) -> dict[str, np.ndarray]:
    return images.rows(np.arange(len(images)))


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, rows in one.items():
        np.testing.assert_array_equal(rows, other[name])


@pytest.mark.parametrize("shards", ["tar/train-{000..001}.tar", "tar", "hub/*.parquet", "hub"])
def test_rows_are_those_of_folders(root: Path, shards: str) -> None:
    """Pixels, crops and labels are equal, in every order of reading; with another seed they are not."""
    folder = ImageFolder(root / "folder", **CROPS)
    found = ImageShards(root / shards, **CROPS)
    assert len(found) == len(folder) == 30
    assert_equal(all_rows(found), all_rows(folder))
    mixed = np.array([29, 3, 3, 17, 0])
    assert_equal(found.rows(mixed), folder.rows(mixed))
    assert found.classes == (CLASSES if shards.startswith("hub") else ("0", "1", "2"))
    other = ImageShards(root / shards, **CROPS | {"seed": 5})
    assert not np.array_equal(all_rows(other)["images"], all_rows(found)["images"])
    assert found.fingerprint != other.fingerprint
    assert found.fingerprint == ImageShards(root / shards, **CROPS).fingerprint


def test_batches_resume_and_do_not_depend_on_threads(root: Path) -> None:
    """Read by threads, and from a later step on: the same batches."""
    mesh = make_mesh(data=2, devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    options = {"batch": 4, "sharding": sharding, "seed": 0, "steps": 9}
    for shards in ("tar", "hub"):
        images = ImageShards(root / shards, **CROPS)
        with batches(images, start=0, threads=2, prefetch=4, **options) as stream:
            whole = [np.asarray(batch["images"]) for batch in stream]
        with batches(images, start=5, threads=0, **options) as stream:
            resumed = [np.asarray(batch["images"]) for batch in stream]
        np.testing.assert_array_equal(resumed, whole[5:])
        assert not np.array_equal(whole[4], whole[5])


def test_names_of_classes_are_labels(tmp_path: Path) -> None:
    """Of tar files in alphabetical order; those of another set where they are given, also of tables."""
    names = ("emu", "cat", "emu")
    members = [each for n, name in enumerate(names) for each in sample(n, name)]
    path = write_tar(tmp_path / "a.tar", members)
    found = ImageShards(path, size=4)
    assert (found.classes, all_rows(found)["labels"].tolist()) == (("cat", "emu"), [1, 0, 1])
    val = ImageShards(path, size=4, classes=CLASSES)
    assert all_rows(val)["labels"].tolist() == [2, 0, 2]
    table = write_table(tmp_path / "a.parquet", range(3), [0, 1, 0], names=("emu", "cat"))
    val = ImageShards(table, size=4, classes=CLASSES)
    assert all_rows(val)["labels"].tolist() == [2, 0, 2]
    with pytest.raises(
        DataError, match=r"0000\.png: has the label 'emu', which is no class"
    ) as caught:
        ImageShards(path, size=4, classes=("cat", "dog"))
    assert len(caught.value.problems) == 2


def test_numbers_that_may_be_names_are_refused(tmp_path: Path) -> None:
    """Beside names, and with classes called by other numbers; not with those called 0, 1, 2."""

    def write(name: str, *labels: str) -> Path:
        members = []
        for key, label in enumerate(labels):
            members += [(f"{key}.png", b"x"), (f"{key}.cls", label.encode())]
        return write_tar(tmp_path / name, members)

    mixed = write("mixed.tar", "a", "b", "c", "1")
    numbers = write("numbers.tar", "0", "1", "2")
    what = "have labels that may be numbers or names"
    with pytest.raises(DataError, match=what) as caught:
        ImageShards(mixed, size=4)
    assert caught.value.problems[0].detail == "the number 1 beside the name 'a'"
    with pytest.raises(DataError, match=what):
        ImageShards(numbers, size=4, classes=("1", "2", "3"))
    for classes in ((), ("0", "1", "2"), CLASSES):
        assert len(ImageShards(numbers, size=4, classes=classes)) == 3


def test_all_samples_without_a_label_or_an_image_are_named(tmp_path: Path) -> None:
    """In one error over all shards; the control is the same shards with all members."""
    good = [each for number in range(1, 6) for each in sample(number, 1)]
    write_tar(tmp_path / "a.tar", good)
    assert len(ImageShards(tmp_path, size=4)) == 5
    bad = [
        *sample(0, 1, "fine"),
        ("no-label.png", encoded(1)),
        ("no-image.cls", b"1"),
        *sample(1, -1, "unlabeled"),
        *sample(1, True, "name"),
        ("other.png", encoded(1)),
        ("other.json", b'{"labels": 1}'),
        ("two.png", encoded(1)),
        ("two.jpg", encoded(1, "jpeg")),
        ("two.cls", b"1"),
    ]
    write_tar(tmp_path / "b.tar", bad)
    write_table(tmp_path / "c.parquet", range(4), [1, None, -1, 7])
    with pytest.raises(DataError) as caught:
        ImageShards(tmp_path, size=4)
    where = [problem.where.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]
    assert sorted(where) == [
        "b.tar: name.png",
        "b.tar: no-image",
        "b.tar: no-label.png",
        "b.tar: other",
        "b.tar: two",
        "b.tar: unlabeled.png",
        "c.parquet, row 1",
        "c.parquet, row 2",
        "c.parquet, row 3",
        "shards",  # a name beside numbers
    ]
    assert 'did you mean "labels"' in str(caught.value)


def test_unreadable_images_are_found_at_once_or_skipped(root: Path) -> None:
    """With the shard and the member or row, as those of folders."""
    members = [each for number in range(3) for each in sample(number, 1)]
    members[0] = (members[0][0].replace(".json", ".cls"), b"0")
    members[1] = (members[1][0], b"not an image")
    write_tar(root / "more" / "a.tar", members)
    rows = [{"bytes": b"", "path": "x"}, {"bytes": None, "path": "y"}, {"bytes": encoded(1)}]
    table = pa.table({"image": rows, "label": [0, 1, 1]})
    parquet.write_table(table, root / "more" / "b.parquet")
    found = ImageShards(root / "more", size=4)
    with pytest.raises(DataError, match="3 of 6 images cannot be read") as caught:
        found.check()
    where = [problem.where.removeprefix(f"{root}/more/") for problem in caught.value.problems]
    assert where == ["a.tar: more/0000.png", "b.parquet, row 0", "b.parquet, row 1"]
    with pytest.raises(DataError, match="an image cannot be read"):
        all_rows(found)
    some = ImageShards(root / "more", size=4, unreadable="skip")
    assert (len(some), len(some.skipped)) == (3, 3)


def test_shards_that_cannot_be_read_are_named_at_once(root: Path) -> None:
    """Cut off at any member, missing, of another kind, without the columns: before a row is read."""
    whole = (root / "tar" / "train-000.tar").read_bytes()
    for name, content in (("cut", whole[:3000]), ("ends", whole[: 512 * 4]), ("text", b"x" * 900)):
        (root / f"{name}.tar").write_bytes(content)
    (root / "cut.parquet").write_bytes(b"PAR1")
    shards = [root / name for name in ("cut.tar", "ends.tar", "text.tar", "cut.parquet")]
    with pytest.raises(DataError) as caught:
        ImageShards(shards, size=4)
    assert {problem.where for problem in caught.value.problems} == set(map(str, shards))
    with pytest.raises(DataError, match="does not exist") as caught:
        ImageShards(f"{root}/tar/train-{{000..003}}.tar", size=4)
    assert len(caught.value.problems) == 2
    (root / "a.tar.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"is neither a \.tar nor"):
        ImageShards(root / "a.tar.gz", size=4)
    parquet.write_table(pa.table({"img": [1], "label": [0]}), root / "d.parquet")
    with pytest.raises(DataError, match=r'no column "image"') as caught:
        ImageShards(root / "d.parquet", size=4)
    assert "image_field: " in str(caught.value)
    with pytest.raises(DataError, match="has no images in the column"):
        ImageShards(root / "d.parquet", size=4, image_field="img")
    with pytest.raises(ConfigError, match="has the range"):
        ImageShards("a-{9..1}.tar", size=4)


def test_a_folder_of_several_splits_is_refused(root: Path) -> None:
    """As for text; one split alone is read."""
    write_table(root / "hub" / "test-00000-of-00001.parquet", range(2), [0, 1])
    with pytest.raises(DataError, match="splits for training and for evaluation") as caught:
        ImageShards(root / "hub", size=4)
    named = f"name what to train on: '{root}/hub/train*.parquet'"
    assert named in str(caught.value)
    assert len(ImageShards(root / "hub" / "train*.parquet", size=4)) == 10
    assert len(ImageShards(root / "hub" / "test*", size=4)) == 2


def test_a_group_of_rows_is_read_once_for_a_batch(root: Path, monkeypatch) -> None:
    """Rows of a batch are read in the order of the file; in that of the batch each reads its group anew."""
    read: list[int] = []
    group_of = parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        parquet.ParquetFile,
        "read_row_group",
        lambda file, number, *rest, **options: (
            read.append(number) or group_of(file, number, *rest, **options)
        ),
    )
    monkeypatch.setattr(image_tables, "_GROUPS_KEPT", 1)
    images = ImageShards(root / "hub" / "train-00000*", size=4)
    images.rows(np.array([0, 4, 1, 5, 0]))
    assert read == [0, 2]
    read.clear()
    for index in (0, 4, 1, 5, 0):
        images.rows(np.array([index]))
    assert read == [0, 2, 0, 2, 0]


def test_ranges_are_those_of_webdataset() -> None:
    """With the zeros of the first number, several in a name, and none."""
    assert expand_range("{8..10}") == ["8", "9", "10"]
    assert expand_range("{0..1}/{00..01}.tar") == ["0/00.tar", "0/01.tar", "1/00.tar", "1/01.tar"]
    assert expand_range("a{b}.tar") == ["a{b}.tar"]
