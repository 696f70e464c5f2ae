"""Transformer of any published shape: Llama's tables, for the parts that a model has."""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
from spmd.sharding.rules import Rules, replicate


def transformer_rules(*, gated: bool = True, tied: bool = False, qk_norm: bool = False) -> Rules:
    """Return the table of a model with or without a gate in its MLP, a head of its own, and norms of queries and keys.

    Example:
        >>> "mlp_gate" in dict(transformer_rules(gated=False).activations)
        False
    """
    rules = LLAMA_TIED if tied else LLAMA
    # [d_ff, d]: cut in rows. XLA:TPU copies what is gathered from columns that do not fill a tile
    # of its memory.
    params = [
        (path, P(("tensor", "fsdp")) if path == "mlp/down_proj/kernel" else spec)
        for path, spec in rules.params
    ]
    activations = {name: spec for name, spec in rules.activations if gated or name != "mlp_gate"}
    activations["layer_input"] = activations["residual"]
    norms = (
        [("attention/(q|k)_norm/scale", replicate("norm scales are a few KiB"))] if qk_norm else []
    )
    return dataclasses.replace(
        rules, params=(*params, *norms), activations=tuple(activations.items())
    )
