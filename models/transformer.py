"""Decoders of any published shape, for plans and benchmarks: a choice of MLP and attention windows.

```python
config = transformer(32_768, 5120, 32, 32, 32, 32_768, head_dim=256, mlp="relu", tied=True)
```
"""

from typing import Any, Literal

from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec

MLPKind = Literal["swiglu", "geglu", "gelu", "relu"]

_MLPS: dict[str, MLPSpec] = {
    "swiglu": MLPSpec(),
    "geglu": MLPSpec(activation="gelu_tanh"),
    "gelu": MLPSpec(activation="gelu_tanh", gated=False),
    "relu": MLPSpec(activation="relu", gated=False),
}


def transformer(
    *shape: Any,
    mlp: MLPKind = "swiglu",
    windows: tuple[int, ...] = (),
    qk_norm: bool = False,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a decoder, from fields of `DecoderConfig`.

    The input of each layer has its own activation name, `layer_input`, so that remat policies may
    offload it alone.

    Args:
        *shape: The first fields, in order.
        mlp: MLP: swiglu and geglu have three matrices (arXiv:2002.05202), gelu and relu two.
        windows: Sliding windows of consecutive layers, repeated; 0 for all preceding tokens.
        qk_norm: Normalise each head's queries and keys.
        **fields: Other fields.
    """
    norm: Literal["none", "head"] = "none"
    if qk_norm:
        norm = "head"
    layers = []
    for window in windows or (None,):
        mixer = AttentionSpec(window=window, qk_norm=norm)
        layers.append(LayerSpec(mixer, _MLPS[mlp], input_name="layer_input"))
    if len(layers) == 1:
        fields["layer"] = layers[0]
    else:
        fields["group"] = tuple(layers)
    return DecoderConfig(*shape, **fields)


PRESETS = {
    "test": transformer(64, 32, 2, 4, 2, 64, mlp="relu", tied=True),
    "test-windows": transformer(64, 32, 4, 4, 2, 64, mlp="geglu", windows=(5, 0)),
}
"""Small shapes for tests."""
