"""GPT-NeoX and Pythia: attention and MLP side by side (arXiv:2204.06745, arXiv:2304.01373).

LayerNorm, biases in all kernels, and a quarter of each head rotated. A checkpoint has queries, keys
and values of each head in turn in one tensor.

```python
config = dataclasses.replace(PRESETS["pythia-1.4b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Ignored
from spmd.hf.fields import Fields, renamed
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig, RopeScaling, Rotary
from spmd.models.decoder.layer import Norms
from spmd.models.published.common_fields import write_sizes
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.gpt import gpt_decoder, read_gpt, write_activation
from spmd.models.published.rotary import read_rotary
from spmd.models.published.tensor_names import QKV, Names, fused_names, module_names

_FIELDS = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_EPS = "layer_norm_eps"
_QUARTER = Rotary(10_000.0, RopeScaling(), fraction=0.25)


gpt_neox = functools.partial(gpt_decoder, rotary=_QUARTER, norms="parallel")
"""Config of a GPT-NeoX from fields of `gpt_decoder`."""

PRESETS = {
    "test-gpt-neox": gpt_neox(64, 32, 2, 4, 4, 64),
    "pythia-70m": gpt_neox(50_304, 512, 6, 8, 8, 2048),
    "pythia-160m": gpt_neox(50_304, 768, 12, 12, 12, 3072),
    "pythia-410m": gpt_neox(50_304, 1024, 24, 16, 16, 4096),
    "pythia-1b": gpt_neox(50_304, 2048, 16, 8, 8, 8192),
    "pythia-1.4b": gpt_neox(50_304, 2048, 24, 16, 16, 8192),
    "pythia-2.8b": gpt_neox(50_304, 2560, 32, 32, 32, 10_240),
    "pythia-6.9b": gpt_neox(50_432, 4096, 32, 32, 32, 16_384),
    "pythia-12b": gpt_neox(50_688, 5120, 36, 40, 40, 20_480),
    "gpt-neox-20b": gpt_neox(50_432, 6144, 44, 64, 64, 24_576),
}
"""Published shapes by name, and a small one for tests."""

_PREFIX = "gpt_neox."
_LINEAR = {
    "attention/o_proj": "attention.dense",
    "mlp/up_proj": "mlp.dense_h_to_4h",
    "mlp/down_proj": "mlp.dense_4h_to_h",
}
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_ENDS: Names = {
    "embed/embedding": ("embed_in.weight", AS_IS),
    **module_names({}, {"norm": "final_layer_norm"}),
}
_ATTENTION = _PREFIX + "layers.{layer}.attention."
_IGNORED = (
    Ignored(_ATTENTION + "bias", "is the causal mask"),
    Ignored(_ATTENTION + "masked_bias", "is the value of masked scores"),
    Ignored(_ATTENTION + "rotary_emb.inv_freq", "follows from rotary_emb_base"),
)
_HARMLESS = ("hidden_dropout", "classifier_dropout")


def _names(config: DecoderConfig) -> TensorNames:
    layer = module_names(_LINEAR, _NORMS)
    layer |= fused_names(QKV, "attention.query_key_value", 3, groups=config.heads)
    return TensorNames(layer, _ENDS, _PREFIX, head="embed_out")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values, _FIELDS)
    sizes = read_gpt(fields, _EPS, activation="gelu", tied=False, learned=False, d_ff_ratio=0)
    norms: Norms = "before"
    if fields.flag("use_parallel_residual", default=True):
        norms = "parallel"
    return fields.build(
        gpt_neox,
        **sizes,
        rotary=read_rotary(fields, _QUARTER),
        norms=norms,
        attention_bias=fields.flag("attention_bias", default=True),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec = config.pattern.group[0]
    rotary = spec.attention.rotary or _QUARTER
    sizes = write_sizes(config, _EPS, rotary)
    return {
        "model_type": "gpt_neox",
        **renamed(sizes, _FIELDS),
        "rotary_pct": rotary.fraction,
        "hidden_act": write_activation(config),
        "use_parallel_residual": spec.norms == "parallel",
        "attention_bias": spec.attention.qkv_bias,
    }


FAMILY = decoder_family(
    "GPTNeoXForCausalLM", _read, _write, names=_names, ignored=_IGNORED, harmless=_HARMLESS
)
