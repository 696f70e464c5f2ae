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
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem, check_fields, did_you_mean
from spmd.model_api.model import Model
from spmd.model_api.variables import with_variables

LOSS_SCALE = "loss_scale"
"""The name of the loss-scale state among the model's variables."""

_REASON = "every device scales by the same number"
_LARGEST = 2.0**100  # float32 holds it, and its products with small gradients


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: the loss is multiplied before the backward pass, so that float16 holds small gradients.

    A step with non-finite gradients is skipped and uses up one unit of hysteresis; once that is used up, each such step
    lowers the scale. After a finite step and `growth_interval` more in a row the scale grows and the hysteresis is
    restored; after each `growth_interval` more it grows again (Micikevicius et al., arXiv:1710.03740, section 3.2; as
    DeepSpeed's `FP16_Optimizer` counts; the hysteresis is `delayed_shift` of its loss scaler).

    The loss is a sum over tokens here: scales are smaller, by the number of tokens of a microbatch, than those of
    trainers that scale the mean.

    Attributes:
        backoff_interval: Fewest steps from one lowering to the next; until then non-finite steps are only skipped.
        hysteresis: The n-th non-finite step lowers the scale.
        floor: The smallest scale.
        ceiling: The largest scale: without one, gradients that stay zero would drive it to infinity for good.

    Example:
        >>> scaling = LossScale(initial=16, growth_interval=2, hysteresis=1)
        >>> state = scaling.after(scaling.init(), finite=jnp.array(False))
        >>> float(state["scale"])
        8.0
    """

    initial: float = 2.0**10
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    backoff_interval: int = 1
    hysteresis: int = 2
    floor: float = 1.0
    ceiling: float = _LARGEST

    def __post_init__(self) -> None:
        rules = {
            "initial": f"at least {self.floor} and at most {self.ceiling}",
            "growth_interval": "at least 1",
            "growth_factor": "above 1 and finite",
            "backoff_factor": "above 0 and below 1",
            "backoff_interval": "at least 1",
            "hysteresis": "at least 1",
            "floor": "above 0 and finite",
            "ceiling": f"at least {self.floor} and at most {_LARGEST}",
        }
        if problems := check_fields(self, rules, "loss_scale."):
            raise ConfigError("This loss scaling cannot be used:", problems)

    def init(self) -> dict[str, jax.Array]:
        """Return the initial state: `scale`, `good_steps` in a row since it changed, and the remaining `hysteresis`.

        After the scale was lowered, `hysteresis` is below 1 and counts up until the next lowering is possible.
        """
        good_steps, hysteresis = jnp.int32(0), jnp.int32(self.hysteresis)
        return {"scale": jnp.float32(self.initial), "good_steps": good_steps, "hysteresis": hysteresis}

    def after(self, state: Mapping[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
        """Return the state after a step whose gradients were `finite`, a boolean scalar."""
        scale, hysteresis = state["scale"], state["hysteresis"]
        good = jnp.where(finite, state["good_steps"] + 1, 0)
        grows, waits = good > self.growth_interval, hysteresis < 1
        lowers = ~finite & (hysteresis == 1)
        grown = jnp.minimum(scale * self.growth_factor, self.ceiling)
        lowered = jnp.maximum(scale * self.backoff_factor, self.floor)
        left = jnp.where(grows, self.hysteresis, jnp.where(lowers, 2 - self.backoff_interval, hysteresis - ~finite))
        return {
            "scale": jnp.where(grows, grown, jnp.where(lowers, lowered, scale)),
            "good_steps": jnp.where(grows, 1, good),
            "hysteresis": jnp.where(waits, hysteresis + 1, left),
        }


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
            `spmd.model_api.codecs.EXCHANGES`; None for the dtype of `gradients`.
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


@functools.lru_cache(maxsize=64)
def with_loss_scale(model: Model, loss_scale: LossScale | None) -> Model:
    """Return the model with the loss-scale state among its variables, or the model itself without loss scaling.

    Cached, since plans are compared by value and a model by identity: `make_plan` with equal arguments returns an equal
    plan.
    """
    if loss_scale is None:
        return model
    reasons = dict.fromkeys(loss_scale.init(), _REASON)
    return with_variables(model, LOSS_SCALE, lambda key: loss_scale.init(), replicated=reasons)


def scale_loss(loss: jax.Array, scaling: Mapping[str, Any]) -> jax.Array:
    """Multiply the loss by the scale, if `scaling`, the state split from the variables, has one."""
    return loss * scaling[LOSS_SCALE]["scale"].astype(loss.dtype) if scaling else loss


def cast_floats(params: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree, which may be numbers of Python."""

    def cast(x: Any) -> jax.Array:
        return jnp.asarray(x, dtype if jnp.issubdtype(jnp.result_type(x), jnp.floating) else None)

    return jax.tree.map(cast, params)
