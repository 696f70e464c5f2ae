"""Gated delta nets in config.json: fields, kinds of layers, and names of tensors.

```python
mixer = read_delta_net(fields)
kinds = read_layer_types(fields, layers, every(4, layers, LINEAR), known=(FULL, LINEAR))
fields.build(DecoderConfig, **sizes, **layer_table(kinds, {LINEAR: LayerSpec(mixer), …}))
```
"""

from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, CONVOLUTION, TRANSPOSED, part
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.gated_delta_net import GatedDeltaNetSpec
from spmd.models.published.layer_types import FULL, LINEAR, mixer_of
from spmd.models.published.tensor_names import Names

_NET = "gated_delta_net"


def read_delta_net(
    fields: Fields, defaults: GatedDeltaNetSpec, **options: Any
) -> GatedDeltaNetSpec:
    """Parse the sizes of a gated delta net.

    Args:
        fields: Fields of config.json.
        defaults: Values of absent fields.
        **options: Other options of `GatedDeltaNetSpec`.
    """
    return GatedDeltaNetSpec(
        heads=fields.integer("linear_num_value_heads", defaults.heads),
        key_heads=fields.integer("linear_num_key_heads", defaults.key_heads),
        key_dim=fields.integer("linear_key_head_dim", defaults.key_dim),
        value_dim=fields.integer("linear_value_head_dim", defaults.value_dim),
        conv_width=fields.integer("linear_conv_kernel_dim", defaults.conv_width),
        **options,
    )


def write_delta_net(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_delta_net`, and `layer_types`."""
    mixer = mixer_of(config, GatedDeltaNetSpec)
    kinds = []
    for spec in config.pattern.kinds:
        kind = FULL
        if isinstance(spec.mixer, GatedDeltaNetSpec):
            kind = LINEAR
        kinds.append(kind)
    fields: dict[str, Any] = {"layer_types": kinds}
    fields["linear_num_value_heads"] = mixer.heads
    fields["linear_num_key_heads"] = mixer.key_heads
    fields["linear_key_head_dim"] = mixer.key_dim
    fields["linear_value_head_dim"] = mixer.value_dim
    fields["linear_conv_kernel_dim"] = mixer.conv_width
    return fields


def delta_net_names(
    projections: dict[str, str],
    *,
    norm: str = "norm",
    out: str = "out_proj",
) -> Names:
    """Return the tensors of a gated delta net without those of its convolutions.

    Args:
        projections: Projection, such as `gate`, with a tensor of its own → its module.
        norm: Module of the norm of outputs.
        out: Module of the output's projection.
    """
    modules = {f"{name}_proj": module for name, module in projections.items()} | {"o_proj": out}
    names: Names = {}
    for ours, theirs in modules.items():
        names[f"{_NET}/{ours}/kernel"] = (f"linear_attn.{theirs}.weight", TRANSPOSED)
    for name in ("A_log", "dt_bias"):
        names[f"{_NET}/{name}"] = (f"linear_attn.{name}", AS_IS)
    names[f"{_NET}/out_norm/scale"] = (f"linear_attn.{norm}.weight", AS_IS)
    return names


def fused_delta_net_names(config: DecoderConfig, *, by_head: bool) -> Names:
    """Return the tensors of a gated delta net with fused projections and convolutions (Qwen).

    Args:
        config: The config of the model.
        by_head: Whether the projections of each head of keys are together (Qwen 3 Next), or those of
            queries, keys and values are one after the other (Qwen 3.5).
    """
    mixer = mixer_of(config, GatedDeltaNetSpec)
    widths = mixer.widths
    qkv = ("q", "k", "v")
    sizes = [widths[name] for name in qkv]
    names: Names = {}
    for index, name in enumerate(qkv):
        layout = part(index, sizes, layout=CONVOLUTION)
        names[f"{_NET}/{name}_conv/weight"] = ("linear_attn.conv1d.weight", layout)
    if not by_head:
        alone = {"gate": "in_proj_z", "a": "in_proj_a", "b": "in_proj_b"}
        names |= delta_net_names(alone)
        return names | _fused("in_proj_qkv", qkv, sizes, groups=1)
    groups = mixer.key_heads
    together = (*qkv, "gate")
    names |= delta_net_names({})
    sizes = [widths[name] // groups for name in together]
    names |= _fused("in_proj_qkvz", together, sizes, groups=groups)
    return names | _fused("in_proj_ba", ("b", "a"), [1, 1], groups=groups)


def _fused(module: str, projections: tuple[str, ...], sizes: list[int], *, groups: int) -> Names:
    """Return the names of projections in one tensor."""
    names: Names = {}
    for index, name in enumerate(projections):
        layout = part(index, sizes, groups=groups, layout=TRANSPOSED)
        names[f"{_NET}/{name}_proj/kernel"] = (f"linear_attn.{module}.weight", layout)
    return names
