"""A TPU that another process holds is one sentence with its number, and an exit code after which jobs start again.

There is no TPU here: the exceptions are those that JAX and libtpu raise, as published in issues (sglang-jax#857,
marin#4783, jax#10192).
"""

import os

import jax
import pytest

from spmd import cli
from spmd.distributed.busy_tpu import busy_tpu_error
from spmd.errors import BusyDeviceError
from spmd.job_files.job import RESTARTED

LOCKED = (
    "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 2718466. "
    "Not attempting to load libtpu.so in this process. (set JAX_PLATFORMS='' to automatically choose an "
    "available backend)"
)
OF_OTHERS = (
    "ABORTED: The TPU is already in use by another process probably owned by another user. "
    'Run "$ sudo lsof -w /dev/accel0" to figure out which process is using the TPU.'
)
VFIO = (
    "Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device or "
    "resource busy: Device or resource busy; Couldn't open iommu group /dev/vfio/0"
)


def test_the_holder_is_named(tmp_path):
    """By libtpu, or by the device file that a process has open; if neither tells, how to find it."""
    assert "process 2718466" in str(busy_tpu_error(LOCKED, tmp_path))
    assert "lsof" in str(busy_tpu_error(OF_OTHERS, tmp_path))
    files = tmp_path / "4711" / "fd"
    files.mkdir(parents=True)
    (files / "3").symlink_to("/dev/null")
    assert "lsof" in str(busy_tpu_error(VFIO, tmp_path))
    (files / "4").symlink_to("/dev/vfio/0")
    assert "kill 4711" in str(busy_tpu_error(VFIO, tmp_path))
    own = tmp_path / "own" / str(os.getpid()) / "fd"
    own.mkdir(parents=True)
    (own / "4").symlink_to("/dev/vfio/0")
    assert "lsof" in str(busy_tpu_error(VFIO, tmp_path / "own"))


def test_other_failures_keep_their_traceback():
    """The control."""
    assert busy_tpu_error("Unable to initialize backend 'tpu': INTERNAL: no topology") is None


def train(reason, monkeypatch, tmp_path):
    """`spmd train` where JAX fails to start for a reason."""

    def devices():
        raise RuntimeError(reason)

    monkeypatch.setattr(jax, "devices", devices)
    cli.main(["train", "demo", "--devices", "0", "--out", str(tmp_path / "run")])


def test_a_command_that_fails_otherwise_does_not_start_again(monkeypatch, tmp_path):
    """The control: the exit code of another failure is final."""
    with pytest.raises(SystemExit) as caught:
        train("Unable to initialize backend 'tpu': INTERNAL: no topology", monkeypatch, tmp_path)
    assert caught.value.code == 2
    assert caught.value.code not in RESTARTED


@pytest.mark.parametrize("reason", [LOCKED, VFIO])
def test_a_command_ends_with_one_sentence_and_starts_again(reason, monkeypatch, capsys, tmp_path):
    """`spmd train`: no traceback, and an exit code of `RESTARTED`; before, JAX's traceback and 1."""
    with pytest.raises(SystemExit) as caught:
        train(reason, monkeypatch, tmp_path)
    assert caught.value.code == BusyDeviceError.exit_code
    assert caught.value.code in RESTARTED
    error = capsys.readouterr().err
    assert error.startswith("spmd: The TPU of this machine cannot be used:")
    assert "Traceback" not in error
