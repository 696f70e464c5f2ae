"""Pipeline schedules as CSV files: a row for each stage, a column for each tick, a task in a cell.

```text
F0,F1,,BW0,,BW1
,F0,BW0,F1,BW1,
```

A row is an order; cells may be empty. Columns are for the reader and for error messages: a task
starts when its dependencies are done. Stages and ticks count from 0.

A schedule without a flush has the line `# flush=no`.
"""

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Schedule, Task, check_schedule, parse_task
from spmd.pipeline.schedules import is_one_f_one_b
from spmd.pipeline.simulate import tick_grid

_NO_FLUSH = "# flush=no"
"""Line of a schedule without a flush."""


def read_schedule(
    path: str | Path, *, microbatches: int | None = None, chunks: int | None = None
) -> Schedule:
    """Read a schedule from a CSV file (UTF-8), named after the file.

    By default it has the microbatches and chunks of the tasks in the file.

    Raises:
        ScheduleError: The file cannot be read, or all its problems, by stage and tick.
    """
    path = Path(path)
    title = f"{path} is not a valid schedule:"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        rows = _read_rows(lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(title, [Problem("file", f"cannot be read: {error}")]) from error

    problems = list(_comment_problems(lines))
    orders = list[tuple[Task, ...]]()
    ticks = list[list[int]]()
    for stage, row in enumerate(rows):
        order, found = _parse_row(stage, row)
        orders.append(tuple(order.values()))
        ticks.append(list(order))
        problems += found
    tasks = list(itertools.chain.from_iterable(orders))
    if not tasks:
        raise ScheduleError(title, [*problems, Problem("file", "has no tasks")])

    if microbatches is None:
        microbatches = 1 + max(task.microbatch for task in tasks)
    if chunks is None:
        chunks = 1 + max(task.chunk for task in tasks)
    try:
        has_flush = _NO_FLUSH not in lines
        schedule = Schedule(path.stem, microbatches, chunks, tuple(orders), flush=has_flush)
    except ScheduleError as error:
        raise ScheduleError(title, [*problems, *error.problems]) from error
    problems += check_schedule(schedule, ticks)
    if not schedule.flush and not is_one_f_one_b(schedule):
        what = "says that batches overlap, and the order is another than 1F1B's"
        problems.append(Problem(_NO_FLUSH, what, fix="no such line"))
    if problems:
        raise ScheduleError(title, problems)
    return schedule


def _read_rows(lines: Sequence[str]) -> list[list[str]]:
    """Return the rows of a file, without empty ones and comments."""
    tasks = [line for line in lines if not line.startswith("#")]
    return [row for row in csv.reader(tasks, strict=True) if row]


def _comment_problems(lines: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each comment with another meaning than those of `to_csv`."""
    for number, line in enumerate(lines, start=1):
        if line.startswith("#") and line != _NO_FLUSH:
            yield Problem(f"line {number}", f"{line!r} has no meaning", fix=_NO_FLUSH)


def _parse_row(stage: int, row: Sequence[str]) -> tuple[dict[int, Task], list[Problem]]:
    """Return tick → task of a stage, and the problems of its cells."""
    order = dict[int, Task]()
    problems = list[Problem]()
    for tick, cell in enumerate(row):
        where = f"stage {stage}, tick {tick}"
        words = cell.split()
        try:
            tasks = [parse_task(word) for word in words]
        except ScheduleError as error:
            for problem in error.problems:
                problems.append(Problem(where, problem.what, fix=problem.fix))
            continue
        if len(tasks) > 1:
            detail = f"{' '.join(words)}: {len(tasks)} tasks"
            problems.append(Problem(where, "a tick has one task", detail, "move one"))
        if tasks:
            order[tick] = tasks[-1]
    return order, problems


def to_csv(schedule: Schedule) -> str:
    """Format a schedule as a CSV file for `read_schedule`, every task at its tick of `tick_grid`.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> print(to_csv(make_schedule("1f1b", stages=2, microbatches=2)), end="")
        F0,F1,,BW0,,BW1
        ,F0,BW0,F1,BW1,
    """
    lines = list[str]()
    if not schedule.flush:
        lines.append(f"{_NO_FLUSH}\n")
    for row in tick_grid(schedule):
        cells = [str(task or "") for task in row]
        lines.append(",".join(cells) + "\n")
    return "".join(lines)
