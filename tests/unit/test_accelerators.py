"""A machine's files say which accelerators it has, and what JAX lacks to use them; roots are fakes."""

import types
from pathlib import Path

import pytest

from spmd.distributed.accelerators import (
    Machine,
    count_problems,
    cpu_problems,
    describe_devices,
    device_problems,
    find_accelerators,
    start_problems,
)
from spmd.distributed.cluster_env import LaunchArgs

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.65.06  Sun Jul 27 07:16:22 UTC 2025\n"
GPU = {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/version": DRIVER.format(580)}
LIBCUDA = {"usr/lib/x86_64-linux-gnu/libcuda.so.1": ""}


def pci(vendor: str, device: str, kind: str) -> dict[str, str]:
    """Return the files of one PCI device."""
    folder = "sys/bus/pci/devices/0000:01:00.0"
    return {
        f"{folder}/vendor": f"{vendor}\n",
        f"{folder}/device": f"{device}\n",
        f"{folder}/class": f"{kind}\n",
    }


H100_ON_PCI = pci("0x10de", "0x2330", "0x030200")
V5E_ON_PCI = pci("0x1ae0", "0x0063", "0x120000")
MI300X_ON_PCI = pci("0x1002", "0x74a1", "0x120000")


def make_root(folder: Path, files: dict[str, str]) -> Path:
    """Write the files of a machine below a folder."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def make_machine(folder: Path, files: dict[str, str], *modules: str, **environment: str) -> Machine:
    """Return a machine with these files, Python modules and variables."""
    return Machine(make_root(folder, files), environment, modules.__contains__)


def fake_device(platform: str, kind: str, process: int = 0, version: str = "") -> object:
    """Return a stub with the attributes of a JAX device."""
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(
        platform=platform, device_kind=kind, process_index=process, client=client
    )


CPU = fake_device("cpu", "cpu")


@pytest.mark.parametrize(
    ("files", "platform", "evidence"),
    [
        (GPU, "cuda", "/dev/nvidia0"),
        ({"usr/lib/wsl/lib/libcuda.so.1": ""}, "cuda", "/usr/lib/wsl/lib/libcuda.so.1"),
        ({"proc/driver/nvidia/version": "x"}, "cuda", "/proc/driver/nvidia/version"),
        (H100_ON_PCI, "cuda", "PCI device 0000:01:00.0"),
        ({**MI300X_ON_PCI, "dev/kfd": ""}, "rocm", "/dev/kfd"),
        (MI300X_ON_PCI, "rocm", "PCI device 0000:01:00.0"),
        ({"dev/accel0": ""}, "tpu", "/dev/accel0"),
        ({**V5E_ON_PCI, "dev/vfio/0": ""}, "tpu", "PCI device 0000:01:00.0"),
    ],
)
def test_accelerators_are_found_by_their_files(tmp_path, files, platform, evidence):
    """Device files, the driver's, and PCI ids where a container with a plugin has no device files."""
    plugins = ("jax_cuda13_plugin", "jax_rocm7_plugin")
    machine = make_machine(tmp_path, files, *plugins)
    assert find_accelerators(machine) == {platform: evidence}


@pytest.mark.parametrize(
    "files",
    [
        {"dev/dxg": ""},
        {**pci("0x1002", "0x15bf", "0x030000"), "dev/kfd": ""},
        pci("0x10de", "0x1380", "0x030000"),
    ],
    ids=["wsl", "integrated", "old-card"],
)
def test_laptops_train_on_their_cpus(tmp_path, files):
    """Graphics without a driver or plugin of JAX are no accelerator; the control has the plugin."""
    assert find_accelerators(make_machine(tmp_path, files)) == {}
    plugins = ("jax_cuda13_plugin", "jax_rocm7_plugin")
    assert find_accelerators(make_machine(tmp_path, files, *plugins)) != {}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"dev/nvidia-uvm": "", "dev/nvidiactl": ""},
        {"dev/vfio/vfio": "", "dev/accel/accel0": ""},
        pci("0x10de", "0x22a3", "0x068000"),
        pci("0x10de", "0x10f0", "0x040300"),
        pci("0x1002", "0x1681", "0x030000"),
        pci("0x1ae0", "0x0042", "0x020000"),
        pci("0x1ae0", "0x001f", "0x010802"),
    ],
    ids=[
        *("empty", "no-gpu-of-this-container", "other-accelerators", "nvswitch", "audio"),
        *("integrated-graphics", "google-network-card", "google-disk"),
    ],
)
def test_control_other_devices_are_no_accelerators(tmp_path, files):
    """Devices of the same vendors, and CPUs are no problem in such a machine."""
    machine = make_machine(tmp_path, files)
    assert find_accelerators(machine) == {}
    assert device_problems(machine, [CPU], "", 0) == []


CAUSES = [
    (H100_ON_PCI, (), {}, "no /dev/nvidia0", "--gpus all"),
    (GPU, (), {}, "plugin for CUDA is not installed", "pip install 'spmd[cuda13]'"),
    (
        {**GPU, "proc/driver/nvidia/version": DRIVER.format(535)},
        (),
        {},
        "plugin for CUDA is not installed",
        "pip install 'spmd[cuda12]'",
    ),
    (GPU, ("jax_cuda13_plugin",), {}, "libcuda.so.1 is not found", "compute,utility"),
    (
        {**GPU, **LIBCUDA, "proc/driver/nvidia/version": DRIVER.format(570)},
        ("jax_cuda13_plugin",),
        {},
        "driver 570 is too old for CUDA 13, which needs 580",
        "spmd[cuda12]",
    ),
    (GPU, (), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides all", "unset it"),
    (GPU, (), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "hides all", "the scheduler"),
    (MI300X_ON_PCI, (), {}, "no /dev/kfd", "--device /dev/kfd"),
    (
        {**MI300X_ON_PCI, "dev/kfd": ""},
        (),
        {},
        "plugin for ROCm is not installed",
        "spmd[rocm]",
    ),
    ({"dev/kfd": ""}, ("jax_rocm7_plugin",), {}, "libamdhip64.so is not found", "ROCm 7"),
    ({"dev/accel0": ""}, (), {}, "libtpu is not installed", "pip install 'spmd[tpu]'"),
    (V5E_ON_PCI, ("libtpu",), {}, "no /dev/accel0 or /dev/vfio/0", "--privileged"),
]


@pytest.mark.parametrize(("files", "modules", "environment", "cause", "fix"), CAUSES)
def test_the_missing_file_or_package_is_named(tmp_path, files, modules, environment, cause, fix):
    """The cause, its fix, and the flag for CPUs; control: CPUs that were asked for are no problem."""
    machine = make_machine(tmp_path, files, *modules, **environment)
    (problem,) = device_problems(machine, [CPU], "", 0)
    assert cause in problem.detail
    assert fix in problem.fix
    assert 'platform="cpu"' in problem.fix
    assert device_problems(machine, [CPU], "cpu", 0) == []


def test_without_a_missing_file_jax_is_quoted(tmp_path):
    """Everything that is known to be needed is there."""
    cached = {**GPU, "etc/ld.so.cache": "libcuda.so.1\0/usr/lib/nvidia/libcuda.so.1"}
    machine = make_machine(tmp_path, cached, "jax_cuda12_plugin")
    (problem,) = cpu_problems(machine, "", lambda platform: f"{platform} has error 100")
    assert problem.detail == "cuda has error 100"


def test_a_library_is_found_in_the_path_of_the_linker(tmp_path):
    """LD_LIBRARY_PATH counts; control: another folder does not."""
    files = {**GPU, "opt/driver/libcuda.so.1": ""}
    for folder, missing in (("/opt/driver", False), ("/opt/other", True)):
        machine = make_machine(tmp_path, files, "jax_cuda13_plugin", LD_LIBRARY_PATH=folder)
        (problem,) = cpu_problems(machine, "", lambda platform: "JAX's error")
        assert ("libcuda" in problem.detail) == missing


def test_a_platform_that_was_asked_for_is_required(tmp_path):
    """CPUs are refused without any accelerator; so are devices of another platform."""
    machine = make_machine(tmp_path, {})
    (problem,) = device_problems(machine, [CPU], "rocm", 0)
    assert problem.what == "is rocm, and JAX found CPUs only"
    assert "no device file or PCI device of an AMD GPU" in problem.detail
    (problem,) = device_problems(machine, [fake_device("gpu", "H100")], "rocm", 0)
    assert problem.what == "is rocm, and JAX found cuda devices"
    amd = fake_device("gpu", "AMD Instinct MI300X", version="rocm 70000")
    assert device_problems(machine, [amd], "rocm", 0) == []
    (problem,) = start_problems(machine, "gpu", "Unknown backend gpu")
    assert problem.what.startswith("is cuda")


def test_the_number_of_devices_is_required():
    """The process with fewer devices is named; control: the right number is no problem."""
    devices = [fake_device("gpu", "H100", number // 8) for number in range(15)]
    (problem,) = count_problems(devices, 16)
    assert problem.what == "is 16, and JAX found 15"
    assert problem.detail == "2 processes of 8, but process 1 has 7"
    assert count_problems(devices, 15) == count_problems(devices, 0) == []


def test_devices_have_a_line():
    """Platform, kind and number; AMD's GPUs are not CUDA's."""
    h100s = [fake_device("gpu", "NVIDIA H100", number // 8, "cuda 12090") for number in range(16)]
    line = "devices: 16 × NVIDIA H100, platform cuda, 2 processes"
    assert describe_devices(h100s) == line
    assert describe_devices([CPU]) == "devices: 1 × cpu, platform cpu, 1 process"
    amd = fake_device("gpu", "AMD Instinct MI300X", version="rocm 70000")
    assert "platform rocm" in describe_devices([amd])


def test_flags_are_checked_together():
    """All problems of both flags; control: every platform is valid."""
    wrong = LaunchArgs(platform="gpu", expect_devices=-1).problems()
    assert [problem.where for problem in wrong] == ["platform", "expect_devices"]
    for platform in ("", "cpu", "cuda", "rocm", "tpu"):
        assert LaunchArgs(platform=platform).problems() == []
