"""Lease of a run folder: one run writes to it at a time, also on a shared file system.

A claim is the exclusive creation of the next number, so of several runs that find an expired lease
one gets it. The highest number counts; its holder removes the others, and renews the lease with
heartbeats in its file (`lease_files`). If the file is gone, the lease is lost. The file server or
the object store sets all times that are compared: clocks of hosts may differ.
"""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from spmd.checkpoint.arrays import disk_errors
from spmd.distributed.hosts import broadcast_from_first, plain_problems, read_problems
from spmd.errors import CheckpointError, Problem, StorageError
from spmd.resilience.lease_files import (
    FOLDER,
    BucketLeaseFiles,
    Holder,
    LeaseFiles,
    LeaseName,
    LocalLeaseFiles,
    foreign_entries,
    parse_names,
)
from spmd.storage.address import BucketPath, Location
from spmd.storage.bucket import Bucket

HEARTBEAT = 10.0
"""Seconds between heartbeats."""
EXPIRY = 60.0
"""Seconds after the last heartbeat at which a lease expires."""
EXIT_LOST = 2
"""Exit code of a run that has lost its lease: it must not be restarted."""


class _LostError(CheckpointError):
    """Another run has taken the lease, or the folder was removed."""


@dataclasses.dataclass(frozen=True)
class LeaseState:
    """Who writes to a run folder, as seen from outside.

    Attributes:
        holder: The process that holds the lease, or has lost it without a word; None if it is free.
        beat_age: Seconds since its last heartbeat.
    """

    holder: Holder | None = None
    beat_age: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether the process writes to the folder, as far as can be seen."""
        if self.holder is None:
            return False
        has_ended = self.holder.has_ended()
        if has_ended is None:
            return self.beat_age <= EXPIRY
        return not has_ended


def read_lease(folder: Location) -> LeaseState:
    """Read the lease of a run folder, and write nothing there.

    Ages are by the clock of this machine, since that of a file server is only seen by writing.
    """
    files = _lease_files(folder, lambda line: None)
    newest = max(parse_names(files.entries()), default=None)
    if newest is None or newest.is_released:
        return LeaseState()
    with contextlib.suppress(FileNotFoundError):  # it was released just now
        age = max(0.0, time.time() - files.last_beat(newest))
        return LeaseState(files.holder(newest), age)
    return LeaseState()


def request_save(folder: Location) -> None:
    """Ask the process that holds the lease of a run folder to save a checkpoint.

    It finds the request with one of its next heartbeats.

    Raises:
        CheckpointError: No process holds the lease.
    """
    state = read_lease(folder)
    files = _lease_files(folder, lambda line: None)
    if not state.is_alive:
        what = "is trained by no process, so none can save a checkpoint"
        raise CheckpointError("Nothing was saved:", [Problem(files.where, what)])
    files.request_save()


class Lease:
    """Lease of a run folder in a `with` block. All processes of a run enter it; process 0 holds it.

    If a process of another host holds it, entering waits for a heartbeat, which is an error, or
    until it expires.

    Args:
        folder: The run folder, local or in a bucket.
        take_over: Take the lease from whoever holds it.
        check: Returns problems of the folder, once the lease is held.
        say: Shows a line, before waiting.
        exit_process: Called with `EXIT_LOST` if the lease is lost, by the thread that renews it.

    Attributes:
        number: The number of this lease, from 1; 0 before it is held.
        save_requests: How often `request_save` has asked the holder to save, counted with the
            heartbeats; 0 on other processes.

    Raises:
        CheckpointError: Another run holds the lease, or the folder has problems; the same on every
            process.
    """

    def __init__(
        self,
        folder: Location,
        take_over: bool = False,
        check: Callable[[], Sequence[Problem]] = tuple,
        say: Callable[[str], object] = print,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._files = _lease_files(folder, self.show)
        self._take_over = take_over
        self._check = check
        self._say = say
        self._exit = exit_process
        self._held: LeaseName | None = None
        self.number = 0
        self.save_requests = 0
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

    def report_to(self, say: Callable[[str], object]) -> None:
        """Show lines elsewhere from now on, such as about an outage."""
        self._say = say

    def show(self, line: str) -> None:
        """Show a line where this lease shows its own."""
        self._say(line)

    def renew(self) -> None:
        """Renew the lease: call it before every write. Raise `CheckpointError` if it is lost."""
        if self._held is None:
            self._check_number()
            return
        with disk_errors(
            self._files.where, "renewing the lease", 'resume="auto", once the folder can be written'
        ):
            if not self._files.beat(self._held):
                raise self._lost_error()

    def renew_at_once(self) -> None:
        """Renew the lease, unless training would wait for it.

        In a bucket, the thread that renews the lease ends the process if it is lost.
        """
        if self._files.is_local:
            self.renew()

    def _check_number(self) -> None:
        """Raise on another process than the holder's if a later lease is in a bucket.

        On a disk, the holder's own process ends the others.
        """
        if self._files.is_local or not self.number:
            return
        with disk_errors(self._files.where, "reading the lease", "the bucket must be readable"):
            if self._newest().number > self.number:
                raise self._lost_error()

    def _lost_error(self) -> "_LostError":
        newest = self._newest()
        what = "its lease was removed"
        if not newest.is_released:
            what = f"its lease was taken over by {self._files.holder(newest)}"
        problem = Problem(self._files.where, what, fix="let one run write to a folder")
        return _LostError("Run folder lost to another process:", [problem])

    def _keep(self) -> None:
        """Renew the lease at intervals, also while a program compiles.

        End the process if it is lost.
        """
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.renew()
                self._count_request()
            except _LostError as error:
                print(f"spmd: {error}", file=sys.stderr, flush=True)
                self._exit(EXIT_LOST)
                break
            except CheckpointError:
                continue  # the file server may answer again

    def _count_request(self) -> None:
        where = self._files.where
        with disk_errors(where, "reading requests", "the folder must be readable"):
            self.save_requests += self._files.take_request()

    def _problems(self) -> Sequence[Problem]:
        """Claim the lease; return the problems of the claim, or of the folder."""
        try:
            with disk_errors(
                self._files.where, "claiming the folder", "choose a folder that can be written"
            ):
                self._files.prepare()
                foreign = self._foreign_problems()
                if foreign:
                    return foreign
                taken = None
                if self._take_over:
                    taken = self._newest()
                while not self._claim(taken):
                    pass
            return self._check()
        except (CheckpointError, StorageError) as error:
            return error.problems

    def _foreign_problems(self) -> list[Problem]:
        """Return a problem for each file with an invalid number.

        The highest number counts, so such a file is neither ignored nor overwritten.
        """
        problems = []
        for entry in foreign_entries(self._files.entries()):
            what = "is not a lease of this version: its number is not from 1 to 10¹⁸ − 2"
            fix = "make sure that no run writes to the folder, and remove the file"
            problems.append(Problem(f"{self._files.where}/{FOLDER}/{entry}", what, fix=fix))
        return problems

    def _claim(self, taken: LeaseName | None) -> bool:
        """Claim the next number once the newest lease is free, or is `taken`.

        Return false if another run was faster.
        """
        newest = self._newest()
        if not newest.is_released and newest != taken:
            self._await(newest)
        return self._create(LeaseName(newest.number + 1))

    def _await(self, name: LeaseName) -> None:
        """Return once a lease is free; raise `CheckpointError` if its holder lives."""
        files = self._files
        began = time.monotonic()
        first = None
        with contextlib.suppress(FileNotFoundError):  # it was released, or another run was faster
            while True:
                holder = files.holder(name)
                beat = files.last_beat(name)
                age = max(files.now() - beat, time.monotonic() - began)
                remaining = EXPIRY - age
                has_ended = holder.has_ended()
                if has_ended or age > EXPIRY:
                    return
                has_beaten = first not in (None, beat)
                if has_ended is False or has_beaten:
                    problem = Problem(
                        files.where,
                        f"{holder} writes to it",
                        f"last heartbeat {age:.0f} s ago; without another its lease expires in "
                        f"{remaining:.0f} s",
                        "stop that run, or another folder; take_over=True takes the folder from it",
                    )
                    raise CheckpointError("", [problem])
                if first is None:
                    waiting = f"waiting up to {remaining:.0f} s for a heartbeat"
                    self._say(f"{files.where} is held by {holder}: {waiting}")
                first = beat
                time.sleep(0.5)

    def _create(self, name: LeaseName) -> bool:
        """Create the file of a number; return whether it is this run's, and the newest."""
        if not self._files.create(name):
            return False
        others = parse_names(self._files.entries()) - {name}
        is_late = any(other.number >= name.number for other in others)
        if is_late:  # others have come, and perhaps gone
            self._files.remove(name)
            return False
        for lost in others:
            self._files.remove(lost)  # its holder has lost it
        self._held = name
        self.number = name.number
        return True

    def _release(self) -> None:
        if self._held:
            self._files.release(self._held)
        self._held = None

    def _newest(self) -> LeaseName:
        """Return the highest number; a released 0 if there is none."""
        return max(parse_names(self._files.entries()), default=LeaseName(0, is_released=True))


def _lease_files(folder: Location, say: Callable[[str], object]) -> LeaseFiles:
    """Return the files of the lease of a run folder."""
    if isinstance(folder, BucketPath):
        return BucketLeaseFiles(Bucket(folder, say))
    return LocalLeaseFiles(folder)
