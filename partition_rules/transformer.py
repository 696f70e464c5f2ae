"""Transformer of any published shape: Llama's tables, for the parts that its config has."""

import dataclasses

from spmd.models.transformer import TransformerConfig
from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
from spmd.sharding.rules import Rules, replicate


def transformer_rules(config: TransformerConfig) -> Rules:
    """Return Llama's table without what the config does not have: a head of its own, a gate."""
    rules = LLAMA_TIED if config.tied else LLAMA
    absent = () if config.mlp in ("swiglu", "geglu") else ("mlp_gate",)
    activations = [(name, spec) for name, spec in rules.activations if name not in absent]
    activations.append(("layer_input", dict(activations)["residual"]))
    norms = [("attention/(q|k)_norm/scale", replicate("norm scales are a few KiB"))] if config.qk_norm else []
    return dataclasses.replace(rules, params=(*rules.params, *norms), activations=activations)
