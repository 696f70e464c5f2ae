"""Stochastic rounding. Its mean is exact: sums of small updates are right in a narrow dtype.

The random bits are a hash of a seed, the index in the last dimension, and the number to round down
to. So they are the same on every mesh, for stacked and unrolled layers, and for one layer at a
time; and numbers that differ by a float32 rounding error are rounded alike.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = np.uint32(0x9E3779B9)


def mix_bits(bits: jax.Array) -> jax.Array:
    """Apply the finalizer of MurmurHash3 (Appleby, 2011), a bijection of uint32.

    Each bit changes half of the output bits.
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def random_bits(below: jax.Array, seed: jax.Array) -> jax.Array:
    """Hash the seed, the index in the last dimension, and the uint32 of each element of `below`.

    The mixing is the finalizer of MurmurHash3 (Appleby).
    """
    length = 1
    shape: tuple[int, ...] = ()
    if below.ndim:
        length = below.shape[-1]
        shape = (1,) * (below.ndim - 1) + (-1,)
    places = jnp.arange(length, dtype=jnp.uint32)
    salt = mix_bits(places * _GOLDEN + seed).reshape(shape)  # [1, …, n]
    return mix_bits(below ^ salt)


def salt_of(path: str) -> int:
    """Return a number to tell arrays apart, equal for all layers of a stack, unrolled or not.

    Example:
        >>> salt_of("mu/layers/3/kernel") == salt_of("mu/layers/kernel")
        True
        >>> salt_of("mu/layers/kernel") == salt_of("nu/layers/kernel")
        False
    """
    parts = [part for part in path.split("/") if not part.isdigit()]
    return zlib.crc32("/".join(parts).encode())


def seed_of(count: jax.Array, salt: int) -> jax.Array:
    """Return an array's uint32 seed of a step, by the number of steps before and its salt."""
    steps = count.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F)
    mixed = (steps ^ (steps >> 15)) * jnp.uint32(0x165667B1)
    return mixed + jnp.uint32(salt)


def round_stochastically(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Round float32 to bfloat16, up or down at random so that the mean is exact.

    The method is that of Gupta et al. (arXiv:1502.02551, section 3.1). Infinities, NaN and numbers
    that bfloat16 represents do not change.

    Example:
        >>> rounded = round_stochastically(jnp.float32(1 + 2**-8), jnp.uint32(3))
        >>> float(rounded) in (1.0, 1.0078125)
        True
    """
    dropped = jnp.uint32(0xFFFF)  # the bits of float32 that bfloat16 lacks
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = random_bits(bits & ~dropped, seed) & dropped
    raised = (bits + noise) & ~dropped
    rounded = jax.lax.bitcast_convert_type(raised, jnp.float32).astype(jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
