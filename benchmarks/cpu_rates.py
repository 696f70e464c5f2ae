"""Rates of simulated CPU devices from small programs: what `benchmarks.cpu_prediction` predicts with."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8

CLOCKS = {
    "wall": time.perf_counter,
    "processor": lambda: time.process_time() / (os.cpu_count() or 1),
}
"""Clocks in seconds. A busy machine's processor time, over its cores, is steadier than the time
on the wall."""

_TURNS = 32


@dataclasses.dataclass(frozen=True)
class CpuRates:
    """Rates of a machine with a number of simulated devices at work, of all together.

    Attributes:
        matmul: FLOP/s.
        bytes: Class of operations → bytes/s.
        operation: Seconds of an operation with hardly any work.
        collectives: (kind, devices of a group) → seconds of one that moves hardly anything, and
            bytes/s of one device.
        kept: Seconds of a byte of temporaries; `new` the same, where they are new memory.
    """

    matmul: float
    bytes: Mapping[str, float]
    operation: float
    collectives: Mapping[tuple[str, int], tuple[float, float]]
    kept: float
    new: float


Turn = Callable[..., Any]


class Seconds:
    """Seconds of the runs of something, by each clock."""

    def __init__(self) -> None:
        self.runs: dict[str, list[float]] = {clock: [] for clock in CLOCKS}

    def measure(self, call: Callable[[], Any]) -> Any:
        """Call something until its result is ready, and return that."""
        start = [read() for read in CLOCKS.values()]
        result = jax.block_until_ready(call())
        for before, (clock, read) in zip(start, CLOCKS.items(), strict=True):
            self.runs[clock].append(read() - before)
        return result

    def median(self, clock: str) -> float:
        """Median of all runs."""
        return statistics.median(self.runs[clock])


class Timed:
    """Program with the seconds of its runs.

    Args:
        turn: One turn of its loop, from arrays of one device to the same.
        shapes: Of these arrays.
    """

    def __init__(
        self, devices: int, turn: Turn, shapes: Sequence[Sequence[int]], turns: int = _TURNS
    ) -> None:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
        split, self.turns, self.seconds = NamedSharding(mesh, P("d")), turns, Seconds()
        random = np.random.default_rng(0)

        def body(*arrays: jax.Array) -> Any:
            # All devices begin together, as they do in a step.
            first = arrays[0] + 0 * lax.psum(arrays[0].reshape(-1)[0], "d")
            return lax.fori_loop(0, turns, lambda _, found: turn(*found), (first, *arrays[1:]))

        values = [
            0.05 * random.standard_normal((devices * shape[0], *shape[1:]), np.float32)
            for shape in shapes
        ]
        self._arrays = [jax.device_put(value, split) for value in values]
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        self._run = jax.jit(mapped).lower(*self._arrays).compile()
        jax.block_until_ready(self._run(*self._arrays))

    def run(self) -> None:
        """Run the program once."""
        self.seconds.measure(lambda: self._run(*self._arrays))

    def median(self, clock: str) -> float:
        """Median seconds of one turn."""
        return self.seconds.median(clock) / self.turns


def _exchange(kind: str, groups: list[list[int]]) -> Turn:
    """Return a turn with one collective, of an array whose payload is the turn's whole array."""
    size = len(groups[0])
    keep: dict[str, Any] = {"axis_index_groups": groups}
    return {
        "all-reduce": lambda x: (lax.psum(x, "d", **keep) / size,),
        "all-gather": lambda x: (lax.all_gather(x[: len(x) // size], "d", tiled=True, **keep),),
        "reduce-scatter": lambda x: (
            jnp.tile(lax.psum_scatter(x, "d", tiled=True, **keep) / size, size),
        ),
        "all-to-all": lambda x: (lax.all_to_all(x, "d", 0, 0, tiled=True, **keep),),
        "collective-permute": lambda x: (
            lax.ppermute(x, "d", [(a, b) for a, b in groups] + [(b, a) for a, b in groups]),
        ),
    }[kind]


_SMALL, _LARGE = 256, 65_536  # elements that a collective moves
_KEPT, _NEW = 30, 36  # MiB of temporaries
_ARRAYS = {"cached": 3 * 2**19, "memory": 3 * 2**24, "strided": 2 * 2**18, "exponential": 3 * 2**19}
"""Bytes that one turn of a program reads and writes, for each of eight devices."""


def _programs(share: int) -> dict[Any, tuple[Turn, Sequence[Sequence[int]], int]]:
    """Return the turn, the shapes and the turns of each program without collectives.

    One device has the work of all eight: `share` is 8 there, and 1 on eight devices.
    """
    wide, far = [(256 * share, 512)] * 2, [(4096 * share, 1024)] * 2
    return {
        "matmul": (lambda a, b: (a @ b, b), [(256 * share, 256), (256, 256)], _TURNS),
        "operation": (lambda a, b: (a * b + 1.5, b), [(8, 8), (8, 8)], 8 * _TURNS),
        "cached": (lambda a, b: (a * b + 1.5, b), wide, 4 * _TURNS),
        "memory": (lambda a, b: (a * b + 1.5, b), far, 2),
        "strided": (lambda a: (jnp.swapaxes(a + 1.0, 1, 2),), [(share, 256, 256)], _TURNS),
        "exponential": (lambda a, b: (jax.nn.silu(a) * b, b), wide, _TURNS),
        **{"part": _buffer(2, _KEPT // 2), "kept": _buffer(_KEPT, 1), "new": _buffer(_NEW, 1)},
    }


def _buffer(mebibytes: int, turns: int) -> tuple[Turn, Sequence[Sequence[int]], int]:
    """Return a program with a temporary array of so many MiB, written and read in each of so many turns."""
    return lambda a, b, c: (a @ b @ c, b, c), [(256 * mebibytes, 8), (8, 1024), (1024, 8)], turns


class Calibration:
    """Small programs of a number of devices, and the rates that follow from their times."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        programs = _programs(DEVICES // devices)
        self.programs = {name: Timed(devices, *program) for name, program in programs.items()}
        for kind in (
            "all-reduce",
            "all-gather",
            "reduce-scatter",
            "all-to-all",
            "collective-permute",
        ):
            for size in (2, 4, 8) if devices > 1 else ():
                if kind == "collective-permute" and size > 2:
                    continue
                groups = [list(range(first, first + size)) for first in range(0, devices, size)]
                for elements in (_SMALL, _LARGE):
                    self.programs[kind, size, elements] = Timed(
                        devices, _exchange(kind, groups), [(elements,)]
                    )

    def run(self) -> None:
        """Run each program once."""
        for program in self.programs.values():
            program.run()

    def rates(self, clock: str) -> CpuRates:
        """Return the rates by the medians of all runs."""
        median = {name: program.median(clock) for name, program in self.programs.items()}
        operation = median["operation"] / self.devices
        part, mebi = median["part"] * self.programs["part"].turns / _KEPT, self.devices * 2**20
        collectives = {}
        for kind, size in {key[:2] for key in self.programs if isinstance(key, tuple)}:
            small, large = (median[kind, size, elements] for elements in (_SMALL, _LARGE))
            collectives[kind, size] = (small, 4 * (_LARGE - _SMALL) / max(large - small, 1e-9))
        return CpuRates(
            matmul=2 * 256**3 * DEVICES / (median["matmul"] - median["operation"]),
            bytes={
                name: DEVICES * size / (median[name] - median["operation"])
                for name, size in _ARRAYS.items()
            },
            operation=operation,
            collectives=collectives,
            kept=max(0.0, median["kept"] / _KEPT - part) / mebi,
            new=max(0.0, median["new"] / _NEW - part) / mebi,
        )
