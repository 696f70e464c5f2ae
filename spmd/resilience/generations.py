"""Failed generations of a run: supervisors of several processes agree to end one, without JAX.

A generation is the processes between two restarts. Its number is that of the run folder's lease,
which all of its processes learn at their start, and which never goes back. When a process crashes,
its supervisor records that its generation has failed; the others find the record, kill their
processes, and start the next generation. A record is made by a conditional write: the first one
counts, and says why.
"""

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Protocol

from spmd.resilience.forked_call import call_in_fork
from spmd.storage.address import BucketPath, Location
from spmd.storage.bucket import Bucket

_REQUEST_SECONDS = 10.0
_LOOK_SECONDS = 5.0


class ConditionalStore(Protocol):
    """Storage with a conditional write."""

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; return false if there is one of the name."""

    def exists(self, name: str) -> bool:
        """Return whether there is an object of the name."""


class FolderStore(ConditionalStore):
    """Conditional writes in a shared folder, by exclusive creation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, name: str, content: bytes) -> bool:
        """Create a file; return false if there is one, or if it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:
            return False
        with contextlib.suppress(OSError), os.fdopen(handle, "wb") as file:
            file.write(content)
        return True

    def exists(self, name: str) -> bool:
        """Return whether there is a file of the name."""
        return os.path.lexists(self._folder / name)


class BucketStore(ConditionalStore):
    """Conditional writes in a bucket, each request in a process of its own.

    A store that does not answer in time has no objects; nor is an object there that was looked for
    less than `_LOOK_SECONDS` ago.
    """

    def __init__(self, path: BucketPath) -> None:
        self._bucket = Bucket(path, patience=_REQUEST_SECONDS)
        self._next_look: dict[str, float] = {}

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; return false if there is one, or without an answer."""

        def request() -> bool:
            return self._bucket.create(name, content) is not None

        return bool(call_in_fork(request, 2 * _REQUEST_SECONDS))

    def exists(self, name: str) -> bool:
        """Return whether there is an object of the name."""

        def request() -> bool:
            return self._bucket.find(name).data is not None

        if time.monotonic() < self._next_look.get(name, 0.0):
            return False
        found = call_in_fork(request, _REQUEST_SECONDS)
        self._next_look[name] = time.monotonic() + _LOOK_SECONDS
        return bool(found)


def conditional_store(location: Location) -> ConditionalStore:
    """Return the store of a folder or of a path in a bucket."""
    if isinstance(location, Path):
        return FolderStore(location)
    return BucketStore(location)


@dataclasses.dataclass(frozen=True)
class Generations:
    """Records of failed generations of a run.

    Args:
        store: None for a run of one process, which needs no agreement.
    """

    store: ConditionalStore | None = None

    def fail(self, number: int, reason: str) -> bool:
        """Record the failure of a generation; return true for its first record."""
        return self._create(number, "failed", reason)

    def has_failed(self, number: int) -> bool:
        """Return whether a generation has failed; 0 is none."""
        return self._exists(number, "failed")

    def end(self, number: int, reason: str) -> bool:
        """Record that nothing follows a generation, as one of its processes is not started again."""
        return self._create(number, "ended", reason)

    def has_ended(self, number: int) -> bool:
        """Return whether nothing follows a generation; 0 is none."""
        return self._exists(number, "ended")

    def _create(self, number: int, kind: str, reason: str) -> bool:
        if self.store is None or not number:
            return False
        return self.store.create(f"{number}.{kind}", f"{reason}\n".encode())

    def _exists(self, number: int, kind: str) -> bool:
        if self.store is None or not number:
            return False
        return self.store.exists(f"{number}.{kind}")
