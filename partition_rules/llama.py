"""Llama, Megatron style: columns then rows over `tensor`, everything large over `fsdp`.

The embedding is split by columns, not by vocabulary. Each device looks up its columns for all
tokens of its `fsdp × tensor` group, and then columns are exchanged for tokens: activations are
communicated instead of the table, and the table's gradient needs no sum over `fsdp`. As a tied head
it is split by vocabulary. Over `pipe`, where every stage of a pipeline uses embedding and head
whole, only what is stored is split.

Between the matrices, the residual stream and its norms are split over `tensor` too: by width, which
any number of tokens allows (decision 0033).
"""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.sharding.batch import TOKENS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Replicate, Rules, replicate

_QKV = "attention/(q|k|v)_proj/kernel"
QKV_BIAS = "attention/(q|k|v)_proj/bias"
"""Pattern of the biases in Llama's relatives, such as Qwen 2."""
_LAYERS = (
    (_QKV, P("fsdp", "tensor")),  # [d, heads·head_dim]: whole heads on each device
    ("attention/o_proj/kernel", P("tensor", "fsdp")),  # [heads·head_dim, d]
    ("mlp/(gate|up)_proj/kernel", P("fsdp", "tensor")),  # [d, d_ff]
    ("mlp/down_proj/kernel", P("tensor", "fsdp")),  # [d_ff, d]
    ("(attention_norm|mlp_norm|norm)/scale", replicate("norm scales are a few KiB")),
)
_ACTIVATIONS = (
    ("residual", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, d], as are the next two
    ("attention_input", P(BATCH_AXES, "sequence")),
    ("mlp_input", P(BATCH_AXES, "sequence")),
    ("attention_query", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, heads, head_dim]
    ("attention_key", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, kv_heads, head_dim]
    ("attention_value", P(BATCH_AXES, "sequence", "tensor")),
    ("attention_out", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, heads·head_dim]
    ("mlp_gate", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, d_ff], as are the next two
    ("mlp_up", P(BATCH_AXES, "sequence", "tensor")),
    ("mlp_hidden", P(BATCH_AXES, "sequence", "tensor")),
    ("logits", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, vocab]
)

_EMBEDDING = ("embed/embedding", P("pipe", ("fsdp", "tensor")))  # [vocab, d]
_LOOKUP = (
    # [batch, seq]: every column's owner sees all tokens
    ("embed_tokens", P(("data", "expert"), "sequence")),
    ("embed_rows", P(("data", "expert"), "sequence", ("fsdp", "tensor"))),  # [batch, seq, d]
    # two short exchanges instead of a full copy
    ("embed_exchange", P(("data", "expert"), "sequence", "fsdp")),
)

LLAMA = Rules(
    # the head is [d, vocab]
    params=(_EMBEDDING, *_LAYERS, ("lm_head/kernel", P(("fsdp", "pipe"), "tensor"))),
    activations=(*_LOOKUP, *_ACTIVATIONS),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)

LLAMA_TIED = Rules(
    params=(_EMBEDDING, *_LAYERS),
    activations=(
        *_LOOKUP,
        *_ACTIVATIONS,
        # [vocab, d]: columns are exchanged for rows, …
        ("tied_columns", P(("pipe", "tensor"), "fsdp")),
    ),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)


def sequence_parallel(rules: Rules) -> Rules:
    """Split the residual stream and its norms over `tensor` by tokens instead of by width.

    Norms then need no sum over `tensor` (Korthikanti et al., arXiv:2205.05198, section 4.2.2), and
    tokens must divide.
    """
    assert "residual" in dict(rules.activations), "the table has no row for the residual stream"
    split = P(BATCH_AXES, ("sequence", "tensor"))
    return dataclasses.replace(
        rules, activations=[(n, split if n == "residual" else s) for n, s in rules.activations]
    )


def replicated_kv(rules: Rules) -> Rules:
    """Replicate key/value heads over `tensor`, for a `tensor` larger than their number.

    Each device computes all of them, and their gradients are summed over `tensor`; query heads are
    still split.
    """
    whole: dict[str, P | Replicate] = {
        "attention/(k|v)_proj/kernel": P("fsdp"),
        "attention/q_proj/kernel": P("fsdp", "tensor"),
    }
    if QKV_BIAS in dict(rules.params):
        whole["attention/(k|v)_proj/bias"] = replicate("on every device, like the kernels")
        whole["attention/q_proj/bias"] = P("tensor")
    params = [rule for rule in rules.params if rule[0] not in (_QKV, QKV_BIAS)]
    heads = ("attention_key", "attention_value")
    activations = [
        (name, P(*spec[:2]) if name in heads else spec) for name, spec in rules.activations
    ]
    return dataclasses.replace(rules, params=[*whole.items(), *params], activations=activations)


LLAMA_REPLICATED_KV = replicated_kv(LLAMA)
