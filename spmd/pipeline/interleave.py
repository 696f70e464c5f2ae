"""The move of layers between their stages in the training state and in interleaved execution."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.plan.scopes import comm_scope, in_scope

AXIS = "pipe"


def interleave(layers: Any, stages: int, chunks: int, *, back: bool = False) -> Any:
    """Move each stage's layers from contiguous to interleaved chunks, or back.

    Group *j* of all layers is stored on stage *j* // `chunks` and computed on stage *j* mod
    `stages`. Each of `chunks` permutes sends and receives one group per stage. Contiguous arrays
    are `[chunks · size, …]`, interleaved ones `[chunks, size, …]`.
    """
    if not back:
        layers = jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[1:]), layers)
    if chunks > 1:
        stage = jax.lax.axis_index(AXIS)
        permutes = _permutes(stages, chunks)
        if back:
            permutes = [permute.inverse() for permute in permutes]
        layers = jax.tree.map(lambda w: _move(w, stage, permutes), layers)
    if back:
        layers = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), layers)
    return layers


@dataclasses.dataclass(frozen=True, eq=False)
class _Permute:
    """A permute of groups of layers, one from each stage to another.

    Attributes:
        source: Index of the group to send, by stage.
        target: Index of the group to receive into, by stage.
        pairs: Stages, from and to.
    """

    source: np.ndarray
    target: np.ndarray
    pairs: list[tuple[int, int]]

    def inverse(self) -> "_Permute":
        """Return the permute back."""
        back = [(to, sender) for sender, to in self.pairs]
        return _Permute(source=self.target, target=self.source, pairs=back)


def _move(w: jax.Array, stage: jax.Array, permutes: Sequence[_Permute]) -> jax.Array:
    """Move the groups `[chunk, …]` of a stage to the stages of some permutes."""
    out = w
    for permute in permutes:
        source = jnp.asarray(permute.source)[stage]
        group = jax.lax.dynamic_index_in_dim(w, source, keepdims=False)
        with in_scope(comm_scope("pipeline, layers to their stages")):
            group = jax.lax.ppermute(group, AXIS, permute.pairs)
        target = jnp.asarray(permute.target)[stage]
        out = jax.lax.dynamic_update_index_in_dim(out, group, target, 0)
    return out


def _permutes(stages: int, chunks: int) -> list[_Permute]:
    """Return the permutes from contiguous to interleaved chunks.

    The groups of a stage go to consecutive stages. Stages whose first groups go to the same stage
    start with another group, so that each permute is a bijection.
    """
    stage = np.arange(stages)
    blocks = math.gcd(stages, chunks)
    permutes = []
    for turn in range(chunks):
        source = (turn + stage * blocks // stages) % chunks
        group = stage * chunks + source
        stage_to = group % stages
        target = np.zeros(stages, int)
        target[stage_to] = group // stages
        pairs = list(enumerate(stage_to.tolist()))
        permutes.append(_Permute(source, target, pairs))
    return permutes
