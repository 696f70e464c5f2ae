"""Published speeds of one JAX device of each supported chip.

Sources: Google Cloud's pages on TPU system architecture; for one-way link and network speeds also
"How to Scale Your Model" (Austin et al., 2025), chapter 2; NVIDIA's data sheets of A100, H100,
H200, B200 (dense matmuls, NVLink, and one network card of 200 or 400 Gbit/s for each GPU).
"""

import dataclasses
from collections.abc import Mapping

from spmd.analysis.topology import CHIPS, Topology
from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import peak_flops


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Speeds of one device; bytes/s are of one direction.

    Attributes:
        peak: FLOP/s of dense bfloat16 matmuls.
        memory_bandwidth: Bytes/s between the device and its own memory.
        link: Bytes/s of one torus link of a TPU, or of a GPU's NVLinks together.
        network: Bytes/s of the network between slices or hosts.
        host: Bytes/s between the device and its host's memory.
        latency: Seconds of one hop of a collective.
        network_latency: Seconds of one hop between slices or hosts.
        matrix_unit: Least width of heads for a TPU's fastest attention; narrower heads leave a part
            of its matrix units idle. 0 for a GPU.
        products: Supported dtype, `int8` or `float8` → the time of a large product, relative to
            bfloat16.
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


_SPEEDS = {
    "v4": (1228e9, 45e9, 6.25e9, 16e9),
    "v5e": (819e9, 45e9, 3.125e9, 16e9),
    "v5p": (2765e9, 90e9, 6.25e9, 16e9),
    "v6e": (1640e9, 90e9, 12.5e9, 32e9),
    "tpu7x": (
        7380e9 / 2,
        90e9 / 2,
        12.5e9 / 2,
        32e9,
    ),  # two devices share a chip's memory and links
    "a100": (2039e9, 300e9, 25e9, 32e9, 5e-6),
    "h100": (3350e9, 450e9, 50e9, 64e9, 5e-6),
    "h200": (4800e9, 450e9, 50e9, 64e9, 5e-6),
    "b200": (8000e9, 900e9, 50e9, 64e9, 5e-6),
}
# A TPU7x has units of 256, too, but is as fast with heads of 128 (decision 0040).
_MATRIX_UNITS = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 128}
# TPUs: cycles that libtpu 0.0.50 counts for a product of 4096 × 4096 matrices; GPUs: data sheets.
_PRODUCTS = {
    "v4": {"int8": 1.09, "float8": 1.17},
    "v5e": {"int8": 0.50, "float8": 1.01},
    "v5p": {"int8": 0.51, "float8": 1.01},
    "v6e": {"int8": 0.76, "float8": 1.09},
    "tpu7x": {"int8": 1.00, "float8": 0.46},
    "a100": {"int8": 0.5},
    "h100": {"int8": 0.5, "float8": 0.5},
    "h200": {"int8": 0.5, "float8": 0.5},
    "b200": {"int8": 0.5, "float8": 0.5},
}


def _read_tables() -> dict[str, Hardware]:
    hardware = {}
    for kind, speeds in _SPEEDS.items():
        peak = peak_flops(CHIPS[kind].device_kind)
        if peak is None:
            continue
        hardware[kind] = Hardware(
            peak,
            *speeds,
            matrix_unit=_MATRIX_UNITS.get(kind, 0),
            products=_PRODUCTS[kind],
        )
    return hardware


HARDWARE = _read_tables()
"""Kind of chip → speeds."""


def hardware_of(topology: Topology) -> Hardware:
    """Return the speeds of a machine's devices; raise `ConfigError` for simulated ones."""
    if topology.kind not in HARDWARE:
        what = f"is {topology}: no speeds are known of {topology.kind}"
        problem = Problem("topology", what, fix="a TPU or a GPU, such as v5e:16x16 or h100:16x8")
        raise ConfigError("The time of a step cannot be predicted:", [problem])
    return HARDWARE[topology.kind]
