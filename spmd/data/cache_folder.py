"""Folder of tokenized text, of this host or shared by all in a bucket."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from spmd.errors import DataError, Problem, StorageError
from spmd.storage.address import BucketPath, locate
from spmd.storage.bucket import Bucket
from spmd.storage.shared_folders import SharedFolders

_DEFAULT = "~/.cache/spmd"


@dataclasses.dataclass(frozen=True)
class CacheFolder:
    """Folders of tokenized text by name, each made once.

    Attributes:
        local: Folder on a disk of this host.
        shared: The same folders in a bucket; None without one.
    """

    local: Path
    shared: SharedFolders | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the cache of a path, or of an address: with local copies in the default folder."""
        location = locate(text or _DEFAULT)
        if isinstance(location, BucketPath):
            shared = SharedFolders(Bucket(location, _say), _say)
            return cls(Path(_DEFAULT).expanduser(), shared)
        return cls(location.expanduser())

    def make(
        self,
        name: str,
        build: Callable[[Path], object],
        is_whole: Callable[[Path], bool],
        wait: bool = True,
    ) -> bool:
        """Make a folder complete, unless it is: by a download, or by building it.

        Several processes may call this at once: one builds it, or each where the file system has no
        locks.

        Args:
            build: Fills an empty folder.
            is_whole: Whether a folder is there and has all that it should.

        Returns:
            False if another thread, process or host builds it and `wait` is false.

        Raises:
            DataError: It cannot be written, or what was written cannot be read.
        """
        folder = self.local / name
        if is_whole(folder):
            return True
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not self._make(name, build, is_whole, wait):
                return False
        except OSError as error:
            raise self._unusable("cannot hold the tokenized text", str(error)) from error
        if not is_whole(folder):
            raise self._unusable("does not hold the tokenized text that was written", name)
        return True

    def _make(
        self,
        name: str,
        build: Callable[[Path], object],
        is_whole: Callable[[Path], bool],
        wait: bool,
    ) -> bool:
        """Make an incomplete folder; see `make`."""
        folder = self.local / name
        with contextlib.ExitStack() as stack:
            if not stack.enter_context(_locked(folder.with_suffix(".lock"), wait)):
                return False
            if is_whole(folder):  # another process has made it
                return True
            if self.shared is not None:
                is_ours = stack.enter_context(self.shared.turn(name, wait=wait))
                if not is_ours:
                    return False
            prefix = f".{folder.name[:16]}-"
            temporary = tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix)
            built = Path(stack.enter_context(temporary), "built")
            if not self._fetched(name, built) or not is_whole(built):
                shutil.rmtree(built, ignore_errors=True)
                built.mkdir()
                build(built)
                _sync(built)
                self._publish(name, built)
            _install(built, folder, is_whole(folder))
        return True

    def _unusable(self, what: str, detail: str) -> DataError:
        fix = "choose another folder: --data.cache DIR"
        problem = Problem(str(self.local), what, detail, fix)
        return DataError("the text cannot be cached:", [problem])

    def _fetched(self, name: str, built: Path) -> bool:
        """Download a folder; false if there is none."""
        return self.shared is not None and self.shared.fetch(name, built)

    def _publish(self, name: str, built: Path) -> None:
        """Upload a folder; show errors of the store, as this host has the text."""
        if self.shared is None:
            return
        try:
            self.shared.publish(name, built)
        except StorageError as error:
            _say(f"the tokenized text was not uploaded: {error}")


@contextlib.contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock inside the block; yield False if it is taken and `wait` is false.

    Another thread or process may have it. It ends with its process, too.
    """
    with path.open("wb") as file:
        operation = fcntl.LOCK_EX
        if not wait:
            operation |= fcntl.LOCK_NB
        try:
            fcntl.flock(file, operation)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        try:
            yield True
        finally:  # whoever waits for it finds the folder, or tries on its own
            path.unlink(missing_ok=True)


def _install(built: Path, folder: Path, is_whole: bool) -> None:
    """Rename `built` to `folder`; an incomplete `folder` is moved beside `built` before."""
    if not is_whole:
        # Another process may move the damaged folder, or create a valid one, at the same time.
        with contextlib.suppress(FileNotFoundError):
            folder.rename(built.with_name("damaged"))
    try:
        built.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _sync(folder: Path) -> None:
    """Write the files of a folder to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
