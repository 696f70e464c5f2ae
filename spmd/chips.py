"""Kinds of chips, one entry for each: memory, speeds, network, compiler flags, rates and quirks.

Everything that differs between two kinds of chips is a field of `Chip`, and other modules read that
field, so a new kind is one entry of the table. CONTRIBUTING.md says how each figure is measured.

Sources:

- TPUs: Google Cloud's pages on TPU system architecture; for one-way link and network speeds also
  "How to Scale Your Model" (Austin et al., 2025), chapter 2.
- GPUs: the vendor's data sheet of each board (dense matmuls, NVLink or PCIe; network cards of the
  vendor's machine, or of the cloud's that an entry names), and NVIDIA's CUDA programming guide.
"""

import dataclasses
import re
from collections.abc import Mapping

Value = bool | int | float | str

_MIB = 2**20
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Flag:
    """XLA flag, without dashes, or environment variable.

    Example:
        >>> print(Flag("xla_gpu_enable_latency_hiding_scheduler", True, "sends while it computes"))
        xla_gpu_enable_latency_hiding_scheduler=true
    """

    name: str
    value: Value
    reason: str
    lengthens: bool = False
    """Whether compilation takes longer with it."""

    def __str__(self) -> str:
        value = str(self.value)
        if isinstance(self.value, bool):
            value = value.lower()
        return f"{self.name}={value}"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Figures of a GPU that XLA needs to compile without one, besides its memory.

    Attributes:
        cores: Streaming multiprocessors.
        l2_cache: MiB.
        shared_memory: KiB in each multiprocessor; a block may use one KiB less.
        lanes: Single-precision units in each multiprocessor.
        threads: Most threads at a time in each multiprocessor.
    """

    cores: int
    capability: tuple[int, int]
    l2_cache: int
    clock_ghz: float
    shared_memory: int
    lanes: int = 128
    threads: int = 2048


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Published speeds of one JAX device; bytes/s are of one direction.

    Attributes:
        peak: FLOP/s of dense bfloat16 matmuls, or of float16 ones where a chip has no bfloat16.
            NVIDIA prints them as half of the figure with sparsity.
        memory_bandwidth: Bytes/s between the device and its own memory.
        link: Bytes/s of one torus link of a TPU; or of a GPU's links in its host together, which
            are NVLink, AMD's Infinity Fabric, or PCIe (`Chip.pcie`).
        network: Bytes/s of the network between slices or hosts.
        host: Bytes/s between the device and its host's memory.
        latency: Seconds of one hop of a collective.
        network_latency: The same, between slices or hosts.
        matrix_unit: Width of heads with which a TPU's attention is as fast as can be; narrower ones
            leave a part idle.
        products: Dtype, `int8` or `float8`, that it has → the time of a large product, relative to
            bfloat16. TPUs: cycles that libtpu 0.0.50 counts for a product of 4096 × 4096 matrices;
            GPUs: data sheets.
    """

    peak: float
    memory_bandwidth: float
    link: float
    network: float
    host: float
    latency: float = 1e-6
    network_latency: float = 10e-6
    matrix_unit: int = dataclasses.field(default=0, kw_only=True)
    products: Mapping[str, float] = dataclasses.field(
        default_factory=dict, kw_only=True, hash=False
    )

    def attention_peak(self, width: int) -> float:
        """Return the peak FLOP/s in attention with heads of this width."""
        if not self.matrix_unit:
            return self.peak
        return self.peak * min(1.0, width / self.matrix_unit)


KINDS = ("dense", "8 bits", "pipelines", "experts")
"""Kinds of steps (`Workload.kind`): dense models, with products of 16 or of 8 bits, in a pipeline,
and models with experts."""


@dataclasses.dataclass(frozen=True)
class ClosedRates:
    """Calibration of the closed forms for one kind of chip (`spmd.step_time.closed_form`).

    Fitted to published steps by `python -m benchmarks.backtest --fit`.

    Attributes:
        matmul: Share of the peak that large matmuls reach.
        half: Width at which narrow matrices halve it.
        attention: Share of the peak that attention reaches.
        passes: Passes over activations, relative to those of `_STREAM` and `_HIDDEN`.
        exposed: Share of the time of gathers and reductions that is not hidden.
        exposed_tensor: The same, of collectives over `tensor`.
        eight_bits: Share of their peak that large products of 8 bits reach, relative to `matmul`.
        experts: Speed of experts' matmuls, relative to equally narrow dense ones.
        hop: Seconds that each further host or slice adds to a collective.
        straggling: Standard deviation of the steps of slices, relative; all wait for the slowest.
        spread: Half of the range of nine predictions of ten, relative; of rows that were not
            fitted. The least is 5 %: published tables are not more exact.
        spreads: Kind of step, but dense (`KINDS`) → its own spread. Of a kind that is not there,
            nothing is published.
    """

    matmul: float = 0.75
    half: float = 300.0
    attention: float = 0.4
    passes: float = 1.0
    exposed: float = 0.5
    hop: float = 1e-5
    straggling: float = 0.07
    spread: float = 0.15
    exposed_tensor: float = 1.0
    eight_bits: float = 1.0
    experts: float = 1.0
    spreads: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def spread_of(self, kind: str) -> float | None:
        """Return the spread of a kind of step; None if it is not known."""
        if kind == "dense":
            return self.spread
        return self.spreads.get(kind)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Calibration of compiled programs of one kind of chip (`spmd.step_time.timeline`).

    Fitted to published steps by `python -m benchmarks.backtest --fit`. These are of
    other programs than ours, with other collectives.

    Attributes:
        matmul: Time of matmuls relative to the compiler's cycles.
        memory: The same, of all other operations with cycles.
        attention: Share of the peak FLOP/s that attention kernels reach, of heads as wide as a
            matrix unit.
        network: Share of the published bandwidth that collectives reach.
        straggling: Standard deviation of the steps of slices, relative; all wait for the slowest.
        spread: As for `ClosedRates`, of dense steps; that of others is not known.
    """

    matmul: float = 1.0
    memory: float = 1.0
    attention: float = 0.65
    network: float = 0.8
    straggling: float = 0.07
    spread: float = 0.1


@dataclasses.dataclass(frozen=True)
class SmallGathers:
    """All-gathers over a whole slice that XLA:TPU makes an all-reduce of (decision 0036).

    That has twice the bytes on the wire. In two steps they stay gathers.

    Attributes:
        devices: Fewest devices with which it does.
        size: Bytes of a gathered array below which it does.
    """

    devices: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloudNames:
    """Names of a TPU's slices in Google Cloud, such as `v4-32` and `tpu-v4-podslice`.

    Attributes:
        accelerator_type: Name before the number of a slice.
        cores: What the number of a name counts in each chip: TensorCores of older kinds, 1 for
            chips.
        shapes: Shapes with a name, the smallest first; of a torus of three dimensions all whole
            cubes have names, too.
        gke: Name of the accelerator in Google Kubernetes Engine; empty if it has none.
        one_host: Most chips of a slice that is a single host.
        vm_version: Software version of its virtual machines (Google Cloud's page on TPU software
            versions); empty if it has none without Kubernetes.
    """

    accelerator_type: str
    cores: int
    shapes: tuple[tuple[int, ...], ...]
    gke: str = ""
    one_host: int = 4
    vm_version: str = ""


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Queries and keys in a block of each kernel of splash attention.

    A sequence that a number does not divide gets a half of it, and so on.
    """

    output: tuple[int, int] = (512, 512)
    """Of the kernel of the output."""
    query_gradient: tuple[int, int] = (512, 512)
    key_gradient: tuple[int, int] = (512, 512)
    keys_at_once: int = 512
    """Keys that are multiplied at once."""
    all_gradients: tuple[int, int] | None = None
    """Of the one kernel of all gradients, which `spmd.layers.splash_attention` takes for the other
    two where it can; None if it never does."""


# For a v6e, blocks of MaxText's configurations of Llama (configs/tpu/v6e/llama2_7b_4096.sh of
# version 0.2.5), and of the one backward kernel of Google's recipes (tpu-recipes,
# training/trillium, Llama3.1-8B-MaxText); for a v5p the same, where they fit its on-chip memory.
_LONG_BLOCKS = SplashBlocks((1024, 512), (2048, 512), (2048, 512), all_gradients=(2048, 2048))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        kind: Name in a topology; empty for a device of another kind.
        platform: `tpu`, `cuda`, `rocm` or `cpu`.
        device_kind: Name in JAX.
        family: Words that the names of all its boards have in JAX, such as `H100`; by default
            `device_kind`.
        example: Shape of a machine, for messages; its last number is the GPUs of a host.
        memory: Bytes that a program may use on one device; None if unlimited. The compiler reserves
            0.25 to 1.25 GiB of each TPU's memory; this is what its error messages leave.
            Of a GPU, what nvidia-smi prints (of B300, GB300 and AMD's, the data sheet); JAX takes a
            share of it (`spmd.distributed.gpu_memory`).
        devices: JAX devices in one chip.
        dims: Dimensions of a slice's network; 0 for GPUs.
        max_chips: Most chips in one slice; 0 if unlimited.
        ring: Chips along a dimension whose last one is linked to the first. Of a torus of three
            dimensions, all have a multiple of it, or none wraps around; of two, those wrap around
            that have so many. 0 if none does.
        joined: GPUs that links join, over several hosts; 0 for those of one host.
        pcie: Whether the GPUs of a host have no links but PCIe.
        cloud: Names of its slices in Google Cloud; None if it has none.
        options: Of libtpu, besides a topology's name and size.
        clock: Cycles of a TPU in one second: the peak of bfloat16 by the multipliers of all matrix
            units. None if unknown.
        gpu: Figures for a GPU's compiler.
        speeds: None if no time is predicted.
        closed: Rates of the closed forms; those of its kin where nothing is published.
        compiled: Rates of compiled programs, which TPUs have.
        own: Whether it is of a user's file.
        rates_of: Kind of chip whose rates it has, as nothing is published for it; empty for its
            own. Its times are not calibrated.
        flags: XLA's flags of every step on it, besides those of its platform: asynchronous
            collectives, and tiles of matmuls.
        bfloat16: Whether it multiplies bfloat16.
        fused_attention: Whether the fused kernel of its platform compiles for it. Mosaic has no
            matmuls of bfloat16 for TPU v2 and v3 (libtpu 0.0.42), cuDNN needs an A100 or newer.
        blocks_of_32: Whether it multiplies in the format of `mxfp8`.
        small_gathers: Gathers to divide; None if there are none.
        ragged_devices: Most devices in a slice whose links allow a ragged all-to-all; 0 if all do.
        splash_blocks: Blocks of attention on a TPU.
        reads_transposed: Whether its products read an activation that was decoded transposed, so
            that its rows cannot be kept whole (decision 0041).
    """

    kind: str
    platform: str
    device_kind: str
    family: str = ""
    example: str = ""
    memory: int | None = None
    devices: int = 1
    dims: int = 0
    max_chips: int = 0
    ring: int = 0
    joined: int = 0
    pcie: bool = False
    cloud: CloudNames | None = None
    options: tuple[tuple[str, str], ...] = ()
    clock: float | None = None
    gpu: Gpu | None = None
    speeds: Hardware | None = None
    closed: ClosedRates | None = None
    compiled: Rates | None = None
    own: bool = False
    rates_of: str = ""
    flags: tuple[Flag, ...] = ()
    bfloat16: bool = True
    fused_attention: bool = True
    blocks_of_32: bool = False
    small_gathers: SmallGathers | None = None
    ragged_devices: int = 0
    splash_blocks: SplashBlocks = SplashBlocks()
    reads_transposed: bool = False

    @property
    def calibration(self) -> str:
        """Text on the rates of a chip without published steps; empty for a calibrated one."""
        notes = []
        if self.rates_of:
            notes.append(
                f"not calibrated: rates of {self.rates_of}, as for {self.kind} no step is published"
            )
        if not self.bfloat16:
            notes.append(f"{self.kind} has no bfloat16: matmuls are taken to be of float16")
        return "; ".join(notes)

    @property
    def attention_block(self) -> int:
        """Queries in a block of attention's kernel; 128 on GPUs."""
        if self.platform == "tpu":
            return self.splash_blocks.output[0]
        return 128

    @property
    def words(self) -> str:
        """Words of a JAX device's kind by which its peak is found."""
        return self.family or self.device_kind

    def target_config(self) -> str:
        """Return XLA's `GpuTargetConfig` of a GPU, as a text protocol buffer."""
        gpu = self.gpu
        speeds = self.speeds
        assert gpu is not None
        assert speeds is not None
        major, minor = gpu.capability
        shared = gpu.shared_memory * 1024
        bandwidth = int(speeds.memory_bandwidth)
        cudnn = "dnn_version_info { major: 9 minor: 10 }"
        # All capabilities from 7.0 to 10.3 have the same limits of registers and blocks.
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads}
                registers_per_core_limit: 65536 registers_per_block_limit: 65536
                shared_memory_per_block: {48 * 1024} shared_memory_per_core: {shared}
                shared_memory_per_block_optin: {(gpu.shared_memory - 1) * 1024}
                block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
                thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
                core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock_ghz}
                memory_bandwidth: {bandwidth} device_memory_size: {self.memory}
                l2_cache_size: {gpu.l2_cache * 2**20}
                cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA" {cudnn} device_description_str: "{self.device_kind}"
        """


_GATHERS = (
    "a SparseCore gathers parameters, along one dimension of the torus or several, "
    "during the matmuls"
)
_SCATTERS = (
    "a SparseCore reduce-scatters gradients during the matmuls; in a 3D torus over whole slices too"
)
_SPARSE_CORE = (
    Flag("xla_tpu_enable_sparse_core_collective_offload_all_gather", True, _GATHERS),
    Flag("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", True, _GATHERS),
    Flag("xla_tpu_enable_sparse_core_collective_offload_3d_all_gather", True, _GATHERS),
    Flag("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", True, _SCATTERS),
    Flag("xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter", True, _SCATTERS),
)
_FUSION = Flag(
    "xla_tpu_enable_async_collective_fusion",
    True,
    "async collective fusion: all-gathers of parameters run during the matmuls of the layer before",
)
_WINDOWED = Flag(
    "xla_jf_spmd_threshold_for_windowed_einsum_mib",
    1_000_000,
    "does not cut the matmuls of tensor parallelism into parts: "
    "the cut ones wait for each part's transfer",
)


def _on_chip(mib: int) -> Flag:
    return Flag(
        "xla_tpu_scoped_vmem_limit_kib",
        1024 * mib,
        "matmuls have this much on-chip memory: larger tiles, longer compilation (xla quick leaves it out)",
        lengthens=True,
    )


_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_SHAPES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

# Rates of closed forms: `python -m benchmarks.backtest --fit`.
_V4_CLOSED = ClosedRates(
    matmul=0.782,
    half=295,
    attention=0.611,
    passes=1.49,
    exposed=0.499,
    hop=1.0e-5,
    straggling=0.066,
    spread=0.12,
    exposed_tensor=0.399,
    eight_bits=0.90,
    experts=0.60,
)
# Rates of compiled programs are of few rows. A reader outside of the project found predictions of
# further rows of v5e, v5p and v6e 16.3, 8.8 and 11.3 % off on average: ranges are as wide as these
# show. Of v4 one model is compiled.
_V4_COMPILED = Rates(1.052, 1.058, 0.623, 0.922, 0.0581, spread=0.30)
_A100_CLOSED = ClosedRates(
    matmul=0.953,
    half=468,
    attention=0.446,
    passes=1.63,
    exposed=0.877,
    hop=3.0e-5,
    straggling=0.07,
    spread=0.10,
    exposed_tensor=1.0,
    eight_bits=0.90,
    experts=0.60,
)
_H100_CLOSED = ClosedRates(
    matmul=0.747,
    half=580,
    attention=0.255,
    passes=1.95,
    exposed=0.774,
    hop=3.1e-5,
    straggling=0.07,
    spread=0.10,
    exposed_tensor=0.944,
    eight_bits=1.28,
    experts=0.52,
    spreads={"8 bits": 0.39, "pipelines": 0.21, "experts": 1.51},
)

# The range of chips without published steps, whose rates are those of a chip of another family.
_UNKNOWN_SPREAD = 0.3
_LIKE_V4 = dataclasses.replace(_V4_CLOSED, spread=_UNKNOWN_SPREAD)
_LIKE_V4_COMPILED = dataclasses.replace(_V4_COMPILED, spread=_UNKNOWN_SPREAD)
_LIKE_A100 = dataclasses.replace(_A100_CLOSED, spread=_UNKNOWN_SPREAD)
_LIKE_H100 = dataclasses.replace(
    _H100_CLOSED,
    spread=_UNKNOWN_SPREAD,
    spreads={"8 bits": 0.39, "pipelines": _UNKNOWN_SPREAD, "experts": 1.51},
)
# Of these, no dense steps of 16 bits are published: they have the range of an unknown chip.
_B200_CLOSED = ClosedRates(
    matmul=0.757,
    half=578,
    attention=0.266,
    passes=1.92,
    exposed=0.787,
    hop=3.1e-5,
    straggling=0.07,
    spread=_UNKNOWN_SPREAD,
    exposed_tensor=0.954,
    eight_bits=1.29,
    experts=0.47,
    spreads={"8 bits": 0.30, "pipelines": 0.30, "experts": 1.60},
)
_B300_CLOSED = dataclasses.replace(_LIKE_H100, experts=0.59, spreads={"experts": 0.90})
_GB200_CLOSED = ClosedRates(
    matmul=0.654,
    half=608,
    attention=0.273,
    passes=1.88,
    exposed=0.729,
    hop=3.1e-5,
    straggling=0.07,
    spread=_UNKNOWN_SPREAD,
    exposed_tensor=1.036,
    eight_bits=1.11,
    experts=0.65,
    spreads={"8 bits": 0.21, "pipelines": 0.21, "experts": 0.61},
)
_GB300_CLOSED = ClosedRates(
    matmul=0.697,
    half=711,
    attention=0.351,
    passes=1.77,
    exposed=0.665,
    hop=3.1e-5,
    straggling=0.07,
    spread=_UNKNOWN_SPREAD,
    exposed_tensor=0.804,
    eight_bits=1.35,
    experts=0.79,
    spreads={"8 bits": 0.20, "pipelines": 0.34, "experts": 0.55},
)

_A100_GPU = Gpu(
    cores=108, capability=(8, 0), l2_cache=40, clock_ghz=1.41, shared_memory=164, lanes=64
)
_HOPPER_GPU = Gpu(cores=132, capability=(9, 0), l2_cache=50, clock_ghz=1.98, shared_memory=228)

_ENTRIES = (
    Chip(kind="cpu", platform="cpu", device_kind="cpu", example="8"),
    # v2, v3: Google Cloud's pages on TPU v2 and v3, and Norrie et al., "The Design Process for
    # Google's Training Chips: TPUv2 and TPUv3" (IEEE Micro, 2021): 46 and 123 TFLOP/s, 700 and 900
    # GB/s a chip, two TensorCores, four links of 496 and 656 Gbit/s. Each TensorCore is a JAX
    # device with half of the chip.
    Chip(
        kind="v2",
        platform="tpu",
        device_kind="TPU v2",
        example="16x16",
        memory=int(7.48 * _GIB),
        devices=2,
        dims=2,
        max_chips=256,
        ring=16,
        cloud=CloudNames(
            accelerator_type="v2",
            cores=2,
            shapes=((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)),
            vm_version="tpu-ubuntu2204-base",
        ),
        clock=0.7e9,
        speeds=Hardware(
            peak=46e12 / 2,
            memory_bandwidth=700e9 / 2,
            link=62e9 / 2,
            network=3.125e9,
            host=16e9,
            matrix_unit=128,
        ),
        closed=_LIKE_V4,
        compiled=_LIKE_V4_COMPILED,
        rates_of="v4",
        fused_attention=False,
    ),
    Chip(
        kind="v3",
        platform="tpu",
        device_kind="TPU v3",
        example="32x32",
        memory=int(15.48 * _GIB),
        devices=2,
        dims=2,
        max_chips=1024,
        ring=32,
        cloud=CloudNames(
            accelerator_type="v3",
            cores=2,
            shapes=(
                (2, 2),
                (4, 4),
                (4, 8),
                (8, 8),
                (8, 16),
                (16, 16),
                (16, 32),
                (32, 32),
            ),
            vm_version="tpu-ubuntu2204-base",
        ),
        clock=0.94e9,
        speeds=Hardware(
            peak=123e12 / 2,
            memory_bandwidth=900e9 / 2,
            link=82e9 / 2,
            network=3.125e9,
            host=16e9,
            matrix_unit=128,
        ),
        closed=_LIKE_V4,
        compiled=_LIKE_V4_COMPILED,
        rates_of="v4",
        fused_attention=False,
    ),
    Chip(
        kind="v4",
        platform="tpu",
        device_kind="TPU v4",
        example="4x4x4",
        memory=int(30.75 * _GIB),
        dims=3,
        max_chips=4096,
        ring=4,
        cloud=CloudNames(
            accelerator_type="v4",
            cores=2,
            shapes=_SMALL_3D,
            gke="tpu-v4-podslice",
            vm_version="tpu-ubuntu2204-base",
        ),
        options=(("chip_config_name", "megacore"),),
        clock=1.05e9,
        speeds=Hardware(
            peak=275e12,
            memory_bandwidth=1228e9,
            link=45e9,
            network=6.25e9,
            host=16e9,
            matrix_unit=128,
            products={"int8": 1.09, "float8": 1.17},
        ),
        closed=_V4_CLOSED,
        compiled=_V4_COMPILED,
    ),
    Chip(
        kind="v5e",
        platform="tpu",
        device_kind="TPU v5 lite",
        example="16x16",
        memory=int(15.75 * _GIB),
        dims=2,
        max_chips=256,
        ring=16,
        cloud=CloudNames(
            accelerator_type="v5litepod",
            cores=1,
            shapes=_SHAPES_2D,
            gke="tpu-v5-lite-podslice",
            one_host=8,
            vm_version="v2-alpha-tpuv5-lite",
        ),
        clock=1.5e9,
        speeds=Hardware(
            peak=197e12,
            memory_bandwidth=819e9,
            link=45e9,
            network=3.125e9,
            host=16e9,
            matrix_unit=128,
            products={"int8": 0.50, "float8": 1.01},
        ),
        closed=ClosedRates(
            matmul=0.954,
            half=311,
            attention=0.552,
            passes=1.52,
            exposed=0.506,
            hop=1.0e-5,
            straggling=0.065,
            spread=0.08,
            exposed_tensor=0.350,
            eight_bits=0.90,
            experts=0.60,
        ),
        compiled=Rates(1.036, 1.043, 0.649, 0.825, 0.0646, spread=0.25),
        flags=(_FUSION, _on_chip(32)),
        # On a whole pod, key and value kernels were gathered by all-reduces of zeros (decision
        # 0036).
        small_gathers=SmallGathers(devices=64, size=32 * 2**20),
        # XLA's words for larger slices: "limited ICI routing".
        ragged_devices=16,
        # Of 8B, predicted steps are 2.2 % shorter than with two kernels; with longer blocks, as in
        # MaxText's configuration for a v5e, more of them are masked in part.
        splash_blocks=SplashBlocks(all_gradients=(1024, 1024)),
    ),
    Chip(
        kind="v5p",
        platform="tpu",
        device_kind="TPU v5",
        example="4x4x8",
        memory=int(95.74 * _GIB),
        dims=3,
        max_chips=8960,
        ring=4,
        cloud=CloudNames(
            accelerator_type="v5p",
            cores=2,
            shapes=_SMALL_3D,
            gke="tpu-v5p-slice",
            vm_version="v2-alpha-tpuv5",
        ),
        clock=1.75e9,
        speeds=Hardware(
            peak=459e12,
            memory_bandwidth=2765e9,
            link=90e9,
            network=6.25e9,
            host=16e9,
            matrix_unit=128,
            products={"int8": 0.51, "float8": 1.01},
        ),
        closed=ClosedRates(
            matmul=0.889,
            half=284,
            attention=0.612,
            passes=1.50,
            exposed=0.502,
            hop=1.0e-5,
            straggling=0.071,
            spread=0.14,
            exposed_tensor=0.395,
            eight_bits=0.85,
            experts=0.79,
            spreads={"8 bits": 0.30, "experts": 0.85},
        ),
        compiled=Rates(1.104, 1.136, 0.635, 0.938, 0.0613, spread=0.20),
        flags=(*_SPARSE_CORE, _WINDOWED, _on_chip(32)),
        splash_blocks=dataclasses.replace(_LONG_BLOCKS, all_gradients=(1024, 2048)),
    ),
    Chip(
        kind="v6e",
        platform="tpu",
        device_kind="TPU v6 lite",
        example="16x16",
        memory=int(31.25 * _GIB),
        dims=2,
        max_chips=256,
        ring=16,
        cloud=CloudNames(
            accelerator_type="v6e",
            cores=1,
            shapes=_SHAPES_2D,
            gke="tpu-v6e-slice",
            one_host=8,
            vm_version="v2-alpha-tpuv6e",
        ),
        clock=1.75e9,
        speeds=Hardware(
            peak=918e12,
            memory_bandwidth=1640e9,
            link=90e9,
            network=12.5e9,
            host=32e9,
            matrix_unit=256,
            products={"int8": 0.76, "float8": 1.09},
        ),
        closed=ClosedRates(
            matmul=0.650,
            half=335,
            attention=0.780,
            passes=1.61,
            exposed=0.460,
            hop=1.0e-5,
            straggling=0.083,
            spread=0.22,
            exposed_tensor=0.40,
            eight_bits=0.90,
            experts=0.96,
            spreads={"experts": 0.30},
        ),
        compiled=Rates(1.109, 1.050, 0.682, 0.873, 0.0599, spread=0.20),
        flags=(*_SPARSE_CORE, _WINDOWED, _on_chip(64)),
        splash_blocks=_LONG_BLOCKS,
    ),
    Chip(
        kind="tpu7x",
        platform="tpu",
        device_kind="TPU7x",
        example="4x4x4",
        memory=int(94.75 * _GIB),
        # JAX has one device for each of two TensorCores, which share the chip's memory and links;
        # other TPUs are one device.
        devices=2,
        dims=3,
        max_chips=9216,
        ring=4,
        cloud=CloudNames(accelerator_type="tpu7x", cores=2, shapes=_SMALL_3D, gke="tpu7x"),
        # It is taken to have as many multipliers for each device as a v6e.
        clock=2.2e9,
        speeds=Hardware(
            peak=2307e12 / 2,
            memory_bandwidth=7380e9 / 2,
            link=90e9 / 2,
            network=12.5e9 / 2,
            host=32e9,
            # It has units of 256, too, but is as fast with heads of 128 (decision 0040).
            matrix_unit=128,
            products={"int8": 1.00, "float8": 0.46},
        ),
        closed=ClosedRates(
            matmul=0.755,
            half=301,
            attention=0.477,
            passes=1.50,
            exposed=0.501,
            hop=1.0e-5,
            straggling=0.07,
            spread=0.23,
            exposed_tensor=0.40,
            eight_bits=0.82,
            experts=0.53,
            spreads={"8 bits": 0.27, "experts": 0.77},
        ),
        compiled=Rates(1.173, 0.994, 0.638, 0.835, 0.0612, spread=0.10),
        flags=(*_SPARSE_CORE, _WINDOWED, _on_chip(60)),
        # Google's recipe of Llama 3.1 405B (tpu-recipes, training/ironwood, 8k-bf16-tpu7x-4x8x8).
        # Its backward pass is one kernel; that of gradients of queries multiplies a whole block.
        splash_blocks=SplashBlocks(
            (2048, 2048), (2048, 512), (2048, 2048), all_gradients=(2048, 2048)
        ),
        # Of blocks of 8 rows the compiler transposes, on SparseCores, the codes and the scales,
        # these expanded to the whole array in float32: temporaries of 6202 instead of 4726 million
        # bytes (decision 0041).
        reads_transposed=True,
    ),
    Chip(
        kind="a100",
        platform="cuda",
        device_kind="NVIDIA A100-SXM4-80GB",
        family="A100",
        example="16x8",
        memory=80 * _GIB,
        gpu=_A100_GPU,
        speeds=Hardware(
            peak=312e12,
            memory_bandwidth=2039e9,
            link=300e9,
            network=25e9,
            host=32e9,
            latency=5e-6,
            products={"int8": 0.5},
        ),
        closed=_A100_CLOSED,
    ),
    Chip(
        kind="h100",
        platform="cuda",
        device_kind="NVIDIA H100 80GB HBM3",
        family="H100",
        example="16x8",
        memory=81559 * _MIB,
        gpu=_HOPPER_GPU,
        speeds=Hardware(
            peak=989e12,
            memory_bandwidth=3350e9,
            link=450e9,
            network=50e9,
            host=64e9,
            latency=5e-6,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_H100_CLOSED,
    ),
    Chip(
        kind="h200",
        platform="cuda",
        device_kind="NVIDIA H200",
        family="H200",
        example="16x8",
        memory=143771 * _MIB,
        gpu=_HOPPER_GPU,
        speeds=Hardware(
            peak=989e12,
            memory_bandwidth=4800e9,
            link=450e9,
            network=50e9,
            host=64e9,
            latency=5e-6,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_H100_CLOSED,
        rates_of="h100",
    ),
    Chip(
        kind="b200",
        platform="cuda",
        device_kind="NVIDIA B200",
        family="B200",
        example="16x8",
        memory=183359 * _MIB,
        gpu=Gpu(cores=148, capability=(10, 0), l2_cache=126, clock_ghz=1.965, shared_memory=228),
        speeds=Hardware(
            peak=2250e12,
            memory_bandwidth=8000e9,
            link=900e9,
            network=50e9,
            host=64e9,
            latency=5e-6,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_B200_CLOSED,
        blocks_of_32=True,
    ),
    # NVIDIA, "A100 Tensor Core GPU" data sheet, of 2021.
    Chip(
        kind="a100-40gb",
        platform="cuda",
        device_kind="NVIDIA A100-SXM4-40GB",
        family="A100",
        example="16x8",
        memory=40960 * _MIB,
        gpu=_A100_GPU,
        speeds=Hardware(
            peak=312e12,
            memory_bandwidth=1555e9,
            link=300e9,
            network=25e9,
            host=32e9,
            latency=5e-6,
            products={"int8": 0.5},
        ),
        closed=ClosedRates(
            matmul=0.840,
            half=454,
            attention=0.471,
            passes=1.46,
            exposed=1.16,
            hop=3.0e-5,
            straggling=0.07,
            spread=0.09,
            exposed_tensor=1.0,
            eight_bits=0.90,
            experts=0.60,
        ),
    ),
    # NVIDIA, "HGX" page, of 2025; ConnectX-8 of 800 Gbit/s. Its int8 is slower than bfloat16.
    Chip(
        kind="b300",
        platform="cuda",
        device_kind="NVIDIA B300 SXM6 AC",
        family="B300",
        example="16x8",
        memory=270 * 10**9,
        gpu=Gpu(cores=148, capability=(10, 3), l2_cache=126, clock_ghz=1.92, shared_memory=228),
        speeds=Hardware(
            peak=2250e12,
            memory_bandwidth=7700e9,
            link=900e9,
            network=100e9,
            host=64e9,
            latency=5e-6,
            products={"float8": 0.5},
        ),
        closed=_B300_CLOSED,
        blocks_of_32=True,
    ),
    # NVIDIA, "GB200 NVL72" and "GB300 NVL72" pages: 72 GPUs of 18 hosts on one NVLink switch. Two
    # GPUs share the 900 GB/s (of both directions) of NVLink-C2C to a Grace CPU.
    Chip(
        kind="gb200",
        platform="cuda",
        device_kind="NVIDIA GB200",
        family="GB200",
        example="18x4",
        memory=189471 * _MIB,
        joined=72,
        gpu=Gpu(cores=152, capability=(10, 0), l2_cache=126, clock_ghz=2.06, shared_memory=228),
        speeds=Hardware(
            peak=2500e12,
            memory_bandwidth=8000e9,
            link=900e9,
            network=50e9,
            host=225e9,
            latency=5e-6,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_GB200_CLOSED,
        blocks_of_32=True,
    ),
    Chip(
        kind="gb300",
        platform="cuda",
        device_kind="NVIDIA GB300",
        family="GB300",
        example="18x4",
        memory=279 * 10**9,
        joined=72,
        gpu=Gpu(cores=152, capability=(10, 3), l2_cache=126, clock_ghz=2.06, shared_memory=228),
        speeds=Hardware(
            peak=2500e12,
            memory_bandwidth=8000e9,
            link=900e9,
            network=100e9,
            host=225e9,
            latency=5e-6,
            products={"float8": 0.5},
        ),
        closed=_GB300_CLOSED,
        blocks_of_32=True,
    ),
    # NVIDIA, "GH200 Grace Hopper Superchip" data sheet, of 96 GB HBM3; four superchips of a host
    # with 200 Gbit/s each, as in the machines of computing centres.
    Chip(
        kind="gh200",
        platform="cuda",
        device_kind="NVIDIA GH200 480GB",
        family="GH200",
        example="16x4",
        memory=97871 * _MIB,
        gpu=_HOPPER_GPU,
        speeds=Hardware(
            peak=989e12,
            memory_bandwidth=4000e9,
            link=450e9,
            network=25e9,
            host=450e9,
            latency=5e-6,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_H100_CLOSED,
        rates_of="h100",
    ),
    # NVIDIA, "L40S", "L4" and "A10 Tensor Core GPU" data sheets (A10G: AWS's page on its G5
    # machines); network of AWS's g6e.48xlarge, g6.48xlarge and g5.48xlarge, divided by 8 GPUs.
    Chip(
        kind="l40s",
        platform="cuda",
        device_kind="NVIDIA L40S",
        family="L40S",
        example="4x8",
        memory=46068 * _MIB,
        pcie=True,
        gpu=Gpu(
            cores=142,
            capability=(8, 9),
            l2_cache=96,
            clock_ghz=2.52,
            shared_memory=100,
            threads=1536,
        ),
        speeds=Hardware(
            peak=362e12,
            memory_bandwidth=864e9,
            link=32e9,
            network=6.25e9,
            host=32e9,
            latency=1e-5,
            network_latency=2e-5,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
    ),
    Chip(
        kind="l4",
        platform="cuda",
        device_kind="NVIDIA L4",
        family="L4",
        example="4x8",
        memory=23034 * _MIB,
        pcie=True,
        gpu=Gpu(
            cores=58,
            capability=(8, 9),
            l2_cache=48,
            clock_ghz=2.04,
            shared_memory=100,
            threads=1536,
        ),
        speeds=Hardware(
            peak=121e12,
            memory_bandwidth=300e9,
            link=32e9,
            network=1.56e9,
            host=32e9,
            latency=1e-5,
            network_latency=2e-5,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
    ),
    Chip(
        kind="a10g",
        platform="cuda",
        device_kind="NVIDIA A10G",
        family="A10G",
        example="4x8",
        memory=23028 * _MIB,
        pcie=True,
        gpu=Gpu(
            cores=80,
            capability=(8, 6),
            l2_cache=6,
            clock_ghz=1.71,
            shared_memory=100,
            threads=1536,
        ),
        speeds=Hardware(
            peak=70e12,
            memory_bandwidth=600e9,
            link=32e9,
            network=1.56e9,
            host=32e9,
            latency=1e-5,
            network_latency=2e-5,
            products={"int8": 0.5},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
    ),
    # NVIDIA's white papers on the Ada and GA102 architectures: matmuls that add in float32, which
    # GeForce cards do at half of their speed. Ethernet of 10 Gbit/s between workstations.
    Chip(
        kind="rtx4090",
        platform="cuda",
        device_kind="NVIDIA GeForce RTX 4090",
        family="RTX 4090",
        example="1x4",
        memory=24564 * _MIB,
        pcie=True,
        gpu=Gpu(
            cores=128,
            capability=(8, 9),
            l2_cache=72,
            clock_ghz=2.52,
            shared_memory=100,
            threads=1536,
        ),
        speeds=Hardware(
            peak=165e12,
            memory_bandwidth=1008e9,
            link=32e9,
            network=1.25e9,
            host=32e9,
            latency=1e-5,
            network_latency=3e-5,
            products={"int8": 0.25, "float8": 0.5},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
    ),
    Chip(
        kind="rtx3090",
        platform="cuda",
        device_kind="NVIDIA GeForce RTX 3090",
        family="RTX 3090",
        example="1x4",
        memory=24576 * _MIB,
        pcie=True,
        gpu=Gpu(
            cores=82,
            capability=(8, 6),
            l2_cache=6,
            clock_ghz=1.70,
            shared_memory=100,
            threads=1536,
        ),
        speeds=Hardware(
            peak=71e12,
            memory_bandwidth=936e9,
            link=32e9,
            network=1.25e9,
            host=32e9,
            latency=1e-5,
            network_latency=3e-5,
            products={"int8": 0.25},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
    ),
    # NVIDIA, "V100" and "T4" data sheets; network of AWS's p3dn.24xlarge and g4dn.metal, divided by
    # 8 GPUs. They have no bfloat16, which XLA computes in float32.
    Chip(
        kind="v100",
        platform="cuda",
        device_kind="Tesla V100-SXM2-32GB",
        family="V100",
        example="4x8",
        memory=32768 * _MIB,
        gpu=Gpu(
            cores=80, capability=(7, 0), l2_cache=6, clock_ghz=1.53, shared_memory=96, lanes=64
        ),
        speeds=Hardware(
            peak=125e12,
            memory_bandwidth=900e9,
            link=150e9,
            network=1.56e9,
            host=16e9,
            latency=5e-6,
        ),
        closed=_LIKE_A100,
        rates_of="a100",
        bfloat16=False,
        fused_attention=False,
    ),
    Chip(
        kind="t4",
        platform="cuda",
        device_kind="Tesla T4",
        family="T4",
        example="1x8",
        memory=15360 * _MIB,
        pcie=True,
        gpu=Gpu(
            cores=40,
            capability=(7, 5),
            l2_cache=4,
            clock_ghz=1.59,
            shared_memory=64,
            lanes=64,
            threads=1024,
        ),
        speeds=Hardware(
            peak=65e12,
            memory_bandwidth=320e9,
            link=16e9,
            network=1.56e9,
            host=16e9,
            latency=1e-5,
            network_latency=2e-5,
            products={"int8": 0.5},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
        bfloat16=False,
        fused_attention=False,
    ),
    # AMD, "Instinct MI250X" and "MI300X" data sheets. Each of an MI250X's two dies is a GPU here,
    # as in JAX; Infinity Fabric of 200 GB/s in the package counts as three links of 50 GB/s, as a
    # ring over a host crosses those between packages.
    Chip(
        kind="mi250x",
        platform="rocm",
        device_kind="AMD Instinct MI250X",
        family="MI250X",
        example="16x8",
        memory=64 * _GIB,
        speeds=Hardware(
            peak=191.5e12,
            memory_bandwidth=1638e9,
            link=150e9,
            network=12.5e9,
            host=36e9,
            latency=1e-5,
            network_latency=2e-5,
            products={"int8": 1.0},
        ),
        closed=_LIKE_A100,
        rates_of="a100",
    ),
    Chip(
        kind="mi300x",
        platform="rocm",
        device_kind="AMD Instinct MI300X",
        family="MI300X",
        example="16x8",
        memory=192 * _GIB,
        speeds=Hardware(
            peak=1307e12,
            memory_bandwidth=5300e9,
            link=448e9,
            network=50e9,
            host=64e9,
            latency=5e-6,
            products={"int8": 0.5, "float8": 0.5},
        ),
        closed=_LIKE_H100,
        rates_of="h100",
    ),
)
CHIPS = {chip.kind: chip for chip in _ENTRIES}
"""Kind → chip, of all that a topology can name."""

_OTHER_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
}
"""Words of a device's kind → its peak, of GPUs that no topology names."""


def chip_of(device_kind: str) -> Chip:
    """Return the chip of a JAX device; one without a name and facts for an unknown device.

    Example:
        >>> chip_of("TPU v5 lite").kind, chip_of("TPU v1").kind
        ('v5e', '')
    """
    for chip in CHIPS.values():
        if chip.device_kind == device_kind:
            return chip
    return Chip(kind="", platform="", device_kind=device_kind)


def is_board_of(chip: Chip, device_kind: str) -> bool:
    """Return whether a JAX device is a board with a chip, also of another memory or socket.

    Example:
        >>> is_board_of(CHIPS["v100"], "Tesla V100-SXM2-16GB"), is_board_of(CHIPS["v100"], "cpu")
        (True, False)
    """
    if not chip.words:
        return False
    return re.search(rf"\b{re.escape(chip.words)}\b", device_kind, re.IGNORECASE) is not None


def known_peaks() -> dict[str, float]:
    """Return the peak dense bf16 FLOP/s of one JAX device, by words of its kind."""
    peaks = dict(_OTHER_PEAKS)
    for chip in CHIPS.values():
        if chip.speeds is not None:
            peaks[chip.words] = chip.speeds.peak
    return peaks


def peak_flops(device_kind: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a device; None if it is not known, as for a CPU.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe"), peak_flops("cpu")
        (989000000000000.0, 756000000000000.0, None)
    """
    peaks = known_peaks()
    known = []
    for words in peaks:
        if re.search(rf"\b{re.escape(words)}\b", device_kind, re.IGNORECASE):
            known.append(words)
    if not known:
        return None
    most_exact = max(known, key=len)  # "H100 PCIe" before "H100"
    return peaks[most_exact]
