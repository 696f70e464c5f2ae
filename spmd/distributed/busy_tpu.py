"""Error of a TPU held by another process: one sentence with the number of that process."""

import contextlib
import os
import re
from pathlib import Path

from spmd.errors import BusyDeviceError, Problem

# Of JAX and libtpu: another process has libtpu's lock, or the device files.
_BUSY_TPU = re.compile(
    r"TPU is already in use by|libtpu\.so already in use|/dev/(vfio/\d+|accel\d+)\W.*busy"
)
_TPU_FILE = re.compile(r"/dev/(vfio/\d+|accel\d+)")


def busy_tpu_error(reason: str, processes: Path = Path("/proc")) -> BusyDeviceError | None:
    """Return the error of a TPU held by another process; None of another reason.

    Args:
        reason: Text of JAX's exception.
    """
    if not _BUSY_TPU.search(reason):
        return None
    pid = _holder_of_tpu(processes)
    named = re.search(r"by process with pid (\d+)", reason)
    if named:
        pid = named[1]
    what = f"is held by process {pid}, probably a leftover of an earlier run"
    fix = f"kill {pid}, and start again"
    if not pid:
        what = "is held by another process, probably of another user"
        fix = "find it by `sudo lsof /dev/accel* /dev/vfio/*`, stop it, and start again; "
        fix += "if there is none, remove /tmp/libtpu_lockfile"
    problem = Problem("TPU", what, reason.splitlines()[0], fix)
    return BusyDeviceError("The TPU of this machine cannot be used:", [problem])


def _holder_of_tpu(processes: Path) -> str:
    """Return the number of another process with an open device file of a TPU, empty if unknown."""
    for link in processes.glob("[0-9]*/fd/*"):
        pid = link.parts[-3]
        with contextlib.suppress(OSError):  # of another user, or gone
            target = os.readlink(link)
            if pid != str(os.getpid()) and _TPU_FILE.fullmatch(target):
                return pid
    return ""
