"""Manifest of a folder: size and checksum of every file, to detect damage.

```
100/manifest.json  {"files": {"state/d/4f1c…": [1048576, "9b2e…"], …}, "sha256": "…", "step": 100, "version": 2}
```

It is written once, when all files are on disk, and verified before any of them is used. It detects
accidents, not attacks: it is not signed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from spmd.errors import CheckpointError, Problem

MANIFEST = "manifest.json"
_EARLIER = "seal.json"
"""Name of the file in checkpoints from before 27 November 2026, which are read for good."""

SMALL = 1 << 20
"""Size in bytes of the largest files whose checksum is verified in every case."""

_MAX_BYTES = 64 << 20
_THREADS = 4
_Entries = dict[str, tuple[int, str]]  # path → size, SHA-256


def write_manifest(folder: Path, step: int | None = None) -> None:
    """Sync all files of a folder to disk and write its manifest, atomically.

    The folder may contain only regular files and folders; a CheckpointError lists links and others.
    With a `step`, the folder is damaged under the name of another step.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.bin").write_bytes(b"1234")
        >>> write_manifest(folder)
        >>> verify_manifest(folder)
        []
        >>> _ = (folder / "a.bin").write_bytes(b"123")
        >>> print(*verify_manifest(folder))
        a.bin: is 1 byte shorter than in the manifest
            3 bytes, 4 in the manifest
    """
    sizes, problems = _files(folder)
    if problems:
        raise CheckpointError(f"{folder} cannot have a manifest", problems)
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = pool.map(lambda name: _checksum(folder / name, sync=True), sizes)
        files = dict(zip(sizes, checksums, strict=True))
    unfinished = folder / f"{MANIFEST}.unfinished"
    unfinished.write_bytes(_serialize(files, step))
    sync(unfinished)
    unfinished.replace(folder / MANIFEST)
    sync(folder)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)


def verify_manifest(folder: Path, *, contents: bool = True) -> list[Problem]:
    """Return all differences between a folder and its manifest, by file.

    If `contents` is False, checksums are verified only of files of at most `SMALL` bytes; of
    others, the size.
    """
    try:
        if stat.S_ISLNK(folder.lstat().st_mode):
            return [Problem(".", "is a symbolic link")]
        entries, step = _parse(read_bounded(_manifest_path(folder), _MAX_BYTES))
    except FileNotFoundError:
        problem = Problem(
            MANIFEST,
            "is missing: the checkpoint was not finished, or not fully copied",
            fix="if it is complete: "
            "from spmd.checkpoint.manifest import write_manifest; write_manifest(folder)",
        )
        return [problem]
    except (OSError, ValueError) as error:
        return [Problem(MANIFEST, f"cannot be read: {_reason(error)}")]
    sizes, problems = _files(folder)
    problems += _name_problems(folder, step)
    problems += _size_problems(entries, sizes, reported={problem.where for problem in problems})
    to_read = list[str]()
    for name, size in sizes.items():
        if name not in entries:
            problems.append(Problem(name, "is not in the manifest"))
        elif size == entries[name][0] and (contents or size <= SMALL):
            to_read.append(name)
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda name: _content_problems(folder, name, entries[name]), to_read):
            problems += found
    return sorted(problems)


def recorded_step(folder: Path) -> int | None:
    """Return the step in a folder's manifest; None if it has none, as earlier ones, or no manifest."""
    try:
        _, step = _parse(read_bounded(_manifest_path(folder), _MAX_BYTES))
    except (OSError, ValueError):
        return None
    return step


def _name_problems(folder: Path, step: int | None) -> list[Problem]:
    """Return a problem if a folder has the name of another step than it was saved with."""
    if step is None or not folder.name.isdecimal() or int(folder.name) == step:
        return []
    return [other_step(step)]


def other_step(step: int) -> Problem:
    """Return the problem of a folder with the name of another step."""
    what = f"is the checkpoint of step {step}: the folder was renamed or copied"
    return Problem(".", what, fix=f"rename the folder to {step}")


def manifest_digest(folder: Path) -> str:
    """Return a digest of the manifest, and so of all contents; empty if it cannot be read."""
    try:
        return hashlib.sha256(read_bounded(_manifest_path(folder), _MAX_BYTES)).hexdigest()
    except (OSError, ValueError):
        return ""


def _manifest_path(folder: Path) -> Path:
    """Return the path of a folder's manifest, which may be missing."""
    earlier = folder / _EARLIER
    if earlier.exists() and not (folder / MANIFEST).exists():
        return earlier
    return folder / MANIFEST


def _size_problems(
    entries: _Entries, sizes: Mapping[str, int], reported: Container[str]
) -> Iterator[Problem]:
    """Yield a problem for each entry of a manifest without a file of its size.

    Args:
        sizes: Path → size of each file.
        reported: Paths with a problem that is known.
    """
    for name, (size, _) in entries.items():
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            yield Problem(name, "is not a path inside the checkpoint")
        elif name in sizes and sizes[name] != size:
            yield _size_problem(name, sizes[name], size)
        elif name not in sizes and name not in reported:
            yield Problem(name, "is missing", f"{_bytes(size)} in the manifest")


def _size_problem(name: str, found: int, size: int) -> Problem:
    """Return the problem of a file with another size than in the manifest."""
    word = "longer"
    if found < size:
        word = "shorter"
    what = f"is {_bytes(abs(found - size))} {word} than in the manifest"
    return Problem(name, what, f"{_bytes(found)}, {size} in the manifest")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a regular file.

    A ValueError, and nothing is read, if it is another kind or larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{_bytes(size)}, above the limit of {max_bytes}")
        return file.read(max_bytes)


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read the JSON object in a file; a ValueError if it is none, or `read_bounded` refuses it."""
    try:
        found = json.loads(read_bounded(path, max_bytes))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def open_regular(path: Path) -> Any:
    """Open a regular file for reading.

    A link is not followed (OSError), and a pipe does not block (ValueError).
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError("it is not a regular file")
    return os.fdopen(number, "rb")


def _files(folder: Path) -> tuple[dict[str, int], list[Problem]]:
    """Return path → size of every regular file but the manifest, and problems of all others."""
    sizes: dict[str, int] = {}
    problems: list[Problem] = []

    def on_error(error: OSError) -> None:
        where = Path(error.filename).relative_to(folder)
        problems.append(Problem(str(where), f"cannot be read: {_reason(error)}"))

    for place, folders, files in os.walk(folder, onerror=on_error):
        for own_name in (*folders, *files):
            path = Path(place, own_name)
            name = path.relative_to(folder).as_posix()
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[name] = status.st_size
            elif stat.S_ISLNK(status.st_mode):
                problems.append(Problem(name, "is a symbolic link"))
            elif not stat.S_ISDIR(status.st_mode):
                problems.append(Problem(name, "is not a regular file"))
    sizes.pop(_manifest_path(folder).name, None)
    return sizes, problems


def _checksum(path: Path, *, sync: bool = False) -> tuple[int, str]:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return file.tell(), digest


def _content_problems(folder: Path, name: str, entry: tuple[int, str]) -> list[Problem]:
    try:
        found = _checksum(folder / name)
    except (OSError, ValueError) as error:
        return [Problem(name, f"cannot be read: {_reason(error)}")]
    if found == entry:
        return []
    _, digest = found
    _, expected = entry
    detail = f"sha256 {digest[:12]}…, {expected[:12]}… in the manifest"
    return [Problem(name, "has changed since the manifest was written", detail)]


def _serialize(files: _Entries, step: int | None) -> bytes:
    """Return the canonical text of a manifest."""
    body = {name: list(files[name]) for name in sorted(files)}
    if step is None:
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        manifest = {"files": body, "sha256": digest, "version": 1}
    else:
        digest = hashlib.sha256(json.dumps([body, step]).encode()).hexdigest()
        manifest = {"files": body, "sha256": digest, "step": step, "version": 2}
    return json.dumps(manifest).encode() + b"\n"


def _parse(text: bytes) -> tuple[_Entries, int | None]:
    """Parse a manifest; a ValueError unless it is in the form of `_serialize`."""
    files: _Entries = {}
    step: int | None = None
    try:
        manifest = json.loads(text)
        for name, (size, digest) in manifest["files"].items():
            files[str(name)] = int(size), str(digest)
        if "step" in manifest:
            step = int(manifest["step"])
        canonical = _serialize(files, step) == text
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError("it is not a manifest") from error
    if not canonical:
        raise ValueError("it was modified")
    return files, step


def _reason(error: Exception) -> str:
    """Return the reason of an error, without the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def _bytes(n: int) -> str:
    if n == 1:
        return "1 byte"
    return f"{n} bytes"
