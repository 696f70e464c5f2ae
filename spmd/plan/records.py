"""One array of the training state and what was decided about it: a line of a plan."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.sharding.optimizer_state import shard_bytes
from spmd.sharding.rules import Match, spec_text
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class PlanEntry:
    """One array of the training state and what was decided about it.

    Attributes:
        path: Its name, `layers/attention/q_proj/kernel`.
        shape: Its global shape.
        dtype: Its dtype's name.
        rule: The pattern that matched, or what it follows.
        requested: What the rule says, as written.
        spec: The spec in force, with stacked dimensions, after the ZeRO stage.
        reason: Why it is replicated or differs from what was requested; may be empty.
        memory_kind: Where it lives.
        bytes_per_device: The bytes of one shard.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    requested: str
    spec: P
    reason: str
    memory_kind: str
    bytes_per_device: int

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """Path, dtype and shape, spec in force, bytes of a shard, and the rule with its reason."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        return (
            self.path,
            f"{self.dtype}[{shape}]",
            spec_text(self.spec),
            human_bytes(self.bytes_per_device),
            self.rule
            + (f" ({self.reason})" if self.reason else "")
            + ("" if self.memory_kind == "device" else f"  in {self.memory_kind}"),
        )

    def __str__(self) -> str:
        return "  ".join(self.row)


def make_entry(
    path: str, array: Any, match: Match, spec: P, zero: int, axes: Mapping[str, int], on_host: bool
) -> PlanEntry:
    """The record of an array that a rule matched.

    Args:
        path: Its name.
        array: Its abstract value.
        match: What the rules say of it.
        spec: The spec in force.
        zero: The ZeRO stage, which may have dropped an axis of the rule's spec.
        axes: Mesh axis → size.
        on_host: Whether it lives in host memory.
    """
    shape, dtype = tuple(array.shape), str(array.dtype)
    dropped = "" if spec == match.spec else f"zero={zero}: whole over fsdp"
    return PlanEntry(
        path=path,
        shape=shape,
        dtype=dtype,
        rule=match.pattern,
        requested=spec_text(match.requested) if isinstance(match.requested, P) else str(match.requested),
        spec=spec,
        reason=match.reason or dropped,
        memory_kind="pinned_host" if on_host else "device",
        bytes_per_device=shard_bytes(shape, dtype, spec, axes),
    )


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells of leaves as lines with columns: sizes to the right, the last column as it is."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [
        "  ".join((path.ljust(widths[0]), shape.ljust(widths[1]), spec.ljust(widths[2]), size.rjust(widths[3]), rule))
        for path, shape, spec, size, rule in rows
    ]
