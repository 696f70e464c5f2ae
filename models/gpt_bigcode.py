"""StarCoder 1 and SantaCoder (GPT BigCode): a GPT-2 with one key/value head (arXiv:2305.06161).

A checkpoint has queries, keys and values in one tensor, with `multi_query` false those of each head
in turn.

```python
config = dataclasses.replace(PRESETS["starcoder-15.5b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig
from spmd.models.gpt2 import EPS, FIELDS, HARMLESS, LINEAR, NORMS
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.gpt import gpt_decoder, read_gpt, write_gpt
from spmd.models.published.tensor_names import QKV, Names, fused_names, module_names

gpt_bigcode = functools.partial(gpt_decoder, activation="gelu_tanh", tied=True)
"""Config of a GPT BigCode from fields of `gpt_decoder`."""

PRESETS = {
    "test-gpt-bigcode": gpt_bigcode(64, 32, 2, 4, 1, 128, positions=48),
    "starcoderbase-1b": gpt_bigcode(49_152, 2048, 24, 16, 1, 8192, positions=8192),
    "starcoder-15.5b": gpt_bigcode(49_152, 6144, 40, 48, 1, 24_576, positions=8192),
}
"""Published shapes by name, and a small one for tests."""

_PREFIX = "transformer."
_ENDS: Names = {
    "embed/embedding": ("wte.weight", AS_IS),
    "positions": ("wpe.weight", AS_IS),
    **module_names({}, {"norm": "ln_f"}),
}
_HARMLESS = (
    *HARMLESS,
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    *("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_sequence_length"),
    *("max_batch_size", "pad_key_length", "num_key_value_heads"),
)
"""Fields of training and inference, and one that follows from `multi_query`."""


def _names(config: DecoderConfig) -> TensorNames:
    mixer = config.pattern.group[0].attention
    parts = (mixer.heads // mixer.kv_heads, 1, 1)
    layer = module_names(LINEAR, NORMS)
    layer |= fused_names(QKV, "attn.c_attn", parts, groups=mixer.kv_heads)
    return TensorNames(layer, _ENDS, _PREFIX, "h.{layer}.")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values, FIELDS)
    fields.only("add_cross_attention", False)
    fields.only("scale_attn_weights", True)
    sizes = read_gpt(fields, EPS, activation="gelu_pytorch_tanh")
    if fields.flag("multi_query", default=True):
        sizes["kv_heads"] = 1
    return fields.build(gpt_bigcode, **sizes)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt_bigcode",
        **write_gpt(config, EPS, FIELDS),
        "multi_query": config.kv_heads == 1,
    }


FAMILY = decoder_family("GPTBigCodeForCausalLM", _read, _write, names=_names, harmless=_HARMLESS)
