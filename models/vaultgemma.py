"""VaultGemma: a Gemma 2 with norms before attention and MLP only (arXiv:2510.15001).

```python
config = dataclasses.replace(PRESETS["vaultgemma-1b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec, NormSpec
from spmd.models.decoder.published import (
    TANH,
    decoder_family,
    layer_names,
    read_sizes,
    read_soft_cap,
    write_query_scale,
    write_sizes,
)
from spmd.models.decoder.published_layers import (
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    write_layer_types,
)

_DEFAULTS: dict[str, Any] = {
    "norm_eps": 1e-6,
    "tied": True,
    "norm": NormSpec(offset=1.0),
    "embed_scale": 0.0,  # √d_model
}


def vaultgemma(
    kinds: Sequence[str], *, window: int, query_scale: float, soft_cap: float = 0.0, **fields: Any
) -> DecoderConfig:
    """Return the config of a VaultGemma from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        query_scale: Products of queries and keys are divided by the square root of this
            (`query_pre_attn_scalar`).
        soft_cap: Soft cap of attention scores; 0 for none.
        **fields: Other fields.
    """
    mixer = AttentionSpec(scale=query_scale**-0.5, soft_cap=soft_cap)
    layer = LayerSpec(mixer, MLPSpec(activation="gelu_tanh"))
    table = attention_table(layer, window, kinds)
    return DecoderConfig(**_DEFAULTS | table | {"layers": len(kinds)} | fields)


_SIZES_1B: dict[str, Any] = {
    "vocab": 256_000,
    "d_model": 1152,
    "heads": 4,
    "kv_heads": 4,
    "d_ff": 6912,
}

PRESETS = {
    "test-vaultgemma": vaultgemma(
        every(2, 4), window=5, query_scale=9, vocab=64, d_model=32, d_ff=64
    ),
    "vaultgemma-1b": vaultgemma(
        every(2, 26), window=512, query_scale=256, **_SIZES_1B, head_dim=256
    ),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("attention_bias", False)
    activation = ("hidden_activation", TANH)
    sizes = read_sizes(
        fields, head_dim=256, kv_heads=4, tied=True, activation=activation, heads_divide=True
    )
    kinds = read_layer_types(fields, sizes["layers"], every(2, sizes["layers"]))
    return fields.build(
        vaultgemma,
        **sizes,
        kinds=kinds,
        window=read_window_of(fields, kinds, absent=4096),
        query_scale=fields.integer("query_pre_attn_scalar", 256),
        soft_cap=read_soft_cap(fields, "attn_logit_softcapping", absent=50.0),
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", absent=30.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    sizes = write_sizes(config)
    del sizes["hidden_act"]
    return {
        "model_type": "vaultgemma",
        **sizes,
        "hidden_activation": TANH,
        **write_layer_types(config),
        "query_pre_attn_scalar": write_query_scale(config),
        "attn_logit_softcapping": config.pattern.kinds[0].mixer.soft_cap or None,
        "final_logit_softcapping": config.logits_soft_cap or None,
    }


FAMILY = decoder_family(
    "VaultGemmaForCausalLM",
    _read,
    _write,
    layer_names(attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
)
