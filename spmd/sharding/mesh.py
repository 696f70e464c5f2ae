"""Device meshes with six named axes: one rule table serves every strategy.

Unused axes have size 1. A mesh is a plain `jax.sharding.Mesh` (or `AbstractMesh`, without devices)
with `AxisType.Auto`.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from spmd.chips import Chip, chip_of
from spmd.errors import MeshError, Problem, did_you_mean

AXES = ("pipe", "data", "fsdp", "expert", "sequence", "tensor")
"""Axes of every mesh, from the outermost (slowest network) to the innermost (fastest)."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that split the examples of a batch."""

TOKEN_AXES = (*BATCH_AXES, "sequence")
"""Axes that split the tokens of a batch."""

GATHERED_AXES = ("fsdp", "sequence")
"""Axes over which a parameter is gathered for its use; no product is split over them."""

BATCH_SPEC = P(BATCH_AXES, "sequence")
"""Spec of a `[batch, sequence]` array of tokens."""

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Size of each axis; one may be -1, for the remaining devices.

    Example:
        >>> MeshShape(data=2, fsdp=-1).resolve(8)
        MeshShape(pipe=1, data=2, fsdp=4, expert=1, sequence=1, tensor=1)
    """

    pipe: int = 1
    """Pipeline stages: splits layers."""
    data: int = 1
    """Data parallelism: splits the batch, replicates parameters."""
    fsdp: int = 1
    """Fully sharded data parallelism: splits the batch and the training state."""
    expert: int = 1
    """Expert parallelism: splits experts, and the batch elsewhere."""
    sequence: int = 1
    """Context parallelism: splits the tokens of one example, and the training state."""
    tensor: int = 1
    """Tensor parallelism: splits heads and hidden units."""

    def __post_init__(self) -> None:
        problems = []
        for axis, size in self.sizes.items():
            if size != -1 and size < 1:
                fix = "a positive number, or -1 for the remaining devices"
                problems.append(Problem(axis, f"is {size}", fix=fix))
        inferred = self._inferred
        if len(inferred) > 1:
            what = f"{' and '.join(inferred)} are both -1"
            problems.append(Problem("mesh", what, fix="give all but one a size"))
        if problems:
            raise MeshError("Invalid mesh:", problems)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def _inferred(self) -> list[str]:
        """The axes of size -1; at most one in a valid shape."""
        return [axis for axis, size in self.sizes.items() if size == -1]

    def resolve(self, devices: int) -> "MeshShape":
        """Return the shape with its -1 filled in, for exactly `devices` devices."""
        known = math.prod(size for size in self.sizes.values() if size != -1)
        if not self._inferred:
            if known != devices:
                problem = self._wrong_total(devices, known)
                raise MeshError("The mesh does not fit the devices:", [problem])
            return self
        (axis,) = self._inferred
        if devices < known or devices % known:
            problem = Problem(
                f"mesh.{axis}=-1",
                "has no whole size",
                detail=f"{devices} devices / ({self._product()} = {known}) = {devices / known:.4g}",
                fix=f"choose the other axes so that their product divides {devices}",
            )
            raise MeshError("The mesh does not fit the devices:", [problem])
        return dataclasses.replace(self, **{axis: devices // known})

    def _wrong_total(self, devices: int, known: int) -> Problem:
        """Return the problem of a shape for `known` devices on another number of them."""
        what = "too many devices"
        if devices < known:
            what = "too few devices"
        return Problem(
            "mesh",
            what,
            detail=f"{self._product()} = {known}, and there are {devices} devices",
            fix=f"change an axis, set one to -1, or use {known} devices (simulated on CPU: "
            f"spmd.simulate_devices({known}))",
        )

    def _product(self) -> str:
        """Return the product of the known sizes above 1 as text."""
        factors = []
        for axis, size in self.sizes.items():
            if size not in (1, -1):
                factors.append(f"{axis}={size}")
        return " × ".join(factors) or "1"

    def total(self) -> int | None:
        """Return the number of devices, or None if an axis is -1."""
        if self._inferred:
            return None
        return math.prod(self.sizes.values())


def make_mesh(
    *,
    devices: Sequence[jax.Device] | None = None,
    slices: Mapping[str, int] | None = None,
    **sizes: int,
) -> Mesh:
    """Make a mesh of type `AxisType.Auto` with the axes `AXES`, of all devices by default.

    Args:
        slices: Axis → its number of parts that are connected by the slow network between hosts or
            pods. With `slices={"data": 2}` and `data=4`, each slice has two data groups. Simulated
            devices of one process form any number of slices.
        **sizes: Axis → size; omitted axes have size 1, one may be -1.

    Example:
        >>> dict(make_mesh(data=2, fsdp=-1, tensor=2).shape)
        {'pipe': 1, 'data': 2, 'fsdp': 2, 'expert': 1, 'sequence': 1, 'tensor': 2}
    """
    problems = []
    for axis in (*sizes, *(slices or {})):
        if axis not in AXES:
            fix = did_you_mean(axis, AXES)
            problems.append(Problem(f"mesh axis {axis!r}", "does not exist", fix=fix))
    if problems:
        raise MeshError("Invalid mesh:", problems)
    shape = MeshShape(**sizes)
    if devices is None:
        devices = jax.devices()
    return mesh_of(shape, devices, slices)


def mesh_of(
    shape: MeshShape, devices: Sequence[jax.Device], slices: Mapping[str, int] | None = None
) -> Mesh:
    """Make a mesh from a `MeshShape`, as `make_mesh` does from keyword arguments."""
    grid = arrange_devices(shape.resolve(len(devices)), devices, slices or {})
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange_devices(
    shape: MeshShape, devices: Sequence[Any], slices: Mapping[str, int]
) -> np.ndarray:
    """Return the devices of a mesh shape without -1 as an array, one dimension for each axis.

    Args:
        devices: Devices, or descriptions of devices.
    """
    check_slices(shape, slices)
    sizes = tuple(shape.sizes.values())
    outer = _slice_counts(AXES, slices)
    inner = tuple(map(operator.floordiv, sizes, outer))
    grids = []
    for part in _split(devices, math.prod(outer)):
        if devices[0].platform == "cpu":
            grids.append(np.array(part, dtype=object).reshape(inner))
        else:  # on TPUs, neighbours are connected
            grid = mesh_utils.create_device_mesh(inner, part, allow_split_physical_axes=True)
            grids.append(grid)
    by_slice = np.stack(grids).reshape(*outer, *inner)  # [slices of each axis, axes in one slice]
    order: list[int] = []
    for axis in range(len(AXES)):
        order += [axis, axis + len(AXES)]
    return by_slice.transpose(order).reshape(sizes)  # each axis with its slices outermost


def check_slices(shape: MeshShape, slices: Mapping[str, int]) -> None:
    """Raise an error if an axis of a shape without -1 does not divide over its slices."""
    problems = []
    for axis, count in slices.items():
        where = f"slices.{axis}"
        size = shape.sizes[axis]
        if count < 1:
            problems.append(Problem(where, f"is {count}", fix="a positive number"))
        elif size % count:
            arithmetic = f"{size} / {count} = {size / count:.4g}"
            problems.append(Problem(where, f"is {count}, and mesh.{axis} is {size}", arithmetic))
    if problems:
        raise MeshError("The mesh does not fit the slow network:", problems)


def slice_numbers(sizes: Mapping[str, int], slices: Mapping[str, int]) -> np.ndarray:
    """Return the slice of each device of a mesh, in the order of `mesh.devices.flat`.

    Example:
        >>> slice_numbers({"data": 4, "fsdp": 2}, {"data": 2}).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    counts = _slice_counts(sizes, slices)
    inner = list(map(operator.floordiv, sizes.values(), counts))
    numbers = np.arange(math.prod(counts)).reshape(counts)
    return np.kron(numbers, np.ones(inner, int)).reshape(-1)


def _slice_counts(axes: Iterable[str], slices: Mapping[str, int]) -> tuple[int, ...]:
    """Return the number of slices along each axis."""
    return tuple(slices.get(axis, 1) for axis in axes)


def _split(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the devices of each of `count` slices: groups of the devices' units."""
    kind, numbers = _units(devices)
    units = sorted(set(numbers))
    is_tpu = devices[0].platform == "tpu"
    if (is_tpu and len(units) != count) or len(units) % count:
        fix = f"make the product divide {len(units)}"
        if is_tpu:
            fix = f"make the product {len(units)}"
        problem = Problem(
            "slices",
            "do not fit the devices",
            detail=f"product of slices = {count}, and the devices form {len(units)} {kind}",
            fix=f"{fix}, such as slices.data={len(units)}",
        )
        raise MeshError("The mesh does not fit the slow network:", [problem])
    slice_of = {unit: place * count // len(units) for place, unit in enumerate(units)}
    parts: list[list[Any]] = [[] for _ in range(count)]
    for device, number in zip(devices, numbers, strict=True):
        parts[slice_of[number]].append(device)
    sizes = sorted(set(map(len, parts)))
    if len(sizes) > 1:
        detail = ", ".join(map(str, sizes))
        problem = Problem("slices", "have unequal numbers of devices", detail)
        raise MeshError("The mesh does not fit the slow network:", [problem])
    return parts


def _units(devices: Sequence[Any]) -> tuple[str, list[int]]:
    """Return the kind of the units of slices, and the number of each device's unit.

    Units are TPU slices, hosts, or the simulated devices of one process, which form any number of
    slices.
    """
    platform = devices[0].platform
    slice_numbers = [getattr(device, "slice_index", None) or 0 for device in devices]
    if len(set(slice_numbers)) > 1 or platform == "tpu":
        return "slices", slice_numbers
    hosts = [device.process_index for device in devices]
    if len(set(hosts)) > 1 or platform != "cpu":
        return "hosts", hosts
    return "devices", list(range(len(devices)))


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """Return a mesh without devices, for plans made on another machine.

    Example:
        >>> abstract_mesh(MeshShape(fsdp=512, tensor=8)).size
        4096
    """
    return AbstractMesh(tuple(shape.sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform_of(device: Any) -> str:
    """Return `cpu`, `cuda`, `rocm` or `tpu`: JAX calls the GPUs of NVIDIA and of AMD `gpu`."""
    if device.platform != "gpu":
        return str(device.platform)
    version = str(getattr(device.client, "platform_version", ""))
    if "rocm" in version.lower():
        return "rocm"
    return "cuda"


def is_tpu(mesh: AnyMesh | None) -> TypeGuard[Mesh]:
    """Return whether a mesh has TPUs, also of a kind without an entry in `CHIPS`."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].device_kind.startswith("TPU")


def is_cpu(mesh: AnyMesh | None) -> bool:
    """Return whether a mesh has simulated devices."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def chip_of_mesh(mesh: AnyMesh | None) -> Chip:
    """Return the chip of a mesh's devices; one without facts for an abstract mesh."""
    if isinstance(mesh, Mesh):
        return chip_of(mesh.devices.flat[0].device_kind)
    return chip_of("")


def simulate_devices(count: int) -> None:
    """Make this process use `count` simulated CPU devices; call it before JAX starts."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        started = len(jax.local_devices(backend="cpu"))
        if started == count:
            return
        problem = Problem(
            f"simulate_devices({count})",
            f"JAX has started with {started} CPU devices",
            fix="call it before the first use of jax.devices(), jax.numpy or jax.random",
        )
        raise MeshError(
            "Devices were initialized before their number was set:", [problem]
        ) from None


def shards_of(entry: str | tuple[str, ...] | None, axes: Mapping[str, int]) -> int:
    """Return the number of shards of a dimension with this entry of a `PartitionSpec`.

    Example:
        >>> shards_of(("data", "fsdp"), {"data": 2, "fsdp": 4}), shards_of(None, {})
        (8, 1)
    """
    return math.prod(axes[axis] for axis in entry_axes(entry))


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a `PartitionSpec`.

    Example:
        >>> entry_axes("data"), entry_axes(("data", "fsdp")), entry_axes(None)
        (('data',), ('data', 'fsdp'), ())
    """
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry)


def spec_axes(entries: Iterable[Any]) -> list[str]:
    """Return the mesh axes of all entries of a spec, in order, with repetitions.

    Example:
        >>> spec_axes([("data", "fsdp"), None, "data"])
        ['data', 'fsdp', 'data']
    """
    axes: list[str] = []
    for entry in entries:
        axes += entry_axes(entry)
    return axes


def nontrivial_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return axis → size, of the axes larger than 1.

    Example:
        >>> nontrivial_axes({"data": 2, "fsdp": 1})
        {'data': 2}
    """
    found = {}
    for axis, size in sizes.items():
        if size > 1:
            found[axis] = size
    return found


def axes_text(sizes: Mapping[str, int]) -> str:
    """Return a text for the axes larger than 1.

    Example:
        >>> axes_text({"data": 2, "fsdp": 1, "tensor": 4}), axes_text({"data": 1})
        ('data=2 tensor=4', 'one device')
    """
    split = [f"{axis}={size}" for axis, size in nontrivial_axes(sizes).items()]
    return " ".join(split) or "one device"


def as_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the entry of a `PartitionSpec` for mesh axes: the inverse of `entry_axes`."""
    if not axes:
        return None
    if len(axes) == 1:
        return axes[0]
    return tuple(axes)


def without_host_memory(mesh: AnyMesh, where: str) -> list[Problem]:
    """Return a problem if devices cannot keep arrays in host memory; abstract ones can."""
    if isinstance(mesh, AbstractMesh):
        return []
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" in kinds:
        return []
    problem = Problem(
        where,
        f"{device.platform} has no memory of the kind pinned_host",
        detail=f"it has {', '.join(kinds) or 'none'}",
        fix="offload nothing",
    )
    return [problem]
