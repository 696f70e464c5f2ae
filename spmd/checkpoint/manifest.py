"""The seal of a folder: the size and the checksum of every file in it, so that no damage goes unnoticed.

```
100/seal.json     {"files": {"state/d/4f1c…": [1048576, "9b2e…"], …}, "sha256": "…", "version": 1}
```

A folder is sealed once, when it is finished and its files are on the disk, and checked before anything in it is
believed. The seal finds accidents. It stops nobody who may write to the folder: they can seal it again.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from spmd.errors import CheckpointError, Problem

MANIFEST = "seal.json"
SMALL = 1 << 20
"""Bytes of a file whose contents are always checked."""

_AT_MOST = 64 << 20
_THREADS = 4
_Sums = dict[str, tuple[int, str]]


def write_manifest(folder: Path) -> None:
    """Forces every file of a folder onto the disk, and writes down what they are.

    The seal appears at once or not at all; an earlier one is replaced.

    Args:
        folder: Holds regular files and folders, no links.

    Raises:
        CheckpointError: It holds anything else.
        OSError: A file cannot be read, or the seal cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.bin").write_bytes(b"1234")
        >>> seal(folder)
        >>> check_seal(folder)
        []
        >>> _ = (folder / "a.bin").write_bytes(b"123")
        >>> print(*check_seal(folder))
        a.bin: is 1 byte shorter than sealed
            3 bytes, 4 sealed
    """
    sizes, problems = _files(folder)
    if problems:
        raise CheckpointError(f"{folder} cannot be sealed", problems)
    with ThreadPoolExecutor(_THREADS) as pool:
        files = dict(zip(sizes, pool.map(lambda name: _sum(folder / name, sync=True), sizes), strict=True))
    unfinished = folder / f"{MANIFEST}.unfinished"
    with unfinished.open("wb") as file:
        file.write(_text(files))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(place)


def verify_manifest(folder: Path, *, contents: bool = True) -> list[Problem]:
    """Everything in which a folder is not as it was sealed, by file; empty for a folder that is as it was.

    Args:
        folder: The sealed folder.
        contents: Read every file. Otherwise only those of at most `SMALL` bytes, and of the others the size.
    """
    try:
        if stat.S_ISLNK(folder.lstat().st_mode):
            return [Problem(".", "is a symbolic link")]
        sealed = _parse(read_bounded(folder / MANIFEST, _AT_MOST))
    except FileNotFoundError:
        fix = "if you know it to be whole, seal it as it is: spmd.checkpoint.manifest.write_manifest(folder)"
        return [Problem(MANIFEST, "is missing: the checkpoint was never finished, or was copied in part", fix=fix)]
    except (OSError, ValueError) as error:
        return [Problem(MANIFEST, f"cannot be read: {_reason(error)}")]
    sizes, problems = _files(folder)
    named = {problem.where for problem in problems}
    for name, (size, _) in sealed.items():
        if not _is_inside(name):
            problems.append(Problem(name, "is sealed, and is no path inside the checkpoint"))
        elif name not in sizes and name not in named:
            problems.append(Problem(name, "is missing", f"{_bytes(size)} sealed"))
        elif name in sizes and sizes[name] != size:
            by = f"{_bytes(abs(sizes[name] - size))} {'shorter' if sizes[name] < size else 'longer'}"
            problems.append(Problem(name, f"is {by} than sealed", f"{_bytes(sizes[name])}, {size} sealed"))
    problems += [Problem(name, "is not in the seal") for name in sizes if name not in sealed]
    to_read = [name for name, size in sizes.items() if name in sealed and sealed[name][0] == size]
    if not contents:
        to_read = [name for name in to_read if sizes[name] <= SMALL]
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda name: _changed(folder, name, sealed[name]), to_read):
            problems += found
    return sorted(problems)


def read_bounded(path: Path, at_most: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        ValueError: It is no regular file, or is larger than `at_most`: nothing is read.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > at_most:
            raise ValueError(f"{_bytes(size)}, where {at_most} are the most that are read")
        return file.read(at_most)


def read_object(path: Path, at_most: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: It holds no JSON object, or is refused by `read_bounded`.
        OSError: It cannot be read.
    """
    try:
        found = json.loads(read_bounded(path, at_most))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, onto the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def open_regular(path: Path) -> Any:
    """A regular file for reading, and no link; a pipe that was put in its place does not make us wait.

    Raises:
        ValueError: It is no regular file.
        OSError: It cannot be opened, or is a link.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError("it is no regular file")
    return os.fdopen(number, "rb")


def _files(folder: Path) -> tuple[dict[str, int], list[Problem]]:
    """Path → size of every regular file but the seal, sorted, and what else there is."""
    sizes: dict[str, int] = {}
    problems: list[Problem] = []

    def walk(place: Path) -> Iterator[Path]:
        try:
            with os.scandir(place) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            problems.append(Problem(str(place.relative_to(folder)), f"cannot be read: {_reason(error)}"))
            return
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path))
            else:
                yield Path(entry.path)

    for path in walk(folder):
        name, about = path.relative_to(folder).as_posix(), path.lstat()
        if stat.S_ISREG(about.st_mode):
            sizes[name] = about.st_size
        else:
            what = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "no regular file"
            problems.append(Problem(name, f"is {what}"))
    sizes.pop(MANIFEST, None)
    return sizes, problems


def _sum(path: Path, *, sync: bool = False) -> tuple[int, str]:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return file.tell(), digest


def _changed(folder: Path, name: str, sealed: tuple[int, str]) -> list[Problem]:
    try:
        now = _sum(folder / name)
    except (OSError, ValueError) as error:
        return [Problem(name, f"cannot be read: {_reason(error)}")]
    if now == sealed:
        return []
    return [Problem(name, "has changed since it was sealed", f"sha256 {now[1][:12]}…, {sealed[1][:12]}… sealed")]


def _text(files: Mapping[str, tuple[int, str]]) -> bytes:
    """The one way in which a seal of these files is written."""
    body = {name: list(files[name]) for name in sorted(files)}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"files": body, "sha256": digest, "version": 1}).encode() + b"\n"


def _parse(text: bytes) -> _Sums:
    """The files of a seal.

    Raises:
        ValueError: It is not, byte for byte, what `_text` writes.
    """
    try:
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in json.loads(text)["files"].items()}
        as_written = _text(files) == text
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("it is no seal") from error
    if not as_written:
        raise ValueError("it is not as it was written")
    return files


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _bytes(n: int) -> str:
    return f"{n} byte{'' if n == 1 else 's'}"
