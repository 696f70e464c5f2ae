"""Machines by name: their size and memory, and their devices to compile for without the hardware.

`v5e:16x16` is a slice of 256 TPU chips, `2xv5e:16x16` is two of them, `h100:16x8` is 16 hosts with
8 GPUs each, `cpu:8` is 8 simulated devices. XLA compiles for all of them on any machine.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from spmd.distributed.native_output import compiler_log
from spmd.errors import ConfigError, MeshError, Problem, did_you_mean

_GIB = 2**30
_MOST_DEVICES = 2**20  # of a kind without a limit of its own


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Figures of a GPU for XLA to compile without the hardware, besides its memory.

    Attributes:
        cores: Streaming multiprocessors.
        bandwidth: GB/s.
        l2_cache: MiB.
        shared_memory: KiB in each multiprocessor; a block may use one KiB less.
        lanes: Single-precision units in each multiprocessor.
    """

    cores: int
    bandwidth: int
    capability: tuple[int, int]
    l2_cache: int
    clock_ghz: float
    shared_memory: int
    lanes: int = 128


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        kind: Name in a topology; `device_kind` is the name in JAX.
        memory: Bytes that a program may use on one device; None if unlimited.
        devices: JAX devices in one chip.
        dims: Dimensions of a slice's network.
        max_chips: Most chips in one slice; 0 if unlimited.
        clock: Cycles of a TPU in one second; None if unknown.
    """

    kind: str
    platform: str
    device_kind: str
    memory: int | None = None
    devices: int = 1
    dims: int = 0
    max_chips: int = 0
    options: tuple[tuple[str, str], ...] = ()
    gpu: Gpu | None = None
    clock: float | None = None

    def target_config(self) -> str:
        """Return XLA's `GpuTargetConfig` of a GPU, as a text protocol buffer."""
        gpu = self.gpu
        assert gpu is not None
        major, minor = gpu.capability
        shared = gpu.shared_memory * 1024
        cudnn = "dnn_version_info { major: 9 minor: 10 }"
        # All capabilities from 8.0 to 10.0 have the same limits of threads, registers and blocks.
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
                registers_per_core_limit: 65536 registers_per_block_limit: 65536
                shared_memory_per_block: {48 * 1024} shared_memory_per_core: {shared}
                shared_memory_per_block_optin: {(gpu.shared_memory - 1) * 1024}
                block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
                thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
                core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock_ghz}
                memory_bandwidth: {gpu.bandwidth * 10**9} device_memory_size: {self.memory}
                l2_cache_size: {gpu.l2_cache * 2**20}
                cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA" {cudnn} device_description_str: "{self.device_kind}"
        """


_MEGACORE = (("chip_config_name", "megacore"),)
# TPUs: Google Cloud's pages on TPU system architecture. GPUs: NVIDIA's data sheets and CUDA
# programming guide. A clock is the peak bfloat16 rate divided by the number of multipliers of all
# matrix units; a TPU7x is assumed to have as many for each device as a v6e. The compiler reserves
# 0.25 to 1.25 GiB of each TPU's memory; the figures here are the rest, by its error messages.
_CHIPS = (
    Chip("cpu", "cpu", "cpu"),
    Chip(
        "v4",
        "tpu",
        "TPU v4",
        int(30.75 * _GIB),
        dims=3,
        max_chips=4096,
        options=_MEGACORE,
        clock=1.05e9,
    ),
    Chip("v5e", "tpu", "TPU v5 lite", int(15.75 * _GIB), dims=2, max_chips=256, clock=1.5e9),
    Chip("v5p", "tpu", "TPU v5", int(95.74 * _GIB), dims=3, max_chips=8960, clock=1.75e9),
    Chip("v6e", "tpu", "TPU v6 lite", int(31.25 * _GIB), dims=2, max_chips=256, clock=1.75e9),
    Chip(
        "tpu7x", "tpu", "TPU7x", int(94.75 * _GIB), devices=2, dims=3, max_chips=9216, clock=2.2e9
    ),
    Chip(
        "a100",
        "cuda",
        "NVIDIA A100-SXM4-80GB",
        80 * _GIB,
        gpu=Gpu(108, 2039, (8, 0), 40, 1.41, 164, lanes=64),
    ),
    Chip(
        "h100",
        "cuda",
        "NVIDIA H100 80GB HBM3",
        80 * _GIB,
        gpu=Gpu(132, 3350, (9, 0), 50, 1.98, 228),
    ),
    Chip("h200", "cuda", "NVIDIA H200", 141 * 10**9, gpu=Gpu(132, 4800, (9, 0), 50, 1.98, 228)),
    Chip("b200", "cuda", "NVIDIA B200", 180 * 10**9, gpu=Gpu(148, 8000, (10, 0), 126, 1.965, 228)),
)
CHIPS = {chip.kind: chip for chip in _CHIPS}
"""Every chip that a topology can name."""

EXAMPLES = (
    "v4:4x4x4, v5e:16x16, v5p:4x4x8, v6e:16x16, tpu7x:4x4x4, a100:16x8, h100:16x8, h200:16x8, "
    "b200:16x8, cpu:8"
)
"""One topology of each kind."""

EXTRAS = {"tpu": ("tpu", ("libtpu",)), "cuda": ("cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin"))}
"""Platform → extra of this package for its compiler, and the modules of which it installs one."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Machine by its name; does not use JAX.

    Attributes:
        shape: Chips along each dimension of a slice; or hosts, and GPUs of each; or the number of
            devices.
        slices: TPU slices, joined by the data-centre network.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def kind(self) -> str:
        """Kind of chip, such as `"v5e"`."""
        return self.chip.kind

    @property
    def platform(self) -> str:
        """`"tpu"`, `"cuda"` or `"cpu"`."""
        return self.chip.platform

    @property
    def memory(self) -> int | None:
        """Usable bytes on one device; None for simulated devices."""
        return self.chip.memory

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * self.chip.devices

    @property
    def hosts(self) -> int:
        """Hosts of all slices; a TPU host has up to four chips."""
        if self.platform == "tpu":
            return self.chips // math.prod(self.host_bounds)
        if len(self.shape) > 1:
            return self.shape[0]
        return 1

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of one TPU host along each of three dimensions."""
        x, y, _ = (*self.shape, 1, 1)[:3]
        return min(x, 2), min(y, 2), 1

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each dimension of a TPU slice, whether links lead from its last chip to its first.

        Three dimensions. v4, v5p and TPU7x slices of whole cubes of 4 × 4 × 4 chips are joined in
        all dimensions, others in none; v5e and v6e slices in a dimension that is as long as their
        pod, 16. Empty for other machines.
        """
        if self.chip.dims == 3:
            is_cubes = all(chips % 4 == 0 for chips in self.shape)
            return (is_cubes,) * 3
        if not self.chip.dims:
            return ()
        return tuple(chips == 16 for chips in (*self.shape, 1))

    @property
    def links(self) -> str:
        """Text on the wrap-around links of a TPU slice; empty for other machines.

        libtpu 0.0.42 to 0.0.50 ignore these links for several 3D slices.
        """
        if not self.wrap:
            return ""
        wrapped = [axis for axis, wraps in zip("xyz", self.wrap, strict=False) if wraps]
        if not wrapped:
            return "no links wrap around"
        text = f"links wrap around in {', '.join(wrapped)}"
        if self.slices > 1 and self.chip.dims == 3:
            text += ", which the compiler does not use for several slices"
        return text

    def __str__(self) -> str:
        return self.name


def parse_topology(text: str) -> Topology:
    """Parse the name of a machine.

    `cpu:N`, `v5e:16x16`, `2xv5e:16x16` for two slices, `h100:16x8` for hosts × GPUs.

    Raises:
        MeshError: Unknown chip, or no slice of that shape.

    Example:
        >>> parse_topology("v5p:4x4x8").devices, parse_topology("cpu:16384").devices
        (128, 16384)
        >>> parse_topology("h100:16x8").hosts, parse_topology("2xv5e:16x16").chips
        (16, 512)
    """
    found = re.fullmatch(r"(?:(\d+)x)?([^:]*):?(.*)", text, re.S)
    assert found is not None  # it matches any text
    slices, kind, size = found.groups()
    if kind not in CHIPS:
        raise MeshError("Invalid topology:", [_unknown_chip(text, kind)])
    chip = CHIPS[kind]
    topology = Topology(text, chip, _parse_shape(text, chip, size), int(slices or 1))
    problems = []
    if slices is not None and (chip.platform != "tpu" or topology.slices < 1):
        problems.append(_refused_slices(chip, slices, size))
    problems += _size_problems(topology)
    if problems:
        raise MeshError("Unknown topology:", problems)
    return topology


def _unknown_chip(text: str, kind: str) -> Problem:
    fix = f"one of: {EXAMPLES}"
    if kind:
        fix = f"{did_you_mean(kind, CHIPS)} (such as {EXAMPLES})"
    return Problem(
        "topology",
        f"is {text!r}, and there is no chip {kind!r}",
        f"known: {', '.join(CHIPS)}",
        fix,
    )


def _example(chip: Chip) -> str:
    """Return a topology of this kind of chip."""
    return next(name for name in EXAMPLES.split(", ") if name.startswith(f"{chip.kind}:"))


def _parse_shape(text: str, chip: Chip, size: str) -> tuple[int, ...]:
    """Parse the size of a machine, such as `16x16`; raise `MeshError` for another form."""
    forms = {"tpu": "x".join("ABC"[: chip.dims]), "cuda": "HOSTSxGPUS", "cpu": "N"}
    form = forms[chip.platform]
    parts = size.split("x")
    shape = tuple(int(part) for part in parts if part.isdigit() and int(part))
    if len(parts) == len(shape) == len(form.split("x")):
        return shape
    fix = f"{chip.kind}:{form}, such as {_example(chip)}"
    raise MeshError("Invalid topology:", [Problem("topology", f"is {text!r}", fix=fix)])


def _refused_slices(chip: Chip, slices: str, size: str) -> Problem:
    fix = f"{_example(chip)}, and --slices.data for the network of hosts"
    if chip.platform == "tpu":
        fix = f"{chip.kind}:{size}"
    what = f"has {slices} slices of {chip.kind}: only TPUs have slices"
    return Problem("topology", what, fix=fix)


def _size_problems(topology: Topology) -> Iterator[Problem]:
    """Yield a problem for a slice too large, or not divisible into hosts."""
    chip = topology.chip
    count = math.prod(topology.shape)
    most = chip.max_chips or _MOST_DEVICES
    if count > most:
        detail = f"{' × '.join(map(str, topology.shape))} = {count} > {most}"
        yield Problem(
            "topology",
            f"no slice of {chip.kind} is so large",
            detail,
            f"such as {_example(chip)}",
        )
    if chip.platform != "tpu":
        return
    bounds = zip((*topology.shape, 1, 1), topology.host_bounds, strict=False)
    for dim, (chips, bound) in enumerate(bounds):
        if chips % bound:
            yield Problem(
                "topology",
                "does not divide into hosts of 2 × 2 chips",
                f"dimension {dim}: {chips} / {bound} = {chips / bound:.4g}",
                "even sizes",
            )


def missing_extra(topology: Topology) -> Problem | None:
    """Return the extra to install before compiling for a machine; None if it is installed."""
    if topology.platform not in EXTRAS:
        return None
    extra, modules = EXTRAS[topology.platform]
    for module in modules:
        if importlib.util.find_spec(module):
            return None
    compiler = f"{topology.platform.upper()}'s compiler"
    return Problem(
        f"compiling for {topology}",
        f"needs {compiler}, which is not installed; no {topology.kind} is needed",
        fix=f"pip install 'spmd[{extra}]'",
    )


def topology_devices(topology: Topology) -> list[jax.Device]:
    """Return the devices of a machine, to compile for and nothing else.

    Call `spmd.distributed.initialize.initialize` with the topology's platform before JAX starts.

    Raises:
        ConfigError: The extra with the compiler is not installed.
    """
    absent = missing_extra(topology)
    if absent:
        raise ConfigError("The compiler is missing:", [absent])
    if topology.platform == "cpu":
        return jax.devices()[: topology.devices]
    # libtpu searches for a cloud machine, and reports at length that there is none.
    with compiler_log(pass_on=False):
        size = "x".join(map(str, topology.shape))
        if topology.platform == "cuda":
            described = topologies.get_topology_desc(
                topology.name,
                "cuda",
                target_config=topology.chip.target_config(),
                topology=f"1x{size}",
            )
        else:
            options = _tpu_options(topology)
            described = topologies.get_topology_desc(f"{topology.kind}:{size}", "tpu", **options)
    return list(described.devices)


def _tpu_options(topology: Topology) -> dict[str, Any]:
    """Return libtpu's options of a topology besides its name."""
    options: dict[str, Any] = {
        "chips_per_host_bounds": topology.host_bounds,
        "wrap": topology.wrap,
    }
    options.update(topology.chip.options)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    return options
