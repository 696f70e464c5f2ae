"""Feed-forward parts of a layer with experts: router, experts and a shared expert."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields
from spmd.layers.expert_layout import ExpertBias, ExpertKernel
from spmd.layers.moe import Activation, mixture_of_experts
from spmd.layers.router import RouterConfig, Valid, jittered, route
from spmd.models.decoder.activations import GATED, UNGATED
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows
from spmd.models.decoder.linear import biased, dense
from spmd.models.decoder.mlp import MLP, MLPSpec, activation_problems, mlp_rows
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate, constrain_like
from spmd.plan.fsdp import placement_of
from spmd.sharding.mesh import BATCH_AXES, GATHERED_AXES


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """Mixture of experts of one kind of layer; a field of 0 has the network's value.

    The routing is the network's (`DecoderConfig.router`).
    """

    d_ff: int = 0
    """Hidden width of an expert."""
    activation: str = "silu"
    """Activation of experts, as in `MLPSpec`."""
    gated: bool = True
    """True: experts have three kernels; False: two."""
    bias: bool = False
    """Add biases to hidden units and outputs of experts."""
    shared_d_ff: int = 0
    """Hidden width of the shared expert, used by every token, with the activation and kernels of
    the others; 0: none."""
    shared_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a linear map from a token to one number
    (`shared_expert_gate` of Qwen 2 MoE, arXiv:2407.10671)."""
    shared_scale: float = 1.0
    """Factor of the shared expert's output (Cohere 2 MoE: ½ with
    `shared_expert_combination_strategy` "average", whose router has a scale of ½ too)."""
    init_scale: float = 1.0
    """Factor of the initial variance of router and experts (Switch: 0.1)."""

    name = "moe"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "ExpertsSpec":
        """Return the spec with the network's values where it has none of its own."""
        return dataclasses.replace(self, d_ff=self.d_ff or sizes.d_ff)

    def problems(self, where: str) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        rules = {"d_ff": "at least 1", "shared_d_ff": "at least 0", "init_scale": "above 0"}
        rules["shared_scale"] = "above 0 and finite"
        problems = check_fields(self, rules, prefix=where)
        unused = {}
        if not self.shared_d_ff:
            unused = {"shared_gate": self.shared_gate, "shared_scale": self.shared_scale != 1}
        for name, is_given in unused.items():
            if is_given:
                what = "acts on nothing: there is no shared expert"
                default = getattr(ExpertsSpec, name)
                fix = f"{default}, or shared_d_ff"
                problems.append(Problem(f"{where}{name}", what, fix=fix))
        return problems + activation_problems(self.activation, self.gated, where)

    @property
    def shared(self) -> MLPSpec | None:
        """Spec of the shared expert; None without one."""
        if not self.shared_d_ff:
            return None
        return MLPSpec(self.shared_d_ff, self.activation, self.gated)

    def matmul_params(self, sizes: Sizes, experts: int, router: RouterConfig) -> int:
        """Return the number of parameters in matmuls, with `experts` of the experts."""
        width = sizes.d_model
        expert = (2 + self.gated) * width * self.d_ff
        count = experts * expert + width * router.experts
        if self.shared is not None:
            count += self.shared.matmul_params(sizes)
        if self.shared_gate:
            count += width
        return count

    def other_params(self, sizes: Sizes, router: RouterConfig) -> int:
        """Return the number of biases of the router and all experts."""
        count = 0
        if router.logit_bias:
            count += router.experts
        if self.bias:
            of_expert = (1 + self.gated) * self.d_ff + sizes.d_model
            count += router.experts * of_expert
        return count

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table.

        The expert layer is manual over the mesh (`spmd.layers.moe`), so the table has the sharding
        of its input and output tokens and of stored kernels.
        """
        into = "experts/(gate|up)_proj/kernel"
        if not self.gated:
            into = "experts/up_proj/kernel"
        out = P("expert", ("tensor", *GATHERED_AXES))
        params: list[ParamRow] = [
            ("router/kernel", P(fsdp)),  # [d, expert]
            (into, P("expert", GATHERED_AXES, "tensor")),  # [expert, d, d_ff]
            ("experts/down_proj/kernel", out),  # [expert, d_ff, d]
        ]
        if self.bias:
            params.append((into.replace("kernel", "bias"), P("expert", "tensor")))
            params.append(("experts/down_proj/bias", P("expert")))
        activations = (
            ("router_logits", TOKENS),  # [batch, seq, expert]
            ("expert_tokens", TOKENS),  # [batch, seq, d]
            ("expert_hidden", P(BATCH_AXES)),  # rows of tokens, inside the manual program
        )
        rows = TableRows(tuple(params), activations)
        if self.shared is not None:
            rows += mlp_rows("shared", fsdp, gated=self.gated, bias=False)
        if self.shared_gate:
            rows += TableRows((("shared_gate/kernel", P(fsdp)),))  # [d, 1]
        return rows

    def build(self, sizes: Sizes, router: RouterConfig, rngs: nnx.Rngs) -> "MixtureOfExperts":
        """Build the module of a resolved spec."""
        return MixtureOfExperts(self, sizes, router, rngs=rngs)


class RouterBias(nnx.Variable):
    """Biases of the choice of experts, updated by load and not by a gradient."""


class Router(nnx.Module):
    """Linear router in float32."""

    def __init__(
        self, spec: ExpertsSpec, width: int, router: RouterConfig, *, rngs: nnx.Rngs
    ) -> None:
        self.config = router
        experts = router.experts
        init = nnx.initializers.normal(math.sqrt(spec.init_scale / width))
        kernel = init(rngs.params(), (width, experts), jnp.float32)
        self.kernel = nnx.Param(kernel, gathered_by_layer=True, sent_exactly=True, matrix="io")
        bias = None
        if router.has_choice_bias:
            bias = RouterBias(jnp.zeros((experts,), jnp.float32))
        self.bias = bias
        logit_bias = None
        if router.logit_bias:
            logit_bias = _zeros(experts, sent_exactly=True)
        self.logit_bias = logit_bias

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


class SharedGate(nnx.Module):
    """Factor of the shared expert's output for each token, between 0 and 1."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        kernel = nnx.initializers.normal(width**-0.5)(rngs.params(), (width, 1), jnp.float32)
        self.kernel = nnx.Param(kernel, gathered_by_layer=True, sent_exactly=True, matrix="io")

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq 1"]:
        """Return the factors, in the dtype of the tokens."""
        logit = dense(x, self.kernel, dtype=jnp.float32)
        return jax.nn.sigmoid(logit).astype(x.dtype)


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
        self.kernel = nnx.Param(
            table, gathered_by_layer=True, takes_codes=True, linear=True, matrix="bio"
        )
        self.bias = _zeros(experts, outputs) if bias else None

    def placed(self) -> ExpertKernel:
        """Return the kernels and biases with their placement under the plan in scope."""
        kernel = self.kernel.get_value()  # an array, or codes of a frozen one
        bias = None
        if self.bias is not None:
            placed = placement_of(self.bias.get_metadata("path", None))
            bias = ExpertBias(self.bias[...], placed)
        path = self.kernel.get_metadata("path", None)
        return ExpertKernel(kernel, placement_of(path), bias)


class Experts(nnx.Module):
    """The MLPs of all experts."""

    def __init__(self, spec: ExpertsSpec, sizes: Sizes, experts: int, *, rngs: nnx.Rngs) -> None:
        width = sizes.d_model
        hidden = spec.d_ff
        scale = math.sqrt(spec.init_scale)
        out_scale = scale * sizes.out_scale
        bias = spec.bias
        into = functools.partial(ExpertDense, experts, width, hidden, scale=scale, bias=bias)
        gate_proj = None
        if spec.gated:
            gate_proj = into(rngs=rngs)
        self.gate_proj = gate_proj
        self.up_proj = into(rngs=rngs)
        self.down_proj = ExpertDense(experts, hidden, width, scale=out_scale, bias=bias, rngs=rngs)


class MixtureOfExperts(nnx.Module):
    """Router, experts, and a shared expert, if any."""

    def __init__(
        self, spec: ExpertsSpec, sizes: Sizes, router: RouterConfig, *, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        self.config = router
        self.router = Router(spec, sizes.d_model, router, rngs=rngs)
        self.experts = Experts(spec, sizes, router.experts, rngs=rngs)
        shared = None
        if spec.shared is not None:
            shared = MLP(spec.shared, sizes, rngs=rngs)
        self.shared = shared
        shared_gate = None
        if spec.shared_gate:
            shared_gate = SharedGate(sizes.d_model, rngs=rngs)
        self.shared_gate = shared_gate

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
        activation: Activation = UNGATED.get(self.spec.activation)  # type: ignore[assignment]
        if experts.gate_proj is not None:
            into.append(experts.gate_proj.placed())
            activation = GATED[self.spec.activation]
        into.append(experts.up_proj.placed())
        out = experts.down_proj.placed()
        y, counts = mixture_of_experts(tokens, routing, self.config, into, out, activation)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(tokens)
            if self.spec.shared_scale != 1:
                shared = shared * self.spec.shared_scale
            y = y + shared
        return y, {
            "balance_loss": report.balance,
            "z_loss": report.z_loss,
            "load": report.load,
            "dropped": counts["dropped"] / jnp.maximum(report.load.sum(), 1),
            "extra_passes": counts["extra_passes"],
        }
