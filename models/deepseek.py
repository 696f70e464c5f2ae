"""DeepSeek-V2 and V3: latent attention, and many small experts beside shared ones.

Sources: arXiv:2405.04434 for V2, arXiv:2412.19437 for V3; Kimi K2 (arXiv:2507.20534) is a V3 of
other sizes. V3 chooses experts by biases, which balance their load in place of a loss, and may
predict more tokens than the next one (`DecoderConfig.predict_ahead`).

```python
config = dataclasses.replace(PRESETS["deepseek-v3"], layers=6, predict_ahead=1)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    DecoderConfig,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    YarnScaling,
)
from spmd.models.published.common_fields import read_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    RouterFields,
    expert_names,
    experts_of,
    read_count,
    read_dense_first,
    write_shared_experts,
)
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.latent_attention import (
    latent_names,
    read_latent_attention,
    write_latent_sizes,
)
from spmd.models.published.multi_token import AHEAD, AHEAD_NAMES, with_stored_ahead

V2_ROUTER = RouterConfig(
    experts=160,
    top_k=6,
    normalise=False,
    groups=8,
    top_groups=3,
    group_score="max",
    scale=16.0,
    balance=0.003,
    balance_over="example",
)
"""DeepSeek-V2, section 2.2: experts of the three groups with the best expert, a loss for each
sequence."""
V3_ROUTER = RouterConfig(
    experts=256,
    top_k=8,
    score="sigmoid",
    normalise_eps=1e-20,
    groups=8,
    top_groups=4,
    scale=2.5,
    choice_bias=True,
    bias_rate=1e-3,
    balance=1e-4,
    balance_over="example",
)
"""DeepSeek-V3, sections 2.1.2 and 4.2: balanced by biases, with a small loss for each sequence."""

_MIXER = LatentAttentionSpec(q_rank=1536)


def deepseek(
    *,
    heads: int,
    d_ff: int,
    dense_d_ff: int,
    dense_layers: int = 1,
    shared: int = 1,
    mixer: LatentAttentionSpec = _MIXER,
    norm_eps: float = 1e-6,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a decoder, from fields of `DecoderConfig`.

    Args:
        heads: Heads of attention.
        d_ff: Hidden width of an expert.
        dense_d_ff: Hidden width of an MLP in place of experts.
        dense_layers: First layers with such an MLP.
        shared: Experts that every token uses.
        mixer: Latent attention.
        norm_eps: As in `DecoderConfig`.
        **fields: Its other fields.
    """
    dense = LayerSpec(mixer, MLPSpec(dense_d_ff), name="dense_layers")
    return DecoderConfig(
        heads=heads,
        kv_heads=heads,
        head_dim=mixer.key_dim,
        d_ff=d_ff,
        norm_eps=norm_eps,
        layer=LayerSpec(mixer, ExpertsSpec(shared_d_ff=shared * d_ff)),
        first=(dense,) * dense_layers,
        **fields,
    )


_SMALL: dict[str, Any] = {
    **{"vocab": 64, "d_model": 32, "layers": 3, "heads": 4, "d_ff": 16, "dense_d_ff": 48},
}
_TINY = LatentAttentionSpec(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)
_V2_SCALING = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
_V3_SCALING = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
_K2_SCALING = YarnScaling(32.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)

PRESETS = {
    "test-deepseek": deepseek(
        **_SMALL,
        mixer=_TINY,
        router=dataclasses.replace(V3_ROUTER, experts=8, top_k=2, groups=4, top_groups=2),
    ),
    "test-deepseek-v2": deepseek(
        **_SMALL,
        shared=2,
        mixer=dataclasses.replace(_TINY, q_rank=0),
        router=dataclasses.replace(V2_ROUTER, experts=8, top_k=2, groups=4, top_groups=2),
    ),
    "deepseek-v2-lite": deepseek(
        vocab=102_400,
        d_model=2048,
        layers=27,
        heads=16,
        d_ff=1408,
        dense_d_ff=10_944,
        shared=2,
        mixer=LatentAttentionSpec(),
        rope_scaling=_V2_SCALING,
        router=RouterConfig(
            experts=64, top_k=6, normalise=False, balance=0.001, balance_over="example"
        ),
    ),
    "deepseek-v2": deepseek(
        vocab=102_400,
        d_model=5120,
        layers=60,
        heads=128,
        d_ff=1536,
        dense_d_ff=12_288,
        shared=2,
        rope_scaling=_V2_SCALING,
        router=V2_ROUTER,
    ),
    "deepseek-v3": deepseek(
        vocab=129_280,
        d_model=7168,
        layers=61,
        heads=128,
        d_ff=2048,
        dense_d_ff=18_432,
        dense_layers=3,
        rope_scaling=_V3_SCALING,
        router=V3_ROUTER,
    ),
    "kimi-k2": deepseek(
        vocab=163_840,
        d_model=7168,
        layers=61,
        heads=64,
        d_ff=2048,
        dense_d_ff=18_432,
        rope_theta=5e4,
        rope_scaling=_K2_SCALING,
        router=dataclasses.replace(V3_ROUTER, experts=384, groups=1, top_groups=1, scale=2.827),
    ),
}
"""Published shapes by name, without multi-token prediction, and small ones for tests."""

_LAYER = layer_names() | expert_names() | latent_names()
_NAMES = TensorNames(_LAYER, ENDS, ahead=AHEAD_NAMES)
_HARMLESS = ("ep_size", "seq_aux")


@dataclasses.dataclass(frozen=True)
class _Defaults:
    """Defaults of fields of config.json, as in the classes of `transformers`."""

    d_ff: int
    shared: int
    dense: int


_V2 = _Defaults(d_ff=1407, shared=2, dense=0)
_V3 = _Defaults(d_ff=2048, shared=1, dense=3)
_V2_FIELDS = RouterFields(
    "n_routed_experts",
    experts=64,
    scale=1.0,
    balance_name="aux_loss_alpha",
    base=RouterConfig(normalise=False, balance_over="example"),
)
_V2_GROUPS = dataclasses.replace(_V2_FIELDS, groups=(None, None))
_V3_FIELDS = RouterFields(
    "n_routed_experts",
    experts=256,
    top_k=8,
    normalise=True,
    groups=(8, 4),
    scale=2.5,
    balance_name="aux_loss_alpha",
    balance=1e-4,
    base=CHOICE_BIASES,
)


def _read_v2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("norm_topk_prob", False)
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    if fields.value("topk_method") == "group_limited_greedy":
        router = _V2_GROUPS.read(fields)
        if router.groups != router.top_groups:
            router = dataclasses.replace(router, group_score="max")
    else:
        router = _V2_FIELDS.read(fields)
    for name in ("n_group", "topk_group"):
        fields.value(name)  # unused by "greedy"
    return _read(fields, _V2, router)


def _read_v3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    router = _V3_FIELDS.read(fields)
    return _read(fields, _V3, router, may_interleave=True)


def _read(
    fields: Fields, defaults: _Defaults, router: RouterConfig, *, may_interleave: bool = False
) -> DecoderConfig:
    """Parse the fields of both versions."""
    sizes = read_sizes(fields)
    sizes["mixer"] = read_latent_attention(fields, sizes, _MIXER, may_interleave=may_interleave)
    fields.only("moe_layer_freq", 1)
    if fields.is_null("n_routed_experts"):
        fields.refuse("n_routed_experts", "is null, and this model has experts")
    for name in ("kv_heads", "head_dim"):
        del sizes[name]
    layers = sizes["layers"]
    sizes["dense_d_ff"] = sizes["d_ff"]
    sizes["d_ff"] = fields.integer("moe_intermediate_size", defaults.d_ff)
    sizes["dense_layers"] = read_dense_first(fields, layers, defaults.dense)
    sizes["shared"] = fields.integer("n_shared_experts", defaults.shared)
    sizes["predict_ahead"] = read_count(fields, AHEAD, 0)
    return fields.build(deepseek, **sizes, router=router)


def _write_v2(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = experts_of(config)
    method = "greedy"
    if router.groups > 1:
        method = "group_limited_greedy"
    fields = _write(config)
    fields |= _V2_GROUPS.write(router)
    fields["topk_method"] = method
    fields["norm_topk_prob"] = False
    fields["scoring_func"] = "softmax"
    fields["model_type"] = "deepseek_v2"
    return fields


def _write_v3(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = experts_of(config)
    fields = _write(config, may_interleave=True)
    fields |= _V3_FIELDS.write(router)
    fields["topk_method"] = "noaux_tc"
    fields["scoring_func"] = "sigmoid"
    fields["model_type"] = "deepseek_v3"
    return fields


def _write(config: DecoderConfig, *, may_interleave: bool = False) -> dict[str, Any]:
    """Return the fields of both versions: the inverse of `_read`."""
    fields = write_latent_sizes(config, may_interleave=may_interleave)
    fields |= write_shared_experts(config)
    fields["first_k_dense_replace"] = len(config.first)
    fields[AHEAD] = config.predict_ahead
    return fields


_family = functools.partial(
    decoder_family, names=_NAMES, harmless=_HARMLESS, for_tensors=with_stored_ahead
)
V2_FAMILY = _family("DeepseekV2ForCausalLM", _read_v2, _write_v2)
V3_FAMILY = _family("DeepseekV3ForCausalLM", _read_v3, _write_v3)
