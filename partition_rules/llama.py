"""Tables of Llama and all decoders with the same parts, such as Mistral.

The rows are those that the parts of its layers declare (`spmd.models.decoder.rules`):

    >>> for pattern, spec in LLAMA.params:
    ...     print(f"{pattern:42} {spec}")
    embed/embedding                            P('pipe', ('fsdp', 'sequence', 'tensor'))
    attention/(q|k|v)_proj/kernel              P(('fsdp', 'sequence'), 'tensor')
    attention/o_proj/kernel                    P('tensor', ('fsdp', 'sequence'))
    mlp/(gate|up)_proj/kernel                  P(('fsdp', 'sequence'), 'tensor')
    mlp/down_proj/kernel                       P('tensor', ('fsdp', 'sequence'))
    (attention_norm|mlp_norm|norm)/scale       replicate('norm scales are a few KiB')
    lm_head/kernel                             P(('fsdp', 'sequence', 'pipe'), 'tensor')
"""

from spmd.models.decoder import DecoderConfig, decoder_rules, replicated_kv

LLAMA = decoder_rules(DecoderConfig())
LLAMA_TIED = decoder_rules(DecoderConfig(tied=True))
"""For models with one table for embedding and head."""
LLAMA_REPLICATED_KV = replicated_kv(LLAMA)
"""For a `tensor` larger than the number of key/value heads."""
