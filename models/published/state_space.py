"""State-space mixers in config.json: fields, kinds of layers, and names of tensors.

```python
_MIXER = StateSpaceFields()
mixer = _MIXER.read(fields, width)
names = state_space_names(config, "mamba")
```
"""

import dataclasses
import math
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, CONVOLUTION, TRANSPOSED, part
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.parallel_mixer import ParallelMixerSpec
from spmd.models.decoder.state_space import StateSpaceSpec
from spmd.models.published.layer_types import FULL, LINEAR, mixer_of
from spmd.models.published.tensor_names import Names, fused_names

EARLIER_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds in files of `transformers` before 5.20 → the kinds of today."""

_LIMITS = "time_step_limit"
_INFINITY = {"__float__": "Infinity"}
"""The form in which `transformers` writes an infinite number."""
_NAME = StateSpaceSpec.name
_DEFAULTS = StateSpaceSpec(heads=128, state_dim=256)


@dataclasses.dataclass(frozen=True)
class StateSpaceFields:
    """Fields of a state-space mixer in config.json, and its values where they are absent.

    Example:
        >>> fields = StateSpaceFields()
        >>> fields.read(Fields({"mamba_n_heads": 4, "mamba_d_state": 8}), width=32).head_dim
        16
    """

    defaults: StateSpaceSpec = _DEFAULTS
    """Values of absent fields; a width of heads of 0 is that of `expand`, divided by the heads."""
    heads: str = "mamba_n_heads"
    """Name of the number of heads."""
    head_dim: str = "mamba_d_head"
    """Name of their width."""
    groups: str = "mamba_n_groups"
    """Name of the number of groups."""
    state_dim: str = "mamba_d_state"
    """Name of the width of a state."""
    conv_width: str = "mamba_d_conv"
    """Name of the width of convolutions."""
    conv_bias: str = "mamba_conv_bias"
    """Name of the option of their biases."""
    bias: str = "mamba_proj_bias"
    """Name of the option of the projections' biases."""
    expand: str = "mamba_expand"
    """Name of the width of all heads, in widths of the model; empty for none."""
    limits: bool = True
    """Whether `time_step_limit` is of effect."""

    def read(self, fields: Fields, width: int) -> StateSpaceSpec:
        """Parse a mixer of a model of a width; problems are reported to `fields`."""
        defaults = self.defaults
        heads = fields.integer(self.heads, defaults.heads)
        head_dim = defaults.head_dim
        expanded = 0
        if self.expand:
            expanded = width * fields.integer(self.expand, 2)
            head_dim = head_dim or max(1, expanded // heads)
        if fields.value(self.head_dim, "auto") != "auto":
            head_dim = fields.integer(self.head_dim)
        if expanded and heads * head_dim != expanded:
            what = f"is not {heads} heads of {head_dim} in widths of {width}"
            fields.refuse(self.expand, what)
        low, high = 0.0, None
        if self.limits:
            low, high = _read_limits(fields)
        return dataclasses.replace(
            defaults,
            heads=heads,
            head_dim=head_dim,
            groups=fields.integer(self.groups, defaults.groups),
            state_dim=fields.integer(self.state_dim, defaults.state_dim),
            conv_width=fields.integer(self.conv_width, defaults.conv_width),
            conv_bias=fields.flag(self.conv_bias, defaults.conv_bias),
            bias=fields.flag(self.bias, defaults.bias),
            dt_min=low,
            dt_max=high,
        )

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the fields of config.json: the inverse of `read`.

        Raises:
            MissingPartError: No layer has such a mixer.
        """
        spec = state_space_of(config)
        written: dict[str, Any] = {
            self.heads: spec.heads,
            self.head_dim: spec.head_dim,
            self.groups: spec.groups,
            self.state_dim: spec.state_dim,
            self.conv_width: spec.conv_width,
            self.conv_bias: spec.conv_bias,
            self.bias: spec.bias,
        }
        if self.expand:
            written[self.expand] = spec.inner // config.d_model
        if self.limits:
            written[_LIMITS] = [spec.dt_min, spec.dt_max]
            if spec.dt_max is None:
                written[_LIMITS] = [spec.dt_min, _INFINITY]
        return written


def _read_limits(fields: Fields) -> tuple[float, float | None]:
    """Parse `time_step_limit`, the smallest and largest step size; None for an infinite one."""
    limits = fields.value(_LIMITS, [0.0, _INFINITY])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        fields.refuse(_LIMITS, "is not a list of two numbers")
        return 0.0, None
    low, high = limits
    if not fields.is_number(_LIMITS, low, 0):
        return 0.0, None
    if high in (None, math.inf, _INFINITY):
        return float(low), None
    if not fields.is_number(_LIMITS, high, 0):
        return 0.0, None
    return float(low), float(high)


def state_space_of(config: DecoderConfig) -> StateSpaceSpec:
    """Return the state-space mixer of a config.

    Raises:
        MissingPartError: No layer has one.
    """
    for spec in config.pattern.distinct:
        if isinstance(spec.mixer, ParallelMixerSpec):
            return spec.mixer.state_space
    return mixer_of(config, StateSpaceSpec)


def mixer_kinds(config: DecoderConfig) -> list[str]:
    """Return the kind of each layer: `linear_attention` or `full_attention`."""
    kinds = []
    for spec in config.pattern.kinds:
        kind = FULL
        if isinstance(spec.mixer, StateSpaceSpec):
            kind = LINEAR
        kinds.append(kind)
    return kinds


def state_space_names(config: DecoderConfig, module: str) -> Names:
    """Return the tensors of a mixer.

    Args:
        config: The config of the model.
        module: Name of the mixer in a layer.
    """
    widths = state_space_of(config).widths
    projections = [f"{_NAME}/{name}_proj" for name in widths]
    names = fused_names(projections, f"{module}.in_proj", list(widths.values()))
    convolved = ("x", "b", "c")
    sizes = [widths[name] for name in convolved]
    for index, name in enumerate(convolved):
        ours = f"{_NAME}/{name}_conv"
        weight = part(index, sizes, layout=CONVOLUTION)
        names[f"{ours}/weight"] = (f"{module}.conv1d.weight", weight)
        names[f"{ours}/bias"] = (f"{module}.conv1d.bias", part(index, sizes))
    for name in ("A_log", "D", "dt_bias"):
        names[f"{_NAME}/{name}"] = (f"{module}.{name}", AS_IS)
    names[f"{_NAME}/gated_norm/scale"] = (f"{module}.norm.weight", AS_IS)
    names[f"{_NAME}/out_proj/kernel"] = (f"{module}.out_proj.weight", TRANSPOSED)
    names[f"{_NAME}/out_proj/bias"] = (f"{module}.out_proj.bias", AS_IS)
    return names
