"""What is published of each kind of accelerator: what ledger and compiler need to know of a chip that is not here.

TPU: Google Cloud's pages of TPU system architecture; JAX has one device for a chip, and two for a TPU7x. GPU: NVIDIA's
data sheets and the tables of compute capabilities in its CUDA programming guide.
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        kind: How a topology names it.
        platform: `"tpu"`, `"cuda"` or `"cpu"`.
        device_kind: How JAX names its devices.
        memory: Bytes that a program may use on one device; None where no chip sets a limit.
        devices: Devices of JAX in one chip.
        dims: Dimensions of the network of a slice; 0 where there is none.
        largest: The most chips in one slice; 0 where there is no such limit.
        options: What the compiler is told of it besides its name.
        gpu: What the compiler must know of a GPU; None for other chips.
    """

    kind: str
    platform: str
    device_kind: str
    memory: int | None = None
    devices: int = 1
    dims: int = 0
    largest: int = 0
    options: tuple[tuple[str, str], ...] = ()
    gpu: "Gpu | None" = None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The figures of a GPU that XLA asks for when it compiles for one that is absent.

    Attributes:
        memory: Bytes of device memory.
        cores: Streaming multiprocessors.
        bandwidth: Bytes per second of device memory.
        capability: The compute capability's two numbers.
        l2_cache: Bytes.
        clock_ghz: The boost clock.
        shared_memory: KiB of shared memory in each multiprocessor; a block may use one KiB less.
        lanes: Single-precision units in each multiprocessor.
    """

    memory: int
    cores: int
    bandwidth: int
    capability: tuple[int, int]
    l2_cache: int
    clock_ghz: float
    shared_memory: int
    lanes: int = 128

    def describe(self, name: str) -> str:
        """The figures as XLA's `GpuTargetConfig`, a protocol buffer in its text form.

        Args:
            name: What to call the GPU.
        """
        major, minor = self.capability
        # The blocks, warps and registers of every capability from 8.0 to 10.0 are of the same size.
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_memory * 1024,
            "shared_memory_per_block_optin": (self.shared_memory - 1) * 1024,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "core_count": self.cores,
            "fpus_per_core": self.lanes,
            "clock_rate_ghz": self.clock_ghz,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_cache,
            "device_memory_size": self.memory,
        }
        figures = " ".join(f"{field}: {value}" for field, value in device.items())
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        return (
            f"gpu_device_info {{ {figures} {capability} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"'
        )


def _gpu(kind: str, name: str, gpu: Gpu) -> Chip:
    return Chip(kind, "cuda", name, memory=gpu.memory, gpu=gpu)


_MIB = 2**20
CHIPS = {
    chip.kind: chip
    for chip in (
        Chip("cpu", "cpu", "cpu"),
        # The compiler keeps 0.25 to 1.25 GiB of each TPU's memory for itself; this is what its error messages leave.
        Chip(
            "v4", "tpu", "TPU v4", int(30.75 * GIB), dims=3, largest=4096, options=(("chip_config_name", "megacore"),)
        ),
        Chip("v5e", "tpu", "TPU v5 lite", int(15.75 * GIB), dims=2, largest=256),
        Chip("v5p", "tpu", "TPU v5", int(95.74 * GIB), dims=3, largest=8960),
        Chip("v6e", "tpu", "TPU v6 lite", int(31.25 * GIB), dims=2, largest=256),
        Chip("tpu7x", "tpu", "TPU7x", int(94.75 * GIB), devices=2, dims=3, largest=9216),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", Gpu(80 * GIB, 108, 2039 * 10**9, (8, 0), 40 * _MIB, 1.41, 164, lanes=64)),
        _gpu("h100", "NVIDIA H100 80GB HBM3", Gpu(80 * GIB, 132, 3350 * 10**9, (9, 0), 50 * _MIB, 1.98, 228)),
        _gpu("h200", "NVIDIA H200", Gpu(141 * 10**9, 132, 4800 * 10**9, (9, 0), 50 * _MIB, 1.98, 228)),
        _gpu("b200", "NVIDIA B200", Gpu(180 * 10**9, 148, 8000 * 10**9, (10, 0), 126 * _MIB, 1.965, 228)),
    )
}
"""Every chip that a topology can name."""
