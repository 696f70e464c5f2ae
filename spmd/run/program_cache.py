"""Compilation cache of a run: a folder, or a path in a bucket.

JAX reads and writes a local folder, of this process alone. A bucket's programs are there when it
compiles, and what it adds is uploaded. A program's name has a digest of all that it was compiled
from, so an object never changes.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from spmd.errors import Problem, StorageError
from spmd.storage.address import BucketPath, is_address, parse_address
from spmd.storage.bucket import Bucket
from spmd.storage.download import download_missing, local_folder
from spmd.storage.periodic import calls_at_intervals
from spmd.storage.temporary import temporary_folder
from spmd.training.compilation_cache import cache_dir, compilation_cache, processor

_INTERVAL = 5.0
"""Seconds between looks for new programs."""
_PATIENCE = 30.0
"""Seconds of repeated requests, after which programs are compiled."""
_XLA_CACHES = "jax_persistent_cache_enable_xla_caches"
_PROGRAM = "-cache"
"""End of the names of JAX's files of programs."""


def cache_problems(configured: str) -> Sequence[Problem]:
    """Return why programs cannot be kept where a config says; nothing is written.

    A store that does not answer is no problem: programs are compiled then.
    """
    try:
        path = _bucket_path(configured)
        if path is not None:
            Bucket(path, patience=_PATIENCE).check()
    except StorageError as error:
        if not error.is_transient:
            return error.problems
    return ()


@contextlib.contextmanager
def program_cache(configured: str, say: Callable[[str], object]) -> Iterator[None]:
    """Cache programs in a block where a config says.

    If a store does not answer, programs are compiled again, and a line says so.

    Args:
        configured: As for `cache_dir`, or a path in a bucket.
        say: Shows a line.
    """
    path = _bucket_path(configured)
    if path is None:
        with compilation_cache(cache_dir(configured)):
            yield
        return
    programs = BucketPrograms(path / _kind(), say)
    programs.download()
    with programs.uploads(), _names_without_folder(), compilation_cache(programs.folder):
        yield


@contextlib.contextmanager
def _names_without_folder() -> Iterator[None]:
    """Keep the folder of this process out of the names of programs.

    JAX puts XLA's own caches into it, and hashes their paths into a program's name, on every
    platform. So no other process would find the program.
    """
    before = jax.config.values[_XLA_CACHES]
    jax.config.update(_XLA_CACHES, "none")
    try:
        yield
    finally:
        jax.config.update(_XLA_CACHES, before)


def _bucket_path(configured: str) -> BucketPath | None:
    """Return the path in a bucket, by the config or JAX's own setting; None for a folder."""
    named = configured or jax.config.values["jax_compilation_cache_dir"] or ""
    if not is_address(named):
        return None
    return parse_address(named)


class BucketPrograms:
    """Programs of one kind of device and set of versions, in a bucket and in a local folder.

    Args:
        say: Shows a line.

    Attributes:
        folder: The local folder, which no other process writes to; removed with this object.
    """

    def __init__(self, path: BucketPath, say: Callable[[str], object]) -> None:
        self.folder = temporary_folder("spmd-programs", self)
        self._path = path
        self._bucket = Bucket(path, say, _PATIENCE)
        self._say = say
        self._shared = set[str]()
        self._sizes: dict[str, int] = {}

    def download(self) -> None:
        """Copy the bucket's programs into the folder; each is downloaded to this host once."""
        copies = local_folder(self._path)
        try:
            names = [name for name in self._bucket.list() if name.endswith(_PROGRAM)]
            self._shared.update(names)
            download_missing(self._bucket, copies, names)
            for name in names:
                _link(copies / name, self.folder / name)
        except (StorageError, OSError) as error:
            self._say(f"programs are compiled, not read from {self._path}: {_reason(error)}")

    @contextlib.contextmanager
    def uploads(self) -> Iterator[None]:
        """Upload new programs at intervals, from a thread, and at the end of a block.

        JAX writes them on process 0.
        """
        if jax.process_index() != 0:
            yield
            return
        try:
            with calls_at_intervals(self.upload, _INTERVAL, _PATIENCE, "spmd-programs"):
                yield
        finally:
            self.upload(are_complete=True)

    def upload(self, *, are_complete: bool = False) -> None:
        """Upload new programs.

        Args:
            are_complete: Nothing is being written; otherwise a file is uploaded that has the size
                of the call before.
        """
        for file in sorted(self.folder.glob(f"*{_PROGRAM}")):
            if file.name in self._shared:
                continue
            try:
                size = file.stat().st_size
                if are_complete or size == self._sizes.get(file.name):
                    self._shared.add(file.name)  # a failed upload has taken its time already
                    self._bucket.create(file.name, file.read_bytes())
                self._sizes[file.name] = size
            except (StorageError, OSError) as error:
                self._say(f"a compiled program is not shared: {_reason(error)}")
                break


def _reason(error: StorageError | OSError) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError):
        return str(error)
    problem = error.problems[0]
    return f"{problem.where} {problem.what}"


def _link(file: Path, name: Path) -> None:
    """Give a file another name; copy it to another file system."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


def _kind() -> str:
    """Return a name for devices, compiler and, of simulated devices, the processor."""
    device = jax.local_devices()[0]
    words = [jax.__version__, device.client.platform_version, device.device_kind]
    if device.platform == "cpu":
        words.append(processor())
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return f"jax-{jax.__version__}-{device.platform}-{digest[:12]}"
