"""Attempts of a run: those without progress are counted, and end it.

A run that is preempted fifty times and gets further each time may go on; one that is killed three
times at the same step, such as for its memory, should stop, and say so. So each process of an
attempt writes its start and its end to a file of its own in the run folder, `attempts/process-N.jsonl`.
A process that was killed has no end, and the others name it.
"""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from spmd.distributed.hosts import broadcast_from_first
from spmd.distributed.liveness import call_at_loss
from spmd.errors import Problem, RestartsError, SpmdError, StorageError

ATTEMPTS = "attempts"
_SHOWN = 3
_FINISHED = "finished"
_FINAL = "final: "
"""Beginning of an end after which nothing starts the run again, except for a user."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Past attempt of a run, from the files of its processes.

    Attributes:
        checkpoint: Newest checkpoint when it began; None if there was none.
        hosts: Process → its host.
        ends: Process → its end in words; a killed process has none.
        gone: Process that was gone first, as another one named it; empty if none did.
    """

    number: int
    checkpoint: int | None
    hosts: Mapping[int, str]
    ends: Mapping[int, str]
    gone: str

    @property
    def is_final(self) -> bool:
        """Whether all processes finished, or ended with an error for good.

        Nothing starts the run again. Where only some did, Slurm starts it again: the others end
        with another code.
        """
        if set(self.ends.values()) == {_FINISHED}:
            return True
        return self.hosts.keys() == self._errors.keys()

    @property
    def _errors(self) -> dict[int, str]:
        """Process → its error for good."""
        found = {}
        for process, end in self.ends.items():
            if end.startswith(_FINAL):
                found[process] = end.removeprefix(_FINAL)
        return found

    def __str__(self) -> str:
        killed = sorted(self.hosts.keys() - self.ends.keys())
        if self._errors:
            process, error = min(self._errors.items())
            return f"process {process} on {self.hosts[process]} failed: {error}"
        if self.gone:
            return f"{self.gone} was gone first"
        if killed and self.ends:
            first = killed[0]
            return f"process {first} on {self.hosts[first]} was gone first"
        if killed:
            return "ended without a word: killed, such as for its memory, hung, or its machine was lost"
        return min(self.ends.items())[1]


class CurrentAttempt(contextlib.AbstractContextManager["CurrentAttempt"]):
    """Attempt of a run, as a `with` block from before the processes are connected.

    So a start that fails counts, too, such as one on a TPU that another process holds. Process 0
    counts and records at the beginning, the others once they are connected (`share`).

    Args:
        folder: Run folder.
        checkpoint: Step of the newest checkpoint, or state in memory, as process 0 sees it.
        most: Attempts in a row without a newer checkpoint, after which a further one is refused; 0
            for any number, without a record.
        is_first: This is process 0.
        upload: Called after each line that was written; the folder may be that of a bucket.

    Raises:
        RestartsError: On entering, so many attempts got no further.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: int | None,
        most: int,
        is_first: bool,
        upload: Callable[[], object] = lambda: None,
    ) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._most = most
        self._is_first = is_first
        self._upload = upload
        self._before = ""
        self._record: _Record | None = None
        self._end = "ended"
        self._at_loss = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._most and self._is_first:
            number, self._before = _count(self._folder, self._checkpoint, self._most)
            self._start(0, number, checkpoint=self._checkpoint)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._end = _end_of(error)
        self._at_loss.close()
        self._write(end=self._end)

    def share(self) -> str:
        """Record the attempt of the other processes; return a sentence about the one before.

        Every process makes this call once all are connected. The sentence is empty for the first.
        """
        if not self._most:
            return ""
        number = 0
        if self._record is not None:
            number = self._record.attempt
        shared = broadcast_from_first(lambda: [number, self._before])
        if self._record is None:
            self._start(jax.process_index(), shared[0])
        return str(shared[1])

    def finish(self) -> None:
        """Mark the run as finished: nothing has to get further."""
        self._end = _FINISHED

    def _start(self, process: int, number: int, **values: Any) -> None:
        self._record = _Record(self._folder, process, number)
        self._write(host=socket.gethostname(), **values)
        # Without an upload: the other processes wait for this one's word.
        self._at_loss.enter_context(call_at_loss(lambda gone: self._record_line(gone=gone)))

    def _record_line(self, **values: Any) -> None:
        if self._record is not None:
            self._record.write(**values)

    def _write(self, **values: Any) -> None:
        self._record_line(**values)
        if self._record is not None:
            with contextlib.suppress(StorageError, OSError):  # as a full disk
                self._upload()


def _count(folder: Path, checkpoint: int | None, most: int) -> tuple[int, str]:
    """Return the number of a new attempt, and a sentence about the last one.

    Raises:
        RestartsError: The last attempts got no further, or the records cannot be read.
    """
    try:
        attempts = read_attempts(folder)
    except OSError as error:
        what = "cannot be read"
        problem = Problem(str(folder / ATTEMPTS), what, error.strerror or str(error))
        raise RestartsError("Restarts cannot be counted:", [problem]) from error
    if not attempts:
        return 1, ""
    number = attempts[-1].number + 1
    problems = _problems(folder, attempts, checkpoint, most)
    if problems:  # a user who starts the run again has looked at the cause
        record = _Record(folder, 0, number)
        record.write(checkpoint=checkpoint, host=socket.gethostname())
        record.write(end=f"{_FINAL}refused")
        raise RestartsError("The run gets no further:", problems)
    return number, f"attempt {number}; the one before: {attempts[-1]}"


def _problems(
    folder: Path, attempts: Sequence[Attempt], checkpoint: int | None, most: int
) -> list[Problem]:
    """Return a problem if too many of the last attempts got no further than `checkpoint`."""
    stuck: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.is_final or _is_newer(checkpoint, attempt.checkpoint):
            break
        stuck.append(attempt)
    if len(stuck) < most:
        return []
    newest = "without a checkpoint"
    if checkpoint is not None:
        newest = f"without a newer checkpoint than step {checkpoint}"
    what = f"{len(stuck)} attempts in a row ended {newest}"
    reasons = []
    for attempt in stuck[:_SHOWN]:
        reasons.append(f"attempt {attempt.number}: {attempt}")
    fix = "look at the output and logs of the processes named, mend the cause, and start again"
    return [Problem(str(folder), what, "; ".join(reasons), fix)]


def _is_newer(checkpoint: int | None, before: int | None) -> bool:
    """Return true for progress; the removal of a damaged checkpoint is none."""
    if checkpoint is None:
        return False
    return before is None or checkpoint > before


def _end_of(error: BaseException) -> str:
    """Return the end of a block in words."""
    first_line = str(error).partition("\n")[0]
    text = f"{type(error).__name__}: {first_line}"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in text:
        return text  # mostly because another process is gone
    if isinstance(error, SpmdError) and error.exit_code != SpmdError.exit_code:
        return text
    return f"{_FINAL}{text}"


@dataclasses.dataclass(frozen=True)
class _Record:
    """File of one process, for one attempt."""

    folder: Path
    process: int
    attempt: int

    def write(self, **values: Any) -> None:
        """Append a line; a full disk must not end the run."""
        line = json.dumps({"attempt": self.attempt, "time": time.time(), **values})
        file = self.folder / ATTEMPTS / f"process-{self.process}.jsonl"
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(f"\n{line}\n")  # a line before it may have been cut off


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of a run in a folder, in order."""
    lines: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for file in sorted((folder / ATTEMPTS).glob("process-*.jsonl")):
        process = int(file.stem.removeprefix("process-"))
        for line in _read_lines(file):
            lines.setdefault(line["attempt"], []).append((process, line))
    return [_attempt(number, lines[number]) for number in sorted(lines)]


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, without damaged ones."""
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        line: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("attempt"), int):
            yield line


def _attempt(number: int, lines: Iterable[tuple[int, dict[str, Any]]]) -> Attempt:
    checkpoint: int | None = None
    hosts: dict[int, str] = {}
    ends: dict[int, str] = {}
    losses: list[tuple[float, str]] = []
    for process, line in lines:
        if "host" in line:
            hosts[process] = line["host"]
        if (
            process == 0 and "checkpoint" in line
        ):  # the others may have an old listing of the folder
            checkpoint = line["checkpoint"]
        if "end" in line:
            ends[process] = line["end"]
        if "gone" in line:
            losses.append((line.get("time", 0.0), line["gone"]))
    gone = ""
    if losses:
        _, gone = min(losses)
    return Attempt(number, checkpoint, hosts, ends, gone)
