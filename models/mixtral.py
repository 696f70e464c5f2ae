"""Mixtral and similar models: a Llama with mixtures of experts for MLPs.

Source: Jiang et al., arXiv:2401.04088.

```python
config = dataclasses.replace(PRESETS["mixtral-8x7b"], layers=4)
model = spmd.from_nnx(config.build)
```

The model returns `spmd.model_interface.model.Outputs`: logits, auxiliary losses, metrics. The
router is a config field, so Switch, GShard, Qwen and DeepSeek-V3 are presets. Not implemented: the
encoders of Switch and GShard, the biases of Qwen's attention and the gate of its shared expert,
DeepSeek's latent attention and multi-token prediction.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd.errors import Problem, check_fields
from spmd.layers.expert_layout import ExpertBias, ExpertKernel
from spmd.layers.moe import Activation, mixture_of_experts
from spmd.layers.ring_attention import Segments
from spmd.layers.router import RouterConfig, Valid, balanced_bias, jittered, route
from spmd.model_interface.model import Outputs
from spmd.models.layers import RMSNorm, gated, make_layers, run_layers, scan_layers_with_outputs
from spmd.models.linear import Head, biased, dense
from spmd.models.llama import MLP, Attention, Block, Embedding, LlamaConfig
from spmd.models.rope import Angles
from spmd.plan.annotate import annotate, constrain_like
from spmd.plan.fsdp import placement_of


@dataclasses.dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Shape of a mixture of experts; d_ff is the hidden width of one expert."""

    router: RouterConfig = RouterConfig()
    """Routing and dispatch of tokens to experts."""
    shared_d_ff: int = 0
    """Hidden width of the shared expert, used by every token; 0: none."""
    dense_layers: int = 0
    """Number of first layers with an MLP instead of experts."""
    dense_d_ff: int = 0
    """Hidden width of these MLPs."""
    gated: bool = True
    """True: experts are SwiGLU, with three kernels; False: ReLU, with two."""
    init_scale: float = 1.0
    """Factor of the initial variance of router and experts (Switch: 0.1)."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        rules = dict.fromkeys(("shared_d_ff", "dense_layers", "dense_d_ff"), "at least 0")
        rules["init_scale"] = "above 0"
        problems = super().problems() + check_fields(self, rules, prefix="model.")
        if self.dense_layers >= self.layers >= 1:
            problem = Problem(
                "model.dense_layers",
                "leaves no layer with experts",
                f"dense_layers {self.dense_layers} ≥ layers {self.layers}",
                "fewer of them",
            )
            problems.append(problem)
        if (self.dense_layers > 0) != (self.dense_d_ff > 0):
            problem = Problem(
                "model.dense_d_ff",
                "goes with dense_layers",
                f"dense_layers {self.dense_layers}, dense_d_ff {self.dense_d_ff}",
                "give both or neither",
            )
            problems.append(problem)
        return problems

    def _params(self, experts: int) -> int:
        """Return the parameters with `experts` experts per layer, without norms and embedding."""
        width = self.d_model
        attention = 2 * width * (self.attention_width + self.kv_width)
        kernels = 3 if self.gated else 2
        expert = kernels * width * self.d_ff
        router = width * self.router.experts
        shared = 3 * width * self.shared_d_ff
        mixture = experts * expert + router + shared
        mlp = 3 * width * self.dense_d_ff
        mixtures = (self.layers - self.dense_layers) * mixture
        head = width * self.vocab
        return self.layers * attention + self.dense_layers * mlp + mixtures + head

    @property
    def matmul_params(self) -> int:
        """Parameters in the matmuls of one token, with its chosen experts only."""
        return self._params(self.router.top_k)

    @property
    def total_params(self) -> int:
        """All parameters."""
        params = self._params(self.router.experts)
        return params + self._rest

    @property
    def active_params(self) -> int:
        """Parameters used by one token, with its chosen experts only."""
        params = self._params(self.router.top_k)
        return params + self._rest

    @property
    def _rest(self) -> int:
        """Norms, biases, and the embedding if it is not tied."""
        attention = 0
        if self.qkv_bias:
            attention += self.attention_width + 2 * self.kv_width
        if self.qk_norm:
            attention += 2 * self.head_width
        norms = (2 * self.layers + 1) * self.d_model
        total = self.layers * attention + norms
        if self.router.logit_bias:
            total += (self.layers - self.dense_layers) * self.router.experts
        if not self.tied:
            total += self.vocab * self.d_model
        return total

    def build(self, rngs: nnx.Rngs) -> "Mixtral":
        """Build the model."""
        return Mixtral(self, rngs=rngs)


SWITCH = RouterConfig(
    experts=8, top_k=1, normalise=False, jitter=0.01, balance=0.01, dispatch="capacity"
)
"""Switch Transformers, section 2: one expert, capacity factor 1.25, α = 0.01."""
GSHARD = RouterConfig(
    experts=8,
    top_k=2,
    random_second=True,
    balance_form="gshard",
    dispatch="capacity",
    capacity_factor=1.0,
)
"""GShard, section 2.2: two experts, the second one at random, capacity 2N / E tokens."""
DEEPSEEK_V3 = RouterConfig(
    experts=256,
    top_k=8,
    score="sigmoid",
    groups=8,
    top_groups=4,
    scale=2.5,
    bias_rate=1e-3,
    balance=1e-4,
    balance_over="example",
)
"""DeepSeek-V3, section 2.1.2 and 4.2: balanced by biases, with a small loss for each sequence."""

_MIXTRAL_ROUTER = RouterConfig(balance=0.02)

PRESETS = {
    "test": MixtralConfig(
        vocab=64,
        d_model=32,
        layers=2,
        heads=4,
        kv_heads=2,
        d_ff=16,
        router=RouterConfig(experts=8, z_loss=1e-3),
    ),
    "mixtral-tiny": MixtralConfig(
        vocab=256,
        d_model=192,
        layers=4,
        heads=6,
        kv_heads=2,
        d_ff=256,
        unroll=4,
        router=RouterConfig(experts=8, dispatch="capacity", z_loss=1e-3),
    ),
    "mixtral-8x7b": MixtralConfig(
        vocab=32_000,
        d_model=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        d_ff=14_336,
        rope_theta=1e6,
        router=_MIXTRAL_ROUTER,
    ),
    "mixtral-8x22b": MixtralConfig(
        vocab=32_000,
        d_model=6144,
        layers=56,
        heads=48,
        kv_heads=8,
        d_ff=16_384,
        rope_theta=1e6,
        router=_MIXTRAL_ROUTER,
    ),
    "switch-c": MixtralConfig(
        vocab=32_128,
        d_model=2080,
        layers=30,
        heads=40,
        kv_heads=40,
        d_ff=6144,
        gated=False,
        init_scale=0.1,
        router=dataclasses.replace(SWITCH, experts=2048),
    ),
    "gshard-600b": MixtralConfig(
        vocab=32_000,
        d_model=1024,
        layers=18,
        heads=16,
        kv_heads=16,
        d_ff=8192,
        gated=False,
        router=dataclasses.replace(GSHARD, experts=2048),
    ),
    "qwen1.5-moe": MixtralConfig(
        vocab=151_936,
        d_model=2048,
        layers=24,
        heads=16,
        kv_heads=16,
        d_ff=1408,
        rope_theta=1e6,
        norm_eps=1e-6,
        shared_d_ff=5632,
        router=RouterConfig(experts=60, top_k=4, normalise=False, balance=0.001),
    ),
    "deepseek-v3": MixtralConfig(
        vocab=129_280,
        d_model=7168,
        layers=61,
        heads=64,
        kv_heads=32,
        d_ff=2048,
        norm_eps=1e-6,
        shared_d_ff=2048,
        dense_layers=3,
        dense_d_ff=18_432,
        router=DEEPSEEK_V3,
    ),
}
"""Published shapes by name, and small ones for tests and the demo.

`switch-c` and `gshard-600b` are decoders with the experts of these models: all 30 layers of the
first, and the 18 layers of the second that have experts. `deepseek-v3` has grouped-query attention
instead of latent attention.
"""


class RouterBias(nnx.Variable):
    """Biases of the choice of experts, updated by load and not by a gradient."""


class Router(nnx.Module):
    """Linear router in float32."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config.router
        width = config.d_model
        experts = config.router.experts
        init = nnx.initializers.normal(math.sqrt(config.init_scale / width))
        kernel = init(rngs.params(), (width, experts), jnp.float32)
        self.kernel = nnx.Param(kernel, gathered_by_layer=True, sent_exactly=True, matrix="io")
        has_bias = config.router.has_choice_bias
        self.bias = RouterBias(jnp.zeros((experts,), jnp.float32)) if has_bias else None
        has_logit_bias = config.router.logit_bias
        self.logit_bias = _zeros(experts, sent_exactly=True) if has_logit_bias else None

    def __call__(
        self, x: Float[Array, "batch seq d"], key: Array | None
    ) -> Float[Array, "batch seq expert"]:
        """Return logits; with a key and jitter, the input has noise."""
        x = x.astype(jnp.float32)
        jitter = self.config.jitter
        if key is not None and jitter:
            x = jittered(x, jitter, key)
        logits = dense(x, self.kernel, precision="highest")
        if self.logit_bias is not None:
            logits = biased(logits, self.logit_bias)
        return annotate(logits, "router_logits")


def _zeros(*shape: int, **metadata: Any) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32), gathered_by_layer=True, **metadata)


class ExpertDense(nnx.Module):
    """Linear layer of each expert.

    Its `kernel` is `[expert, in, out]`, initialised with variance scale² / in; its optional `bias`
    is `[expert, out]`, initialised with 0.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        scale: float = 1.0,
        bias: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        init = nnx.initializers.normal(scale * inputs**-0.5)
        table = init(rngs.params(), (experts, inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(table, gathered_by_layer=True, linear=True, matrix="bio")
        self.bias = _zeros(experts, outputs) if bias else None

    def placed(self) -> ExpertKernel:
        """Return the kernels and biases with their placement under the plan in scope."""
        kernel = self.kernel[...]
        bias = None
        if self.bias is not None:
            placed = placement_of(self.bias.get_metadata("path", None))
            bias = ExpertBias(self.bias[...], placed)
        path = self.kernel.get_metadata("path", None)
        return ExpertKernel(kernel, placement_of(path), bias)


class Experts(nnx.Module):
    """The MLPs of all experts."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs) -> None:
        experts = config.router.experts
        width = config.d_model
        hidden = config.d_ff
        scale = math.sqrt(config.init_scale)
        out_scale = scale * (2 * config.layers) ** -0.5
        into = functools.partial(ExpertDense, experts, width, hidden, scale=scale)
        self.gate_proj = into(rngs=rngs) if config.gated else None
        self.up_proj = into(rngs=rngs)
        self.down_proj = ExpertDense(experts, hidden, width, scale=out_scale, rngs=rngs)


class MixtureOfExperts(nnx.Module):
    """Router, experts, and a shared expert, if any."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config.router
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared = _shared_expert(config, rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], key: Array | None, valid: Valid = None
    ) -> tuple[Float[Array, "batch seq d"], dict[str, Array]]:
        """Return the experts' output, and the router's losses, load and dropped fraction."""
        noise, second = None, None
        if key is not None:
            noise, second = jax.random.split(key)
        tokens = annotate(constrain_like(x, "residual"), "expert_tokens")
        logits = self.router(tokens, noise)
        bias = None
        if self.router.bias is not None:
            bias = self.router.bias[...]
        routing, report = route(logits, self.config, key=second, bias=bias, valid=valid)
        experts = self.experts
        into = []
        activation: Activation = jax.nn.relu
        if experts.gate_proj is not None:
            into.append(experts.gate_proj.placed())
            activation = gated
        into.append(experts.up_proj.placed())
        out = experts.down_proj.placed()
        y, counts = mixture_of_experts(tokens, routing, self.config, into, out, activation)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, {
            "balance_loss": report.balance,
            "z_loss": report.z_loss,
            "load": report.load,
            "dropped": counts["dropped"] / jnp.maximum(report.load.sum(), 1),
            "extra_passes": counts["extra_passes"],
        }


def _shared_expert(config: MixtralConfig, rngs: nnx.Rngs) -> MLP | None:
    if not config.shared_d_ff:
        return None
    shape = dataclasses.replace(config, d_ff=config.shared_d_ff)
    return MLP(shape, rngs=rngs)


class ExpertBlock(nnx.Module):
    """Decoder layer: attention and a mixture of experts."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs) -> None:
        width = config.d_model
        eps = config.norm_eps
        self.attention_norm = RMSNorm(width, eps=eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(width, eps=eps)
        self.moe = MixtureOfExperts(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "batch seq d"],
        key: Array | None,
        angles: Angles,
        segments: Segments = None,
        valid: Valid = None,
    ) -> tuple[Float[Array, "batch seq d"], dict[str, Array]]:
        """Return the residual stream after this layer, and its router's report."""
        x = annotate(x, "residual")
        y = self.attention(self.attention_norm(x), angles, segments)
        x = annotate(x + y, "residual")
        y, report = self.moe(self.mlp_norm(x), key, valid)
        return annotate(x + y, "residual"), report


class Mixtral(nnx.Module):
    """Causal language model from tokens to next-token logits, losses and metrics of routers."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs) -> None:
        width = config.d_model
        self.config = config
        self.deterministic = False  # set by Flax's `train()` and `eval()`
        self.embed = Embedding(config.vocab, width, rngs=rngs)
        self.dense_layers = _make_dense_layers(config, rngs)
        self.layers = make_layers(
            lambda rngs: ExpertBlock(config, rngs=rngs),
            config.layers - config.dense_layers,
            rngs.params(),
            stacked=config.stacked,
        )
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.lm_head = None if config.tied else Head(width, config.vocab, rngs=rngs)
        self.noise = nnx.Rngs(rngs.params()) if config.router.is_random else None

    @property
    def position_aware(self) -> bool:
        """True without capacities and random routing: these depend on a token's index."""
        router = self.config.router
        return router.dispatch == "dropless" and not router.is_random

    @property
    def supports_kv_cache(self) -> bool:
        """True unless experts choose tokens. With capacities, a decoded token is never dropped."""
        return self.config.router.choice == "token"

    def __call__(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None, valid: Valid = None
    ) -> Outputs:
        """Return next-token logits, losses and metrics.

        `segments` is the document of each token of a packed sequence, `valid` the mask of tokens
        that are no padding. The array `expert_load`, `[layer, expert]`, is the number of tokens
        that chose an expert, relative to even load. Losses are sums over layers, as are the metrics
        `idle_experts` (those without a token) and `extra_passes`. Means over layers are
        `load_spread`, the load of the busiest expert, and `dropped`, the fraction of dropped
        choices.
        """
        x, context = self.embed_inputs(tokens, segments, valid)
        x, values = self.apply_layers(x, context)
        return self.compute_outputs(x, values)

    def embed_inputs(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None, valid: Valid = None
    ) -> tuple[Array, Any]:
        """Return the residual stream before the layers with experts, and their other inputs."""
        x = annotate(self.embed(tokens), "residual")
        angles = self.config.angles(tokens.shape[1])
        if self.dense_layers is not None:
            x = run_layers(self.dense_layers, x, angles, segments, unroll=self.config.unroll)
        return x, (angles, segments, valid)

    def apply_layers(
        self, x: Float[Array, "batch seq d"], context: Any
    ) -> tuple[Array, dict[str, Array]]:
        """Return the residual stream after the layers with experts, and reports of routers."""
        config = self.config
        training = not self.deterministic
        keys = None
        if self.noise is not None and training:
            count = config.layers - config.dense_layers
            keys = jax.random.split(self.noise(), count)
        x, reports = scan_layers_with_outputs(self.layers, x, keys, *context, unroll=config.unroll)
        if config.router.bias_rate and training:
            self._move_biases(reports["load"])
        return x, reports

    def compute_outputs(self, x: Float[Array, "batch seq d"], values: dict[str, Array]) -> Outputs:
        """Return the logits, and the routers' losses and metrics."""
        router = self.config.router
        x = self.norm(x)
        logits = self.lm_head(x) if self.lm_head else self.embed.attend(x)
        load = values["load"]
        even = load.mean(axis=-1, keepdims=True)
        even = jnp.maximum(even, 1 / router.experts)  # without tokens, load is 0
        load = load / even
        metrics = {
            "load_spread": load.max(axis=-1).mean(),
            "idle_experts": (load == 0).sum(dtype=jnp.float32),
            "extra_passes": values["extra_passes"].sum(),
        }
        if router.dispatch == "capacity":
            metrics["dropped"] = values["dropped"].mean()
        losses = {}
        if router.balance:
            losses["balance_loss"] = values["balance_loss"].sum()
        if router.z_loss:
            losses["z_loss"] = values["z_loss"].sum()
        return Outputs(logits, losses, metrics, {"expert_load": load}, of_all_devices=True)

    def _move_biases(self, load: Float[Array, "layer expert"]) -> None:
        """Update the routers' biases, once for each (micro)batch."""
        rate = self.config.router.bias_rate
        if isinstance(self.layers, nnx.List):
            for layer, its_load in zip(self.layers, load, strict=True):
                bias = layer.moe.router.bias
                bias[...] = balanced_bias(bias[...], its_load, rate)
        else:
            bias = self.layers.moe.router.bias
            bias[...] = balanced_bias(bias[...], load, rate)


def _make_dense_layers(config: MixtralConfig, rngs: nnx.Rngs) -> nnx.Module | None:
    """Return the first layers, with an MLP instead of experts; None if there are none."""
    if not config.dense_layers:
        return None
    shape = dataclasses.replace(config, d_ff=config.dense_d_ff)
    return make_layers(
        lambda rngs: Block(shape, rngs=rngs),
        config.dense_layers,
        rngs.params(),
        stacked=config.stacked,
    )
