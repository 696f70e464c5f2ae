"""One decoder for all families: a config with a table of the kinds of layers, and its network.

```python
DecoderConfig(vocab=32_000, d_model=4096, layers=32, heads=32, kv_heads=8, d_ff=14_336)  # a Llama
local = LayerSpec(AttentionSpec(window=512))
DecoderConfig(layers=26, group=(local, local, LayerSpec()), last=(local, local))
```
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem, check_fields
from spmd.layers.ahead import tokens_ahead
from spmd.layers.lm_head import LazyLogits
from spmd.layers.ring_attention import Segments
from spmd.layers.router import RouterConfig, Valid, balanced_bias
from spmd.layers.zigzag import positions
from spmd.model_interface.model import Outputs
from spmd.models.decoder.earlier import KINDS, current_values
from spmd.models.decoder.embedding import Embedding, add_positions, make_positions
from spmd.models.decoder.experts import ExpertsSpec, RouterBias
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.layer_stack import (
    LayerGroup,
    make_layers,
    members_of,
    scan_layers_with_outputs,
)
from spmd.models.decoder.linear import Head, make_bias
from spmd.models.decoder.multi_token import NORMS, AheadLayer, ahead_params, valid_ahead
from spmd.models.decoder.noise import LayerNoise
from spmd.models.decoder.norms import make_norm, norm_params
from spmd.models.decoder.pattern import Pattern, runs
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.decoder.sizes import NormSpec, Sizes
from spmd.plan.annotate import annotate

_PARTS = (
    *("embed", "embed_norm", "positions", "layers", "norm"),
    *("lm_head", "logits_bias", "noise"),
)
"""Names of the other parts of a decoder, which no stack may have."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; of a Llama by default (arXiv:2302.13971)."""

    vocab: int = 256
    """Vocabulary size."""
    d_model: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of decoder layers."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key/value heads (grouped-query attention); divides heads."""
    d_ff: int = 384
    """Hidden width of the MLP, or of one expert."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the variance or the mean square in norms."""
    tied: bool = False
    """Use the embedding's transpose as the output head."""
    stacked: bool = True
    """Stack and scan layers (one compiled layer of each kind); otherwise they are a list."""
    unroll: int = 1
    """Stacked layers per iteration of the scan: more is faster and compiles longer."""
    window: int = 0
    """Sliding window: tokens that each one attends to, itself included; 0 for all preceding
    ones."""
    head_dim: int = 0
    """Width of a head; 0 for d_model / heads."""
    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for a longer context."""
    norm: NormSpec = NormSpec()
    """Kind of the norms."""
    layer: LayerSpec = LayerSpec()
    """Kind of every layer without a group."""
    first: tuple[LayerSpec, ...] = ()
    """Kinds of the first layers."""
    group: tuple[LayerSpec, ...] = ()
    """Kinds of the layers of the group that is repeated; empty for `layer` alone."""
    last: tuple[LayerSpec, ...] = ()
    """Kinds of the last layers."""
    router: RouterConfig | None = None
    """Routing and dispatch of tokens in layers with experts."""
    positions: int = 0
    """Learned positions, the longest sequence (GPT-2); 0 for none."""
    unused_positions: int = 0
    """Learned positions before that of the first token, which are never used (OPT: 2)."""
    embed_scale: float = 1.0
    """Factor of embeddings; 0 for the square root of d_model (Gemma)."""
    embed_norm: bool = False
    """Normalise embeddings, after their factor (nanochat)."""
    residual_scale: float = 1.0
    """Factor of each output that is added to the residual stream."""
    logits_scale: float = 1.0
    """Factor of logits."""
    logits_soft_cap: float = 0.0
    """Soft cap of logits, cap · tanh(logits / cap); 0 for none."""
    logits_bias: bool = False
    """Add a learned bias to logits (GPT-J, Phi)."""
    predict_ahead: int = 0
    """Modules of multi-token prediction (DeepSeek-V3, section 2.2), each with a layer of the last
    kind; they take part in training alone."""
    ahead_weight: float = 0.3
    """Weight of their mean loss (λ, equation 25)."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ConfigError("The decoder is invalid:", problems)

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        positive = ("vocab", "d_model", "layers", "heads", "kv_heads", "d_ff", "unroll")
        rules = dict.fromkeys(positive, "at least 1")
        least_zero = (
            "window",
            "head_dim",
            "positions",
            "unused_positions",
            "embed_scale",
            "logits_soft_cap",
        )
        rules |= dict.fromkeys(least_zero, "at least 0")
        rules |= dict.fromkeys(("predict_ahead", "ahead_weight"), "at least 0")
        rules |= dict.fromkeys(("residual_scale", "logits_scale"), "above 0")
        problems = check_fields(self, rules, prefix="model.")
        if problems:
            return problems
        return [
            *self._size_problems(),
            *self._table_problems(),
            *self._effect_problems(),
            *self._name_problems(),
            *self._router_problems(),
        ]

    def _size_problems(self) -> list[Problem]:
        """Return the problems of heads and of the number of layers."""
        problems = []
        if not self.head_dim and self.d_model % self.heads:
            problem = Problem(
                "model.heads",
                "does not divide model.d_model",
                f"{self.d_model} / {self.heads} = {self.d_model / self.heads:.4g}",
                "change one of them, or give model.head_dim",
            )
            problems.append(problem)
        ends = len(self.first) + len(self.last)
        size = len(self._group)
        repeated = self.layers - ends
        if repeated < size or repeated % size:
            problem = Problem(
                "model.layers",
                "does not fit the pattern of layers",
                f"({self.layers} - {len(self.first)} first - {len(self.last)} last) / {size} in the "
                f"group = {repeated / size:.4g}",
                f"such as {ends + size * max(1, round(repeated / size))}",
            )
            problems.append(problem)
        if not self.predict_ahead and self.ahead_weight != DecoderConfig.ahead_weight:
            what = "acts on nothing: no token further ahead is predicted"
            problems.append(Problem("model.ahead_weight", what, fix="model.predict_ahead 1"))
        if self.unused_positions and not self.positions:
            what = "acts on nothing without learned positions"
            problems.append(Problem("model.unused_positions", what, fix="0"))
        if self.group and self.layer != LayerSpec():
            fix = "put it into model.group"
            problems.append(Problem("model.layer", "is unused: there is a group", fix=fix))
        return problems

    def _table_problems(self) -> list[Problem]:
        """Return the problems of the kinds of layers, each once."""
        sizes = self.sizes
        places = [("model.layer.", self.layer)]
        if self.group:
            places = _places("group", self.group)
        places += [*_places("first", self.first), *_places("last", self.last)]
        problems: dict[Problem, None] = {}
        for where, spec in places:
            for problem in spec.resolve(sizes).problems(where, sizes):
                problems[self._where_given(problem, where, spec)] = None
        return list(problems)

    def _effect_problems(self) -> list[Problem]:
        """Return a problem for each default of layers that every layer overrides."""
        mixers = [spec.mixer for spec in self._specs]
        rotaries = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
        inherited = {
            "window": any(mixer.window is None for mixer in mixers),
            "rope_scaling": any(rotary.scaling is None for rotary in rotaries),
        }
        problems = []
        for field in dataclasses.fields(self):
            is_changed = getattr(self, field.name) != field.default
            if is_changed and not inherited.get(field.name, True):
                what = "acts on no layer: each has its own"
                fix = f"{field.default!r}, or layers without one"
                problems.append(Problem(f"model.{field.name}", what, fix=fix))
        return problems

    def _name_problems(self) -> list[Problem]:
        """Return a problem for each name that two layers of a group, or two stacks, share."""
        stacks = [
            *_PARTS,
            *_names_of("first_layers", self.first),
            *_names_of("last_layers", self.last),
        ]
        places = {"group": list(self.names_in_group), "first and last": stacks}
        problems = []
        for place, names in places.items():
            for name in sorted({name for name in names if names.count(name) > 1}):
                what = f"has a name that something else has: {name!r}"
                problems.append(Problem(f"model.{place}", what, fix="a name for each"))
        return problems

    def _where_given(self, problem: Problem, where: str, spec: LayerSpec) -> Problem:
        """Return a problem of a resolved spec at the origin of the value: the model's field or its own."""
        if not problem.where.startswith(where):
            return problem
        part, _, field = problem.where.removeprefix(where).partition(".")
        own = getattr(getattr(spec, part), field, None)
        if own or field not in ("heads", "kv_heads", "head_dim", "d_ff", "window"):
            return problem
        if field == "head_dim" and not self.head_dim:
            arithmetic = f"d_model / heads = {self.head_width}"
            what = "gives heads of odd width"
            return dataclasses.replace(problem, where="model.heads", what=what, detail=arithmetic)
        return dataclasses.replace(problem, where=f"model.{field}")

    def _router_problems(self) -> list[Problem]:
        has_experts = any(spec.has_experts for spec in self._specs)
        if has_experts and self.router is None:
            fix = "a RouterConfig"
            return [Problem("model.router", "is None, and layers have experts", fix=fix)]
        if self.router is not None and not has_experts:
            fix = "None, or layers with mlp=ExpertsSpec()"
            return [Problem("model.router", "is unused: no layer has experts", fix=fix)]
        if any(spec.has_experts for spec in self.first):
            fix = "put them into model.group or model.last"
            return [Problem("model.first", "has layers with experts", fix=fix)]
        return []

    @property
    def _specs(self) -> tuple[LayerSpec, ...]:
        return (*self.first, *self._group, *self.last)

    @property
    def _group(self) -> tuple[LayerSpec, ...]:
        return self.group or (self.layer,)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.heads

    @property
    def sizes(self) -> Sizes:
        """Sizes of all layers, and defaults of their specs."""
        return Sizes(
            d_model=self.d_model,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_width,
            d_ff=self.d_ff,
            norm_eps=self.norm_eps,
            norm=self.norm,
            window=self.window,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            residual_scale=self.residual_scale,
        )

    @property
    def pattern(self) -> Pattern[LayerSpec]:
        """The kinds of layers in order, resolved."""
        return _pattern(self)

    @property
    def rotaries(self) -> tuple[tuple[Rotary, int], ...]:
        """The kinds of rotary positions in the network, each with a head's width."""
        keys = [spec.mixer.rotary_key for spec in self.pattern.distinct]
        return tuple(dict.fromkeys(key for key in keys if key is not None))

    def angles_of(self, spec: LayerSpec) -> int:
        """Return the number of a layer's rotary positions in `rotaries`; 0 without positions."""
        key = spec.mixer.rotary_key
        if key is None:
            return 0
        return self.rotaries.index(key)

    @property
    def first_stacks(self) -> dict[str, tuple[LayerSpec, int]]:
        """Name → kind and number of each stack of equal first layers."""
        return _named_runs("first_layers", self.pattern.first)

    @property
    def last_stacks(self) -> dict[str, tuple[LayerSpec, int]]:
        """Name → kind and number of each stack of equal last layers."""
        return _named_runs("last_layers", self.pattern.last)

    @property
    def ahead_layer(self) -> LayerSpec:
        """Kind of the layer in a module of multi-token prediction: the last one."""
        pattern = self.pattern
        return (pattern.last or pattern.group)[-1]

    @property
    def names_in_group(self) -> tuple[str, ...]:
        """Names of the layers of a group."""
        return tuple(spec.name or f"block_{i}" for i, spec in enumerate(self._group))

    @property
    def context(self) -> int | None:
        """Longest sequence; None without a limit."""
        return self.positions or None

    @property
    def earlier_kinds(self) -> tuple[str, ...]:
        """Names of earlier classes of families, in records of runs."""
        return KINDS

    def from_earlier(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return recorded values, perhaps of an earlier class, by the fields of today."""
        names = [field.name for field in dataclasses.fields(self)]
        return current_values(values, names)

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of consecutive layers with attention, repeated; 0 for all preceding tokens."""
        pattern = self.pattern
        kinds = pattern.group
        if pattern.first or pattern.last:
            kinds = pattern.kinds
        return tuple(spec.mixer.reach for spec in kinds if spec.mixer.attention_width)

    @property
    def attention_width(self) -> int:
        """Width of all query heads together, on average over layers."""
        widths = [count * spec.mixer.attention_width for spec, count in self.pattern.counted]
        return sum(widths) // self.layers

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, on average over layers."""
        widths = [count * spec.mixer.kv_width for spec, count in self.pattern.counted]
        return sum(widths) // self.layers

    @property
    def matmul_params(self) -> int:
        """Parameters in the matmuls of one token, with its chosen experts only; not the embedding.

        The head counts once for each predicted token.
        """
        again = self.predict_ahead * self.d_model * self.vocab
        return self._matmul_params(active=True) + again

    @property
    def total_params(self) -> int:
        """All parameters."""
        return self._matmul_params(active=False) + self._other_params

    @property
    def active_params(self) -> int:
        """Parameters used by one token, with its chosen experts only."""
        return self._matmul_params(active=True) + self._other_params

    def _matmul_params(self, *, active: bool) -> int:
        """Return the kernels' parameters, with all experts or the chosen ones, and the head's."""
        total = self.d_model * self.vocab
        for spec, count in self._counted:
            of_layer = spec.mixer.matmul_params(self.sizes)
            if isinstance(spec.mlp, ExpertsSpec):
                of_layer += self._expert_params(spec.mlp, active=active)
            elif spec.mlp is not None:
                of_layer += spec.mlp.matmul_params(self.sizes)
            total += count * of_layer
        return total + self.predict_ahead * ahead_params(self.sizes)

    @property
    def _counted(self) -> list[tuple[LayerSpec, int]]:
        """Kinds of layers with their numbers, also those of multi-token prediction."""
        return [*self.pattern.counted, (self.ahead_layer, self.predict_ahead)]

    def _expert_params(self, spec: ExpertsSpec, *, active: bool) -> int:
        assert self.router is not None, "the config has a problem for experts without a router"
        experts = self.router.experts
        if active:
            experts = self.router.top_k
        return spec.matmul_params(self.sizes, experts, self.router)

    @property
    def _other_params(self) -> int:
        """Norms, biases, positions, and the embedding if it is not tied."""
        channels = norm_params(self.norm) * self.d_model
        total = channels + (self.positions + self.unused_positions) * self.d_model
        if self.embed_norm:
            total += channels
        total += self.predict_ahead * len(NORMS) * channels
        for spec, count in self._counted:
            of_layer = len(spec.norm_names) * channels + spec.mixer.other_params(self.sizes)
            if isinstance(spec.mlp, ExpertsSpec):
                assert self.router is not None, "the config has a problem for that"
                of_layer += spec.mlp.other_params(self.sizes, self.router)
            elif spec.mlp is not None:
                of_layer += spec.mlp.other_params(self.sizes)
            total += count * of_layer
        if not self.tied:
            total += self.vocab * self.d_model
        if self.logits_bias:
            total += self.vocab
        return total

    def build(self, rngs: nnx.Rngs) -> "Decoder":
        """Build the model."""
        return Decoder(self, rngs=rngs)


@functools.cache
def _pattern(config: DecoderConfig) -> Pattern[LayerSpec]:
    sizes = config.sizes

    def resolve(specs: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        return tuple(spec.resolve(sizes) for spec in specs)

    group = config.group or (config.layer,)
    repeats = (config.layers - len(config.first) - len(config.last)) // len(group)
    return Pattern(resolve(config.first), resolve(group), repeats, resolve(config.last))


def _places(field: str, specs: tuple[LayerSpec, ...]) -> list[tuple[str, LayerSpec]]:
    return [(f"model.{field}.{i}.", spec) for i, spec in enumerate(specs)]


def _named_runs(name: str, specs: tuple[LayerSpec, ...]) -> dict[str, tuple[LayerSpec, int]]:
    """Return the stacks of equal consecutive layers by name."""
    return dict(zip(_names_of(name, specs), runs(specs), strict=True))


def _names_of(name: str, specs: tuple[LayerSpec, ...]) -> list[str]:
    """Return the names of the stacks of equal consecutive layers."""
    found = runs(specs)
    if len(found) == 1:
        return [found[0][0].name or name]
    return [spec.name or f"{name}_{number}" for number, (spec, _) in enumerate(found)]


Reports = tuple[dict[str, Array] | None, ...]
"""Reports of routers, stacked, for each layer of a repeated group; None for layers without experts."""


class Decoder(nnx.Module):
    """Causal language model from tokens to next-token logits."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        width = config.d_model
        pattern = config.pattern
        self.config = config
        self.deterministic = False  # set by Flax's `train()` and `eval()`
        self.embed = Embedding(config.vocab, width, rngs=rngs)
        if config.embed_norm:
            self.embed_norm = make_norm(width, config.sizes)
        if config.positions:
            rows = config.positions + config.unused_positions
            self.positions = make_positions(rows, width, rngs=rngs)
        _add_stacks(self, config.first_stacks, config, rngs)
        self.layers = make_layers(
            functools.partial(_make_group, config),
            pattern.repeats,
            rngs.params(),
            stacked=config.stacked,
        )
        _add_stacks(self, config.last_stacks, config, rngs)
        if config.predict_ahead:
            make = functools.partial(_make_ahead, config)
            count = config.predict_ahead
            self.ahead = make_layers(make, count, rngs.params(), stacked=config.stacked)
        self.norm = make_norm(width, config.sizes)
        self.lm_head = None if config.tied else Head(width, config.vocab, rngs=rngs)
        if config.logits_bias:
            self.logits_bias = make_bias(config.vocab)
        noise = None
        if config.router is not None and config.router.is_random:
            noise = _make_noise(config, rngs)
        self.noise = noise

    @property
    def position_aware(self) -> bool:
        """True without options that depend on a token's index, and with attention in all layers.

        The options are capacities, random routing and multi-token prediction. Mixers without
        attention read tokens in their order.
        """
        if self.config.predict_ahead:
            return False
        mixers = [spec.mixer for spec in self.config.pattern.distinct]
        if not all(mixer.attention_width for mixer in mixers):
            return False
        router = self.config.router
        if router is None:
            return True
        return router.dispatch == "dropless" and not router.is_random

    @property
    def supports_kv_cache(self) -> bool:
        """True unless experts choose tokens. With capacities, a decoded token is never dropped."""
        router = self.config.router
        return router is None or router.choice == "token"

    @property
    def padding_aware(self) -> bool:
        """True with experts: their losses and loads are over tokens."""
        return self.config.router is not None

    def __call__(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None, valid: Valid = None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits | Outputs:
        """Return next-token logits or `LazyLogits`; with experts, also losses and metrics.

        `segments` is the document of each token of a packed sequence, `valid` the mask of tokens
        that are no padding. The array `expert_load`, `[layer, expert]`, is the number of tokens
        that chose an expert, relative to even load. Losses are sums over layers, as are the metrics
        `idle_experts` (those without a token) and `extra_passes`. Means over layers are
        `load_spread`, the load of the busiest expert, and `dropped`, the fraction of dropped
        choices.

        Raises:
            ConfigError: The sequence, or the cache in decoding, is longer than learned positions.
        """
        x, context = self.embed_inputs(tokens, segments, valid)
        x, values = self.apply_layers(x, context)
        return self.compute_outputs(x, values, context)

    def embed_inputs(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None, valid: Valid = None
    ) -> tuple[Array, LayerInputs]:
        """Return the residual stream before the repeated layers, and their other inputs."""
        config = self.config
        x = self._embedded(tokens)
        if config.positions:
            x = add_positions(x, self.positions, segments, config.unused_positions)
        x = annotate(x, "residual")
        inputs = self._inputs(tokens.shape[1], segments, valid)
        if self._predicts_ahead:
            inputs = inputs._replace(tokens=tokens)
        for name in config.first_stacks:
            stack = getattr(self, name)
            x, _ = scan_layers_with_outputs(stack, x, (None,), inputs, unroll=config.unroll)
        return x, inputs

    def _embedded(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq d"]:
        """Return the embeddings, by their factor and normalised."""
        x = self.embed(tokens)
        scale = self.config.embed_scale or self.config.d_model**0.5
        if scale != 1:
            x = x * jnp.asarray(scale, x.dtype)
        if self.config.embed_norm:
            x = self.embed_norm(x)
        return x

    def _inputs(self, seq: int, segments: Segments, valid: Valid) -> LayerInputs:
        """Return the inputs of layers besides the residual stream."""
        at = positions(seq)
        angles = tuple(rotary.angles(at, width) for rotary, width in self.config.rotaries)
        inputs = LayerInputs(angles, segments, valid)
        if not any(spec.mixer.needs_positions for spec in self.config.pattern.distinct):
            return inputs
        if segments is not None:
            at = jnp.asarray(at) - segments  # a document's id is the position of its first token
        return inputs._replace(positions=at)

    @property
    def _predicts_ahead(self) -> bool:
        return self.config.predict_ahead > 0 and not self.deterministic

    def apply_layers(
        self, x: Float[Array, "batch seq d"], context: LayerInputs
    ) -> tuple[Array, Reports]:
        """Return the residual stream after the repeated layers, and reports of routers."""
        each = self._noise_keys("layers", self.config.pattern.group)
        x, reports = scan_layers_with_outputs(
            self.layers, x, each, context, unroll=self.config.unroll
        )
        return x, reports

    def compute_outputs(
        self,
        x: Float[Array, "batch seq d"],
        values: Reports,
        context: LayerInputs | None = None,
    ) -> Float[Array, "batch seq vocab"] | LazyLogits | Outputs:
        """Return the logits, and with experts also the routers' losses and metrics.

        `context`, the inputs of layers, is for last layers and multi-token prediction.
        """
        reports = [_in_order(values)]
        for name, (spec, _) in self.config.last_stacks.items():
            each = self._noise_keys(name, (spec,))
            stack = getattr(self, name)
            x, its_reports = scan_layers_with_outputs(
                stack, x, each, context, unroll=self.config.unroll
            )
            reports.append(_in_order(its_reports))
        x = self.norm(x)
        logits = self._logits(x)
        router = self.config.router
        ahead: tuple[Array | LazyLogits, ...] = ()
        if self._predicts_ahead:
            assert context is not None, "outputs_take_context is True"
            ahead, its_reports = self._predict_ahead(x, context)
            reports.append(_in_order(its_reports))
        if router is None and not ahead:
            return logits
        outputs = Outputs(logits, of_all_devices=True)
        if router is not None:
            outputs = _outputs(logits, _joined(reports), router)
        if not ahead:
            return outputs
        return dataclasses.replace(outputs, ahead=ahead, ahead_weight=self.config.ahead_weight)

    @property
    def outputs_take_context(self) -> bool:
        """True with layers in `compute_outputs`."""
        return bool(self.config.last) or self.config.predict_ahead > 0

    def _predict_ahead(
        self, x: Float[Array, "batch seq d"], context: LayerInputs
    ) -> tuple[tuple[Array | LazyLogits, ...], Reports]:
        """Return the logits of tokens further ahead, and reports of the modules' routers."""
        config = self.config
        tokens = context.tokens
        assert tokens is not None, "embed_inputs adds them"
        embedded = []
        valid = []
        for steps in range(1, config.predict_ahead + 1):
            embedded.append(self._embedded(tokens_ahead(tokens, steps)))
            valid.append(valid_ahead(context, tokens.shape[1], steps))
        masks = None
        if config.ahead_layer.has_experts:
            masks = jnp.stack([jnp.broadcast_to(mask, tokens.shape) for mask in valid])
        (keys,) = self._noise_keys("ahead", (config.ahead_layer,))
        each = ((keys, jnp.stack(embedded), masks),)
        _, ((hidden, reports),) = scan_layers_with_outputs(
            self.ahead, x, each, context, unroll=config.unroll
        )
        logits = tuple(self._logits(hidden[number]) for number in range(config.predict_ahead))
        return logits, (reports,)

    def _logits(self, x: Float[Array, "batch seq d"]) -> Array | LazyLogits:
        """Apply the output head to the normalised residual stream."""
        scale = self.config.logits_scale
        if scale != 1:
            x = x * jnp.asarray(scale, x.dtype)
        soft_cap = self.config.logits_soft_cap or None
        bias = None
        if self.config.logits_bias:
            bias = self.logits_bias
        if self.lm_head is not None:
            return self.lm_head(x, soft_cap, bias)
        return self.embed.attend(x, soft_cap, bias)

    def _noise_keys(self, stack: str, specs: tuple[LayerSpec, ...]) -> tuple[Any, ...]:
        """Return the keys of routers' noise, for each layer of a repeated group; None for none."""
        if self.noise is None or self.deterministic:
            return (None,) * len(specs)
        keys = []
        for spec in specs:
            its_keys = None
            if spec.has_experts:
                its_keys = self.noise[stack].draw()
            keys.append(its_keys)
        return tuple(keys)

    @property
    def step_variables(self) -> tuple[type[nnx.Variable], ...]:
        """The biases of routers; none without a router."""
        if self.config.router is None:
            return ()
        return (RouterBias,)

    def update_variables(self, arrays: Mapping[str, Array]) -> None:
        """Update the biases of routers once a step, by the mean load of its microbatches.

        Raises:
            ConfigError: The loss did not pass on the load.
        """
        router = self.config.router
        if router is None or not router.bias_rate:
            return
        if "expert_load" not in arrays:
            fix = 'return {"arrays": {"expert_load": load · weight}}, as next_token_loss does'
            problem = Problem("router.bias_rate", "needs the load of experts", fix=fix)
            raise ConfigError("The loss returns no load:", [problem])
        load = arrays["expert_load"]  # [layer, expert]
        for stack, specs, repeats in self._stacks:
            members = sum(spec.has_experts for spec in specs)
            if not members:
                continue
            own, load = jnp.split(load, [repeats * members])
            loads = iter(jnp.moveaxis(own.reshape(repeats, members, -1), 1, 0))
            of_members = [next(loads) if spec.has_experts else None for spec in specs]
            _move_biases(stack, of_members, router.bias_rate)

    @property
    def _stacks(self) -> list[tuple[nnx.Module, tuple[LayerSpec, ...], int]]:
        """Stacks of layers that may have experts, with the kinds in a group and the repeats."""
        config = self.config
        pattern = config.pattern
        stacks = [(self.layers, pattern.group, pattern.repeats)]
        for name, (spec, count) in config.last_stacks.items():
            stacks.append((getattr(self, name), (spec,), count))
        if config.predict_ahead:
            stacks.append((self.ahead, (config.ahead_layer,), config.predict_ahead))
        return stacks


def _make_group(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Return a layer, or a group of layers of several kinds."""
    layers = []
    for spec in config.pattern.group:
        layers.append(_make_layer(config, spec, rngs))
    if len(layers) == 1:
        return layers[0]
    return LayerGroup(dict(zip(config.names_in_group, layers, strict=True)))


def _make_layer(config: DecoderConfig, spec: LayerSpec, rngs: nnx.Rngs) -> nnx.Module:
    return spec.build(config.sizes, config.router, config.angles_of(spec), rngs)


def _make_ahead(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    spec = config.ahead_layer
    angles = config.angles_of(spec)
    return AheadLayer(spec, config.sizes, config.router, angles, rngs=rngs)


def _add_stacks(
    model: nnx.Module,
    stacks: Mapping[str, tuple[LayerSpec, int]],
    config: DecoderConfig,
    rngs: nnx.Rngs,
) -> None:
    """Make the stacks of first or last layers, each an attribute of the model."""
    for name, (spec, count) in stacks.items():
        make = functools.partial(_make_layer, config, spec)
        stack = make_layers(make, count, rngs.params(), stacked=config.stacked)
        setattr(model, name, stack)


def _make_noise(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Return the random state of routers, for each stack by its name."""
    noise = nnx.Dict(layers=LayerNoise(config.pattern.repeats, rngs.params()))
    for name, (_, count) in config.last_stacks.items():
        noise[name] = LayerNoise(count, rngs.params())
    if config.predict_ahead:
        noise["ahead"] = LayerNoise(config.predict_ahead, rngs.params())
    return noise


def _move_biases(stack: nnx.Module, loads: Sequence[Array | None], rate: float) -> None:
    """Update the biases of the routers of a stack, or of a list of layers or groups.

    Args:
        stack: The layers.
        loads: For each layer of a group its load in all repeats; None without experts.
        rate: Change of a bias.
    """
    if not isinstance(stack, nnx.List):
        _move_biases_of(stack, loads, rate)
        return
    for number, layer in enumerate(stack):
        own = jax.tree.map(operator.itemgetter(number), tuple(loads))
        _move_biases_of(layer, own, rate)


def _move_biases_of(layer: nnx.Module, loads: Sequence[Array | None], rate: float) -> None:
    """Update the biases of the routers of a layer or group, stacked or not."""
    for member, load in zip(members_of(layer), loads, strict=True):
        if load is not None:
            bias = member.moe.router.bias
            bias[...] = balanced_bias(bias[...], load, rate)


def _in_order(reports: Reports) -> dict[str, Array]:
    """Return the routers' values of all layers of a stack, in order; empty without experts."""
    found = [report for report in reports if report is not None]
    if not found:
        return {}
    if len(found) == 1:
        return found[0]

    def interleave(*values: Array) -> Array:
        in_groups = jnp.stack(values, axis=1)  # [repeat, layer of the group, …]
        return in_groups.reshape(-1, *in_groups.shape[2:])

    return jax.tree.map(interleave, *found)


def _joined(reports: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the routers' values of all stacks."""
    found = [report for report in reports if report]
    if len(found) == 1:
        return found[0]
    return jax.tree.map(lambda *values: jnp.concatenate(values), *found)


def _outputs(logits: Array | LazyLogits, values: dict[str, Array], router: RouterConfig) -> Outputs:
    """Return logits with the routers' losses and metrics."""
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
