"""Transformer of any published shape: Llama's tables, for the parts that a model has."""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA, LLAMA_TIED, with_specs
from spmd.sharding.rules import Rules, replicate


def transformer_rules(*, gated: bool = True, tied: bool = False, qk_norm: bool = False) -> Rules:
    """Return the table of a model.

    Args:
        gated: Whether its MLP has a gate.
        tied: Whether its head is the embedding's transpose.
        qk_norm: Whether it normalises queries and keys.

    Example:
        >>> "mlp_gate" in dict(transformer_rules(gated=False).activations)
        False
    """
    rules = LLAMA_TIED if tied else LLAMA
    # [d_ff, d]: cut in rows. XLA:TPU copies what is gathered from columns that do not fill a tile
    # of its memory.
    rows = P(("tensor", "fsdp"))
    params = [*with_specs(rules.params, {"mlp/down_proj/kernel": rows})]
    if qk_norm:
        whole = replicate("norm scales are a few KiB")
        params.append(("attention/(q|k)_norm/scale", whole))
    activations = dict(rules.activations)
    if not gated:
        del activations["mlp_gate"]
    activations["layer_input"] = activations["residual"]
    return dataclasses.replace(rules, params=params, activations=tuple(activations.items()))
