"""Vision transformer: GPT-2's layers; patches are few, and not split over `sequence`."""

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.gpt2 import LAYERS
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate

_WHOLE = P(BATCH_AXES)
_SPLIT = P(BATCH_AXES, None, "tensor")

VIT = Rules(
    params=(
        ("patch_proj/kernel", P(None, None, None, "fsdp")),  # [patch, patch, channels, d]
        ("positions", P(None, None, "fsdp")),  # [1, patches + 1, d]
        ("head/kernel", P("fsdp")),  # [d, classes]
        ("(class_token|patch_proj/bias|head/bias)", replicate("one vector each")),
        *LAYERS,
    ),
    activations=(
        ("patches", _WHOLE),  # [batch, patches, patch, patch, channels]
        ("residual", _SPLIT),  # [batch, patches + 1, d], as are the next two
        ("attention_input", _WHOLE),
        ("mlp_input", _WHOLE),
        ("attention_query", _SPLIT),  # [batch, patches + 1, heads, head_dim], as are the next two
        ("attention_key", _SPLIT),
        ("attention_value", _SPLIT),
        ("attention_out", _SPLIT),  # [batch, patches + 1, d]
        ("mlp_up", _SPLIT),  # [batch, patches + 1, d_ff], as is the next one
        ("mlp_hidden", _SPLIT),
        ("head_input", _WHOLE),  # [batch, 1, d]
        ("class_logits", _WHOLE),  # [batch, classes]
    ),
    stacked={"layers": "pipe"},
)
