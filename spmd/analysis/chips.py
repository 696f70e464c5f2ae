"""Published figures of each kind of accelerator, for the memory report and for compiling without one.

TPU: Google Cloud's pages on TPU system architecture. GPU: NVIDIA's data sheets and the tables of compute capabilities
in its CUDA programming guide.
"""

import dataclasses

GIB = 2**30
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Figures of a GPU that XLA needs to compile without one.

    Attributes:
        memory: Bytes of device memory.
        cores: Streaming multiprocessors.
        bandwidth: Bytes per second of device memory.
        capability: Major and minor compute capability.
        l2_cache: Bytes.
        clock_ghz: Boost clock.
        shared_memory: KiB in each multiprocessor; a block may use one KiB less.
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

    def target_config(self, name: str) -> str:
        """Return XLA's `GpuTargetConfig` of a GPU of this name, as a text protocol buffer."""
        major, minor = self.capability
        # All capabilities from 8.0 to 10.0 have the same limits of threads, registers and blocks.
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
                registers_per_core_limit: 65536 registers_per_block_limit: 65536
                shared_memory_per_block: {48 * 1024} shared_memory_per_core: {self.shared_memory * 1024}
                shared_memory_per_block_optin: {(self.shared_memory - 1) * 1024}
                block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
                thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
                core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock_ghz}
                memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache} device_memory_size: {self.memory}
                cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
        """


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        kind: Name in a topology.
        platform: `"tpu"`, `"cuda"` or `"cpu"`.
        device_kind: Name in JAX.
        memory: Bytes that a program may use on one device; None if unlimited.
        devices: JAX devices in one chip.
        dims: Dimensions of a slice's network; 0 if there is none.
        max_chips: Most chips in one slice; 0 if unlimited.
        options: Options for the compiler.
        gpu: Figures of a GPU.
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


_MEGACORE = (("chip_config_name", "megacore"),)
# The compiler reserves 0.25 to 1.25 GiB of each TPU's memory; this is what its error messages leave.
_TPUS = (
    Chip("v4", "tpu", "TPU v4", int(30.75 * GIB), dims=3, max_chips=4096, options=_MEGACORE),
    Chip("v5e", "tpu", "TPU v5 lite", int(15.75 * GIB), dims=2, max_chips=256),
    Chip("v5p", "tpu", "TPU v5", int(95.74 * GIB), dims=3, max_chips=8960),
    Chip("v6e", "tpu", "TPU v6 lite", int(31.25 * GIB), dims=2, max_chips=256),
    Chip("tpu7x", "tpu", "TPU7x", int(94.75 * GIB), devices=2, dims=3, max_chips=9216),
)
_GPUS = (
    ("a100", "NVIDIA A100-SXM4-80GB", Gpu(80 * GIB, 108, 2039 * 10**9, (8, 0), 40 * _MIB, 1.41, 164, lanes=64)),
    ("h100", "NVIDIA H100 80GB HBM3", Gpu(80 * GIB, 132, 3350 * 10**9, (9, 0), 50 * _MIB, 1.98, 228)),
    ("h200", "NVIDIA H200", Gpu(141 * 10**9, 132, 4800 * 10**9, (9, 0), 50 * _MIB, 1.98, 228)),
    ("b200", "NVIDIA B200", Gpu(180 * 10**9, 148, 8000 * 10**9, (10, 0), 126 * _MIB, 1.965, 228)),
)

CHIPS = {
    chip.kind: chip
    for chip in (
        Chip("cpu", "cpu", "cpu"),
        *_TPUS,
        *(Chip(kind, "cuda", name, memory=gpu.memory, gpu=gpu) for kind, name, gpu in _GPUS),
    )
}
"""Every chip that a topology can name."""
