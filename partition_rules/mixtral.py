"""Mixtral and its relatives: Llama's table, with experts split over `expert` and each of them like an MLP.

What is no expert is split over `expert` too, wherever Llama's table splits it over `fsdp`, and
gathered over both. The expert layer is manual over the mesh (`spmd.layers.moe`), so the table has
the sharding of its input and output tokens and of stored kernels.
"""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA
from spmd.sharding.batch import TOKENS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate

_INTO, _OUT = "experts/(gate|up)_proj/kernel", "experts/down_proj/kernel"
_EXPERTS = (
    (_INTO, P("expert", "fsdp", "tensor")),  # [expert, d, d_ff]
    (_OUT, P("expert", ("tensor", "fsdp"))),  # [expert, d_ff, d]
)
_ROUTED = (
    ("router_logits", P(BATCH_AXES, "sequence")),  # [batch, seq, expert]
    ("expert_tokens", P(BATCH_AXES, "sequence")),  # [batch, seq, d]
    ("expert_hidden", P(BATCH_AXES)),  # rows of tokens, inside the manual program
)
_MLP = ("mlp_input", "mlp_gate", "mlp_up", "mlp_hidden")
_BOTH = ("fsdp", "expert")
_PLAIN = (
    ("embed/embedding", P("pipe", (*_BOTH, "tensor"))),  # [vocab, d]
    ("attention/(q|k|v)_proj/kernel", P(_BOTH, "tensor")),  # [d, heads·head_dim]
    ("attention/o_proj/kernel", P("tensor", _BOTH)),  # [heads·head_dim, d]
    ("lm_head/kernel", P((*_BOTH, "pipe"), "tensor")),  # [d, vocab]
    ("router/kernel", P(_BOTH)),  # [d, expert]
    (
        "(attention_norm|mlp_norm|norm)/scale|router/(logit_)?bias",
        replicate("a number for each channel or expert: a few KiB"),
    ),
)
_LOOKUP = (
    ("embed_tokens", P("data", "sequence")),
    ("embed_rows", P("data", "sequence", (*_BOTH, "tensor"))),
    ("embed_exchange", P("data", "sequence", _BOTH)),
)
_ACTIVATIONS = (*_LOOKUP, *(mark for mark in LLAMA.activations if not mark[0].startswith("embed_")))

MIXTRAL = Rules(
    params=(*_PLAIN, *_EXPERTS),
    activations=(*(mark for mark in _ACTIVATIONS if mark[0] not in _MLP), *_ROUTED),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)
"""For models without shared experts and dense layers."""

MIXTRAL_SHARED = Rules(
    params=(
        *_PLAIN,
        *_EXPERTS,
        ("(mlp|shared)/(gate|up)_proj/kernel", P(_BOTH, "tensor")),
        ("(mlp|shared)/down_proj/kernel", P("tensor", _BOTH)),
    ),
    activations=(*_ACTIVATIONS, *_ROUTED),
    stacked={"layers": "pipe", "dense_layers": "pipe"},
    batch=TOKENS,
)
"""For models with a shared expert, or with dense layers."""


def folded(rules: Rules) -> Rules:
    """Split experts over `expert` and `tensor` together, and none of them in itself (Liu et al., arXiv:2504.14960).

    Tokens are then split over `tensor`, too, and must divide. Small experts stay whole, and no
    device computes with the tokens of another but in the experts it has.
    """
    assert _OUT in dict(rules.params), "the table has no experts"
    kernels, tokens = P(("expert", "tensor"), "fsdp"), P(BATCH_AXES, ("sequence", "tensor"))
    params = [(name, kernels if name in (_INTO, _OUT) else spec) for name, spec in rules.params]
    routed = ("router_logits", "expert_tokens")
    activations = [(name, tokens if name in routed else spec) for name, spec in rules.activations]
    return dataclasses.replace(rules, params=params, activations=activations)
