"""Phi-3, 3.5 and 4: a Llama with fused kernels and LongRoPE (arXiv:2404.14219, arXiv:2412.08905).

Queries, keys and values are one tensor of a checkpoint, gate and up projection another. Phi-4 mini
rotates three quarters of each head, and its embedding is the head.

```python
config = dataclasses.replace(PRESETS["phi4"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, LongRopeScaling, Rotary
from spmd.models.published.common_fields import read_sizes, read_window, write_sizes
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.rotary import PLAIN, read_rotary
from spmd.models.published.tensor_names import GATE_UP, QKV, fused_names

_ROTARY = Rotary()


def phi3(*shape: Any, rotary: Rotary = _ROTARY, **fields: Any) -> DecoderConfig:
    """Return the config of a Phi-3 from fields of `DecoderConfig`."""
    layer = LayerSpec(AttentionSpec(rotary=rotary))
    return DecoderConfig(*shape, **{"layer": layer} | fields)


_SCALING = LongRopeScaling(
    factor=2.0, original_context=64, short_factor=(1.0, 1.0), long_factor=(1.5, 3.0)
)
PRESETS = {
    "test-phi3": phi3(64, 32, 2, 4, 2, 64, rotary=Rotary(scaling=_SCALING, fraction=0.5)),
    "phi3-mini-4k": phi3(32_064, 3072, 32, 32, 32, 8192, window=2047),
    "phi3-medium-4k": phi3(32_064, 5120, 40, 40, 10, 17_920, window=2047),
    "phi4": phi3(100_352, 5120, 40, 40, 10, 17_920, rope_theta=250_000.0),
}
"""Published shapes by name, and a small one for tests."""

_HARMLESS = ("embd_pdrop", "resid_pdrop")
_CONTEXTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
"""Defaults, which LongRoPE needs."""


def _names(config: DecoderConfig) -> TensorNames:
    mixer = config.pattern.group[0].attention
    parts = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
    layer = layer_names()
    layer |= fused_names(QKV, "self_attn.qkv_proj", parts)
    layer |= fused_names(GATE_UP, "mlp.gate_up_proj", 2)
    return TensorNames(layer, ENDS)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields({**_CONTEXTS, **values})
    for name in _CONTEXTS:
        fields.value(name)
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    fields.only("lm_head_bias", False)
    sizes = read_sizes(fields, eps=1e-5, theta=0)
    rotary = read_rotary(fields, PLAIN, kinds=("default", "longrope"))
    window = read_window(fields, absent=0)
    return fields.build(phi3, **sizes, rotary=rotary, window=window)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    return {
        "model_type": "phi3",
        **write_sizes(config, rotary=mixer.rotary),
        "sliding_window": mixer.window or None,
    }


FAMILY = decoder_family(
    "Phi3ForCausalLM", _read, _write, names=_names, harmless=_HARMLESS, secondary=True
)
