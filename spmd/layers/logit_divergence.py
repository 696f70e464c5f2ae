"""Divergence of the distributions of two heads, without materialising the logits of all tokens.

Tokens are taken chunk by chunk, and the backward pass computes the logits of a chunk again. Both
kernels are gathered once; the gradient of the student's is added up over chunks in its own dtype.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd.jaxpr.examples import per_example
from spmd.layers.lm_head import CHUNK, LazyLogits, materialize
from spmd.plan.context import current
from spmd.plan.fsdp import gathered
from spmd.sharding.mesh import BATCH_AXES, shards_of

Logits = Array | LazyLogits
"""Logits `[batch, seq, vocab]`, or the inputs of a head."""


def token_divergences(
    student: Logits, teacher: Logits, *, reverse: bool = False, chunk: int = CHUNK
) -> Float[Array, "batch seq"]:
    """Return the Kullback-Leibler divergence of the student's from the teacher's next token, in nats.

    It has no gradient for the teacher.

    Args:
        reverse: The teacher's divergence from the student instead: KL(student ‖ teacher).
        chunk: Tokens of a chunk, per device.

    Example:
        >>> teacher = jnp.log(jnp.array([[[0.5, 0.5]]]))
        >>> student = jnp.log(jnp.array([[[0.9, 0.1]]]))
        >>> round(float(token_divergences(student, teacher)[0, 0]), 4)  # ½ ln ⁵⁄₉ + ½ ln 5
        0.5108
    """
    teacher = jax.lax.stop_gradient(teacher)
    if not isinstance(student, LazyLogits) or not isinstance(teacher, LazyLogits):
        return _divergences(_whole(student), _whole(teacher), reverse)
    run = functools.partial(_of_chunks, reverse=reverse, chunk=chunk)
    return per_example(run)(_gathered(student), _gathered(teacher))


def _of_chunks(
    student: LazyLogits, teacher: LazyLogits, *, reverse: bool, chunk: int
) -> Float[Array, "batch seq"]:
    shards = _sequence_shards()
    length = _chunk_length(student.x.shape, shards, chunk)
    heads = (student, teacher)

    def step(none: None, chunks: tuple[Array, ...]) -> tuple[None, Array]:
        mine, theirs = (
            materialize(dataclasses.replace(head, x=x))
            for head, x in zip(heads, chunks, strict=True)
        )
        return none, _divergences(mine, theirs, reverse)

    chunks = tuple(_split(head.x, shards, length) for head in heads)
    _, found = jax.lax.scan(jax.checkpoint(step), None, chunks)
    return _joined(found, shards)


def _divergences(student: Array, teacher: Array, reverse: bool) -> Float[Array, "batch seq"]:
    mine = jax.nn.log_softmax(student.astype(jnp.float32))
    theirs = jax.nn.log_softmax(teacher.astype(jnp.float32))
    if reverse:
        mine, theirs = theirs, mine
    return (jnp.exp(theirs) * (theirs - mine)).sum(axis=-1)


def _whole(logits: Logits) -> Array:
    if isinstance(logits, LazyLogits):
        return materialize(logits)
    return logits


def _gathered(head: LazyLogits) -> LazyLogits:
    """Return a head whose kernel is gathered, for all chunks."""
    kernel = gathered(head.kernel, head.placed, dtype=head.x.dtype)
    return dataclasses.replace(head, kernel=kernel, placed=None)


def _sequence_shards() -> int:
    mesh = current().mesh
    return 1 if mesh is None else mesh.shape["sequence"]


def _chunk_length(shape: tuple[int, ...], shards: int, chunk: int) -> int:
    """Return the tokens of a row in a chunk, per shard of the sequence: a divisor of all."""
    rows, seq = shape[:2]
    mesh = current().mesh
    if mesh is not None:
        rows = max(rows // shards_of(BATCH_AXES, mesh.shape), 1)
    own = seq // shards
    most = min(max(chunk // rows, 1), own)
    return next(length for length in range(most, 0, -1) if own % length == 0)


def _split(x: Array, shards: int, length: int) -> Float[Array, "chunk batch seq d"]:
    """Return the chunks of a stream: of each chunk, tokens of every shard of the sequence."""
    batch, seq, width = x.shape
    chunks = x.reshape(batch, shards, seq // (shards * length), length, width)
    chunks = jnp.moveaxis(chunks, 2, 0)
    return chunks.reshape(-1, batch, shards * length, width)


def _joined(found: Any, shards: int) -> Float[Array, "batch seq"]:
    """Return the values of chunks in the order of the sequence."""
    count, batch, tokens = found.shape
    values = found.reshape(count, batch, shards, tokens // shards)
    return jnp.moveaxis(values, 0, 2).reshape(batch, -1)
