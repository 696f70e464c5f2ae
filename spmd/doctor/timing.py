"""Measured speeds: of each device alone, of the collectives of each mesh axis, of pairs of processes.

Every process makes every call of this module, in the same order. A collective ends when its slowest
member does, so a slow process is found by what it does alone, and a slow link by exchanges in
pairs.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.distributed.hosts import gather_json
from spmd.sharding.collectives import all_gather, psum_scatter

_ROUNDS = 7  # of which the median counts
_WIDTHS = {
    "cpu": 1024
}  # of the matrices of `time_products`: a simulated device is a part of a core
_WIDTH = 8192

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
)
"""Kinds that are measured, by their names in XLA."""


@dataclasses.dataclass(frozen=True)
class AxisTime:
    """Time of a collective over one mesh axis, in all groups of it at once.

    Attributes:
        payload: Bytes of the array that a group has together; of an all-to-all and a permutation,
            those of one device.
        seconds: Median over rounds, of the slowest process.
    """

    axis: str
    size: int
    kind: str
    payload: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PairTime:
    """Time of an exchange of equally many bytes between two processes.

    Attributes:
        payload: Bytes in each direction.
        seconds: Median over rounds, of the slower of both.
    """

    first: int
    second: int
    payload: int
    seconds: float


def time_products() -> list[list[float]]:
    """Return the seconds of a matrix product on each device: a row for each process.

    Each device works alone in its process, and all processes at the same time.
    """
    gather_json(None)  # all begin together
    times = []
    for device in jax.local_devices():
        width = _WIDTHS.get(device.platform, _WIDTH)
        dtype = jnp.bfloat16
        if device.platform == "cpu":
            dtype = jnp.float32
        matrix = jax.device_put(np.zeros((width, width), dtype), device)
        times.append(_median_seconds(jax.jit(jnp.matmul), matrix, matrix))
    rows: list[list[float]] = gather_json(times)
    return rows


def time_axes(mesh: Mesh, size: int) -> Iterator[AxisTime]:
    """Yield the time of each kind of collective over each axis of more than one device.

    Args:
        size: Bytes of the array on one device: gathered, before a reduction, or sent.
    """
    for axis, count in mesh.shape.items():
        if count == 1:
            continue
        for kind in COLLECTIVES:
            function, payload = _collective(mesh, axis, kind, size)
            seconds = max(gather_json(_median_seconds(function)))
            yield AxisTime(axis, count, kind, payload, seconds)


def _collective(mesh: Mesh, axis: str, kind: str, size: int) -> tuple[Callable[[], jax.Array], int]:
    """Return a function to run a collective over an axis, and the bytes of its payload."""
    count = mesh.shape[axis]
    rows = max(size // (4 * 128 * count), 1) * count  # of 128 float32, divisible over the axis
    ring = [(place, (place + 1) % count) for place in range(count)]

    def gather(x: jax.Array) -> jax.Array:
        return all_gather(x, mesh, axis, 0)

    def scatter(x: jax.Array) -> jax.Array:
        return psum_scatter(x, mesh, axis, 0, x.dtype)

    def reduce(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, axis)

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axis, ring)

    bodies = {
        "all-gather": gather,
        "reduce-scatter": scatter,
        "all-reduce": reduce,
        "all-to-all": exchange,
        "collective-permute": permute,
    }
    # A gather begins with a share of the array on each device, the others with a whole one.
    held = rows
    if kind != "all-gather":
        held = rows * count
    # The result of a reduction is the same on all devices of the axis, and JAX cannot see it of a
    # gather: each device's result is a part of the output's first dimension.
    body = jax.shard_map(
        bodies[kind],
        mesh=mesh,
        in_specs=P(axis),
        out_specs=P(axis),
        axis_names={axis},
        check_vma=False,
    )
    sharding = NamedSharding(mesh, P(axis))
    make = jax.jit(lambda: jnp.zeros((held, 128), jnp.float32), out_shardings=sharding)
    array = make()
    run = jax.jit(body, out_shardings=sharding)
    return (lambda: run(array)), rows * 128 * 4


def time_pairs(size: int) -> Iterator[PairTime]:
    """Yield the times of exchanges between processes.

    Their numbers differ in one binary digit, so every process is measured with ⌈log₂ n⌉ others, and
    all pairs of a round at once.

    Args:
        size: Bytes that each device sends.
    """
    processes = jax.process_count()
    by_process = _devices_by_process()
    mesh = Mesh(np.array(by_process), ("process", "device"))
    distance = 1
    while distance < processes:
        partners = _partners(processes, distance)
        seconds = gather_json(_exchange_seconds(mesh, partners, size))
        for first, second in partners:
            if first < second:
                payload = size * mesh.shape["device"]
                slower = max(seconds[first], seconds[second])
                yield PairTime(first, second, payload, slower)
        distance *= 2


def _devices_by_process() -> list[list[jax.Device]]:
    """Return as many devices of each process as the smallest one has."""
    rows: dict[int, list[jax.Device]] = {}
    for device in sorted(jax.devices(), key=lambda device: device.process_index):
        rows.setdefault(device.process_index, []).append(device)
    count = min(map(len, rows.values()))
    return [row[:count] for row in rows.values()]


def _partners(processes: int, distance: int) -> list[tuple[int, int]]:
    """Return sender and receiver of each exchange in a round.

    Example:
        >>> _partners(3, 1), _partners(3, 2)
        ([(0, 1), (1, 0)], [(0, 2), (2, 0)])
    """
    pairs = []
    for process in range(processes):
        other = process ^ distance
        if other < processes:
            pairs.append((process, other))
    return pairs


def _exchange_seconds(mesh: Mesh, partners: list[tuple[int, int]], size: int) -> float:
    """Return this process's seconds of an exchange with its partner."""
    sharding = NamedSharding(mesh, P("process", "device"))
    shape = (mesh.shape["process"], mesh.shape["device"], max(size // 4, 1))
    array = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "process", partners)

    body = jax.shard_map(exchange, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec)
    return _median_seconds(jax.jit(body), array)


def _median_seconds(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Return the median time of a compiled call."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
