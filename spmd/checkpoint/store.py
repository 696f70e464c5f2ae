"""Contract between the checkpoint manager and the place of its checkpoints."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from spmd.checkpoint.retention import Metrics
from spmd.checkpoint.tree import OptionalState
from spmd.errors import CheckpointError, Problem


class DamagedError(CheckpointError):
    """Damage of a checkpoint, found by reading it."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """Result of a scan.

    Attributes:
        leftovers: Names of interrupted saves.
        metrics: Step → metrics of each undamaged checkpoint.
        damaged: Step → problems of each damaged one.
    """

    leftovers: Sequence[str]
    metrics: Mapping[int, Metrics]
    damaged: Mapping[int, Sequence[Problem]]


class CheckpointStore(Protocol):
    """Checkpoints of one directory, by step: a local folder, or a path in a bucket.

    Methods are called on process 0 alone unless they say otherwise. Those that change or read
    checkpoints raise `CheckpointError`.
    """

    def access_problems(self) -> tuple[Problem, ...]:
        """Return problems of processes without access; every process calls it."""
        ...

    def scan(self, *, create: bool) -> Scan:
        """Find checkpoints and leftovers; with `create`, make the directory."""
        ...

    def begin(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Prepare a save, in the caller's thread on every process."""
        ...

    def write(self, step: int, arrays: Mapping[str, jax.Array]) -> None:
        """Write the shards of this process; return when those of all processes are written."""
        ...

    def commit(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        record: str,
        metrics: Metrics,
        damaged: Sequence[int],
    ) -> None:
        """Complete a checkpoint: from then on it exists. Damaged ones are set aside before."""
        ...

    def discard(self, step: int) -> None:
        """Remove an unfinished save."""
        ...

    def prune(self, step: int) -> None:
        """Remove a checkpoint, if it exists."""
        ...

    def remove_leftovers(self, names: Sequence[str]) -> None:
        """Remove interrupted saves."""
        ...

    def verify(self, step: int, *, contents: bool) -> Sequence[Problem]:
        """Return the differences of a checkpoint from its manifest.

        If `contents` is False, large files are not read.
        """
        ...

    def check_seen(self, step: int) -> None:
        """Raise a `CheckpointError` unless every process sees the checkpoint of process 0.

        Every process calls it.
        """
        ...

    def record(self, step: int) -> dict[str, Any]:
        """Read the record of a checkpoint, on every process."""
        ...

    def restore(
        self,
        step: int,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        branches: Sequence[str],
        optional: Sequence[OptionalState],
    ) -> dict[str, jax.Array]:
        """Restore arrays by path, on every process; see `CheckpointManager.restore`.

        Raises:
            DamagedError: Something that was read is damaged.
            CheckpointError: The arrays do not fit.
        """
        ...

    def path_of(self, step: int, name: str = "") -> str:
        """Return the path of a checkpoint, or of something in it, for people."""
        ...
