"""Tokens further ahead in a sequence, for multi-token prediction (DeepSeek-V3, arXiv:2412.19437).

A token and one that is `steps` tokens ahead may be of different documents, and the last tokens of a
row have none ahead: `has_ahead` is the mask of the others.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from spmd.layers.ring_attention import Segments
from spmd.plan.context import current, keep_whole


def tokens_ahead(x: Shaped[Array, "batch seq"], steps: int) -> Shaped[Array, "batch seq"]:
    """Return the value of the token `steps` tokens ahead; 0 for the last ones of a row.

    Example:
        >>> tokens_ahead(jnp.array([[1, 2, 3]]), 1).tolist()
        [[2, 3, 0]]
    """
    seq = x.shape[1]
    mesh = current().mesh
    if mesh is not None and mesh.shape.get("sequence", 1) > 1:
        # Shifted parts would be permuted between devices, which hangs in a stage's task on XLA:CPU.
        x = keep_whole(x, mesh, (1,))
    return jnp.pad(x, ((0, 0), (0, steps)))[:, steps : seq + steps]


def has_ahead(segments: Segments, seq: int, steps: int) -> Bool[Array, "#batch seq"]:
    """Return the mask of tokens with `steps` more tokens of their document.

    Args:
        segments: The document of each token; None for one document in each row.
        seq: Tokens of a row.
        steps: Tokens ahead.

    Example:
        >>> has_ahead(jnp.array([[0, 0, 2, 2, 2]]), 5, steps=1).astype(int).tolist()
        [[1, 0, 1, 1, 0]]
    """
    is_inside = jnp.arange(seq)[None] < seq - steps
    if segments is None:
        return is_inside
    return is_inside & (segments == tokens_ahead(segments, steps))
