"""One layer of a decoder: a token mixer and an MLP or experts, with norms around them."""

import dataclasses
from typing import Any, Literal

from flax import nnx
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.declared import Axes, MissingPartError, TableRows
from spmd.models.decoder.experts import ExpertsSpec, MixtureOfExperts
from spmd.models.decoder.gated_delta_net import GatedDeltaNetSpec
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.latent_attention import LatentAttentionSpec
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.decoder.no_mixer import NoMixerSpec
from spmd.models.decoder.norms import make_norm
from spmd.models.decoder.parallel_mixer import ParallelMixerSpec
from spmd.models.decoder.short_convolution import GatedConvolutionSpec
from spmd.models.decoder.sizes import Sizes
from spmd.models.decoder.state_space import StateSpaceSpec
from spmd.plan.annotate import annotate

Mixer = (
    AttentionSpec
    | LatentAttentionSpec
    | GatedConvolutionSpec
    | GatedDeltaNetSpec
    | StateSpaceSpec
    | ParallelMixerSpec
    | NoMixerSpec
)
"""Specs of token mixers."""

Norms = Literal["before", "after", "both", "mlp_both", "parallel", "parallel_shared"]

_NORM_NAMES: dict[str, tuple[str, ...]] = {
    "before": ("attention_norm", "mlp_norm"),
    "after": ("attention_post_norm", "mlp_post_norm"),
    "both": ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
    "mlp_both": ("attention_norm", "mlp_norm", "mlp_post_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel_shared": ("attention_norm",),
}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Kind of a layer."""

    mixer: Mixer = AttentionSpec()
    """Token mixer."""
    mlp: MLPSpec | ExpertsSpec | None = MLPSpec()
    """MLP or experts; None for neither."""
    norms: Norms = "before"
    """Places of norms: before mixer and MLP, after (OLMo 2, arXiv:2501.00656), both (Gemma 2);
    mlp_both: before the mixer, and on both sides of MLP or experts (A.X K1); parallel: mixer and
    MLP read the same input, each with a norm (GPT-NeoX, arXiv:2204.06745), or with one norm
    (parallel_shared: GPT-J)."""
    input_name: str = "residual"
    """Activation name of the layer's input; one of its own can be offloaded alone."""
    name: str = ""
    """Name of the layer in a repeated group, or of a stack of first or last layers; by default its
    number."""

    def resolve(self, sizes: Sizes) -> "LayerSpec":
        """Return the spec with the network's values where it has none of its own."""
        mlp = self.mlp
        if mlp is not None:
            mlp = mlp.resolve(sizes)
        return dataclasses.replace(self, mixer=self.mixer.resolve(sizes), mlp=mlp)

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        problems = check_fields(self, {"norms": tuple(_NORM_NAMES)}, prefix=where)
        problems += self.mixer.problems(f"{where}mixer.", sizes)
        if self.mlp is None and self.is_parallel:
            what = f"is {self.norms}, and the layer has no MLP beside its mixer"
            problems.append(Problem(f"{where}norms", what, fix='"before", or an MLP'))
        if self.mlp is not None:
            problems += self.mlp.problems(f"{where}mlp.")
        if self.has_mixer:
            return problems
        if self.mlp is None:
            what = "is None, and the layer has no mixer either"
            problems.append(Problem(f"{where}mlp", what, fix="one of them"))
        if self.is_parallel:
            what = "puts nothing beside the MLP: the layer has no mixer"
            problems.append(Problem(f"{where}norms", what, fix='"before"'))
        return problems

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer with softmax attention.

        Raises:
            MissingPartError: It is of another kind.
        """
        if not isinstance(self.mixer, AttentionSpec):
            raise MissingPartError(f"the mixer is a {type(self.mixer).__name__}")
        return self.mixer

    @property
    def has_mixer(self) -> bool:
        """Whether the layer has a token mixer."""
        return not isinstance(self.mixer, NoMixerSpec)

    @property
    def is_parallel(self) -> bool:
        """Whether mixer and MLP read the same input."""
        return self.norms.startswith("parallel")

    @property
    def has_experts(self) -> bool:
        """Whether the layer has experts."""
        return isinstance(self.mlp, ExpertsSpec)

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Names of the norms of the residual stream."""
        names = _NORM_NAMES[self.norms]
        if self.mlp is None:
            names = tuple(name for name in names if name.startswith("attention"))
        if not self.has_mixer:
            names = tuple(name for name in names if name.startswith("mlp"))
        return names

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table, without those of norms."""
        rows = self.mixer.rows(fsdp)
        if self.mlp is not None:
            rows += self.mlp.rows(fsdp)
        return rows

    def build(
        self, sizes: Sizes, router: RouterConfig | None, angles: int, rngs: nnx.Rngs
    ) -> "DecoderLayer":
        """Build the module of a resolved spec."""
        return DecoderLayer(self, sizes, router, angles, rngs=rngs)


class DecoderLayer(nnx.Module):
    """Layer of a resolved spec.

    Args:
        spec: The kind of the layer.
        sizes: Sizes of the network.
        router: Routing of a layer with experts.
        angles: Number of the layer's angles in `LayerInputs.angles`.
        rngs: For the initial parameters.
    """

    def __init__(
        self,
        spec: LayerSpec,
        sizes: Sizes,
        router: RouterConfig | None,
        angles: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.spec = spec
        self.scale = sizes.residual_scale
        for name in spec.norm_names:
            setattr(self, name, make_norm(sizes.d_model, sizes))
        if not isinstance(spec.mixer, NoMixerSpec):
            setattr(self, spec.mixer.name, spec.mixer.build(sizes, angles, rngs))
        if isinstance(spec.mlp, ExpertsSpec):
            assert router is not None, "the config has a problem for experts without a router"
            self.moe = spec.mlp.build(sizes, router, rngs)
        elif spec.mlp is not None:
            self.mlp = spec.mlp.build(sizes, rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], key: Array | None, inputs: LayerInputs
    ) -> tuple[Float[Array, "batch seq d"], dict[str, Array] | None]:
        """Return the residual stream after this layer, and its router's report, if any.

        `key` is for the router's noise. The layer's input is annotated too, for remat policies that
        offload it.
        """
        x = annotate(x, self.spec.input_name)
        if self.spec.is_parallel:
            return self._add_parallel(x, self._mixed(x, inputs), key, inputs)
        if self.spec.has_mixer:
            y = self._mixed(x, inputs)
            x = self._add(x, self._normed("attention_post_norm", y))
        if self.spec.mlp is None:
            return x, None
        y, report = self._feed_forward(self._normed("mlp_norm", x), key, inputs)
        return self._add(x, self._normed("mlp_post_norm", y)), report

    def _mixed(self, x: Array, inputs: LayerInputs) -> Float[Array, "batch seq d"]:
        """Return the output of the mixer."""
        mixer = getattr(self, self.spec.mixer.name)
        mixed: Array = mixer(self._normed("attention_norm", x), inputs)
        return mixed

    def _add_parallel(
        self, x: Array, mixed: Array, key: Array | None, inputs: LayerInputs
    ) -> tuple[Array, dict[str, Array] | None]:
        """Add the outputs of mixer and MLP, both of the layer's input."""
        norm = "mlp_norm"
        if self.spec.norms == "parallel_shared":
            norm = "attention_norm"
        y, report = self._feed_forward(self._normed(norm, x), key, inputs)
        return self._add(x, mixed + y), report

    def _feed_forward(
        self, x: Array, key: Array | None, inputs: LayerInputs
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the output of the MLP or the experts, and the router's report, if any."""
        if self.spec.has_experts:
            experts: MixtureOfExperts = self.moe
            return experts(x, key, inputs.valid)
        return self.mlp(x), None

    def _normed(self, name: str, x: Array) -> Array:
        """Apply the norm of a name, if the layer has it."""
        norm: Any = getattr(self, name, None)
        if norm is None:
            return x
        return norm(x)

    def _add(self, x: Array, y: Array) -> Array:
        """Add an output to the residual stream."""
        if self.scale != 1:
            y = y * self.scale
        return annotate(x + y, "residual")
