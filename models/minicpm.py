"""MiniCPM 3: latent attention, and factors of embeddings, residual branches and logits.

Source: arXiv:2404.06395 for the factors, huggingface.co/openbmb/MiniCPM3-4B.

```python
config = dataclasses.replace(PRESETS["minicpm3-4b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, LatentAttentionSpec, LayerSpec, MLPSpec, Rotary
from spmd.models.published.common_fields import read_factor, read_sizes
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.latent_attention import (
    latent_names,
    latent_sizes,
    read_latent_attention,
    write_latent_sizes,
)

_MIXER = LatentAttentionSpec(
    q_rank=768, kv_rank=256, nope_dim=64, rope_dim=32, value_dim=64, rotary=Rotary()
)
_TINY = LatentAttentionSpec(
    q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6, rotary=Rotary()
)

PRESETS = {
    "test-minicpm3": DecoderConfig(
        *(64, 32, 2, 4, 4, 64),
        tied=True,
        layer=LayerSpec(_TINY),
        embed_scale=12.0,
        residual_scale=1.4 / math.sqrt(2),
        logits_scale=0.25,
    ),
    "minicpm3-4b": DecoderConfig(
        *(73_448, 2560, 62, 40, 40, 6400),
        tied=True,
        layer=LayerSpec(_MIXER),
        embed_scale=12.0,
        residual_scale=1.4 / math.sqrt(62),
        logits_scale=256 / 2560,
    ),
}
"""Published shape by name, without its `rope_scaling`, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, tied=True, heads_divide=True)
    width = sizes["d_model"]
    value_dim = max(1, width // sizes["heads"])
    default = dataclasses.replace(_MIXER, value_dim=value_dim)
    mixer = read_latent_attention(fields, sizes, default)
    bias = fields.flag("mlp_bias", default=False)
    layer = LayerSpec(mixer, MLPSpec(bias=bias))
    root = math.sqrt(sizes["layers"])
    sizes = latent_sizes(sizes, mixer)
    sizes["embed_scale"] = read_factor(fields, "scale_emb", 12.0)
    if not fields.is_null("scale_depth"):
        depth = read_factor(fields, "scale_depth", 1.4)
        sizes["residual_scale"] = depth / root
    if not fields.is_null("dim_model_base"):
        base = fields.integer("dim_model_base", 256)
        sizes["logits_scale"] = base / width
    return fields.build(DecoderConfig, **sizes, layer=layer)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.pattern.group[0].mlp
    base = config.logits_scale * config.d_model
    fields = write_latent_sizes(config)
    fields["mlp_bias"] = isinstance(mlp, MLPSpec) and mlp.bias
    fields["scale_emb"] = config.embed_scale or config.d_model**0.5
    fields["scale_depth"] = _depth(config)
    fields["dim_model_base"] = max(1, round(base))
    fields["model_type"] = "minicpm3"
    return fields


def _depth(config: DecoderConfig) -> float:
    """Return `scale_depth`, which divided by the root of the number of layers is the factor."""
    root = math.sqrt(config.layers)
    depth = config.residual_scale * root
    short = round(depth, 12)  # 1.4, not 1.4000000000000001
    if short / root == config.residual_scale:
        return short
    return depth


FAMILY = decoder_family("MiniCPM3ForCausalLM", _read, _write, layer_names() | latent_names())
