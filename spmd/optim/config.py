"""Optimizers from a config: learning-rate schedule, weight-decay mask and clipping, all from optax.

Every optimizer computes `step = -learning_rate * (direction + weight_decay * parameter)` and
differs only in the direction: weight decay is decoupled from the gradient and scaled by the
learning rate (Loshchilov and Hutter, arXiv:1711.05101), also for SGD and Adafactor. A direction
that depends on a whole array (Adafactor, Muon) is computed per layer of a stacked parameter
(`per_layer`), so scanned and unrolled layers train alike.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from spmd.errors import (
    ConfigError,
    Problem,
    any_of,
    check_call,
    check_fields,
    check_type,
    describe_value,
    did_you_mean,
)
from spmd.model_interface.kernels import read_matrices
from spmd.model_interface.model import Model, ModelInfo
from spmd.optim.ema import with_ema
from spmd.optim.owned_matrices import UpdateLayout, nesterov_momentum, orthogonalize
from spmd.optim.per_layer import per_layer
from spmd.optim.quantized import BLOCK, Kind, check_block, quantize_moments
from spmd.optim.treatment import Treatment, read_model
from spmd.optim.two_phase import TwoPhaseOptimizer, two_phase
from spmd.sharding.layer_paths import read_stacked
from spmd.sharding.patterns import PatternError, compile_pattern
from spmd.sharding.rules import Tied, first_path, matches
from spmd.tree import PyTree, map_with_path

OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
ScheduleName = Literal["constant", "cosine", "linear", "inverse-sqrt", "wsd"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Config of an optimizer.

    Example:
        >>> OptimizerConfig(b1=1.5, clip_norm=-1.0)
        Traceback (most recent call last):
        spmd.errors.ConfigError: Invalid optimizer:
          b1: is 1.5
              fix: at least 0 and below 1
          clip_norm: is -1.0
              fix: finite and at least 0
    """

    name: OptimizerName = "adamw"
    """Optimizer."""
    learning_rate: float = 3e-4
    """Peak learning rate, an absolute step size for every optimizer."""
    schedule: ScheduleName = "cosine"
    """Learning rate after warmup: constant, a half cosine, linear, falling as 1 / sqrt(step)
    (inverse-sqrt), or constant and then a decay as 1 - sqrt (wsd)."""
    schedule_fn: Callable[[Any], Any] | None = None
    """Learning rate by the number of completed steps, such as a schedule of optax, in place of
    learning_rate, schedule and what belongs to it. Only in Python."""
    warmup_steps: int = 0
    """Steps of linear warmup."""
    decay_fraction: float = 0.2
    """Fraction of all steps over which wsd decays."""
    final_fraction: float = 0.1
    """Learning rate of the last step as a fraction of the peak (cosine, linear, wsd)."""
    b1: float = 0.9
    """Decay of the mean of gradients (adamw, and muon for non-matrices), or its weight in the
    direction (lion)."""
    b2: float = 0.95
    """Decay of the mean of squared gradients (adamw, muon), or of the mean of gradients (lion)."""
    eps: float = 1e-8
    """Term added to the denominator of adamw."""
    momentum: float = 0.9
    """Momentum of sgd and of muon's matrices; with 0, sgd has no state."""
    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate; 0 disables it."""
    no_decay: tuple[str, ...] | None = None
    """Patterns, as in rule tables, of parameters without weight decay. They replace the default,
    which goes by structure: vectors of a layer (scales of norms, biases) and biases of any rank do
    not decay."""
    scales: tuple[str, ...] = ()
    """Rows PATTERN=FACTOR of the learning rate, as in rule tables: the first that matches a
    parameter decides; 0 freezes it, with its state kept."""
    moments: Kind = "float32"
    """Storage of the moments of adamw, lion and sgd: float32, bfloat16, or 8bit with a scale for
    each block."""
    moments_block: int = BLOCK
    """Largest block of 8bit moments, a power of two; one shard of a last dimension must hold whole
    blocks."""
    clip_norm: float = 1.0
    """Global norm that gradients are clipped to; 0 disables clipping."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the parameters, such as 0.999, which evaluations
    use; 0: no average."""

    def __post_init__(self) -> None:
        problems = check_fields(self, _FIELDS)
        problems += check_block("moments_block", self.moments_block)
        problems += _moments_problems(self)
        if self.schedule_fn is not None:
            problems += _schedule_problems(self)
        problems += _no_decay_problems(self)
        problems += _scales_problems(self)
        if problems:
            raise ConfigError("Invalid optimizer:", problems)


_FIELDS = {
    "name": get_args(OptimizerName),
    "schedule": get_args(ScheduleName),
    "moments": get_args(Kind),
    "learning_rate": "finite and above 0",
    "eps": "finite and above 0",
    "b1": "at least 0 and below 1",
    "b2": "at least 0 and below 1",
    "momentum": "at least 0 and below 1",
    "ema_decay": "at least 0 and below 1",
    "weight_decay": "finite and at least 0",
    "clip_norm": "finite and at least 0",
    "warmup_steps": "at least 0",
    "decay_fraction": "above 0 and at most 1",
    "final_fraction": "at least 0 and at most 1",
}


_FLOAT32_STATE: tuple[OptimizerName, ...] = ("adafactor", "muon")
"""Optimizers that keep their state in float32."""


def _moments_problems(config: OptimizerConfig) -> list[Problem]:
    """Return a problem if narrow moments are asked of an optimizer without them."""
    if config.moments == "float32" or config.name not in _FLOAT32_STATE:
        return []
    others = [name for name in get_args(OptimizerName) if name not in _FLOAT32_STATE]
    problem = Problem(
        "moments",
        f"is {config.moments}, and {config.name} keeps its state in float32",
        fix=f"float32, or name {any_of(others)}",
    )
    return [problem]


def _schedule_problems(config: OptimizerConfig) -> list[Problem]:
    """Return the problems of `schedule_fn`: no function of the step, or contradicting fields."""
    example = "a function of the step: optax.cosine_decay_schedule(…)"
    problems = check_call("schedule_fn", config.schedule_fn, "step", example)
    for field in ("learning_rate", "schedule", "warmup_steps", "decay_fraction", "final_fraction"):
        value = getattr(config, field)
        default = getattr(OptimizerConfig, field)
        if value != default:
            what = f"is {describe_value(value)}, and schedule_fn alone decides the learning rate"
            problems.append(Problem(field, what, fix="leave it out, or schedule_fn=None"))
    return problems


def _no_decay_problems(config: OptimizerConfig) -> list[Problem]:
    """Return the problems of the patterns in `no_decay`."""
    kinds = (tuple, list, type(None))
    problems = check_type("no_decay", config.no_decay, kinds, f'("{config.no_decay}",)')
    for index, pattern in enumerate(config.no_decay or ()):
        problems += _pattern_problems(f"no_decay[{index}]", pattern)
    return problems


def _scales_problems(config: OptimizerConfig) -> list[Problem]:
    """Return the problems of the rows PATTERN=FACTOR in `scales`."""
    problems = check_type("scales", config.scales, (tuple, list), f'("{config.scales}",)')
    for index, row in enumerate(config.scales):
        where = f"scales[{index}]"
        if not _has_factor(row):
            fix = "PATTERN=FACTOR, a number that is at least 0, such as embed/embedding=0.1"
            problems.append(Problem(where, f"is {row!r}", fix=fix))
        problems += _pattern_problems(where, _pattern_of(row))
    return problems


def _pattern_problems(where: str, pattern: str) -> list[Problem]:
    """Return a problem if a pattern is no regular expression."""
    try:
        compile_pattern(pattern)
    except PatternError as error:
        return [Problem(where, f"{pattern!r} is not a regular expression: {error}")]
    return []


def _pattern_of(row: str) -> str:
    """Return the pattern of a row of `scales`."""
    pattern, _, _ = row.rpartition("=")
    return pattern


def _factor_of(row: str) -> float:
    """Return the factor of a row of `scales`; ValueError if it is no number."""
    _, _, factor = row.rpartition("=")
    return float(factor)


def _has_factor(row: str) -> bool:
    """Return whether a row of `scales` ends in `=` and a finite factor of at least 0."""
    try:
        factor = _factor_of(row)
    except ValueError:
        return False
    return 0 <= factor < math.inf and "=" in row


def make_learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Make the learning-rate schedule.

    It is a function from the number of completed steps to a float32 scalar. The rate of step 0 is
    `peak / warmup_steps`, step `warmup_steps - 1` is the first at the peak, and the last step,
    `steps - 1`, is at `final_fraction * peak`. `wsd` decays as `1 - sqrt(progress)`, which Hägele
    et al. (arXiv:2405.18392) found to be better than a linear decay; warmup-stable-decay is from Hu
    et al. (arXiv:2404.06395), the half cosine from Loshchilov and Hutter (arXiv:1608.03983), the
    inverse square root, which goes on from the last step of the warmup, from Vaswani et al.
    (arXiv:1706.03762, section 5.3).

    Example:
        >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.25)
        >>> rate = make_learning_rate(config, steps=10)
        >>> [float(rate(step)) for step in (0, 3, 9)]
        [0.25, 1.0, 0.25]
    """
    if config.schedule_fn is not None:
        return _checked(config.schedule_fn)
    decay_steps = _decay_steps(config, steps)
    if not _schedule_fits(config, steps):
        problem = Problem(
            "steps",
            "too few for warmup and decay",
            f"(warmup_steps={config.warmup_steps}) + (decay={decay_steps}) against (steps={steps})",
            f"warmup_steps={steps // 10}, or more steps",
        )
        raise ConfigError("Invalid schedule:", [problem])
    warmup_steps = max(1, config.warmup_steps)
    decay_start = steps - decay_steps
    final = config.final_fraction

    def schedule(step: Any) -> jax.Array:
        count = jnp.asarray(step, jnp.float32) + 1
        limit: jax.Array | int = 1
        if config.schedule == "inverse-sqrt":
            limit = jnp.sqrt(warmup_steps / count)
        rate = config.learning_rate * jnp.minimum(count / warmup_steps, limit)
        if not decay_steps:
            return rate
        progress = jnp.clip((count - decay_start) / decay_steps, 0, 1)
        remaining = _remaining_fraction(config.schedule, progress)
        return rate * (final + (1 - final) * remaining)

    return schedule


def fit_warmup(config: OptimizerConfig, planned: int, steps: int) -> OptimizerConfig:
    """Return the config for a run of `steps` steps that is shorter than the one planned.

    A warmup that no longer fits keeps its share of the steps, rounded down. A schedule that does
    not fit the planned steps either is left as it is, for `make_learning_rate` to refuse.

    Example:
        >>> fit_warmup(OptimizerConfig(warmup_steps=30), planned=400, steps=20).warmup_steps
        1
    """
    if steps >= planned or steps < 1:
        return config
    if _schedule_fits(config, steps) or not _schedule_fits(config, planned):
        return config
    return dataclasses.replace(config, warmup_steps=config.warmup_steps * steps // planned)


def describe_schedule(config: OptimizerConfig, steps: int) -> str:
    """Return the learning rate, its warmup and its decay, in words.

    Example:
        >>> describe_schedule(OptimizerConfig(warmup_steps=30, schedule="wsd"), 400)
        'learning rate 0.0003, wsd: warmup of 30 of 400 steps, decay over the last 80 to 3e-05'
    """
    if config.schedule_fn is not None:
        return "learning rate by schedule_fn"
    text = f"learning rate {config.learning_rate:.4g}, {config.schedule}: "
    if config.warmup_steps:
        text += f"warmup of {config.warmup_steps:,} of {steps:,} steps"
    else:
        text += f"{steps:,} steps without warmup"
    decay_steps = _decay_steps(config, steps)
    if decay_steps:
        final = config.learning_rate * config.final_fraction
        text += f", decay over the last {decay_steps:,} to {final:.4g}"
    return text


def _schedule_fits(config: OptimizerConfig, steps: int) -> bool:
    """Return whether a run has a step after the warmup, and steps for the decay."""
    if config.schedule_fn is not None:
        return True
    warmup = config.warmup_steps
    return warmup < steps and warmup + _decay_steps(config, steps) <= steps


def _decay_steps(config: OptimizerConfig, steps: int) -> int:
    """Return the number of steps of the decay, at the end of a run of `steps` steps."""
    if config.schedule in ("cosine", "linear"):
        return steps - config.warmup_steps
    if config.schedule == "wsd":
        return max(1, round(config.decay_fraction * steps))
    return 0


def _remaining_fraction(schedule: ScheduleName, progress: jax.Array) -> jax.Array:
    """Return the height of a decay curve, from 1 to 0, at a progress from 0 to 1."""
    if schedule == "cosine":
        return (1 + jnp.cos(jnp.pi * progress)) / 2
    if schedule == "linear":
        return 1 - progress
    return 1 - jnp.sqrt(progress)  # wsd


def _checked(schedule_fn: Callable[[Any], Any]) -> optax.Schedule:
    """Convert a function's learning rate to a float32 scalar; ConfigError if it is no scalar."""

    def schedule(step: Any) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(schedule_fn(step), jnp.float32)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    rate = jax.eval_shape(schedule, step)
    if rate.shape:
        what = f"returns {describe_value(rate)}"
        problem = Problem("optimizer.schedule_fn", what, fix="one number for each step")
        raise ConfigError("Invalid schedule:", [problem])
    return schedule


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    stacked: Any = None,
    *,
    model: Model | ModelInfo | None = None,
    matrices: Mapping[str, Any] | None = None,
) -> TwoPhaseOptimizer:
    """Make the optimizer of a config: a clip of the global norm, then `make_update_rule(...)`.

    It needs `params`. With `ema_decay`, its state has an average of the parameters (`with_ema`).

    Args:
        config: The optimizer's.
        steps: The number of steps of the run, for the schedule.
        stacked: `Rules.stacked`; by default the stacks that the model recorded, and without a model
            `layers`.
        model: The trained model, or its `ModelInfo`. Muon reads from it which parameters are
            matrices, and weight decay which are biases. Without it both go by ranks alone.
        matrices: Pattern → the dimensions of inputs and of outputs of one layer's kernel, `((0,),
            (1, 2))`, for Muon, where its layer does not say them; or None for a parameter that
            AdamW updates.

    Raises:
        ConfigError: A row of `matrices` cannot be read. When the state is made or planned: a kernel
            of three or more dimensions that nobody explains, one that two explain, or Muon without
            a matrix.

    Example:
        >>> config = OptimizerConfig(name="sgd", learning_rate=0.5, schedule="constant")
        >>> optimizer = make_optimizer(config, steps=1)
        >>> params = {"kernel": jnp.array([[2.0]])}
        >>> gradients = {"kernel": jnp.array([[8.0]])}
        >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        >>> updates["kernel"]  # the gradient is clipped to 1, the weight decays by 0.1 * 2
        Array([[-0.6]], dtype=float32)
    """
    rows, row_problems = read_matrices(matrices or {})
    problems = _argument_problems(config, steps, stacked, model) + row_problems
    problems += _rates_problems(config, model)
    if rows and config.name != "muon":
        what = f"is given, and {config.name} treats matrices as all other parameters"
        problems.append(Problem("matrices", what, fix="leave it out, or name muon"))
    if problems:
        raise ConfigError("Invalid optimizer:", problems)

    clip = optax.identity()
    if config.clip_norm:
        clip = optax.clip_by_global_norm(config.clip_norm)

    def global_phase(gradients: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        with jax.numpy_dtype_promotion("standard"):
            return clip.update(gradients, clip.init(gradients))[0], {}

    info = read_model(model)
    if stacked is None and info is not None:
        stacked = info.stacks
    treatment = Treatment(
        config.name,
        read_stacked(stacked),
        info,
        rows,
        config.no_decay,
        decay=config.weight_decay > 0,
    )
    param_phase = make_update_rule(config, steps, treatment)
    optimizer = two_phase(global_phase, param_phase, treatment)
    if config.ema_decay:
        return with_ema(optimizer, config.ema_decay)
    return optimizer


def _argument_problems(config: Any, steps: Any, stacked: Any, model: Any) -> list[Problem]:
    """Return a problem for each argument of `make_optimizer` of another type."""
    problems = check_type("config", config, OptimizerConfig, 'spmd.OptimizerConfig(name="adamw")')
    problems += check_type("steps", steps, int, "a whole number")
    if isinstance(stacked, str):
        problems.append(Problem("stacked", f"is {describe_value(stacked)}", fix=f'("{stacked}",)'))
    fix = "the model that is trained, spmd.from_nnx(…), or its info()"
    problems += check_type("model", model, (Model, ModelInfo, type(None)), fix)
    return problems


_WITH_RATES = ("adamw", "adafactor", "lion")
"""Optimizers whose updates have the same size whatever that of gradients, as muP's rates need."""


def _rates_problems(config: OptimizerConfig, model: Any) -> list[Problem]:
    """Return a problem of an optimizer for which a model's rates are not meant."""
    if not isinstance(model, Model | ModelInfo) or config.name in _WITH_RATES:
        return []
    info = read_model(model)
    if info is None or not info.rates:
        return []
    what = f"is {config.name}, and the model's learning rates by muP are for Adam and its like"
    return [Problem("name", what, fix=any_of(_WITH_RATES))]


def make_update_rule(
    config: OptimizerConfig, steps: int, treatment: Treatment
) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer without the clip. It needs `params`.

    Its update of one layer depends on no other. Adafactor (Shazeer and Stern, arXiv:1804.04235) has
    no momentum and no scaling by the parameter, so that `learning_rate` is an absolute step size as
    for the others; its direction is clipped to a root mean square of 1. Muon (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of matrices, and updates
    lookups, heads, scales and biases by AdamW; its direction has the root mean square of AdamW's,
    0.2, so that both share one learning rate and one decay (Liu et al., arXiv:2502.16982). A kernel
    of more dimensions is the matrix of its inputs by its outputs, or a batch of them. AdamW, Lion
    (Chen et al., arXiv:2302.06675) and SGD are elementwise and need no `per_layer`.
    """
    stages = [_direction(config, treatment)]
    if config.weight_decay:
        stages.append(_weight_decay(config.weight_decay, treatment))
    schedule = make_learning_rate(config, steps)
    stages.append(optax.scale_by_learning_rate(schedule))
    if config.scales or treatment.has_rates:
        stages.append(_scale_by_path(config.scales, treatment))
    return _standard_promotion(optax.chain(*stages))


def _direction(config: OptimizerConfig, treatment: Treatment) -> optax.GradientTransformation:
    """Return the transform from a gradient to the direction of the optimizer."""
    stacks = treatment.stacks
    quantize = functools.partial(
        quantize_moments,
        kind=config.moments,
        block=config.moments_block,
        stacked=stacks,
    )
    match config.name:
        case "adamw":
            return quantize(optax.scale_by_adam(config.b1, config.b2, config.eps))
        case "adafactor":
            factored = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
            return per_layer(factored, stacks)
        case "muon":
            return _muon(config, treatment)
        case "lion":
            return quantize(optax.scale_by_lion(config.b1, config.b2))
        case "sgd":
            if not config.momentum:
                return optax.identity()
            return quantize(optax.trace(config.momentum))


def _weight_decay(weight_decay: float, treatment: Treatment) -> optax.GradientTransformation:
    """Add the decay of the parameters to the direction."""

    def decays(path: str, param: Any) -> bool:
        return treatment.decays(path, len(param.shape))

    mask = functools.partial(map_with_path, decays)
    return optax.add_decayed_weights(weight_decay, mask)


def _scale_by_path(scales: Sequence[str], treatment: Treatment) -> optax.GradientTransformation:
    """Multiply the update of each parameter by the first matching row, and by the model's rate."""
    factors = dict[str, float]()
    for row in scales:
        factors.setdefault(_pattern_of(row), _factor_of(row))

    def factor_of(path: str) -> float:
        for pattern, factor in factors.items():
            if matches(pattern, path, treatment.stacks):
                return factor * treatment.rate(path)
        return treatment.rate(path)

    def scale(path: str, update: jax.Array) -> jax.Array:
        factor = factor_of(path)
        if factor == 1:
            return update
        return update * factor

    return optax.stateless(lambda updates, params: map_with_path(scale, updates))


MUON_RMS = 0.2
"""Root mean square of AdamW's direction, as measured by Liu et al. (arXiv:2502.16982, section
2.2)."""


def _muon(config: OptimizerConfig, treatment: Treatment) -> optax.GradientTransformationExtraArgs:
    """Return Muon for the matrices of layers and AdamW for the rest.

    Its update takes the extra argument `layout`, an `UpdateLayout`; without it, each device
    computes what XLA makes of the matrices.
    """

    def label(path: str, x: Any) -> str:
        return "adamw" if treatment.matrix(path, x.ndim) is None else "muon"

    adamw = optax.scale_by_adam(config.b1, config.b2, config.eps)
    # The identity keeps the paths of the state: checkpoints have a pair here.
    momentum = optax.chain(nesterov_momentum(config.momentum), optax.identity())
    labels = functools.partial(map_with_path, label)
    by_layer = per_layer(
        optax.partition({"muon": momentum, "adamw": adamw}, labels), treatment.stacks
    )

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        layout: UpdateLayout | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        updates, state = by_layer.update(updates, state, params, **extra)
        return orthogonalize(updates, treatment, layout, MUON_RMS), state

    return optax.GradientTransformationExtraArgs(by_layer.init, update)


def check_patterns(
    config: OptimizerConfig, paths: Sequence[str], stacked: Any = None, tied: Tied = ()
) -> list[Problem]:
    """Return a problem for each pattern without a matching parameter.

    Example:
        >>> print(*check_patterns(OptimizerConfig(no_decay=("scales",)), ["norm/scale"]))
        no_decay: 'scales' matches no parameter
            fix: did you mean "scale"?
    """
    stacks = read_stacked(stacked)
    named = [("no_decay", pattern) for pattern in config.no_decay or ()]
    named += [("scales", _pattern_of(row)) for row in config.scales]
    problems = []
    for field, pattern in named:
        if any(matches(pattern, path, stacks) for path in paths):
            continue
        fix = first_path(pattern, tied=tied, stacked=stacks)
        if not fix:
            last_components = {path.rsplit("/", 1)[-1] for path in paths}
            fix = did_you_mean(pattern, sorted(last_components))
        problems.append(Problem(field, f"{pattern!r} matches no parameter", fix=fix))
    return problems


def _standard_promotion(
    transform: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transform for callers with strict dtype promotion: optax fails under it."""
    inner = optax.with_extra_args_support(transform)

    def init(params: PyTree) -> PyTree:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)
