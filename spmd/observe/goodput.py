"""Goodput: the share of useful training steps in a run's time, over all restarts.

A run folder's `goodput.jsonl` has a line for each logged step of each session (one `spmd train`),
with the session's seconds by activity so far. The time of a killed session after its last line
counts as time between sessions.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spmd.observe.json_lines import count_lines, read_json_lines
from spmd.observe.line_file import LineFile

T = TypeVar("T")

ACTIVITIES = {
    "step": "training steps",
    "start": "start-up: Python, processes, the corpus",
    "compile": "compilation and initial parameters",
    "restore": "reading a checkpoint",
    "data": "waiting for batches",
    "evaluate": "evaluation",
    "check": "checks for silent data corruption",
    "checkpoint": "checkpoints, if training waits for them",
}
"""Activity → its line in the table."""

_FILE = "goodput.jsonl"
_MAX_SECONDS = 1e12


class Stopwatch:
    """Seconds by activity; every moment belongs to exactly one.

    The first begins at `began`, in seconds since the epoch; by default, now.

    Example:
        >>> times = iter([0.0, 3.0, 4.0, 9.0])
        >>> watch = Stopwatch(now=lambda: next(times), began=0.0)
        >>> watch.switch_to("step")
        >>> with watch.measure("data"):
        ...     pass
        >>> watch.seconds["start"], watch.seconds["step"], watch.seconds["data"]
        (0.0, 3.0, 1.0)
    """

    def __init__(self, now: Callable[[], float] = time.time, began: float | None = None) -> None:
        if began is None:
            began = now()
        self._now = now
        self.began = began
        self._since = began
        self._activity = "start"
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._file: tuple[Path, LineFile] | None = None

    def switch_to(self, activity: str) -> None:
        """Begin an activity, and end the one before."""
        now = self._now()
        self.seconds[self._activity] += now - self._since
        self._activity = activity
        self._since = now

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Switch to an activity for a block, and back."""
        before = self._activity
        self.switch_to(activity)
        try:
            yield
        finally:
            self.switch_to(before)

    def time_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and count the time spent waiting for each as `data`."""
        iterator = iter(batches)
        while True:
            with self.measure("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def write(self, folder: Path, step: int) -> None:
        """Append the seconds up to now, after `step` finished steps, to the run folder.

        On a full disk the line waits in memory, as `LineFile` says.
        """
        self.switch_to(self._activity)
        record = {
            "session": self.began,
            "step": step,
            "now": self._now(),
            "seconds": self.seconds,
        }
        self._lines_in(folder).write(json.dumps(record) + "\n")

    def _lines_in(self, folder: Path) -> LineFile:
        """Return the file of a folder, opened once."""
        if self._file is not None and self._file[0] == folder:
            return self._file[1]
        self.close()
        lines = LineFile(folder / _FILE)
        self._file = folder, lines
        return lines

    def close(self) -> None:
        """Close the file, if one was written."""
        if self._file is not None:
            self._file[1].close()
            self._file = None


_COMMANDS = itertools.count()


def command_start() -> float:
    """Return the start of a command: of the process for its first one, now for others."""
    if next(_COMMANDS) == 0:
        return process_start()
    return time.time()


def process_start() -> float:
    """Return the start of this process in seconds since the epoch; now, if it is not reported."""
    try:
        since_boot = float(start_ticks("self")) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
        return time.time() - age
    except (OSError, AttributeError, ValueError):
        return time.time()


def start_ticks(pid: int | str) -> str:
    """Return the start of a process in ticks since the boot; empty if it has ended.

    A zombie has ended, too: a process that nobody has waited for yet.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        after_name = line.rpartition(")")[2]  # proc(5): the name may contain spaces and brackets
        state, *rest = after_name.split()
    except (OSError, ValueError):
        return ""
    if state in "ZX":
        return ""
    return rest[18]


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Wall-clock time of a run by activity.

    Besides `ACTIVITIES`, `seconds` has `rework`, the steps repeated after a kill or a roll-back,
    and `between`, from the last line of one session to the start of the next. `damaged` is the
    number of lines that do not count.
    """

    seconds: dict[str, float]
    sessions: int
    damaged: int = 0

    @property
    def total(self) -> float:
        """Seconds from the first start to the last line."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Fraction of the time in steps, without those repeated later."""
        if not self.total:
            return 0.0
        return self.seconds["step"] / self.total

    def __str__(self) -> str:
        total = self.total
        plural = "s" * (self.sessions > 1)
        lines = [f"goodput {self.goodput:.1%} of {total:,.1f} s in {self.sessions} session{plural}"]
        activities = {
            **ACTIVITIES,
            "rework": "repeated steps",
            "between": "between sessions, and lost by kills",
        }
        for name, text in activities.items():
            seconds = self.seconds[name]
            if seconds >= 0.05:
                lines.append(f"  {seconds:>10,.1f} s  {seconds / total:>6.1%}  {text}")
        return "\n".join(lines)


def measure_goodput(folder: Path) -> Goodput:
    """Return the goodput of the run in a run folder so far."""
    sessions: dict[float, list[dict[str, Any]]] = {}
    damaged = count_lines(folder / _FILE)
    for line in read_json_lines(folder / _FILE):
        if _is_of_a_session(line):
            sessions.setdefault(line["session"], []).append(line)
            damaged -= 1
    ordered = [sessions[began] for began in sorted(sessions)]
    seconds = {}
    for name in ACTIVITIES:
        seconds[name] = sum(session[-1]["seconds"].get(name, 0.0) for session in ordered)
    rework = _rework(list(itertools.chain(*ordered)))
    seconds["step"] -= rework
    seconds["rework"] = rework
    gaps = []
    for earlier, later in itertools.pairwise(ordered):
        gap = later[0]["session"] - earlier[-1]["now"]
        gaps.append(max(gap, 0.0))
    seconds["between"] = sum(gaps)
    return Goodput(seconds, len(ordered), damaged)


def _is_of_a_session(line: dict[str, Any]) -> bool:
    """Return true for a record of `Stopwatch.write`."""
    seconds = line.get("seconds")
    if not isinstance(seconds, dict) or "step" not in seconds:
        return False
    numbers = [line.get("session"), line.get("now"), *seconds.values()]
    return all(type(number) in (int, float) and abs(number) < _MAX_SECONDS for number in numbers)


def _rework(lines: list[dict[str, Any]]) -> float:
    """Return the seconds lost in steps repeated by a later line.

    The steps between two lines share their time evenly.
    """
    spans: list[tuple[int, int, float]] = []  # first step but one, last step, seconds
    rework = 0.0
    for before, line in zip([None, *lines], lines, strict=False):
        step = line["step"]
        if before and before["session"] == line["session"] and before["step"] <= step:
            spent = line["seconds"]["step"] - before["seconds"]["step"]
            if before["step"] < step:
                spans.append((before["step"], step, spent))
        else:
            rework += _cut_spans(spans, step)
    return rework


def _cut_spans(spans: list[tuple[int, int, float]], step: int) -> float:
    """Remove the steps after `step` from spans of steps, and return their seconds."""
    removed = 0.0
    while spans and spans[-1][1] > step:
        begin, end, spent = spans.pop()
        if begin < step:
            kept = spent * (step - begin) / (end - begin)
            spans.append((begin, step, kept))
            removed -= kept
        removed += spent
    return removed
