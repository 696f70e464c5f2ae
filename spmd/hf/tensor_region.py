"""Regions of tensors: the rows to read for a shard, and the shard's part of them."""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from spmd.hf.family import TensorSource
from spmd.hf.safetensors import TensorReader

SKIPPED_BYTES = 64 << 10
"""Rows of other parameters between two runs of rows shorter than this are read and dropped: one
read takes less time than two."""


class Reads(NamedTuple):
    """Ranges of rows to read, one after the other, and the selection from all rows read."""

    ranges: tuple[tuple[int, int], ...]
    chosen: slice | np.ndarray = slice(None)

    @property
    def rows(self) -> int:
        """Number of rows to read."""
        return sum(stop - start for start, stop in self.ranges)

    def after(self, rows: int) -> "Reads":
        """Return the same reads below other rows."""
        ranges: list[tuple[int, int]] = []
        for start, stop in self.ranges:
            ranges.append((start + rows, stop + rows))
        return self._replace(ranges=tuple(ranges))


def plan_reads(rows: slice | np.ndarray, row_bytes: int) -> Reads:
    """Return the reads of rows at ascending positions."""
    if isinstance(rows, np.ndarray):
        return _plan_scattered(rows, row_bytes)
    step = rows.step or 1
    if step == 1:
        return Reads(((rows.start, rows.stop),))
    if row_bytes < SKIPPED_BYTES:
        return Reads(((rows.start, rows.stop),), slice(0, None, step))
    return _plan_scattered(np.arange(rows.start, rows.stop, step), row_bytes)


def _plan_scattered(positions: np.ndarray, row_bytes: int) -> Reads:
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = len(breaks) + 1
    first, last = int(positions[0]), int(positions[-1])
    if len(positions) * row_bytes < SKIPPED_BYTES * runs:
        return Reads(((first, last + 1),), positions - first)
    ranges: list[tuple[int, int]] = []
    for run in np.split(positions, breaks):
        ranges.append((int(run[0]), int(run[-1]) + 1))
    return Reads(tuple(ranges))


@dataclasses.dataclass(frozen=True)
class TensorRegion:
    """Region of one tensor for one device; full rows are read for it.

    The rows are of all shared dimensions, one after the other. `ours` is of one layer's parameter.
    """

    source: TensorSource
    tensor: TensorReader
    name: str
    ours: tuple[slice, ...]

    @property
    def key(self) -> tuple[str, int]:
        """Key of the rows to read; devices with the same key share them."""
        first, *_ = self.reads.ranges
        return self.name, first[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor."""
        return self.tensor.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a full row."""
        order = self.source.order[self.source.shared_dims + 1 :]
        return tuple(self.source.full_shape[dim] for dim in order)

    @property
    def row_bytes(self) -> int:
        """Size of a full row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def part_bytes(self) -> int:
        """Size of the device's part of one row."""
        size = self.dtype.itemsize
        for dim in self.source.order[self.source.shared_dims + 1 :]:
            size *= self.ours[dim].stop - self.ours[dim].start
        return size

    @functools.cached_property
    def reads(self) -> Reads:
        """Reads of the rows."""
        shared = self.source.shared_dims
        order, full = self.source.order, self.source.full_shape
        positions = self.source.region(self.ours)
        if not positions:
            return Reads(((0, 1),))
        before = 0
        for dim in range(shared):
            before = before * full[dim] + self.ours[dim].start
        reads = plan_reads(positions[shared], self.row_bytes)
        return reads.after(before * full[order[shared]])

    @property
    def row_count(self) -> int:
        """Number of the parameter's rows."""
        if not self.ours:
            return 1
        side = self.ours[self.source.order[self.source.shared_dims]]
        return side.stop - side.start

    @property
    def columns(self) -> tuple[slice | np.ndarray, ...]:
        """Positions of the device's part in a row."""
        return self.source.region(self.ours)[self.source.shared_dims + 1 :]

    def window(self, offset: int, count: int) -> "TensorRegion":
        """Return some of the rows."""
        ours = list(self.ours)
        if ours:
            dim = self.source.order[self.source.shared_dims]
            first = ours[dim].start + offset
            ours[dim] = slice(first, first + count)
        return dataclasses.replace(self, ours=tuple(ours))

    def read(self, buffer: np.ndarray) -> np.ndarray:
        """Read the rows into a buffer, uint8 `[bytes]`; return a view of it if possible."""
        size = math.prod(self.row_shape)
        first, *others = self.reads.ranges
        if not others:
            rows = self.tensor.rows(*first, size, buffer, self.reads.chosen)
            return rows.reshape(-1, *self.row_shape)
        used = 0
        for start, stop in self.reads.ranges:
            self.tensor.rows(start, stop, size, buffer[used:])
            used += (stop - start) * self.row_bytes
        return buffer[:used].view(self.dtype).reshape(-1, *self.row_shape)

    def without_other_parts(self, rows: np.ndarray) -> np.ndarray:
        """Return the parameter's part of full rows, of all devices."""
        if not self.ours:
            return rows
        every = tuple(slice(0, size) for size in self.source.layer_shape)
        return rows[:, *self.source.region(every)[self.source.shared_dims + 1 :]]

    def piece(self, rows: np.ndarray) -> np.ndarray:
        """Return the device's part of full rows, with the dimensions of one layer's parameter."""
        if not self.ours:
            return rows.reshape(())
        return rows[:, *self.columns].transpose(self.source.inverse_order)
