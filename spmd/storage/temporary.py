"""Temporary folders, removed also after a process was killed.

A process holds the lock of a file beside its folder as long as it lives. Names have the host and
the user, since hosts may share the place.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

_LOCK = ".lock"
"""End of the name of the file beside a folder."""


def temporary_folder(name: str, owner: object) -> Path:
    """Make a temporary folder, removed with `owner`.

    The next process that makes one with the name removes those of killed processes.
    """
    prefix = f"{name}-{socket.gethostname()}-{os.getuid()}-"
    for abandoned in Path(tempfile.gettempdir()).glob(f"{prefix}*{_LOCK}"):
        _remove_if_abandoned(abandoned)
    number, lock = _locked_file(prefix)
    folder = Path(str(lock).removesuffix(_LOCK))
    folder.mkdir(mode=0o700)
    weakref.finalize(owner, _remove, lock, number)
    return folder


def _locked_file(prefix: str) -> tuple[int, Path]:
    """Make a file with a lock; return its descriptor and its path."""
    while True:
        number, name = tempfile.mkstemp(prefix=prefix, suffix=_LOCK)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number, Path(name)
        os.close(number)  # another process took it for an abandoned one


def _remove_if_abandoned(lock: Path) -> None:
    """Remove a temporary folder of this user, unless a process holds its lock."""
    with contextlib.suppress(OSError):
        number = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if os.fstat(number).st_uid == os.getuid():
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock)
        finally:
            os.close(number)


def _remove(lock: Path, number: int | None = None) -> None:
    """Remove a temporary folder and its lock, and close the lock's descriptor."""
    shutil.rmtree(str(lock).removesuffix(_LOCK), ignore_errors=True)
    lock.unlink(missing_ok=True)
    if number is not None:
        os.close(number)
