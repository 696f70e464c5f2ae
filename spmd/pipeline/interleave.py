"""Layers on their way between where the training state has them and the stage that computes them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "pipe"


def interleave(layers: Any, stages: int, chunks: int, *, back: bool = False) -> Any:
    """Each stage's layers as they lie in the training state, in order, to chunks as they are computed, or back.

    Group *j* of all layers lies on stage *j* // `chunks`, and is computed on stage *j* mod `stages`. In each of
    `chunks` permutes, every stage sends one group and gets one, so a stage sends and gets what it holds, once.

    Args:
        layers: Arrays `[chunks · size, …]`, or `[chunks, size, …]` to go back.
        stages: The size of `pipe`.
        chunks: Groups of layers of each stage.
        back: Whether to go back.
    """
    if not back:
        layers = jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[1:]), layers)
    if chunks > 1:
        stage = jax.lax.axis_index(AXIS)
        moves = _rounds(stages, chunks)

        def move(w: jax.Array) -> jax.Array:
            out = w
            for sent, to, got in moves:
                pairs = [(s, int(to[s])) for s in range(stages)]
                if back:
                    pairs, sent, got = [(t, s) for s, t in pairs], got, sent
                part = jax.lax.ppermute(
                    jax.lax.dynamic_index_in_dim(w, jnp.asarray(sent)[stage], keepdims=False), AXIS, pairs
                )
                out = jax.lax.dynamic_update_index_in_dim(out, part, jnp.asarray(got)[stage], 0)
            return out

        layers = jax.tree.map(move, layers)
    return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), layers) if back else layers


def _rounds(stages: int, chunks: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each permute: which of its groups a stage sends, to whom, and where what a stage gets is put.

    A stage's groups go to stages that follow each other. Stages whose first groups go to the same one begin with
    another group, so no two send to one.
    """
    stage, blocks = np.arange(stages), math.gcd(stages, chunks)
    rounds = []
    for turn in range(chunks):
        sent = (turn + stage * blocks // stages) % chunks
        group = stage * chunks + sent
        to, got = group % stages, np.zeros(stages, int)
        got[to] = group // stages
        rounds.append((sent, to, got))
    return rounds
