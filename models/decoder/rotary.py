"""Rotary position embeddings (Su et al., arXiv:2104.09864), also for longer contexts.

| scaling of frequencies | type in config.json | source |
|---|---|---|
| `RopeScaling` | `default` | arXiv:2104.09864 |
| `LinearScaling` | `linear` | Chen et al., arXiv:2306.15595 |
| `DynamicScaling` | `dynamic` | Peng et al., arXiv:2309.00071, appendix B |
| `YarnScaling` | `yarn` | Peng et al., arXiv:2309.00071, section 3 |
| `LongRopeScaling` | `longrope` | Ding et al., arXiv:2402.13753 |
| `Llama3Scaling` | `llama3` | Grattafiori et al., arXiv:2407.21783 |
| `ProportionalScaling` | `proportional` | `rope_parameters` of Gemma 4 |

The frequencies of `DynamicScaling` and `LongRopeScaling` depend on a length: that of the sequence,
or of the KV cache in prefill and decoding. All tokens of a program use the same frequencies, also
those of packed documents.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spmd.errors import ConfigError, Problem, check_fields, check_type
from spmd.layers.kv_cache import cache_length, context_length
from spmd.plan.annotate import attention_config

Angles = tuple[np.ndarray | Array, np.ndarray | Array]
"""Cosines and sines of each position, `[batch, seq, rotated / 2]` each, for the first `rotated`
dimensions of a head; a batch of 1 if all rows are equal."""

_PREFIX = "rope_scaling."
_FACTOR = {"factor": "at least 1 and finite"}
_CONTEXT = {"original_context": "at least 1"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies without scaling, and the base class of all scalings."""

    kind: ClassVar[str] = "default"
    """Value of `rope_type` in config.json."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ConfigError("Invalid RoPE scaling:", problems)

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        return []

    def width_problems(self, width: int) -> list[Problem]:
        """Return a problem for each field at odds with the number of rotated dimensions."""
        return []

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequency of each pair of dimensions, in radians per token.

        Args:
            width: Rotated dimensions of a head.
            theta: Base of the frequencies.
            length: Longest sequence, in tokens.
        """
        return _plain_frequencies(width, theta)

    @property
    def attention_scaling(self) -> float:
        """Factor of all cosines and sines."""
        return 1.0

    @property
    def score_scaling(self) -> float:
        """Factor of the attention scores in latent attention (DeepSeek-V2)."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by a factor (position interpolation, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"
    factor: float = 1.0
    """Divisor of all frequencies."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        return check_fields(self, _FACTOR, prefix=_PREFIX)

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequencies after scaling, as in the base class."""
        return _plain_frequencies(width, theta) / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """A larger base for sequences beyond the original context (NTK-aware scaling by length).

    Source: arXiv:2309.00071, appendix B.1 and B.2. For `length` tokens the base is multiplied by
    `(factor · length / original_context − factor + 1)^(width / (width − 2))`. In `transformers` the
    base grows while a text is generated, and the keys in the cache stay those of smaller ones; here
    it is that of the cache's length from the first token.
    """

    kind: ClassVar[str] = "dynamic"
    factor: float = 1.0
    """Growth of the base per original context (`factor`)."""
    original_context: int = 2048
    """Longest sequence with the original base, in tokens (`max_position_embeddings`)."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        return check_fields(self, _FACTOR | _CONTEXT, prefix=_PREFIX)

    def width_problems(self, width: int) -> list[Problem]:
        """Return a problem for each field at odds with the number of rotated dimensions."""
        if width > 2:
            return []
        what = "has no exponent for 2 rotated dimensions"
        fix = "heads with 4 or more of them"
        return [Problem("rope_scaling", what, "width / (width - 2) = 2 / 0", fix)]

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequencies for a length, as in the base class."""
        if length <= self.original_context:
            return _plain_frequencies(width, theta)
        growth = self.factor * length / self.original_context - (self.factor - 1)
        return _plain_frequencies(width, theta * growth ** (width / (width - 2)))


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """Low frequencies divided, high ones unchanged, and longer vectors (YaRN, arXiv:2309.00071).

    Section 3.2: pairs of dimensions with fewer than `beta_slow` turns in the original context are
    divided by `factor`, those with more than `beta_fast` are unchanged, and between the two indices
    the share grows linearly. Section 3.4: cosines and sines are multiplied by `attention_scaling`.
    """

    kind: ClassVar[str] = "yarn"
    factor: float = 1.0
    """Divisor of low frequencies."""
    original_context: int = 2048
    """Sequence length of pretraining, in tokens (`original_max_position_embeddings`)."""
    beta_fast: float = 32.0
    """Turns in the original context from which a frequency is unchanged."""
    beta_slow: float = 1.0
    """Turns in the original context up to which a frequency is divided."""
    attention_factor: float | None = None
    """Factor of cosines and sines; None for the one that follows from `factor`."""
    mscale: float = 0.0
    """Weight of ln(factor) in the numerator of that one (DeepSeek-V2); 0 for none."""
    mscale_all_dim: float = 0.0
    """Its weight in the denominator, and in the scores of latent attention; 0 for none."""
    truncate: bool = True
    """Round the indices of both bounds outwards to integers."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        rules = _FACTOR | _CONTEXT
        rules |= {"beta_fast": "above 0 and finite", "beta_slow": "above 0 and finite"}
        rules |= {"mscale": "at least 0 and finite", "mscale_all_dim": "at least 0 and finite"}
        rules["attention_factor"] = "above 0 and finite"
        problems = check_fields(self, rules, prefix=_PREFIX)
        if not problems and self.beta_fast < self.beta_slow:
            problem = Problem(
                "rope_scaling.beta_fast",
                "is smaller than rope_scaling.beta_slow",
                f"fast {self.beta_fast:g}, slow {self.beta_slow:g}",
                "beta_slow <= beta_fast",
            )
            problems.append(problem)
        if self.mscale and not self.mscale_all_dim:
            problem = Problem(
                "rope_scaling.mscale",
                "has no effect without rope_scaling.mscale_all_dim",
                fix="both, or neither",
            )
            problems.append(problem)
        return problems

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequencies after scaling, as in the base class."""
        plain = _plain_frequencies(width, theta)
        low = self._index(self.beta_fast, width, theta)
        high = self._index(self.beta_slow, width, theta)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, width - 1)
        if low == high:
            high += 0.001  # a step at this index
        divided = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
        return plain * (1 - divided) + plain / self.factor * divided

    def _index(self, turns: float, width: int, theta: float) -> float:
        """Return the index, not an integer, of the pair with so many turns in the context."""
        radians = 2 * math.pi * turns
        return width * math.log(self.original_context / radians) / (2 * math.log(theta))

    @property
    def attention_scaling(self) -> float:
        """Factor of all cosines and sines, 0.1 · ln(factor) + 1 by default (equation 22)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if not self.mscale:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_scaling(self) -> float:
        """Factor of the attention scores in latent attention (DeepSeek-V2)."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """A divisor for each frequency, searched for short and for long texts (arXiv:2402.13753).

    In `transformers` the divisors change when a text grows beyond the original context, and the
    cache is computed again; here they are those of the cache's length from the first token.
    """

    kind: ClassVar[str] = "longrope"
    factor: float = 1.0
    """Ratio of the longest context to the original one (`factor`)."""
    original_context: int = 2048
    """Sequence length of pretraining, in tokens (`original_max_position_embeddings`)."""
    short_factor: tuple[float, ...] = ()
    """Divisors of frequencies up to the original context, one for each pair of dimensions."""
    long_factor: tuple[float, ...] = ()
    """Divisors of frequencies beyond it."""
    attention_factor: float | None = None
    """Factor of cosines and sines; None for the one that follows from `factor`."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        rules = _FACTOR | {"original_context": "at least 2"}
        rules["attention_factor"] = "above 0 and finite"
        problems = check_fields(self, rules, prefix=_PREFIX)
        short = len(self.short_factor)
        long = len(self.long_factor)
        if not short or short != long:
            problem = Problem(
                "rope_scaling.long_factor",
                "has no divisor for each one of rope_scaling.short_factor",
                f"long {long}, short {short}",
                "two lists of equal length, head_dim / 2",
            )
            problems.append(problem)
        for name in ("short_factor", "long_factor"):
            wrong = [value for value in getattr(self, name) if not 0 < value < math.inf]
            if wrong:
                what = f"has {wrong[0]!r}"
                problem = Problem(_PREFIX + name, what, fix="above 0 and finite")
                problems.append(problem)
        return problems

    def width_problems(self, width: int) -> list[Problem]:
        """Return a problem for each field at odds with the number of rotated dimensions."""
        count = len(self.short_factor)
        if count == width // 2:
            return []
        problem = Problem(
            "rope_scaling.short_factor",
            "has not one divisor for each pair of rotated dimensions",
            f"{count} divisors, {width} / 2 = {width // 2} pairs",
            f"lists of {width // 2}",
        )
        return [problem]

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequencies for a length, as in the base class."""
        divisors = self.long_factor
        if length <= self.original_context:
            divisors = self.short_factor
        return _plain_frequencies(width, theta) / np.array(divisors)

    @property
    def attention_scaling(self) -> float:
        """Factor of all cosines and sines, √(1 + ln(factor) / ln(original_context)) by default."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Scaling by the turns in the original context (Llama 3.1).

    Source: Grattafiori et al., arXiv:2407.21783, section 3.4.2 and the published code of the model.
    A frequency with fewer than `low_frequency_factor` turns in the original context is divided by
    `factor`, one with more than `high_frequency_factor` turns is unchanged, and between them the
    two are interpolated.
    """

    kind: ClassVar[str] = "llama3"
    factor: float = 1.0
    """Divisor of low frequencies; 1 for no scaling."""
    low_frequency_factor: float = 1.0
    """Turns in the original context up to which a frequency is divided."""
    high_frequency_factor: float = 4.0
    """Turns in the original context from which a frequency is unchanged."""
    original_context: int = 8192
    """Sequence length of pretraining, in tokens."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        problems = check_fields(self, _FACTOR | _CONTEXT, prefix=_PREFIX)
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        if not 0 < low <= high:
            problem = Problem(
                "rope_scaling",
                "has factors out of order",
                f"low {low}, high {high}",
                "0 < low_frequency_factor <= high_frequency_factor",
            )
            problems.append(problem)
        return problems

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequencies after scaling, as in the base class."""
        return self.scaled(_plain_frequencies(width, theta))

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the frequencies, in radians per token, after scaling.

        Example:
            >>> Llama3Scaling(8.0).scaled(np.array([1.0, 1e-5])).tolist()
            [1.0, 1.25e-06]
        """
        if self.factor == 1:
            return frequencies
        turns = self.original_context * frequencies / (2 * np.pi)
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        if low == high:
            kept = np.where(turns < low, 0.0, 1.0)  # a step (Llama 4)
        else:
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        factors = kept + (1 - kept) / self.factor
        return frequencies * factors


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """The fastest frequencies of a whole head, and 0 for its other pairs (Gemma 4).

    Partial rotary embeddings of a fraction of the dimensions have the frequencies of a smaller
    head, and pairs within the fraction; these pairs are `(i, i + dim/2)` of the head.
    """

    kind: ClassVar[str] = "proportional"
    factor: float = 1.0
    """Divisor of all frequencies."""
    rotary_fraction: float = 1.0
    """Fraction of the pairs with a frequency above 0 (`partial_rotary_factor`)."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        rules = _FACTOR | {"rotary_fraction": "above 0 and at most 1"}
        return check_fields(self, rules, prefix=_PREFIX)

    def frequencies(self, width: int, theta: float, length: int) -> Float[np.ndarray, "pair"]:
        """Return the frequencies after scaling, as in the base class."""
        frequencies = _plain_frequencies(width, theta) / self.factor
        turning = int(self.rotary_fraction * width // 2)
        frequencies[turning:] = 0.0
        return frequencies


SCALINGS: dict[str, type[RopeScaling]] = {
    scaling.kind: scaling
    for scaling in (
        RopeScaling,
        LinearScaling,
        DynamicScaling,
        YarnScaling,
        LongRopeScaling,
        Llama3Scaling,
        ProportionalScaling,
    )
}
"""Value of `rope_type` in config.json → scaling."""


def _plain_frequencies(width: int, theta: float) -> Float[np.ndarray, "pair"]:
    exponents = -np.arange(0, width, 2) / width
    return theta**exponents


def rotated_width(head_dim: int, fraction: float) -> int:
    """Return the number of rotated dimensions of a head, the first ones.

    Example:
        >>> rotated_width(80, 0.4)
        32
    """
    return int(head_dim * fraction)


def rotary_fraction(rotated: int, head_dim: int) -> float:
    """Return the fraction of a head with so many dimensions: the inverse of `rotated_width`.

    Example:
        >>> rotated_width(44, 30 / 44), rotated_width(44, rotary_fraction(30, 44))
        (29, 30)
    """
    fraction = rotated / head_dim
    if rotated_width(head_dim, fraction) < rotated:
        return math.nextafter(fraction, 1.0)
    return fraction


def rotary_problems(
    head_dim: int, scaling: RopeScaling = RopeScaling(), fraction: float = 1.0
) -> list[Problem]:
    """Return a problem for each reason why heads cannot be rotated.

    Args:
        head_dim: Dimensions of a head.
        scaling: As for `rotary_angles`.
        fraction: As for `rotary_angles`.
    """
    problems = check_type("model.rope_scaling", scaling, RopeScaling, "RopeScaling() for none")
    if problems:
        return problems
    width = rotated_width(head_dim, fraction)
    if not width % 2 and 0 < width <= head_dim:
        return scaling.width_problems(width)
    problem = Problem(
        "rotary fraction",
        "rotates no even number of dimensions",
        f"{fraction:g} · head_dim {head_dim} = {head_dim * fraction:g}",
        "a fraction above 0 and at most 1, with an even product",
    )
    return [problem]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions of one kind of layer; a field of 0 or None has the network's value."""

    theta: float = 0.0
    """Base of the frequencies (`rope_theta`)."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies for a longer context."""
    fraction: float = 1.0
    """Fraction of each head that is rotated, its first dimensions (`partial_rotary_factor`)."""
    interleaved: bool = False
    """Rotate pairs `(2i, 2i + 1)` instead of halves of a head (GPT-J, GLM, Cohere, DeepSeek)."""
    negative: bool = False
    """Rotate by negative angles (nanochat)."""

    def resolve(self, theta: float, scaling: RopeScaling) -> "Rotary":
        """Return the positions with the network's values where they have none of their own."""
        if self.scaling is not None:
            scaling = self.scaling
        return dataclasses.replace(self, theta=self.theta or theta, scaling=scaling)

    def problems(self, where: str, head_dim: int) -> list[Problem]:
        """Return a problem for each invalid field, and for heads of odd width."""
        problems = check_fields(self, {"theta": "above 0"}, prefix=f"{where}rotary.")
        if head_dim % 2 and self.fraction == 1:
            fix = "an even width, for rotary embeddings"
            problem = Problem(f"{where}head_dim", "is odd", f"head_dim = {head_dim}", fix)
            return [*problems, problem]
        assert self.scaling is not None, "the spec is not resolved"
        return problems + rotary_problems(head_dim, self.scaling, self.fraction)

    def angles(self, positions: np.ndarray | Array, head_dim: int) -> Angles:
        """Return the angles of positions, for heads of a width."""
        assert self.scaling is not None, "the spec is not resolved"
        cos, sin = rotary_angles(positions, head_dim, self.theta, self.scaling, self.fraction)
        if self.negative:
            sin = -sin
        return cos, sin


def rotary_angles(
    positions: np.ndarray | Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling = RopeScaling(),
    fraction: float = 1.0,
) -> Angles:
    """Return cosines and sines `[batch, seq, rotated / 2]`, in float32.

    They are constants of the program: XLA would fuse their computation into every use and repeat it
    in each layer, forward and backward (2 % of a step of a small model on XLA:CPU). Traced
    positions, as in decoding, index rows of the same constants.

    Args:
        head_dim: Dimensions of a head.
        theta: Base of the frequencies.
        scaling: Scaling of the frequencies; its `attention_scaling` is a factor of the result.
        fraction: Fraction of each head that is rotated, its first dimensions
            (`partial_rotary_factor`).

    Raises:
        ConfigError: `rotary_problems` of these heads.
    """
    if isinstance(positions, jax.Array):
        every = np.arange(cache_length())[None]
        table = rotary_angles(every, head_dim, theta, scaling, fraction)
        cos, sin = (jnp.asarray(a)[0, positions] for a in table)
        return cos, sin
    problems = rotary_problems(head_dim, scaling, fraction)
    if problems:
        raise ConfigError("Invalid rotary positions:", problems)
    width = rotated_width(head_dim, fraction)
    length = context_length(int(positions.max()) + 1)
    frequencies = scaling.frequencies(width, theta, length)
    angles = positions[..., None] * frequencies
    amplitude = scaling.attention_scaling
    cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
    return cos.astype(np.float32), sin.astype(np.float32)


def rotate(
    x: Float[Array, "batch seq heads dim"], angles: Angles, interleaved: bool = False
) -> Float[Array, "batch seq heads dim"]:
    """Rotate the first dimensions of each head by their position's angle, in float32.

    The angles are those of `rotated / 2` pairs; other dimensions are unchanged.

    Args:
        interleaved: Pairs are `(2i, 2i + 1)`, as in GLM, Cohere, DeepSeek and Llama 4, instead of
            `(i, i + rotated/2)`.
    """
    cos, sin = (jnp.asarray(a)[:, :, None] for a in angles)
    return _rotate(interleaved, x, cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(interleaved: bool, x: Array, cos: Array, sin: Array) -> Array:
    if attention_config().platform == "tpu":
        return _by_matmul(x, cos, sin, interleaved)
    width = 2 * cos.shape[-1]
    if width == x.shape[-1]:
        return _by_pairs(x, cos, sin, interleaved)
    rotated = _by_pairs(x[..., :width], cos, sin, interleaved)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)


# The derivative is the rotation back.
_rotate.defvjp(
    lambda interleaved, x, cos, sin: (_rotate(interleaved, x, cos, sin), (cos, sin)),
    lambda interleaved, angles, dy: (
        _rotate(interleaved, dy, angles[0], -angles[1]),
        None,
        None,
    ),
)


def _by_pairs(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    if not interleaved:
        return _by_halves(x, cos, sin)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned = jnp.stack([turned_first, turned_second], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _by_halves(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return jnp.concatenate([turned_first, turned_second], axis=-1).astype(x.dtype)


def _by_matmul(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotate with `(-second, first)` from an exact product with a matrix of 0, 1 and -1.

    Half a head is half a row of a TPU's registers. Moving it takes longer than the product: 3.1 ms
    against 0.9 ms by the compiler's estimate of cycles, in a layer of Llama-3 8B, forward and
    backward, for 8192 tokens on v5e.
    """
    width = 2 * cos.shape[-1]
    rest = x.shape[-1] - width
    matrix = np.pad(_quarter_turn(width, interleaved), (0, rest))
    turned = jnp.einsum(
        "bshd,de->bshe",
        x,
        jnp.asarray(matrix, x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    cos = _of_dims(cos, rest, 1.0, interleaved)
    sin = _of_dims(sin, rest, 0.0, interleaved)
    rotated = x.astype(jnp.float32) * cos + turned * sin
    return rotated.astype(x.dtype)


def _of_dims(x: Array, rest: int, fill: float, interleaved: bool) -> Array:
    """Return the value of each dimension of a head from that of each pair, and `rest` more."""
    if interleaved:
        x = jnp.repeat(x, 2, axis=-1)
    else:
        x = jnp.concatenate([x, x], axis=-1)
    if not rest:
        return x
    widths = [(0, 0)] * (x.ndim - 1) + [(0, rest)]
    return jnp.pad(x, widths, constant_values=fill)


def _quarter_turn(width: int, interleaved: bool) -> Float[np.ndarray, "dim dim"]:
    """Return the matrix from rows of pairs `(first, second)` to `(-second, first)`."""
    if interleaved:
        return np.kron(np.eye(width // 2), [[0, 1], [-1, 0]]).astype(np.float32)
    half = np.eye(width // 2, dtype=np.float32)
    return np.block([[0 * half, half], [-half, 0 * half]])
