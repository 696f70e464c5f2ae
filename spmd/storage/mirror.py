"""Mirror of a folder in a bucket: files are written locally, and uploaded.

Programs write to the folder as to any other. Changed files are uploaded at intervals, in the
background: small ones whole, and of a larger one that only grew, the added bytes.

```
metrics.jsonl                                     the file at some time, whole
metrics.jsonl.parts/4f1c…-000003.000002-000104857600
                                                  bytes that follow, from that position on
```

A part names the digest of the whole file that it continues, the number of its writer, and how many
whole files that writer had uploaded. Of the parts of a digest, those of the latest writer count.
So bytes of an earlier content are never joined to a later one, in whatever order writes and crashes
come.
"""

import contextlib
import dataclasses
import functools
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd.errors import Problem, StorageError
from spmd.storage.bucket import Bucket, Version
from spmd.storage.periodic import calls_at_intervals
from spmd.storage.temporary import temporary_folder

INTERVAL = 5.0
"""Seconds between uploads."""
SMALL = 64 << 10
"""Bytes up to which a file is uploaded whole."""
MOST_PARTS = 256
LAST_SECONDS = 120.0
"""Seconds of repeated requests for the uploads at the end."""

_PART = re.compile(r"(.+)\.parts/([0-9a-f]{16})-([0-9]{6,}\.[0-9]{6})-([0-9]{15})")
_UNFINISHED = (".tmp", ".unfinished", ".writing")
_TAIL = 4096


@dataclasses.dataclass
class _Uploaded:
    """File as it is in the bucket.

    Attributes:
        version: Version of the whole file.
        tag: Digest of the whole file.
        whole: Bytes of the whole file.
        size: Bytes with the parts.
        tail: Last bytes, by which a file that grew is told from a new one.
        digest: Of all bytes, by which a file that was edited in place is told.
        parts: Names of the parts; also those of earlier contents.
        seen: Number, size and time of the local file.
    """

    version: Version
    tag: str
    whole: int
    size: int
    tail: bytes
    digest: Any
    parts: list[str]
    seen: tuple[int, int, int] = (0, 0, 0)


class Mirror:
    """Local folder with the files of a bucket.

    Args:
        bucket: Where the files are kept.
        excluded: Beginnings of names that are not files of the folder, such as `checkpoints/`.

    Attributes:
        folder: The local folder, removed with this object.
    """

    def __init__(self, bucket: Bucket, excluded: tuple[str, ...] = ()) -> None:
        self.bucket = bucket
        self._excluded = excluded
        self.folder = temporary_folder("spmd-files", self)
        self._uploaded: dict[str, _Uploaded] = {}
        self._lock = threading.Lock()
        self._is_writing = False
        self._writer = 0
        self._wholes = 0

    def pull(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Download the files, unless this object uploads them; remove deleted ones.

        Args:
            wanted: Whether a file is downloaded, by its name.
        """
        if self._is_writing:
            return
        found = self._listed(wanted)
        for name, parts in found.items():
            self._pull_file(name, parts)
        for name in filter(wanted, self._uploaded.keys() - found.keys()):
            (self.folder / name).unlink(missing_ok=True)
            del self._uploaded[name]

    def fetch(self, prefix: str) -> None:
        """Download missing files with a prefix, also while this object uploads others."""
        with self._lock:
            for name, parts in self._listed(prefix=prefix).items():
                if not (self.folder / name).exists():
                    self._pull_file(name, parts)

    def _listed(
        self, wanted: Callable[[str], bool] = lambda name: True, prefix: str = ""
    ) -> dict[str, list[str]]:
        """Return name → names of the parts, of the wanted files in the bucket."""
        parts: dict[str, list[str]] = {}
        whole: list[str] = []
        for name in self.bucket.list(prefix):
            part = _PART.fullmatch(name)
            if part:
                parts.setdefault(part[1], []).append(name)
            elif not name.startswith(self._excluded) and not name.endswith("/") and wanted(name):
                whole.append(name)
        return {name: parts.get(name, []) for name in whole}

    def _pull_file(self, name: str, parts: list[str]) -> None:
        """Write a file to the folder, joined from its parts."""
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            return
        found = self.bucket.find(name)
        if found.data is None:  # deleted since the listing
            return
        tag = _tag(found.data)
        joined = bytearray(found.data)
        own = _latest(parts, tag)
        for part, added in zip(own, self.bucket.find_all(own), strict=True):
            start = int(part[-15:])
            if added.data is None or start != len(joined):
                break  # what follows has no beginning
            joined += added.data
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_bytes(joined)
        unfinished.replace(path)
        uploaded = _Uploaded(
            version=found.version,
            tag=tag,
            whole=len(found.data),
            size=len(joined),
            tail=bytes(joined[-_TAIL:]),
            digest=hashlib.sha256(joined),
            parts=parts,
        )
        uploaded.seen = _identity(path)
        self._uploaded[name] = uploaded

    def push(self, owns: Callable[[str], bool] = lambda name: True) -> None:
        """Upload changed files.

        Args:
            owns: Whether a file is this process's to upload.

        Raises:
            StorageError: The store does not answer, or another process has written some files; the
                other files are uploaded.
        """
        failed: list[StorageError] = []
        with self._lock:
            for name, path in self._changed(owns):
                try:
                    self._push_file(name, path)
                except FileNotFoundError:
                    continue  # removed since the listing
                except StorageError as error:
                    failed.append(error)
                    if error.is_transient:
                        break
        if failed:
            problems = [problem for error in failed for problem in error.problems]
            is_transient = any(error.is_transient for error in failed)
            raise StorageError(failed[0].title, problems, is_transient=is_transient)

    def pending(self, name: str) -> tuple[int, bytes]:
        """Return the bytes of a file that are not in the bucket, and their position in it."""
        path = self.folder / name
        if not path.exists():
            return 0, b""
        uploaded = self._uploaded.get(name)
        with path.open("rb") as file:
            if uploaded is None:
                return 0, file.read()
            size, tail = uploaded.size, uploaded.tail
            file.seek(size - len(tail))
            if file.read(len(tail)) == tail:
                return size, file.read()
            file.seek(0)  # it was written anew
            return 0, file.read()

    @contextlib.contextmanager
    def uploads(
        self,
        writer: int,
        owns: Callable[[str], bool],
        before: Callable[[], object],
        say: Callable[[str], object],
    ) -> Iterator[None]:
        """Upload changed files at intervals, from a thread, and at the end of a block.

        Files that cannot be uploaded are said and end nothing.

        Args:
            writer: Number of this writer, larger than those of earlier ones.
            owns: Whether a file is this process's to upload.
            before: Called before each upload; raises if there must be none.
            say: Shows a line.
        """
        quick = self.bucket
        self.bucket = quick.patient(say)
        self._writer = writer
        self._is_writing = True

        upload = functools.partial(self.upload, owns, before, say)
        try:
            with calls_at_intervals(upload, INTERVAL, LAST_SECONDS, "spmd-uploads"):
                yield
        finally:
            self.bucket = Bucket(quick.path, say, LAST_SECONDS)
            self.upload(owns, before, lambda line: print(f"spmd: {line}", file=sys.stderr))
            self.bucket = quick
            self._is_writing = False

    def upload(
        self,
        owns: Callable[[str], bool],
        before: Callable[[], object],
        say: Callable[[str], object],
    ) -> None:
        """Upload changed files; say why, if some cannot be."""
        try:
            if any(self._changed(owns)):
                before()
                self.push(owns)
        except (OSError, ValueError) as error:  # of which `SpmdError` is one
            say(f"files of the run were not uploaded: {error}")

    def _changed(self, owns: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
        """Yield name and path of each file with another identity than when it was uploaded."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            is_excluded = name.startswith(self._excluded) or name.endswith(_UNFINISHED)
            if is_excluded or not path.is_file() or not owns(name):
                continue
            uploaded = self._uploaded.get(name)
            if uploaded is None or uploaded.seen != _identity(path):
                yield name, path

    def _push_file(self, name: str, path: Path) -> None:
        """Upload a changed file."""
        seen = _identity(path)
        uploaded = self._uploaded.get(name)
        added = None
        if uploaded is not None:
            added = _added_bytes(uploaded, path)
        if uploaded is None or added is None:
            self._push_whole(name, path.read_bytes())
        elif added:
            self._push_part(name, path, added, uploaded)
        self._uploaded[name].seen = seen

    def _push_part(self, name: str, path: Path, added: bytes, uploaded: _Uploaded) -> None:
        """Upload the added bytes of a file; the whole file, if it is small or has many parts."""
        size = uploaded.size + len(added)
        is_many = size > 2 * uploaded.whole or len(uploaded.parts) >= MOST_PARTS
        if size <= SMALL or is_many:
            self._push_whole(name, path.read_bytes())
            return
        writer = f"{self._writer:06d}.{self._wholes:06d}"
        part = f"{name}.parts/{uploaded.tag}-{writer}-{uploaded.size:015d}"
        self.bucket.write(part, added)
        uploaded.parts.append(part)
        uploaded.size = size
        uploaded.tail = (uploaded.tail + added)[-_TAIL:]
        uploaded.digest.update(added)

    def _push_whole(self, name: str, data: bytes) -> None:
        """Upload a file in place of its last known version."""
        uploaded = self._uploaded.get(name)
        parts: list[str] = []
        if uploaded is None:
            version = self.bucket.create(name, data)
        else:
            version = self.bucket.replace(name, data, uploaded.version)
            parts = uploaded.parts
        if version is None and self._writer:
            # This process has the lease: an earlier writer was late.
            version = self.bucket.replace(name, data, self.bucket.find(name).version)
        if version is None:
            where = str(self.bucket.path / name)
            problem = Problem(where, "was written by another process", fix="one run for a folder")
            raise StorageError("Nothing was uploaded:", [problem])
        self._wholes += 1
        uploaded = _Uploaded(
            version=version,
            tag=_tag(data),
            whole=len(data),
            size=len(data),
            tail=data[-_TAIL:],
            digest=hashlib.sha256(data),
            parts=parts,
        )
        self._uploaded[name] = uploaded
        while parts:
            self.bucket.delete(parts[-1])
            parts.pop()


def _latest(parts: list[str], tag: str) -> list[str]:
    """Return the parts after a whole file, of its latest writer, by position."""
    of_writer: dict[tuple[int, int], list[str]] = {}
    for name in parts:
        found = _PART.fullmatch(name)
        if found and found[2] == tag:
            number, _, wholes = found[3].partition(".")
            of_writer.setdefault((int(number), int(wholes)), []).append(name)
    if not of_writer:
        return []
    return sorted(of_writer[max(of_writer)], key=lambda name: name[-15:])


def _added_bytes(uploaded: _Uploaded, path: Path) -> bytes | None:
    """Return the bytes after the uploaded ones; None if a file does not continue them."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= uploaded.size:
            data = file.read()
            is_same = hashlib.sha256(data).digest() == uploaded.digest.digest()
            return b"" if is_same else None
        file.seek(uploaded.size - len(uploaded.tail))
        if file.read(len(uploaded.tail)) != uploaded.tail:
            return None
        return file.read()


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _identity(path: Path) -> tuple[int, int, int]:
    """Return number, size and time of a file."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
