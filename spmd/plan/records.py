"""Records of a plan: entries of the arrays of the training state, placements of parameters."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.settings.quantize import QuantizationRecipe
from spmd.sharding.dims import with_axis
from spmd.sharding.layer_paths import Stack, insert_stacked, is_staged, stored_dims
from spmd.sharding.mesh import AnyMesh, entry_axes, shards_of
from spmd.sharding.optimizer_state import shard_bytes
from spmd.sharding.param_comm import PLAIN, ParamComm
from spmd.sharding.rules import Match, spec_text
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class ParamPlacement:
    """Sharding of one layer's parameter in the training state, in a matmul, and of its gradient.

    Attributes:
        param_spec: The spec in the training state.
        compute_spec: The spec in a matmul: as stored, but gathered over `fsdp` and
            `sequence`.
        grad_spec: The spec of the reduced gradient, by the ZeRO stage.
        stacks: The stacks of the parameter, the outermost first.
        over_stages: The dimension of a layer that is stored split over `pipe`, where the stack is
            not (`spmd.sharding.uneven_stages`).
        save_gathered: Whether the backward pass keeps the gathered parameter, instead of gathering
            it again.
        scope: Name scope of the operations on the parameter (`spmd.plan.scopes`).
        comm: The communication of the parameter and its gradient.
        recipe: The recipe of its quantized matmuls; None for the compute dtype.
    """

    mesh: AnyMesh
    param_spec: P
    compute_spec: P
    grad_spec: P
    stacks: tuple[Stack, ...] = ()
    over_stages: int | None = None
    on_host: bool = False
    save_gathered: bool = True
    scope: str = ""
    comm: ParamComm = PLAIN
    recipe: QuantizationRecipe | None = None

    @property
    def leading(self) -> tuple[str | None, ...]:
        """The entries of the stacked dimensions."""
        return tuple(stack.stored_axis for stack in self.stacks)

    @property
    def is_staged(self) -> bool:
        """Whether each stage of a pipeline computes with its own layers of the outermost stack."""
        return is_staged(self.stacks)

    def shards(self, dim: int) -> int:
        """Return the number of parts of a dimension in a matmul."""
        return shards_of(_entry(self.compute_spec, dim), self.mesh.shape)

    def keeps_whole(self, dim: int, parts: int) -> bool:
        """Return whether no part of a dimension of `parts` equal parts is split.

        The dimension must also have the same split as stored, as used, and in the gradient.
        """
        entry = _entry(self.param_spec, dim)
        if _entry(self.compute_spec, dim) != entry or _entry(self.grad_spec, dim) != entry:
            return False
        return parts % shards_of(entry, self.mesh.shape) == 0

    def with_dim(self, dim: int) -> "ParamPlacement":
        """Return the placement with one more dimension, a whole one, before a dimension."""
        return self._with_dims((None,), (dim,))

    def of_stack(self) -> "ParamPlacement":
        """Return the placement of the whole stack of layers."""
        placed = self
        if self.over_stages is not None:
            add = functools.partial(with_axis, dim=self.over_stages, axis="pipe")
            placed = placed._with_specs(add)
        placed = placed._with_dims(self.leading, stored_dims(self.stacks))
        return dataclasses.replace(placed, stacks=(), over_stages=None)

    def on_stages(self) -> "ParamPlacement":
        """Return the placement of the whole stack where its layers are used, each on its stage."""
        axes = [stack.axis for stack in self.stacks]
        placed = self._with_dims(axes, stored_dims(self.stacks))
        return dataclasses.replace(placed, stacks=(), over_stages=None)

    def _with_dims(self, entries: Sequence[str | None], dims: Sequence[int]) -> "ParamPlacement":
        """Insert entries into all specs, at dimensions of the array as stored."""
        return self._with_specs(lambda spec: P(*insert_stacked(spec, entries, dims)))

    def _with_specs(self, change: Callable[[P], P]) -> "ParamPlacement":
        """Return the placement with each spec changed."""
        return dataclasses.replace(
            self,
            param_spec=change(self.param_spec),
            compute_spec=change(self.compute_spec),
            grad_spec=change(self.grad_spec),
        )


def _entry(spec: P, dim: int) -> Any:
    """Return the entry of a dimension; a spec may be shorter than its array."""
    if dim < len(spec):
        return spec[dim]
    return None


@dataclasses.dataclass(frozen=True)
class PlanEntry:
    """One array of the training state, and every decision about it: a line of the plan.

    Attributes:
        path: The path, such as `layers/attention/q_proj/kernel`.
        shape: The global shape.
        rule: The pattern that matched, or the origin of the spec.
        requested: The rule's value, as written.
        spec: The spec in force: with stacked dimensions, after the ZeRO stage.
        reason: The reason for replication, or for a spec other than requested; may be empty.
        memory_kind: `"device"` or `"pinned_host"`.
        update: Treatment of a parameter by an optimizer made from a config, if it differs between
            parameters: `muon 32 × 64`, `no decay`.
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
    update: str = ""

    @property
    def on_host(self) -> bool:
        """Whether it is stored in host memory."""
        return self.memory_kind != "device"

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """Path, dtype and shape, spec in force, bytes of a shard, and the rule with its remarks."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        rule = self.rule
        if self.reason:
            rule += f" ({self.reason})"
        remarks = [rule]
        if self.on_host:
            remarks.append(f"in {self.memory_kind}")
        if self.update:
            remarks.append(self.update)
        return (
            self.path,
            f"{self.dtype}[{shape}]",
            spec_text(self.spec),
            human_bytes(self.bytes_per_device),
            "  ".join(remarks),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        record = dataclasses.asdict(self)
        record["spec"] = spec_text(self.spec)
        record["shape"] = list(self.shape)
        return record

    def __str__(self) -> str:
        return "  ".join(self.row)


def _dropped(before: P, after: P, sizes: Mapping[str, int]) -> str:
    """Return the axes above size 1 of a spec that another one lacks; all of them if none is."""
    lost = []
    large = []
    for one, other in zip(before, after, strict=True):
        for axis in entry_axes(one):
            if axis in entry_axes(other):
                continue
            lost.append(axis)
            if sizes[axis] > 1:
                large.append(axis)
    return "+".join(dict.fromkeys(large or lost))


def make_entry(
    path: str,
    array: Any,
    match: Match,
    spec: P,
    *,
    zero: int,
    axes: Mapping[str, int],
    on_host: bool,
    update: str = "",
) -> PlanEntry:
    """Return the entry of a matched array.

    Args:
        spec: The rule's spec, from which the ZeRO stage may have dropped an axis.
    """
    shape = tuple(array.shape)
    requested = str(match.requested)
    if isinstance(match.requested, P):
        requested = spec_text(match.requested)
    reasons = []
    if match.reason:
        reasons.append(match.reason)
    if spec != match.spec:
        reasons.append(f"zero={zero}: whole over {_dropped(match.spec, spec, axes)}")
    return PlanEntry(
        path=path,
        shape=shape,
        dtype=str(array.dtype),
        rule=match.pattern,
        requested=requested,
        spec=spec,
        reason=", ".join(reasons),
        memory_kind="pinned_host" if on_host else "device",
        bytes_per_device=shard_bytes(shape, array.dtype, spec, axes),
        update=update,
    )
