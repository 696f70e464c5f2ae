"""Vision transformer: GPT-2's layers.

Patches are not split over `sequence`, as an image has few of them.
"""

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.gpt2 import LAYERS
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

VIT = Rules(
    params=(
        ("patch_proj/kernel", P(None, None, None, "fsdp")),  # [patch, patch, channels, d]
        ("positions", P(None, None, "fsdp")),  # [1, patches + 1, d]
        ("head/kernel", P("fsdp")),  # [d, classes]
        ("(class_token|patch_proj/bias|head/bias)", replicate("one vector each")),
        *LAYERS,
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
