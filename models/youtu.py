"""Youtu-LLM: latent attention with MLPs, without experts (arXiv:2512.24618).

```python
config = dataclasses.replace(PRESETS["youtu-2b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, LatentAttentionSpec, LayerSpec
from spmd.models.published.common_fields import read_sizes
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.latent_attention import (
    latent_names,
    latent_sizes,
    read_latent_attention,
    write_latent_sizes,
)

_INIT = "embedding_initializer_range"
_MIXER = LatentAttentionSpec(q_rank=1536)
_TINY = LatentAttentionSpec(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)

PRESETS = {
    "test-youtu": DecoderConfig(
        *(64, 32, 2, 4, 4, 64), tied=True, norm_eps=1e-6, layer=LayerSpec(_TINY)
    ),
    "youtu-2b": DecoderConfig(
        *(128_256, 2048, 32, 16, 16, 6144),
        rope_theta=1.6e6,
        tied=True,
        norm_eps=1e-6,
        layer=LayerSpec(_MIXER),
    ),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, tied=True)
    mixer = read_latent_attention(fields, sizes, _MIXER, may_interleave=True)
    sizes = latent_sizes(sizes, mixer)
    return fields.build(DecoderConfig, **sizes, layer=LayerSpec(mixer))


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = write_latent_sizes(config, may_interleave=True)
    fields["model_type"] = "youtu"
    return fields


FAMILY = decoder_family(
    "YoutuForCausalLM",
    _read,
    _write,
    layer_names() | latent_names(),
    harmless=(_INIT,),
)
