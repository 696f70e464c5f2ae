"""Folders of files in a bucket, each made by one host and downloaded by the others.

```
4f1c….json                  record of a complete folder: sizes and checksums; written last
4f1c…/train.npy/00000000    64 MiB of a file, by the number of the part
4f1c….claim                 host that makes the folder now, written again every ten seconds
```

A folder never changes, so hosts that make the same one write the same bytes.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from spmd.errors import StorageError
from spmd.storage.bucket import Bucket, Version

_PART_BYTES = 64 << 20
_PARTS_AT_ONCE = 4
_RENEWAL = 10.0
_EXPIRY = 60.0
"""Seconds after which a claim that was not written again is another host's to take."""
_POLL = 1.0
_MAX_RECORD_BYTES = 16 << 20

_numbers = itertools.count()  # for the text of a claim: two of this process differ


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of a file."""

    name: str
    start: int
    size: int


class SharedFolders:
    """Folders below a path of a bucket, by name.

    Args:
        say: Shows a line about a folder that another host makes, or that is damaged.

    Raises:
        StorageError: From every method: the bucket does not exist, access is refused, or the store
            did not answer in time.
    """

    def __init__(self, bucket: Bucket, say: Callable[[str], object]) -> None:
        self._bucket = bucket
        self._say = say

    def fetch(self, name: str, folder: Path) -> bool:
        """Download a folder into a new local one; False if it is not complete or is damaged."""
        try:
            text = self._bucket.read(_record(name), _MAX_RECORD_BYTES)
        except FileNotFoundError:
            return False
        folder.mkdir(parents=True)
        try:
            for file, size, checksums in json.loads(text)["files"]:
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is not the name of a file")
                with (folder / file).open("wb") as content:
                    self._download(_parts(f"{name}/{file}", size), checksums, content)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            where = self._bucket.path / name
            self._say(f"{where} is damaged ({error}): it is made again")
            return False
        return True

    def _download(self, parts: list[_Part], checksums: list[int], content: BinaryIO) -> None:
        """Write parts to a file; a `ValueError` if one is not as it was."""

        def get(part: _Part, checksum: int) -> None:
            data = self._bucket.read(part.name, _PART_BYTES)
            if len(data) != part.size or zlib.crc32(data) != checksum:
                raise ValueError(f"{part.name} differs from its checksum")
            os.pwrite(content.fileno(), data, part.start)

        with _pool() as pool:
            for future in [pool.submit(get, *each) for each in zip(parts, checksums, strict=True)]:
                future.result()

    def publish(self, name: str, folder: Path) -> None:
        """Upload a local folder of files."""
        files = list[Any]()
        for path in sorted(folder.iterdir()):
            size = path.stat().st_size
            parts = _parts(f"{name}/{path.name}", size)
            with path.open("rb") as content:
                files.append([path.name, size, self._upload(parts, content)])
        self._bucket.write(_record(name), json.dumps({"files": files}).encode())

    def _upload(self, parts: list[_Part], content: BinaryIO) -> list[int]:
        """Write the parts of a file; return their checksums."""

        def put(part: _Part) -> int:
            data = os.pread(content.fileno(), part.size, part.start)
            self._bucket.write(part.name, data)
            return zlib.crc32(data)

        with _pool() as pool:
            return list(pool.map(put, parts))

    @contextlib.contextmanager
    def turn(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Hold the claim to make a folder in a block, unless the folder is complete.

        Yields:
            False if another host has the claim and `wait` is false; true once the folder is
            complete or the claim is ours.
        """
        claim = f"{name}.claim"
        version = self._claim(name, claim, wait)
        if version is None:
            yield self._is_complete(name)
            return
        with _Renewal(self._bucket, claim, version):
            yield True

    def _claim(self, name: str, claim: str, wait: bool) -> Version | None:
        """Create the claim, or take one that has expired; None if it is another host's.

        With `wait`, return None only once the folder is complete.
        """
        seen: Version | None = None
        since = 0.0
        is_said = False
        while not self._is_complete(name):
            found = self._bucket.find(claim)
            if found.version != seen:
                seen = found.version
                since = time.monotonic()
            if found.data is None or time.monotonic() - since > _EXPIRY:
                version = self._bucket.replace(claim, _claim_text(), found.version)
                if version is not None:
                    return version
                continue
            if not wait:
                return None
            if not is_said:
                self._say(f"waiting for {self._bucket.path / name}, which another host makes")
                is_said = True
            time.sleep(_POLL)
        return None

    def _is_complete(self, name: str) -> bool:
        return self._bucket.exists(_record(name))


class _Renewal:
    """Thread that writes a claim again while a block runs; then it is deleted.

    It stops at a claim that another host has taken, or that cannot be written.
    """

    def __init__(self, bucket: Bucket, claim: str, version: Version) -> None:
        self._bucket = bucket
        self._claim = claim
        self._version: Version | None = version
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._version is not None:
            with contextlib.suppress(StorageError):  # it expires
                self._bucket.delete(self._claim, self._version)

    def _renew(self) -> None:
        with contextlib.suppress(StorageError):
            while self._version is not None and not self._ended.wait(_RENEWAL):
                self._version = self._bucket.replace(self._claim, _claim_text(), self._version)


def _record(name: str) -> str:
    return f"{name}.json"


def _claim_text() -> bytes:
    return json.dumps([socket.gethostname(), os.getpid(), next(_numbers)]).encode()


def _parts(name: str, size: int) -> list[_Part]:
    """Return the parts of a file of some size."""
    parts = []
    for number, start in enumerate(range(0, size, _PART_BYTES)):
        parts.append(_Part(f"{name}/{number:08}", start, min(_PART_BYTES, size - start)))
    return parts


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_PARTS_AT_ONCE, "shared folder")
