"""Compression of what devices send to each other: parameters that are gathered, and gradients that are summed.

| field | value | what is sent |
|---|---|---|
| `gather` | `int8`, `fp8` | each parameter that a layer gathers over `fsdp`, in blocks with a scale each |
| `gradients` | `float32`, `bf16` | the terms of a gradient's sum over devices |
| | `int8`, `int4` | the same in blocks with a scale each, by all-to-all; sums are in float32 |
| | `powersgd:4` | matrices of rank 4 over `data`, with error feedback (`spmd.powersgd.transform`) |

ZeRO++ (Wang et al., arXiv:2306.10209) does so: its qwZ is `gather`, its qgZ `gradients`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.codecs import EXCHANGES, GATHERS
from spmd.coded_comm.comm import WITHOUT_CODES, CodedComm
from spmd.errors import Problem, did_you_mean
from spmd.precision import Precision
from spmd.sharding.dims import extra_axes, is_prefix, local_shape, spec_dims
from spmd.sharding.mesh import BATCH_SPEC, entry_axes
from spmd.sharding.param_comm import ParamComm

GRADIENTS: Mapping[str, str] = {"float32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}
"""Value of `CompressConfig.gradients` → value of `Precision.exchange`."""


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Bits of what devices send to each other."""

    gather: str = ""
    """Codec of the parameters that layers gather over fsdp: int8, fp8; empty: the compute dtype."""
    gradients: str = ""
    """Gradients that devices send to each other: float32, bf16, int8, int4; powersgd:R for matrices of rank R over
    data, with error feedback; empty: as the precision policy says."""
    slices_gradients: str = ""
    """The same, over the axes that span several slices."""
    secondary: bool = True
    """With gather, where fsdp spans several slices: keep a second partition inside of each slice for the backward pass
    (hpZ), which then sends nothing over the slow network."""

    def __str__(self) -> str:
        given = ", ".join(f"{name} {value}" for name, value in self._values.items() if value)
        return f"   compress {given}" if given else ""

    @property
    def _values(self) -> dict[str, str]:
        return {"gather": self.gather, "gradients": self.gradients, "slices_gradients": self.slices_gradients}

    @property
    def of_plan(self) -> "CompressConfig":
        """The config without PowerSGD, which wraps the gradient function: a plan decides the codecs."""
        return dataclasses.replace(self, gradients="") if powersgd_rank(self.gradients) else self

    def problems(self) -> list[Problem]:
        """Return a problem for each unknown codec, and for two sums over slices."""
        known = {"gather": GATHERS, "gradients": (*GRADIENTS, "powersgd:4"), "slices_gradients": GRADIENTS}
        has_rank = powersgd_rank(self.gradients) > 0
        problems = [
            Problem(f"compress.{name}", f"is {value!r}", fix=did_you_mean(str(value), known[name]))
            for name, value in self._values.items()
            if value and value not in known[name] and not (has_rank and name == "gradients")
        ]
        if has_rank and self.slices_gradients:
            what = f"is {self.slices_gradients}, and PowerSGD has a sum inside of slices of its own"
            problems.append(Problem("compress.slices_gradients", what, fix="leave it out"))
        return problems

    def useless(self, sizes: Mapping[str, int], slices: Mapping[str, int], zero: int) -> dict[str, Problem]:
        """Return field → problem for the fields that have nothing to act on: over axes of size 1, nothing is sent."""
        batch = [axis for entry in BATCH_SPEC for axis in entry_axes(entry)]
        alone, one_slice = (all(sizes[axis] == 1 for axis in batch), all(slices.get(axis, 1) == 1 for axis in batch))
        is_split = sizes["fsdp"] * sizes["expert"] > 1  # experts may continue a split over fsdp
        cases = {
            "gather": [
                (not is_split, "no parameter is split over fsdp", "mesh.fsdp = 1", "mesh.fsdp 2"),
                (zero < 3, "layers gather no parameters", f"zero = {zero}", "zero 3"),
            ],
            "gradients": [(alone, "there is one group of tokens", f"{' × '.join(batch)} = 1", "mesh.data 2")],
            "slices_gradients": [(one_slice, "no axis of tokens spans slices", "slices = 1", "slices.data 2")],
        }
        return {
            field: Problem(f"compress.{field}", f"is {value}, and {what}", detail, f"{fix} or more, or leave it out")
            for field, checks in cases.items()
            for is_useless, what, detail, fix in reversed(checks)
            if is_useless and (value := self._values[field])
        }

    def on(self, sizes: Mapping[str, int], slices: Mapping[str, int], zero: int) -> "CompressConfig":
        """Return the config without the fields that are useless there."""
        useless: dict[str, Any] = dict.fromkeys(self.useless(sizes, slices, zero), "")
        if powersgd_rank(self.gradients) and sizes["data"] == 1:
            useless["gradients"] = ""
        return dataclasses.replace(self, **useless)

    def precision(self, policy: Precision, slices: Mapping[str, int]) -> Precision:
        """Return the policy with the gradients' dtypes or codecs on the wire."""
        exchange, slow = GRADIENTS.get(self.gradients, policy.exchange), GRADIENTS.get(self.slices_gradients)
        over = {axis: slow for axis, count in slices.items() if count > 1 and slow} or policy.exchange_over
        return dataclasses.replace(policy, exchange=exchange, exchange_over=over)

    def problems_of_mesh(self, sizes: Mapping[str, int], slices: Mapping[str, int], zero: int) -> list[Problem]:
        """Return what is wrong with the config in a plan for this mesh, whatever the model is."""
        problems = [*self.problems(), *self.useless(sizes, slices, zero).values()]
        if self != self.of_plan:
            what = f"is {self.gradients}, which wraps a gradient function"
            fix = "from spmd.powersgd.transform import PowerSGD; make_plan(…, transforms=[PowerSGD(rank=4)])"
            problems.append(Problem("compress.gradients", what, fix=fix))
        return problems

    def param_comm(
        self,
        shape: tuple[int, ...],
        specs: tuple[P, P],
        sizes: Mapping[str, int],
        slices: Mapping[str, int],
        policy: Precision,
        *,
        exactly: bool,
    ) -> ParamComm:
        """Return what sends one layer's parameter of some shape, and its gradient.

        Args:
            specs: As it is stored, and as it is used.
            sizes: Axis → size.
            slices: Axis → the slices that it spans.
            policy: From `precision`.
            exactly: Whether this one is never sent as codes.
        """
        axes = tuple(axis for axis, size in sizes.items() if size > 1)
        stored, used = (spec_dims(spec, len(shape), axes) for spec in specs)
        sent = policy.exchange_names(axes)
        if exactly:
            sent = {axis: WITHOUT_CODES if name in EXCHANGES else name for axis, name in sent.items()}
        is_gathered = len(shape) > 1 and stored != used and is_prefix(used, stored)
        has_blocks = is_gathered and GATHERS["int8"].block_dim(local_shape(shape, stored, sizes))[1] > 0
        codec = self.gather if has_blocks and not exactly else ""
        if not codec and not any(name in EXCHANGES for name in sent.values()):
            return ParamComm(tuple(sent.items()))
        spans = {axis: count for axis, count in slices.items() if count > 1}
        hops = []
        for axis in (axis for names in extra_axes(stored, used) for axis in names):
            if 1 < spans.get(axis, 1) < sizes[axis]:
                hops.append((axis, spans[axis]))
        hop = hops[0] if hops and codec and self.secondary else None
        parts = spec_dims(specs[1], len(shape), ("tensor",))[-2:]  # of heads, hidden units or a vocabulary
        width = parts.index(()) - len(parts) if sum(map(bool, parts)) == len(parts) - 1 else 0
        return CodedComm(tuple(sent.items()), codec, tuple(spans.items()), hop, width)

    def problems_of_model(self, comms: Iterable[ParamComm], reduced: Collection[str]) -> list[Problem]:
        """Return a problem for each codec that nothing of a model is sent in.

        Args:
            comms: Of all its parameters.
            reduced: The paths of trained parameters whose gradients layers sum themselves.
        """
        problems = []
        if self.gather and not any(comm.param_codec for comm in comms):
            what, fix = "and no shard of a parameter has a block", "a mesh with larger shards, or leave it out"
            detail = "a dimension of a gathered shard must be a multiple of 32"
            problems.append(Problem("compress.gather", f"is {self.gather}, {what}", detail, fix))
        for field in ("gradients", "slices_gradients"):
            if (value := self._values[field]) in EXCHANGES and not reduced:
                what = f"is {value}, and the partitioner sums all gradients"
                fix = "float32 or bf16: layers of spmd.models send codes"
                problems.append(Problem(f"compress.{field}", what, fix=fix))
        return problems


NO_COMPRESSION = CompressConfig()
"""The default."""


def powersgd_rank(gradients: str) -> int:
    """Return the rank of `powersgd:R`, 0 for anything else.

    Example:
        >>> powersgd_rank("powersgd:4"), powersgd_rank("int8")
        (4, 0)
    """
    name, _, rank = str(gradients).partition(":")
    return int(rank) if name == "powersgd" and rank.isascii() and rank.isdigit() and int(rank) < 2**31 else 0
