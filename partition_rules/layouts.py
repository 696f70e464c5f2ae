"""Other layouts from the table of a decoder."""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.sharding.mesh import BATCH_AXES, GATHERED_AXES
from spmd.sharding.rules import Rules

_EXPERTS_INTO = ("experts/(gate|up)_proj/kernel", "experts/up_proj/kernel")
_EXPERTS_OUT = "experts/down_proj/kernel"


def sequence_parallel(rules: Rules) -> Rules:
    """Split the residual stream and its norms over `tensor` by tokens instead of by width.

    Norms then need no sum over `tensor` (Korthikanti et al., arXiv:2205.05198, section 4.2.2), and
    tokens must divide.
    """
    assert "residual" in dict(rules.activations), "the table has no row for the residual stream"
    split = P(BATCH_AXES, ("sequence", "tensor"))
    activations = []
    for name, spec in rules.activations:
        if name == "residual":
            spec = split
        activations.append((name, spec))
    return dataclasses.replace(rules, activations=activations)


def split_by_rows(rules: Rules) -> Rules:
    """Split the last kernel of each MLP in rows alone, `[d_ff, d]` over `tensor` and `fsdp`.

    XLA:TPU copies what is gathered from columns that do not fill a tile of its memory.
    """
    params = []
    for path, spec in rules.params:
        if path == "mlp/down_proj/kernel":
            spec = P(("tensor", *GATHERED_AXES))
        params.append((path, spec))
    return dataclasses.replace(rules, params=params)


def folded(rules: Rules) -> Rules:
    """Split experts over `expert` and `tensor` together, and none of them in itself (Liu et al., arXiv:2504.14960).

    Tokens are then split over `tensor`, too, and must divide. Small experts stay whole, and no
    device computes with the tokens of another but in the experts it has.
    """
    assert _EXPERTS_OUT in dict(rules.params), "the table has no experts"
    kernels = P(("expert", "tensor"), GATHERED_AXES)
    tokens = P(BATCH_AXES, ("sequence", "tensor"))
    params = []
    for name, spec in rules.params:
        if name in (*_EXPERTS_INTO, _EXPERTS_OUT):
            spec = kernels
        params.append((name, spec))
    activations = []
    for name, mark in rules.activations:
        if name in ("router_logits", "expert_tokens"):
            mark = tokens
        activations.append((name, mark))
    return dataclasses.replace(rules, params=params, activations=activations)
