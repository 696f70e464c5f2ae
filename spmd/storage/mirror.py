"""Mirror of a folder in a bucket: files are written locally, and uploaded.

Programs write to the folder as to any other. Changed files are uploaded at intervals, in the
background: small ones whole, and of a larger one that only grew, what was added.

```
metrics.jsonl                                  the file at some time, whole
metrics.jsonl.parts/4f1c…-000000104857600      what was added to it, from that byte on
```

A part names the digest of the whole file that it continues. So parts of an earlier content count
for nothing, and a whole file takes the place of the one before it, with its parts, at once.
"""

import contextlib
import dataclasses
import hashlib
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from spmd.errors import Problem, StorageError
from spmd.storage.bucket import Bucket, StoredObject, Version

INTERVAL = 5.0
"""Seconds between uploads."""
SMALL = 64 << 10
"""Bytes up to which a file is uploaded whole."""
MOST_PARTS = 256

_PART = re.compile(r"(.+)\.parts/([0-9a-f]{16})-([0-9]{15})")
_UNFINISHED = (".tmp", ".unfinished")
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
        parts: Names of the parts; also those of earlier contents.
        seen: Number, size and time of the local file.
    """

    version: Version
    tag: str
    whole: int
    size: int
    tail: bytes
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
        self.folder = Path(tempfile.mkdtemp(prefix="spmd-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._uploaded: dict[str, _Uploaded] = {}
        self._lock = threading.Lock()
        self._is_writing = False

    def pull(self) -> None:
        """Download the files, unless this object uploads them."""
        if self._is_writing:
            return
        names = [name for name in self.bucket.list() if not name.startswith(self._excluded)]
        parts: dict[str, list[str]] = {}
        for name in names:
            part = _PART.fullmatch(name)
            if part:
                parts.setdefault(part[1], []).append(name)
        whole = [name for name in names if not _PART.fullmatch(name)]
        found = self.bucket.find_all(whole)
        for name, each in zip(whole, found, strict=True):
            if each.data is not None:  # deleted since the listing
                self._write_local(name, each, parts.get(name, []))

    def _write_local(self, name: str, found: StoredObject, parts: list[str]) -> None:
        """Write a file to the folder, joined from its parts."""
        data = found.data or b""
        tag = _digest(data)
        own = [part for part in parts if f".parts/{tag}-" in part]
        joined = bytearray(data)
        for part, added in zip(own, self.bucket.find_all(own), strict=True):
            start = int(part[-15:])
            if added.data is None or start != len(joined):
                break  # what follows has no beginning
            joined += added.data
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(joined)
        tail = bytes(joined[-_TAIL:])
        uploaded = _Uploaded(found.version, tag, len(data), len(joined), tail, parts)
        uploaded.seen = _identity(path)
        self._uploaded[name] = uploaded

    def push(self, owns: Callable[[str], bool] = lambda name: True) -> None:
        """Upload changed files.

        Args:
            owns: Whether a file is this process's to upload.

        Raises:
            StorageError: The store does not answer, or another process has written a file.
        """
        with self._lock:
            for name, path in self._files():
                if owns(name):
                    self._push_file(name, path)

    @contextlib.contextmanager
    def uploads(
        self,
        owns: Callable[[str], bool],
        before: Callable[[], object],
        say: Callable[[str], object],
    ) -> Iterator[None]:
        """Upload changed files at intervals, from a thread, and at the end of a block.

        Args:
            owns: Whether a file is this process's to upload.
            before: Called before each upload; raises if there must be none.
            say: Shows why an upload failed, which is repeated.

        Raises:
            StorageError: At the end of the block, the files could not be uploaded.
        """
        stopped = threading.Event()
        self.bucket = self.bucket.patient(say)
        self._is_writing = True

        def upload() -> None:
            before()
            self.push(owns)

        def keep_uploading() -> None:
            while not stopped.wait(INTERVAL):
                try:
                    upload()
                except (OSError, ValueError) as error:  # of which `StorageError` is one
                    say(f"files of the run were not uploaded, and will be: {error}")

        thread = threading.Thread(target=keep_uploading, name="spmd-uploads", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            try:
                upload()
            finally:
                self._is_writing = False

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield name and path of each file, without unfinished ones."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            is_excluded = name.startswith(self._excluded) or name.endswith(_UNFINISHED)
            if path.is_file() and not is_excluded:
                yield name, path

    def _push_file(self, name: str, path: Path) -> None:
        """Upload a file, if it has changed."""
        uploaded = self._uploaded.get(name)
        seen = _identity(path)
        if uploaded is not None and uploaded.seen == seen:
            return
        data = path.read_bytes()
        if uploaded is None or not _is_continued(uploaded, data):
            self._push_whole(name, data)
        elif len(data) > uploaded.size:
            self._push_part(name, data, uploaded)
        self._uploaded[name].seen = seen

    def _push_part(self, name: str, data: bytes, uploaded: _Uploaded) -> None:
        """Upload the added bytes of a file; the whole file, if it is small or has many parts."""
        added = len(data) - uploaded.whole
        if len(data) <= SMALL or added > uploaded.whole or len(uploaded.parts) >= MOST_PARTS:
            self._push_whole(name, data)
            return
        part = f"{name}.parts/{uploaded.tag}-{uploaded.size:015d}"
        self.bucket.write(part, data[uploaded.size :])
        uploaded.parts.append(part)
        uploaded.size = len(data)
        uploaded.tail = data[-_TAIL:]

    def _push_whole(self, name: str, data: bytes) -> None:
        """Upload a file in place of its last known version."""
        uploaded = self._uploaded.get(name)
        if uploaded is None:
            version = self.bucket.create(name, data)
            parts = []
        else:
            version = self.bucket.replace(name, data, uploaded.version)
            parts = uploaded.parts
        if version is None:
            where = str(self.bucket.path / name)
            problem = Problem(where, "was written by another process", fix="one run for a folder")
            raise StorageError("Nothing was uploaded:", [problem])
        tail = data[-_TAIL:]
        self._uploaded[name] = _Uploaded(version, _digest(data), len(data), len(data), tail, [])
        for part in parts:
            self.bucket.delete(part)


def _is_continued(uploaded: _Uploaded, data: bytes) -> bool:
    """Return whether data continue the uploaded bytes, judged by the last of these."""
    start = uploaded.size - len(uploaded.tail)
    return data[start : uploaded.size] == uploaded.tail


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _identity(path: Path) -> tuple[int, int, int]:
    """Return number, size and time of a file."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
