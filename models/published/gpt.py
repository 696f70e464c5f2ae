"""Decoders like GPT, with LayerNorm and MLPs without a gate, and activations in config.json.

```python
neox = functools.partial(gpt_decoder, norms="parallel", rotary=Rotary(fraction=0.25))
neox(50_304, 512, 6, 8, 8, 2048)
```
"""

from collections.abc import Mapping
from typing import Any, Literal

from spmd.errors import did_you_mean, shorten
from spmd.hf.fields import Fields, renamed
from spmd.models.decoder.activations import FROM_HF, GATED, UNGATED
from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.declared import MissingPartError
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.layer import LayerSpec, Norms
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.decoder.rotary import Rotary
from spmd.models.decoder.sizes import NormSpec
from spmd.models.published.common_fields import read_sizes, write_sizes

_WRITTEN = {"gelu_tanh": "gelu_pytorch_tanh"}
"""Activation → its name in config.json, if that is another one."""


def gpt_decoder(
    *shape: Any,
    rotary: Rotary | None = None,
    norms: Norms = "before",
    attention_bias: bool = True,
    mlp_bias: bool = True,
    qk_norm: Literal["none", "head"] = "none",
    activation: str = "gelu",
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a decoder with LayerNorm and MLPs without a gate.

    Args:
        *shape: The first fields of `DecoderConfig`, in order.
        rotary: Rotary positions; None for none.
        norms: Places of norms, as in `LayerSpec`.
        attention_bias: Add biases in attention.
        mlp_bias: Add biases in MLPs.
        qk_norm: Normalise queries and keys, as in `AttentionSpec`.
        activation: Activation of MLPs.
        **fields: Other fields of `DecoderConfig`.
    """
    mixer = AttentionSpec(
        rotary=rotary, qkv_bias=attention_bias, out_bias=attention_bias, qk_norm=qk_norm
    )
    mlp = MLPSpec(activation=activation, gated=False, bias=mlp_bias)
    defaults: dict[str, Any] = {
        "norm": NormSpec("layer", bias=True),
        "layer": LayerSpec(mixer, mlp, norms),
    }
    return DecoderConfig(*shape, **defaults | fields)


def read_gpt(
    fields: Fields,
    eps_field: str,
    *,
    activation: str,
    tied: bool = True,
    learned: bool = True,
    d_ff_ratio: int = 4,
) -> dict[str, Any]:
    """Parse the sizes and the activation, as arguments of `gpt_decoder`.

    There are as many key/value heads as heads, of the width divided by them.

    Args:
        fields: Fields of config.json.
        eps_field: Name of the norms' field; empty for 1e-5.
        activation: The activation if `hidden_act` is absent.
        tied: Default of `tie_word_embeddings`.
        learned: Whether positions are learned; then `max_position_embeddings` is required.
        d_ff_ratio: As in `read_sizes`.
    """
    sizes = read_sizes(
        fields,
        eps=1e-5,
        eps_field=eps_field,
        theta=0,
        tied=tied,
        activation=(),
        has_head_dim=False,
        d_ff_ratio=d_ff_ratio,
    )
    fields.only("num_key_value_heads", sizes["heads"])
    if learned:
        sizes["positions"] = fields.integer("max_position_embeddings")
    return {**sizes, "activation": read_activation(fields, "hidden_act", activation)}


def write_gpt(config: DecoderConfig, eps_field: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_gpt`.

    Args:
        config: The config of a model.
        eps_field: As in `read_gpt`.
        names: Common name of a field → its name in files of the family.
    """
    sizes = {**write_sizes(config, eps_field), "hidden_act": write_activation(config)}
    for name in ("head_dim", "num_key_value_heads", "rope_theta"):
        del sizes[name]
    if config.positions:
        sizes["max_position_embeddings"] = config.positions
    return renamed(sizes, names)


def read_activation(fields: Fields, name: str, absent: str, *, gated: bool = False) -> str:
    """Parse an activation; an unknown one is reported to `fields`.

    Args:
        fields: Fields of config.json.
        name: Name of the field.
        absent: The value there if the field is absent.
        gated: Whether the MLP has a gate.
    """
    known = [*UNGATED]
    if gated:
        known = [*GATED]
    found = fields.value(name, absent)
    ours = FROM_HF.get(str(found), "")
    if ours in known:
        return ours
    supported = [theirs for theirs, other in FROM_HF.items() if other in known]
    fix = did_you_mean(str(found), supported)
    fields.refuse(name, f"is {shorten(found)}, and is not supported", fix)
    return FROM_HF[absent]


def write_activation(config: DecoderConfig) -> str:
    """Return the name of the activation of all MLPs: the inverse of `read_activation`."""
    activation = mlp_of(config).activation
    return _WRITTEN.get(activation, activation)


def mlp_of(config: DecoderConfig) -> MLPSpec:
    """Return the MLP of the first repeated layer.

    Raises:
        MissingPartError: The layer has experts, or neither.
    """
    mlp = config.pattern.group[0].mlp
    if not isinstance(mlp, MLPSpec):
        raise MissingPartError(f"the layer has a {type(mlp).__name__}")
    return mlp
