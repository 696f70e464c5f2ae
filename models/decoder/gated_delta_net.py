"""Gated delta net (arXiv:2412.06464, section 3.4): linear attention with decay and corrections.

```
x ─┬─ (q|k|v)_proj ─▶ convolution, silu ─▶ q, k (L2-normalised), v ─┐
   ├─ a_proj ──▶ log α = −exp(A_log) · softplus(a + dt_bias) ───────┼─▶ delta rule ─▶ norm ─┐
   ├─ b_proj ──▶ β = sigmoid(b) ────────────────────────────────────┘                       │
   └─ gate_proj ─▶ silu ──────────────────────────────────────────────────────────────────── · ─▶ o_proj
```

It has no positions: their order is in the recurrence (`spmd.layers.gated_delta_rule`). Over
`tensor`, heads are split: those of values, and with them those of queries and keys. A cache has no
axis of tokens: one state for each head, and the last inputs of the convolutions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields
from spmd.layers.cache_entry import CacheEntry, cached_array
from spmd.layers.gated_delta_rule import gated_delta_rule, gated_delta_step, l2_normalized
from spmd.layers.kv_cache import cache_slot, require_one_document, token_mask
from spmd.layers.recurrence import require_whole_sequences, to_float32
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows, hidden
from spmd.models.decoder.head_params import initial_dt_bias, initial_rates, of_heads, whole
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.linear import Dense, column_parallel, row_parallel
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.norms import RMSNorm
from spmd.models.decoder.short_convolution import ShortConvolution, convolve_each
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate
from spmd.sharding.rules import replicate

_NAME = "gated delta net"
_INPUT = "attention_input"
_PROJECTIONS = ("q", "k", "v", "gate", "a", "b")
_CONVOLVED = ("q", "k", "v")
_LEAST_RATE = 0.01
"""Least initial rate of decay; its logarithm is a parameter."""


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetSpec(MixerSpec):
    """Gated delta net of one kind of layer; a field of 0 has the network's value."""

    heads: int = 0
    """Heads of values, each with a state (`linear_num_value_heads`)."""
    key_heads: int = 0
    """Heads of queries and keys (`linear_num_key_heads`); divides heads. 0 for as many."""
    key_dim: int = 128
    """Width of a head of queries and keys (`linear_key_head_dim`)."""
    value_dim: int = 128
    """Width of a head of values (`linear_value_head_dim`)."""
    conv_width: int = 4
    """Tokens that the convolutions read (`linear_conv_kernel_dim`)."""
    negative_eigenvalues: bool = False
    """β = 2 · sigmoid(b), so that states may change signs (arXiv:2411.12537;
    `linear_allow_neg_eigval`)."""
    norm_eps: float = 0.0
    """Added to the mean square in the norm of outputs; 0 for the network's."""

    name = "gated_delta_net"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "GatedDeltaNetSpec":
        """Return the spec with the network's values where it has none of its own."""
        heads = self.heads or sizes.heads
        return dataclasses.replace(
            self,
            heads=heads,
            key_heads=self.key_heads or heads,
            norm_eps=self.norm_eps or sizes.norm_eps,
        )

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        del sizes
        positive = ("heads", "key_heads", "key_dim", "value_dim", "conv_width")
        rules: dict[str, Any] = dict.fromkeys(positive, "at least 1")
        rules["norm_eps"] = "at least 0 and finite"
        problems = check_fields(self, rules, prefix=where)
        if not problems and self.heads % self.key_heads:
            problem = Problem(
                f"{where}key_heads",
                "does not divide heads",
                f"{self.heads} / {self.key_heads} = {self.heads / self.key_heads:.4g}",
                "equally many heads of values for each head of keys",
            )
            problems.append(problem)
        return problems

    @property
    def widths(self) -> dict[str, int]:
        """Name → outputs of each projection from the residual stream."""
        keys = self.key_heads * self.key_dim
        values = self.heads * self.value_dim
        sizes = (keys, keys, values, values, self.heads, self.heads)
        return dict(zip(_PROJECTIONS, sizes, strict=True))

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        widths = self.widths
        return sizes.d_model * (sum(widths.values()) + widths["v"])

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of all others: convolutions, norm, and two vectors of heads."""
        del sizes
        channels = sum(self.widths[name] for name in _CONVOLVED)
        return self.conv_width * channels + self.value_dim + 2 * self.heads

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        into = f"{self.name}/({'|'.join(_PROJECTIONS)})_proj/kernel"
        convolutions = f"{self.name}/({'|'.join(_CONVOLVED)})_conv/weight"
        params: tuple[ParamRow, ...] = (
            (into, P(fsdp, "tensor")),  # [d, channels]
            (f"{self.name}/o_proj/kernel", P("tensor", fsdp)),  # [channels, d]
            (convolutions, P(None, "tensor")),  # [width, channels]
            (f"{self.name}/(A_log|dt_bias)", P("tensor")),  # [heads]
            (f"{self.name}/out_norm/scale", replicate("one scale of value_dim for all heads")),
        )
        marks = (
            # [batch, seq, heads, …]
            *hidden("attention_query", "attention_key", "attention_value"),
            *hidden("attention_decay", "attention_beta"),
            *hidden("attention_gate", "attention_out"),  # [batch, seq, channels]
        )
        return TableRows(params, ((_INPUT, TOKENS), *marks))

    def build(self, sizes: Sizes, angles: int, rngs: nnx.Rngs) -> "GatedDeltaNet":
        """Build the module of a resolved spec."""
        del angles
        return GatedDeltaNet(self, sizes, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedDeltaCache(CacheEntry):
    """The states and the last inputs of convolutions, stacked for a stack of layers.

    Channels of convolutions are split as heads.
    """

    state: Float[Array, "*layer batch heads key_dim value_dim"] = cached_array("batch heads _ _")
    q: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")
    k: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")
    v: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")


class GatedDeltaNet(nnx.Module):
    """Gated delta net of a resolved spec.

    The initial rates of decay are uniform in [−16, −0.01], and step sizes log-uniform in
    [0.001, 0.1], as in the authors' code.
    """

    def __init__(self, spec: GatedDeltaNetSpec, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        width = sizes.d_model
        self.spec = spec
        for name, outputs in spec.widths.items():
            setattr(self, f"{name}_proj", Dense(width, outputs, rngs=rngs))
        for name in _CONVOLVED:
            convolution = ShortConvolution(spec.widths[name], spec.conv_width, rngs=rngs)
            setattr(self, f"{name}_conv", convolution)
        self.A_log = of_heads(initial_rates(rngs.params(), spec.heads, _LEAST_RATE))
        self.dt_bias = of_heads(initial_dt_bias(rngs.params(), spec.heads))
        self.out_norm = RMSNorm(spec.value_dim, eps=spec.norm_eps)
        self.o_proj = Dense(spec.widths["v"], width, scale=sizes.out_scale, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], inputs: LayerInputs
    ) -> Float[Array, "batch seq d"]:
        """Mix each token with the preceding ones of its document.

        Raises:
            ConfigError: The mesh splits sequences.
        """
        require_whole_sequences(_NAME)
        require_one_document(inputs.segments)
        spec = self.spec
        slot = cache_slot(_NAME, GatedDeltaCache)
        projections = [getattr(self, f"{name}_proj").kernel for name in _PROJECTIONS]
        products = column_parallel(x, projections, _INPUT)
        projected = dict(zip(_PROJECTIONS, products, strict=True))
        gate = annotate(projected["gate"], "attention_gate")
        convolved = {name: projected[name] for name in _CONVOLVED}
        mixed, last = convolve_each(self, convolved, slot.past, inputs.segments)
        query = _heads(mixed["q"], spec.key_dim)
        query = annotate(l2_normalized(query), "attention_query")
        key = _heads(mixed["k"], spec.key_dim)
        key = annotate(l2_normalized(key), "attention_key")
        value = annotate(_heads(mixed["v"], spec.value_dim), "attention_value")
        decay, beta = self._decay_and_beta(projected["a"], projected["b"])
        tokens = (query, key, value, decay, beta)
        if slot.past is None:
            valid = token_mask(x.shape[1])
            out, state = gated_delta_rule(*tokens, segments=inputs.segments, valid=valid)
        else:
            token = (y[:, 0] for y in tokens)
            out, state = gated_delta_step(*token, state=slot.past.state)
            out = out[:, None]
        slot.save(GatedDeltaCache(state, **last))
        out = annotate(self._gated(out, gate), "attention_out")
        return row_parallel(out, self.o_proj.kernel, _INPUT, spec.value_dim)

    def _decay_and_beta(
        self, a: Float[Array, "batch seq heads"], b: Float[Array, "batch seq heads"]
    ) -> tuple[Float[Array, "batch seq heads"], Float[Array, "batch seq heads"]]:
        """Return the logarithms of decays and the strengths of corrections, in float32."""
        rates = jnp.exp(whole(self.A_log))
        bias = whole(self.dt_bias)
        steps = jax.nn.softplus(to_float32(a) + bias[None, None])
        decay = -rates[None, None] * steps
        beta = jax.nn.sigmoid(to_float32(b))
        if self.spec.negative_eigenvalues:
            beta = 2 * beta
        return annotate(decay, "attention_decay"), annotate(beta, "attention_beta")

    def _gated(
        self, y: Float[Array, "batch seq heads dim"], gate: Float[Array, "batch seq channels"]
    ) -> Float[Array, "batch seq channels"]:
        """Normalise each head, and multiply by the gate in float32."""
        normed = self.out_norm(y).reshape(gate.shape)
        gated = to_float32(normed) * jax.nn.silu(to_float32(gate))
        return gated.astype(y.dtype)


def _heads(y: Float[Array, "batch seq channels"], dim: int) -> Float[Array, "batch seq heads dim"]:
    """Return separate heads of a width."""
    return y.reshape(*y.shape[:2], -1, dim)
