"""Divergence of the distributions of two heads, without materialising the logits of all tokens.

Each device takes its own tokens chunk by chunk, and the backward pass computes the logits of a chunk
again. Both kernels are gathered once. The gradient of the student's is added up over chunks, and
then over devices, in the dtype of the parameter.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.jaxpr.examples import per_example
from spmd.layers.lm_head import CHUNK, LazyLogits, materialize
from spmd.plan.context import current
from spmd.plan.fsdp import gathered
from spmd.plan.manual import shard_map_over, split_axes
from spmd.sharding.mesh import BATCH_AXES, TOKEN_AXES

_PURPOSE = "divergence of heads"

Run = Callable[[LazyLogits, LazyLogits], Array]
Logits = Array | LazyLogits
"""Logits `[batch, seq, vocab]`, or the inputs of a head."""


def token_divergences(
    student: Logits, teacher: Logits, *, reverse: bool = False, chunk: int = CHUNK
) -> Float[Array, "batch seq"]:
    """Return the Kullback-Leibler divergence of the student's from the teacher's next token, in nats.

    It has no gradient for the teacher. Outputs that one of the heads lacks have no share.

    Args:
        reverse: The teacher's divergence from the student instead: KL(student ‖ teacher).
        chunk: Tokens of a chunk, per device; at least one of each row.

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
    return per_example(_on_own_tokens(run, student, teacher))(
        _gathered(student), _gathered(teacher)
    )


def _on_own_tokens(run: Run, student: LazyLogits, teacher: LazyLogits) -> Run:
    """Map a function of both heads over each device's tokens, so that gradients are summed once."""
    mesh = current().mesh
    if mesh is None:
        return run
    axes = tuple(axis for axis in split_axes(mesh) if axis in TOKEN_AXES)
    rows = tuple(axis for axis in BATCH_AXES if axis in axes)
    tokens = P(rows, tuple(axis for axis in axes if axis not in rows))
    specs = []
    for head in (student, teacher):
        specs.append(dataclasses.replace(jax.tree.map(lambda _: P(), head), x=tokens, placed=None))
    return shard_map_over(mesh, axes, run, tuple(specs), tokens, purpose=_PURPOSE)


def _of_chunks(
    student: LazyLogits, teacher: LazyLogits, *, reverse: bool, chunk: int
) -> Float[Array, "batch seq"]:
    rows, seq = student.x.shape[:2]
    length = min(max(chunk // rows, 1), seq)

    def step(none: None, chunks: tuple[Array, Array]) -> tuple[None, Array]:
        of_student, of_teacher = chunks
        mine = materialize(dataclasses.replace(student, x=of_student))
        theirs = materialize(dataclasses.replace(teacher, x=of_teacher))
        return none, _divergences(mine, theirs, reverse)

    chunks = (_split(student.x, length), _split(teacher.x, length))
    _, found = jax.lax.scan(jax.checkpoint(step), None, chunks)
    return jnp.moveaxis(found, 0, 1).reshape(rows, -1)[:, :seq]


def _split(x: Array, length: int) -> Float[Array, "chunk batch length d"]:
    """Return chunks of a stream, padded with zeros to whole ones."""
    batch, seq, width = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -seq % length), (0, 0)))
    return jnp.moveaxis(padded.reshape(batch, -1, length, width), 1, 0)


def _divergences(student: Array, teacher: Array, reverse: bool) -> Float[Array, "batch seq"]:
    common = min(student.shape[-1], teacher.shape[-1])
    mine = jax.nn.log_softmax(student[..., :common].astype(jnp.float32))
    theirs = jax.nn.log_softmax(teacher[..., :common].astype(jnp.float32))
    if reverse:
        mine, theirs = theirs, mine
    weights = jnp.exp(theirs)
    is_possible = weights > 0  # a masked word has no share, and no finite difference
    differences = jnp.where(is_possible, theirs, 0.0) - jnp.where(is_possible, mine, 0.0)
    return (weights * differences).sum(axis=-1)


def _whole(logits: Logits) -> Array:
    if isinstance(logits, LazyLogits):
        return materialize(logits)
    return logits


def _gathered(head: LazyLogits) -> LazyLogits:
    """Return a head with its kernel gathered, for all chunks."""
    kernel = gathered(head.kernel, head.placed, dtype=head.x.dtype)
    return dataclasses.replace(head, kernel=kernel, placed=None)
