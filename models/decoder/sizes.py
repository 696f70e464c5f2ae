"""Sizes of all layers of a network, and defaults of their specs."""

import dataclasses
from typing import Literal

from spmd.errors import ConfigError, Problem, check_fields
from spmd.models.decoder.rotary import RopeScaling


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """Kind of all norms of a network."""

    kind: Literal["rms", "layer"] = "rms"
    """rms: root mean square (arXiv:1910.07467); layer: mean and variance (arXiv:1607.06450)."""
    offset: float = 0.0
    """Added to the learned scale, which then starts at 1 − offset (Gemma: 1)."""
    scale: bool = True
    """Learn a scale for each channel."""
    bias: bool = False
    """Learn a bias for each channel; for kind=layer."""

    def __post_init__(self) -> None:
        problems = check_fields(self, {"kind": ("rms", "layer")}, prefix="norm.")
        if self.kind == "rms" and self.bias:
            problems.append(Problem("norm.bias", "acts on nothing with kind=rms", fix="False"))
        if self.offset and not self.scale:
            what = "acts on nothing without a scale"
            problems.append(Problem("norm.offset", what, fix="0, or scale=True"))
        if problems:
            raise ConfigError("Invalid norm:", problems)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a network, and the defaults of each layer's spec."""

    d_model: int
    """Width of the residual stream."""
    layers: int
    """Number of layers, for the scale of initial output kernels."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of a head."""
    d_ff: int
    """Hidden width of an MLP or an expert."""
    norm_eps: float
    """Added to the variance or the mean square in norms."""
    norm: NormSpec = NormSpec()
    """Kind of the norms."""
    window: int = 0
    """Sliding window in tokens; 0 for none."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for a longer context."""
    residual_scale: float = 1.0
    """Factor of each output that is added to the residual stream."""

    @property
    def out_scale(self) -> float:
        """Scale of initial kernels into the residual stream, (2 · layers)^−½ (GPT-2)."""
        return (2 * self.layers) ** -0.5
