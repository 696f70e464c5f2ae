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
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.sharding.batch import TOKENS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Replicate, Rules, replicate

Rows = Sequence[tuple[str, Any]]
"""Names or patterns, and their specs."""

_QKV = "attention/(q|k|v)_proj/kernel"
QKV_BIAS = "attention/(q|k|v)_proj/bias"
"""Pattern of the biases in Llama's relatives, such as Qwen 2."""
_COLUMNS = P("fsdp", "tensor")
_ROWS = P("tensor", "fsdp")
_LAYERS = (
    (_QKV, _COLUMNS),  # [d, heads·head_dim]: whole heads on each device
    ("attention/o_proj/kernel", _ROWS),  # [heads·head_dim, d]
    ("mlp/(gate|up)_proj/kernel", _COLUMNS),  # [d, d_ff]
    ("mlp/down_proj/kernel", _ROWS),  # [d_ff, d]
    ("(attention_norm|mlp_norm|norm)/scale", replicate("norm scales are a few KiB")),
)

_WHOLE = P(BATCH_AXES, "sequence")
_SPLIT = P(BATCH_AXES, "sequence", "tensor")
_ACTIVATIONS = (
    ("residual", _SPLIT),  # [batch, seq, d], as are the next two
    ("attention_input", _WHOLE),
    ("mlp_input", _WHOLE),
    ("attention_query", _SPLIT),  # [batch, seq, heads, head_dim]
    ("attention_key", _SPLIT),  # [batch, seq, kv_heads, head_dim]
    ("attention_value", _SPLIT),
    ("attention_out", _SPLIT),  # [batch, seq, heads·head_dim]
    ("mlp_gate", _SPLIT),  # [batch, seq, d_ff], as are the next two
    ("mlp_up", _SPLIT),
    ("mlp_hidden", _SPLIT),
    ("logits", _SPLIT),  # [batch, seq, vocab]
)

_EMBEDDING = ("embed/embedding", P("pipe", ("fsdp", "tensor")))  # [vocab, d]
_LOOKUP = (
    # [batch, seq]: every column's owner sees all tokens.
    ("embed_tokens", P(("data", "expert"), "sequence")),
    ("embed_rows", P(("data", "expert"), "sequence", ("fsdp", "tensor"))),  # [batch, seq, d]
    # Two short exchanges instead of a full copy.
    ("embed_exchange", P(("data", "expert"), "sequence", "fsdp")),
)

_HEAD = ("lm_head/kernel", P(("fsdp", "pipe"), "tensor"))  # [d, vocab]
_TIED_HEAD = ("tied_columns", P(("pipe", "tensor"), "fsdp"))  # [vocab, d]: columns become rows

LLAMA = Rules(
    params=(_EMBEDDING, *_LAYERS, _HEAD),
    activations=(*_LOOKUP, *_ACTIVATIONS),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)

LLAMA_TIED = Rules(
    params=(_EMBEDDING, *_LAYERS),
    activations=(*_LOOKUP, *_ACTIVATIONS, _TIED_HEAD),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)


def without_rows(rows: Rows, names: Collection[str]) -> Rows:
    """Return the rows of a table with other names."""
    return tuple(row for row in rows if row[0] not in names)


def with_specs(rows: Rows, specs: Mapping[str, P]) -> Rows:
    """Return the rows of a table, some of them with other specs.

    Args:
        rows: Names or patterns, and their specs.
        specs: Name or pattern → its new spec.
    """
    changed = []
    for name, spec in rows:
        changed.append((name, specs.get(name, spec)))
    return tuple(changed)


def sequence_parallel(rules: Rules) -> Rules:
    """Split the residual stream and its norms over `tensor` by tokens instead of by width.

    Norms then need no sum over `tensor` (Korthikanti et al., arXiv:2205.05198, section 4.2.2), and
    tokens must divide.
    """
    names = dict(rules.activations)
    assert "residual" in names, "the table has no row for the residual stream"
    tokens = P(BATCH_AXES, ("sequence", "tensor"))
    activations = with_specs(rules.activations, {"residual": tokens})
    return dataclasses.replace(rules, activations=activations)


def replicated_kv(rules: Rules) -> Rules:
    """Replicate key/value heads over `tensor`, for a `tensor` larger than their number.

    Each device computes all of them, and their gradients are summed over `tensor`; query heads are
    still split.
    """
    whole: dict[str, P | Replicate] = {
        "attention/(k|v)_proj/kernel": P("fsdp"),
        "attention/q_proj/kernel": _COLUMNS,
    }
    if QKV_BIAS in dict(rules.params):
        whole["attention/(k|v)_proj/bias"] = replicate("on every device, like the kernels")
        whole["attention/q_proj/bias"] = P("tensor")
    params = [*whole.items(), *without_rows(rules.params, (_QKV, QKV_BIAS))]
    activations = []
    for name, spec in rules.activations:
        if name in ("attention_key", "attention_value"):
            spec = P(*spec[:2])
        activations.append((name, spec))
    return dataclasses.replace(rules, params=params, activations=activations)


LLAMA_REPLICATED_KV = replicated_kv(LLAMA)
