"""Parallel plans of three configs of transformers 5.23, and a Flax port with the names of PyTorch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd.sharding.flax_metadata import flatten_module

ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
DENSE = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
EXPERT_PLAN = {
    "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
    "layers.*.mlp.experts.down_proj": "grouped_gemm",
    "layers.*.mlp.experts": "ep_dispatch_experts",
}
QK_NORMS = {
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
}


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The attributes of a config of transformers that a table is made of."""

    base_model_tp_plan: Any
    base_model_ep_plan: Any = None


LLAMA = PlanConfig(ATTENTION | DENSE)
MIXTRAL = PlanConfig(ATTENTION | EXPERTS, EXPERT_PLAN)
QWEN3_MOE = PlanConfig(ATTENTION | QK_NORMS | EXPERTS | DENSE, EXPERT_PLAN)

VOCAB, WIDTH, HEADS, HIDDEN, EXPERT_COUNT = 32, 16, 4, 32, 4


class SelfAttention(nnx.Module):
    """Causal attention, optionally with norms of queries and keys."""

    def __init__(self, rngs: nnx.Rngs, qk_norms: bool, bias: bool):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nnx.Linear(WIDTH, WIDTH, use_bias=bias, rngs=rngs))
        if qk_norms:
            self.q_norm = nnx.RMSNorm(WIDTH // HEADS, rngs=rngs)
            self.k_norm = nnx.RMSNorm(WIDTH // HEADS, rngs=rngs)
        self.qk_norms = qk_norms

    def __call__(self, x):
        heads = (*x.shape[:-1], HEADS, -1)
        q, k, v = (getattr(self, f"{name}_proj")(x).reshape(heads) for name in "qkv")
        if self.qk_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
    """A gated MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    """Gated MLPs in three arrays, [experts, in, out]."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.initializers.lecun_normal(batch_axis=0)
        shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN)}
        shapes["down_proj"] = (HIDDEN, WIDTH)
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(make(rngs.params(), (EXPERT_COUNT, *shape))))

    def __call__(self, x):
        hidden = nnx.silu(jnp.einsum("bsd,edf->bsef", x, self.gate_proj[...]))
        hidden *= jnp.einsum("bsd,edf->bsef", x, self.up_proj[...])
        return jnp.einsum("bsef,efd->bsed", hidden, self.down_proj[...])


class MoE(nnx.Module):
    """All experts, weighted by a softmax."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate = nnx.Linear(WIDTH, EXPERT_COUNT, use_bias=False, rngs=rngs)
        self.experts = Experts(rngs)

    def __call__(self, x):
        return jnp.einsum("bse,bsed->bsd", jax.nn.softmax(self.gate(x)), self.experts(x))


class Layer(nnx.Module):
    """A layer with norms before its parts."""

    def __init__(self, rngs: nnx.Rngs, moe: bool, qk_norms: bool, bias: bool):
        self.input_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.self_attn = SelfAttention(rngs, qk_norms, bias)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        kind = MoE if moe else MLP
        self.mlp = kind(rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Port(nnx.Module):
    """A decoder without a framework's names or annotations."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        layers: int = 2,
        moe: bool = False,
        qk_norms: bool = False,
        bias: bool = False,
    ):
        self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, moe, qk_norms, bias) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def shapes_of(**options: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Path → shape of the port's parameters."""
    return flatten_module(nnx.state(nnx.eval_shape(lambda: Port(nnx.Rngs(0), **options))))


def moe_names(name: str) -> Any:
    """Paths of the port with experts in each layer, its fused projections as two kernels."""
    if name in DENSE:
        return None
    if name.endswith("gate_up_proj"):
        return [name.replace("gate_up", part) for part in ("gate", "up")]
    return name
