"""StarCoder 2: LayerNorm, biases in all kernels, an MLP without a gate (arXiv:2402.19173).

```python
config = dataclasses.replace(PRESETS["starcoder2-3b"], layers=4)
model = spmd.from_nnx(config.build)
```

The smaller models have a sliding window of 4,096 tokens, and tied embeddings.
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, Rotary
from spmd.models.published.common_fields import TANH, read_sizes, read_window, write_sizes
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.gpt import gpt_decoder
from spmd.models.published.tensor_names import module_names

_EPS = "norm_epsilon"
_HARMLESS = (
    *("residual_dropout", "embedding_dropout", "activation_function"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)
"""Fields of training, an earlier name, and the precision of the softmax, always float32."""


starcoder2 = functools.partial(gpt_decoder, rotary=Rotary(), activation="gelu_tanh", tied=True)
"""Config of a StarCoder 2 from fields of `gpt_decoder`."""

PRESETS = {
    "test-starcoder2": starcoder2(64, 32, 2, 4, 2, 64, window=5),
    "starcoder2-3b": starcoder2(
        *(49_152, 3072, 30, 24, 2, 12_288), rope_theta=999_999.4420358813, window=4096
    ),
    "starcoder2-15b": starcoder2(
        *(49_152, 6144, 40, 48, 4, 24_576), rope_theta=100_000.0, window=4096, tied=False
    ),
}
"""Published shapes by name, and a small one for tests."""


_NAMES = layer_names() | module_names({"mlp/up_proj": "mlp.c_fc", "mlp/down_proj": "mlp.c_proj"})


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.only("scale_attn_weights", True)
    sizes = read_sizes(
        fields,
        eps=1e-5,
        eps_field=_EPS,
        kv_heads=2,
        tied=True,
        activation=("hidden_act", TANH),
    )
    fields.only("layer_norm_epsilon", sizes["norm_eps"])  # an earlier name
    window = read_window(fields, absent=0)
    bias = fields.flag("use_bias", default=True)
    return fields.build(starcoder2, **sizes, window=window, attention_bias=bias, mlp_bias=bias)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    return {
        "model_type": "starcoder2",
        **write_sizes(config, _EPS),
        "hidden_act": TANH,
        "use_bias": mixer.qkv_bias,
        "sliding_window": mixer.window or None,
    }


FAMILY = decoder_family("Starcoder2ForCausalLM", _read, _write, _NAMES, harmless=_HARMLESS)
