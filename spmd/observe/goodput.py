"""Where the time of a run went, over all its restarts: goodput is the part that moved the model forward.

A run folder's `goodput.jsonl` has a line for each logged step of each session (a session is one `spmd train`; the first
in a process began with the process): how many seconds of it went where so far. A session that is killed loses what came
after its last line, so that time counts as time between sessions.
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

T = TypeVar("T")

ACTIVITIES = {
    "step": "training steps",
    "start": "start-up: Python, processes, the corpus",
    "compile": "compilation and initial parameters",
    "restore": "reading a checkpoint",
    "data": "waiting for batches",
    "evaluate": "evaluation",
    "check": "checks for silent faults",
    "checkpoint": "checkpoints, as far as training waits",
}
"""What a session spends time on."""

_FILE = "goodput.jsonl"


class Stopwatch:
    """Seconds by activity; every moment belongs to exactly one.

    Args:
        now: The clock, in seconds since the epoch.
        began: When the first activity, `start`, began; by default with the process, or now in a process that has had a
            session.

    Example:
        >>> times = iter([0.0, 3.0, 4.0, 9.0])
        >>> watch = Stopwatch(now=lambda: next(times), began=0.0)
        >>> watch.turn_to("step")
        >>> with watch.during("data"):
        ...     pass
        >>> watch.seconds["start"], watch.seconds["step"], watch.seconds["data"]
        (0.0, 3.0, 1.0)
    """

    def __init__(self, now: Callable[[], float] = time.time, began: float | None = None) -> None:
        self._now = now
        self.began = self._since = session_start() if began is None else began
        self._activity = "start"
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)

    def turn_to(self, activity: str) -> None:
        """What follows is `activity`."""
        now = self._now()
        self.seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The block is `activity`; afterwards goes on what was before."""
        before = self._activity
        self.turn_to(activity)
        try:
            yield
        finally:
            self.turn_to(before)

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The items; the time until each is there is spent on `data`."""
        iterator = iter(items)
        while True:
            with self.during("data"):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def write(self, folder: Path, step: int) -> None:
        """Appends what was spent up to now, when `step` steps have finished, to the run folder."""
        self.turn_to(self._activity)
        record = {"session": self.began, "step": step, "now": self._now(), "seconds": self.seconds}
        with (folder / _FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


_SESSIONS = itertools.count()


def session_start() -> float:
    """When the session that is being made began: the first of a process with the process, every other one now."""
    return process_start() if next(_SESSIONS) == 0 else time.time()


def process_start() -> float:
    """When this process was started, in seconds since the epoch; now, where the system does not say."""
    try:
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, in seconds of wall-clock time.

    Attributes:
        seconds: Activity → seconds; besides `ACTIVITIES` there is `rework`, steps that were taken again after a kill or
            a roll-back, and `between`, from the last line of one session to the start of the next.
        sessions: How many there were.
    """

    seconds: dict[str, float]
    sessions: int

    @property
    def total(self) -> float:
        """From the first start to the last line."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The part of the time that went into steps that count."""
        return self.seconds["step"] / self.total if self.total else 0.0

    def __str__(self) -> str:
        more = {"rework": "steps taken again", "between": "between sessions, and what kills have lost"}
        spent = {name: text for name, text in {**ACTIVITIES, **more}.items() if self.seconds[name] >= 0.05}
        lines = [
            f"goodput {self.goodput:.1%} of {self.total:,.1f} s in {self.sessions} session{'s' * (self.sessions > 1)}"
        ]
        lines += [
            f"  {self.seconds[name]:>10,.1f} s  {self.seconds[name] / self.total:>6.1%}  {text}"
            for name, text in spent.items()
        ]
        return "\n".join(lines)


def measure_goodput(folder: Path) -> Goodput:
    """The goodput of a run so far.

    Args:
        folder: The run folder.
    """
    lines = _read(folder / _FILE)
    sessions: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        sessions.setdefault(line["session"], []).append(line)
    seconds = dict.fromkeys([*ACTIVITIES, "rework", "between"], 0.0)
    ordered = [sessions[began] for began in sorted(sessions)]
    for number, session in enumerate(ordered):
        for name in ACTIVITIES:
            seconds[name] += session[-1]["seconds"].get(name, 0.0)
        if number:
            seconds["between"] += max(session[0]["session"] - ordered[number - 1][-1]["now"], 0.0)
    redone = _rework([line for session in ordered for line in session])
    seconds["step"] -= redone
    seconds["rework"] += redone
    return Goodput(seconds, len(ordered))


def _rework(lines: list[dict[str, Any]]) -> float:
    """Seconds of steps that a later line has taken again: the time from line to line is shared evenly by its steps."""
    spans: list[tuple[int, int, float]] = []
    redone = 0.0
    before: dict[str, Any] | None = None
    for line in lines:
        fresh = before is None or before["session"] != line["session"] or line["step"] < before["step"]
        if fresh:
            kept: list[tuple[int, int, float]] = []
            for first, last, spent in spans:
                undone = max(last - max(first, line["step"]), 0)
                redone += spent * undone / max(last - first, 1)
                if not undone:
                    kept.append((first, last, spent))
                elif line["step"] > first:
                    kept.append((first, line["step"], spent * (line["step"] - first) / (last - first)))
            spans = kept
        else:
            assert before is not None
            spans.append((before["step"], line["step"], line["seconds"]["step"] - before["seconds"]["step"]))
        before = line
    return redone


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines that a kill has not cut."""
    records = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"session", "step", "now", "seconds"} <= record.keys():
                records.append(record)
    return records
