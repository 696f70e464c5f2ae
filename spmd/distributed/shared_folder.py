"""Check that all processes see the same folder, before anything relies on it.

A folder on each host's own disk exists everywhere, and only what process 0 writes into its own one
would be found again. So process 0 writes a random text into the folder, every other process reads
it and writes a reply beside it, and process 0 looks for the replies.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.distributed.hosts import (
    broadcast_from_first,
    gather_json,
    plain_problems,
    read_problems,
)
from spmd.errors import Problem

SHOWN = 5
"""Processes that a problem names; the others are counted."""

_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL_KINDS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
"""File systems of one host, which show every change at once."""
_LOCAL_SECONDS = 1.0
_NETWORK_SECONDS = 70.0
"""Linux caches the attributes of an NFS folder for up to 60 s by default (`acdirmax`)."""
_POLL_SECONDS = 0.2

_NONCE = "nonce"
_UNSEEN = "does not see what process 0 writes"
_UNSEEN_REPLY = "writes what process 0 does not see"


@dataclasses.dataclass(frozen=True)
class Mount:
    """Mounted file system; all attributes are empty where the system does not list them.

    Attributes:
        kind: Such as `nfs4` or `ext4`.
        source: Server and path, or device.
        point: Folder at which it is mounted.
    """

    kind: str = ""
    source: str = ""
    point: str = ""

    def __str__(self) -> str:
        if not self.kind:
            return "an unknown file system"
        return f"{self.kind} {self.source} at {self.point}"

    @property
    def patience(self) -> float:
        """Seconds until a change by another host is visible."""
        if self.kind in _LOCAL_KINDS:
            return _LOCAL_SECONDS
        return _NETWORK_SECONDS


def mount_of(folder: Path, table: Path = _MOUNTS) -> Mount:
    """Return the file system of a folder, existing or not."""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
        place = folder.resolve()
    except (OSError, RuntimeError):  # no Linux, or a circular link
        return Mount()
    found = Mount()
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace(r"\040", " ")
        is_inside = place.is_relative_to(point)
        if is_inside and len(point) >= len(found.point):  # of two at one point, the later is on top
            kind, source, *_ = after.split()
            found = Mount(kind, source, point)
    return found


def shared_folder_problems(folder: Path, where: str) -> tuple[Problem, ...]:
    """Return the problems of a folder without access from every process.

    Every process makes this call, and all return the same. The folder is made if it does not exist,
    and removed again if there is a problem. A single process has none.

    Args:
        where: Name of the folder in problems.
    """
    if jax.process_count() == 1:
        return ()
    folder = folder.absolute()
    offer = broadcast_from_first(lambda: _write_nonce(folder, where))
    if "failed" in offer:
        return read_problems(offer["failed"])
    answers = gather_json(_answer(folder, offer))
    plain = broadcast_from_first(lambda: plain_problems(_close(folder, where, offer, answers)))
    return read_problems(plain)


def wait_until_seen(is_seen: Callable[[], bool], folder: Path) -> bool:
    """Wait until a change in a folder is visible; return false if it is not in time."""
    deadline = time.monotonic() + mount_of(folder).patience
    while not is_seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
        _revalidate(folder)
    return True


def process_names(processes: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the first few processes with their hosts, and the count of the others."""
    names = []
    for process in processes[:SHOWN]:
        names.append(f"process {process} ({hosts[process]})")
    if len(processes) > SHOWN:
        names.append(f"and {len(processes) - SHOWN} more")
    return ", ".join(names)


def _revalidate(folder: Path) -> None:
    """Open each folder on the path: an NFS client then asks the server."""
    for parent in (*reversed(folder.parents), folder):
        with contextlib.suppress(OSError):
            os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY))


def _write_nonce(folder: Path, where: str) -> dict[str, Any]:
    """Write the nonce on process 0; return its place and text, or the problem."""
    name = f".shared-{secrets.token_hex(8)}"
    text = secrets.token_hex(16)
    missing = list[str]()
    try:
        for parent in (folder, *folder.parents):
            if not parent.exists():
                missing.append(str(parent))
        (folder / name).mkdir(parents=True)
        (folder / name / _NONCE).write_text(text, encoding="ascii")
    except OSError as error:
        _remove(folder / name, missing)
        what = f"cannot be written by process 0 ({socket.gethostname()}): {error.strerror}"
        problem = Problem(where, what, fix="another folder")
        return {"failed": plain_problems([problem])}
    return {"name": name, "text": text, "made": missing}


def _answer(folder: Path, offer: Mapping[str, Any]) -> dict[str, str]:
    """Read the nonce and reply; return this process's host, file system and fault, if any."""
    fault = ""
    if jax.process_index() != 0:
        fault = _reply(folder, offer)
    return {
        "host": socket.gethostname(),
        "folder": str(folder),
        "mount": str(mount_of(folder)),
        "fault": fault,
    }


def _reply(folder: Path, offer: Mapping[str, Any]) -> str:
    """Write a reply beside the nonce; return the fault of this process, empty if there is none."""
    probe = folder / offer["name"]

    def is_seen() -> bool:
        try:
            return (probe / _NONCE).read_text(encoding="ascii") == offer["text"]
        except (OSError, ValueError):
            return False

    if not wait_until_seen(is_seen, folder):
        return _UNSEEN
    try:
        (probe / str(jax.process_index())).touch()
    except OSError as error:
        return f"cannot write to it: {error.strerror}"
    return ""


def _close(
    folder: Path, where: str, offer: Mapping[str, Any], answers: Sequence[Mapping[str, str]]
) -> list[Problem]:
    """Look for the replies on process 0, remove the nonce, and return the problems."""
    probe = folder / offer["name"]
    faults = [answer["fault"] for answer in answers]
    expected = set()
    for process, fault in enumerate(faults):
        if process > 0 and not fault:
            expected.add(str(process))
    found = set[str]()

    def all_seen() -> bool:
        found.update(os.listdir(probe))
        return expected <= found

    with contextlib.suppress(OSError):
        wait_until_seen(all_seen, folder)
    for name in expected - found:
        faults[int(name)] = _UNSEEN_REPLY
    problems = _problems(where, faults, answers)
    made = list[str]()
    if problems:
        made = offer["made"]
    _remove(probe, made)
    return problems


def _remove(probe: Path, made: Sequence[str]) -> None:
    """Remove the nonce with the replies, and folders made for it unless they are in use.

    Args:
        made: Innermost first.
    """
    shutil.rmtree(probe, ignore_errors=True)
    for folder in made:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _problems(
    where: str, faults: Sequence[str], answers: Sequence[Mapping[str, str]]
) -> list[Problem]:
    """Return a problem for each kind of fault, with its processes."""
    having: dict[str, list[int]] = {}
    for process, fault in enumerate(faults):
        if fault:
            having.setdefault(fault, []).append(process)
    hosts = [answer["host"] for answer in answers]
    problems = []
    for fault, processes in having.items():
        what = f"is not shared: {process_names(processes, hosts)} {fault}"
        detail = _places(answers[0], answers[processes[0]], processes[0])
        fix = "another folder, on storage that all hosts mount"
        problems.append(Problem(where, what, detail, fix))
    return problems


def _places(first: Mapping[str, str], other: Mapping[str, str], process: int) -> str:
    """Return the file systems of process 0 and another one, and the other's folder if it differs."""
    text = f"process 0 has {first['mount']}, process {process} has {other['mount']}"
    if first["folder"] != other["folder"]:
        text += f"; it looks in {other['folder']}, and process 0 in {first['folder']}"
    return text
