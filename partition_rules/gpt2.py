"""GPT-2: Llama's kernels without a gate; biases of column-parallel kernels are split too.

The published vocabulary, 50,257 words, divides over no `tensor` above 1: use
`GPT2_WHOLE_VOCABULARY`, or 50,304 words for a model that is not imported.
"""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA_TIED, with_specs, without_rows
from spmd.sharding.batch import TOKENS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate

_COLUMNS = P("fsdp", "tensor")
_ROWS = P("tensor", "fsdp")
_SUMMED_BIAS = replicate("added once, where rows are summed over tensor")

LAYERS = (
    ("attention/(q|k|v)_proj/kernel", _COLUMNS),  # [d, d]: whole heads on each device
    ("attention/(q|k|v)_proj/bias", P("tensor")),
    ("attention/o_proj/kernel", _ROWS),
    ("mlp/up_proj/kernel", _COLUMNS),  # [d, d_ff]
    ("mlp/up_proj/bias", P("tensor")),
    ("mlp/down_proj/kernel", _ROWS),  # [d_ff, d]
    ("(o|down)_proj/bias", _SUMMED_BIAS),
    ("(attention_norm|mlp_norm|norm)/(scale|bias)", replicate("norms are a few KiB")),
)
"""Parameters of a layer with LayerNorm, biases and an MLP without a gate."""

_EMBEDDING = P(None, ("fsdp", "tensor", "pipe"))  # [vocab, d]
_POSITIONS = P(None, "fsdp")  # [position, d]

GPT2 = Rules(
    params=(("embed/embedding", _EMBEDDING), ("positions", _POSITIONS), *LAYERS),
    activations=without_rows(LLAMA_TIED.activations, ("mlp_gate",)),
    stacked={"layers": "pipe"},
    batch=TOKENS,
)

_WHOLE = {"tied_columns": P(None, "fsdp"), "logits": P(BATCH_AXES, "sequence")}
GPT2_WHOLE_VOCABULARY = dataclasses.replace(GPT2, activations=with_specs(GPT2.activations, _WHOLE))
"""The head is not split over `tensor`: every device of the axis computes the same logits."""
