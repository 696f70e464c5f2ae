"""Page of memory between a training process and its supervisor."""

import dataclasses
import mmap
import struct
from typing import Any, Self

_SIZE = 4096
_FIELDS = struct.Struct("<qqqqqqd")
_NAMES = ("generation", "newest", "oldest", "step", "every", "is_lost", "step_time")


@dataclasses.dataclass(frozen=True)
class Report:
    """Values of the page.

    Attributes:
        generation: Number of the generation of the training process; 0 before it is known.
        newest: Number of the last generation that began to train; 0 before there is one.
        oldest: Number of the first of the generations that followed on one another until then: no
            other run had the folder in between.
        step: Last finished step.
        step_time: Its time, in seconds since the epoch; 0 before there is one.
        every: Steps between copies of the state in memory; 0 before they are known.
        is_lost: 1 if the training process has learned that another one is gone.
    """

    generation: int = 0
    newest: int = 0
    oldest: int = 0
    step: int = 0
    every: int = 0
    is_lost: int = 0
    step_time: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Control:
    """Page with the reports of a training process to its supervisor.

    The training process writes it, and the supervisor only while there is none.
    """

    page: mmap.mmap

    @classmethod
    def create(cls) -> Self:
        """Return an empty page, shared with forked processes."""
        return cls(mmap.mmap(-1, _SIZE))

    def read(self) -> Report:
        """Return the values."""
        values = _FIELDS.unpack_from(self.page, 0)
        return Report(**dict(zip(_NAMES, values, strict=True)))

    def change(self, **values: Any) -> None:
        """Write some values."""
        report = dataclasses.replace(self.read(), **values)
        written = [getattr(report, name) for name in _NAMES]
        _FIELDS.pack_into(self.page, 0, *written)

    def join(self, generation: int) -> None:
        """Record the generation of the training process, at the start of its training."""
        report = self.read()
        oldest = report.oldest
        if report.newest != generation - 1:
            oldest = generation
        self.change(generation=generation, newest=generation, oldest=oldest)
