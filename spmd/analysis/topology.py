"""Machines by name: their size and memory, and their devices to compile for without the hardware.

`v5e:16x16` is a slice of 256 TPU chips, `2xv5e:16x16` is two of them, and so is
`2xv5litepod-256`, the name in Google Cloud. `h100:16x8` is 16 hosts with 8 GPUs each, `cpu:8` is 8
simulated devices. XLA compiles for all of them on any machine, but for AMD's GPUs.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from spmd.analysis import chip_file
from spmd.chips import CHIPS, Chip, CloudNames
from spmd.distributed.initialize import gpu_memory_fraction
from spmd.distributed.native_output import compiler_log
from spmd.errors import ConfigError, MeshError, Problem

_MOST_DEVICES = 2**20  # of a kind without a limit of its own


EXTRAS = {"tpu": ("tpu", ("libtpu",)), "cuda": ("cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin"))}
"""Platform → extra of this package for its compiler, and the modules of which it installs one."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Machine by its name; does not use JAX.

    Attributes:
        shape: Chips along each dimension of a slice; or hosts, and GPUs of each; or the number of
            devices.
        slices: TPU slices, joined by the data-centre network.
        memory_fraction: Share of a GPU's memory that JAX takes, and so a program may use.
        one_host: A TPU slice is a single host, though it has more than four chips.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1
    memory_fraction: float = 1.0
    one_host: bool = False

    @property
    def kind(self) -> str:
        """Kind of chip, such as `"v5e"`."""
        return self.chip.kind

    @property
    def platform(self) -> str:
        """`"tpu"`, `"cuda"`, `"rocm"` or `"cpu"`."""
        return self.chip.platform

    @property
    def memory(self) -> int | None:
        """Usable bytes on one device; None for simulated devices."""
        if self.chip.memory is None:
            return None
        return int(self.chip.memory * self.memory_fraction)

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
        """Hosts of all slices; a TPU host has up to four chips, or eight (`one_host`)."""
        if self.platform == "tpu":
            return self.chips // math.prod(self.host_bounds)
        if len(self.shape) > 1:
            return self.shape[0]
        return 1

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of one TPU host along each of three dimensions."""
        x, y, z = (*self.shape, 1, 1)[:3]
        if self.one_host:
            return x, y, z
        return min(x, 2), min(y, 2), 1

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For x, y and z of a TPU slice, whether links lead from its last chip to its first.

        Of a 3D torus, slices of whole cubes (4 × 4 × 4 chips of v4, v5p and TPU7x) are joined in
        all dimensions, others in none; of a 2D torus, slices in a dimension that is as long as
        their pod (16 chips of v5e and v6e). Empty for other machines.
        """
        if not self.chip.dims:
            return ()
        ring = self.chip.ring
        if not ring:
            return (False,) * 3
        if self.chip.dims == 3:
            is_cubes = all(chips % ring == 0 for chips in self.shape)
            return (is_cubes,) * 3
        return tuple(chips == ring for chips in (*self.shape, 1))

    @property
    def part(self) -> str:
        """Name of the devices that fast links join: a slice, a host, or an NVLink domain."""
        if self.platform == "tpu":
            return "slice"
        if self.chip.joined:
            return "NVLink domain"
        return "host"

    @property
    def links(self) -> str:
        """Text on links that wrap around in a TPU slice, or are not those of a GPU's own host.

        libtpu 0.0.42 to 0.0.50 ignore links that wrap around for several 3D slices.
        """
        if self.chip.pcie:
            return "GPUs of a host are joined by PCIe"
        if self.chip.joined and self.hosts > 1:
            return f"NVLink joins {self.chip.joined} GPUs of several hosts"
        if not self.wrap:
            return ""
        wrapped = [axis for axis, wraps in zip("xyz", self.wrap, strict=False) if wraps]
        if not wrapped:
            return "no links wrap around"
        text = f"links wrap around in {', '.join(wrapped)}"
        if self.slices > 1 and self.chip.dims == 3:
            text += ", which the compiler does not use for several slices"
        return text

    @property
    def details(self) -> str:
        """Text on the size, for a name of Google Cloud, and on the links; empty without either."""
        notes = []
        if _CLOUD_NAME.fullmatch(self.name):
            shape = "x".join(map(str, self.shape))
            size = f"{self.chips} chips, {shape}, {self.hosts} hosts"
            if self.slices > 1:
                size = f"{self.slices} slices of {shape}, {self.chips} chips, {self.hosts} hosts"
            notes.append(size.replace(", 1 hosts", ", 1 host"))
        if self.links:
            notes.append(self.links)
        return "; ".join(notes)

    def __str__(self) -> str:
        return self.name


def example_machines() -> list[str]:
    """Return the name of one machine of each kind, simulated devices last."""
    chips = sorted(CHIPS.values(), key=lambda chip: chip.platform == "cpu")
    return list(map(_example, chips))


def parse_topology(text: str) -> Topology:
    """Parse the name of a machine.

    Names are `cpu:N`, `v5e:16x16`, `2xv5e:16x16` for two slices, `h100:16x8` for hosts × GPUs; those
    of Google Cloud, as for `cloud_slice`; and `mychip.toml:16x8` for a chip of one's own
    (`spmd.analysis.chip_file`).

    Raises:
        MeshError: Unknown chip, or no slice of that shape.
        ConfigError: The file of a chip is wrong.

    Example:
        >>> parse_topology("v5p:4x4x8").devices, parse_topology("cpu:16384").devices
        (128, 16384)
        >>> parse_topology("h100:16x8").hosts, parse_topology("2xv5e:16x16").chips
        (16, 512)
    """
    if _cloud_chip(text) is not None:
        return cloud_slice(text)
    file, _, size = text.rpartition(":")
    if file.endswith(chip_file.SUFFIX):
        text = f"{chip_file.load_chip(Path(file)).kind}:{size}"
    found = re.fullmatch(r"(?:(\d+)x)?([^:]*):?(.*)", text, re.S)
    assert found is not None  # it matches any text
    slices, kind, size = found.groups()
    kind = _kinds_of_gke().get(kind, kind)
    if kind not in CHIPS:
        raise MeshError("Invalid topology:", [_unknown_chip(text, kind)])
    chip = CHIPS[kind]
    fraction = 1.0
    if chip.platform in ("cuda", "rocm"):
        fraction = gpu_memory_fraction()
    shape = _parse_shape(text, chip, size)
    topology = Topology(text, chip, shape, int(slices or 1), fraction)
    problems = []
    if slices is not None and (chip.platform != "tpu" or topology.slices < 1):
        problems.append(_refused_slices(chip, slices, size))
    problems += _size_problems(topology)
    if problems:
        raise MeshError("Unknown topology:", problems)
    return topology


def cloud_slice(name: str, where: str = "topology") -> Topology:
    """Return the TPU slice of a name in Google Cloud (its accelerator type).

    The number counts TensorCores (v2, v3, v4, v5p, TPU7x) or chips (v5e, v6e). The shape is the one
    that Google Cloud gives by default: the most cube-like.

    Args:
        where: Name of the field or flag, for an error.

    Raises:
        MeshError: There is no slice of that name.

    Example:
        >>> found = cloud_slice("v4-32")
        >>> found.kind, found.chips, found.shape, found.hosts
        ('v4', 16, (2, 2, 4), 4)
        >>> cloud_slice("v5litepod-8").hosts, cloud_slice("2xv5litepod-64").hosts
        (1, 32)
    """
    chip = _cloud_chip(name)
    if chip is None or chip.cloud is None:
        raise MeshError("Unknown TPU slice:", [_unknown_kind(where, name)])
    match = _CLOUD_NAME.fullmatch(name)
    assert match is not None  # as it has a chip
    slices = int(match["slices"] or 1)
    named = _named_shapes(chip, chip.cloud)
    number = int(match["number"])
    if number not in named or not slices:
        nearest = sorted(named, key=lambda other: abs(math.log2(other / max(number, 1))))[:2]
        near = [f"{chip.cloud.accelerator_type}-{other}" for other in sorted(nearest)]
        raise MeshError("Unknown TPU slice:", [_unknown_slice(where, name, near)])
    shape = named[number]
    four_chips = 4
    one_host = four_chips < math.prod(shape) <= chip.cloud.one_host
    return Topology(name, chip, shape, slices, one_host=one_host)


_CLOUD_NAME = re.compile(r"(?:(?P<slices>\d+)x)?(?P<type>[^:]+)-(?P<number>\d+)")


def _cloud_chip(text: str) -> Chip | None:
    """Return the chip of a text with the form of a slice's name in Google Cloud."""
    match = _CLOUD_NAME.fullmatch(text)
    if match is None:
        return None
    for chip in CHIPS.values():
        if chip.cloud is not None and chip.cloud.accelerator_type == match["type"]:
            return chip
    return None


def _first_slices() -> list[str]:
    """Return the name of one slice of each kind in Google Cloud."""
    names = []
    for chip in CHIPS.values():
        if chip.cloud is not None:
            number = math.prod(chip.cloud.shapes[-1]) * chip.cloud.cores
            names.append(f"{chip.cloud.accelerator_type}-{number}")
    return names


def _kinds_of_gke() -> dict[str, str]:
    """Return the names of accelerators in Google Kubernetes Engine → kind of chip."""
    kinds = {}
    for chip in CHIPS.values():
        if chip.cloud is not None and chip.cloud.gke:
            kinds[chip.cloud.gke] = chip.kind
    return kinds


def _unknown_kind(where: str, name: str) -> Problem:
    what = f"is {name!r}, and Google Cloud has no such kind of TPU"
    return Problem(where, what, fix=f"such as {', '.join(_first_slices())}")


def _unknown_slice(where: str, name: str, known: list[str]) -> Problem:
    what = f"is {name!r}, and Google Cloud has no such slice"
    return Problem(where, what, fix=f"the nearest are {' and '.join(known)}")


@functools.cache
def _named_shapes(chip: Chip, cloud: CloudNames) -> dict[int, tuple[int, ...]]:
    """Return the number in a slice's name → its shape.

    Of a torus of three dimensions with whole cubes, the sizes of cubes are as equal as they can be.
    """
    shapes = list(cloud.shapes)
    if chip.dims == 3:
        cube = chip.ring**3
        for cubes in range(1, chip.max_chips // cube + 1):
            sides = _most_equal_factors(cubes)
            shapes.append(tuple(side * chip.ring for side in sides))
    return {math.prod(shape) * cloud.cores: shape for shape in shapes}


def _most_equal_factors(number: int) -> tuple[int, int, int]:
    """Return three factors, ascending, with the smallest sum.

    Example:
        >>> _most_equal_factors(78), _most_equal_factors(8)
        ((2, 3, 13), (2, 2, 2))
    """
    found = []
    for first in range(1, number + 1):
        if first**3 > number:
            break
        rest, remainder = divmod(number, first)
        if remainder:
            continue
        second = max(side for side in range(1, math.isqrt(rest) + 1) if rest % side == 0)
        if second >= first:
            found.append((first, second, rest // second))
    return min(found, key=sum)


def _unknown_chip(text: str, kind: str) -> Problem:
    fix = "such as v5e:16x16, h100:16x8, v4-32 or cpu:8"
    near = difflib.get_close_matches(kind, CHIPS, n=1, cutoff=0.5)
    if near:
        fix = f'did you mean "{near[0]}" (such as {_example(CHIPS[near[0]])})?'
    return Problem(
        "topology",
        f"is {text!r}, and there is no chip {kind!r}",
        f"known: {', '.join(CHIPS)}",
        fix,
    )


def _example(chip: Chip) -> str:
    """Return a topology of this kind of chip."""
    return f"{chip.kind}:{chip.example}"


def _parse_shape(text: str, chip: Chip, size: str) -> tuple[int, ...]:
    """Parse the size of a machine, such as `16x16`; raise `MeshError` for another form."""
    forms = {"tpu": "x".join("ABC"[: chip.dims]), "cpu": "N"}
    form = forms.get(chip.platform, "HOSTSxGPUS")
    parts = size.split("x")
    shape = tuple(int(part) for part in parts if part.isdigit() and int(part))
    if len(parts) == len(shape) == len(form.split("x")):
        return shape
    fix = f"{chip.kind}:{form}, such as {_example(chip)}"
    raise MeshError("Invalid topology:", [Problem("topology", f"is {text!r}", fix=fix)])


def _refused_slices(chip: Chip, slices: str, size: str) -> Problem:
    fix = f"{_example(chip)}, and slices over data for the network of hosts"
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
    """Return why nothing compiles for a machine, such as an extra to install; None if it does."""
    if topology.platform == "rocm":
        what = "is not possible: XLA compiles for AMD's GPUs on a machine with one"
        fix = "the memory and the time are estimated without it"
        return Problem(f"compiling for {topology}", what, fix=fix)
    if topology.platform == "cuda" and topology.chip.gpu is None:
        what = f"needs the table [gpu] in the file of {topology.kind}"
        return Problem(f"compiling for {topology}", what, fix="its fields are those of Gpu")
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


def compiler_versions() -> dict[str, str]:
    """Return the versions of JAX and of the compilers that are installed."""
    names = ["jax", "jaxlib"]
    for _, modules in EXTRAS.values():
        names += [module.replace("_", "-") for module in modules]
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
