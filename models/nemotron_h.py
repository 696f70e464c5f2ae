"""Nemotron-H and Nemotron 3: layers of a state-space mixer, attention, an MLP or experts alone.

Sources: arXiv:2504.03624, and arXiv:2512.20848 for experts. MLPs and experts have a squared ReLU and
no gate; attention has no positions.

```python
config = dataclasses.replace(PRESETS["nemotron-3-nano-30b-a3b"], layers=7, last=())
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    NoMixerSpec,
    StateSpaceSpec,
)
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import CHOICE_BIASES, RouterFields, expert_names
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.layer_types import FULL, LINEAR, layer_table, read_layer_types
from spmd.models.published.state_space import (
    EARLIER_KINDS,
    StateSpaceFields,
    state_space_names,
    state_space_of,
)
from spmd.models.published.tensor_names import Names, module_names

MLP = "mlp"
"""Kind of a layer with an MLP alone, as in `layers_block_type`."""
MOE = "moe"
"""Kind of a layer with experts alone."""
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
"""Letters of `hybrid_override_pattern` → kinds of layers."""

_ATTENTION = AttentionSpec(rotary=None)
_RELU2 = MLPSpec(activation="relu2", gated=False)
_EXPERTS = ExpertsSpec(activation="relu2", gated=False)


def nemotron_h(
    kinds: Sequence[str],
    mixer: StateSpaceSpec,
    *,
    mlp_bias: bool = False,
    expert_d_ff: int = 0,
    shared_d_ff: int = 0,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Nemotron-H from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        mixer: The mixer of layers of kind `linear_attention`.
        mlp_bias: Add biases in MLPs.
        expert_d_ff: Hidden width of an expert.
        shared_d_ff: Hidden width of the shared expert.
        **fields: Other fields; d_ff is the width of an MLP.
    """
    experts = dataclasses.replace(_EXPERTS, d_ff=expert_d_ff, shared_d_ff=shared_d_ff)
    mlp = dataclasses.replace(_RELU2, bias=mlp_bias)
    specs = {
        LINEAR: LayerSpec(mixer, mlp=None),
        FULL: LayerSpec(_ATTENTION, mlp=None),
        MLP: LayerSpec(NoMixerSpec(), mlp),
        MOE: LayerSpec(NoMixerSpec(), experts),
    }
    return DecoderConfig(layers=len(kinds), **layer_table(kinds, specs), **fields)


_TINY = StateSpaceSpec(heads=8, head_dim=8, groups=2, state_dim=8, dt_min=0.001)
_SMALL: dict[str, Any] = {"vocab": 64, "d_model": 32, "head_dim": 16, "d_ff": 48}
_NANO = "MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME"

PRESETS = {
    "test-nemotron-h": nemotron_h([LETTERS[letter] for letter in "M-*M-*"], _TINY, **_SMALL),
    "test-nemotron-3": nemotron_h(
        [LETTERS[letter] for letter in "ME*EME*E"],
        _TINY,
        expert_d_ff=16,
        shared_d_ff=24,
        router=dataclasses.replace(CHOICE_BIASES, experts=4, top_k=2),
        **_SMALL,
    ),
    "nemotron-3-nano-30b-a3b": nemotron_h(
        [LETTERS[letter] for letter in _NANO],
        StateSpaceSpec(64, 64, groups=8, dt_min=0.001),
        expert_d_ff=1856,
        shared_d_ff=3712,
        vocab=131_072,
        d_model=2688,
        heads=32,
        kv_heads=2,
        head_dim=128,
        d_ff=1856,
        router=dataclasses.replace(CHOICE_BIASES, experts=128, top_k=6, scale=2.5),
    ),
}
"""Published shape by name, and small ones for tests."""

_MIXER = StateSpaceFields(
    StateSpaceSpec(128, 64, groups=8),
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_dim="ssm_state_size",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    expand="",
    limits=False,
)
_ROUTER = RouterFields(
    "n_routed_experts",
    experts=8,
    top_k=2,
    normalise=True,
    groups=(1, 1),
    scale=1.0,
    balance_name="",
    base=CHOICE_BIASES,
)
_KINDS = "layers_block_type"
_PATTERN = "hybrid_override_pattern"
_ACTIVATION = ("mlp_hidden_act", "relu2")
_HARMLESS = (
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "n_shared_experts",
    "num_logits_to_keep",
    "partial_rotary_factor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rope_theta",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_rank",
    "use_mamba_kernels",
)
"""Fields of initial values, of kernels and of other layers, and fields that `transformers` ignores.

Attention has no rotary positions.
"""
_HEAD_DIM = 128
_DEFAULT_KINDS = [LINEAR, MOE, FULL, MLP]


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(_with_kinds(values))
    fields.value(_PATTERN)  # gives the kinds, in `_with_kinds`
    for name in ("attention_bias", "tie_word_embeddings"):
        fields.only(name, False)
    fields.only("mamba_hidden_act", "silu")
    fields.only("moe_latent_size", None)
    fields.only("num_nextn_predict_layers", 0)
    fields.only("sliding_window", None)
    options: dict[str, Any] = {
        "eps": 1e-5,
        "eps_field": "layer_norm_epsilon",
        "theta": 0,
        "head_dim": _HEAD_DIM,
        "kv_heads": 8,
        "d_ff": 21_504,
        "activation": _ACTIVATION,
    }
    sizes = read_sizes(fields, **options)
    _check_copies(fields, sizes["norm_eps"])
    kinds = _read_kinds(fields, sizes.pop("layers"))
    mixer = _MIXER.read(fields, sizes["d_model"])
    dt_min = fields.number("time_step_min", 0.001, least=0)
    return fields.build(
        nemotron_h,
        kinds=kinds,
        mixer=dataclasses.replace(mixer, dt_min=dt_min),
        **_read_mlps(fields, kinds),
        **sizes,
    )


def _check_copies(fields: Fields, norm_eps: float) -> None:
    """Require that fields of published files without effect in `transformers` repeat others."""
    fields.only("norm_eps", norm_eps)
    fields.only("rms_norm_eps", norm_eps)
    fields.only("attention_head_dim", fields.value("head_dim", _HEAD_DIM))
    fields.only("hidden_act", _ACTIVATION[-1])


def _with_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a list of kinds and their number, from the pattern if need be."""
    kinds = values.get(_KINDS)
    pattern = values.get(_PATTERN)
    if kinds is None:
        kinds = _DEFAULT_KINDS
        if isinstance(pattern, str):
            kinds = [LETTERS.get(letter, letter) for letter in pattern]
    count = 1
    if isinstance(kinds, list):
        count = len(kinds)
    return {"num_hidden_layers": count, **values, _KINDS: kinds}


def _read_kinds(fields: Fields, layers: int) -> list[str]:
    """Parse the kind of each layer."""
    known = (*LETTERS.values(), *EARLIER_KINDS)
    default = [LINEAR] * layers
    kinds = read_layer_types(fields, layers, default, known, _KINDS)
    kinds = [EARLIER_KINDS.get(kind, kind) for kind in kinds]
    if LINEAR not in kinds:
        fields.refuse(_KINDS, f"has no layer of kind {LINEAR}")
    return kinds


def _read_mlps(fields: Fields, kinds: Sequence[str]) -> dict[str, Any]:
    """Parse the fields of MLPs and experts, as arguments of `nemotron_h`."""
    bias = fields.flag("mlp_bias", default=False)
    router = _ROUTER.read(fields)
    widths = {
        "expert_d_ff": fields.integer("moe_intermediate_size", 7688),
        "shared_d_ff": fields.integer("moe_shared_expert_intermediate_size", 7688),
    }
    if MOE not in kinds:
        return {"mlp_bias": bias}
    if bias:
        fields.refuse("mlp_bias", "is true, and shared experts have no biases here", "false")
    return {"router": router, **widths}


def _write(config: DecoderConfig) -> dict[str, Any]:
    sizes = write_sizes(config, "layer_norm_epsilon")
    for name in ("hidden_act", "rope_theta", "rope_scaling", "rope_parameters"):
        sizes.pop(name, None)
    written = {
        "model_type": "nemotron_h",
        **sizes,
        **_MIXER.write(config),
        "time_step_min": state_space_of(config).dt_min,
        _KINDS: [_kind_of(spec) for spec in config.pattern.kinds],
        "mlp_hidden_act": "relu2",
    }
    for spec in config.pattern.distinct:
        if isinstance(spec.mlp, MLPSpec):
            written["intermediate_size"] = spec.mlp.d_ff
            written["mlp_bias"] = spec.mlp.bias
        if isinstance(spec.mlp, ExpertsSpec) and config.router is not None:
            written["moe_intermediate_size"] = spec.mlp.d_ff
            written["moe_shared_expert_intermediate_size"] = spec.mlp.shared_d_ff
            written |= _ROUTER.write(config.router)
    return written


def _kind_of(spec: LayerSpec) -> str:
    """Return the kind of a layer."""
    if isinstance(spec.mixer, StateSpaceSpec):
        return LINEAR
    if spec.has_mixer:
        return FULL
    if spec.has_experts:
        return MOE
    return MLP


_ENDS: Names = {
    "embed/embedding": ("embeddings.weight", AS_IS),
    "norm/scale": ("norm_f.weight", AS_IS),
}


def _names(config: DecoderConfig) -> TensorNames:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    linear = {f"attention/{name}": f"mixer.{name}" for name in attention}
    linear |= {f"mlp/{name}": f"mixer.{name}" for name in ("up_proj", "down_proj")}
    layer = module_names(linear, {"attention_norm": "norm", "mlp_norm": "norm"})
    layer |= expert_names("mixer.") | state_space_names(config, "mixer")
    return TensorNames(layer, _ENDS, prefix="backbone.")


FAMILY = decoder_family("NemotronHForCausalLM", _read, _write, names=_names, harmless=_HARMLESS)
