"""Gated short convolution (LFM 2, arXiv:2511.23404), and the weights of convolutions of other mixers.

The token mixer of LFM 2 has no attention: two gates that are products of the input, around a causal
depthwise convolution over a few tokens.

```
x ─┬─ in_gate_proj ──▶ B ─┐
   ├─ value_proj ────▶ v ─┴ B · v ─▶ convolution ─▶ c ─┐
   └─ out_gate_proj ─▶ C ──────────────────────────────┴ C · c ─▶ out_proj
```

Over `tensor`, channels are split. A cache has the last inputs of the convolution alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields
from spmd.layers.cache_entry import CacheEntry, cached_array
from spmd.layers.kv_cache import cache_slot, require_one_document, token_mask
from spmd.layers.recurrence import require_whole_sequences
from spmd.layers.ring_attention import Segments
from spmd.layers.short_convolution import (
    Activation,
    short_convolution,
    short_convolution_step,
)
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows, hidden
from spmd.models.decoder.head_params import whole
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.linear import Dense, column_parallel, row_parallel
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate
from spmd.sharding.rules import replicate

_NAME = "short convolution"
_INPUT = "convolution_input"


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution: `weight` `[width, channels]`, and an optional `bias`."""

    def __init__(self, channels: int, width: int, *, bias: bool = False, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(width**-0.5)
        table = init(rngs.params(), (width, channels), jnp.float32)
        # Channels are multiplied one by one: no matrix between layers.
        self.weight = nnx.Param(table, gathered_by_layer=True, added=True)
        self.bias = _zeros(channels) if bias else None

    def __call__(
        self,
        x: Float[Array, "batch seq channels"],
        past: Float[Array, "batch width-1 channels"] | None,
        segments: Segments = None,
        activation: Activation | None = None,
    ) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch width-1 channels"]]:
        """Return the output of each token, and the last inputs for a cache.

        Args:
            x: Inputs; of one token in decoding.
            past: The last inputs before a decoded token; None otherwise.
            segments: The document of each token.
            activation: A function such as `jax.nn.silu`; None for none.
        """
        weight = whole(self.weight)
        bias = None
        if self.bias is not None:
            bias = whole(self.bias)
        if past is not None:
            out, last = short_convolution_step(
                x[:, 0], weight, bias, state=past, activation=activation
            )
            return out[:, None], last
        return short_convolution(
            *(x, weight, bias),
            activation=activation,
            segments=segments,
            valid=token_mask(x.shape[1]),
        )


def convolve_each(
    mixer: nnx.Module,
    projected: Mapping[str, Float[Array, "batch seq _"]],
    past: CacheEntry | None,
    segments: Segments,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Apply a mixer's convolutions with SiLU; return their outputs, and the last inputs for a cache.

    Args:
        mixer: A module with a `ShortConvolution` `{name}_conv` for each name.
        projected: Name → its inputs.
        past: The mixer's cache in decoding, with the last inputs under the same names.
        segments: The document of each token.
    """
    outputs: dict[str, Array] = {}
    last: dict[str, Array] = {}
    for name, x in projected.items():
        convolution: ShortConvolution = getattr(mixer, f"{name}_conv")
        before = None
        if past is not None:
            before = getattr(past, name)
        outputs[name], last[name] = convolution(x, before, segments, jax.nn.silu)
    return outputs, last


def _zeros(width: int) -> nnx.Param:
    return nnx.Param(jnp.zeros((width,), jnp.float32), gathered_by_layer=True)


@dataclasses.dataclass(frozen=True)
class GatedConvolutionSpec(MixerSpec):
    """Gated short convolution of one kind of layer, as wide as the residual stream."""

    width: int = 3
    """Tokens that each one reads, itself included (`conv_L_cache`)."""
    bias: bool = False
    """Add biases to all projections and the convolution (`conv_bias`)."""

    name = "short_convolution"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "GatedConvolutionSpec":
        """Return the spec itself: no field has a value of the network."""
        del sizes
        return self

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        del sizes
        return check_fields(self, {"width": "at least 1"}, prefix=where)

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        return 4 * sizes.d_model**2

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of all other parameters: the convolution's and biases."""
        count = self.width
        if self.bias:
            count += 5
        return count * sizes.d_model

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        into = f"{self.name}/(in_gate|value|out_gate)_proj"
        params: list[ParamRow] = [
            (f"{into}/kernel", P(fsdp, "tensor")),  # [d, channels]
            (f"{self.name}/out_proj/kernel", P("tensor", fsdp)),  # [channels, d]
            (f"{self.name}/convolution/weight", P(None, "tensor")),  # [width, channels]
        ]
        if self.bias:
            reason = replicate("added once, where rows are summed over tensor")
            params += [
                (f"{into}/bias", P("tensor")),
                (f"{self.name}/convolution/bias", P("tensor")),
                (f"{self.name}/out_proj/bias", reason),
            ]
        marks = hidden("convolution_hidden", "convolution_gate", "convolution_out")
        return TableRows(tuple(params), ((_INPUT, TOKENS), *marks))

    def build(self, sizes: Sizes, angles: int, rngs: nnx.Rngs) -> "GatedConvolution":
        """Build the module of a resolved spec."""
        del angles
        return GatedConvolution(self, sizes, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvolutionCache(CacheEntry):
    """The last inputs of a convolution, stacked for a stack of layers; channels are split as heads."""

    inputs: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")


class GatedConvolution(nnx.Module):
    """Gated short convolution of a resolved spec."""

    def __init__(self, spec: GatedConvolutionSpec, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        width = sizes.d_model
        options: dict[str, Any] = {"bias": spec.bias, "rngs": rngs}
        self.in_gate_proj = Dense(width, width, **options)
        self.out_gate_proj = Dense(width, width, **options)
        self.value_proj = Dense(width, width, **options)
        self.convolution = ShortConvolution(width, spec.width, **options)
        self.out_proj = Dense(width, width, scale=sizes.out_scale, **options)

    def __call__(
        self, x: Float[Array, "batch seq d"], inputs: LayerInputs
    ) -> Float[Array, "batch seq d"]:
        """Mix each token with a few preceding ones of its document.

        Raises:
            ConfigError: The mesh splits sequences.
        """
        require_whole_sequences(_NAME)
        require_one_document(inputs.segments)
        slot = cache_slot(_NAME, ConvolutionCache)
        past = None
        if slot.past is not None:
            past = slot.past.inputs
        projections = (self.in_gate_proj, self.out_gate_proj, self.value_proj)
        kernels = [projection.kernel for projection in projections]
        in_gate, out_gate, value = column_parallel(x, kernels, _INPUT)
        in_gate = self.in_gate_proj.with_bias(in_gate)
        out_gate = annotate(self.out_gate_proj.with_bias(out_gate), "convolution_gate")
        value = self.value_proj.with_bias(value)
        gated = annotate(in_gate * value, "convolution_hidden")
        mixed, last = self.convolution(gated, past, inputs.segments)
        slot.save(ConvolutionCache(last))
        out = annotate(out_gate * mixed, "convolution_out")
        y = row_parallel(out, self.out_proj.kernel, _INPUT)
        return self.out_proj.with_bias(y)
