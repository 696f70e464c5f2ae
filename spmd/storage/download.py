"""Local copies of objects: texts, tokenizers, folders of Hugging Face.

Each object is downloaded once for each of its versions, into `~/.cache/spmd/objects`.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from spmd.errors import Problem, StorageError
from spmd.storage.address import BucketPath, is_address, parse_address
from spmd.storage.bucket import Bucket, Version

DOWNLOADS = Path("~/.cache/spmd/objects")
_INDEX = ".versions.json"


def local_path(text: str, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Return a local path, for an address of its local copy.

    Args:
        wanted: Whether an object is downloaded, by its name below the address.

    Raises:
        StorageError: The object does not exist, or the store does not answer.
    """
    if not is_address(text):
        return Path(text).expanduser()
    return download(parse_address(text), wanted)


def is_side_file(name: str) -> bool:
    """Return whether a file describes others in its folder: JSON or a template.

    Example:
        >>> is_side_file("tokenizer_config.json"), is_side_file("checkpoints/steps/1.json")
        (True, False)
    """
    return "/" not in name and name.endswith((".json", ".jinja"))


def download(path: BucketPath, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Download an object, or the objects below a path, unless their versions are here.

    Return the local file or folder. Objects that were deleted in the bucket are removed here.
    """
    beside = Bucket(path.parent)
    if path.name in beside.list(path.name):
        folder = local_folder(path.parent)
        _update(beside, folder, [path.name])
        return folder / path.name
    objects = Bucket(path)
    names = [name for name in objects.list() if wanted(name) and not name.endswith("/")]
    if not names:
        problem = Problem(str(path), "does not exist", "no object has this key or is below it")
        raise StorageError("Not found:", [problem])
    folder = local_folder(path)
    _update(objects, folder, names)
    for file in folder.rglob("*"):
        name = file.relative_to(folder).as_posix()
        is_object = file.is_file() and not file.name.startswith(".")
        if is_object and wanted(name) and name not in names:
            file.unlink(missing_ok=True)
    return folder


def local_folder(path: BucketPath) -> Path:
    """Return the folder of the local copies of the objects below a path; it may not exist."""
    return DOWNLOADS.expanduser() / path.scheme / path.bucket / path.key


def download_missing(objects: Bucket, folder: Path, names: Sequence[str]) -> None:
    """Download unchanging objects, unless they are in the folder."""
    _update(objects, folder, [name for name in names if not (folder / name).exists()])


def _update(objects: Bucket, folder: Path, names: Sequence[str]) -> None:
    """Download objects in newer versions than the local ones."""
    folder.mkdir(parents=True, exist_ok=True)
    known = _read_index(folder / _INDEX)
    for name in names:
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            continue
        before = None
        if target.is_file() and name in known:
            before = Version(bytes.fromhex(known[name]))
        after = _download(objects, name, target, before)
        if after != before:
            known = {**_read_index(folder / _INDEX), name: after.generation.hex()}
            _write(folder / _INDEX, json.dumps(known).encode())


def _download(objects: Bucket, name: str, target: Path, before: Version | None) -> Version:
    """Download an object, unless it has the version from before; return its version."""
    target.parent.mkdir(parents=True, exist_ok=True)
    number, unfinished = tempfile.mkstemp(prefix=".", suffix=".download", dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            after = objects.copy_to(name, file, before)
        if after != before:
            os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return after


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    number, unfinished = tempfile.mkstemp(prefix=".", dir=path.parent)
    with os.fdopen(number, "wb") as file:
        file.write(data)
    os.replace(unfinished, path)


def _read_index(path: Path) -> dict[str, str]:
    """Return name → version of the local copies; empty if it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
        return {str(name): bytes.fromhex(text).hex() for name, text in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
