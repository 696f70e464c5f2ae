"""State-space token mixer of Mamba 2 (arXiv:2405.21060, section 7): a recurrence in place of attention.

```
x ─┬─ gate_proj ────────────────────────────────────────────────▶ gate ─┐
   ├─ x_proj ──▶ convolution ─▶ x  [heads, head_dim] ─┐                  │
   ├─ b_proj ──▶ convolution ─▶ b  [groups, state_dim] ┼─▶ scan ─▶ y ─▶ norm ─▶ out_proj
   ├─ c_proj ──▶ convolution ─▶ c  [groups, state_dim] │
   └─ dt_proj ─▶ softplus(· + dt_bias) ─▶ dt  [heads] ─┘
```

Over `tensor`, heads are split, and with them the groups that they share. Where the groups do not
divide, each device has all b and c: their channels are computed split, and then gathered.

A cache has no axis of tokens: one state for each head, and the last inputs of the convolutions.
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
from spmd.layers.kv_cache import cache_slot, require_one_document, token_mask
from spmd.layers.recurrence import require_whole_sequences, to_float32
from spmd.layers.state_space import state_space_scan, state_space_step
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows, hidden
from spmd.models.decoder.head_params import initial_dt_bias, initial_rates, of_heads, whole
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.linear import Dense, column_parallel, row_parallel
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.norms import GatedRMSNorm
from spmd.models.decoder.short_convolution import ShortConvolution, convolve_each
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate, constrain_like, placement
from spmd.sharding.mesh import shards_of
from spmd.sharding.rules import replicate

_NAME = "state-space mixer"
_INPUT = "state_space_input"
_GROUPS = "state_space_groups"
_PROJECTIONS = ("gate", "x", "b", "c", "dt")
_CONVOLVED = ("x", "b", "c")


@dataclasses.dataclass(frozen=True)
class StateSpaceSpec(MixerSpec):
    """State-space mixer of one kind of layer; a field of 0 has the network's value."""

    heads: int = 0
    """Heads, each with a state (`num_heads`, `mamba_n_heads`)."""
    head_dim: int = 0
    """Width of a head (`head_dim`, `mamba_d_head`)."""
    groups: int = 1
    """Groups of heads with the same b and c (`n_groups`); divides heads."""
    state_dim: int = 128
    """Width of the state of each channel (`state_size`, `ssm_state_size`, `mamba_d_state`)."""
    conv_width: int = 4
    """Tokens that the convolutions read (`conv_kernel`, `mamba_d_conv`)."""
    conv_bias: bool = True
    """Add biases to the convolutions (`use_conv_bias`, `mamba_conv_bias`)."""
    bias: bool = False
    """Add biases to all projections (`use_bias`, `mamba_proj_bias`)."""
    dt_min: float = 0.0
    """Smallest step size (`time_step_limit`)."""
    dt_max: float | None = None
    """Largest step size (`time_step_limit`); None for no limit."""
    norm: bool = True
    """Normalise the output, each group of channels by itself; otherwise it has a gate alone."""
    gate_first: bool = True
    """Multiply by the gate before that norm, not after it."""
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of gate, x, b, c and dt before convolutions (`ssm_multipliers` of Falcon-H1)."""

    name = "state_space"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "StateSpaceSpec":
        """Return the spec with the network's values where it has none of its own."""
        heads = self.heads or sizes.heads
        return dataclasses.replace(self, heads=heads, head_dim=self.head_dim or sizes.head_dim)

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        del sizes
        positive = ("heads", "head_dim", "groups", "state_dim", "conv_width")
        rules: dict[str, Any] = dict.fromkeys(positive, "at least 1")
        rules["dt_min"] = "at least 0 and finite"
        problems = check_fields(self, rules, prefix=where)
        if not problems and self.heads % self.groups:
            problem = Problem(
                f"{where}groups",
                "does not divide heads",
                f"{self.heads} / {self.groups} = {self.heads / self.groups:.4g}",
                "equally many heads for each group",
            )
            problems.append(problem)
        return problems + self._option_problems(where)

    def _option_problems(self, where: str) -> list[Problem]:
        """Return the problems of limits, factors and the norm."""
        problems = []
        if self.dt_max is not None and not self.dt_min < self.dt_max < float("inf"):
            what = f"is {self.dt_max:g}, which is not above dt_min {self.dt_min:g} and finite"
            problems.append(Problem(f"{where}dt_max", what, fix="None for no limit"))
        if len(self.multipliers) != len(_PROJECTIONS) or min(self.multipliers) <= 0:
            what = f"are {self.multipliers}"
            fix = f"a number above 0 for each of {', '.join(_PROJECTIONS)}"
            problems.append(Problem(f"{where}multipliers", what, fix=fix))
        if not self.norm and not self.gate_first:
            what = "acts on nothing without a norm"
            problems.append(Problem(f"{where}gate_first", what, fix="True, or norm=True"))
        return problems

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> dict[str, int]:
        """Name → outputs of each projection from the residual stream."""
        of_groups = self.groups * self.state_dim
        sizes = (self.inner, self.inner, of_groups, of_groups, self.heads)
        return dict(zip(_PROJECTIONS, sizes, strict=True))

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        return sizes.d_model * (sum(self.widths.values()) + self.inner)

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of all others: convolutions, norm, biases and three vectors of heads."""
        channels = sum(self.widths[name] for name in _CONVOLVED)
        count = 3 * self.heads + channels * (self.conv_width + self.conv_bias)
        if self.norm:
            count += self.inner
        if self.bias:
            count += sum(self.widths.values()) + sizes.d_model
        return count

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        into = f"{self.name}/({'|'.join(_PROJECTIONS)})_proj"
        convolutions = f"{self.name}/({'|'.join(_CONVOLVED)})_conv"
        params: list[ParamRow] = [
            (f"{into}/kernel", P(fsdp, "tensor")),  # [d, channels]
            (f"{self.name}/out_proj/kernel", P("tensor", fsdp)),  # [channels, d]
            (f"{convolutions}/weight", P(None, "tensor")),  # [width, channels]
            (f"{self.name}/(A_log|D|dt_bias)", P("tensor")),  # [heads]
        ]
        if self.norm:
            params.append((f"{self.name}/gated_norm/scale", P("tensor")))
        if self.conv_bias:
            params.append((f"{convolutions}/bias", P("tensor")))
        if self.bias:
            reason = replicate("added once, where rows are summed over tensor")
            params += [(f"{into}/bias", P("tensor")), (f"{self.name}/out_proj/bias", reason)]
        activations = (
            (_INPUT, TOKENS),
            *hidden("state_space_x", "state_space_dt"),  # [batch, seq, heads, …]
            *hidden("state_space_gate", _GROUPS, "state_space_out"),  # [batch, seq, channels]
        )
        return TableRows(tuple(params), activations)

    def build(self, sizes: Sizes, angles: int, rngs: nnx.Rngs) -> "StateSpace":
        """Build the module of a resolved spec."""
        del angles
        return StateSpace(self, sizes, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateSpaceCache(CacheEntry):
    """The states and the last inputs of convolutions, stacked for a stack of layers.

    Channels of convolutions are split as heads.
    """

    state: Float[Array, "*layer batch heads head_dim state_dim"] = cached_array("batch heads _ _")
    x: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")
    b: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")
    c: Float[Array, "*layer batch width-1 channels"] = cached_array("batch _ heads")


class StateSpace(nnx.Module):
    """State-space mixer of a resolved spec.

    The initial rates of decay are uniform in [−16, −1], and step sizes log-uniform in [0.001,
    0.1], as in the authors' code.
    """

    def __init__(self, spec: StateSpaceSpec, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        width = sizes.d_model
        self.spec = spec
        for name, outputs in spec.widths.items():
            setattr(self, f"{name}_proj", Dense(width, outputs, bias=spec.bias, rngs=rngs))
        for name in _CONVOLVED:
            convolution = ShortConvolution(
                spec.widths[name], spec.conv_width, bias=spec.conv_bias, rngs=rngs
            )
            setattr(self, f"{name}_conv", convolution)
        self.A_log = of_heads(initial_rates(rngs.params(), spec.heads, 1.0))
        self.D = of_heads(jnp.ones((spec.heads,)))
        self.dt_bias = of_heads(initial_dt_bias(rngs.params(), spec.heads))
        self.gated_norm = _norm(spec, sizes) if spec.norm else None
        self.out_proj = Dense(spec.inner, width, scale=sizes.out_scale, bias=spec.bias, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], inputs: LayerInputs
    ) -> Float[Array, "batch seq d"]:
        """Mix each token with the preceding ones of its document.

        Raises:
            ConfigError: The mesh splits sequences.
        """
        require_whole_sequences(_NAME)
        require_one_document(inputs.segments)
        slot = cache_slot(_NAME, StateSpaceCache)
        projected = self._projected(x)
        gate = annotate(projected["gate"], "state_space_gate")
        convolved = {name: projected[name] for name in _CONVOLVED}
        mixed, last = convolve_each(self, convolved, slot.past, inputs.segments)
        y, state = self._scanned(mixed, projected["dt"], slot.past, inputs)
        slot.save(StateSpaceCache(state, **last))
        out = annotate(self._gated(y, gate), "state_space_out")
        y = row_parallel(out, self.out_proj.kernel, _INPUT)
        return self.out_proj.with_bias(y)

    def _projected(self, x: Float[Array, "batch seq d"]) -> dict[str, Array]:
        """Return name → output of each projection."""
        projections: list[Dense] = [getattr(self, f"{name}_proj") for name in _PROJECTIONS]
        kernels = [projection.kernel for projection in projections]
        products = column_parallel(x, kernels, _INPUT)
        found = {}
        factors = self.spec.multipliers
        for name, projection, y, factor in zip(
            _PROJECTIONS, projections, products, factors, strict=True
        ):
            y = projection.with_bias(y)
            if factor != 1:
                y = y * factor
            found[name] = y
        return found

    def _scanned(
        self,
        mixed: dict[str, Array],
        dt: Float[Array, "batch seq heads"],
        past: StateSpaceCache | None,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "batch seq channels"], Array]:
        """Return the outputs of the recurrence, and the states after the last token."""
        spec = self.spec
        batch, seq, _ = dt.shape
        x = mixed["x"].reshape(batch, seq, spec.heads, spec.head_dim)
        x = annotate(x, "state_space_x")
        dt = annotate(self._step_sizes(dt), "state_space_dt")
        b = self._by_group(mixed["b"])
        c = self._by_group(mixed["c"])
        rates = -jnp.exp(whole(self.A_log))
        skip = whole(self.D)
        if past is None:
            out, state = state_space_scan(
                *(x, dt, rates, b, c, skip), segments=inputs.segments, valid=token_mask(seq)
            )
        else:
            token = (x[:, 0], dt[:, 0], rates, b[:, 0], c[:, 0], skip)
            out, state = state_space_step(*token, state=past.state)
        return out.reshape(batch, seq, -1), state

    def _step_sizes(self, dt: Float[Array, "batch seq heads"]) -> Float[Array, "batch seq heads"]:
        """Return positive step sizes in float32, in their limits."""
        bias = whole(self.dt_bias)
        steps = jax.nn.softplus(to_float32(dt) + bias[None, None])
        if not self.spec.dt_min and self.spec.dt_max is None:
            return steps
        return jnp.clip(steps, self.spec.dt_min, self.spec.dt_max)

    def _by_group(
        self, y: Float[Array, "batch seq channels"]
    ) -> Float[Array, "batch seq groups state_dim"]:
        """Split channels into groups, whole on each device where they do not divide over `tensor`."""
        y = annotate(y, _GROUPS)
        groups = y.reshape(*y.shape[:2], self.spec.groups, self.spec.state_dim)
        found = placement(_GROUPS, y.shape)
        if found is None:
            return groups
        mesh, rule = found
        if self.spec.groups % shards_of(rule[2], mesh.shape):
            return constrain_like(groups, _INPUT)
        return constrain_like(groups, _GROUPS)

    def _gated(self, y: Array, gate: Array) -> Float[Array, "batch seq channels"]:
        """Apply the gate, and the norm if there is one."""
        if self.gated_norm is None:
            return y * jax.nn.silu(gate)
        return self.gated_norm(y, gate)


def _norm(spec: StateSpaceSpec, sizes: Sizes) -> GatedRMSNorm:
    eps = sizes.norm_eps
    return GatedRMSNorm(spec.inner, groups=spec.groups, eps=eps, gate_first=spec.gate_first)
