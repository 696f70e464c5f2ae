"""Feed-forward parts of a layer with one MLP for all tokens."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields, did_you_mean
from spmd.layers.fusion import unfused_gradient
from spmd.models.decoder.activations import GATED, LEARNED, UNGATED, XIELU_INIT
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows, hidden
from spmd.models.decoder.linear import Dense, column_parallel, row_parallel
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate
from spmd.sharding.rules import replicate


@dataclasses.dataclass(frozen=True)
class MLPSpec:
    """MLP of one kind of layer; a field of 0 has the network's value."""

    d_ff: int = 0
    """Hidden width."""
    activation: str = "silu"
    """Activation: silu, gelu_tanh, … (`spmd.models.decoder.activations`)."""
    gated: bool = True
    """Multiply the activation of a gate with hidden units: three kernels (arXiv:2002.05202);
    otherwise two."""
    bias: bool = False
    """Add biases to hidden units and output."""
    gate_scale: float = 1.0
    """Factor of the gate before its activation (`mlp_multipliers` of Falcon-H1)."""
    out_scale: float = 1.0
    """Factor of the output (`mlp_multipliers`)."""

    name = "mlp"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "MLPSpec":
        """Return the spec with the network's values where it has none of its own."""
        return dataclasses.replace(self, d_ff=self.d_ff or sizes.d_ff)

    def problems(self, where: str) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        rules = {"d_ff": "at least 1", "gate_scale": "above 0", "out_scale": "above 0"}
        problems = check_fields(self, rules, prefix=where)
        if not self.gated and self.gate_scale != 1:
            what = "acts on nothing without a gate"
            problems.append(Problem(f"{where}gate_scale", what, fix="1, or gated=True"))
        return problems + activation_problems(self.activation, self.gated, where)

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        return (2 + self.gated) * sizes.d_model * self.d_ff

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of biases and of an activation's scalars."""
        count = 0
        if self.bias:
            count += (1 + self.gated) * self.d_ff + sizes.d_model
        if self.activation in LEARNED:
            count += len(XIELU_INIT)
        return count

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        rows = mlp_rows("mlp", fsdp, gated=self.gated, bias=self.bias)
        if self.activation in LEARNED:
            rows += TableRows((("mlp/alpha_(p|n)", replicate("two scalars of a layer")),))
        return rows

    def build(self, sizes: Sizes, rngs: nnx.Rngs) -> "MLP":
        """Build the module of a resolved spec."""
        return MLP(self, sizes, rngs=rngs)


def activation_problems(activation: str, gated: bool, where: str) -> list[Problem]:
    """Return the problem of an unknown activation, with a gate or without one."""
    known = [*UNGATED, *LEARNED]
    if gated:
        known = [*GATED]
    if activation in known:
        return []
    what = f"{activation!r} does not exist with gated={gated}"
    return [Problem(f"{where}activation", what, fix=did_you_mean(activation, known))]


def mlp_rows(name: str, fsdp: Axes, *, gated: bool, bias: bool) -> TableRows:
    """Return the rows of the rule table for MLPs of a name, a pattern."""
    into = "up_proj"
    marks = ["mlp_up", "mlp_hidden"]
    if gated:
        into = "(gate|up)_proj"
        marks = ["mlp_gate", *marks]
    params: list[ParamRow] = [
        (f"{name}/{into}/kernel", P(fsdp, "tensor")),  # [d, d_ff]
        (f"{name}/down_proj/kernel", P("tensor", fsdp)),  # [d_ff, d]
    ]
    if bias:
        reason = replicate("added once, where rows are summed over tensor")
        params += [(f"{name}/{into}/bias", P("tensor")), (f"{name}/down_proj/bias", reason)]
    return TableRows(tuple(params), (("mlp_input", TOKENS), *hidden(*marks)))


class MLP(nnx.Module):
    """`down(f(gate(x)) · up(x))`, or `down(f(up(x)))`, of a resolved spec."""

    def __init__(self, spec: MLPSpec, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        width = sizes.d_model
        bias = spec.bias
        self.spec = spec
        self.gate_proj = Dense(width, spec.d_ff, bias=bias, rngs=rngs) if spec.gated else None
        self.up_proj = Dense(width, spec.d_ff, bias=bias, rngs=rngs)
        self.down_proj = Dense(spec.d_ff, width, scale=sizes.out_scale, bias=bias, rngs=rngs)
        if spec.activation in LEARNED:
            for name, value in XIELU_INIT.items():
                scalar = jnp.full((1,), value, jnp.float32)
                setattr(self, name, nnx.Param(scalar, cast_by_layer=True))

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """Apply the MLP."""
        if self.gate_proj is None:
            hidden_units = self._activated(x)
        else:
            hidden_units = self._gated(x, self.gate_proj)
        hidden_units = annotate(hidden_units, "mlp_hidden")
        y = row_parallel(hidden_units, self.down_proj.kernel, "mlp_input")
        return _scaled(self.down_proj.with_bias(y), self.spec.out_scale)

    def _gated(self, x: Array, gate_proj: Dense) -> Float[Array, "batch seq hidden"]:
        kernels = (gate_proj.kernel, self.up_proj.kernel)
        gate, up = column_parallel(unfused_gradient(x), kernels, "mlp_input")
        gate = _scaled(gate_proj.with_bias(gate), self.spec.gate_scale)
        gate = annotate(gate, "mlp_gate")
        up = annotate(self.up_proj.with_bias(up), "mlp_up")
        return GATED[self.spec.activation](gate, up)

    def _activated(self, x: Array) -> Float[Array, "batch seq hidden"]:
        (up,) = column_parallel(x, (self.up_proj.kernel,), "mlp_input")
        up = annotate(self.up_proj.with_bias(up), "mlp_up")
        activation = self.spec.activation
        if activation in LEARNED:
            return LEARNED[activation](up, self.alpha_p[...], self.alpha_n[...])
        return UNGATED[activation](up)


def _scaled(x: Array, factor: float) -> Array:
    """Multiply by a factor, if it is not 1."""
    if factor == 1:
        return x
    return x * factor
