"""Name map of GPT-2: kernels are `[in, out]` as ours; queries, keys and values are concatenated."""

from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Family, Ignored, TensorMapping, part
from spmd.hf.fields import Fields
from spmd.models.gpt2 import GPT2Config
from spmd.partition_rules.gpt2 import GPT2, GPT2_WHOLE_VOCABULARY

_PREFIX = "transformer."
_LAYER = _PREFIX + "h.{layer}."
_QKV = tuple(
    TensorMapping(
        f"layers/attention/{x}_proj/{ours}", f"{_LAYER}attn.c_attn.{theirs}", part(number, 3)
    )
    for number, x in enumerate("qkv")
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
)
_DENSE = {
    "attention/o_proj": "attn.c_proj",
    "mlp/up_proj": "mlp.c_fc",
    "mlp/down_proj": "mlp.c_proj",
}
_NORMS = {
    "layers/attention_norm": f"{_LAYER}ln_1",
    "layers/mlp_norm": f"{_LAYER}ln_2",
    "norm": f"{_PREFIX}ln_f",
}
_NAMES = (
    TensorMapping("embed/embedding", _PREFIX + "wte.weight"),
    TensorMapping("positions", _PREFIX + "wpe.weight"),
    *_QKV,
    *(
        TensorMapping(f"layers/{ours}/{a}", f"{_LAYER}{theirs}.{b}")
        for ours, theirs in _DENSE.items()
        for a, b in (("kernel", "weight"), ("bias", "bias"))
    ),
    *(
        TensorMapping(f"{ours}/{a}", f"{theirs}.{b}")
        for ours, theirs in _NORMS.items()
        for a, b in (("scale", "weight"), ("bias", "bias"))
    ),
)
_IGNORED = (
    Ignored("lm_head.weight", "is a copy of the embedding", _PREFIX + "wte.weight"),
    Ignored(_LAYER + "attn.bias", "is the causal mask"),
    Ignored(_LAYER + "attn.masked_bias", "is the value of masked scores"),
)
_OF_TRAINING = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn")
_OF_OLD_FILES = ("n_ctx", "n_special", "predict_special_tokens", "output_past")
_OF_OTHER_HEADS = tuple(
    f"summary_{name}"
    for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
)


def _read(values: Mapping[str, Any]) -> GPT2Config:
    fields = Fields(values)
    for name in (*_OF_TRAINING, *_OF_OLD_FILES, *_OF_OTHER_HEADS):
        fields.value(name)
    fields.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    fields.only("tie_word_embeddings", True)
    fields.only("is_causal", True)
    width = fields.integer("n_embd", 768)
    return fields.build(
        GPT2Config,
        vocab=fields.integer("vocab_size", 50_257),
        d_model=width,
        layers=fields.integer("n_layer", 12),
        heads=fields.integer("n_head", 12),
        d_ff=fields.integer("n_inner", 4 * width),
        context=fields.integer("n_positions", 1024),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, least=0),
    )


def _write(config: GPT2Config) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_embd": config.d_model,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.d_ff,
        "n_positions": config.context,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


FAMILY = Family(
    architectures=("GPT2LMHeadModel",),
    read_config=_read,
    write_config=_write,
    fits=lambda config: isinstance(config, GPT2Config),
    rules=lambda config: GPT2_WHOLE_VOCABULARY if config.vocab % 2 else GPT2,
    names=lambda config: _NAMES,
    ignored=lambda config: _IGNORED,
    prefix=_PREFIX,  # the original checkpoints lack it
    harmless=(*_OF_TRAINING, *_OF_OTHER_HEADS),
)
