"""Files of a lease: in a local folder, or in a bucket.

```
lease/3.json        held: host, process, since when
lease/3.released    free
lease/save          a request to save a checkpoint; the holder removes it
```

A local file's modification time is its last heartbeat, by the clock of the file server. An object
in a bucket contains the time of its last heartbeat, by the clock of the store.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from spmd.checkpoint.manifest import read_object
from spmd.errors import StorageError
from spmd.observe.goodput import start_ticks
from spmd.storage.bucket import Bucket, Version

FOLDER = "lease"
_NAME = re.compile(r"([1-9][0-9]{0,17})\.(json|released)")
_NUMBERED = re.compile(r"([0-9]+)\.(json|released)")
_MAX_NUMBER = 10**18 - 2
_MAX_BYTES = 1 << 16
_HELD = ".json"
_RELEASED = ".released"
_BEAT = "beat"
_SAVE = "save"


@dataclasses.dataclass(frozen=True)
class Holder:
    """Holder of a lease: a process.

    Attributes:
        since: When it claimed the lease, by the clock of its host.
        machine: Boot of the machine and namespace of process ids; empty if unknown.
        started: Start of the process in ticks since the boot, because process ids are used again.
    """

    host: str = "an unknown host"
    pid: int = 0
    since: str = "an unknown time"
    machine: str = ""
    started: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def has_ended(self) -> bool | None:
        """Return whether the process has ended; None if it cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's, and /proc may hide it
            return False
        return start_ticks(self.pid) != self.started


def _machine() -> str:
    """Return the boot of this machine and the namespace of process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return f"{boot} {namespace}"
    except OSError:
        return ""


def this_process() -> Holder:
    """Return this process, as a holder from now on."""
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Holder(socket.gethostname(), pid, since, _machine(), start_ticks(pid))


def read_holder(values: Any) -> Holder:
    """Return the holder in a JSON value; an unknown one if it is none."""
    try:
        fields = {}
        for name, default in vars(Holder()).items():
            kind = type(default)
            fields[name] = kind(values[name])
        return Holder(**fields)
    except (ValueError, KeyError, TypeError, OverflowError):
        return Holder()


@dataclasses.dataclass(frozen=True, order=True)
class LeaseName:
    """Name of a lease's file; later ones are greater.

    Example:
        >>> max(LeaseName(3), LeaseName(3, is_released=True)).text
        '3.released'
    """

    number: int
    is_released: bool = False

    @property
    def text(self) -> str:
        """Name of the file."""
        return f"{self.number}{_RELEASED if self.is_released else _HELD}"


def parse_names(entries: Iterable[str]) -> set[LeaseName]:
    """Return the names of leases among others."""
    names = set()
    for text in entries:
        found = _NAME.fullmatch(text)
        if found:
            names.add(LeaseName(int(found[1]), found[2] == "released"))
    return names


def foreign_entries(entries: Iterable[str]) -> list[str]:
    """Return the names with a number out of range."""
    foreign = []
    for text in sorted(entries):
        found = _NUMBERED.fullmatch(text)
        if found and (not _NAME.fullmatch(text) or int(found[1]) > _MAX_NUMBER):
            foreign.append(text)
    return foreign


class LeaseFiles(Protocol):
    """Files of the leases of one run.

    Attributes:
        where: The run, for people.
        is_local: Requests take no time worth mentioning.
    """

    where: str
    is_local: bool

    def prepare(self) -> None:
        """Make the folder."""
        ...

    def entries(self) -> Iterable[str]:
        """Return the names of everything in the folder."""
        ...

    def create(self, name: LeaseName) -> bool:
        """Create a file held by this process; return false if it exists."""
        ...

    def holder(self, name: LeaseName) -> Holder:
        """Return the holder in a file; an unknown one while it is still being written."""
        ...

    def last_beat(self, name: LeaseName) -> float:
        """Return the time of the last heartbeat; a FileNotFoundError if the file is gone."""
        ...

    def now(self) -> float:
        """Return the time by the clock of the heartbeats."""
        ...

    def beat(self, name: LeaseName) -> bool:
        """Record a heartbeat; return false if the file is gone."""
        ...

    def remove(self, name: LeaseName) -> None:
        """Remove a file, if it exists."""
        ...

    def release(self, name: LeaseName) -> None:
        """Mark a held lease as free."""
        ...

    def request_save(self) -> None:
        """Ask the holder to save a checkpoint."""
        ...

    def take_request(self) -> bool:
        """Remove a request to save; return whether there was one."""
        ...


class LocalLeaseFiles(LeaseFiles):
    """Files in a folder of a local or a shared file system."""

    is_local = True

    def __init__(self, run: Path) -> None:
        self.where = str(run)
        self._folder = run / FOLDER

    def prepare(self) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def entries(self) -> Iterable[str]:
        """List the folder."""
        return [path.name for path in self._folder.glob("*")]

    def create(self, name: LeaseName) -> bool:
        """Create a file exclusively."""
        path = self._path(name)
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(this_process()), file)
        except FileExistsError:
            return False
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            raise
        return True

    def holder(self, name: LeaseName) -> Holder:
        """Read a file."""
        with contextlib.suppress(ValueError):
            return read_holder(read_object(self._path(name), _MAX_BYTES))
        return Holder()

    def last_beat(self, name: LeaseName) -> float:
        """Return the modification time."""
        return self._path(name).stat().st_mtime

    def now(self) -> float:
        """Return the modification time of a new file."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            return os.fstat(file.fileno()).st_mtime

    def beat(self, name: LeaseName) -> bool:
        """Set the modification time to the file server's time."""
        try:
            os.utime(self._path(name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return False
        return True

    def remove(self, name: LeaseName) -> None:
        """Remove a file."""
        self._path(name).unlink(missing_ok=True)

    def release(self, name: LeaseName) -> None:
        """Rename the file."""
        with contextlib.suppress(OSError):  # it was lost, or will expire
            self._path(name).rename(self._path(LeaseName(name.number, is_released=True)))

    def request_save(self) -> None:
        """Create an empty file."""
        (self._folder / _SAVE).touch()

    def take_request(self) -> bool:
        """Remove the file, if there is one."""
        try:
            (self._folder / _SAVE).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: LeaseName) -> Path:
        return self._folder / name.text


class BucketLeaseFiles(LeaseFiles):
    """Objects in a bucket; each heartbeat replaces the version of the last one."""

    is_local = False

    def __init__(self, run: Bucket) -> None:
        self.where = str(run.path)
        self._bucket = run.below(FOLDER)
        self._version: Version | None = None
        self._nonce = secrets.token_hex(8)
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Raise a `StorageError` if the bucket cannot be used."""
        self._bucket.check()

    def entries(self) -> Iterable[str]:
        """List the objects."""
        return self._bucket.list()

    def create(self, name: LeaseName) -> bool:
        """Create an object if there is none."""
        self._version = self._bucket.create(name.text, self._text())
        return self._version is not None

    def holder(self, name: LeaseName) -> Holder:
        """Read an object."""
        return read_holder(self._values(name))

    def last_beat(self, name: LeaseName) -> float:
        """Return the time in an object; 0 if it has none."""
        values = self._values(name)
        try:
            beat = float(values[_BEAT])
        except (ValueError, KeyError, TypeError, OverflowError):
            return 0.0
        if not math.isfinite(beat):
            return 0.0
        return beat

    def now(self) -> float:
        """Return the store's time."""
        return self._bucket.now()

    def beat(self, name: LeaseName) -> bool:
        """Replace the object's version by one with the present time."""
        with self._lock:  # two threads would replace the same version, and one of them fail
            if self._version is None:
                return False
            self._version = self._bucket.replace(name.text, self._text(), self._version)
            return self._version is not None

    def remove(self, name: LeaseName) -> None:
        """Delete an object."""
        self._bucket.delete(name.text)

    def release(self, name: LeaseName) -> None:
        """Write the name of a free lease, and delete that of the held one."""
        with contextlib.suppress(StorageError):  # it will expire
            if self.beat(name):
                self._bucket.write(LeaseName(name.number, is_released=True).text, b"{}")
                self._bucket.delete(name.text)

    def request_save(self) -> None:
        """Write an object."""
        self._bucket.write(_SAVE, b"{}")

    def take_request(self) -> bool:
        """Delete the object, if there is one."""
        if not self._bucket.exists(_SAVE):
            return False
        self._bucket.delete(_SAVE)
        return True

    def _values(self, name: LeaseName) -> Any:
        """Return the JSON value of an object; a FileNotFoundError if there is none."""
        text = self._bucket.read(name.text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return {}

    def _text(self) -> bytes:
        values = {
            **dataclasses.asdict(this_process()),
            _BEAT: self._bucket.now(),
            "nonce": self._nonce,  # two claims of one process in one second differ, too
        }
        return json.dumps(values).encode()
