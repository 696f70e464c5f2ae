"""Rotary position embeddings (Su et al., arXiv:2104.09864), also for longer contexts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spmd.errors import ConfigError, Problem, check_fields
from spmd.layers.kv_cache import cache_length
from spmd.plan.annotate import attention_config

Angles = tuple[np.ndarray | Array, np.ndarray | Array]
"""Cosines and sines of each position, `[batch, seq, head_dim / 2]` each; a batch of 1 if all rows
are equal."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than in pretraining (Llama 3.1).

    Source: Grattafiori et al., arXiv:2407.21783, section 3.4.2 and the published code of the model.
    A frequency with fewer than `low_frequency_factor` turns in the original context is divided by
    `factor`, one with more than `high_frequency_factor` turns is unchanged, and between them the
    two are interpolated.
    """

    factor: float = 1.0
    """Divisor of low frequencies; 1 for no scaling."""
    low_frequency_factor: float = 1.0
    """Turns in the original context up to which a frequency is divided."""
    high_frequency_factor: float = 4.0
    """Turns in the original context from which a frequency is unchanged."""
    original_context: int = 8192
    """Sequence length of pretraining, in tokens."""

    def __post_init__(self) -> None:
        rules = {"factor": "at least 1", "original_context": "at least 1"}
        problems = check_fields(self, rules, prefix="rope_scaling.")
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        if not 0 < low < high:
            problem = Problem(
                "rope_scaling",
                "has factors out of order",
                f"low {low}, high {high}",
                "0 < low_frequency_factor < high_frequency_factor",
            )
            problems.append(problem)
        if problems:
            raise ConfigError("Invalid RoPE scaling:", problems)

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the frequencies, in radians per token, after scaling.

        Example:
            >>> RopeScaling(8.0).scaled(np.array([1.0, 1e-5])).tolist()
            [1.0, 1.25e-06]
        """
        if self.factor == 1:
            return frequencies
        turns = self.original_context * frequencies / (2 * np.pi)
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        factors = kept + (1 - kept) / self.factor
        return frequencies * factors


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions of one kind of layer; a field of 0 or None has the network's value."""

    theta: float = 0.0
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies for a longer context."""

    def resolve(self, theta: float, scaling: RopeScaling) -> "Rotary":
        """Return the positions with the network's values where they have none of their own."""
        if self.scaling is not None:
            scaling = self.scaling
        return Rotary(self.theta or theta, scaling)

    def problems(self, where: str, head_dim: int) -> list[Problem]:
        """Return a problem for each invalid field, and for heads of odd width."""
        problems = check_fields(self, {"theta": "above 0"}, prefix=f"{where}rotary.")
        if head_dim % 2:
            fix = "an even width, for rotary embeddings"
            problem = Problem(f"{where}head_dim", "is odd", f"head_dim = {head_dim}", fix)
            problems.append(problem)
        return problems

    def angles(self, positions: np.ndarray | Array, head_dim: int) -> Angles:
        """Return the angles of positions, for heads of a width."""
        assert self.scaling is not None, "the spec is not resolved"
        return rotary_angles(positions, head_dim, self.theta, self.scaling)


def rotary_angles(
    positions: np.ndarray | Array, head_dim: int, theta: float, scaling: RopeScaling = RopeScaling()
) -> Angles:
    """Return cosines and sines `[batch, seq, head_dim / 2]`, in float32.

    They are constants of the program: XLA would fuse their computation into every use and repeat it
    in each layer, forward and backward (2 % of a step of a small model on XLA:CPU). Traced
    positions, as in decoding, index rows of the same constants.
    """
    if isinstance(positions, jax.Array):
        every = np.arange(cache_length())[None]
        table = rotary_angles(every, head_dim, theta, scaling)
        cos, sin = (jnp.asarray(a)[0, positions] for a in table)
        return cos, sin
    exponents = -np.arange(0, head_dim, 2) / head_dim
    frequencies = scaling.scaled(theta**exponents)
    angles = positions[..., None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    return cos.astype(np.float32), sin.astype(np.float32)


def rotate(
    x: Float[Array, "batch seq heads dim"], angles: Angles
) -> Float[Array, "batch seq heads dim"]:
    """Rotate each head's pairs `(i, i + dim/2)` by their position's angle, in float32."""
    cos, sin = (jnp.asarray(a)[:, :, None] for a in angles)
    return _rotate(x, cos, sin)


@jax.custom_vjp
def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    if attention_config().platform == "tpu":
        return _by_matmul(x, cos, sin)
    return _by_halves(x, cos, sin)


# The derivative is the rotation back.
_rotate.defvjp(
    lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)),
    lambda angles, dy: (_rotate(dy, angles[0], -angles[1]), None, None),
)


def _by_halves(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return jnp.concatenate([turned_first, turned_second], axis=-1).astype(x.dtype)


def _by_matmul(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate with `(-second, first)` from an exact product with a matrix of 0, 1 and -1.

    Half a head is half a row of a TPU's registers. Moving it takes longer than the product: 3.1 ms
    against 0.9 ms by the compiler's estimate of cycles, in a layer of Llama-3 8B, forward and
    backward, for 8192 tokens on v5e.
    """
    half = np.eye(x.shape[-1] // 2, dtype=np.float32)
    matrix = np.block([[0 * half, half], [-half, 0 * half]])
    turned = jnp.einsum(
        "bshd,de->bshe",
        x,
        jnp.asarray(matrix, x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    cos, sin = (jnp.concatenate([a, a], axis=-1) for a in (cos, sin))
    rotated = x.astype(jnp.float32) * cos + turned * sin
    return rotated.astype(x.dtype)
