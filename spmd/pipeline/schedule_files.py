"""Pipeline schedules as CSV files: one row per stage, one column per tick, in each cell a task or nothing.

```text
F0,F1,,BW0,,BW1
,F0,BW0,F1,BW1,
```

A row is an order. Columns help the reader, and errors name them; they fix no times, since a task starts when what it
needs is there. Stages and ticks count from 0.
"""

import csv
import io
from pathlib import Path

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Schedule, Task, check_schedule, parse_task
from spmd.pipeline.simulate import as_table


def read_schedule(
    path: str | Path, *, microbatches: int | None = None, chunks: int | None = None, placement: str = "loop"
) -> Schedule:
    """The schedule that a CSV file holds, named after the file.

    Args:
        path: The file, in UTF-8.
        microbatches: How many there are; without it, as many as the file names.
        chunks: Chunks of layers per stage; without it, as many as the file names.
        placement: Which stage has which part of the model, as in `Schedule`.

    Raises:
        ScheduleError: A file that cannot be read, and everything in it that is no task or keeps the schedule from being
            run, by stage and tick.
    """
    path = Path(path)
    title = f"{path} holds no schedule that can be run:"
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(title, [Problem("file", f"cannot be read: {error}")]) from error

    problems: list[Problem] = []
    cells: list[dict[int, Task]] = [{} for _ in rows]
    for stage, row in enumerate(rows):
        for tick, cell in enumerate(row):
            words = cell.split()
            try:
                tasks = [parse_task(word) for word in words]
            except ScheduleError as error:
                problems.extend(Problem(f"stage {stage}, tick {tick}", p.what, fix=p.fix) for p in error.problems)
                continue
            if len(tasks) > 1:
                arithmetic = f"{' '.join(words)}: {len(tasks)} tasks"
                problems.append(Problem(f"stage {stage}, tick {tick}", "a tick has one task", arithmetic, "move one"))
            cells[stage].update((tick, task) for task in tasks)
    named = [task for row_cells in cells for task in row_cells.values()]
    if not named:
        raise ScheduleError(title, [*problems, Problem("file", "there is no task in it")])

    try:
        schedule = Schedule(
            name=path.stem,
            microbatches=1 + max(task.microbatch for task in named) if microbatches is None else microbatches,
            chunks=1 + max(task.chunk for task in named) if chunks is None else chunks,
            orders=tuple(tuple(row_cells.values()) for row_cells in cells),
            placement=placement,
        )
    except ScheduleError as error:
        raise ScheduleError(title, [*problems, *error.problems]) from error
    problems.extend(check_schedule(schedule, [list(row_cells) for row_cells in cells]))
    if problems:
        raise ScheduleError(title, problems)
    return schedule


def to_csv(schedule: Schedule) -> str:
    """The schedule as the text of a CSV file that `read_schedule` reads, every task at its tick of `as_table`.

    Raises:
        ScheduleError: A schedule that cannot be run.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> print(to_csv(make_schedule("1f1b", stages=2, microbatches=2)), end="")
        F0,F1,,BW0,,BW1
        ,F0,BW0,F1,BW1,
    """
    return "".join(",".join(str(task or "") for task in row) + "\n" for row in as_table(schedule))
