"""Mixed precision: one frozen value that the model, the gradients, the optimizer and the memory report read.

| name | parameters | compute | gradients | exchange | master weights | update rounding | loss scale |
|---|---|---|---|---|---|---|---|
| `float32` | float32 | float32 | float32 | float32 | | nearest | |
| `float64` | float64 | float64 | float64 | float64 | | nearest | |
| `bf16` | float32 | bfloat16 | float32 | bfloat16 | | nearest | |
| `bf16-params` | bfloat16 | bfloat16 | float32 | bfloat16 | float32 | nearest | |
| `bf16-params-stochastic` | bfloat16 | bfloat16 | float32 | bfloat16 | | stochastic | |
| `fp16` | float32 | float16 | float32 | float32 | | nearest | dynamic |

`float64` needs `jax_enable_x64`. In `bf16` and `fp16` the stored parameters are the float32 master weights, cast where
they are used. Norms, softmax and the loss are computed in float32. Matmuls return weight gradients in the dtype in
which they are summed.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem, check_fields, did_you_mean
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_api.grad_transform import GradTransform

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "params": ("float32", "bfloat16", "float64"),
    "compute": ("float32", "bfloat16", "float16", "float64"),
    "gradients": ("float32", "bfloat16", "float64"),
    "exchange": (None, "float32", "bfloat16", "int8", "int4"),
    "accumulation": ("float32", "bfloat16", "float64"),
    "master": (None, "float32"),
    "moments": (None, "float32", "bfloat16", "8bit"),
    "rounding": ("nearest", "stochastic"),
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a training run.

    Attributes:
        params: Dtype of stored parameters.
        compute: Dtype of activations and of the operands of matmuls.
        gradients: Dtype in which matmuls return weight gradients, and in which their sums are kept.
        exchange: Dtype in which devices send weight gradients to each other, or a codec of
            `spmd.codecs.EXCHANGES`; None for the dtype of `gradients`.
        exchange_over: Axis → dtype or codec for axes that differ, such as those that cross a slow network.
        accumulation: Dtype in which the gradients of microbatches are accumulated.
        master: Dtype of master weights in the optimizer's state, if any.
        moments: Dtype of the optimizer's moments; None leaves it to the optimizer.
        rounding: Rounding of updated parameters to `params`; `"stochastic"` is unbiased.

    Example:
        >>> Precision("half", params="float32", compute="float16")
        Traceback (most recent call last):
        spmd.errors.ConfigError: This precision cannot be used:
          compute: is float16, whose small gradients vanish without loss scaling
              float16 ends at 6e-08, float32 at 1e-45
              fix: loss_scale=LossScale(), or bfloat16
    """

    name: str
    params: str
    compute: str
    gradients: str = "float32"
    exchange: str | None = None
    exchange_over: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    accumulation: str = "float32"
    master: str | None = None
    moments: str | None = None
    rounding: str = "nearest"
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        problems = check_fields(self, _CHOICES)
        if self.compute == "float16" and self.loss_scale is None:
            what = "is float16, whose small gradients vanish without loss scaling"
            sizes = "float16 ends at 6e-08, float32 at 1e-45"
            problems.append(Problem("compute", what, sizes, "loss_scale=LossScale(), or bfloat16"))
        widths = {"bfloat16": 2, "float32": 4, "float64": 8}
        if not problems and widths[self.accumulation] < widths[self.gradients]:
            what = f"rounds what was summed in {self.gradients}"
            problems.append(Problem("accumulation", what, fix=self.gradients))
        if self.master and self.params == self.master:
            problems.append(Problem("master", f"is {self.master}, as the parameters are", fix="None"))
        if self.rounding == "stochastic" and self.params != "bfloat16":
            problems.append(Problem("rounding", f"is stochastic, for {self.params} parameters", fix="nearest"))
        if self.rounding == "stochastic" and self.master:
            problems.append(Problem("rounding", "is stochastic, with exact master weights", fix="one of the two"))
        over = {f"exchange_over[{axis!r}]": dtype for axis, dtype in self.exchange_over.items()}
        problems += [
            Problem(name, f"is {dtype!r}", fix="float32, bfloat16, int8 or int4")
            for name, dtype in over.items()
            if dtype not in _CHOICES["exchange"]
        ]
        if problems:
            raise ConfigError("This precision cannot be used:", problems)

    @property
    def transforms(self) -> tuple[GradTransform, ...]:
        """What the policy does to gradients (`ShardingPlan.with_transforms`)."""
        return () if self.loss_scale is None else (self.loss_scale,)

    @property
    def skips_updates(self) -> bool:
        """Whether the optimizer skips updates that are not finite."""
        return self.loss_scale is not None

    @property
    def params_dtype(self) -> jnp.dtype:
        """`params` as a JAX dtype."""
        return jnp.dtype(self.params)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`compute` as a JAX dtype."""
        return jnp.dtype(self.compute)

    @property
    def gradients_dtype(self) -> jnp.dtype:
        """`gradients` as a JAX dtype."""
        return jnp.dtype(self.gradients)

    def exchange_names(self, axes: Iterable[str]) -> dict[str, str]:
        """Return axis → dtype or codec in which weight gradients are sent over it."""
        return {axis: self.exchange_over.get(axis, self.exchange or self.gradients) for axis in axes}


POLICIES = {
    policy.name: policy
    for policy in (
        Precision("float32", params="float32", compute="float32"),
        Precision("float64", params="float64", compute="float64", gradients="float64", accumulation="float64"),
        Precision("bf16", params="float32", compute="bfloat16", exchange="bfloat16"),
        Precision("bf16-params", params="bfloat16", compute="bfloat16", exchange="bfloat16", master="float32"),
        Precision(*("bf16-params-stochastic", "bfloat16", "bfloat16"), exchange="bfloat16", rounding="stochastic"),
        Precision("fp16", params="float32", compute="float16", loss_scale=LossScale()),
    )
}
"""The policies by name."""


def make_precision(name: str | Precision) -> Precision:
    """Return the precision policy with a name, or raise a `ConfigError`; a `Precision` is returned."""
    if isinstance(name, Precision):
        return name
    if name not in POLICIES:
        problem = Problem("precision", f"{name!r} does not exist", fix=did_you_mean(str(name), POLICIES))
        raise ConfigError("This precision cannot be used:", [problem])
    return POLICIES[name]


def check_float64(precision: Precision, params: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong between a policy, JAX's setting for 64 bits, and the dtypes that a model makes.

    Args:
        params: Path → parameter, as the model makes it.
    """
    widest = "float64" in (precision.params, precision.compute, precision.gradients, precision.accumulation)
    if widest and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        fix = 'jax.config.update("jax_enable_x64", True) before the first array, or JAX_ENABLE_X64=1'
        return [Problem("precision", f"{precision.name} has float64, which JAX is not set to compute in", fix=fix)]
    if precision.params == "float64":
        return []
    return [
        Problem(path, f"is float64 in the model, and {precision.name} would round it", fix='precision="float64"')
        for path, x in params.items()
        if x.dtype == jnp.float64
    ]


def cast_floats(params: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree, which may be numbers of Python."""

    def cast(x: Any) -> jax.Array:
        return jnp.asarray(x, dtype if jnp.issubdtype(jnp.result_type(x), jnp.floating) else None)

    return jax.tree.map(cast, params)
