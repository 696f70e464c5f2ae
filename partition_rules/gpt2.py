"""GPT-2: Llama's kernels without a gate.

Biases of column-parallel kernels are split like their outputs.

The published vocabulary, 50,257 words, divides over no `tensor` above 1: use
`GPT2_WHOLE_VOCABULARY`, or 50,304 words for a model that is not imported.
"""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA_TIED
from spmd.sharding.batch import TOKENS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate

LAYERS = (
    ("attention/(q|k|v)_proj/kernel", P("fsdp", "tensor")),  # [d, d]: whole heads on each device
    ("attention/(q|k|v)_proj/bias", P("tensor")),
    ("attention/o_proj/kernel", P("tensor", "fsdp")),
    ("mlp/up_proj/kernel", P("fsdp", "tensor")),  # [d, d_ff]
    ("mlp/up_proj/bias", P("tensor")),
    ("mlp/down_proj/kernel", P("tensor", "fsdp")),  # [d_ff, d]
    ("(o|down)_proj/bias", replicate("added once, where rows are summed over tensor")),
    ("(attention_norm|mlp_norm|norm)/(scale|bias)", replicate("norms are a few KiB")),
)
"""Parameters of a layer with LayerNorm, biases and an MLP without a gate."""

GPT2 = Rules(
    params=(
        ("embed/embedding", P(None, ("fsdp", "tensor", "pipe"))),
        ("positions", P(None, "fsdp")),
        *LAYERS,
    ),
    activations=tuple(mark for mark in LLAMA_TIED.activations if mark[0] != "mlp_gate"),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)

_WHOLE = {"tied_columns": P(None, "fsdp"), "logits": P(BATCH_AXES, "sequence")}
GPT2_WHOLE_VOCABULARY = dataclasses.replace(
    GPT2, activations=[(name, _WHOLE.get(name, spec)) for name, spec in GPT2.activations]
)
"""The head is not split over `tensor`: every device of the axis computes the same logits."""
