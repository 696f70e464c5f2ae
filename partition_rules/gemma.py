"""Gemma: the table of a tied Llama; Gemma 2 has norms after attention and MLP too."""

import dataclasses

from spmd.partition_rules.llama import LLAMA_TIED
from spmd.sharding.rules import replicate

GEMMA = LLAMA_TIED
GEMMA2 = dataclasses.replace(
    LLAMA_TIED,
    params=(
        *LLAMA_TIED.params,
        ("(attention|mlp)_post_norm/scale", replicate("norm scales are a few KiB")),
    ),
)
