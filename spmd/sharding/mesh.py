"""Named device meshes: six axes, always all of them, size 1 where unused.

One rule table serves every strategy because every mesh has the same axes. They are ordered from the outermost
(slowest network) to the innermost (fastest):

| axis | what it splits |
|---|---|
| `pipe` | layers, into pipeline stages |
| `data` | the batch; parameters are replicated |
| `fsdp` | the batch, and parameters, gradients and optimizer state |
| `expert` | experts, and the batch outside the expert layers |
| `sequence` | the tokens of one example |
| `tensor` | heads and hidden units |

A mesh is a plain `jax.sharding.Mesh` (or `AbstractMesh`, where there are no devices) with `AxisType.Auto`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import MeshError, Problem, did_you_mean

AXES = ("pipe", "data", "fsdp", "expert", "sequence", "tensor")
"""Every axis of every mesh, outermost first."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the examples of a batch."""

BATCH_SPEC = P(BATCH_AXES, "sequence")
"""How a `[batch, sequence]` array of tokens is split."""

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The size of each axis; one of them may be -1: what is left of the devices.

    Raises:
        MeshError: A size is neither -1 nor positive, or more than one is -1.

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
            Problem(f"mesh.{axis}", f"is {size}", fix="a positive number, or -1 for what is left of the devices")
            for axis, size in self.sizes.items()
            if size != -1 and size < 1
        ]
        inferred = [axis for axis, size in self.sizes.items() if size == -1]
        if len(inferred) > 1:
            problems.append(Problem("mesh", f"{' and '.join(inferred)} are both -1", fix="give all but one a size"))
        if problems:
            raise MeshError("This mesh cannot be made:", problems)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def resolve(self, devices: int) -> "MeshShape":
        """The same shape with its -1 filled in, so that it uses exactly `devices` devices.

        Raises:
            MeshError: The sizes do not multiply to `devices`.
        """
        known = math.prod(size for size in self.sizes.values() if size != -1)
        product = " × ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size not in (1, -1)) or "1"
        inferred = [axis for axis, size in self.sizes.items() if size == -1]
        if inferred:
            if devices % known or devices < known:
                raise MeshError(
                    "The mesh does not fit the devices:",
                    [
                        Problem(
                            f"mesh.{inferred[0]}=-1",
                            "has no whole size",
                            f"{devices} devices / ({product} = {known}) = {devices / known:.4g}",
                            f"choose the other axes so that their product divides {devices}",
                        )
                    ],
                )
            return dataclasses.replace(self, **{inferred[0]: devices // known})
        if known != devices:
            few = "too few" if devices < known else "too many"
            raise MeshError(
                "The mesh does not fit the devices:",
                [
                    Problem(
                        "mesh",
                        f"{few} devices",
                        f"{product} = {known}, and there are {devices} devices",
                        f"change an axis, set one to -1, or use {known} devices (simulated on CPU: --devices {known})",
                    )
                ],
            )
        return self

    def total(self) -> int | None:
        """The number of devices, or None while an axis is -1."""
        sizes = self.sizes.values()
        return None if -1 in sizes else math.prod(sizes)


def make_mesh(
    *,
    devices: Sequence[jax.Device] | None = None,
    slices: Mapping[str, int] | None = None,
    **sizes: int,
) -> Mesh:
    """A mesh over all devices with the six axes of this framework.

    Args:
        devices: The devices to use; all of them by default.
        slices: Axis → how many times that axis crosses the slow network between hosts or pods. The rest of each
            axis stays inside one slice. `slices={"data": 2}` with `data=4` puts two data groups in each slice.
            Simulated devices of one process form as many slices as are asked for.
        **sizes: Axis → size; axes left out have size 1, one may be -1.

    Returns:
        A `Mesh` with axes `AXES` of type `AxisType.Auto`.

    Raises:
        MeshError: An unknown axis, or sizes that do not multiply to the devices or the slices.

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
    """`make_mesh` from a shape that is a value already.

    Raises:
        MeshError: The sizes do not multiply to the devices or the slices.
    """
    shape = shape.resolve(len(devices))
    check_slices(shape, slices or {})
    outer = tuple((slices or {}).get(axis, 1) for axis in AXES)
    inner = tuple(size // n for size, n in zip(shape.sizes.values(), outer, strict=True))
    parts = [_arranged(inner, part) for part in _split(devices, math.prod(outer))]
    # [slices of each axis, the axes inside one slice] → each axis with its slices outermost.
    order = [dim for axis in range(len(AXES)) for dim in (axis, axis + len(AXES))]
    grid = np.stack(parts).reshape(*outer, *inner).transpose(order).reshape(tuple(shape.sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_slices(shape: MeshShape, slices: Mapping[str, int]) -> None:
    """Whether each axis divides over the slices it crosses.

    Args:
        shape: Without a -1.
        slices: Axis → how many times it crosses the slow network.

    Raises:
        MeshError: It does not.
    """
    sizes = shape.sizes
    problems = []
    for axis, count in slices.items():
        if count < 1:
            problems.append(Problem(f"slices.{axis}", f"is {count}", fix="a positive number"))
        elif sizes[axis] % count:
            arithmetic = f"{sizes[axis]} / {count} = {sizes[axis] / count:.4g}"
            problems.append(Problem(f"slices.{axis}", f"is {count}, and mesh.{axis} is {sizes[axis]}", arithmetic))
    if problems:
        raise MeshError("The mesh does not fit the slow network:", problems)


def slice_numbers(sizes: Mapping[str, int], slices: Mapping[str, int]) -> np.ndarray:
    """The slice that each device of a mesh is in, in the order of `mesh.devices.flat`.

    Args:
        sizes: Axis → size: `mesh.shape`.
        slices: Axis → how many times it crosses the slow network.

    Example:
        >>> slice_numbers({"data": 4, "fsdp": 2}, {"data": 2}).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    number = np.zeros(places.shape[1], int)
    for (axis, size), along in zip(sizes.items(), places, strict=True):
        count = slices.get(axis, 1)
        number = number * count + along // (size // count)
    return number


def _arranged(sizes: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of one slice as a grid; on a TPU neighbours in it are neighbours in the network."""
    if devices[0].platform == "cpu":
        return np.array(devices, dtype=object).reshape(sizes)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _split(devices: Sequence[jax.Device], count: int) -> list[list[jax.Device]]:
    """The devices of each of `count` slices.

    TPU slices are what the devices say. GPUs form one slice for each host, or for several in a row, and so do processes
    of simulated devices; those of a single process stand for whatever is asked.
    """
    platform, numbers = devices[0].platform, [getattr(device, "slice_index", None) or 0 for device in devices]
    what = "slices"
    if len(set(numbers)) == 1 and platform != "tpu":
        what, numbers = "hosts", [device.process_index for device in devices]
        if len(set(numbers)) == 1 and platform == "cpu":
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
    """The same mesh with no devices behind it, for plans made on another machine.

    Example:
        >>> abstract_mesh(MeshShape(fsdp=512, tensor=8)).size
        4096
    """
    return AbstractMesh(tuple(shape.sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def simulate_devices(count: int) -> None:
    """Makes this process see `count` CPU devices; call it before JAX starts.

    Raises:
        MeshError: JAX has started already with another number of devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.local_devices(backend="cpu")) != count:
            raise MeshError(
                "Devices cannot be simulated any more:",
                [
                    Problem(
                        f"simulate_devices({count})",
                        f"JAX has started with {len(jax.local_devices(backend='cpu'))} CPU devices",
                        fix="call it before the first use of jax.devices(), jax.numpy or jax.random",
                    )
                ],
            ) from None


def shards_of(entry: str | tuple[str, ...] | None, axes: Mapping[str, int]) -> int:
    """Into how many parts one entry of a `PartitionSpec` splits its dimension.

    Example:
        >>> shards_of(("data", "fsdp"), {"data": 2, "fsdp": 4}), shards_of(None, {})
        (8, 1)
    """
    return math.prod(axes[axis] for axis in entry_axes(entry))


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`.

    Example:
        >>> entry_axes("data"), entry_axes(("data", "fsdp")), entry_axes(None)
        (('data',), ('data', 'fsdp'), ())
    """
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def batch_sharding(mesh: AnyMesh, ndim: int = 2) -> NamedSharding:
    """How an array of a batch lies on `mesh`.

    Args:
        mesh: Any mesh of this framework.
        ndim: The array's dimensions: `[batch]`, or `[batch, sequence, …]`.
    """
    return NamedSharding(mesh, P(*BATCH_SPEC[:ndim]))
