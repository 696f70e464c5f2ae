"""GPT-2: learned positions, LayerNorm, biases and a tied head (Radford et al., 2019).

```python
config = dataclasses.replace(PRESETS["gpt2"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Ignored
from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.gpt import gpt_decoder, read_gpt, write_gpt
from spmd.models.published.tensor_names import QKV, Names, fused_names, module_names

EPS = "layer_norm_epsilon"
"""Field of the norms."""


def gpt2(*shape: Any, heads: int = 4, context: int = 1024, **fields: Any) -> DecoderConfig:
    """Return the config of a GPT-2 with `context` positions, from fields of `gpt_decoder`.

    `shape` are vocab, d_model and layers.
    """
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": heads, "d_ff": 512, "positions": context}
    return gpt_decoder(*shape, **sizes | {"tied": True, "activation": "gelu_tanh"} | fields)


PRESETS = {
    "test": gpt2(64, 32, 2, heads=4, d_ff=64, context=48),
    "gpt2": gpt2(50_257, 768, 12, heads=12, d_ff=3072),
    "gpt2-medium": gpt2(50_257, 1024, 24, heads=16, d_ff=4096),
    "gpt2-large": gpt2(50_257, 1280, 36, heads=20, d_ff=5120),
    "gpt2-xl": gpt2(50_257, 1600, 48, heads=25, d_ff=6400),
}
"""Published shapes by name, and a small one for tests.

The published vocabulary, 50,257 words, divides over no `tensor` above 1; see
`spmd.partition_rules.gpt2`.
"""

_PREFIX = "transformer."
LINEAR = {
    "attention/o_proj": "attn.c_proj",
    "mlp/up_proj": "mlp.c_fc",
    "mlp/down_proj": "mlp.c_proj",
}
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
"""Modules of a layer."""

# kernels are [in, out], as here
_LAYER_NAMES = module_names(LINEAR, NORMS, AS_IS)
_LAYER_NAMES |= fused_names(QKV, "attn.c_attn", 3, layout=AS_IS)

_ENDS: Names = {
    "embed/embedding": ("wte.weight", AS_IS),
    "positions": ("wpe.weight", AS_IS),
    "norm/scale": ("ln_f.weight", AS_IS),
    "norm/bias": ("ln_f.bias", AS_IS),
}
_IGNORED = (
    Ignored(_PREFIX + "h.{layer}.attn.bias", "is the causal mask"),
    Ignored(_PREFIX + "h.{layer}.attn.masked_bias", "is the value of masked scores"),
)
_OF_TRAINING = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn")
_OF_OLD_FILES = ("n_ctx", "n_special", "predict_special_tokens", "output_past")
_OF_OTHER_HEADS = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)
HARMLESS = (*_OF_TRAINING, *_OF_OLD_FILES, *_OF_OTHER_HEADS)
"""Fields without effect on a trained GPT-2 or GPT-J."""

FIELDS = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Common name of a field → its name in config.json of GPT-2 and GPT-J."""
_DEFAULT_SIZES = {
    **{"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "n_positions": 1024,
}


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(_DEFAULT_SIZES | dict(values), FIELDS)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    fields.only("scale_attn_weights", True)
    return fields.build(gpt2, **read_gpt(fields, EPS, activation="gelu_new"))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"model_type": "gpt2", **write_gpt(config, EPS, FIELDS)}


FAMILY = decoder_family(
    "GPT2LMHeadModel",
    _read,
    _write,
    names=TensorNames(_LAYER_NAMES, _ENDS, _PREFIX, "h.{layer}."),
    ignored=_IGNORED,
    harmless=HARMLESS,
    optional_prefix=_PREFIX,
)
