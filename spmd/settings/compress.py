"""Compression of gathered parameters and summed gradients between devices.

| field | value | what is sent |
|---|---|---|
| `gather` | `int8`, `fp8` | parameters that layers gather, in blocks with a scale |
| `gradients` | `float32`, `bf16` | the terms of a gradient's sum over devices |
| | `int8`, `int4` | the same in blocks with a scale each, by all-to-all; sums are in float32 |
| | `powersgd:4` | matrices of rank 4 over `data`, with error feedback (`spmd.powersgd.transform`) |

ZeRO++ (Wang et al., arXiv:2306.10209) does so: its qwZ is `gather`, its qgZ `gradients`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from spmd.codecs import EXCHANGES, GATHERS
from spmd.coded_comm.comm import WITHOUT_CODES, CodedComm
from spmd.errors import Problem, check_fields, did_you_mean
from spmd.precision import Precision
from spmd.sharding.dims import Dims, extra_axes, is_prefix, local_shape, spec_dims
from spmd.sharding.mesh import TOKEN_AXES, nontrivial_axes
from spmd.sharding.param_comm import ParamComm

GRADIENTS: Mapping[str, str] = {
    "float32": "float32",
    "bf16": "bfloat16",
    **dict(zip(EXCHANGES, EXCHANGES, strict=True)),
}
"""Value of `CompressConfig.gradients` → value of `Precision.exchange`."""


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Formats of parameters and gradients between devices."""

    gather: str = ""
    """Codec of the parameters that layers gather: int8, fp8; empty: the compute dtype."""
    gradients: str = ""
    """Gradients that devices send to each other: float32, bf16, int8, int4; powersgd:R for matrices
    of rank R over data, with error feedback; empty: as the precision policy says."""
    slices_gradients: str = ""
    """The same, over the axes that span several slices."""
    secondary: bool = True
    """With gather, where fsdp spans several slices: keep a second partition inside of each slice
    for the backward pass (hpZ), which then sends nothing over the slow network."""
    powersgd_start: int = 0
    """First step that powersgd:R compresses, counted from the first step with it; gradients of those
    before are sent whole. PyTorch starts at 1,000."""

    def __str__(self) -> str:
        words = []
        for name, value in self._values.items():
            if value:
                words.append(f"{name} {value}")
        if not words:
            return ""
        return f"   compress {', '.join(words)}"

    @property
    def _values(self) -> dict[str, str]:
        return {
            "gather": self.gather,
            "gradients": self.gradients,
            "slices_gradients": self.slices_gradients,
        }

    @property
    def of_plan(self) -> "CompressConfig":
        """The config without PowerSGD, for plans.

        A plan decides about codecs only; PowerSGD wraps the gradient function.
        """
        if not powersgd_rank(self.gradients):
            return self
        return dataclasses.replace(self, gradients="", powersgd_start=0)

    def problems(self) -> list[Problem]:
        """Return a problem for each unknown codec, and for two sums over slices."""
        known: dict[str, Collection[str]] = {
            "gather": GATHERS,
            "gradients": (*GRADIENTS, "powersgd:4"),
            "slices_gradients": GRADIENTS,
        }
        has_rank = powersgd_rank(self.gradients) > 0
        problems = list(self._start_problems())
        for name, value in self._values.items():
            is_powersgd = has_rank and name == "gradients"
            if value and value not in known[name] and not is_powersgd:
                fix = did_you_mean(str(value), known[name])
                problems.append(Problem(f"compress.{name}", f"is {value!r}", fix=fix))
        if has_rank and self.slices_gradients:
            problem = Problem(
                "compress.slices_gradients",
                f"is {self.slices_gradients}, and PowerSGD has a sum inside of slices of its own",
                fix="leave it out",
            )
            problems.append(problem)
        return problems

    def _start_problems(self) -> Iterator[Problem]:
        """Yield the problems of the first step with PowerSGD."""
        field = "compress.powersgd_start"
        for problem in check_fields(self, {"powersgd_start": "at least 0"}):
            yield dataclasses.replace(problem, where=field)
        if self.powersgd_start and not powersgd_rank(self.gradients):
            what = f"is {self.powersgd_start}, and PowerSGD compresses nothing"
            yield Problem(field, what, fix='compress.gradients="powersgd:4", or leave it out')

    def useless(
        self, sizes: Mapping[str, int], slices: Mapping[str, int], zero: int
    ) -> dict[str, Problem]:
        """Return field → problem for the fields without an effect.

        Over axes of size 1, nothing is sent.
        """
        uses = {
            "gather": _useless_gather(sizes, zero),
            "gradients": _useless_gradients(sizes),
            "slices_gradients": _useless_slices_gradients(slices),
        }
        problems = {}
        for field, useless in uses.items():
            value = self._values[field]
            if value and useless is not None:
                problems[field] = Problem(
                    f"compress.{field}",
                    f"is {value}, and {useless.what}",
                    useless.detail,
                    f"{useless.fix} or more, or leave it out",
                )
        return problems

    def on(
        self, sizes: Mapping[str, int], slices: Mapping[str, int], zero: int
    ) -> "CompressConfig":
        """Return the config without its useless fields on a mesh."""
        useless: dict[str, Any] = dict.fromkeys(self.useless(sizes, slices, zero), "")
        if powersgd_rank(self.gradients) and sizes["data"] == 1:
            useless["gradients"] = ""
        config = dataclasses.replace(self, **useless)
        if not powersgd_rank(config.gradients):
            return dataclasses.replace(config, powersgd_start=0)
        return config

    def precision(self, policy: Precision, slices: Mapping[str, int]) -> Precision:
        """Return the policy with the gradients' dtypes or codecs on the wire."""
        exchange = GRADIENTS.get(self.gradients, policy.exchange)
        over = policy.exchange_over
        over_slices = GRADIENTS.get(self.slices_gradients)
        spans = nontrivial_axes(slices)
        if over_slices and spans:
            over = dict.fromkeys(spans, over_slices)
        return dataclasses.replace(policy, exchange=exchange, exchange_over=over)

    def problems_of_mesh(
        self, sizes: Mapping[str, int], slices: Mapping[str, int], zero: int
    ) -> list[Problem]:
        """Return the problems of the config in a plan for this mesh, for any model."""
        problems = [*self.problems(), *self.useless(sizes, slices, zero).values()]
        if self != self.of_plan:
            problem = Problem(
                "compress.gradients",
                f"is {self.gradients}, which wraps a gradient function",
                fix="from spmd.powersgd.transform import PowerSGD; make_plan(…, "
                "transforms=[PowerSGD(rank=4)])",
            )
            problems.append(problem)
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
        """Return the communication format of one layer's parameter, and of its gradient.

        Args:
            specs: The specs of the stored parameter, and of the used one.
            sizes: Axis → size.
            slices: Axis → the slices that it spans.
            policy: From `precision`.
            exactly: Whether this one is never sent as codes.
        """
        axes = tuple(nontrivial_axes(sizes))
        stored = spec_dims(specs[0], len(shape), axes)
        used = spec_dims(specs[1], len(shape), axes)
        sent = policy.exchange_names(axes)
        if exactly:
            sent = _without_codes(sent)
        codec = ""
        if not exactly and _gathers_blocks(shape, stored, used, sizes):
            codec = self.gather
        sends_codes = any(name in EXCHANGES for name in sent.values())
        if not codec and not sends_codes:
            return ParamComm(tuple(sent.items()))
        spans = nontrivial_axes(slices)
        hop = None
        if codec and self.secondary:
            hop = _hop(stored, used, sizes, spans)
        width = _width_dim(specs[1], len(shape))
        return CodedComm(tuple(sent.items()), codec, tuple(spans.items()), hop, width)

    def problems_of_model(
        self, comms: Iterable[ParamComm], reduced: Collection[str]
    ) -> list[Problem]:
        """Return a problem for each codec without use in a model.

        Args:
            comms: The communication of all its parameters.
            reduced: The paths of trained parameters whose gradients layers sum themselves.
        """
        problems = []
        if self.gather and not any(comm.param_codec for comm in comms):
            problem = Problem(
                "compress.gather",
                f"is {self.gather}, and no shard of a parameter has a block",
                "a dimension of a gathered shard must be a multiple of 32",
                "a mesh with larger shards, or leave it out",
            )
            problems.append(problem)
        for field in ("gradients", "slices_gradients"):
            value = self._values[field]
            if value in EXCHANGES and not reduced:
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
    is_number = rank.isascii() and rank.isdigit()
    if name != "powersgd" or not is_number or int(rank) >= 2**31:
        return 0
    return int(rank)


class _Useless(NamedTuple):
    """Reason why a field has no effect on a mesh, with the arithmetic, and the least to change."""

    what: str
    detail: str
    fix: str


def _useless_gather(sizes: Mapping[str, int], zero: int) -> _Useless | None:
    # Experts and sequences may continue a split over fsdp.
    if sizes["fsdp"] * sizes["expert"] * sizes["sequence"] == 1:
        return _Useless("no parameter is split over fsdp", "mesh.fsdp = 1", "mesh.fsdp 2")
    if zero < 3:
        return _Useless("layers gather no parameters", f"zero = {zero}", "zero 3")
    return None


def _useless_gradients(sizes: Mapping[str, int]) -> _Useless | None:
    if any(sizes[axis] != 1 for axis in TOKEN_AXES):
        return None
    return _Useless("there is one group of tokens", f"{' × '.join(TOKEN_AXES)} = 1", "mesh.data 2")


def _useless_slices_gradients(slices: Mapping[str, int]) -> _Useless | None:
    if any(slices.get(axis, 1) != 1 for axis in TOKEN_AXES):
        return None
    return _Useless("no axis of tokens spans slices", "slices = 1", "slices.data 2")


def _without_codes(sent: Mapping[str, str]) -> dict[str, str]:
    """Return axis → dtype, with a dtype in place of each codec."""
    exact = dict(sent)
    for axis, name in sent.items():
        if name in EXCHANGES:
            exact[axis] = WITHOUT_CODES
    return exact


def _gathers_blocks(
    shape: tuple[int, ...], stored: Dims, used: Dims, sizes: Mapping[str, int]
) -> bool:
    """Return whether a layer gathers a parameter, in shards with blocks for codes."""
    is_gathered = len(shape) > 1 and stored != used and is_prefix(used, stored)
    if not is_gathered:
        return False
    shard = local_shape(shape, stored, sizes)
    _, block = GATHERS["int8"].block_dim(shard)
    return block > 0


def _hop(
    stored: Dims, used: Dims, sizes: Mapping[str, int], spans: Mapping[str, int]
) -> tuple[str, int] | None:
    """Return the first gathered axis with several devices in each slice, and its slices."""
    for axes in extra_axes(stored, used):
        for axis in axes:
            slices = spans.get(axis, 1)
            if 1 < slices < sizes[axis]:
                return axis, slices
    return None


def _width_dim(used: P, ndim: int) -> int:
    """Return the dimension of the model's width, from the end; 0 if it is not known.

    The other dimension of a kernel is split over `tensor`: heads, hidden units or a vocabulary.
    """
    last_dims = spec_dims(used, ndim, ("tensor",))[-2:]
    if last_dims.count(()) != 1:
        return 0
    return last_dims.index(()) - len(last_dims)
