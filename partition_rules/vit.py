"""Vision transformer: layers with biases, each like one of a decoder.

Patches are not split over `sequence`, as an image has few of them.
"""

from jax.sharding import PartitionSpec as P

from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate

_SPLIT = (
    "attention_query",
    "attention_key",
    "attention_value",
    "attention_out",
    "mlp_up",
    "mlp_hidden",
)
_WHOLE = ("attention_input", "mlp_input")

_LAYERS = (
    ("attention/(q|k|v)_proj/kernel", P("fsdp", "tensor")),  # [d, d]: whole heads on each device
    ("attention/(q|k|v)_proj/bias", P("tensor")),
    ("attention/o_proj/kernel", P("tensor", "fsdp")),
    ("mlp/up_proj/kernel", P("fsdp", "tensor")),  # [d, d_ff]
    ("mlp/up_proj/bias", P("tensor")),
    ("mlp/down_proj/kernel", P("tensor", "fsdp")),  # [d_ff, d]
    ("(o|down)_proj/bias", replicate("added once, where rows are summed over tensor")),
    ("(attention_norm|mlp_norm|norm)/(scale|bias)", replicate("norms are a few KiB")),
)

VIT = Rules(
    params=(
        ("patch_proj/kernel", P(None, None, None, "fsdp")),  # [patch, patch, channels, d]
        ("positions", P(None, None, "fsdp")),  # [1, patches + 1, d]
        ("head/kernel", P("fsdp")),  # [d, classes]
        ("(class_token|patch_proj/bias|head/bias)", replicate("one vector each")),
        *_LAYERS,
    ),
    activations=(
        ("patches", P(BATCH_AXES)),  # [batch, patches, patch, patch, channels]
        ("residual", P(BATCH_AXES, None, "tensor")),  # [batch, patches + 1, d], as are the next two
        *((name, P(BATCH_AXES)) for name in _WHOLE),
        *((name, P(BATCH_AXES, None, "tensor")) for name in _SPLIT),
        ("head_input", P(BATCH_AXES)),  # [batch, 1, d]
        ("class_logits", P(BATCH_AXES)),  # [batch, classes]
    ),
    stacked={"layers": "pipe"},
)
