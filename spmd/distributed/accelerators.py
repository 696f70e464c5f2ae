"""Accelerators of a machine, and why JAX does not find one.

JAX uses CPUs where it cannot use an accelerator, with a warning at most. `cpu_problems` refuses
that, with the driver file or package that is missing. It reads device files and PCI ids below a
root folder and starts nothing, so a test can give it the files of another machine.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import Problem
from spmd.sharding.mesh import platform_of

Failures = Callable[[str], str]
"""Function of a platform that returns JAX's own error about it, empty if there is none."""

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms that `--platform` can name."""

_NAMES = {"cuda": "an NVIDIA GPU", "rocm": "an AMD GPU", "tpu": "a TPU"}

# Vendor → platform and PCI classes of its accelerators. NVIDIA's switches and audio devices, AMD's
# integrated graphics and Google's network cards and disks have the same vendors.
_DISPLAY = "0x0300"
_3D_CONTROLLER = "0x0302"
_OTHER_DISPLAY = "0x0380"  # of AMD: MI200, without a screen
_ACCELERATOR = "0x1200"
_PCI = {
    "0x10de": ("cuda", (_DISPLAY, _3D_CONTROLLER)),
    "0x1002": ("rocm", (_OTHER_DISPLAY, _ACCELERATOR)),
}
_PCI_DEVICES = "sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
# PCI devices of TPU v2 and v3, v4 (two), v5p, v5e, v6e and TPU7x, as in JAX's hardware_utils.py.
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

_DEVICE_FILES = {
    "cuda": (
        "dev/nvidia[0-9]*",
        "proc/driver/nvidia/version",
        "usr/lib/wsl/lib/libcuda.so*",
    ),
    "tpu": ("dev/accel[0-9]*",),
}
"""Platform → files that only its accelerators have."""

_UNSURE_FILES = {"cuda": ("dev/dxg",), "rocm": ("dev/kfd",)}
"""Platform → files that other machines have, too: Windows' subsystem for Linux has `/dev/dxg` for
any graphics, and AMD's integrated graphics have `/dev/kfd`."""

_PLUGINS = {
    "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "rocm": ("jax_rocm7_plugin",),
    "tpu": ("libtpu",),
}
"""Platform → modules of which JAX needs one."""

_LIBRARY_FOLDERS = (
    "usr/lib",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
    "opt/rocm/lib",
)

_CUDA_13_DRIVER = 580
"""Oldest driver for CUDA 13, of 2025."""

_HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs; the last one is Slurm's."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Files, environment variables and Python packages of a machine.

    Attributes:
        root: Folder with `dev`, `proc` and `sys`.
        has_module: Return whether a Python module is installed.
    """

    root: Path
    environment: Mapping[str, str]
    has_module: Callable[[str], bool]


def find_accelerators(machine: Machine) -> dict[str, str]:
    """Return platform → evidence for an accelerator of it: a device file or a PCI device.

    A device file that other machines have, too, needs JAX's plugin or the device on PCI beside it.
    A graphics card of NVIDIA on PCI, perhaps an old one without a driver, needs the plugin.
    """
    found = {}
    for platform, patterns in _DEVICE_FILES.items():
        file = _first_file(machine.root, patterns)
        if file:
            found[platform] = file
    pci = dict(_pci_accelerators(machine.root))
    for platform, patterns in _UNSURE_FILES.items():
        file = _first_file(machine.root, patterns)
        if file and (platform in pci or _has_plugin(machine, platform)):
            found.setdefault(platform, file)
    for platform, device in pci.items():
        is_card = _read(machine.root / _PCI_DEVICES / device / "class").startswith(_DISPLAY)
        if not is_card or _has_plugin(machine, platform):
            found.setdefault(platform, f"PCI device {device}")
    return found


def _first_file(root: Path, patterns: Sequence[str]) -> str:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            return f"/{path.relative_to(root)}"
    return ""


def _pci_accelerators(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the platform and the address of each accelerator on PCI."""
    for folder in sorted(root.glob(f"{_PCI_DEVICES}/*")):
        vendor = _read(folder / "vendor")
        if vendor == _GOOGLE and _read(folder / "device") in _TPUS:
            yield "tpu", folder.name
        if vendor not in _PCI:
            continue
        platform, classes = _PCI[vendor]
        if _read(folder / "class")[:6] in classes:
            yield platform, folder.name


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def cpu_problems(machine: Machine, asked: str, failure_of: Failures) -> list[Problem]:
    """Return a problem for each accelerator of a machine, or the one asked for, beside CPUs only.

    Args:
        asked: Platform that was asked for; empty for none.
    """
    found = find_accelerators(machine)
    platforms = list(found)
    if asked:
        platforms = [asked]
    problems = []
    for platform in platforms:
        evidence = found.get(platform, "")
        what = f"JAX found CPUs only, and the machine has {_NAMES[platform]} ({evidence})"
        if asked:
            what = f"is {platform}, and JAX found CPUs only"
        cause, fix = _cause(machine, platform, evidence, failure_of)
        fix += ', or platform="cpu" (JAX_PLATFORMS=cpu) for the CPUs'
        problems.append(Problem("platform", what, cause, fix))
    return problems


def _cause(machine: Machine, platform: str, evidence: str, failure_of: Failures) -> tuple[str, str]:
    """Return why JAX does not find an accelerator, and the fix."""
    if not evidence:
        cause = f"no device file or PCI device of {_NAMES[platform]} is in this machine"
        return cause, "start it on a machine with one"
    checks = {"cuda": _cuda_cause, "rocm": _rocm_cause, "tpu": _tpu_cause}
    found = checks[platform](machine)
    if found is not None:
        return found
    return failure_of(platform), "python -c 'import jax; jax.devices()' prints all that JAX says"


def _cuda_cause(machine: Machine) -> tuple[str, str] | None:
    root = machine.root
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden in _HIDING:
        cause = f"CUDA_VISIBLE_DEVICES={hidden} hides all GPUs"
        return cause, "unset it, or ask the scheduler for GPUs"
    if not _first_file(root, _DEVICE_FILES["cuda"]):
        cause = "there is no /dev/nvidia0: the driver is not loaded, or the container has no GPUs"
        return cause, "start the container with --gpus all, or install NVIDIA's driver"
    driver = _driver_version(root)
    extra = "cuda13"
    if 0 < driver < _CUDA_13_DRIVER:
        extra = "cuda12"
    if not _has_plugin(machine, "cuda"):
        return "JAX's plugin for CUDA is not installed", f"pip install 'spmd[{extra}]'"
    if not _has_library(machine, "libcuda.so.1"):
        cause = "the driver's library libcuda.so.1 is not found: the container lacks driver files"
        fix = "start the container with NVIDIA's container toolkit and "
        fix += "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return cause, fix
    if extra == "cuda12" and not machine.has_module("jax_cuda12_plugin"):
        cause = f"driver {driver} is too old for CUDA 13, which needs {_CUDA_13_DRIVER}"
        fix = "pip uninstall jax-cuda13-plugin jax-cuda13-pjrt, and pip install 'spmd[cuda12]'"
        return cause, fix
    return None


def _driver_version(root: Path) -> int:
    """Return the major version of NVIDIA's driver; 0 if unknown."""
    text = _read(root / "proc/driver/nvidia/version")
    match = re.search(r"\s(\d+)\.\d+(\.\d+)?\s", text)
    if match is None:
        return 0
    return int(match[1])


def _rocm_cause(machine: Machine) -> tuple[str, str] | None:
    root = machine.root
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        hidden = machine.environment.get(variable)
        if hidden in _HIDING:
            cause = f"{variable}={hidden} hides all GPUs"
            return cause, "unset it, or ask the scheduler for GPUs"
    kfd = root / "dev/kfd"
    if not kfd.exists():
        cause = "there is no /dev/kfd: the driver is not loaded, or the container has no GPUs"
        return cause, "start the container with --device /dev/kfd --device /dev/dri"
    if not os.access(kfd, os.R_OK | os.W_OK):
        return "/dev/kfd cannot be opened", "add the user to the groups render and video"
    if not _has_plugin(machine, "rocm"):
        return "JAX's plugin for ROCm is not installed", "pip install 'spmd[rocm]'"
    if not _has_library(machine, "libamdhip64.so"):
        return "ROCm's library libamdhip64.so is not found", "install ROCm 7"
    return None


def _tpu_cause(machine: Machine) -> tuple[str, str] | None:
    if not _has_plugin(machine, "tpu"):
        return "libtpu is not installed", "pip install 'spmd[tpu]'"
    if not _first_file(machine.root, ("dev/accel[0-9]*", "dev/vfio/[0-9]*")):
        cause = "there is no /dev/accel0 or /dev/vfio/0: the container has no device files"
        return cause, "start the container with --privileged"
    return None


def _has_plugin(machine: Machine, platform: str) -> bool:
    return any(map(machine.has_module, _PLUGINS[platform]))


def _has_library(machine: Machine, name: str) -> bool:
    """Return whether the dynamic linker can find a library."""
    cache = machine.root / "etc/ld.so.cache"
    if cache.is_file() and name.encode() in cache.read_bytes():
        return True
    folders = [machine.root / folder for folder in _LIBRARY_FOLDERS]
    for folder in machine.environment.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            folders.append(machine.root / folder.lstrip("/"))
    files = [file for folder in folders for file in folder.glob(f"{name}*")]
    return bool(files)


def _no_failure(platform: str) -> str:
    return ""


def start_problems(machine: Machine, asked: str, failure: str) -> list[Problem]:
    """Return the problems of a platform after an error of JAX at its start.

    Args:
        asked: Platform in the words of JAX, which has `gpu` for either kind.
        failure: JAX's own error.
    """
    platform = asked
    if asked == "gpu":
        platform = next(iter(find_accelerators(machine)), "cuda")
    if platform not in _NAMES:
        return [Problem("platform", f"{asked} does not start", failure)]
    return cpu_problems(machine, platform, lambda _: failure)


def device_problems(
    machine: Machine,
    devices: Sequence[Any],
    asked: str,
    expected: int,
    failure_of: Failures = _no_failure,
) -> list[Problem]:
    """Return the problems of the devices found by JAX.

    Args:
        devices: Devices of all processes.
        asked: Platform that was asked for; empty for none.
        expected: Number of devices; 0 for any.
        failure_of: Return JAX's own error about a platform.
    """
    problems = []
    platform = platform_of(devices[0])
    if platform == "cpu" and asked != "cpu":
        problems += cpu_problems(machine, asked, failure_of)
    elif asked not in ("", platform):
        what = f"is {asked}, and JAX found {platform} devices"
        problems.append(Problem("platform", what, describe_devices(devices), "remove it"))
    return problems + count_problems(devices, expected)


def count_problems(devices: Sequence[Any], expected: int) -> list[Problem]:
    """Return a problem if the devices of all processes are not as many as expected."""
    if expected in (0, len(devices)):
        return []
    per_process = collections.Counter(device.process_index for device in devices)
    most = max(per_process.values())
    detail = f"{len(per_process)} processes of {most}"
    if len(per_process) == 1:
        detail = "1 process"
    for process, count in sorted(per_process.items()):
        if count < most:
            detail += f", but process {process} has {count}"
    what = f"is {expected}, and JAX found {len(devices)}"
    fix = f"expect_devices={len(devices)}, or start the processes that are missing"
    return [Problem("expect_devices", what, detail, fix)]


def describe_devices(devices: Sequence[Any]) -> str:
    """Return a line with platform, kind and number of the devices of all processes."""
    kinds = collections.Counter(device.device_kind for device in devices)
    counted = [f"{count} × {kind}" for kind, count in kinds.items()]
    processes = len({device.process_index for device in devices})
    word = "process"
    if processes > 1:
        word = "processes"
    platform = platform_of(devices[0])
    return f"devices: {' and '.join(counted)}, platform {platform}, {processes} {word}"
