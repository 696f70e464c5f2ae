"""A.X K1: a DeepSeek-V3 with a norm after the experts.

Source: huggingface.co/skt/A.X-K1.

```python
config = dataclasses.replace(PRESETS["test-axk1"], d_model=256)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spmd.hf.family import Ignored
from spmd.hf.fields import Fields
from spmd.models.decoder import (
    DecoderConfig,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
)
from spmd.models.published.common_fields import read_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    DENSE,
    SPARSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    mlp_kinds,
    read_count,
    read_mlp_types,
    read_shared_experts,
    with_dense_mlps,
    write_shared_experts,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.latent_attention import (
    latent_names,
    latent_sizes,
    read_latent_attention,
    write_latent_sizes,
)
from spmd.models.published.layer_types import table_of

_MIXER = LatentAttentionSpec(q_rank=1536)
_TINY = LatentAttentionSpec(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)


def axk1(*shape: Any, mixer: LatentAttentionSpec, dense_d_ff: int, **fields: Any) -> DecoderConfig:
    """Return the config of an A.X K1 from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        mixer: Attention.
        dense_d_ff: Hidden width of the MLP of the first layer.
        **fields: Other fields.
    """
    experts = ExpertsSpec(shared_d_ff=shape[5])
    kinds = dense_first(1, shape[2])
    table = _table(mixer, experts, MLPSpec(dense_d_ff), kinds)
    return DecoderConfig(*shape, **{"norm_eps": 1e-6} | table | fields)


def _table(
    mixer: LatentAttentionSpec, experts: ExpertsSpec, mlp: MLPSpec, kinds: Sequence[str]
) -> dict[str, Any]:
    """Return the layer table: only experts have a norm after them."""
    norms = {DENSE: LayerSpec(mixer), SPARSE: LayerSpec(mixer, experts, norms="mlp_both")}
    layers = [norms[kind] for kind in kinds]
    return table_of(with_dense_mlps(layers, mlp, kinds))


PRESETS = {
    "test-axk1": axk1(
        *(64, 32, 3, 4, 4, 16),
        mixer=_TINY,
        dense_d_ff=48,
        router=dataclasses.replace(CHOICE_BIASES, experts=8, top_k=2, groups=4, top_groups=2),
    ),
}
"""A small one for tests."""

_NAMES = (
    layer_names(
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
    | latent_names()
    | expert_names()
)
_ROUTER = RouterFields(
    "n_routed_experts",
    experts=192,
    top_k=8,
    normalise=True,
    groups=(8, 4),
    scale=2.5,
    balance_name="",
    base=CHOICE_BIASES,
)
_UNUSED_NORM = Ignored(
    "model.layers.0.post_mlp_layernorm.weight", "is of a layer without experts, which lacks it"
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields)
    if fields.is_null("q_lora_rank"):
        fields.refuse("q_lora_rank", "is null, and this model has latents of queries")
    mixer = read_latent_attention(fields, sizes, _MIXER, may_interleave=True)
    experts = read_shared_experts(fields, d_ff=2048)
    kinds = _read_kinds(fields, sizes["layers"])
    table = _table(mixer, experts, MLPSpec(), kinds)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    sizes = latent_sizes(sizes, mixer)
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table)


def _read_kinds(fields: Fields, layers: int) -> list[str]:
    """Parse the kind of each layer's MLP, by `mlp_layer_types` or the fields of earlier files."""
    dense = read_count(fields, "first_k_dense_replace", 1)
    interval = fields.integer("moe_layer_freq", 1)
    kinds = dense_first(dense, layers)
    for number in range(dense, len(kinds)):
        if number % interval:
            kinds[number] = DENSE
    return read_mlp_types(fields, layers, kinds)


def _write(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = experts_of(config)
    fields = write_latent_sizes(config, may_interleave=True)
    fields |= write_shared_experts(config)
    fields |= _ROUTER.write(router)
    fields["mlp_layer_types"] = mlp_kinds(config)
    fields["model_type"] = "axk1"
    return fields


def _with_stored_biases(config: DecoderConfig, tensors: Collection[str]) -> DecoderConfig:
    """Return the config without biases of routers if a checkpoint lacks them, as published ones do."""
    router = config.router
    if router is None or any(tensor.endswith(_BIAS) for tensor in tensors):
        return config
    router = dataclasses.replace(router, choice_bias=False)
    return dataclasses.replace(config, router=router)


def _fits(config: Any) -> bool:
    """Return whether a config belongs to the family, with biases of routers or without."""
    router = getattr(config, "router", None)
    if router is None:
        return False
    router = dataclasses.replace(router, choice_bias=True)
    biased = dataclasses.replace(config, router=router)
    return _FAMILY.fits(biased)


_BIAS = "e_score_correction_bias"
_FAMILY = decoder_family(
    "AXK1ForCausalLM",
    _read,
    _write,
    _NAMES,
    ignored=(_UNUSED_NORM,),
    for_tensors=_with_stored_biases,
)
FAMILY = dataclasses.replace(_FAMILY, fits=_fits)
