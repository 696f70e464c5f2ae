"""GPT-Neo: a GPT-2 with a window of 256 tokens in every other layer (Black et al., 2021).

Scores are not divided by the root of a head's width, and queries, keys and values have no biases.
Source: doi.org/10.5281/zenodo.5297715, and `attention_types` of config.json.

```python
config = dataclasses.replace(PRESETS["gpt-neo-1.3b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import shorten
from spmd.hf.family import Ignored
from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec, NormSpec
from spmd.models.gpt2 import EPS
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.gpt import read_gpt, write_gpt
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_table,
    every,
    layer_types,
)
from spmd.models.published.tensor_names import Names, module_names

_WORDS = {"global": FULL, "local": SLIDING}
_WINDOW = 256


def gpt_neo(
    kinds: Sequence[str],
    *,
    window: int = _WINDOW,
    activation: str = "gelu_tanh",
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a GPT-Neo from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer.
        window: Sliding window of layers of kind `sliding_attention`.
        activation: Activation of MLPs.
        **fields: Other fields.
    """
    layer = LayerSpec(
        AttentionSpec(rotary=None, out_bias=True, scale=1.0),
        MLPSpec(activation=activation, gated=False, bias=True),
    )
    table = attention_table(layer, window, kinds)
    defaults: dict[str, Any] = {"tied": True, "norm": NormSpec("layer", bias=True)}
    return DecoderConfig(**defaults | {"layers": len(kinds), "positions": 2048} | table | fields)


def _sized(width: int, layers: int, heads: int) -> DecoderConfig:
    """Return the published shape of a width."""
    sizes: dict[str, Any] = {"d_model": width, "heads": heads, "kv_heads": heads, "d_ff": 4 * width}
    return gpt_neo(every(2, layers, FULL, SLIDING), vocab=50_257, **sizes)


_SMALL: dict[str, Any] = {"vocab": 64, "d_model": 32, "kv_heads": 4, "d_ff": 64, "positions": 48}
PRESETS = {
    "test-gpt-neo": gpt_neo(every(2, 4, FULL, SLIDING), window=5, **_SMALL),
    "gpt-neo-125m": _sized(768, 12, 12),
    "gpt-neo-1.3b": _sized(2048, 24, 16),
    "gpt-neo-2.7b": _sized(2560, 32, 20),
}
"""Published shapes by name, and a small one for tests."""

_PREFIX = "transformer."
_LINEAR = {
    "attention/q_proj": "attn.attention.q_proj",
    "attention/k_proj": "attn.attention.k_proj",
    "attention/v_proj": "attn.attention.v_proj",
    "attention/o_proj": "attn.attention.out_proj",
    "mlp/up_proj": "mlp.c_fc",
    "mlp/down_proj": "mlp.c_proj",
}
_ENDS: Names = {
    "embed/embedding": ("wte.weight", AS_IS),
    "positions": ("wpe.weight", AS_IS),
    **module_names({}, {"norm": "ln_f"}),
}
_LAYER = module_names(_LINEAR, {"attention_norm": "ln_1", "mlp_norm": "ln_2"})
_FIELDS = {
    "hidden_act": "activation_function",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "sliding_window": "window_size",
}
_HARMLESS = ("resid_dropout", "embed_dropout", "classifier_dropout", "attention_layers")
"""Fields of training, and one that follows from `attention_types`."""


_IGNORED = (
    Ignored(_PREFIX + "h.{layer}.attn.attention.bias", "is the causal mask"),
    Ignored(_PREFIX + "h.{layer}.attn.attention.masked_bias", "is the value of masked scores"),
)


def _read_kinds(fields: Fields, layers: int) -> list[str]:
    """Parse `attention_types`: lists of words, each with a number of repeats."""
    kinds: list[str] = []
    found = fields.value("attention_types", [[["global", "local"], 12]])
    try:
        for words, repeats in found:
            kinds += [_WORDS[word] for word in words] * repeats
    except (TypeError, ValueError, KeyError):
        kinds = []
    if len(kinds) == layers:
        return kinds
    what = f"is {shorten(found)}, and gives no kind, global or local, for each of {layers} layers"
    fields.refuse("attention_types", what)
    return [FULL] * layers


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values, _FIELDS)
    sizes = read_gpt(fields, EPS, activation="gelu_new")
    kinds = _read_kinds(fields, sizes["layers"])
    window = fields.integer("sliding_window", _WINDOW)
    return fields.build(gpt_neo, **sizes, kinds=kinds, window=window)


def _write(config: DecoderConfig) -> dict[str, Any]:
    theirs = {kind: word for word, kind in _WORDS.items()}
    words = [theirs[kind] for kind in layer_types(config)]
    return {
        "model_type": "gpt_neo",
        **write_gpt(config, EPS, _FIELDS),
        "attention_types": [[words, 1]],
        "window_size": max(spec.attention.window or 0 for spec in config.pattern.distinct)
        or _WINDOW,
    }


FAMILY = decoder_family(
    "GPTNeoForCausalLM",
    _read,
    _write,
    names=TensorNames(_LAYER, _ENDS, _PREFIX, "h.{layer}."),
    ignored=_IGNORED,
    harmless=_HARMLESS,
)
