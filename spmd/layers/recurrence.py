"""Chunks, decays and documents that recurrent token mixers share.

A recurrent mixer reads a sequence in chunks of tokens. Inside of a chunk it is a matmul with a mask
of decays, as attention is; from chunk to chunk it passes a state of fixed size. `scan_chunks`
splits the tokens and passes the state, `chunk_decay` computes the factors, and a mixer
(`spmd.layers.gated_delta_rule`, `spmd.layers.state_space`) supplies the matmuls.

The order of tokens is the recurrence, so a sequence split over the mesh axis `sequence` is not
supported (`split_sequence_problems`). Batch and heads are independent.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from spmd.errors import ConfigError, Problem
from spmd.plan.context import current
from spmd.sharding.mesh import AnyMesh

CHUNK = 128
"""Tokens of a chunk: the width of a TPU's matmul unit, and one saved state for 128 tokens.

For 8,192 tokens in bfloat16, forward and backward of Qwen 3 Next's gated delta rule take 133, 79, 43
and 52 million cycles of a v5p with chunks of 32, 64, 128 and 256, by its compiler's estimate, and
Mamba 2's scan (80 heads of 64) 70, 41, 21 and 22 million.
"""


class ChunkDecay(NamedTuple):
    """Factors in (0, 1] by which a chunk's tokens and the preceding state decay, float32.

    A factor is 0 where a document starts in between. `end` and `start` are columns, for products
    with rows of tokens, and `whole` is for products with states.
    """

    pairs: Float[Array, "batch groups group chunk chunk"]
    """From the second token to the first, 0 if the second is later; 1 on the diagonal."""
    start: Float[Array, "batch groups group chunk 1"]
    """From the state before the chunk to each token."""

    @property
    def end(self) -> Float[Array, "batch groups group chunk 1"]:
        """The factors from each token to the state after the chunk."""
        return self.pairs[..., -1, :, None]

    @property
    def whole(self) -> Float[Array, "batch groups group 1 1"]:
        """The factors from the state before the chunk to the state after it."""
        return self.start[..., -1:, :]


def chunk_decay(
    log_decay: Float[Array, "batch groups group chunk"], starts: Bool[Array, "batch chunk"] | None
) -> ChunkDecay:
    """Return the factors of a chunk from logarithms of the tokens' decays.

    Logarithms are added between each pair of tokens and masked before the exponential, so neither
    pass overflows. Differences of cumulative sums would lose digits after a strong decay: 32 tokens
    of −50 leave errors up to 1e-4 in each later factor.
    """
    size = log_decay.shape[-1]
    ones = np.tri(size, dtype=np.float32)
    later = np.tri(size, k=-1, dtype=bool)
    column = log_decay[..., None]
    terms = jnp.where(_unmapped(later), column, 0.0)
    sums = jnp.einsum("il,bgrlj->bgrij", ones, terms, precision="highest")
    total = sums[..., :1] + column[..., :1, :]
    joined = jnp.asarray(_unmapped(ones > 0))
    reached = jnp.ones((1, 1, 1, size, 1), bool)
    if starts is not None:
        document = jnp.cumsum(starts, axis=-1)
        same = document[:, :, None] == document[:, None]
        joined &= same[:, None, None]
        reached = (document == 0)[:, None, None, :, None]
    pairs = _masked_exp(sums, joined)
    start = _masked_exp(total, reached)
    return ChunkDecay(pairs, start)


def _unmapped(mask: np.ndarray) -> np.ndarray:
    """Return a mask of pairs of tokens for all rows and heads."""
    return mask[None, None, None]


def _masked_exp(logarithms: Array, mask: Array) -> Array:
    """Return exponentials, and 0 with a gradient of 0 outside of the mask."""
    masked = jnp.where(mask, logarithms, -jnp.inf)
    return jnp.exp(masked)


def document_starts(
    segments: Int[Array, "batch seq"], valid: Bool[Array, "batch seq"] | None = None
) -> Bool[Array, "batch seq"]:
    """Return the tokens at which a document starts: its number differs from the preceding one.

    The first token of a row continues the initial state. Padding is skipped.

    Example:
        >>> document_starts(jnp.array([[0, 0, 1, 1, 0]])).tolist()
        [[False, False, True, False, True]]
    """
    if valid is None:
        is_start = segments[:, 1:] != segments[:, :-1]
        return jnp.pad(is_start, [(0, 0), (1, 0)])
    numbers = jnp.arange(segments.shape[1])[None]
    latest = jax.lax.cummax(jnp.where(valid, numbers, -1), axis=1)
    latest = jnp.pad(latest, [(0, 0), (1, 0)], constant_values=-1)[:, :-1]
    preceding = jnp.take_along_axis(segments, jnp.maximum(latest, 0), axis=1)
    return valid & (latest >= 0) & (segments != preceding)


def mask_tokens(
    x: Shaped[Array, "batch seq *rest"], mask: Bool[Array, "batch seq"] | None
) -> Shaped[Array, "batch seq *rest"]:
    """Replace tokens outside of the mask by zeros; not even NaN spreads from them.

    Example:
        >>> mask_tokens(jnp.array([[1.0, jnp.nan]]), jnp.array([[True, False]])).tolist()
        [[1.0, 0.0]]
    """
    if mask is None:
        return x
    axes = tuple(range(2, x.ndim))
    mask = jnp.expand_dims(mask, axes)
    return jnp.where(mask, x, jnp.zeros_like(x))


def scan_chunks(
    body: Callable[[Array, Any], tuple[Array, Array]], state: Array, tokens: Any, chunk: int
) -> tuple[Float[Array, "batch seq heads dim"], Array]:
    """Return the outputs of all tokens and the state after the last one.

    The backward pass saves the state before each chunk and recomputes the rest of the chunk.

    Args:
        body: `(state, tokens of a chunk) -> (state, outputs)`, with tokens after heads:
            `[batch, heads, chunk, dim]`.
        state: The initial state.
        tokens: Arrays `[batch, seq]`, `[batch, seq, heads]` or `[batch, seq, heads, dim]`. Zeros
            are appended to fill the last chunk, and must leave the state unchanged.
        chunk: The number of tokens of a chunk, at most; a shorter sequence is one chunk.
    """
    seq = jax.tree.leaves(tokens)[0].shape[1]
    size = max(1, min(chunk, seq))
    split = functools.partial(_split, size=size)
    chunks = jax.tree.map(split, tokens)
    recomputed = jax.checkpoint(body, prevent_cse=False)
    state, chunks = jax.lax.scan(recomputed, state, chunks)
    out = _join(chunks)
    return out[:, :seq], state


def _split(x: Array, size: int) -> Array:
    """Return chunks `[number, batch, *heads, size, *dim]` of tokens `[batch, seq, *heads, *dim]`."""
    batch, seq, *rest = x.shape
    number = -(-seq // size)
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, number * size - seq)
    padded = jnp.pad(x, widths)
    chunks = jnp.moveaxis(padded.reshape(batch, number, size, *rest), 1, 0)
    if not rest:
        return chunks
    return jnp.moveaxis(chunks, 2, 3)


def _join(chunks: Array) -> Array:
    """Return tokens `[batch, seq, heads, dim]` of chunks `[number, batch, heads, size, dim]`."""
    number, batch, heads, size, dim = chunks.shape
    tokens = chunks.transpose(1, 0, 3, 2, 4)
    return tokens.reshape(batch, number * size, heads, dim)


def product(spec: str, x: Array, y: Array, dtype: Any) -> Float[Array, "..."]:
    """Return an einsum of operands in `dtype`, with float32 sums."""
    x = x.astype(dtype)
    y = y.astype(dtype)
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def to_float32(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Convert to the dtype of states and decays."""
    return x.astype(jnp.float32)


def group_heads(x: Shaped[Array, "batch heads *rest"], groups: int) -> Array:
    """Return `[batch, groups, heads of a group, …]`: consecutive heads share a group's arrays."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, groups, heads // groups, *rest)


def merge_heads(x: Shaped[Array, "batch groups group *rest"]) -> Array:
    """Return `[batch, heads, …]`, the inverse of `group_heads`."""
    batch, groups, group, *rest = x.shape
    return x.reshape(batch, groups * group, *rest)


def check_heads(title: str, heads: int, shared: int, name: str, chunk: int = CHUNK) -> None:
    """Check that heads divide into groups, and the size of a chunk.

    Args:
        title: The first line of the error.
        heads: The number of heads with a state.
        shared: The number of heads or groups that they share.
        name: Where `shared` is from.
        chunk: The number of tokens of a chunk.

    Raises:
        ConfigError: They do not divide, or `chunk` is below 1.
    """
    problems = []
    if not shared or heads % shared:
        detail = f"{heads} heads / {shared} = {heads / max(shared, 1):g}"
        fix = "a number that divides the heads"
        problems.append(Problem(name, "does not divide the heads", detail, fix))
    if chunk < 1:
        problems.append(Problem("chunk", f"is {chunk}", fix="at least 1"))
    if problems:
        raise ConfigError(title, problems)


def split_sequence_problems(mesh: AnyMesh, mixer: str) -> list[Problem]:
    """Return the problem of a recurrent mixer on a mesh that splits sequences, if it does.

    Example:
        >>> from spmd.sharding.mesh import MeshShape, abstract_mesh
        >>> mesh = abstract_mesh(MeshShape(sequence=2))
        >>> print(split_sequence_problems(mesh, "layers 0-2 (gated delta net)")[0])
        layers 0-2 (gated delta net): a recurrent mixer needs whole sequences on each device
            the mesh has sequence=2
            fix: sequence=1, and tensor or fsdp for these devices
    """
    parts = mesh.shape.get("sequence", 1)
    if parts == 1:
        return []
    what = "a recurrent mixer needs whole sequences on each device"
    detail = f"the mesh has sequence={parts}"
    return [Problem(mixer, what, detail, "sequence=1, and tensor or fsdp for these devices")]


def require_whole_sequences(mixer: str) -> None:
    """Check in a trace that the mesh of the plan in scope, if any, does not split sequences.

    Args:
        mixer: The mixer's name.

    Raises:
        ConfigError: It does.
    """
    mesh = current().mesh
    if mesh is None:
        return
    problems = split_sequence_problems(mesh, mixer)
    if problems:
        raise ConfigError("The mesh does not support this model:", problems)
