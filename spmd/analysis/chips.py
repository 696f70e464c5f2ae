"""Published figures of each kind of accelerator, for the memory report and for compiling without one.

TPU: Google Cloud's pages on TPU system architecture. GPU: NVIDIA's data sheets and the tables of compute capabilities
in its CUDA programming guide.
"""

import dataclasses

GIB = 2**30
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Figures of a GPU that XLA needs to compile without one, besides its memory.

    Attributes:
        cores: Streaming multiprocessors.
        bandwidth: Bytes per second.
        capability: Major and minor compute capability.
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
        platform: `"tpu"`, `"cuda"` or `"cpu"`.
        memory: Bytes that a program may use on one device; None if unlimited.
        devices: JAX devices in one chip.
        dims: Dimensions of a slice's network; 0 if there is none.
        max_chips: Most chips in one slice; 0 if unlimited.
        options: For the compiler.
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

    def target_config(self) -> str:
        """Return XLA's `GpuTargetConfig` of a GPU, as a text protocol buffer."""
        assert self.gpu is not None
        gpu = self.gpu
        major, minor = gpu.capability
        # All capabilities from 8.0 to 10.0 have the same limits of threads, registers and blocks.
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
                registers_per_core_limit: 65536 registers_per_block_limit: 65536
                shared_memory_per_block: {48 * 1024} shared_memory_per_core: {gpu.shared_memory * 1024}
                shared_memory_per_block_optin: {(gpu.shared_memory - 1) * 1024}
                block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
                thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
                core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock_ghz}
                memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.l2_cache} device_memory_size: {self.memory}
                cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.device_kind}"
        """


_MEGACORE = (("chip_config_name", "megacore"),)
# The compiler reserves 0.25 to 1.25 GiB of each TPU's memory; this is what its error messages leave.
_CHIPS = (
    Chip("cpu", "cpu", "cpu"),
    Chip("v4", "tpu", "TPU v4", int(30.75 * GIB), dims=3, max_chips=4096, options=_MEGACORE),
    Chip("v5e", "tpu", "TPU v5 lite", int(15.75 * GIB), dims=2, max_chips=256),
    Chip("v5p", "tpu", "TPU v5", int(95.74 * GIB), dims=3, max_chips=8960),
    Chip("v6e", "tpu", "TPU v6 lite", int(31.25 * GIB), dims=2, max_chips=256),
    Chip("tpu7x", "tpu", "TPU7x", int(94.75 * GIB), devices=2, dims=3, max_chips=9216),
    Chip(
        "a100",
        "cuda",
        "NVIDIA A100-SXM4-80GB",
        80 * GIB,
        gpu=Gpu(108, 2039 * 10**9, (8, 0), 40 * _MIB, 1.41, 164, lanes=64),
    ),
    Chip("h100", "cuda", "NVIDIA H100 80GB HBM3", 80 * GIB, gpu=Gpu(132, 3350 * 10**9, (9, 0), 50 * _MIB, 1.98, 228)),
    Chip("h200", "cuda", "NVIDIA H200", 141 * 10**9, gpu=Gpu(132, 4800 * 10**9, (9, 0), 50 * _MIB, 1.98, 228)),
    Chip("b200", "cuda", "NVIDIA B200", 180 * 10**9, gpu=Gpu(148, 8000 * 10**9, (10, 0), 126 * _MIB, 1.965, 228)),
)
CHIPS = {chip.kind: chip for chip in _CHIPS}
"""Every chip that a topology can name."""
