"""Mixed precision: one frozen value for model, gradients, optimizer and memory report.

| name | parameters | compute | gradients | exchange | master weights | rounding | loss scale |
|---|---|---|---|---|---|---|---|
| `float32` | float32 | float32 | float32 | float32 | | nearest | |
| `float64` | float64 | float64 | float64 | float64 | | nearest | |
| `bf16` | float32 | bfloat16 | float32 | bfloat16 | | nearest | |
| `bf16-params` | bfloat16 | bfloat16 | float32 | bfloat16 | float32 | nearest | |
| `bf16-params-stochastic` | bfloat16 | bfloat16 | float32 | bfloat16 | | stochastic | |
| `fp16` | float32 | float16 | float32 | float32 | | nearest | dynamic |

`float64` needs `jax_enable_x64`. `rounding` is that of updated parameters. In `bf16` and `fp16` the
stored parameters are the float32 master weights, cast where they are used. Norms, softmax and the
loss are computed in float32. Matmuls return weight gradients in the dtype of their sums.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd.codecs import EXCHANGES
from spmd.errors import ConfigError, Problem, any_of, check_fields, did_you_mean
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_interface.grad_transform import GradTransform

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "params": ("float32", "bfloat16", "float64"),
    "compute": ("float32", "bfloat16", "float16", "float64"),
    "gradients": ("float32", "bfloat16", "float64"),
    "exchange": (None, "float32", "bfloat16", *EXCHANGES),
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
        exchange_over: Axis → dtype or codec for axes that differ, such as those that cross a slow
            network.
        accumulation: Dtype in which the gradients of microbatches are accumulated.
        master: Dtype of master weights in the optimizer's state, if any.
        moments: Dtype of the optimizer's moments; None leaves it to the optimizer.
        rounding: Rounding of updated parameters to `params`; `"stochastic"` is unbiased.

    Example:
        >>> Precision("half", params="float32", compute="float16")
        Traceback (most recent call last):
        spmd.errors.ConfigError: Invalid precision:
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
            problem = Problem(
                "compute",
                "is float16, whose small gradients vanish without loss scaling",
                "float16 ends at 6e-08, float32 at 1e-45",
                "loss_scale=LossScale(), or bfloat16",
            )
            problems.append(problem)
        widths = {"bfloat16": 2, "float32": 4, "float64": 8}
        if not problems and widths[self.accumulation] < widths[self.gradients]:
            what = f"rounds what was summed in {self.gradients}"
            problems.append(Problem("accumulation", what, fix=self.gradients))
        if self.master and self.params == self.master:
            what = f"is {self.master}, as the parameters are"
            problems.append(Problem("master", what, fix="None"))
        problems += self._rounding_problems()
        for axis, dtype in self.exchange_over.items():
            if dtype not in _CHOICES["exchange"]:
                where = f"exchange_over[{axis!r}]"
                fix = any_of(filter(None, _CHOICES["exchange"]))
                problems.append(Problem(where, f"is {dtype!r}", fix=fix))
        if problems:
            raise ConfigError("Invalid precision:", problems)

    def _rounding_problems(self) -> list[Problem]:
        """Return the contradictions of stochastic rounding."""
        if self.rounding != "stochastic":
            return []
        problems = []
        if self.params != "bfloat16":
            what = f"is stochastic, for {self.params} parameters"
            problems.append(Problem("rounding", what, fix="nearest"))
        if self.master:
            what = "is stochastic, with exact master weights"
            problems.append(Problem("rounding", what, fix="one of the two"))
        return problems

    @property
    def transforms(self) -> tuple[GradTransform, ...]:
        """The transforms of gradients by the policy (`ShardingPlan.with_transforms`)."""
        if self.loss_scale is None:
            return ()
        return (self.loss_scale,)

    @property
    def skips_updates(self) -> bool:
        """Whether the optimizer skips non-finite updates."""
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
        """Return axis → dtype or codec of the weight gradients sent over it."""
        default = self.exchange or self.gradients
        return {axis: self.exchange_over.get(axis, default) for axis in axes}


_ALL_POLICIES = (
    Precision("float32", params="float32", compute="float32"),
    Precision(
        "float64",
        params="float64",
        compute="float64",
        gradients="float64",
        accumulation="float64",
    ),
    Precision("bf16", params="float32", compute="bfloat16", exchange="bfloat16"),
    Precision(
        "bf16-params",
        params="bfloat16",
        compute="bfloat16",
        exchange="bfloat16",
        master="float32",
    ),
    Precision(
        "bf16-params-stochastic",
        params="bfloat16",
        compute="bfloat16",
        exchange="bfloat16",
        rounding="stochastic",
    ),
    Precision("fp16", params="float32", compute="float16", loss_scale=LossScale()),
)

POLICIES = {policy.name: policy for policy in _ALL_POLICIES}
"""The policies by name."""
_OTHER_NAMES = {"bfloat16": "bf16", "float16": "fp16", "fp32": "float32", "fp64": "float64"}
"""Other name of a policy → its name in plans and records."""


def canonical_precision(name: str) -> str:
    """Return the name of a policy in plans and records; of an unknown one, the name as it is.

    Example:
        >>> canonical_precision("bfloat16")
        'bf16'
    """
    return _OTHER_NAMES.get(name, name)


def make_precision(name: str | Precision) -> Precision:
    """Return the precision policy with a name, or a `Precision` as it is.

    `bfloat16` is `bf16`, `float16` is `fp16`, `fp32` is `float32`, and `fp64` is `float64`.
    ConfigError if there is no such policy.
    """
    if isinstance(name, Precision):
        return name
    name = canonical_precision(name)
    if name not in POLICIES:
        fix = did_you_mean(str(name), POLICIES)
        problem = Problem("precision", f"{name!r} does not exist", fix=fix)
        raise ConfigError("Invalid precision:", [problem])
    return POLICIES[name]


def check_float64(precision: Precision, params: Mapping[str, Any]) -> list[Problem]:
    """Return the conflicts of a policy, JAX's setting for 64 bits, and the dtypes of a model.

    Args:
        params: Path → parameter, as the model makes it.
    """
    computing = (precision.params, precision.compute, precision.gradients, precision.accumulation)
    has_x64 = jax.dtypes.canonicalize_dtype(jnp.float64) == jnp.float64
    if "float64" in computing and not has_x64:
        what = f"{precision.name} has float64, which JAX is not set to compute in"
        fix = (
            'jax.config.update("jax_enable_x64", True) before the first array, or JAX_ENABLE_X64=1'
        )
        return [Problem("precision", what, fix=fix)]
    if precision.params == "float64":
        return []
    problems = []
    for path, x in params.items():
        if x.dtype == jnp.float64:
            what = f"is float64 in the model, and {precision.name} would round it"
            problems.append(Problem(path, what, fix='precision="float64"'))
    return problems


def cast_floats(params: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree, arrays or numbers of Python."""

    def cast(x: Any) -> jax.Array:
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        if is_float:
            return jnp.asarray(x, dtype)
        return jnp.asarray(x)

    return jax.tree.map(cast, params)
