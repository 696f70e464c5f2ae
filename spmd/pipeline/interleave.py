"""The move of layers between their order in the training state and the stage that computes them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.plan.scopes import comm_scope, in_scope

AXIS = "pipe"


def interleave(layers: Any, stages: int, chunks: int, *, back: bool = False) -> Any:
    """Move each stage's layers from contiguous to interleaved chunks, or back.

    Group *j* of all layers is stored on stage *j* // `chunks` and computed on stage *j* mod `stages`. Each of `chunks`
    permutes sends and receives one group per stage. Contiguous arrays are `[chunks · size, …]`, interleaved ones
    `[chunks, size, …]`.
    """
    if not back:
        layers = jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[1:]), layers)
    if chunks > 1:
        stage = jax.lax.axis_index(AXIS)
        permutes = _permutes(stages, chunks)

        def move(w: jax.Array) -> jax.Array:
            out = w
            for source, target, stage_to in permutes:
                pairs = [(s, int(stage_to[s])) for s in range(stages)]
                if back:
                    pairs, source, target = [(t, s) for s, t in pairs], target, source
                group = jax.lax.dynamic_index_in_dim(w, jnp.asarray(source)[stage], keepdims=False)
                with in_scope(comm_scope("pipeline, layers to their stages")):
                    group = jax.lax.ppermute(group, AXIS, pairs)
                out = jax.lax.dynamic_update_index_in_dim(out, group, jnp.asarray(target)[stage], 0)
            return out

        layers = jax.tree.map(move, layers)
    return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), layers) if back else layers


def _permutes(stages: int, chunks: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each permute, per stage: the index it sends, the index it receives into, the stage it sends to.

    The groups of a stage go to consecutive stages. Stages whose first groups go to the same stage start with another
    group, so that each permute is a bijection.
    """
    stage, blocks = np.arange(stages), math.gcd(stages, chunks)
    permutes = []
    for turn in range(chunks):
        source = (turn + stage * blocks // stages) % chunks
        group = stage * chunks + source
        stage_to, target = group % stages, np.zeros(stages, int)
        target[stage_to] = group // stages
        permutes.append((source, target, stage_to))
    return permutes
