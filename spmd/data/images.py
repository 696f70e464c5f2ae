"""Images with labels as rows of batches; here those in a folder of classes.

    images = ImageFolder("flowers/train", size=224, crop="random", views=90)
    sharding = plan.batch_sharding("images", ndim=4)
    with batches(images, batch=256, sharding=sharding, seed=0, start=0, steps=1000) as train:
        for batch in train: ...

Pillow is imported here and nowhere else, when the first folder is opened.
"""

import abc
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, get_args

import numpy as np

from spmd.data.sources import is_split
from spmd.errors import (
    ConfigError,
    DataError,
    Problem,
    check_fields,
    did_you_mean,
    first_of,
    nearest_file,
)
from spmd.storage.download import local_path

if TYPE_CHECKING:
    import PIL.Image

IMAGE_SUFFIXES = ".jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm"
# Not those whose readers start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_FIX = "repair or remove the file, or unreadable='skip'"
_ASPECT = 4 / 3
_TRIES = 10

Crop = Literal["center", "random"]
Pixels = Literal["float32", "uint8"]
Unreadable = Literal["error", "skip"]


class EncodedImage(Protocol):
    """Encoded image, in a file or as bytes."""

    @property
    def label(self) -> int:
        """Number of the class."""

    @property
    def where(self) -> str:
        """Name in messages."""

    @property
    def key(self) -> tuple[str | int, ...]:
        """Name, size or position, for fingerprints."""

    def open(self) -> Path | BinaryIO:
        """Return the file, or its content; from any thread.

        Raises:
            OSError: It cannot be read.
            ValueError: There is no content.
        """


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Images(abc.ABC):
    """Images with labels, cropped to squares: base of `ImageFolder` and `ImageShards`.

    Rows are `images`, float32 or uint8 `[rows, size, size, 3]`, `labels`, int32 `[rows]`, and
    `weights`, float32 `[rows]`: what `spmd.classification_loss` takes. A row is a function of the
    file, the fields and its index alone, so a resumed run sees the same pixels. An image is turned
    upright as its camera says, and is in RGB.

    Args:
        size: Pixels of a side.
        classes: Names of the classes by label; by default those found. A validation set takes the
            `classes` of its training set.
        crop: center, the largest square; random, a part of random area and aspect ratio, flipped or
            not.
        min_area: Smallest part of an image's area in a random crop.
        views: Random crops of each image in an epoch, each a row of its own: the number of epochs
            to train, for crops that never repeat.
        seed: Seed of the crops.
        pixels: float32, from -1 to 1; or uint8, from 0 to 255.
        unreadable: An image that cannot be read: error, naming it, when its row is read (`check`
            finds all of them before); skip, which reads all images once at the beginning, and
            leaves out and counts those in `skipped`.
        threads: Threads that read all images, for `check` and `unreadable="skip"`.

    Raises:
        ConfigError: A field has an invalid value, or Pillow is not installed.
        DataError: There are no images, or some have no class.
    """

    size: int
    classes: tuple[str, ...] = ()
    crop: Crop = "center"
    min_area: float = 0.08
    views: int = 1
    seed: int = 0
    pixels: Pixels = "float32"
    unreadable: Unreadable = "error"
    threads: int = 2
    skipped: tuple[Problem, ...] = dataclasses.field(default=(), init=False, repr=False)
    """Images that cannot be read, with `unreadable="skip"`."""
    _images: tuple[EncodedImage, ...] = dataclasses.field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("invalid images:", problems)
        classes, images = self._find()
        object.__setattr__(self, "classes", classes)
        object.__setattr__(self, "_images", tuple(images))
        if self.unreadable == "skip":
            self._skip_unreadable()

    @abc.abstractmethod
    def _find(self) -> tuple[tuple[str, ...], Sequence[EncodedImage]]:
        """Return the names of the classes, and all images in an order of names only."""

    def _problems(self) -> list[Problem]:
        """Return invalid fields, and a missing Pillow."""
        rules: dict[str, str | tuple[str, ...]] = {
            "size": "at least 1",
            "views": "at least 1",
            "threads": "at least 1",
            "seed": "at least 0",
            "min_area": "above 0 and at most 1",
            "crop": get_args(Crop),
            "pixels": get_args(Pixels),
            "unreadable": get_args(Unreadable),
        }
        problems = check_fields(self, rules)
        if self.crop == "center" and self.views != 1:
            fix = "views=1, or crop='random'"
            problems.append(Problem("views", f"is {self.views}, of the same crop", fix=fix))
        if len(set(self.classes)) != len(self.classes):
            problems.append(Problem("classes", "names one twice", ", ".join(self.classes)))
        if importlib.util.find_spec("PIL") is None:
            fix = "pip install 'spmd[images]'"
            problems.append(Problem("images", "need Pillow, which is not installed", fix=fix))
        return problems

    def _skip_unreadable(self) -> None:
        """Keep the readable files, and the problems of the others."""
        readable = []
        skipped = []
        for image, error in zip(self._images, self._errors(), strict=True):
            if error is None:
                readable.append(image)
            else:
                skipped.append(error)
        object.__setattr__(self, "skipped", tuple(skipped))
        if not readable:
            raise DataError("no image can be read:", first_of(self.skipped))
        object.__setattr__(self, "_images", tuple(readable))

    @property
    def sequence(self) -> int:
        """Targets of a row."""
        return 1

    def __len__(self) -> int:
        return len(self._images) * self.views

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex of names, sizes and labels of files, and of fields that affect rows."""
        fields = ("size", "classes", "crop", "min_area", "views", "seed", "pixels")
        files = [(*image.key, image.label) for image in self._images]
        settings = {name: getattr(self, name) for name in fields}
        return hashlib.sha256(json.dumps([settings, files]).encode()).hexdigest()

    def check(self) -> None:
        """Read all images, and raise a DataError with the unreadable ones."""
        problems = [error for error in self._errors() if error is not None]
        if problems:
            title = f"{len(problems):,} of {len(self._images):,} images cannot be read:"
            raise DataError(title, first_of(problems))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return `images`, `labels` and `weights` of rows."""
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        pixels = np.zeros((len(indices), self.size, self.size, 3), np.uint8)
        labels = np.zeros(len(indices), np.int32)
        problems = []
        # In the order of the files, since a table is read by groups of rows.
        for row in np.argsort(indices, kind="stable").tolist():
            index = int(indices[row])
            image = self._images[index // self.views]
            labels[row] = image.label
            try:
                pixels[row] = self._crop(_decode(image), index)
            except _UnreadableError as error:
                problems.append(error.problem)
        if problems:
            raise DataError("an image cannot be read:", problems)
        images: np.ndarray = pixels
        if self.pixels == "float32":
            images = pixels.astype(np.float32) / np.float32(127.5) - 1
        return {"images": images, "labels": labels, "weights": np.ones(len(indices), np.float32)}

    def _crop(self, image: "PIL.Image.Image", index: int) -> np.ndarray:
        """Return an image's pixels, uint8 `[size, size, 3]`."""
        import PIL.Image

        random = np.random.default_rng((self.seed, index))
        box = _center_box(image.size)
        is_flipped = False
        if self.crop == "random":
            box = _random_box(image.size, self.min_area, random)
            is_flipped = random.random() < 0.5
        size = (self.size, self.size)
        pixels = np.asarray(image.resize(size, PIL.Image.Resampling.BICUBIC, box))
        if is_flipped:
            return pixels[:, ::-1]
        return pixels

    def _errors(self) -> list[Problem | None]:
        """Return for each file why it cannot be read, or None."""

        def error(image: EncodedImage) -> Problem | None:
            try:
                _decode(image)
            except _UnreadableError as error:
                return error.problem
            return None

        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(error, self._images))


@dataclasses.dataclass(frozen=True, slots=True)
class _ImageFile:
    """Image in a folder; `name` is the path inside of it."""

    path: Path
    name: str
    label: int

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def key(self) -> tuple[str | int, ...]:
        return self.name, self.path.stat().st_size

    def open(self) -> Path:
        return self.path


@dataclasses.dataclass(frozen=True, eq=False)
class ImageFolder(Images):
    """Images of a folder with a sub-folder for each class.

    Classes are numbered by the alphabetical order of their sub-folders. The other arguments are
    those of `Images`.

    Args:
        folder: The folder, or its address; images may be in sub-folders of a class.
    """

    folder: str | Path

    def _find(self) -> tuple[tuple[str, ...], list[_ImageFile]]:
        root = local_path(str(self.folder))
        found = _class_folders(root)
        classes = self.classes or tuple(found)
        problems = []
        for name in sorted(found.keys() - set(classes)):
            fix = did_you_mean(name, classes)
            problems.append(Problem(str(root / name), "is not a class", fix=fix))
        if problems:
            raise DataError("invalid images:", first_of(problems))
        images = []
        for name, paths in found.items():
            label = classes.index(name)
            for path in paths:
                images.append(_ImageFile(path, path.relative_to(root).as_posix(), label))
        return classes, images


class _UnreadableError(Exception):
    """An image cannot be read; `problem` names it and the reason."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def _class_folders(root: Path) -> dict[str, list[Path]]:
    """Return the images of each class, both in alphabetical order."""
    if not root.is_dir():
        problem = Problem(str(root), "is not a folder", fix=nearest_file(root))
        raise DataError("images not found:", [problem])
    classes: list[Path] = []
    loose: list[str] = []
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            classes.append(path)
        elif _is_image(path):
            loose.append(path.name)
    problems = _layout_problems(root, classes, loose)
    found = {}
    for path in classes:
        images = sorted(filter(_is_image, path.rglob("*")))
        found[path.name] = images
        if not images:
            problems.append(Problem(str(path), "has no images", f"looked for {IMAGE_SUFFIXES}"))
    if problems:
        raise DataError("invalid images:", first_of(problems))
    return found


def _layout_problems(root: Path, classes: list[Path], loose: list[str]) -> list[Problem]:
    """Return problems of a folder's entries: folders of classes, and images beside them."""
    names = [path.name for path in classes]
    problems = []
    if not classes:
        fix = "a folder for each class, with its images"
        problems.append(Problem(str(root), "has no folders of classes", fix=fix))
    elif _are_splits(names):
        fix = f"name one of them, such as {root / names[0]}"
        problems.append(Problem(str(root), "holds splits, not classes", ", ".join(names), fix))
    if classes and loose:
        detail = f"{len(loose):,} beside the folders of classes, such as {loose[0]}"
        problems.append(Problem(str(root), "has images without a class", detail))
    return problems


def _are_splits(names: list[str]) -> bool:
    """Return whether folders are splits, some of them for evaluation."""
    for name in names:
        if not is_split(name) and not name.lower().startswith("train"):
            return False
    return any(map(is_split, names))


def _is_image(path: Path) -> bool:
    is_visible = not path.name.startswith(".")
    return path.suffix.lower() in IMAGE_SUFFIXES.split() and is_visible and path.is_file()


def _decode(image: EncodedImage) -> "PIL.Image.Image":
    """Return an image in RGB."""
    import PIL.Image
    import PIL.ImageOps

    errors = (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        struct.error,
        zlib.error,
        PIL.Image.DecompressionBombError,
    )
    try:
        with PIL.Image.open(image.open(), formats=_FORMATS) as found:
            if found.mode.startswith(("I", "F")):
                raise ValueError(
                    f"more than 8 bits a channel (mode {found.mode}), which would be clipped"
                )
            PIL.ImageOps.exif_transpose(found, in_place=True)
            return found.convert("RGB")
    except errors as error:
        raise _UnreadableError(Problem(image.where, "cannot be read", str(error), _FIX)) from error


def _center_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the largest square in the middle of an image.

    Example:
        >>> _center_box((5, 2))
        (1.5, 0.0, 3.5, 2.0)
    """
    side = min(size)
    width, height = size
    left = (width - side) / 2
    top = (height - side) / 2
    return left, top, left + side, top + side


def _random_box(
    size: tuple[int, int], min_area: float, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """Return a box of random area, aspect ratio and place.

    From Szegedy et al. (arXiv:1409.4842, section 6).
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * random.uniform(min_area, 1)
        ratio = math.exp(random.uniform(-math.log(_ASPECT), math.log(_ASPECT)))
        across = math.sqrt(area * ratio)
        down = math.sqrt(area / ratio)
        if across <= width and down <= height:
            left = random.uniform(0, width - across)
            top = random.uniform(0, height - down)
            return left, top, left + across, top + down
    return _center_box(size)
