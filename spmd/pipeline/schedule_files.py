"""Pipeline schedules as CSV files: a row for each stage, a column for each tick, a task or nothing in each cell.

```text
F0,F1,,BW0,,BW1
,F0,BW0,F1,BW1,
```

A row is an order. Columns are for the reader and for error messages: a task starts when its dependencies are done.
Stages and ticks count from 0.
"""

import csv
import io
from pathlib import Path

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Schedule, Task, check_schedule, parse_task
from spmd.pipeline.simulate import tick_grid


def read_schedule(path: str | Path, *, microbatches: int | None = None, chunks: int | None = None) -> Schedule:
    """Read a schedule from a CSV file (UTF-8), named after the file, with the microbatches and chunks in it by default.

    Raises:
        ScheduleError: The file cannot be read, or all its problems, by stage and tick.
    """
    path = Path(path)
    title = f"{path} is not a valid schedule:"
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(title, [Problem("file", f"cannot be read: {error}")]) from error

    problems: list[Problem] = []
    orders: list[dict[int, Task]] = [{} for _ in rows]  # tick → task
    for stage, row in enumerate(rows):
        for tick, cell in enumerate(row):
            where, words = f"stage {stage}, tick {tick}", cell.split()
            try:
                tasks = [parse_task(word) for word in words]
            except ScheduleError as error:
                problems.extend(Problem(where, p.what, fix=p.fix) for p in error.problems)
                continue
            if len(tasks) > 1:
                detail = f"{' '.join(words)}: {len(tasks)} tasks"
                problems.append(Problem(where, "a tick has one task", detail, "move one"))
            orders[stage].update((tick, task) for task in tasks)
    tasks = [task for order in orders for task in order.values()]
    if not tasks:
        raise ScheduleError(title, [*problems, Problem("file", "has no tasks")])

    try:
        schedule = Schedule(
            name=path.stem,
            microbatches=1 + max(task.microbatch for task in tasks) if microbatches is None else microbatches,
            chunks=1 + max(task.chunk for task in tasks) if chunks is None else chunks,
            orders=tuple(tuple(order.values()) for order in orders),
        )
    except ScheduleError as error:
        raise ScheduleError(title, [*problems, *error.problems]) from error
    problems.extend(check_schedule(schedule, [list(order) for order in orders]))
    if problems:
        raise ScheduleError(title, problems)
    return schedule


def to_csv(schedule: Schedule) -> str:
    """Format a schedule as a CSV file for `read_schedule`, with every task at its tick of `tick_grid`.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> print(to_csv(make_schedule("1f1b", stages=2, microbatches=2)), end="")
        F0,F1,,BW0,,BW1
        ,F0,BW0,F1,BW1,
    """
    return "".join(",".join(str(task or "") for task in row) + "\n" for row in tick_grid(schedule))
