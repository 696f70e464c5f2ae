"""Lease of a run folder: one run writes to it at a time, also on a shared file system.

```
lease/3.json        held: host, process, since when; its modification time is the last heartbeat
lease/3.released    free
```

A claim is the exclusive creation of the next number, so of several runs that find an expired lease one gets it. The
highest number counts; its holder removes the others, and renews the lease by touching its file. If the file is gone,
the lease is lost. The file server sets all times that are compared: clocks of hosts may differ.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from spmd.checkpoint.arrays import disk_errors
from spmd.checkpoint.manifest import read_object
from spmd.distributed.hosts import broadcast_from_first, plain_problems, read_problems
from spmd.errors import CheckpointError, Problem

HEARTBEAT = 10.0
"""Seconds between heartbeats."""
EXPIRY = 60.0
"""Seconds after the last heartbeat at which a lease expires."""
EXIT_LOST = 2
"""Exit code of a run that has lost its lease: it must not be restarted."""

_NAME = re.compile(r"([1-9][0-9]{0,17})\.(json|released)")
_MAX_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Holder:
    """Process that holds a lease.

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

    @property
    def is_visible(self) -> bool:
        """Whether this process can see the holder's."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        if not self.is_visible:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's, and /proc may hide it
            return False
        return _start_ticks(self.pid) != self.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """Return the start of a process in ticks since the boot; empty if it has ended, also if nobody waited for it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


def _this_process() -> Holder:
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Holder(socket.gethostname(), pid, since, _machine(), _start_ticks(pid))


def _read(path: Path) -> Holder:
    """Return the holder that a file names; an unknown one if it is still being written."""
    try:
        values = read_object(path, _MAX_BYTES)
        fields = {name: type(default)(values[name]) for name, default in vars(Holder()).items()}
        return Holder(**fields)
    except (ValueError, KeyError, TypeError, OverflowError):
        return Holder()


class _LostError(CheckpointError):
    """Another run has taken the lease, or the folder was removed."""


class Lease:
    """Lease of a run folder in a `with` block. All processes of a run enter it; process 0 holds it.

    If another host's process holds it, entering waits for its next heartbeat, which is an error, or until it expires.

    Args:
        folder: The run folder.
        take_over: Take the lease from whoever holds it.
        check: Returns problems of the folder, once the lease is held.
        say: Shows a line, before waiting.
        exit_process: Called with `EXIT_LOST` where the lease is lost, by the thread that renews it.

    Attributes:
        number: That of this lease, from 1; 0 before it is held.

    Raises:
        CheckpointError: Another run holds the lease, or the folder has problems; the same on every process.
    """

    def __init__(
        self,
        folder: Path,
        take_over: bool = False,
        check: Callable[[], Sequence[Problem]] = tuple,
        say: Callable[[str], object] = print,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._run, self._folder, self._take_over = folder, folder / "lease", take_over
        self._check, self._say, self._exit = check, say, exit_process
        self._held: Path | None = None
        self.number = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="spmd-lease", daemon=True)

    def __enter__(self) -> Self:
        found = broadcast_from_first(lambda: {"problems": plain_problems(self._problems()), "number": self.number})
        if problems := read_problems(found["problems"]):
            self._release()
            raise CheckpointError("Nothing was started:", problems)
        self.number = found["number"]
        if self._held:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._held:
            self._thread.join(HEARTBEAT)
        self._release()

    def renew(self) -> None:
        """Renew the lease: call it before every write. Raise `CheckpointError` if it is lost."""
        if self._held is None:
            return
        with disk_errors(self._held, "renewing the lease", "--resume auto, once the folder can be written"):
            try:
                os.utime(self._held)  # to the file server's time
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                number, is_held = self._newest()
                by = f"taken over by {_read(self._file(number))}" if is_held else "removed"
                problem = Problem(str(self._run), f"its lease was {by}", fix="let one run write to a folder")
                raise _LostError("This run writes nothing more:", [problem]) from error

    def _keep(self) -> None:
        """Renew the lease at intervals, also while a program compiles; end the process where it is lost."""
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.renew()
            except _LostError as error:
                print(f"spmd: {error}", file=sys.stderr, flush=True)
                self._exit(EXIT_LOST)
                return
            except CheckpointError:
                continue  # the file server may answer again

    def _problems(self) -> Sequence[Problem]:
        try:
            with disk_errors(self._folder, "claiming the folder", "choose an --out that can be written"):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._claim()
        except CheckpointError as error:
            return error.problems
        return self._check()

    def _claim(self) -> None:
        taken = self._newest() if self._take_over else None
        while True:
            number, is_held = newest = self._newest()
            if is_held and newest != taken:
                self._await(self._file(number))
            if self._create(number + 1):
                return

    def _await(self, path: Path) -> None:
        """Return once a lease is free; raise `CheckpointError` if its holder lives."""
        began, first = time.monotonic(), None
        with contextlib.suppress(FileNotFoundError):  # it was released, or another run was faster
            while True:
                holder, beat = _read(path), path.stat().st_mtime
                age = max(self._server_time() - beat, time.monotonic() - began)
                if holder.has_ended or age > EXPIRY:
                    return
                if holder.is_visible or first not in (None, beat):
                    detail = (
                        f"last heartbeat {age:.0f} s ago; without another its lease expires in {EXPIRY - age:.0f} s"
                    )
                    fix = "stop that run, or another --out; --take-over takes the folder from it"
                    raise CheckpointError("", [Problem(str(self._run), f"{holder} writes to it", detail, fix)])
                if first is None:
                    self._say(f"{self._run} is held by {holder}: waiting up to {EXPIRY - age:.0f} s for a heartbeat")
                first = beat
                time.sleep(0.5)

    def _create(self, number: int) -> bool:
        """Claim a number; return whether it is this run's, and the newest."""
        path = self._file(number)
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(_this_process()), file)
        except FileExistsError:
            return False
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            raise
        others = {other: n for other, n in self._entries().items() if other != path}
        if any(n >= number for n in others.values()):  # a claim of the same lease had come and gone
            path.unlink(missing_ok=True)
            return False
        for other in others:
            other.unlink(missing_ok=True)  # from here on its holder has lost it
        self._held, self.number = path, number
        return True

    def _release(self) -> None:
        if self._held:
            with contextlib.suppress(OSError):  # it was lost, or will expire
                self._held.rename(self._held.with_suffix(".released"))
        self._held = None

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def _entries(self) -> dict[Path, int]:
        found = ((path, _NAME.fullmatch(path.name)) for path in self._folder.iterdir())
        return {path: int(match[1]) for path, match in found if match}

    def _newest(self) -> tuple[int, bool]:
        """Return the highest number, 0 for none, and whether it is held."""
        entries = self._entries() if self._folder.exists() else {}
        number = max(entries.values(), default=0)
        return number, self._file(number) in entries

    def _server_time(self) -> float:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            return os.fstat(file.fileno()).st_mtime
