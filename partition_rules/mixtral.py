"""Mixtral and its relatives: Llama's table, with experts over `expert`, each split like an MLP.

What is no expert is split over `expert` too, wherever Llama's table splits it over `fsdp`, and
gathered over both. The expert layer is manual over the mesh (`spmd.layers.moe`), so the table has
the sharding of its input and output tokens and of stored kernels.
"""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA, with_specs, without_rows
from spmd.sharding.batch import TOKENS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate

_INTO = "experts/(gate|up)_proj/kernel"
_OUT = "experts/down_proj/kernel"
_EXPERTS = (
    (_INTO, P("expert", "fsdp", "tensor")),  # [expert, d, d_ff]
    (_OUT, P("expert", ("tensor", "fsdp"))),  # [expert, d_ff, d]
)
_TOKENS = P(BATCH_AXES, "sequence")
_ROUTED = (
    ("router_logits", _TOKENS),  # [batch, seq, expert]
    ("expert_tokens", _TOKENS),  # [batch, seq, d]
    ("expert_hidden", P(BATCH_AXES)),  # rows of tokens, inside the manual program
)
_MLP = ("mlp_input", "mlp_gate", "mlp_up", "mlp_hidden")
_BOTH = ("fsdp", "expert")
_COLUMNS = P(_BOTH, "tensor")
_ROWS = P("tensor", _BOTH)
_SMALL = replicate("a number for each channel or expert: a few KiB")
_PLAIN = (
    ("embed/embedding", P("pipe", (*_BOTH, "tensor"))),  # [vocab, d]
    ("attention/(q|k|v)_proj/kernel", _COLUMNS),  # [d, heads·head_dim]
    ("attention/o_proj/kernel", _ROWS),  # [heads·head_dim, d]
    ("lm_head/kernel", P((*_BOTH, "pipe"), "tensor")),  # [d, vocab]
    ("router/kernel", P(_BOTH)),  # [d, expert]
    ("(attention_norm|mlp_norm|norm)/scale|router/bias", _SMALL),
)
_LOOKUP = (
    ("embed_tokens", P("data", "sequence")),
    ("embed_rows", P("data", "sequence", (*_BOTH, "tensor"))),
    ("embed_exchange", P("data", "sequence", _BOTH)),
)
_ACTIVATIONS = (*_LOOKUP, *without_rows(LLAMA.activations, dict(_LOOKUP)))

MIXTRAL = Rules(
    params=(*_PLAIN, *_EXPERTS),
    activations=(*without_rows(_ACTIVATIONS, _MLP), *_ROUTED),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)
"""For models without shared experts and dense layers."""

_SHARED = (
    ("(mlp|shared)/(gate|up)_proj/kernel", _COLUMNS),
    ("(mlp|shared)/down_proj/kernel", _ROWS),
)

MIXTRAL_SHARED = Rules(
    params=(*_PLAIN, *_EXPERTS, *_SHARED),
    activations=(*_ACTIVATIONS, *_ROUTED),
    stacked={"layers": "pipe", "dense_layers": "pipe"},
    batch=TOKENS,
)
"""For models with a shared expert, or with dense layers."""


def folded(rules: Rules) -> Rules:
    """Split experts over `expert` and `tensor` together, and none of them in itself.

    Source: Liu et al., arXiv:2504.14960. Tokens are then split over `tensor`, too, and must divide.
        Small experts stay whole, and no
    device computes with the tokens of another but in the experts it has.
    """
    patterns = dict(rules.params)
    assert _OUT in patterns, "the table has no experts"
    kernels = P(("expert", "tensor"), "fsdp")
    tokens = P(BATCH_AXES, ("sequence", "tensor"))
    params = with_specs(rules.params, {_INTO: kernels, _OUT: kernels})
    routed = {"router_logits": tokens, "expert_tokens": tokens}
    activations = with_specs(rules.activations, routed)
    return dataclasses.replace(rules, params=params, activations=activations)
