"""Commands refuse CPUs beside an accelerator, in processes of their own.

The machine's device files are stubs in a folder: no accelerator, driver or container is needed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import write_config

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
import sys
from pathlib import Path
from spmd.cli import main
from spmd.distributed import initialize

initialize.MACHINE_ROOT = Path(sys.argv[1])
main(sys.argv[2:])
"""


def run_on(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `spmd` in a process whose device files are below a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, str(root), *arguments],
        cwd=root,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def nvidia(tmp_path):
    """A machine with an NVIDIA GPU, in which JAX has no plugin for it."""
    for name in ("dev/nvidia0", "proc/driver/nvidia/version"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.touch()
    write_config(tmp_path)
    return tmp_path


def test_cpus_beside_a_gpu_are_refused(nvidia):
    """One sentence with the missing package, exit code 2 and no run folder."""
    done = run_on(nvidia, "train", "tiny.py", "--mesh.data", "1", "--mesh.fsdp", "1")
    assert done.returncode == 2, done.stderr
    assert "JAX found CPUs only, and the machine has an NVIDIA GPU (/dev/nvidia0)" in done.stderr
    assert "JAX's plugin for CUDA is not installed" in done.stderr
    assert "pip install 'spmd[cuda13]', or --platform cpu" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (nvidia / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (("--platform", "cpu"), {}),
        pytest.param((), {"JAX_PLATFORMS": "cpu"}, marks=pytest.mark.soak),
    ],
    ids=["flag", "variable"],
)
def test_control_cpus_that_were_asked_for_are_used(nvidia, flags, variables):
    """They start, and then their number is checked."""
    arguments = ("train", "tiny.py", "--expect-devices", "64", *flags)
    done = run_on(nvidia, *arguments, **variables)
    assert done.returncode == 2, done.stderr
    assert "expect_devices: is 64, and JAX found 1" in done.stderr
    assert "platform:" not in done.stderr


@pytest.mark.soak
def test_a_platform_without_devices_is_refused(tmp_path):
    """A job that asked for a platform does not train on CPUs, whoever asked."""
    write_config(tmp_path)
    done = run_on(tmp_path, "train", "tiny.py", JAX_PLATFORMS="cuda")
    assert done.returncode == 2, done.stderr
    assert "platform: is cuda, and JAX found CPUs only" in done.stderr
    assert "no device file or PCI device of an NVIDIA GPU is in this machine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("machine", "code", "said"),
    [
        ("a100-40gb:1x8", 0, "a100-40gb, and is left"),
        ("v5litepod-48", 2, "the nearest are v5litepod-32 and v5litepod-64"),
    ],
    ids=["chip", "control"],
)
def test_chips_that_people_have_are_planned(tmp_path, machine, code, said):
    """An A100 of 40 GB has a name; control: a slice that does not exist is refused."""
    done = run_on(tmp_path, "plan", "demo", "--topology", machine)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
