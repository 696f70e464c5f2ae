"""Attention and a state-space mixer side by side, as in Falcon-H1 (arXiv:2507.22448, section 2)."""

import dataclasses

from flax import nnx
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields
from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.declared import Axes, TableRows
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.rotary import Rotary
from spmd.models.decoder.sizes import Sizes
from spmd.models.decoder.state_space import StateSpaceSpec


@dataclasses.dataclass(frozen=True)
class ParallelMixerSpec(MixerSpec):
    """Two mixers of the same input, whose outputs are added."""

    attention: AttentionSpec = AttentionSpec()
    """Softmax attention."""
    state_space: StateSpaceSpec = StateSpaceSpec()
    """State-space mixer."""
    key_scale: float = 1.0
    """Factor of the scores besides head_dim^−½ (`key_multiplier`)."""
    attention_scale: float = 1.0
    """Factor of the attention's output (`attention_out_multiplier`)."""
    state_space_scale: float = 1.0
    """Factor of the state-space mixer's output (`ssm_out_multiplier`)."""

    name = "parallel_mixer"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "ParallelMixerSpec":
        """Return the spec with the network's values where it has none of its own."""
        attention = self.attention.resolve(sizes)
        state_space = self.state_space.resolve(sizes)
        return dataclasses.replace(self, attention=attention, state_space=state_space)

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        factors = ("key_scale", "attention_scale", "state_space_scale")
        problems = check_fields(self, dict.fromkeys(factors, "above 0"), prefix=where)
        problems += self.attention.problems(f"{where}attention.", sizes)
        problems += self.state_space.problems(f"{where}state_space.", sizes)
        if self.attention.scale and self.key_scale != 1:
            what = "has no effect: attention has its own scale"
            problems.append(Problem(f"{where}key_scale", what, fix="1, or attention.scale 0"))
        return problems

    @property
    def window(self) -> int | None:
        """The window of attention."""
        return self.attention.window

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions of attention."""
        return self.attention.rotary

    @property
    def rotary_key(self) -> tuple[Rotary, int] | None:
        """As of `AttentionSpec`."""
        return self.attention.rotary_key

    @property
    def attention_width(self) -> int:
        """As of `AttentionSpec`."""
        return self.attention.attention_width

    @property
    def kv_heads(self) -> int:
        """The key/value heads of attention."""
        return self.attention.kv_heads

    @property
    def kv_width(self) -> int:
        """As of `AttentionSpec`."""
        return self.attention.kv_width

    @property
    def reach(self) -> int:
        """As of `AttentionSpec`."""
        return self.attention.reach

    @property
    def needs_positions(self) -> bool:
        """As of `AttentionSpec`."""
        return self.attention.needs_positions

    @property
    def scaled_attention(self) -> AttentionSpec:
        """The attention with its factor of the scores."""
        if self.key_scale == 1:
            return self.attention
        scale = self.key_scale * self.attention.head_dim**-0.5
        return dataclasses.replace(self.attention, scale=scale)

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        return self.attention.matmul_params(sizes) + self.state_space.matmul_params(sizes)

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of all other parameters."""
        return self.attention.other_params(sizes) + self.state_space.other_params(sizes)

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        return self.attention.rows(fsdp) + self.state_space.rows(fsdp)

    def build(self, sizes: Sizes, angles: int, rngs: nnx.Rngs) -> "ParallelMixer":
        """Build the module of a resolved spec.

        `angles` is the number of its angles in `LayerInputs.angles`.
        """
        return ParallelMixer(self, sizes, angles, rngs=rngs)


class ParallelMixer(nnx.Module):
    """Two mixers of a resolved spec."""

    def __init__(
        self, spec: ParallelMixerSpec, sizes: Sizes, angles: int, *, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        self.attention = spec.scaled_attention.build(sizes, angles, rngs)
        self.state_space = spec.state_space.build(sizes, angles, rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], inputs: LayerInputs
    ) -> Float[Array, "batch seq d"]:
        """Return the sum of both outputs."""
        attended = self.attention(x, inputs) * self.spec.attention_scale
        recurrent = self.state_space(x, inputs) * self.spec.state_space_scale
        return attended + recurrent
