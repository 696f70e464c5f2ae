"""Llama, Megatron style: columns then rows over `tensor`, everything large over `fsdp`."""

from jax.sharding import PartitionSpec as P

from spmd.mesh import BATCH_AXES
from spmd.rules import Rules, replicate

_LAYERS = (
    ("embed/embedding", P("tensor", "fsdp")),  # [vocab, d]
    ("attention/(q|k|v)_proj/kernel", P("fsdp", "tensor")),  # [d, heads·head_dim]: whole heads on each device
    ("attention/o_proj/kernel", P("tensor", "fsdp")),  # [heads·head_dim, d]
    ("mlp/(gate|up)_proj/kernel", P("fsdp", "tensor")),  # [d, d_ff]
    ("mlp/down_proj/kernel", P("tensor", "fsdp")),  # [d_ff, d]
    ("(attention_norm|mlp_norm|norm)/scale", replicate("norm scales are a few KiB")),
)
_HEAD = (("lm_head/kernel", P("fsdp", "tensor")),)  # [d, vocab]

_ACTIVATIONS = (
    ("residual", P(BATCH_AXES, "sequence")),  # [batch, seq, d]
    ("attention_query", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, heads, head_dim]
    ("attention_key", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, kv_heads, head_dim]
    ("attention_value", P(BATCH_AXES, "sequence", "tensor")),
    ("attention_out", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, heads·head_dim]
    ("mlp_hidden", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, d_ff]
    ("logits", P(BATCH_AXES, "sequence", "tensor")),  # [batch, seq, vocab]
)

LLAMA = Rules(params=(*_LAYERS, *_HEAD), activations=_ACTIVATIONS, stacked={"layers": "pipe"})
LLAMA_TIED = Rules(params=_LAYERS, activations=_ACTIVATIONS, stacked={"layers": "pipe"})
