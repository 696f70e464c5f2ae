"""Name map of GPT-2: kernels are `[in, out]` as ours; queries, keys and values are concatenated."""

from collections.abc import Iterator, Mapping
from typing import Any

from spmd.hf.family import Family, Ignored, TensorMapping
from spmd.hf.fields import Fields
from spmd.hf.layout import part
from spmd.models.gpt2 import GPT2Config
from spmd.partition_rules.gpt2 import GPT2, GPT2_WHOLE_VOCABULARY
from spmd.sharding.rules import Rules

_PREFIX = "transformer."
_LAYER = _PREFIX + "h.{layer}."
_DENSE = {
    "layers/attention/o_proj": _LAYER + "attn.c_proj",
    "layers/mlp/up_proj": _LAYER + "mlp.c_fc",
    "layers/mlp/down_proj": _LAYER + "mlp.c_proj",
}
_NORMS = {
    "layers/attention_norm": _LAYER + "ln_1",
    "layers/mlp_norm": _LAYER + "ln_2",
    "norm": _PREFIX + "ln_f",
}


def _mappings() -> Iterator[TensorMapping]:
    yield TensorMapping("embed/embedding", _PREFIX + "wte.weight")
    yield TensorMapping("positions", _PREFIX + "wpe.weight")
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        ours, theirs, layout = f"layers/attention/{name}", _LAYER + "attn.c_attn", part(index, 3)
        yield TensorMapping(f"{ours}/kernel", f"{theirs}.weight", layout)
        yield TensorMapping(f"{ours}/bias", f"{theirs}.bias", layout)
    for ours, theirs in _DENSE.items():
        yield TensorMapping(f"{ours}/kernel", f"{theirs}.weight")
        yield TensorMapping(f"{ours}/bias", f"{theirs}.bias")
    for ours, theirs in _NORMS.items():
        yield TensorMapping(f"{ours}/scale", f"{theirs}.weight")
        yield TensorMapping(f"{ours}/bias", f"{theirs}.bias")


_NAMES = tuple(_mappings())
_IGNORED = (
    Ignored("lm_head.weight", "is a copy of the embedding", _PREFIX + "wte.weight"),
    Ignored(_LAYER + "attn.bias", "is the causal mask"),
    Ignored(_LAYER + "attn.masked_bias", "is the value of masked scores"),
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


def _rules(config: GPT2Config) -> Rules:
    if config.vocab % 2:
        return GPT2_WHOLE_VOCABULARY
    return GPT2


FAMILY = Family(
    architectures=("GPT2LMHeadModel",),
    read_config=_read,
    write_config=_write,
    fits=lambda config: isinstance(config, GPT2Config),
    rules=_rules,
    names=lambda config: _NAMES,
    ignored=lambda config: _IGNORED,
    # the original checkpoints lack it
    prefix=_PREFIX,
    harmless=(*_OF_TRAINING, *_OF_OTHER_HEADS),
)
