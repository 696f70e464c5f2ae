"""VaultGemma: a Gemma 2 with norms before attention and MLP only (arXiv:2510.15001).

```python
config = dataclasses.replace(PRESETS["vaultgemma-1b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec
from spmd.models.gemma import DEFAULTS, MLP, read_gemma, write_gemma_layers
from spmd.models.published.common_fields import read_soft_cap
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    attention_table,
    every,
    read_layer_types,
    read_window_of,
)


def vaultgemma(
    kinds: Sequence[str],
    *,
    window: int = 512,
    query_scale: float = 256,
    soft_cap: float = 0.0,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a VaultGemma from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        query_scale: As in `spmd.models.gemma.gemma2`.
        soft_cap: Soft cap of attention scores; 0 for none.
        **fields: Other fields.
    """
    layer = LayerSpec(AttentionSpec(scale=query_scale**-0.5, soft_cap=soft_cap), MLP)
    table = attention_table(layer, window, kinds)
    return DecoderConfig(**DEFAULTS | table | {"layers": len(kinds)} | fields)


_1B: dict[str, Any] = {"d_model": 1152, "heads": 4, "kv_heads": 4, "d_ff": 6912, "head_dim": 256}

PRESETS = {
    "test-vaultgemma": vaultgemma(
        every(2, 4), window=5, query_scale=9, vocab=64, d_model=32, d_ff=64
    ),
    "vaultgemma-1b": vaultgemma(every(2, 26), vocab=256_000, **_1B),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_gemma(fields)
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
    return {"model_type": "vaultgemma", **write_gemma_layers(config)}


_NAMES = layer_names(attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm")
FAMILY = decoder_family("VaultGemmaForCausalLM", _read, _write, _NAMES)
