"""Lease of a run folder: one run writes to it at a time, also on a shared file system.

```
lease/3.json        held: host, process, since when; its modification time is the last heartbeat
lease/3.released    free
```

A claim is the exclusive creation of the next number, so of several runs that find an expired lease
one gets it. The highest number counts; its holder removes the others, and renews the lease by
touching its file. If the file is gone, the lease is lost. The file server sets all times that are
compared: clocks of hosts may differ.
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
from spmd.observe.goodput import start_ticks

HEARTBEAT = 10.0
"""Seconds between heartbeats."""
EXPIRY = 60.0
"""Seconds after the last heartbeat at which a lease expires."""
EXIT_LOST = 2
"""Exit code of a run that has lost its lease: it must not be restarted."""

_NAME = re.compile(r"([1-9][0-9]{0,17})\.(json|released)")
_NUMBERED = re.compile(r"[0-9]+\.(json|released)")
_MAX_NUMBER = 10**18 - 2
"""Largest number that another one of `_NAME` can follow."""
_MAX_BYTES = 1 << 16


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


def _read(path: Path) -> Holder:
    """Return the holder in a file; an unknown one if it is still being written."""
    try:
        values = read_object(path, _MAX_BYTES)
        fields = {}
        for name, default in vars(Holder()).items():
            kind = type(default)
            fields[name] = kind(values[name])
        return Holder(**fields)
    except (ValueError, KeyError, TypeError, OverflowError):
        return Holder()


class _LostError(CheckpointError):
    """Another run has taken the lease, or the folder was removed."""


class Lease:
    """Lease of a run folder in a `with` block. All processes of a run enter it; process 0 holds it.

    If a process of another host holds it, entering waits for a heartbeat, which is an error, or
    until it expires.

    Args:
        folder: The run folder.
        take_over: Take the lease from whoever holds it.
        check: Returns problems of the folder, once the lease is held.
        say: Shows a line, before waiting.
        exit_process: Called with `EXIT_LOST` if the lease is lost, by the thread that renews it.

    Attributes:
        number: The number of this lease, from 1; 0 before it is held.

    Raises:
        CheckpointError: Another run holds the lease, or the folder has problems; the same on every
            process.
    """

    def __init__(
        self,
        folder: Path,
        take_over: bool = False,
        check: Callable[[], Sequence[Problem]] = tuple,
        say: Callable[[str], object] = print,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._run = str(folder)
        self._folder = folder / "lease"
        self._take_over = take_over
        self._check = check
        self._say = say
        self._exit = exit_process
        self._held: Path | None = None
        self.number = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="spmd-lease", daemon=True)

    def __enter__(self) -> Self:
        plain, number = broadcast_from_first(
            lambda: [plain_problems(self._problems()), self.number]
        )
        problems = read_problems(plain)
        if problems:
            self._release()
            raise CheckpointError("Nothing was started:", problems)
        self.number = number
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
        with disk_errors(
            self._held, "renewing the lease", 'resume="auto", once the folder can be written'
        ):
            try:
                os.utime(self._held)  # to the file server's time
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                newest, is_held = self._newest()
                what = "its lease was removed"
                if is_held:
                    what = f"its lease was taken over by {_read(newest)}"
                problem = Problem(self._run, what, fix="let one run write to a folder")
                raise _LostError("Run folder lost to another process:", [problem]) from error

    def _keep(self) -> None:
        """Renew the lease at intervals, also while a program compiles.

        End the process if it is lost.
        """
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.renew()
            except _LostError as error:
                print(f"spmd: {error}", file=sys.stderr, flush=True)
                self._exit(EXIT_LOST)
                break
            except CheckpointError:
                continue  # the file server may answer again

    def _problems(self) -> Sequence[Problem]:
        """Claim the lease; return the problems of the claim, or of the folder."""
        try:
            with disk_errors(
                self._folder, "claiming the folder", "choose a folder that can be written"
            ):
                self._folder.mkdir(parents=True, exist_ok=True)
                foreign = self._foreign_problems()
                if foreign:
                    return foreign
                taken = None
                if self._take_over:
                    taken, _ = self._newest()
                while not self._claim(taken):
                    pass
        except CheckpointError as error:
            return error.problems
        return self._check()

    def _foreign_problems(self) -> list[Problem]:
        """Return a problem for each file of a number that no lease has.

        The highest number counts, so such a file is neither ignored nor overwritten.
        """
        problems = []
        for path in sorted(self._folder.glob("*")):
            if not _NUMBERED.fullmatch(path.name):
                continue
            if not _NAME.fullmatch(path.name) or int(path.stem) > _MAX_NUMBER:
                what = "is not a lease of this version: its number is not from 1 to 10¹⁸ − 2"
                fix = "make sure that no run writes to the folder, and remove the file"
                problems.append(Problem(str(path), what, fix=fix))
        return problems

    def _claim(self, taken: Path | None) -> bool:
        """Claim the next number once the newest lease is free, or is `taken`.

        Return false if another run was faster.
        """
        newest, is_held = self._newest()
        if is_held and newest != taken:
            self._await(newest)
        return self._create(int(newest.stem) + 1)

    def _await(self, path: Path) -> None:
        """Return once a lease is free; raise `CheckpointError` if its holder lives."""
        began = time.monotonic()
        first = None
        with contextlib.suppress(FileNotFoundError):  # it was released, or another run was faster
            while True:
                holder = _read(path)
                beat = path.stat().st_mtime
                age = max(self._server_time() - beat, time.monotonic() - began)
                remaining = EXPIRY - age
                has_ended = holder.has_ended()
                if has_ended or age > EXPIRY:
                    return
                has_beaten = first not in (None, beat)
                if has_ended is False or has_beaten:
                    problem = Problem(
                        self._run,
                        f"{holder} writes to it",
                        f"last heartbeat {age:.0f} s ago; without another its lease expires in "
                        f"{remaining:.0f} s",
                        "stop that run, or another folder; take_over=True takes the folder from it",
                    )
                    raise CheckpointError("", [problem])
                if first is None:
                    waiting = f"waiting up to {remaining:.0f} s for a heartbeat"
                    self._say(f"{self._run} is held by {holder}: {waiting}")
                first = beat
                time.sleep(0.5)

    def _create(self, number: int) -> bool:
        """Create the file of a number; return whether it is this run's, and the newest."""
        path = self._folder / f"{number}.json"
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(this_process()), file)
        except FileExistsError:
            return False
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            raise
        others = self._files() - {path}
        is_late = any(int(other.stem) >= number for other in others)
        if is_late:  # others have come, and perhaps gone
            path.unlink(missing_ok=True)
            return False
        for lost in others:
            lost.unlink(missing_ok=True)  # its holder has lost it
        self._held = path
        self.number = number
        return True

    def _release(self) -> None:
        if self._held:
            with contextlib.suppress(OSError):  # it was lost, or will expire
                self._held.rename(self._held.with_suffix(".released"))
        self._held = None

    def _files(self) -> set[Path]:
        return {path for path in self._folder.glob("*") if _NAME.fullmatch(path.name)}

    def _newest(self) -> tuple[Path, bool]:
        """Return the file with the highest number, 0 if there is none, and whether it is held."""
        none = self._folder / "0.released"
        newest = max(self._files(), key=lambda path: (int(path.stem), path.suffix), default=none)
        return newest, newest.suffix == ".json"

    def _server_time(self) -> float:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            return os.fstat(file.fileno()).st_mtime
