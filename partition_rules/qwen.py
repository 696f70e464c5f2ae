"""Qwen: Llama's table, with the biases of Qwen 2 or the query and key norms of Qwen 3."""

import dataclasses

from jax.sharding import PartitionSpec as P

from spmd.partition_rules.llama import LLAMA, LLAMA_TIED, QKV_BIAS
from spmd.sharding.rules import Rules, replicate

_BIASES = (QKV_BIAS, P("tensor"))  # [heads·head_dim], as their kernels' outputs
_NORMS = ("attention/(q|k)_norm/scale", replicate("one scale of head_dim for all heads of a layer"))


def _with(rules: Rules, row: tuple) -> Rules:
    return dataclasses.replace(rules, params=(*rules.params, row))


QWEN2 = _with(LLAMA, _BIASES)
QWEN2_TIED = _with(LLAMA_TIED, _BIASES)
QWEN3 = _with(LLAMA, _NORMS)
QWEN3_TIED = _with(LLAMA_TIED, _NORMS)
