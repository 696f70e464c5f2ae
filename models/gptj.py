"""GPT-J and CodeGen: attention and MLP with the same input, interleaved rotary positions.

Attention has no biases; MLPs and logits have them. Source: Wang & Komatsuzaki, GPT-J-6B (2021);
CodeGen, arXiv:2203.13474. A checkpoint of CodeGen has queries, values and keys in one tensor, in
four groups, one for each device that it was trained with.

```python
config = dataclasses.replace(PRESETS["gptj-6b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Ignored
from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig, RopeScaling, Rotary
from spmd.models.decoder.rotary import rotary_fraction, rotated_width
from spmd.models.gpt2 import EPS, FIELDS, HARMLESS
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.gpt import gpt_decoder, read_gpt, write_gpt
from spmd.models.published.tensor_names import Names, fused_names, module_names


def _rotary(fraction: float) -> Rotary:
    return Rotary(10_000.0, RopeScaling(), fraction, interleaved=True)


gptj = functools.partial(
    gpt_decoder,
    rotary=_rotary(0.25),
    norms="parallel_shared",
    attention_bias=False,
    activation="gelu_tanh",
    logits_bias=True,
)
"""Config of a GPT-J from fields of `gpt_decoder`."""

PRESETS = {
    "test-gptj": gptj(64, 32, 2, 4, 4, 128),
    "gptj-6b": gptj(50_400, 4096, 28, 16, 16, 16_384),
    "codegen-350m": gptj(51_200, 1024, 20, 16, 16, 4096, rotary=_rotary(0.5)),
}
"""Published shapes by name, and a small one for tests."""

_PREFIX = "transformer."
_LINEAR = {
    "attention/q_proj": "attn.q_proj",
    "attention/k_proj": "attn.k_proj",
    "attention/v_proj": "attn.v_proj",
    "attention/o_proj": "attn.out_proj",
    "mlp/up_proj": "mlp.fc_in",
    "mlp/down_proj": "mlp.fc_out",
}
_ENDS: Names = {
    "embed/embedding": ("wte.weight", AS_IS),
    **module_names({}, {"norm": "ln_f"}),
}
_LAYER = module_names(_LINEAR, {"attention_norm": "ln_1"})
_QVK = ("attention/q_proj", "attention/v_proj", "attention/k_proj")
_CODEGEN_LAYER = _LAYER | fused_names(_QVK, "attn.qkv_proj", 3, groups=4)
_IGNORED = (
    Ignored(_PREFIX + "h.{layer}.attn.bias", "is the causal mask"),
    Ignored(_PREFIX + "h.{layer}.attn.causal_mask", "is the causal mask"),
    Ignored(_PREFIX + "h.{layer}.attn.masked_bias", "is the value of masked scores"),
)
_HARMLESS = (*HARMLESS, "n_positions", "rotary", "gradient_checkpointing", "tokenizer_class")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values, FIELDS)
    fields.only("scale_attn_weights", True)
    sizes = read_gpt(fields, EPS, activation="gelu_new", tied=False, learned=False)
    head_dim = max(1, sizes["d_model"] // sizes["heads"])
    rotated = fields.integer("rotary_dim", 64)
    if rotated > head_dim or fields.is_null("rotary_dim"):
        what = f"is {fields.value('rotary_dim')}, not a number of dimensions of a head"
        fields.refuse("rotary_dim", what)
        rotated = head_dim
    return fields.build(gptj, **sizes, rotary=_rotary(rotary_fraction(rotated, head_dim)))


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    rotary = mixer.rotary or Rotary()
    rotated = rotated_width(mixer.head_dim, rotary.fraction)
    return {"model_type": "gptj", **write_gpt(config, EPS, FIELDS), "rotary_dim": rotated}


def _write_codegen(config: DecoderConfig) -> dict[str, Any]:
    return {**_write(config), "model_type": "codegen"}


GPTJ_FAMILY = decoder_family(
    "GPTJForCausalLM",
    _read,
    _write,
    names=TensorNames(_LAYER, _ENDS, _PREFIX, "h.{layer}."),
    ignored=_IGNORED,
    harmless=_HARMLESS,
)
CODEGEN_FAMILY = decoder_family(
    "CodeGenForCausalLM",
    _read,
    _write_codegen,
    names=TensorNames(_CODEGEN_LAYER, _ENDS, _PREFIX, "h.{layer}."),
    ignored=_IGNORED,
    harmless=_HARMLESS,
    secondary=True,
)
