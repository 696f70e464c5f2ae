"""Number of rows of each step's batch: a fixed one, after smaller ones in the first steps.

sizes = BatchSizes.parse(64, ("16:1000", "32:3000"))  # 16 rows before step 1000, 32 before 3000
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from spmd.errors import Problem

_STAGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
_FIX = "ROWS:STEP with more rows and a later step in each, such as 16:1000 32:3000"


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Rows of batches, the first of number 0.

    Attributes:
        last: Rows of all batches after the stages.
        stages: Rows, and the number of the first batch after them, of each stage.

    Example:
        >>> sizes = BatchSizes.parse(8, ("2:10", "4:20"))
        >>> [sizes.rows(number) for number in (0, 9, 10, 20)]
        [2, 2, 4, 8]
        >>> sizes.rows_before(21)
        68
    """

    last: int
    stages: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def parse(last: int, ramp: Sequence[str]) -> "BatchSizes":
        """Return the sizes of a ramp's rows `ROWS:STEP` without `ramp_problems`."""
        stages = []
        for row in ramp:
            rows, _, end = row.partition(":")
            stages.append((int(rows), int(end)))
        return BatchSizes(last, tuple(stages))

    def rows(self, number: int) -> int:
        """Return the rows of a batch."""
        for rows, end in self.stages:
            if number < end:
                return rows
        return self.last

    def rows_before(self, number: int) -> int:
        """Return the rows of all batches before one."""
        total = 0
        begin = 0
        for rows, end in self.stages:
            stop = min(end, number)
            total += rows * max(stop - begin, 0)
            begin = end
        return total + self.last * max(number - begin, 0)

    def steps_within(self, rows: int) -> int:
        """Return the number of first batches with at most so many rows together.

        Example:
            >>> BatchSizes(8, ((2, 10),)).steps_within(40)
            12
        """
        steps = 0
        for size, end in self.stages:
            fitting = min(rows // size, end - steps)
            steps += fitting
            rows -= fitting * size
            if steps < end:
                return steps
        return steps + rows // self.last

    def distinct(self, start: int, stop: int) -> list[int]:
        """Return the different sizes of the batches `start`, …, `stop - 1`, in their order."""
        found = []
        begin = 0
        for rows, end in (*self.stages, (self.last, stop)):
            if max(begin, start) < min(end, stop):
                found.append(rows)
            begin = end
        return found


def ramp_problems(last: int, ramp: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of a ramp: rows of another form, without growth, or not below `last`."""
    before = (0, 0)
    for index, row in enumerate(ramp):
        where = f"data.batch_ramp[{index}]"
        if not _STAGE.fullmatch(row):
            yield Problem(where, f"is {row!r}", fix=_FIX)
            continue
        rows, _, end = row.partition(":")
        stage = int(rows), int(end)
        if 0 in stage:
            yield Problem(where, f"is {row}: no sequences, or no steps", fix=_FIX)
        elif stage[0] <= before[0] or stage[1] <= before[1]:
            yield Problem(where, f"is {row}, which does not grow", fix=_FIX)
        if stage[0] >= last:
            what = f"is {row}, and data.batch is {last}"
            yield Problem(where, what, fix="fewer rows, or a larger data.batch")
        before = stage
