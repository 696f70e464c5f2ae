"""An optimizer from a description: learning-rate schedule, weight-decay mask, clipping, all from optax.

```python
config = OptimizerConfig(name="adamw", learning_rate=3e-4, schedule="wsd", warmup_steps=100)
optimizer = make_optimizer(config, steps=10_000)
```

All optimizers are written in one way, `step = -learning_rate * (direction + weight_decay * parameter)`,
and differ only in the direction: weight decay is decoupled from the gradient and goes with the learning rate
(Loshchilov and Hutter, arXiv:1711.05101), also for SGD and Adafactor. Which parameters decay goes by path.

An optimizer here sees layers, not stacks: a direction that looks at a whole array (Adafactor, Muon) runs once per
layer of a stacked parameter (`per_layer`), so scanned and unrolled layers train alike.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.optim.per_layer import per_layer
from spmd.optim.quantized import BLOCK, Kind, quantize_moments
from spmd.optim.two_phase import TwoPhaseOptimizer, two_phase
from spmd.sharding.layer_paths import strip_layer_numbers
from spmd.sharding.rules import compile_pattern
from spmd.tree import PyTree, map_with_path

OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
ScheduleName = Literal["constant", "cosine", "wsd"]

NO_DECAY = ("[^/]*norm[^/]*/[^/]+", "bias")
"""Patterns of the parameters that conventionally do not decay: everything in a norm, and biases."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become a step.

    Raises:
        ConfigError: A value is outside its range; the error lists every field that is.

    Example:
        >>> OptimizerConfig(b1=1.5, clip_norm=-1.0)
        Traceback (most recent call last):
        spmd.errors.ConfigError: This optimizer cannot be made:
          b1: is 1.5
              fix: at least 0 and below 1
          clip_norm: is -1.0
              fix: at least 0; 0 turns clipping off
    """

    name: OptimizerName = "adamw"
    """The optimizer."""
    learning_rate: float = 3e-4
    """The peak learning rate, an absolute step size for every optimizer."""
    schedule: ScheduleName = "cosine"
    """After warmup: stay at the peak, follow a half cosine, or stay and then decay as 1 - sqrt (wsd)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    decay_fraction: float = 0.2
    """The last part of all steps over which wsd decays."""
    final_fraction: float = 0.1
    """The learning rate of the last step as a part of the peak (cosine, wsd)."""
    b1: float = 0.9
    """Decay of the mean of gradients (adamw, and muon for what is no matrix), or its weight in the direction (lion)."""
    b2: float = 0.95
    """Decay of the mean of squared gradients (adamw, muon), or of the mean of gradients (lion)."""
    eps: float = 1e-8
    """Added to the denominator of adamw."""
    momentum: float = 0.9
    """Momentum of sgd and of muon's matrices; with 0, sgd keeps no state."""
    weight_decay: float = 0.1
    """Decay towards zero, decoupled and multiplied by the learning rate; 0 turns it off."""
    no_decay: tuple[str, ...] = NO_DECAY
    """Patterns of parameter paths that do not decay, each for whole components up to the path's end."""
    moments: Kind = "float32"
    """How the averages of adamw, lion and sgd are stored: float32, bfloat16, or 8bit with a scale for each block."""
    moments_block: int = BLOCK
    """The largest block of 8bit moments, a power of two; one shard of a last dimension must hold whole blocks."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient, which is scaled down to it; 0 turns clipping off."""

    def __post_init__(self) -> None:
        problems = []
        for field, choices in (
            ("name", get_args(OptimizerName)),
            ("schedule", get_args(ScheduleName)),
            ("moments", get_args(Kind)),
        ):
            if (value := getattr(self, field)) not in choices:
                problems.append(Problem(field, f"is {value!r}", fix=did_you_mean(str(value), choices)))
        for field, fits, fix in _RANGES:
            value = getattr(self, field)
            if not (math.isfinite(value) and fits(value)):
                problems.append(Problem(field, f"is {value}", fix=fix))
        if self.moments != "float32" and self.name in ("adafactor", "muon"):
            what = f"is {self.moments}, and {self.name} keeps its state in float32"
            problems.append(Problem("moments", what, fix="float32, or name adamw, lion or sgd"))
        for index, pattern in enumerate(self.no_decay):
            try:
                compile_pattern(pattern)
            except re.error as error:
                problems.append(Problem(f"no_decay[{index}]", f"{pattern!r} is not a regular expression: {error}"))
        if problems:
            raise ConfigError("This optimizer cannot be made:", problems)


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("learning_rate", lambda x: x > 0, "above 0"),
    ("warmup_steps", lambda x: x >= 0, "at least 0"),
    ("decay_fraction", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("final_fraction", lambda x: 0 <= x <= 1, "from 0 to 1"),
    ("b1", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("b2", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("eps", lambda x: x > 0, "above 0"),
    ("moments_block", lambda x: x >= 1 and not int(x) & (int(x) - 1), "a power of two"),
    ("momentum", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("weight_decay", lambda x: x >= 0, "at least 0; 0 turns it off"),
    ("clip_norm", lambda x: x >= 0, "at least 0; 0 turns clipping off"),
)


def make_learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of every step, from the number of steps that were done before it.

    Step 0 already moves (its rate is `peak / warmup_steps`), step `warmup_steps - 1` is the first at the
    peak, and the last step, `steps - 1`, is at `final_fraction * peak`. The decay of `wsd` goes as
    `1 - sqrt(progress)`, which Hägele et al. (arXiv:2405.18392) measure to be better than a line;
    warmup-stable-decay is from Hu et al. (arXiv:2404.06395), the half cosine from Loshchilov and Hutter
    (arXiv:1608.03983).

    Args:
        config: The description.
        steps: All steps of the run.

    Returns:
        A function from the step (0 for the first) to the learning rate, a float32 scalar.

    Raises:
        ConfigError: Warmup and decay do not fit into `steps`.

    Example:
        >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.25)
        >>> rate = make_learning_rate(config, steps=10)
        >>> [float(rate(step)) for step in (0, 3, 9)]
        [0.25, 1.0, 0.25]
    """
    decay_steps = {
        "constant": 0,
        "cosine": steps - config.warmup_steps,
        "wsd": max(1, round(config.decay_fraction * steps)),
    }[config.schedule]
    if config.warmup_steps >= steps or config.warmup_steps + decay_steps > steps:
        arithmetic = f"(warmup_steps={config.warmup_steps}) + (decay={decay_steps}) against (steps={steps})"
        problem = Problem("steps", "too few for warmup and decay", arithmetic, "a shorter warmup, or more steps")
        raise ConfigError("This schedule cannot be made:", [problem])
    warmup_steps, final = max(1, config.warmup_steps), config.final_fraction

    def schedule(step: Any) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1
        rate = config.learning_rate * jnp.minimum(done / warmup_steps, 1)
        if not decay_steps:
            return rate
        progress = jnp.clip((done - (steps - decay_steps)) / decay_steps, 0, 1)
        left = 1 - jnp.sqrt(progress) if config.schedule == "wsd" else (1 + jnp.cos(jnp.pi * progress)) / 2
        return rate * (final + (1 - final) * left)

    return schedule


def make_optimizer(config: OptimizerConfig, steps: int, stacked: Sequence[str] = ("layers",)) -> TwoPhaseOptimizer:
    """The optimizer that `config` describes, behind one clip of the whole gradient.

    Args:
        config: The description.
        steps: All steps of the run, for the schedule.
        stacked: Path components whose parameters are stacked on leading dimensions.

    Returns:
        The clip of the global norm, and then `make_update_rule(...)`. Its update needs `params`.

    Raises:
        ConfigError: Warmup and decay do not fit into `steps`.

    Example:
        >>> config = OptimizerConfig(name="sgd", learning_rate=0.5, schedule="constant")
        >>> optimizer = make_optimizer(config, steps=1)
        >>> params = {"kernel": jnp.array([2.0])}
        >>> updates, _ = optimizer.update({"kernel": jnp.array([8.0])}, optimizer.init(params), params)
        >>> updates["kernel"]  # the gradient is clipped to 1, the weight decays by 0.1 * 2
        Array([-0.6], dtype=float32)
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()

    def whole(gradients: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        with jax.numpy_dtype_promotion("standard"):
            return clip.update(gradients, clip.init(gradients))[0], {}

    return two_phase(whole, make_update_rule(config, steps, stacked))


def make_update_rule(
    config: OptimizerConfig, steps: int, stacked: Sequence[str] = ("layers",)
) -> optax.GradientTransformationExtraArgs:
    """The optimizer without the clip: a transform that treats every layer by itself.

    It may therefore be run on any part of the parameters, such as one layer after another.

    Adafactor (Shazeer and Stern, arXiv:1804.04235) runs without momentum and without multiplying by the
    parameter's scale, so that `learning_rate` is an absolute step size as for the others; its direction is
    clipped to a root mean square of 1. Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/)
    orthogonalises the momentum of the matrices inside layers, and leaves embeddings, heads, norms and biases to
    AdamW; its direction has the root mean square of AdamW's, 0.2, so that both share one learning rate and one
    decay (Liu et al., arXiv:2502.16982). AdamW, Lion (Chen et al., arXiv:2302.06675) and SGD look at one
    element at a time: on a stack they do what they do on its layers, and their state stays plain.

    Args:
        config: The description.
        steps: All steps of the run, for the schedule.
        stacked: Path components whose parameters are stacked on leading dimensions.

    Returns:
        `chain(direction, weight decay, learning rate)`. Its update needs `params`.

    Raises:
        ConfigError: Warmup and decay do not fit into `steps`.
    """
    match config.name:
        case "adamw":
            direction = _compact(optax.scale_by_adam(config.b1, config.b2, config.eps), config, stacked)
        case "adafactor":
            factored = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
            direction = per_layer(factored, stacked)
        case "muon":
            direction = per_layer(_muon(config, stacked), stacked)
        case "lion":
            direction = _compact(optax.scale_by_lion(config.b1, config.b2), config, stacked)
        case "sgd":
            momentum = _compact(optax.trace(config.momentum), config, stacked)
            direction = momentum if config.momentum else optax.identity()
    patterns = [compile_pattern(pattern) for pattern in config.no_decay]

    def decays(path: str) -> bool:
        name = strip_layer_numbers(path, stacked)
        return not any(pattern.fullmatch(name) for pattern in patterns)

    def mask(params: PyTree) -> PyTree:
        return map_with_path(lambda path, _: decays(path), params)

    decay = [optax.add_decayed_weights(config.weight_decay, mask)] if config.weight_decay else []
    learning_rate = optax.scale_by_learning_rate(make_learning_rate(config, steps))
    return _standard_promotion(optax.chain(direction, *decay, learning_rate))


def _compact(
    transform: optax.GradientTransformation, config: OptimizerConfig, stacked: Sequence[str]
) -> optax.GradientTransformation:
    """The transform with its moments stored as `config` says."""
    return quantize_moments(transform, config.moments, config.moments_block, stacked)


MUON_RMS = 0.2
"""The root mean square of AdamW's direction as Liu et al. measured it (arXiv:2502.16982, section 2.2)."""


def _muon(config: OptimizerConfig, stacked: Sequence[str]) -> optax.GradientTransformation:
    """Muon for the matrices of a layer, AdamW for the rest; sees single layers."""

    def matrices(params: PyTree) -> PyTree:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)

    def scale(updates: PyTree, _: PyTree) -> PyTree:
        # An orthogonal matrix of this shape has a root mean square of 1 / √(its longer side).
        return jax.tree.map(lambda x: x * (MUON_RMS * math.sqrt(max(x.shape))), updates)

    def labels(params: PyTree) -> PyTree:
        def label(path: str, x: Any) -> str:
            return "muon" if x.ndim == 2 and not set(path.split("/")).isdisjoint(stacked) else "adamw"

        return map_with_path(label, params)

    orthogonal = contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=matrices)
    return optax.partition(
        {
            "muon": optax.chain(orthogonal, optax.stateless(scale)),
            "adamw": optax.scale_by_adam(config.b1, config.b2, config.eps),
        },
        labels,
    )


def check_no_decay(
    config: OptimizerConfig, paths: Iterable[str], stacked: Sequence[str] = ("layers",)
) -> list[Problem]:
    """The patterns of `no_decay` that match no parameter, which would otherwise be silent.

    Patterns of the default, `NO_DECAY`, are not reported: a model may have no biases.

    Args:
        config: The description.
        paths: The paths of all parameters.
        stacked: As for `make_optimizer`.

    Returns:
        One problem for each pattern.

    Example:
        >>> print(*check_no_decay(OptimizerConfig(no_decay=("scales",)), ["norm/scale"]))
        no_decay: 'scales' matches no parameter
            fix: did you mean "scale"?
    """
    names = [strip_layer_numbers(path, stacked) for path in paths]
    ends = sorted({name.rsplit("/", 1)[-1] for name in names})
    return [
        Problem("no_decay", f"{pattern!r} matches no parameter", fix=did_you_mean(pattern, ends))
        for pattern in config.no_decay
        if pattern not in NO_DECAY and not any(map(compile_pattern(pattern).fullmatch, names))
    ]


def _standard_promotion(transform: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap a transform for callers that made dtype promotion strict, under which optax fails."""
    inner = optax.with_extra_args_support(transform)

    def init(params: PyTree) -> PyTree:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)
