"""Images of shards: of tar files in the form of WebDataset, and of Parquet files of the Hub.

    images = ImageShards("imagenet/train-{0000..1023}.tar", size=224, crop="random", views=90)

Rows, their order and their use are those of `ImageFolder`. A tar file is not unpacked: its headers
are read once, and an image from its position.
"""

import dataclasses
import glob
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from spmd.data.image_tables import ImageTable, RowGroups, TableImage
from spmd.data.images import IMAGE_SUFFIXES, EncodedImage, Images
from spmd.data.sources import mixed_splits
from spmd.errors import (
    ConfigError,
    DataError,
    Problem,
    StorageError,
    did_you_mean,
    first_of,
    nearest_file,
)
from spmd.storage.download import local_path

SHARD_SUFFIXES = (".tar", ".parquet")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_SHARDS = 10**6
_BLOCK = 512  # bytes of tar
_LABEL_SUFFIXES = (".cls", ".json")
_TITLE = "invalid images:"


@dataclasses.dataclass(frozen=True, eq=False)
class ImageShards(Images):
    """Images of tar files (WebDataset), or of Parquet files (data sets of the Hub).

    In a tar file the members `key.jpg` and `key.cls`, a number from 0 or a name, or `key.json`, an object
    with the label, are an image of a class. In a Parquet file each row is one; the names of its
    classes are read where the `datasets` library wrote them. Without names, classes are called by
    their numbers. The other arguments are those of `Images`.

    Args:
        shards: Files, globs, ranges such as `train-{000..099}.tar`, folders, or addresses.
        image_field: Column of a Parquet file with the images.
        label_field: Column, or field of `key.json`, with the label.
    """

    shards: str | Path | Sequence[str | Path]
    image_field: str = dataclasses.field(default="image", kw_only=True)
    label_field: str = dataclasses.field(default="label", kw_only=True)

    def _find(self) -> tuple[tuple[str, ...], list[EncodedImage]]:
        problems: list[Problem] = []
        found = []
        groups = RowGroups()
        for path in find_shards(self.shards):
            try:
                if path.suffix.lower() == ".tar":
                    found.append(_tar_shard(path, self.label_field, problems))
                else:
                    found.append(_table_shard(path, self.image_field, self.label_field, groups))
            except DataError as error:
                problems += error.problems
        names = _names_of(found, problems)
        values = [value for shard in found for value in shard.labels]
        classes = self.classes or names or _classes_of(values)
        problems += _unclear_labels(values, classes)
        images: list[EncodedImage] = []
        for shard in found:
            images += shard.labeled(classes, problems)
        if not images and not problems:
            problems.append(Problem("shards", "hold no images"))
        if problems:
            raise DataError(_TITLE, first_of(problems))
        return classes, images


def find_shards(shards: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files of some shards, in the order of their names for each entry.

    Raises:
        DataError: A shard does not exist or is of another kind, or a folder has several splits.
    """
    if isinstance(shards, str | Path):
        shards = [shards]
    problems: list[Problem] = []
    found: dict[Path, None] = {}
    for entry in shards:
        pattern = str(entry)
        for text in expand_range(pattern):
            try:
                paths = _files_of(text, pattern, problems)
            except StorageError as error:
                problems += error.problems
                continue
            found |= dict.fromkeys(paths)
    if problems:
        raise DataError("images not found:", first_of(problems))
    return list(found)


def expand_range(pattern: str) -> list[str]:
    """Return the names of a pattern with ranges, as WebDataset writes them.

    Example:
        >>> expand_range("a-{08..10}.tar")
        ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + _MOST_SHARDS:
        what = f"has the range {found[0]}"
        fix = f"the lower number first, and at most {_MOST_SHARDS:,} shards"
        raise ConfigError(_TITLE, [Problem(f"shards {pattern}", what, fix=fix)])
    names = []
    for number in range(first, last + 1):
        digits = str(number).zfill(len(found[1]))
        names += expand_range(pattern[: found.start()] + digits + pattern[found.end() :])
    return names


def _files_of(text: str, pattern: str, problems: list[Problem]) -> list[Path]:
    """Return the shards of one name that a pattern makes."""
    path = local_path(text)
    if path.is_file():
        if path.suffix.lower() not in SHARD_SUFFIXES:
            fix = "decompressed .tar files, or .parquet"
            problems.append(Problem(text, "is neither a .tar nor a .parquet file", fix=fix))
        return [path]
    if path.is_dir():
        files = sorted(filter(_is_shard, path.rglob("*")))
        names = [file.relative_to(path) for file in files]
        problems += mixed_splits(text, names)
        if not files:
            detail = f"looked for {' '.join(SHARD_SUFFIXES)}"
            problems.append(Problem(text, "holds no shards of images", detail))
        return files
    files = sorted(filter(_is_shard, map(Path, glob.glob(str(path), recursive=True))))
    if not files:
        fix = nearest_file(path)
        if text != pattern:
            fix = f"a range of files that exist, in place of {pattern}"
        problems.append(Problem(text, "does not exist", fix=fix))
    return files


def _is_shard(path: Path) -> bool:
    is_visible = not path.name.startswith(".")
    return path.suffix.lower() in SHARD_SUFFIXES and is_visible and path.is_file()


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """Position of a member's content in a tar file."""

    path: Path
    name: str
    offset: int
    size: int

    @property
    def where(self) -> str:
        return f"{self.path}: {self.name}"

    def read(self) -> bytes:
        # Of a file opened for this: a position is that of one thread, and shards may be thousands.
        with self.path.open("rb") as file:
            content = os.pread(file.fileno(), self.size, self.offset)
        if len(content) != self.size:
            raise OSError(f"has {len(content):,} of {self.size:,} bytes: the shard has changed")
        return content


@dataclasses.dataclass(frozen=True, slots=True)
class _TarImage:
    """Image in a tar file."""

    member: _Member
    label: int

    @property
    def where(self) -> str:
        return self.member.where

    @property
    def key(self) -> tuple[str | int, ...]:
        return self.member.path.name, self.member.name, self.member.size

    def open(self) -> io.BytesIO:
        return io.BytesIO(self.member.read())


class _ClassNumber(int):
    """Number in a `.cls` member, where a name would be written alike."""


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Images of a shard, and the label of each as it is written: a number or a name.

    Attributes:
        names: Names of the classes, by number; or none.
    """

    images: Sequence[_Member | tuple[ImageTable, int]]
    labels: Sequence[Any]
    names: tuple[str, ...] = ()

    def labeled(self, classes: Sequence[str], problems: list[Problem]) -> Iterator[EncodedImage]:
        """Yield the images with the numbers of their classes; add the problems of others."""
        numbers = {name: number for number, name in enumerate(classes)}
        for image, value in zip(self.images, self.labels, strict=True):
            number = self._number(value, numbers)
            if isinstance(image, _Member):
                found: EncodedImage = _TarImage(image, number)
            else:
                found = TableImage(*image, number)
            if number < 0:
                problems.append(_label_problem(found.where, value, classes))
            else:
                yield found

    def _number(self, value: Any, numbers: dict[str, int]) -> int:
        """Return the number of a label's class; -1 for a label without one."""
        if isinstance(value, str):
            return numbers.get(value, -1)
        if isinstance(value, bool) or not isinstance(value, int):
            return -1
        names: Sequence[str] = self.names or tuple(numbers)
        if not 0 <= value < len(names):
            return -1
        return numbers.get(names[value], -1)


def _label_problem(where: str, value: Any, classes: Sequence[str]) -> Problem:
    """Return the problem of an image with a missing or unknown label."""
    if value is None or value == -1:
        return Problem(where, "has no label", "looked for key.cls, key.json or the label's column")
    fix = f"classes 0 to {len(classes) - 1}"
    if isinstance(value, str):
        fix = did_you_mean(value, classes)
    return Problem(where, f"has the label {value!r}, which is no class", fix=fix)


def _names_of(shards: Iterable[_Shard], problems: list[Problem]) -> tuple[str, ...]:
    """Return the names of classes in shards; add a problem where they differ."""
    found = {shard.names for shard in shards if shard.names}
    if len(found) > 1:
        counts = " and ".join(str(len(names)) for names in sorted(found))
        what = "have different names of classes"
        problems.append(Problem("shards", what, f"{counts} names", "shards of one data set"))
    return max(found, default=())


def _classes_of(values: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of classes of labels: names in order, or numbers from 0."""
    found = set(values)
    names = sorted(value for value in found if isinstance(value, str))
    if names:
        return tuple(names)
    most = max((value for value in found if isinstance(value, int)), default=-1)
    return tuple(map(str, range(most + 1)))


def _unclear_labels(values: Iterable[Any], classes: Sequence[str]) -> list[Problem]:
    """Return a problem if numbers in `.cls` members may be names of classes."""
    numbers = []
    names = []
    for value in values:
        if isinstance(value, str):
            names.append(value)
        elif isinstance(value, _ClassNumber) and value >= 0:
            numbers.append(value)
    for number, name in enumerate(classes):
        if name.isdecimal() and int(name) != number:
            names.append(name)
    if not numbers or not names:
        return []
    what = "have labels that may be numbers or names"
    detail = f"the number {numbers[0]} beside the name {names[0]!r}"
    fix = "names that are no numbers, or numbers from 0 alone"
    return [Problem("shards", what, detail, fix)]


def _table_shard(path: Path, image_field: str, label_field: str, groups: RowGroups) -> _Shard:
    """Return the images of a Parquet file."""
    table = ImageTable(path, image_field, label_field, groups)
    images = [(table, row) for row in range(len(table.labels))]
    return _Shard(images, table.labels, table.class_names)


def _tar_shard(path: Path, label_field: str, problems: list[Problem]) -> _Shard:
    """Return the images of a tar file; add the problems of other samples."""
    images = []
    labels = []
    for key, members in _samples(path, problems).items():
        found = [suffix for suffix in members if suffix in IMAGE_SUFFIXES.split()]
        where = f"{path}: {key}"
        if len(found) != 1:
            what = f"has {len(found)} images"
            detail = f"members: {', '.join(members)}"
            problems.append(Problem(where, what, detail, "one image a sample, such as key.jpg"))
            continue
        try:
            labels.append(_label_of(members, label_field))
        except (ValueError, OSError, RecursionError) as error:
            problems.append(Problem(where, "has no readable label", str(error)))
            continue
        images.append(members[found[0]])
    return _Shard(images, labels)


def _samples(path: Path, problems: list[Problem]) -> dict[str, dict[str, _Member]]:
    """Return key → suffix → member, as WebDataset divides names: at the first dot of the last part.

    Raises:
        DataError: The file is no tar file, or cut off.
    """
    samples: dict[str, dict[str, _Member]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                name = PurePosixPath(info.name)
                if not info.isfile() or name.name.startswith("."):
                    continue
                stem, dot, suffix = name.name.partition(".")
                key = str(name.with_name(stem))
                member = _Member(path, info.name, info.offset_data, info.size)
                sample = samples.setdefault(key, {})
                if f"{dot}{suffix}".lower() in sample:
                    problems.append(Problem(member.where, "is in the shard twice"))
                sample[f"{dot}{suffix}".lower()] = member
            end = tar.offset
        with path.open("rb") as file:
            if os.pread(file.fileno(), _BLOCK, end) != bytes(_BLOCK):
                raise OSError("it ends without the block of zeros that ends a tar file")
    except (tarfile.TarError, OSError) as error:
        problem = Problem(str(path), "is not a whole tar file", str(error))
        raise DataError(_TITLE, [problem]) from error
    return samples


def _label_of(members: dict[str, _Member], label_field: str) -> Any:
    """Return the label of a sample as it is written; None without one."""
    for suffix in _LABEL_SUFFIXES:
        if suffix not in members:
            continue
        text = members[suffix].read().decode("utf-8").strip()
        if suffix == ".cls":
            if re.fullmatch(r"-?\d+", text):
                return _ClassNumber(text)
            return text
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError(f"{members[suffix].name} is not an object")
        if label_field not in record:
            nearest = did_you_mean(label_field, record)
            raise ValueError(
                f'no "{label_field}" in {members[suffix].name}; label_field: {nearest}'
            )
        return record[label_field]
    return None
