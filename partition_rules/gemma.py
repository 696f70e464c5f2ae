"""Gemma: the table of a Llama whose head is its embedding, with the norms behind attention and MLP of Gemma 2."""

import dataclasses

from spmd.partition_rules.llama import LLAMA_TIED
from spmd.sharding.rules import replicate

GEMMA = LLAMA_TIED
GEMMA2 = dataclasses.replace(
    LLAMA_TIED,
    params=(*LLAMA_TIED.params, ("(attention|mlp)_post_norm/scale", replicate("norm scales are a few KiB"))),
)
