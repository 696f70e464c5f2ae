"""Global batches made of the rows of each process, and the end of all processes at one step.

    shard = spmd.process_shard(plan)
    loader = make_loader(dataset[shard.index :: shard.count])
    spmd.fit(state, step, spmd.ProcessBatches(plan, loader), steps=1000)

A process that has no further batch, or one of another size, or whose loader fails, would leave the
others waiting in the next step. So the processes tell each other about each batch before its step:
a batch is drawn one step ahead, and what is sent about it is read a step later, so that no step
waits for the message. All processes stop before the first batch that one of them lacks.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.distributed.async_gather import AsyncGather
from spmd.distributed.hosts import gather_json
from spmd.errors import DataError, MeshError, Problem, first_of
from spmd.plan.plan import ShardingPlan
from spmd.sharding.batch import BatchArray
from spmd.sharding.mesh import BATCH_AXES, AnyMesh
from spmd.training.batch import check_batch, place_batch

_READY, _ENDED, _FAILED, _OTHER = range(4)
"""States of a batch: there, past the last one, not drawn because of an error, of another size."""
_SAMPLE = 4096  # bytes of each array that are compared
_EXACT = 2**24 - 1  # integers that a float32 holds
_TITLE = "The processes cannot train on their batches:"


@dataclasses.dataclass(frozen=True)
class ProcessShard:
    """Part of each global batch that a process gives.

    Attributes:
        index: Number of the part.
        count: Parts of a batch.
        processes: Processes that hold this part; all of them give the same rows.
    """

    index: int
    count: int
    processes: tuple[int, ...]


def process_shard(plan: ShardingPlan) -> ProcessShard:
    """Return the part of each global batch for this process to give.

    Processes that are apart only along axes such as `tensor` or `pipe` hold the same rows.

    Raises:
        MeshError: Two processes hold some rows in common, and others alone.

    Example:
        >>> import spmd, optax
        >>> model = spmd.Model(lambda key: {"w": jax.numpy.ones(8)}, lambda params, x: x)
        >>> rules = spmd.Rules([("w", P("fsdp"))])
        >>> process_shard(spmd.make_plan(spmd.make_mesh(fsdp=8), rules, model, optax.sgd(1)))
        ProcessShard(index=0, count=1, processes=(0,))
    """
    holders = group_processes(_rows_of_processes(plan.mesh))
    me = jax.process_index()
    index = next(number for number, processes in enumerate(holders) if me in processes)
    return ProcessShard(index, len(holders), holders[index])


def group_processes(rows_of: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the processes of each part of a batch, in the order of the rows.

    Args:
        rows_of: Process → its rows of a batch.

    Raises:
        MeshError: Parts overlap, or are of several sizes.

    Example:
        >>> group_processes({0: (0, 1), 1: (2, 3), 2: (0, 1), 3: (2, 3)})
        [(0, 2), (1, 3)]
    """
    holders: dict[tuple[int, ...], tuple[int, ...]] = {}
    for process, rows in rows_of.items():
        holders[rows] = (*holders.get(rows, ()), process)
    all_rows = [row for rows in holders for row in rows]
    if len(set(map(len, holders))) == 1 and len(all_rows) == len(set(all_rows)):
        return [holders[rows] for rows in sorted(holders)]
    detail = "; ".join(f"process {process}: {list(rows)}" for process, rows in rows_of.items())
    what = "gives processes parts of a batch that overlap, or are of several sizes"
    fix = "process_batches=False, or a mesh whose batch axes divide over the processes"
    raise MeshError(_TITLE, [Problem("mesh", what, f"parts of {detail}", fix)])


def _rows_of_processes(mesh: AnyMesh) -> dict[int, tuple[int, ...]]:
    """Return process → the parts of a batch on its devices, of as many as the mesh makes."""
    count = 1
    for axis in BATCH_AXES:
        count *= mesh.shape[axis]
    held: dict[int, set[int]] = {}
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    slices: dict[Any, Any] = dict(sharding.devices_indices_map((count,)))
    for device, (rows,) in slices.items():
        held.setdefault(device.process_index, set()).update(range(*rows.indices(count)))
    return {process: tuple(sorted(rows)) for process, rows in sorted(held.items())}


def place_process_batch(plan: ShardingPlan, batch: Any, shard: ProcessShard) -> Any:
    """Return the global batch that has a process's rows as its part, without communication.

    An array without examples is to be the same in all processes, which JAX compares.
    """
    splits = plan.rules.batch_table.arrays(batch)
    shapes = {}
    for path, x in tree.flatten(batch).items():
        shape = list(np.shape(x))
        dim = _dim_of_rows(splits[path], x)
        if dim is not None:
            shape[dim] *= shard.count
        shapes[path] = tuple(shape)
    check_batch(plan, tree.map_with_path(lambda path, x: _abstract(x, shapes[path]), batch))

    def place(path: str, x: Any) -> Any:
        if _dim_of_rows(splits[path], x) is None:
            return x
        sharding = NamedSharding(plan.mesh, splits[path].spec)
        with jax.transfer_guard("allow"):
            return jax.make_array_from_process_local_data(sharding, np.asarray(x), shapes[path])

    return place_batch(plan, tree.map_with_path(place, batch))


def _dim_of_rows(split: BatchArray, x: Any) -> int | None:
    """Return the dimension of an array's rows; None if it is whole."""
    if split.examples is None or np.ndim(x) <= split.examples:
        return None
    return split.examples


def _own_rows(plan: ShardingPlan, batch: Any) -> dict[str, Any]:
    """Return the arrays of a batch that have rows, by their paths."""
    splits = plan.rules.batch_table.arrays(batch)
    own = {}
    for path, x in tree.flatten(batch).items():
        if _dim_of_rows(splits[path], x) is not None:
            own[path] = x
    return own


def _abstract(x: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of another shape without content; other values as they are."""
    if not isinstance(x, np.ndarray | np.generic | jax.Array):
        return x  # which is refused by its type
    return jax.ShapeDtypeStruct(shape, x.dtype)


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Batch of a process, or the reason why there is none."""

    state: int
    batch: Any = None
    digest: int = 0
    reason: str = ""
    error: Exception | None = None

    @property
    def row(self) -> tuple[int, int]:
        """Numbers that the other processes get."""
        return self.state, self.digest


class ProcessBatches(Iterator[Any]):
    """Global batches of a plan, each made of one batch of every process.

    Every process draws from it as often as the others. One batch is drawn ahead.

    Args:
        batches: Batches of this process, all of one size: NumPy arrays of the rows of its shard.
        first: Number of the first one, for messages.

    Attributes:
        end_problems: Problems with the processes that had no further batch, while others had.

    Raises:
        DataError: Sizes differ, or processes of one shard give different rows.
    """

    def __init__(self, plan: ShardingPlan, batches: Iterable[Any], first: int = 1) -> None:
        self.end_problems: tuple[Problem, ...] = ()
        self._plan = plan
        self._shard = process_shard(plan)
        self._holders = group_processes(_rows_of_processes(plan.mesh))
        self._batches = iter(batches)
        self._number = first
        self._sizes: dict[str, str] | None = None
        self._next: _Drawn | None = None
        self._is_over = False
        self._gather: AsyncGather | None = None
        if jax.process_count() > 1:
            self._gather = AsyncGather()

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        current = self._next
        if current is None:
            current = self._draw_first()
        self._next = current
        if current.state == _READY:
            self._next = self._draw(self._number + 1)
        rows = self._exchange(current)
        if rows[:, 0].any():
            self._stop(current)
        self._check_digests(rows)
        self._number += 1
        return place_process_batch(self._plan, current.batch, self._shard)

    def _exchange(self, current: _Drawn) -> np.ndarray:
        """Send what is said about the next batch, and return that about the current one."""
        assert self._next is not None
        if self._gather is None:
            return np.array([current.row])
        rows = self._gather.gather(self._next.row)
        assert rows is not None
        return rows

    def _draw_first(self) -> _Drawn:
        """Draw the first batch, and compare it with those of all processes."""
        drawn = self._draw(self._number)
        sizes = {}
        content = None
        if drawn.state == _READY:
            sizes = _sizes(drawn.batch)
            content = _content(_own_rows(self._plan, drawn.batch))
        everyone = gather_json([sizes, content])
        self._check_contents([found for _, found in everyone])
        expected = next((found for found, _ in everyone if found), sizes)
        if sizes and sizes != expected:
            reason = f"has another batch than the first process: {_difference(expected, sizes)}"
            drawn = _Drawn(_OTHER, reason=reason)
        self._sizes = expected
        if self._gather is not None:
            self._gather.gather(drawn.row)
        return drawn

    def _draw(self, number: int) -> _Drawn:
        try:
            batch = next(self._batches)
        except StopIteration:
            return _Drawn(_ENDED, reason=f"has no batch for step {number}")
        # A loader may raise anything. Its error is raised again once the others know of it.
        except Exception as error:  # noqa: BLE001
            reason = f"failed to draw the batch of step {number}"
            return _Drawn(_FAILED, reason=reason, error=error)
        own = _own_rows(self._plan, batch)
        for path, x in own.items():
            if getattr(x, "committed", False):
                reason = f"has {path or 'an array'} on the mesh, in place of its own rows in NumPy"
                return _Drawn(_OTHER, reason=reason)
        sizes = _sizes(batch)
        if self._sizes is not None and sizes != self._sizes:
            reason = f"has another batch for step {number}: {_difference(self._sizes, sizes)}"
            return _Drawn(_OTHER, reason=reason)
        digest = 0
        if len(self._shard.processes) > 1:
            digest = _digest(own, _SAMPLE)
        return _Drawn(_READY, batch, digest)

    def _stop(self, current: _Drawn) -> None:
        """End on all processes; raise their problems unless batches just ended."""
        self._is_over = True
        everyone = gather_json([current.state, current.reason])
        problems = []
        for process, (state, reason) in enumerate(everyone):
            if state != _READY:
                problems.append(Problem(f"process {process}", reason))
        if current.error is not None:
            raise current.error
        states = {state for state, _ in everyone}
        if states & {_FAILED, _OTHER}:
            fix = "batches of one size in all processes; drop the rest of an epoch"
            if _FAILED in states:
                fix = "see the error of that process"
            problems[0] = dataclasses.replace(problems[0], fix=fix)
            raise DataError(_TITLE, first_of(problems))
        if states != {_ENDED}:
            self.end_problems = tuple(problems)
        raise StopIteration

    def _check_contents(self, contents: list[int | None]) -> None:
        """Raise a `DataError` if all parts of a batch have the same rows."""
        if self._shard.count == 1 or None in contents or len(set(contents)) > 1:
            return
        self._is_over = True
        what = f"give the same rows for step {self._number}"
        detail = f"each holds another part of the batch, of {self._shard.count}"
        fix = "of shard = spmd.process_shard(plan), each its own: rows[shard.index :: shard.count]"
        raise DataError(_TITLE, [Problem("all processes", what, detail, fix)])

    def _check_digests(self, rows: np.ndarray) -> None:
        """Raise a `DataError` where processes of one part give different rows."""
        problems = []
        for index, (first, *others) in enumerate(self._holders):
            for process in others:
                if rows[process, 1] == rows[first, 1]:
                    continue
                what = f"gives other rows than process {first} for step {self._number}"
                detail = f"both hold part {index} of {len(self._holders)} of each batch"
                fix = "divide the data by spmd.process_shard(plan), not by processes"
                problems.append(Problem(f"process {process}", what, detail, fix))
        if problems:
            self._is_over = True
            raise DataError(_TITLE, first_of(problems))


def check_ended_together(batches: ProcessBatches) -> Iterator[Any]:
    """Yield all batches.

    Raises:
        DataError: A process ended before another one.
    """
    yield from batches
    if batches.end_problems:
        first, *others = batches.end_problems
        fix = "as many batches in every process; rows of weight 0 fill the last ones"
        problems = [dataclasses.replace(first, fix=fix), *others]
        raise DataError("The processes have different numbers of batches:", problems)


def _sizes(batch: Any) -> dict[str, str]:
    """Return path → type and shape of each array."""
    sizes = {}
    for path, x in tree.flatten(batch).items():
        kind = getattr(x, "dtype", type(x).__name__)
        sizes[path] = f"{kind}{list(np.shape(x))}"
    return sizes


def _difference(expected: dict[str, str], found: dict[str, str] | None) -> str:
    """Return the first difference of two tables of sizes."""
    found = found or {}
    for path in [*expected, *found]:
        if expected.get(path) != found.get(path):
            here = found.get(path, "missing")
            return f"{path or 'it'} is {here}, and was {expected.get(path, 'missing')}"
    return "nothing differs"


def _content(own: Mapping[str, Any]) -> int | None:
    """Return a checksum of arrays; None if their rows are all the same, as in a benchmark."""
    for x in own.values():
        rows = np.asarray(x)
        if (rows != rows[:1]).any():
            return _digest(own, None)
    return None


def _digest(own: Mapping[str, Any], most: int | None) -> int:
    """Return a checksum of the first bytes of each array: other rows begin otherwise."""
    checksum = 0
    for x in own.values():
        flat = np.asarray(x).reshape(-1)
        if most is not None:
            flat = flat[: max(most // flat.itemsize, 1)]
        checksum = zlib.crc32(np.ascontiguousarray(flat).tobytes(), checksum)
    return checksum & _EXACT
