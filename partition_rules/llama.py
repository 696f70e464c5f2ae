"""Tables of Llama and all decoders with the same parts, such as Mistral."""

from spmd.models.decoder import DecoderConfig, decoder_rules
from spmd.partition_rules.layouts import replicated_kv

LLAMA = decoder_rules(DecoderConfig())
LLAMA_TIED = decoder_rules(DecoderConfig(tied=True))
"""For models with one table for embedding and head."""
LLAMA_REPLICATED_KV = replicated_kv(LLAMA)
"""For a `tensor` larger than the number of key/value heads."""
