"""Mixtral and similar models: a Llama with mixtures of experts for MLPs (arXiv:2401.04088).

```python
config = dataclasses.replace(PRESETS["mixtral-8x7b"], layers=4)
model = spmd.from_nnx(config.build)
```

The model returns `spmd.model_interface.model.Outputs`: logits, auxiliary losses, metrics. The
router is a config field, so Switch and GShard are presets, without the encoders of these models.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.errors import ConfigError, Problem
from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import DecoderConfig, ExpertsSpec, LayerSpec, MLPSpec
from spmd.models.published.common_fields import read_sizes, read_window, write_sizes
from spmd.models.published.experts import RouterFields, expert_names
from spmd.models.published.family import decoder_family, layer_names


def mixtral(
    *shape: Any,
    dense_layers: int = 0,
    dense_d_ff: int = 0,
    gated: bool = True,
    shared_d_ff: int = 0,
    init_scale: float = 1.0,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a decoder with experts, from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        dense_layers: Number of first layers with an MLP instead of experts.
        dense_d_ff: Hidden width of these MLPs.
        gated: True: experts are SwiGLU; False: ReLU.
        shared_d_ff: Hidden width of the shared expert; 0: none.
        init_scale: Factor of the initial variance of router and experts.
        **fields: Other fields; `router` is that of Mixtral by default.
    """
    if (dense_layers > 0) != (dense_d_ff > 0):
        problem = Problem(
            "model.dense_d_ff",
            "goes with dense_layers",
            f"dense_layers {dense_layers}, dense_d_ff {dense_d_ff}",
            "give both or neither",
        )
        raise ConfigError("Invalid decoder with experts:", [problem])
    activation = "silu"
    if not gated:
        activation = "relu"
    experts = ExpertsSpec(
        activation=activation, gated=gated, shared_d_ff=shared_d_ff, init_scale=init_scale
    )
    dense = LayerSpec(mlp=MLPSpec(dense_d_ff), name="dense_layers")
    table: dict[str, Any] = {"layer": LayerSpec(mlp=experts), "first": (dense,) * dense_layers}
    fields = {"router": RouterConfig()} | table | fields
    return DecoderConfig(*shape, **fields)


SWITCH = RouterConfig(
    experts=8, top_k=1, normalise=False, jitter=0.01, balance=0.01, dispatch="capacity"
)
"""Switch Transformers, section 2: one expert, capacity factor 1.25, α = 0.01."""
GSHARD = RouterConfig(
    experts=8,
    top_k=2,
    random_second=True,
    balance_form="gshard",
    dispatch="capacity",
    capacity_factor=1.0,
)
"""GShard, section 2.2: two experts, the second one at random, capacity 2N / E tokens."""
_MIXTRAL_ROUTER = RouterConfig(balance=0.02)

PRESETS = {
    "test": mixtral(
        vocab=64,
        d_model=32,
        layers=2,
        heads=4,
        kv_heads=2,
        d_ff=16,
        router=RouterConfig(experts=8, z_loss=1e-3),
    ),
    "mixtral-tiny": mixtral(
        vocab=256,
        d_model=192,
        layers=4,
        heads=6,
        kv_heads=2,
        d_ff=256,
        unroll=4,
        router=RouterConfig(experts=8, dispatch="capacity", z_loss=1e-3),
    ),
    "mixtral-8x7b": mixtral(
        vocab=32_000,
        d_model=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        d_ff=14_336,
        rope_theta=1e6,
        router=_MIXTRAL_ROUTER,
    ),
    "mixtral-8x22b": mixtral(
        vocab=32_000,
        d_model=6144,
        layers=56,
        heads=48,
        kv_heads=8,
        d_ff=16_384,
        rope_theta=1e6,
        router=_MIXTRAL_ROUTER,
    ),
    "switch-c": mixtral(
        vocab=32_128,
        d_model=2080,
        layers=30,
        heads=40,
        kv_heads=40,
        d_ff=6144,
        gated=False,
        init_scale=0.1,
        router=dataclasses.replace(SWITCH, experts=2048),
    ),
    "gshard-600b": mixtral(
        vocab=32_000,
        d_model=1024,
        layers=18,
        heads=16,
        kv_heads=16,
        d_ff=8192,
        gated=False,
        router=dataclasses.replace(GSHARD, experts=2048),
    ),
}
"""Published shapes by name, and small ones for tests and the demo.

`switch-c` and `gshard-600b` are decoders with the experts of these models: all 30 layers of the
first, and the 18 layers of the second that have experts.
"""


_NAMES = layer_names() | expert_names("block_sparse_moe.", kernels=("w1", "w3", "w2"))
_ROUTER = RouterFields("num_local_experts", experts=8, top_k=2)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    router = _ROUTER.read(fields, jitter=fields.number("router_jitter_noise", 0.0, least=0))
    sizes = read_sizes(fields, eps=1e-5, theta=1e6, kv_heads=8)
    window = read_window(fields, absent=0)
    return fields.build(mixtral, **sizes, window=window, router=router)


def _write(config: DecoderConfig) -> dict[str, Any]:
    router = config.router or RouterConfig()
    return {
        "model_type": "mixtral",
        **write_sizes(config),
        "sliding_window": config.pattern.group[0].mixer.window or None,
        **_ROUTER.write(router),
        "router_jitter_noise": router.jitter,
    }


FAMILY = decoder_family("MixtralForCausalLM", _read, _write, _NAMES)
