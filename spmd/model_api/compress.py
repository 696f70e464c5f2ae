"""Compression of what devices send to each other: parameters that are gathered, and gradients that are summed.

| field | value | what is sent |
|---|---|---|
| `gather` | `int8`, `fp8` | each parameter that a layer gathers over `fsdp`, in blocks with a scale each |
| `gradients` | `float32`, `bf16` | the terms of a gradient's sum over devices |
| | `int8`, `int4` | the same in blocks with a scale each, by all-to-all; sums are in float32 |
| | `powersgd:4` | matrices of rank 4 over `data`, with error feedback (`spmd.gradients.powersgd`) |

ZeRO++ (Wang et al., arXiv:2306.10209) does so: its qwZ is `gather`, its qgZ `gradients`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.errors import Problem, did_you_mean
from spmd.model_api.codecs import EXCHANGES, GATHERS, GradientCodec
from spmd.model_api.precision import Precision
from spmd.sharding.mesh import BATCH_SPEC, entry_axes

GRADIENTS: Mapping[str, str] = {"float32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}
"""Value of `CompressConfig.gradients` → value of `Precision.exchange`."""

WITHOUT_CODES = "bfloat16"
"""Dtype of the terms of gradients without blocks, where others are sent as codes."""


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


@dataclasses.dataclass(frozen=True)
class Wire:
    """What is sent of one parameter, as the plan decided it.

    Attributes:
        gather: Codec of the parameter where a layer gathers it; empty for the compute dtype.
        gradients: Axis → dtype or codec of its gradient's terms; its own dtype over other axes.
        slices: Axis → the slices that it spans, of those above 1.
        hop: The axis that the parameter is gathered over in two hops, across slices and inside of one, and its slices.
        width: The dimension of the model's width, from the end: that of the blocks of its gradient; 0 if not known.
    """

    gather: str = ""
    gradients: tuple[tuple[str, str], ...] = ()
    slices: tuple[tuple[str, int], ...] = ()
    hop: tuple[str, int] | None = None
    width: int = 0

    def codec(self, name: str) -> GradientCodec | None:
        """Return the codec of its gradient with this name; None for a dtype."""
        return dataclasses.replace(EXCHANGES[name], width=self.width) if name in EXCHANGES else None


PLAIN = Wire()
"""Nothing in fewer bits."""

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
