"""Bytes of a safetensors file: of a local file, or of an object in a bucket.

An object is read in ranges, and only those that are asked for: of a model of hundreds of GB, a
process needs the rows of its own devices.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmd.checkpoint.manifest import open_regular
from spmd.storage.address import Location
from spmd.storage.bucket import Bucket, Version

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library


class DamagedBytesError(Exception):
    """A file ends early, was replaced while it was read, or has a header of another form."""


class StoredBytes(Protocol):
    """Bytes of one file.

    Attributes:
        path: Where it is.
        size: Its bytes.
        at_once: Bytes to read at a time: requests to a bucket are slow, and several run at a time.
    """

    path: Location
    size: int
    at_once: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from an offset on; a DamagedBytesError if the file ends before."""

    def header_file(self) -> contextlib.AbstractContextManager[Path]:
        """Yield a local file with the header, and of the file's size."""

    def digest(self) -> str:
        """Return a digest for comparisons of files, without reading much."""

    def close(self) -> None:
        """Close the file; may be called again."""


class LocalBytes(StoredBytes):
    """Bytes of a regular file, not of a symbolic link.

    Raises:
        ValueError: It is another kind of file.
    """

    at_once = 4 << 20  # small enough for a processor's cache

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = path
        self._file = open_regular(path)
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read with pread(2)."""
        left = buffer
        while left:
            count = os.preadv(self._file.fileno(), [left], offset)
            if not count:
                raise DamagedBytesError(f"ends at byte {offset}")
            left, offset = left[count:], offset + count

    @contextlib.contextmanager
    def header_file(self) -> Iterator[Path]:
        """Yield the file itself."""
        yield self._local

    def digest(self) -> str:
        """Return a digest of the size and of samples: of the header, then of every part."""
        number = self._file.fileno()
        digest = hashlib.sha256(str(self.size).encode())
        for offset in np.linspace(0, max(self.size - _SAMPLE_BYTES, 0), _SAMPLES, dtype=np.int64):
            digest.update(os.pread(number, _SAMPLE_BYTES, int(offset)))
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BucketBytes(StoredBytes):
    """Bytes of an object.

    It must not be replaced while it is read. Its size is that of its header and of the tensors in
    it.

    Raises:
        FileNotFoundError: The object does not exist.
        DamagedBytesError: Its header is cut, or has no size of tensors.
        StorageError: The store does not answer.
    """

    at_once = 64 << 20

    def __init__(self, objects: Bucket, name: str) -> None:
        self.path = objects.path / name
        self._objects = objects
        self._name = name
        self._version: Version | None = None
        length = bytearray(_LENGTH_BYTES)
        self.read_into(memoryview(length), 0)
        count = int.from_bytes(length, "little")
        if count > _MAX_HEADER_BYTES:
            raise DamagedBytesError(f"has a header of {count} bytes")
        header = bytearray(count)
        self.read_into(memoryview(header), _LENGTH_BYTES)
        self._header = bytes(length + header)
        self.size = len(self._header) + _tensor_bytes(header)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read ranges at the same time."""
        if not buffer:  # of a tensor without elements
            return
        try:
            version = self._objects.read_into(self._name, offset, buffer)
        except EOFError as error:
            raise DamagedBytesError(str(error)) from error
        if self._version not in (None, version):
            raise DamagedBytesError("was replaced while it was read")
        self._version = version

    @contextlib.contextmanager
    def header_file(self) -> Iterator[Path]:
        """Yield a temporary file, with a hole in place of the tensors."""
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(self._header)
            file.truncate(self.size)
            file.flush()
            yield Path(file.name)

    def digest(self) -> str:
        """Return a digest of the size and of the object's version."""
        assert self._version is not None, "the header was read"
        text = f"{self.size} {self._version.generation.hex()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def close(self) -> None:
        """Do nothing."""


def _tensor_bytes(header: bytearray) -> int:
    """Return the end of the last tensor that a header names."""
    try:
        entries: dict[str, Any] = json.loads(header)
        ends = [0]
        for name, entry in entries.items():
            if name != "__metadata__":
                ends.append(int(entry["data_offsets"][1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedBytesError("has a header that is no JSON of tensors") from error
    return max(ends)
