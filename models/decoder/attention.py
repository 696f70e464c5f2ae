"""Softmax attention as a token mixer: grouped queries, rotary positions, windows, norms, biases."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import Problem, check_fields
from spmd.layers.attention import annotated_attention
from spmd.layers.attention_options import AttentionOptions
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows, hidden
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.linear import Dense, column_parallel, row_parallel
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.norms import (
    LayerNorm,
    RMSNorm,
    make_norm,
    norm_leaves,
    norm_params,
)
from spmd.models.decoder.rotary import Rotary, rotate
from spmd.models.decoder.sizes import NormSpec, Sizes
from spmd.plan.annotate import annotate
from spmd.plan.fsdp import gathered, placement_of
from spmd.sharding.rules import replicate

GATES: dict[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
}
"""Activation of a gate of attention's output → its function."""


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Factor of queries, larger at later positions of a document, for long contexts.

    It is `1 + strength · ln(1 + ⌊(position + offset) / interval⌋)` (after arXiv:2501.19399).
    """

    strength: float = 0.1
    """Weight of the logarithm (Llama 4: `attn_scale`; Ministral 3: `llama_4_scaling_beta`)."""
    interval: int = 8192
    """Tokens between two steps of the factor (Llama 4: `floor_scale`; Ministral 3:
    `original_max_position_embeddings`)."""
    offset: int = 0
    """Added to positions (Llama 4: 1)."""

    def problems(self, where: str) -> list[Problem]:
        """Return a problem for each invalid field."""
        rules = {"strength": "above 0", "interval": "at least 1", "offset": "at least 0"}
        return check_fields(self, rules, prefix=where)

    def factors(self, positions: Int[Array, "batch seq"]) -> Float[Array, "batch seq"]:
        """Return the factor of queries at each position, in float32."""
        steps = (positions + self.offset) // self.interval
        return 1 + self.strength * jnp.log1p(steps.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Attention of one kind of layer.

    Heads and widths of 0, a window of None, and the base and the scaling of rotary positions that
    are not given are the network's.
    """

    heads: int = 0
    """Query heads."""
    kv_heads: int = 0
    """Key/value heads (grouped-query attention, arXiv:2305.13245); divides heads."""
    head_dim: int = 0
    """Width of a head of queries and keys."""
    value_dim: int = 0
    """Width of a head of values (`v_head_dim`); 0 for head_dim."""
    window: int | None = None
    """Tokens that each one attends to, itself included; 0 for all preceding ones."""
    chunk: int = 0
    """Tokens of a chunk of a document: each one attends within its own chunk only
    (`attention_chunk_size` of Llama 4); 0 for no chunks."""
    rotary: Rotary | None = Rotary()
    """Rotary positions; None for none."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values."""
    out_bias: bool = False
    """Add a bias to the output."""
    qk_norm: Literal["none", "head", "heads", "full"] = "none"
    """Normalise queries and keys: each head (arXiv:2302.05442), each with parameters of its own
    (heads: Command R+, StableLM 2), or all heads together (full: OLMo 2, arXiv:2501.00656)."""
    qk_norm_kind: NormSpec | None = None
    """Kind of these norms; None for that of the network."""
    qk_norm_after: bool = False
    """Normalise them after their rotation (Hunyuan), not before."""
    clip_qkv: float = 0.0
    """Largest absolute value of queries, keys and values, with their biases, before norms and
    rotation (`clip_qkv` of OLMo, arXiv:2402.00838); 0 for no limit."""
    scale: float = 0.0
    """Factor of the scores; 0 for head_dim^−½."""
    temperature: Temperature | None = None
    """Factor of queries by their positions; None for none."""
    value_scale: float = 1.0
    """Factor of values (`attention_value_scale` of MiMo-V2-Flash)."""
    sinks: bool = False
    """Learn a logit of each query head that takes part in every softmax, without a value
    (gpt-oss)."""
    soft_cap: float = 0.0
    """Soft cap of the scores, cap · tanh(scores / cap) (arXiv:2408.00118); 0 for none."""
    causal: bool = True
    """Attend to preceding tokens only; False in encoders."""
    gate: Literal["none", "channel", "head"] = "none"
    """Multiply the output of attention, before its projection, by a gate of the layer's input
    (arXiv:2505.06708): for each channel (Qwen 3 Next, AFMoE), or for each head (Laguna)."""
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    """Activation of the gate."""
    gate_bias: bool = False
    """Add a bias to the gate."""

    name = "attention"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "AttentionSpec":
        """Return the spec with the network's values where it has none of its own."""
        window = self.window
        if window is None:
            window = sizes.window
        rotary = self.rotary
        if rotary is not None:
            rotary = rotary.resolve(sizes.rope_theta, sizes.rope_scaling)
        qk_norm_kind = self.qk_norm_kind
        if qk_norm_kind is None and self.qk_norm != "none":
            qk_norm_kind = sizes.norm
        head_dim = self.head_dim or sizes.head_dim
        return dataclasses.replace(
            self,
            heads=self.heads or sizes.heads,
            kv_heads=self.kv_heads or sizes.kv_heads,
            head_dim=head_dim,
            value_dim=self.value_dim or head_dim,
            window=window,
            rotary=rotary,
            qk_norm_kind=qk_norm_kind,
        )

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        del sizes
        positive = ("heads", "kv_heads", "head_dim", "value_dim")
        rules: dict[str, Any] = dict.fromkeys(positive, "at least 1")
        least_zero = ("window", "chunk", "scale", "soft_cap", "clip_qkv")
        rules |= dict.fromkeys(least_zero, "at least 0")
        rules["value_scale"] = "above 0"
        rules["qk_norm"] = ("none", "head", "heads", "full")
        rules |= {"gate": ("none", "channel", "head"), "gate_activation": (*GATES,)}
        problems = check_fields(self, rules, prefix=where)
        if not problems and self.heads % self.kv_heads:
            problem = Problem(
                f"{where}kv_heads",
                "does not divide heads",
                f"{self.heads} / {self.kv_heads} = {self.heads / self.kv_heads:.4g}",
                "equally many query heads for each key/value head",
            )
            problems.append(problem)
        if not problems and self.rotary is not None:
            problems += self.rotary.problems(where, self.head_dim)
        if self.temperature is not None:
            problems += self.temperature.problems(f"{where}temperature.")
        if self.window and self.chunk:
            fix = "only one of the two"
            problems.append(Problem(f"{where}chunk", "cannot be used with a window", fix=fix))
        return problems + self._norm_problems(where) + self._gate_problems(where)

    def _norm_problems(self, where: str) -> list[Problem]:
        """Return a problem for each option of norms without effect."""
        problems = []
        if self.qk_norm == "none" and self.qk_norm_kind is not None:
            fix = 'None, or qk_norm="head", "heads" or "full"'
            problems.append(Problem(f"{where}qk_norm_kind", "acts on no norm", fix=fix))
        if self.qk_norm_after and (self.qk_norm == "none" or self.rotary is None):
            fix = "False, or give both qk_norm and rotary"
            what = "acts on nothing without norms or without rotary positions"
            problems.append(Problem(f"{where}qk_norm_after", what, fix=fix))
        return problems

    def _gate_problems(self, where: str) -> list[Problem]:
        """Return a problem for each option of a gate that does not exist."""
        problems = []
        if self.gate != "none":
            return []
        for name in ("gate_activation", "gate_bias"):
            default = getattr(AttentionSpec, name)
            if getattr(self, name) != default:
                fix = f'{default!r}, or gate="channel" or "head"'
                problems.append(Problem(f"{where}{name}", "acts on no gate", fix=fix))
        return problems

    @property
    def rotary_key(self) -> tuple[Rotary, int] | None:
        """Rotary positions and the width of a head; None without positions."""
        if self.rotary is None:
            return None
        return self.rotary, self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.kv_heads * self.value_dim

    @property
    def out_width(self) -> int:
        """Width of the outputs of all query heads together."""
        return self.heads * self.value_dim

    @property
    def attention_width(self) -> int:
        """Width of all query heads, on average of queries and outputs."""
        return (self.query_width + self.out_width) // 2

    @property
    def kv_width(self) -> int:
        """Width of all key/value heads, on average of keys and values."""
        return (self.key_width + self.value_width) // 2

    @property
    def reach(self) -> int:
        """Window with as many keys for a token; that of chunks is half a chunk on average."""
        if self.chunk:
            return max(1, self.chunk // 2)
        return self.window or 0

    @property
    def needs_positions(self) -> bool:
        """Whether queries have a factor by their position."""
        return self.temperature is not None

    @property
    def gate_width(self) -> int:
        """Number of channels of the gate; 0 without one."""
        widths = {"none": 0, "channel": self.out_width, "head": self.heads}
        return widths[self.gate]

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        into = self.query_width + self.key_width + self.value_width + self.gate_width
        return sizes.d_model * (into + self.out_width)

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of all other parameters: biases and norms."""
        count = 0
        if self.qkv_bias:
            count += self.query_width + self.key_width + self.value_width
        if self.out_bias:
            count += sizes.d_model
        if self.gate_bias:
            count += self.gate_width
        if self.sinks:
            count += self.heads
        if self.qk_norm_kind is not None:
            channels = self.query_width + self.key_width
            if self.qk_norm == "head":
                channels = 2 * self.head_dim
            count += channels * norm_params(self.qk_norm_kind)
        return count

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        params: list[ParamRow] = [
            ("attention/(q|k|v)_proj/kernel", P(fsdp, "tensor")),  # [d, heads · width]
            ("attention/o_proj/kernel", P("tensor", fsdp)),  # [heads · value_dim, d]
        ]
        if self.qkv_bias:
            params.append(("attention/(q|k|v)_proj/bias", P("tensor")))
        if self.out_bias:
            reason = replicate("added once, where rows are summed over tensor")
            params.append(("attention/o_proj/bias", reason))
        if self.sinks:
            params.append(("attention/sinks", P("tensor")))
        params += self._norm_rows()
        activations = (
            ("attention_input", TOKENS),
            # [batch, seq, heads, width]
            *hidden("attention_query", "attention_key", "attention_value"),
            *hidden("attention_out"),  # [batch, seq, heads · value_dim]
        )
        rows = TableRows(tuple(params), activations)
        if self.gate != "none":
            rows += self._gate_rows(fsdp)
        return rows

    def _gate_rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the gate, which is split like the heads."""
        params: list[ParamRow] = [("attention/g_proj/kernel", P(fsdp, "tensor"))]
        if self.gate_bias:
            params.append(("attention/g_proj/bias", P("tensor")))
        return TableRows(tuple(params), hidden("attention_gate"))

    def _norm_rows(self) -> list[ParamRow]:
        """Return the rows of the norms of queries and keys."""
        if self.qk_norm_kind is None:
            return []
        reason = replicate("one scale of head_dim for all heads of a layer")
        if self.qk_norm == "heads":
            reason = replicate("a few KiB: one scale of head_dim for each head")
        if self.qk_norm == "full":
            reason = replicate("one vector of a layer, and a norm over all heads")
        leaves = norm_leaves(self.qk_norm_kind)
        return [(f"attention/(q|k)_norm/{leaf}", reason) for leaf in leaves]

    def build(self, sizes: Sizes, angles: int, rngs: nnx.Rngs) -> "Attention":
        """Build the module of a resolved spec.

        `angles` is the number of its angles in `LayerInputs.angles`.
        """
        return Attention(self, sizes, angles, rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query attention of a resolved spec."""

    def __init__(self, spec: AttentionSpec, sizes: Sizes, angles: int, *, rngs: nnx.Rngs) -> None:
        width = sizes.d_model
        bias = spec.qkv_bias
        out_scale = sizes.out_scale
        self.spec = spec
        self.angles = angles
        self.q_proj = Dense(width, spec.query_width, bias=bias, rngs=rngs)
        self.k_proj = Dense(width, spec.key_width, bias=bias, rngs=rngs)
        self.v_proj = Dense(width, spec.value_width, bias=bias, rngs=rngs)
        self.o_proj = Dense(spec.out_width, width, scale=out_scale, bias=spec.out_bias, rngs=rngs)
        self.g_proj = _gate(spec, width, rngs)
        self.sinks = _sinks(spec)
        self.q_norm = _qk_norm(spec, spec.heads, sizes)
        self.k_norm = _qk_norm(spec, spec.kv_heads, sizes)

    def __call__(
        self, x: Float[Array, "batch seq d"], inputs: LayerInputs
    ) -> Float[Array, "batch seq d"]:
        """Attend from each token to itself and preceding ones of its document, in the window."""
        spec = self.spec
        query, key, value, gate = self._projected(x)
        query = self._clipped(self.q_proj.with_bias(query))
        key = self._clipped(self.k_proj.with_bias(key))
        value = self._clipped(self.v_proj.with_bias(value))
        query = self._positioned(self._heads(query, spec.heads), self.q_norm, inputs)
        query = annotate(self._scaled(query, inputs), "attention_query")
        key = self._positioned(self._heads(key, spec.kv_heads), self.k_norm, inputs)
        key = annotate(key, "attention_key")
        if spec.value_scale != 1:
            value = value * jnp.asarray(spec.value_scale, value.dtype)
        value = annotate(self._heads(value, spec.kv_heads), "attention_value")
        options = AttentionOptions(
            window=spec.window or None,
            scale=spec.scale or None,
            soft_cap=spec.soft_cap or None,
            causal=spec.causal,
            chunk=spec.chunk or None,
        )
        out = annotated_attention(
            query,
            key,
            value,
            "attention_out",
            segments=inputs.segments,
            sinks=self._gathered_sinks(),
            options=options,
        )
        if gate is not None:
            out = self._gated(out, gate)
        y = row_parallel(out, self.o_proj.kernel, "attention_input", spec.value_dim)
        return self.o_proj.with_bias(y)

    def _projected(
        self, x: Float[Array, "batch seq d"]
    ) -> tuple[Array, Array, Array, Array | None]:
        """Return queries, keys, values and the gate, if any, `[batch, seq, hidden]`, without biases."""
        kernels = [self.q_proj.kernel, self.k_proj.kernel, self.v_proj.kernel]
        head = self.spec.head_dim
        if self.spec.value_dim != head or self.spec.gate == "head":
            head = 0  # heads are not of one width
        if self.g_proj is None:
            query, key, value = column_parallel(x, kernels, "attention_input", head)
            return query, key, value, None
        kernels.append(self.g_proj.kernel)
        query, key, value, gate = column_parallel(x, kernels, "attention_input", head)
        return query, key, value, gate

    def _scaled(
        self, query: Float[Array, "batch seq heads dim"], inputs: LayerInputs
    ) -> Float[Array, "batch seq heads dim"]:
        """Multiply queries by the factors of their positions, if there are any."""
        if self.spec.temperature is None:
            return query
        assert inputs.positions is not None, "the decoder adds them"
        factors = self.spec.temperature.factors(jnp.asarray(inputs.positions))
        return (query * factors[:, :, None, None]).astype(query.dtype)

    def _gathered_sinks(self) -> Float[Array, "heads"] | None:
        """Return the sinks of all heads, if there are any."""
        if self.sinks is None:
            return None
        placed = placement_of(self.sinks.get_metadata("path", None))
        return gathered(self.sinks[...], placed)

    def _gated(
        self, out: Float[Array, "batch seq hidden"], gate: Float[Array, "batch seq gates"]
    ) -> Float[Array, "batch seq hidden"]:
        """Multiply the output by the activated gate, computed in float32."""
        assert self.g_proj is not None
        gate = annotate(self.g_proj.with_bias(gate), "attention_gate")
        factor = GATES[self.spec.gate_activation](gate.astype(jnp.float32))
        factor = factor.astype(out.dtype)
        if self.spec.gate == "channel":
            return out * factor
        heads = self._heads(out, self.spec.heads)
        return (heads * factor[..., None]).reshape(out.shape)

    def _clipped(self, y: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq hidden"]:
        """Limit absolute values, if there is a limit."""
        limit = self.spec.clip_qkv
        if not limit:
            return y
        return jnp.clip(y, -limit, limit)

    def _heads(
        self, y: Float[Array, "batch seq hidden"], count: int
    ) -> Float[Array, "batch seq heads dim"]:
        """Return separate heads."""
        batch, seq, _ = y.shape
        return y.reshape(batch, seq, count, -1)

    def _positioned(
        self,
        heads: Float[Array, "batch seq heads dim"],
        norm: RMSNorm | LayerNorm | None,
        inputs: LayerInputs,
    ) -> Float[Array, "batch seq heads dim"]:
        """Return heads normalised by the norm, if any, and rotated, in this order or the other."""
        if self.spec.qk_norm_after:
            return self._normed(self._rotated(heads, inputs), norm)
        return self._rotated(self._normed(heads, norm), inputs)

    def _normed(
        self, heads: Float[Array, "batch seq heads dim"], norm: RMSNorm | LayerNorm | None
    ) -> Float[Array, "batch seq heads dim"]:
        """Normalise each head, or all heads together."""
        if norm is None:
            return heads
        if self.spec.qk_norm != "full":
            return norm(heads)
        together = heads.reshape(*heads.shape[:2], -1)
        return norm(together).reshape(heads.shape)

    def _rotated(
        self, heads: Float[Array, "batch seq heads dim"], inputs: LayerInputs
    ) -> Float[Array, "batch seq heads dim"]:
        """Rotate heads by the positions of their tokens, if they have some."""
        if self.spec.rotary is None:
            return heads
        return rotate(heads, inputs.angles[self.angles], self.spec.rotary.interleaved)


def _gate(spec: AttentionSpec, width: int, rngs: nnx.Rngs) -> Dense | None:
    """Return the projection into the gate, if there is one."""
    if spec.gate == "none":
        return None
    return Dense(width, spec.gate_width, bias=spec.gate_bias, rngs=rngs)


def _sinks(spec: AttentionSpec) -> nnx.Param | None:
    """Return the sinks, 0 at first, if there are any."""
    if not spec.sinks:
        return None
    return nnx.Param(jnp.zeros((spec.heads,), jnp.float32), gathered_by_layer=True)


def _qk_norm(spec: AttentionSpec, heads: int, sizes: Sizes) -> RMSNorm | LayerNorm | None:
    """Return the norm of queries or keys with so many heads, if there is one."""
    width = spec.head_dim
    if spec.qk_norm == "none":
        return None
    if spec.qk_norm == "heads":
        return make_norm((heads, width), sizes, spec.qk_norm_kind)
    if spec.qk_norm == "full":
        width *= heads
    return make_norm(width, sizes, spec.qk_norm_kind)
