"""Device meshes with six named axes, of size 1 where unused, so that one rule table serves every strategy.

A mesh is a plain `jax.sharding.Mesh` (or `AbstractMesh`, without devices) with `AxisType.Auto`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from spmd.errors import MeshError, Problem, did_you_mean

AXES = ("pipe", "data", "fsdp", "expert", "sequence", "tensor")
"""Axes of every mesh, from the outermost (slowest network) to the innermost (fastest)."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that split the examples of a batch."""

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
    """Context parallelism: splits the tokens of one example."""
    tensor: int = 1
    """Tensor parallelism: splits heads and hidden units."""

    def __post_init__(self) -> None:
        problems = [
            Problem(axis, f"is {size}", fix="a positive number, or -1 for the remaining devices")
            for axis, size in self.sizes.items()
            if size != -1 and size < 1
        ]
        if len(inferred := self._inferred) > 1:
            problems.append(Problem("mesh", f"{' and '.join(inferred)} are both -1", fix="give all but one a size"))
        if problems:
            raise MeshError("This mesh cannot be made:", problems)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def _inferred(self) -> list[str]:
        return [axis for axis, size in self.sizes.items() if size == -1]

    def resolve(self, devices: int) -> "MeshShape":
        """Return the shape with its -1 filled in, for exactly `devices` devices."""
        known = math.prod(size for size in self.sizes.values() if size != -1)
        product = " × ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size not in (1, -1)) or "1"
        if self._inferred:
            (axis,) = self._inferred
            if devices >= known and devices % known == 0:
                return dataclasses.replace(self, **{axis: devices // known})
            detail = f"{devices} devices / ({product} = {known}) = {devices / known:.4g}"
            fix = f"choose the other axes so that their product divides {devices}"
            problem = Problem(f"mesh.{axis}=-1", "has no whole size", detail, fix)
        elif known == devices:
            return self
        else:
            what, detail = "too few devices", f"{product} = {known}, and there are {devices} devices"
            fix = f"change an axis, set one to -1, or use {known} devices (simulated on CPU: --devices {known})"
            problem = Problem("mesh", what if devices < known else "too many devices", detail, fix)
        raise MeshError("The mesh does not fit the devices:", [problem])

    def total(self) -> int | None:
        """Return the number of devices, or None if an axis is -1."""
        return None if self._inferred else math.prod(self.sizes.values())


def make_mesh(
    *, devices: Sequence[jax.Device] | None = None, slices: Mapping[str, int] | None = None, **sizes: int
) -> Mesh:
    """Make a mesh of type `AxisType.Auto` with the axes `AXES`, of all devices by default.

    Args:
        slices: Axis → its number of parts that are connected by the slow network between hosts or pods. With
            `slices={"data": 2}` and `data=4`, each slice has two data groups. Simulated devices of one process form
            any number of slices.
        **sizes: Axis → size; omitted axes have size 1, one may be -1.

    Example:
        >>> dict(make_mesh(data=2, fsdp=-1, tensor=2).shape)
        {'pipe': 1, 'data': 2, 'fsdp': 2, 'expert': 1, 'sequence': 1, 'tensor': 2}
    """
    unknown = [
        Problem(f"mesh axis {axis!r}", "does not exist", fix=did_you_mean(axis, AXES))
        for axis in (*sizes, *(slices or {}))
        if axis not in AXES
    ]
    if unknown:
        raise MeshError("This mesh cannot be made:", unknown)
    return mesh_of(MeshShape(**sizes), jax.devices() if devices is None else devices, slices)


def mesh_of(shape: MeshShape, devices: Sequence[jax.Device], slices: Mapping[str, int] | None = None) -> Mesh:
    """Make a mesh from a `MeshShape`, as `make_mesh` does from keyword arguments."""
    grid = arrange_devices(shape.resolve(len(devices)), devices, slices or {})
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange_devices(shape: MeshShape, devices: Sequence[Any], slices: Mapping[str, int]) -> np.ndarray:
    """Return the devices of a mesh shape without -1, one dimension for each axis; they may be only descriptions."""
    check_slices(shape, slices)
    outer = tuple(slices.get(axis, 1) for axis in AXES)
    inner = tuple(size // n for size, n in zip(shape.sizes.values(), outer, strict=True))
    parts = _split(devices, math.prod(outer))
    if devices[0].platform == "cpu":
        grids = [np.array(part, dtype=object).reshape(inner) for part in parts]
    else:  # on TPUs, neighbours are connected
        grids = [mesh_utils.create_device_mesh(inner, part, allow_split_physical_axes=True) for part in parts]
    # [slices of each axis, the axes inside one slice] → each axis with its slices outermost.
    order = [dim for axis in range(len(AXES)) for dim in (axis, axis + len(AXES))]
    return np.stack(grids).reshape(*outer, *inner).transpose(order).reshape(tuple(shape.sizes.values()))


def check_slices(shape: MeshShape, slices: Mapping[str, int]) -> None:
    """Raise an error if an axis of a shape without -1 does not divide over the slices that it crosses."""
    sizes, problems = shape.sizes, []
    for axis, count in slices.items():
        if count < 1:
            problems.append(Problem(f"slices.{axis}", f"is {count}", fix="a positive number"))
        elif sizes[axis] % count:
            arithmetic = f"{sizes[axis]} / {count} = {sizes[axis] / count:.4g}"
            problems.append(Problem(f"slices.{axis}", f"is {count}, and mesh.{axis} is {sizes[axis]}", arithmetic))
    if problems:
        raise MeshError("The mesh does not fit the slow network:", problems)


def slice_numbers(sizes: Mapping[str, int], slices: Mapping[str, int]) -> np.ndarray:
    """Return the slice of each device of a mesh with these axis sizes, in the order of `mesh.devices.flat`.

    Example:
        >>> slice_numbers({"data": 4, "fsdp": 2}, {"data": 2}).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    counts = [slices.get(axis, 1) for axis in sizes]
    inner = [size // count for size, count in zip(sizes.values(), counts, strict=True)]
    numbers = np.arange(math.prod(counts)).reshape(counts)
    return np.kron(numbers, np.ones(inner, int)).reshape(-1)


def _split(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the devices of each of `count` slices: groups of TPU slices, of hosts, or of one process's devices."""
    platform, numbers = devices[0].platform, [getattr(device, "slice_index", None) or 0 for device in devices]
    what = "slices"
    if len(set(numbers)) == 1 and platform != "tpu":
        what, numbers = "hosts", [device.process_index for device in devices]
        if len(set(numbers)) == 1 and platform == "cpu":  # simulated devices form any number of slices
            what, numbers = "devices", list(range(len(devices)))
    units = sorted(set(numbers))
    if (platform == "tpu" and len(units) != count) or len(units) % count:
        arithmetic = f"product of slices = {count}, and the devices form {len(units)} {what}"
        fix = f"make the product {len(units)}" if platform == "tpu" else f"make the product divide {len(units)}"
        problem = Problem("slices", "do not fit the devices", arithmetic, f"{fix}, such as --slices.data {len(units)}")
        raise MeshError("The mesh does not fit the slow network:", [problem])
    part = {unit: place * count // len(units) for place, unit in enumerate(units)}
    parts = [[d for d, n in zip(devices, numbers, strict=True) if part[n] == i] for i in range(count)]
    if len(sizes := {len(part) for part in parts}) > 1:
        problem = Problem("slices", "have unequal numbers of devices", ", ".join(map(str, sorted(sizes))))
        raise MeshError("The mesh does not fit the slow network:", [problem])
    return parts


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """Return a mesh without devices, for plans made on another machine.

    Example:
        >>> abstract_mesh(MeshShape(fsdp=512, tensor=8)).size
        4096
    """
    return AbstractMesh(tuple(shape.sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def is_kind(mesh: AnyMesh | None, kind: str) -> TypeGuard[Mesh]:
    """Return whether a mesh has devices whose kind begins with these words, such as "TPU" or "TPU7x"."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].device_kind.startswith(kind)


def simulate_devices(count: int) -> None:
    """Make this process use `count` simulated CPU devices; call it before JAX starts."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if (started := len(jax.local_devices(backend="cpu"))) != count:
            what = f"JAX has started with {started} CPU devices"
            fix = "call it before the first use of jax.devices(), jax.numpy or jax.random"
            problem = Problem(f"simulate_devices({count})", what, fix=fix)
            raise MeshError("Devices cannot be simulated any more:", [problem]) from None


def shards_of(entry: str | tuple[str, ...] | None, axes: Mapping[str, int]) -> int:
    """Return the number of shards that one entry of a `PartitionSpec` splits its dimension into.

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
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def as_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the entry of a `PartitionSpec` for mesh axes: the inverse of `entry_axes`."""
    return tuple(axes) if len(axes) > 1 else axes[0] if axes else None


def without_host_memory(mesh: AnyMesh, where: str) -> list[Problem]:
    """Return a problem of a setting if devices cannot keep arrays in host memory; abstract ones can."""
    if isinstance(mesh, AbstractMesh):
        return []
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" in kinds:
        return []
    what = f"{device.platform} has no memory of the kind pinned_host"
    return [Problem(where, what, f"it has {', '.join(kinds) or 'none'}", "offload nothing")]
