"""Names of tensors in the layers of published decoders.

```python
names = module_names({"mlp/up_proj": "mlp.fc1"}, {"attention_norm": "ln_1"})
names |= fused_names(QKV, "attn.qkv_proj", 3)
```
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from spmd.hf.layout import AS_IS, TRANSPOSED, TensorLayout, part

Names = dict[str, tuple[str, TensorLayout]]
"""Parameter of a layer → its tensor, without the layer's prefix, and the tensor's layout."""

QKV = ("attention/q_proj", "attention/k_proj", "attention/v_proj")
"""Linear layers of queries, keys and values."""
GATE_UP = ("mlp/gate_proj", "mlp/up_proj")
"""Linear layers of a gated MLP's hidden units."""


def module_names(
    linear: Mapping[str, str],
    norms: Mapping[str, str] = MappingProxyType({}),
    layout: TensorLayout = TRANSPOSED,
) -> Names:
    """Return the tensors of linear layers and norms, with weights and biases.

    Args:
        linear: Linear layer → its module in the checkpoint.
        norms: Norm → its module in the checkpoint.
        layout: Layout of the kernels.

    Example:
        >>> module_names({}, {"norm": "ln_f"})["norm/scale"][0]
        'ln_f.weight'
    """
    names: Names = {}
    for ours, theirs in linear.items():
        names[f"{ours}/kernel"] = (f"{theirs}.weight", layout)
        names[f"{ours}/bias"] = (f"{theirs}.bias", AS_IS)
    for ours, theirs in norms.items():
        names[f"{ours}/scale"] = (f"{theirs}.weight", AS_IS)
        names[f"{ours}/bias"] = (f"{theirs}.bias", AS_IS)
    return names


def fused_names(
    linear: Sequence[str],
    module: str,
    parts: int | Sequence[int],
    *,
    groups: int = 1,
    layout: TensorLayout = TRANSPOSED,
) -> Names:
    """Return the tensors of linear layers that are parts of one module of the checkpoint.

    Args:
        linear: Linear layers, in the order of the parts.
        module: The module with all of them.
        parts: As for `spmd.hf.layout.part`, like `groups`.
        groups: Number of groups with all parts in each.
        layout: Layout of the kernels.
    """
    names: Names = {}
    for index, ours in enumerate(linear):
        kernel = part(index, parts, groups=groups, layout=layout)
        bias = part(index, parts, groups=groups)
        names[f"{ours}/kernel"] = (f"{module}.weight", kernel)
        names[f"{ours}/bias"] = (f"{module}.bias", bias)
    return names
