"""Mixtral and its relatives: Llama's table, with experts split over `expert` and each of them like an MLP.

What is no expert is split over `expert` too, wherever Llama's table splits it over `fsdp`, and gathered over both. The
expert layer is manual over the mesh (`spmd.layers.moe`), so the table has the sharding of its input and output tokens
and of stored kernels.
"""

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA
from spmd.sharding.mesh import BATCH_AXES, as_entry, entry_axes
from spmd.sharding.optimizer_state import drop_axis
from spmd.sharding.rules import Rules, replicate


def _over_experts(spec: P) -> P:
    """Split over `expert` what is split over `fsdp`."""
    split = (
        [name for axis in entry_axes(entry) for name in ((axis, "expert") if axis == "fsdp" else (axis,))]
        for entry in drop_axis(spec, "expert")
    )
    return P(*map(as_entry, split))


_EXPERTS = (
    ("experts/(gate|up)_proj/kernel", P("expert", "fsdp", "tensor")),  # [expert, d, d_ff]
    ("experts/down_proj/kernel", P("expert", ("tensor", "fsdp"))),  # [expert, d_ff, d]
    ("router/(kernel|bias)", replicate("a router is a few hundred KiB, and every token needs all of it")),
)
_ROUTED = (
    ("router_logits", P(BATCH_AXES, "sequence")),  # [batch, seq, expert]
    ("expert_tokens", P(BATCH_AXES, "sequence")),  # [batch, seq, d]
    ("expert_hidden", P(BATCH_AXES)),  # rows of tokens, inside the manual program
)
_MLP = ("mlp_input", "mlp_gate", "mlp_up", "mlp_hidden")
_PLAIN = tuple(
    (pattern, _over_experts(value) if isinstance(value, P) else value)
    for pattern, value in LLAMA.params
    if not pattern.startswith("mlp/")
)
_ACTIVATIONS = tuple(
    (name, _over_experts(spec) if name.startswith("embed_") else spec) for name, spec in LLAMA.activations
)

MIXTRAL = Rules(
    params=(*_PLAIN, *_EXPERTS),
    activations=(*(mark for mark in _ACTIVATIONS if mark[0] not in _MLP), *_ROUTED),
    stacked={"layers": "pipe"},
)
"""For models without shared experts and dense layers."""

MIXTRAL_SHARED = Rules(
    params=(
        *_PLAIN,
        *_EXPERTS,
        ("(mlp|shared)/(gate|up)_proj/kernel", P(("fsdp", "expert"), "tensor")),
        ("(mlp|shared)/down_proj/kernel", P("tensor", ("fsdp", "expert"))),
    ),
    activations=(*_ACTIVATIONS, *_ROUTED),
    stacked={"layers": "pipe", "dense_layers": "pipe"},
)
"""For models with a shared expert, or with dense layers."""
