"""Images as rows: what they hold, that they depend on nothing else, and what is refused."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import PIL.Image
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.data import images as images_module
from spmd.data.images import ImageFolder
from spmd.data.loader import batches, evaluation_batches
from spmd.errors import ConfigError, DataError, MeshError
from spmd.sharding.mesh import BATCH_AXES, BATCH_SPEC, make_mesh

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(pixels).save(path, **options)
    return path


def noise(seed: int, height: int = 12, width: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of three classes, in several formats."""
    for number in range(10):
        name = ("cat", "dog", "emu")[number % 3]
        save(
            tmp_path / "set" / name / "more" / f"{number}.{('png', 'bmp', 'webp')[number % 3]}",
            noise(number),
        )
    (tmp_path / "set" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "set" / ".hidden").mkdir()
    return tmp_path / "set"


def rows(images: ImageFolder, *indices: int) -> dict[str, np.ndarray]:
    return images.rows(np.array(indices, np.int64))


def test_rows_are_pixels_and_labels(tmp_path: Path) -> None:
    """Classes are numbered in alphabetical order; pixels are the middle square's, as bytes or from -1 to 1."""
    wide = np.zeros((4, 10, 3), np.uint8)
    wide[:, :3], wide[:, 3:7], wide[:, 7:] = RED, noise(0, 4, 4), BLUE
    save(tmp_path / "b" / "wide.png", wide)
    save(tmp_path / "a" / "tall.png", np.full((9, 4, 3), GREEN, np.uint8))
    found = rows(ImageFolder(tmp_path, size=4, pixels="uint8"), 0, 1)
    assert found["labels"].tolist() == [0, 1]
    assert found["weights"].tolist() == [1, 1]
    np.testing.assert_array_equal(found["images"], [np.full((4, 4, 3), GREEN), wide[:, 3:7]])
    scaled = rows(ImageFolder(tmp_path, size=4), 0, 1)
    assert {name: x.dtype for name, x in scaled.items()} == {
        "images": "f4",
        "labels": "i4",
        "weights": "f4",
    }
    np.testing.assert_allclose(scaled["images"], found["images"] / 127.5 - 1, atol=1e-6)
    assert (scaled["images"].min(), scaled["images"].max()) == (-1, 1)
    with pytest.raises(IndexError):
        rows(ImageFolder(tmp_path, size=4), 2)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_every_mode_is_rgb(mode: str, tmp_path: Path) -> None:
    """Of gray images, palettes, transparent ones and CMYK, a row holds the colours."""
    path = tmp_path / "a" / ("x.tif" if mode == "CMYK" else "x.png")
    path.parent.mkdir()
    PIL.Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode).save(path)
    assert (rows(ImageFolder(tmp_path, size=2), 0)["images"] == 1).all()


def test_an_image_is_turned_upright(tmp_path: Path) -> None:
    """The orientation that a camera wrote is applied; without it, the pixels are as they are."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # the top is on the right
    save(tmp_path / "a" / "0.png", noise(0, 4, 4))
    save(tmp_path / "a" / "1.png", noise(0, 4, 4), exif=exif)
    plain, turned = rows(ImageFolder(tmp_path, size=4), 0, 1)["images"]
    np.testing.assert_array_equal(turned, np.rot90(plain, -1))


def test_a_random_crop_is_a_function_of_seed_and_index(folder: Path) -> None:
    """Rows are bitwise the same alone, together, and of an equal folder; views and seeds differ."""
    images = ImageFolder(folder, size=6, crop="random", views=3, seed=1)
    assert len(images) == 30
    together = rows(images, *range(30))
    assert together["labels"].tolist() == [0] * 12 + [1] * 9 + [2] * 9
    again = ImageFolder(folder, size=6, crop="random", views=3, seed=1)
    for index in (29, 3, 4, 5):
        np.testing.assert_array_equal(rows(again, index)["images"][0], together["images"][index])
    assert len(np.unique(together["images"], axis=0)) == 30
    assert (
        rows(dataclasses.replace(images, seed=2), 5)["images"][0] != together["images"][5]
    ).any()
    assert (
        images.fingerprint == again.fingerprint != dataclasses.replace(images, seed=2).fingerprint
    )


def test_random_crops_stay_inside_and_flip(tmp_path: Path) -> None:
    """Of an image that brightens to the right, crops have its range, and half of them are mirrored."""
    ramp = np.repeat(np.arange(100, 200, dtype=np.uint8)[None, :, None], 50, axis=0).repeat(
        3, axis=2
    )
    save(tmp_path / "a" / "ramp.png", ramp)
    images = ImageFolder(tmp_path, size=8, crop="random", views=100, pixels="uint8")
    found = rows(images, *range(100))["images"][..., 0].astype(int)
    slopes = found[:, 4, -1] - found[:, 4, 0]
    assert 98 <= found.min() <= found.max() <= 201
    assert 30 < (slopes < 0).sum() < 70
    assert np.abs(slopes).min() < 25 < 45 < np.abs(slopes).max()
    whole = rows(dataclasses.replace(images, min_area=1.0), *range(100))["images"][..., 0].astype(
        int
    )
    assert np.ptp(np.abs(whole[:, 4, -1] - whole[:, 4, 0])) < np.ptp(np.abs(slopes))


@pytest.fixture
def damaged(folder: Path) -> Path:
    """The folder with a truncated image, a text by the name of an image, and one of 16 bits."""
    path = folder / "dog" / "more" / "1.bmp"
    path.write_bytes(path.read_bytes()[:300])
    (folder / "cat" / "text.jpg").write_text("no image")
    PIL.Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(folder / "emu" / "deep.png")
    return folder


def test_an_image_that_cannot_be_read_is_named(damaged: Path) -> None:
    """All of a batch at once where they are read, all of the folder by `check`; a folder without one passes."""
    images = ImageFolder(damaged, size=4)
    assert len(images) == 12
    with pytest.raises(DataError) as caught:
        rows(images, *range(12))
    names = [Path(problem.where).name for problem in caught.value.problems]
    assert names == ["text.jpg", "1.bmp", "deep.png"]
    assert "16" in str(caught.value)
    assert "truncated" in str(caught.value)
    with pytest.raises(DataError, match="3 of 12 images cannot be read") as caught:
        images.check()
    assert [Path(problem.where).name for problem in caught.value.problems] == names
    ImageFolder(damaged, size=4, unreadable="skip").check()


def test_unreadable_images_are_skipped_and_counted(damaged: Path) -> None:
    """By choice, they are found before the first row, and the others are rows as they would be without them."""
    images = ImageFolder(damaged, size=4, unreadable="skip")
    assert [Path(problem.where).name for problem in images.skipped] == [
        "text.jpg",
        "1.bmp",
        "deep.png",
    ]
    assert len(images) == 9
    fingerprint, found = images.fingerprint, rows(images, *range(9))
    for problem in images.skipped:
        Path(problem.where).unlink()
    clean = ImageFolder(damaged, size=4)
    assert (clean.fingerprint, clean.skipped) == (fingerprint, ())
    np.testing.assert_array_equal(rows(clean, *range(9))["images"], found["images"])


def test_a_folder_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    """Skipping does not leave an empty set."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_text("no image")
    with pytest.raises(DataError, match="no image can be read"):
        ImageFolder(tmp_path, size=4, unreadable="skip")


def test_folders_that_hold_no_classes_are_refused(folder: Path) -> None:
    """Empty classes and images beside the classes are named at once; so are splits in place of classes, and typos."""
    save(folder / "loose.png", noise(0))
    (folder / "fox").mkdir()
    with pytest.raises(DataError) as caught:
        ImageFolder(folder, size=4)
    assert [(Path(p.where).name, p.what) for p in caught.value.problems] == [
        ("set", "has images without a class"),
        ("fox", "has no images"),
    ]
    with pytest.raises(DataError, match="has no folders of classes"):
        ImageFolder(folder / "fox", size=4)
    with pytest.raises(DataError, match='did you mean "set"'):
        ImageFolder(folder.parent / "sett", size=4)
    for split in ("train", "val"):
        save(folder.parent / "splits" / split / "cat" / "x.png", noise(0))
    with pytest.raises(DataError, match="holds splits, not classes"):
        ImageFolder(folder.parent / "splits", size=4)


def test_a_validation_set_takes_the_classes_of_its_training_set(folder: Path) -> None:
    """Labels are those of the classes given, also where some have no images; a folder that is none of them is named."""
    for path in (folder / "cat").rglob("*.png"):
        path.unlink()
    for name in ("more/notes.txt", "more", "notes.txt", ""):
        path = folder / "cat" / name
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    images = ImageFolder(folder, size=4, classes=("cat", "dog", "emu"))
    assert rows(images, 0, 5)["labels"].tolist() == [1, 2]
    assert rows(ImageFolder(folder, size=4), 0, 5)["labels"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r'emu: is not a class\n.*did you mean "emus"'):
        ImageFolder(folder, size=4, classes=("dog", "emus"))


def test_all_bad_fields_are_reported_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields, and Pillow where it is not installed, with the extra that has it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        ImageFolder(
            folder,
            size=0,
            classes=("a", "a"),
            views=2,
            seed=-1,
            min_area=0,
            pixels="f8",
            unreadable="no",
            threads=0,
        )
    names = [problem.where for problem in caught.value.problems]
    assert names == [
        "classes",
        "images",
        "min_area",
        "pixels",
        "seed",
        "size",
        "threads",
        "unreadable",
        "views",
    ]
    assert "pip install 'spmd[images]'" in str(caught.value)


def by_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays whose first dimension is the examples."""
    return NamedSharding(mesh, P(BATCH_AXES))


def test_batches_are_the_same_on_every_mesh_and_resumed(folder: Path) -> None:
    """Arrays of every rank are whole and split by rows, in one order, which a resumed run continues bitwise."""
    images = ImageFolder(folder, size=4, crop="random", views=2)
    several, one = make_mesh(data=2, fsdp=2, tensor=2), make_mesh(data=1, devices=jax.devices()[:1])

    def run(sharding: NamedSharding, start: int) -> list[dict[str, jax.Array]]:
        with batches(images, batch=8, sharding=sharding, seed=3, start=start, steps=6) as found:
            return list(found)

    whole = run(by_rows(several), 0)
    for other, first in (
        (run(by_rows(one), 0), 0),
        (run(NamedSharding(several, BATCH_SPEC), 4), 4),
    ):
        assert len(other) == 6 - first
        for a, b in zip(whole[first:], other, strict=True):
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
    assert {name: x.shape for name, x in whole[0].items()} == {
        "images": (8, 4, 4, 3),
        "labels": (8,),
        "weights": (8,),
    }
    for x in whole[0].values():
        assert x.sharding.is_equivalent_to(NamedSharding(several, P(("data", "fsdp"))), x.ndim)
    epoch = np.concatenate([batch["images"] for batch in whole[:3]])[:20]
    everything = rows(images, *range(20))["images"]
    assert sorted(x.tobytes() for x in epoch) == sorted(x.tobytes() for x in everything)


class HalfSharding(NamedSharding):
    """The sharding of a process that has the first of two devices only."""

    def addressable_devices_indices_map(
        self, shape: tuple[int, ...]
    ) -> dict[jax.Device, tuple[slice, ...]]:
        return dict([next(iter(super().addressable_devices_indices_map(shape).items()))])


def test_a_process_reads_only_its_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes, the first reads the files of the first half of each batch, and hands JAX their rows."""
    images, mesh = ImageFolder(folder, size=4), make_mesh(data=2, devices=jax.devices()[:2])
    options = {"batch": 4, "seed": 0, "start": 0, "steps": 2, "threads": 0}
    with batches(images, sharding=by_rows(mesh), **options) as found:
        whole = [np.asarray(batch["images"]) for batch in found]
    read: list[object] = []
    read_image = images_module._decode
    monkeypatch.setattr(
        images_module, "_decode", lambda image: read.append(image) or read_image(image)
    )
    monkeypatch.setattr(
        jax, "make_array_from_process_local_data", lambda sharding, rows, shape: (rows, shape)
    )
    with batches(images, sharding=HalfSharding(mesh, P("data")), **options) as found:
        mine = list(found)
    assert len(read) == 4
    for batch, expected in zip(mine, whole, strict=True):
        local, shape = batch["images"]
        np.testing.assert_array_equal(local, expected[:2])
        assert (shape, batch["labels"][1]) == ((4, 4, 4, 3), (4,))


def test_evaluation_pads_with_weight_0(folder: Path) -> None:
    """Ten images in batches of four are ten of weight 1, in order; then padding."""
    images, sharding = (
        ImageFolder(folder, size=4),
        by_rows(make_mesh(data=2, devices=jax.devices()[:2])),
    )
    found = list(evaluation_batches(images, batch=4, sharding=sharding, tokens_at_most=1000))
    assert np.concatenate([batch["weights"] for batch in found]).tolist() == [1] * 10 + [0] * 2
    np.testing.assert_array_equal(
        np.concatenate([x["images"] for x in found])[:10], rows(images, *range(10))["images"]
    )
    assert len(list(evaluation_batches(images, batch=4, sharding=sharding, tokens_at_most=5))) == 2


def test_a_mesh_that_splits_tokens_needs_a_sharding_of_rows(folder: Path) -> None:
    """A row of one target cannot be split over `sequence`; a sharding of the rows alone can be used on that mesh."""
    images, mesh = (
        ImageFolder(folder, size=4),
        make_mesh(data=2, sequence=2, devices=jax.devices()[:4]),
    )
    options = {"batch": 4, "seed": 0, "start": 0, "steps": 1}
    with pytest.raises(MeshError, match="1 / "):
        batches(images, sharding=NamedSharding(mesh, BATCH_SPEC), **options)
    with batches(images, sharding=by_rows(mesh), **options) as found:
        assert next(found)["images"].shape == (4, 4, 4, 3)
