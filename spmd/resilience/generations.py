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
from pathlib import Path
from typing import Protocol


class ConditionalStore(Protocol):
    """Storage with a conditional write."""

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; return false if there is one of the name."""

    def exists(self, name: str) -> bool:
        """Return whether there is an object of the name."""


@dataclasses.dataclass(frozen=True)
class FolderStore:
    """Conditional writes in a shared folder, by exclusive creation."""

    folder: Path

    def create(self, name: str, content: bytes) -> bool:
        """Create a file; return false if there is one, or if it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:
            return False
        with contextlib.suppress(OSError), os.fdopen(handle, "wb") as file:
            file.write(content)
        return True

    def exists(self, name: str) -> bool:
        """Return whether there is a file of the name."""
        return os.path.lexists(self.folder / name)


@dataclasses.dataclass(frozen=True)
class Generations:
    """Records of failed generations of a run.

    Args:
        store: None for a run of one process, which needs no agreement.
    """

    store: ConditionalStore | None = None

    def fail(self, number: int, reason: str) -> bool:
        """Record the failure of a generation; return true for its first record."""
        if self.store is None or not number:
            return False
        return self.store.create(f"{number}.failed", f"{reason}\n".encode())

    def has_failed(self, number: int) -> bool:
        """Return whether a generation has failed; 0 is none."""
        if self.store is None or not number:
            return False
        return self.store.exists(f"{number}.failed")

    def end(self, number: int, reason: str) -> bool:
        """Record that nothing follows a generation, as one of its processes is not started again."""
        if self.store is None or not number:
            return False
        return self.store.create(f"{number}.ended", f"{reason}\n".encode())

    def has_ended(self, number: int) -> bool:
        """Return whether nothing follows a generation; 0 is none."""
        if self.store is None or not number:
            return False
        return self.store.exists(f"{number}.ended")
