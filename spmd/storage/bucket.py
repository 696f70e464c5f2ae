"""Small objects in a bucket: read, write, conditional write, list and delete.

TensorStore serves S3 and Google Cloud Storage, and finds the credentials. Here its errors become
sentences, requests are repeated while the store does not answer, and conditional writes tell the
caller's own write from another's although answers may be lost.
"""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Self, TypeVar

import tensorstore

from spmd.errors import Problem, StorageError
from spmd.storage.address import BucketPath
from spmd.storage.endpoint import kvstore_spec, server_time

T = TypeVar("T")

PATIENCE = 600.0
"""Seconds until a store that does not answer is an error."""
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 15.0

_PART_BYTES = 32 << 20
"""Bytes of one request for a large object."""

_RANGE_BYTES = 8 << 20
"""Bytes of one of several requests at a time."""

_RETRIES = {"max_retries": 4, "initial_delay": "200ms", "max_delay": "2s"}
"""Repetitions inside TensorStore, which are not reported."""
CONTEXT = tensorstore.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})

_TRANSIENT = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED")
_CREDENTIALS = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_CREDENTIAL_WORDS = ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied")
_SOURCE_LOCATIONS = re.compile(r" *\[source locations=.*", re.DOTALL)
_DAMAGE = re.compile(r"(DATA_LOSS|FAILED_PRECONDITION): Error reading|NOT_FOUND: chunk ")
"""Errors of TensorStore about an absent chunk, or one of another length or checksum."""
_LOG_LINE = re.compile(
    rb"[IWE]\d{4} .* (common-io|AuthCredentialsProvider|auth|google_auth_provider\.cc):\d+\] "
)
"""Lines of the clouds' libraries about places where they look for credentials."""


@dataclasses.dataclass(frozen=True)
class Version:
    """Version of an object, as the store compares it; of an absent object, too."""

    generation: bytes


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """Content of an object with its version; `data` is None if there is no object."""

    data: bytes | None
    version: Version


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of an object, as TensorStore's result of reading."""

    state: str
    value: bytes
    stamp: Any


class Bucket:
    """Objects below a path, by names such as `lease/3.json`.

    Args:
        path: Path of the objects.
        say: Shows a line when the store does not answer, and when it answers again.
        patience: Seconds of repeated requests until a `StorageError`.

    Raises:
        StorageError: From every method: the bucket does not exist, access is refused, or the store
            did not answer in time.
    """

    def __init__(
        self,
        path: BucketPath,
        say: Callable[[str], object] = lambda line: None,
        patience: float = PATIENCE,
    ) -> None:
        self.path = path
        self._say = say
        self._patience = patience
        self._store: Any = None

    def below(self, name: str) -> Self:
        """Return the objects below a name."""
        return type(self)(self.path / name, self._say, self._patience)

    def patient(self, say: Callable[[str], object]) -> Self:
        """Return the same objects, for a run with patience."""
        return type(self)(self.path, say, PATIENCE)

    def check(self) -> None:
        """Raise a `StorageError` unless the objects can be listed; nothing is written."""
        self.now()
        self.list("")

    def find(self, name: str) -> StoredObject:
        """Read an object with its version."""
        return self._request(name, lambda store: _found(store.read(name).result()))

    def find_all(self, names: Sequence[str]) -> list[StoredObject]:
        """Read objects with their versions, at the same time."""

        def read(store: Any) -> list[StoredObject]:
            futures = [store.read(name) for name in names]
            return [_found(future.result()) for future in futures]

        return self._request("", read)

    def read(self, name: str, most: int | None = None) -> bytes:
        """Read an object.

        Args:
            most: Largest size in bytes.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is larger.
        """
        data = self.find(name).data
        if data is None:
            raise FileNotFoundError(f"{self.path / name} does not exist")
        if most is not None and len(data) > most:
            raise ValueError(f"{len(data)} bytes, above the limit of {most}")
        return data

    def copy_to(self, name: str, file: BinaryIO, unless: Version | None = None) -> Version:
        """Copy an object to a file in parts, unless it has a version; return its version.

        Raises:
            FileNotFoundError: There is none.
        """
        start = 0
        version = None
        while True:
            part = self._read_part(name, start, unless)
            if part.state == "unspecified":
                return Version(part.stamp.generation)
            if part.state == "missing":
                raise FileNotFoundError(f"{self.path / name} does not exist")
            current = Version(part.stamp.generation)
            if version not in (None, current):  # it was replaced in the meantime
                file.seek(0)
                file.truncate()
                start, version = 0, None
                continue
            version = current
            file.write(part.value)
            start += len(part.value)
            if len(part.value) < _PART_BYTES:
                return current

    def read_into(self, name: str, start: int, buffer: memoryview) -> Version:
        """Fill a buffer, not an empty one, with bytes of an object; return the object's version.

        Ranges are requested at the same time, from the position `start` on.

        Raises:
            FileNotFoundError: There is none.
            EOFError: It ends before, or was replaced between the ranges.
        """
        bounds = []
        for first in range(0, len(buffer), _RANGE_BYTES):
            bounds.append((first, min(first + _RANGE_BYTES, len(buffer))))

        def read(store: Any) -> list[Any] | None:
            futures = []
            for first, last in bounds:
                futures.append(store.read(name, byte_range=slice(start + first, start + last)))
            try:
                return [future.result() for future in futures]
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
                return None

        parts = self._request(name, read)
        if parts is None:
            raise EOFError(f"ends before byte {start + len(buffer)}")
        if any(part.state == "missing" for part in parts):
            raise FileNotFoundError(f"{self.path / name} does not exist")
        versions = {part.stamp.generation for part in parts}
        if len(versions) > 1:
            raise EOFError("was replaced while it was read")
        for (first, last), part in zip(bounds, parts, strict=True):
            buffer[first:last] = part.value
        return Version(versions.pop())

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name, by its first byte."""
        try:
            self.read_into(name, 0, memoryview(bytearray(1)))
        except FileNotFoundError:
            return False
        except EOFError:
            pass  # it is empty
        return True

    def _read_part(self, name: str, start: int, unless: Version | None) -> Any:
        """Read the next bytes of an object; TensorStore's result, of fewer bytes at the end."""
        generation = None
        if unless is not None:
            generation = unless.generation

        def read(store: Any) -> Any:
            try:
                part = slice(start, start + _PART_BYTES)
                return store.read(name, if_not_equal=generation, byte_range=part).result()
            except ValueError as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise
            # It ends before. A part that begins at the end is out of range, too.
            whole = start == 0
            part = slice(None) if whole else slice(start - 1, None)
            rest = store.read(name, byte_range=part).result()
            if whole:
                return rest
            return _Part(rest.state, rest.value[1:], rest.stamp)

        return self._request(name, read)

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or overwrite it."""
        self._request(name, lambda store: store.write(name, data).result())

    def create(self, name: str, data: bytes) -> Version | None:
        """Write an object if there is none; return its version, or None if there is one."""
        found = self.find(name)
        if found.data is not None:
            return self._own_version(found, data)
        return self.replace(name, data, found.version)

    def replace(self, name: str, data: bytes, version: Version) -> Version | None:
        """Write an object if its version has not changed; return the new one, or None.

        An object with the same content counts as written by this call: the answer to an earlier
        request may have been lost. So contents must differ between writers.
        """
        stamp = self._request(
            name, lambda store: store.write(name, data, if_equal=version.generation).result()
        )
        if stamp.generation:
            return Version(stamp.generation)
        return self._own_version(self.find(name), data)

    def _own_version(self, found: StoredObject, data: bytes) -> Version | None:
        """Return the version of an object with this content; None for another one."""
        if found.data == data:
            return found.version
        return None

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted names of the objects with a prefix."""
        keys = tensorstore.KvStore.KeyRange(prefix, _after(prefix))
        try:
            found = self._request(prefix, lambda store: store.list(keys).result())
        except StorageError as error:
            if not error.is_transient:
                # TensorStore does not say why S3 refused a listing, but does for an object.
                self.now()
                self.find(f"{prefix}.")
            raise
        return sorted(key.decode(errors="replace") for key in found)

    def delete(self, name: str, version: Version | None = None) -> None:
        """Delete an object, if it exists and has the given version, if any."""
        condition = None
        if version is not None:
            condition = version.generation
        self._request(name, lambda store: store.write(name, None, if_equal=condition).result())

    def delete_below(self, prefix: str) -> None:
        """Delete the objects with a prefix; an empty one is an error."""
        if not prefix:
            raise ValueError("an empty prefix would delete everything")
        keys = tensorstore.KvStore.KeyRange(prefix, _after(prefix))
        self._request(prefix, lambda store: store.delete_range(keys).result())

    def now(self) -> float:
        """Return the seconds since the epoch by the store's clock."""
        return self.repeat("", lambda: server_time(self.path))

    def kvstore(self) -> Any:
        """Return TensorStore's key-value store of the objects."""
        if self._store is None:
            spec = kvstore_spec(self.path)
            self._store = tensorstore.KvStore.open(spec, context=CONTEXT).result()
        return self._store

    def _request(self, name: str, send: Callable[[Any], T]) -> T:
        """Send a request, repeatedly if needed; raise a `StorageError` if it fails."""

        def attempt() -> T:
            with _first_request.quiet():
                try:
                    return send(self.kvstore())
                except (ValueError, RuntimeError, OSError) as error:
                    raise storage_error(self._where(name), error) from error

        return self.repeat(name, attempt)

    def repeat(self, name: str, attempt: Callable[[], T]) -> T:
        """Call a function until it raises no transient `StorageError`, as long as patience lasts.

        Args:
            name: Name of what it reads or writes, in the lines that are shown.
        """
        failed_at: float | None = None
        wait = _FIRST_WAIT
        while True:
            try:
                result = attempt()
                break
            except StorageError as error:
                if not error.is_transient:
                    raise
                now = time.monotonic()
                if failed_at is None:  # an attempt may take longer than patience lasts
                    failed_at = now
                    reason = error.problems[0].detail
                    self._say(
                        f"{self._where(name)} does not answer ({reason}); "
                        f"retrying for up to {self._patience:.0f} s"
                    )
                if now - failed_at + wait > self._patience:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        if failed_at is not None:
            seconds = time.monotonic() - failed_at
            self._say(f"{self._where(name)} answers again, {seconds:.0f} s later")
        return result

    def _where(self, name: str) -> str:
        if name:
            return str(self.path / name)
        return str(self.path)


def storage_error(where: str, error: Exception) -> StorageError:
    """Return an error of TensorStore as a `StorageError`."""
    text = _SOURCE_LOCATIONS.sub("", str(error)).replace("\n", " ")
    code = text.partition(":")[0]
    if _DAMAGE.match(text):
        problem = Problem(where, "is damaged", text)
        return StorageError("Damaged:", [problem], is_damage=True)
    if code in _TRANSIENT:
        problem = Problem(where, "the object store does not answer", text)
        return StorageError("Object store not reached:", [problem], is_transient=True)
    if code in _CREDENTIALS or any(word in str(error) for word in _CREDENTIAL_WORDS):
        fix = "credentials with access to it, in the environment or as the cloud's tools store them"
        return StorageError("Access refused:", [Problem(where, "access is refused", text, fix)])
    if "NoSuchBucket" in str(error) or (code == "NOT_FOUND" and "404" in str(error)):
        problem = Problem(where, "its bucket does not exist", text, "create it")
        return StorageError("Bucket not found:", [problem])
    return StorageError("Request refused:", [Problem(where, "the object store refused", text)])


class _FirstRequest:
    """Filter of the clouds' lines about their search for credentials.

    They print them on descriptor 2, once, at the first request. Other lines of that time are
    passed on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_done = False

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold back descriptor 2 in a block, if it is the first one."""
        if self._is_done:
            yield
            return
        with self._lock, _without_log_lines():
            self._is_done = True
            yield


_first_request = _FirstRequest()


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Drop lines about sources of credentials from descriptor 2 in a block."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        before = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            caught.seek(0)
            for line in caught:
                if not _LOG_LINE.match(line):
                    os.write(2, line)


def _found(result: Any) -> StoredObject:
    """Return TensorStore's result of reading."""
    version = Version(result.stamp.generation)
    if result.state == "value":
        return StoredObject(bytes(result.value), version)
    return StoredObject(None, version)


def _after(prefix: str) -> str | bytes:
    """Return the first key after all keys with a prefix; empty for no limit."""
    if not prefix:
        return ""
    key = prefix.encode()
    return key[:-1] + bytes([key[-1] + 1])
