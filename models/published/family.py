"""Decoders as published on Hugging Face: fields of config.json and names of tensors.

A family is a reading and a writing of config.json, and a table from the parameters of a layer to
its tensors:

```python
FAMILY = decoder_family("MistralForCausalLM", _read, _write)
```
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx
from flax.core import FrozenDict

from spmd.errors import SpmdError
from spmd.hf.family import Family, Ignored, TensorMapping
from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, TRANSPOSED
from spmd.layers.router import RouterConfig
from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.experts import RouterBias
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.decoder.rules import decoder_rules
from spmd.models.published.rotary import read_rotary, write_rotary
from spmd.models.published.tensor_names import Names, module_names

TANH = "gelu_pytorch_tanh"
"""Activation of config.json: gelu by the tanh approximation."""

_KERNELS = {
    "attention/q_proj": "self_attn.q_proj",
    "attention/k_proj": "self_attn.k_proj",
    "attention/v_proj": "self_attn.v_proj",
    "attention/o_proj": "self_attn.o_proj",
    "mlp/gate_proj": "mlp.gate_proj",
    "mlp/up_proj": "mlp.up_proj",
    "mlp/down_proj": "mlp.down_proj",
}
_NORMS = {
    "attention/q_norm": "self_attn.q_norm",
    "attention/k_norm": "self_attn.k_norm",
}
ENDS: Names = {
    "embed/embedding": ("embed_tokens.weight", AS_IS),
    "norm/scale": ("norm.weight", AS_IS),
    "norm/bias": ("norm.bias", AS_IS),
}
"""Tensors outside of layers, without their prefix."""


def layer_names(**norms: str) -> Names:
    """Return the tensors of a layer with the names of Llama.

    Args:
        **norms: Norm of the residual stream → its tensor; by default those of Llama.
    """
    norms = norms or {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    return module_names(_KERNELS, _NORMS | norms)


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Names of all tensors of a decoder.

    Attributes:
        layer: Tensors of a layer.
        ends: Tensors outside of layers.
        prefix: Prefix of all but the head's.
        layers: Prefix of a layer, with its number.
        head: Module of the output head.
        ahead: Tensors of a module of multi-token prediction besides those of its layer, with the
            number of a layer after the last one; None if they have no published names.
        constants: Scalars of a layer without a parameter, with their values.
    """

    layer: Names
    ends: Names
    prefix: str = "model."
    layers: str = "layers.{layer}."
    head: str = "lm_head"
    ahead: Names | None = None
    constants: Mapping[str, float] = FrozenDict()

    @property
    def _head(self) -> str:
        """Kernel of the output head."""
        return f"{self.head}.weight"

    def mappings(self, config: DecoderConfig) -> tuple[TensorMapping, ...]:
        """Return the mappings of all parameters of a config, and of the biases of routers."""
        places = _places(config)
        found = []
        for path, is_variable in _paths(config).items():
            place = next((name for name in places if path.startswith(f"{name}/")), None)
            if place is not None:
                mapping = self._of_layer(path, path.removeprefix(f"{place}/"), places[place])
            else:
                mapping = self._of_end(path)
            if mapping is not None:
                found.append(dataclasses.replace(mapping, is_variable=is_variable))
        return tuple(found)

    def _of_layer(self, path: str, name: str, place: tuple[int, int]) -> TensorMapping | None:
        """Return the mapping of a parameter in layers, by its name in a layer."""
        names = self.layer
        if path.startswith(_AHEAD):
            names = self._ahead_names
        if name not in names:
            return None  # reported as a parameter without a mapping
        tensor, layout = names[name]
        first, step = place
        return TensorMapping(path, self.prefix + self.layers + tensor, layout, first, step)

    @property
    def _ahead_names(self) -> Names:
        """Tensors of a whole module of multi-token prediction; empty if it has none."""
        if self.ahead is None:
            return {}
        of_layer = {f"layer/{name}": tensor for name, tensor in self.layer.items()}
        return of_layer | self.ahead

    def _of_end(self, path: str) -> TensorMapping | None:
        """Return the mapping of a parameter outside of layers."""
        if path == "lm_head/kernel":
            return TensorMapping(path, self._head, TRANSPOSED)
        if path == "logits_bias":
            return TensorMapping(path, f"{self.head}.bias")
        if path not in self.ends:
            return None
        tensor, layout = self.ends[path]
        return TensorMapping(path, self.prefix + tensor, layout)

    def ignored(self, config: DecoderConfig) -> tuple[Ignored, ...]:
        """Return tensors of a checkpoint without a parameter."""
        rotary = f"{self.prefix}{self.layers}self_attn.rotary_emb.inv_freq"
        entries = [Ignored(rotary, "follows from rope_theta")]
        if config.tied:
            embedding, _ = self.ends["embed/embedding"]
            copy = Ignored(self._head, "is a copy of the embedding", self.prefix + embedding)
            entries.append(copy)
        return (*entries, *self._ignored_ahead(config), *self._constants(config))

    def _constants(self, config: DecoderConfig) -> Iterator[Ignored]:
        """Yield the constants of all layers."""
        for layer in range(config.layers):
            prefix = (self.prefix + self.layers).format(layer=layer)
            for tensor, value in self.constants.items():
                yield Ignored(prefix + tensor, "is a constant of this model", value=value)

    def _ignored_ahead(self, config: DecoderConfig) -> Iterator[Ignored]:
        """Yield the tensors of modules of multi-token prediction that are not used.

        These are copies of embedding and head, and all tensors of a module that the model lacks.
        """
        if self.ahead is None:
            return
        layers = self.prefix + self.layers
        if not config.predict_ahead:
            why = "predicts the second next token, which a model with predict_ahead=0 does not"
            prefix = layers.format(layer=config.layers)
            tensors = [tensor for tensor, _ in self._ahead_names.values()]
            for tensor in [*tensors, *self._shared_by_ahead]:
                yield Ignored(prefix + tensor, why)
        for number in range(config.predict_ahead):
            prefix = layers.format(layer=config.layers + number)
            for tensor, original in self._shared_by_ahead.items():
                yield Ignored(prefix + tensor, f"is a copy of {original}", original)

    @property
    def _shared_by_ahead(self) -> dict[str, str]:
        """Copy in a module of multi-token prediction → its tensor in the main model."""
        embedding, _ = self.ends["embed/embedding"]
        return {embedding: self.prefix + embedding, "shared_head.head.weight": self._head}


def _places(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return the path of each stack of layers, with its first layer's number and the step."""
    places = {}
    number = 0
    for name, (_, count) in config.first_stacks.items():
        places[name] = (number, 1)
        number += count
    pattern = config.pattern
    size = len(pattern.group)
    if size == 1:
        places["layers"] = (number, 1)
    else:
        for index, name in enumerate(config.names_in_group):
            places[f"layers/{name}"] = (number + index, size)
    number += pattern.repeats * size
    for name, (_, count) in config.last_stacks.items():
        places[name] = (number, 1)
        number += count
    places[_AHEAD.removesuffix("/")] = (number, 1)
    return places


_AHEAD = "ahead/"
"""Path of the modules of multi-token prediction."""


def _paths(config: DecoderConfig) -> dict[str, bool]:
    """Return path → whether it is of a variable, of the parameters and biases of a stacked model."""
    stacked = dataclasses.replace(config, stacked=True)
    model = nnx.eval_shape(lambda: stacked.build(nnx.Rngs(0)))
    paths = {}
    for kind in (nnx.Param, RouterBias):
        for path, _ in nnx.to_flat_state(nnx.state(model, kind)):
            paths["/".join(map(str, path))] = kind is RouterBias
    return paths


def decoder_family(
    architecture: str | tuple[str, ...],
    read: Callable[[Mapping[str, Any]], DecoderConfig],
    write: Callable[[DecoderConfig], dict[str, Any]],
    layer: Names | None = None,
    *,
    names: TensorNames | Callable[[DecoderConfig], TensorNames] | None = None,
    other_names: Sequence[Callable[[DecoderConfig], TensorNames]] = (),
    ignored: tuple[Ignored, ...] = (),
    harmless: tuple[str, ...] = (),
    optional_prefix: str = "",
    secondary: bool = False,
    for_tensors: Callable[[Any, Collection[str]], Any] = lambda config, tensors: config,
) -> Family:
    """Return a family of decoders.

    A config belongs to it if reading what is written gives the same decoder.

    Args:
        architecture: Name in config.json; of several, the first is written.
        read: Parses config.json, without harmless fields.
        write: Inverse of `read`; of a config of another family, it may write anything.
        layer: Tensors of a layer; those of Llama by default.
        names: Tensors of the whole model, or a function from a config to them; by default `layer`,
            and the rest as in Llama.
        other_names: Names of all tensors in other forms of checkpoints, which are read too.
        ignored: More tensors without a parameter.
        harmless: As in `Family`.
        optional_prefix: Prefix that tensors may lack.
        secondary: As in `Family`.
        for_tensors: As in `Family`.
    """
    default = TensorNames(layer or layer_names(), ENDS)

    def tensors(config: DecoderConfig) -> TensorNames:
        if callable(names):
            return names(config)
        return names or default

    def read_others(values: Mapping[str, Any]) -> DecoderConfig:
        others = {name: value for name, value in values.items() if name not in harmless}
        return read(others)

    def fits(config: Any) -> bool:
        if not isinstance(config, DecoderConfig):
            return False
        try:
            again = read(write(config))
        except (SpmdError, AttributeError):  # a part of the config is of another kind
            return False
        return _published_form(again) == _published_form(config)

    def others(config: DecoderConfig) -> tuple[TensorMapping, ...]:
        found: list[TensorMapping] = []
        for form in other_names:
            found += form(config).mappings(config)
        return tuple(found)

    architectures = architecture
    if isinstance(architectures, str):
        architectures = (architectures,)
    return Family(
        architectures=architectures,
        read_config=read_others,
        write_config=write,
        fits=fits,
        rules=decoder_rules,
        names=lambda config: tensors(config).mappings(config),
        ignored=lambda config: (*tensors(config).ignored(config), *ignored),
        prefix=optional_prefix,
        harmless=harmless,
        secondary=secondary,
        for_tensors=for_tensors,
        other_names=others,
    )


def _published_form(config: DecoderConfig) -> tuple[Any, ...]:
    """Return the fields of a config with an effect on a trained model."""
    kinds = []
    for spec, count in config.pattern.counted:
        plain = dataclasses.replace(spec, name="", input_name="residual")
        kinds.append((plain, count))
    router = config.router
    if router is not None:
        router = dataclasses.replace(router, **_UNTRAINED)
    scale = config.embed_scale or config.d_model**0.5
    return (
        *(config.vocab, config.d_model, config.norm_eps, config.tied, config.norm),
        *(config.positions, config.unused_positions, scale, config.embed_norm),
        *(config.residual_scale, config.logits_scale, config.logits_soft_cap),
        *(config.logits_bias, config.predict_ahead, router, *kinds),
    )


_PLAIN_ROUTER = RouterConfig()
_OF_TRAINING = ("jitter", "balance", "balance_form", "balance_over", "z_loss", "bias_rate")
_UNTRAINED = {name: getattr(_PLAIN_ROUTER, name) for name in _OF_TRAINING}
"""Fields of a router that affect only training."""


def read_sizes(
    fields: Fields,
    *,
    eps: float = 1e-6,
    eps_field: str = "rms_norm_eps",
    theta: float = 10_000.0,
    head_dim: int = 0,
    kv_heads: int = 0,
    d_ff: int | None = None,
    tied: bool = False,
    activation: tuple[str, ...] = ("hidden_act", "silu"),
    heads_divide: bool = False,
    has_head_dim: bool = True,
    d_ff_ratio: int = 0,
) -> dict[str, Any]:
    """Parse the common fields, as arguments of `DecoderConfig`.

    Args:
        fields: Fields of config.json.
        eps: Default of the norms' field; the value without such a field.
        eps_field: Name of that field; empty for none.
        theta: Default of `rope_theta`; 0 for a family that reads its rotary embeddings itself.
        head_dim: Default of `head_dim`; 0 for the width divided by the heads.
        kv_heads: `num_key_value_heads` if it is absent; null always means as many as heads, as does
            0 here.
        d_ff: Default of `intermediate_size`; None if it is required.
        tied: Default of `tie_word_embeddings`.
        activation: Name of the MLP's activation field, and the supported values; empty for a family
            that reads it itself.
        heads_divide: Whether the heads must divide the width.
        has_head_dim: Whether a head may have another width than the model's divided by the heads.
        d_ff_ratio: Default of `intermediate_size`, in widths; 0 if it is required.
    """
    width = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    must_divide = heads_divide or not has_head_dim
    if must_divide and width % heads:
        what = f"is {heads}, which does not divide hidden_size {width}, as this family needs"
        fields.refuse("num_attention_heads", what)
    if fields.is_null("head_dim"):
        head_dim = 0
    head_dim = fields.integer("head_dim", head_dim or max(1, width // heads))
    if head_dim * heads == width:
        head_dim = 0
    if head_dim and not has_head_dim and fields.value("head_dim") is not None:
        fields.refuse("head_dim", f"is {head_dim}, not hidden_size / num_attention_heads")
    if activation:
        fields.only(*activation)
    fields.only("is_causal", True)
    if fields.is_null("num_key_value_heads") or not kv_heads:
        kv_heads = heads
    if eps_field:
        eps = fields.number(eps_field, eps, least=0)
    if d_ff_ratio:
        d_ff = d_ff_ratio * width
    rotary = {}
    if theta:
        rotary = read_network_rotary(fields, Rotary(theta, RopeScaling()))
    return {
        "vocab": fields.integer("vocab_size"),
        "d_model": width,
        "layers": fields.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", kv_heads),
        "d_ff": fields.integer("intermediate_size", d_ff),
        "head_dim": head_dim,
        **rotary,
        "norm_eps": eps,
        "tied": fields.flag("tie_word_embeddings", tied),
    }


def read_network_rotary(fields: Fields, default: Rotary, **options: Any) -> dict[str, Any]:
    """Parse the rotary embeddings of whole heads, equal in all layers, as arguments of `DecoderConfig`.

    Args:
        fields: Fields of config.json.
        default: The embeddings of a file without them.
        **options: As for `read_rotary`.
    """
    rotary = read_rotary(fields, default, **options)
    if rotary.fraction != 1:
        what = f"is {rotary.fraction:g}, and this model rotates whole heads"
        fields.refuse("partial_rotary_factor", what)
    return {"rope_theta": rotary.theta, "rope_scaling": rotary.scaling}


_MIXER = AttentionSpec()


def read_layer(fields: Fields) -> LayerSpec:
    """Parse `attention_bias` and `mlp_bias`, of all kernels of attention and MLP."""
    mlp = MLPSpec(bias=fields.flag("mlp_bias", False))
    return LayerSpec(read_attention_bias(fields), mlp)


def read_attention_bias(fields: Fields, mixer: AttentionSpec = _MIXER) -> AttentionSpec:
    """Parse `attention_bias`, of all kernels of attention; return `mixer` with these biases."""
    bias = fields.flag("attention_bias", default=False)
    return dataclasses.replace(mixer, qkv_bias=bias, out_bias=bias)


def write_biases(config: DecoderConfig) -> dict[str, bool]:
    """Return `attention_bias` and `mlp_bias`: the inverse of `read_layer`."""
    spec = config.pattern.group[0]
    mlp_bias = isinstance(spec.mlp, MLPSpec) and spec.mlp.bias
    return {"attention_bias": spec.attention.qkv_bias, "mlp_bias": mlp_bias}


def read_window(fields: Fields, absent: int) -> int:
    """Parse `sliding_window`; null means 0, full attention, and `absent` is the default."""
    if fields.value("sliding_window") is not None:
        return fields.integer("sliding_window")
    if fields.is_null("sliding_window"):
        return 0
    return absent


def read_factor(fields: Fields, name: str, absent: float = 1.0) -> float:
    """Parse a factor, a number above 0; `absent` is the default."""
    factor = fields.number(name, absent, least=0)
    if factor == 0:
        fields.refuse(name, "is 0", "a number above 0")
        return 1.0
    return factor


def read_clip(fields: Fields) -> float:
    """Parse `clip_qkv`, the largest absolute value of queries, keys and values; 0 for no limit."""
    if fields.value("clip_qkv") is None:
        return 0.0
    limit = fields.number("clip_qkv")
    if limit <= 0:
        fields.refuse("clip_qkv", f"is {limit}", "a number above 0, or null for no limit")
        return 0.0
    return limit


def read_soft_cap(fields: Fields, name: str, absent: float) -> float:
    """Parse a soft cap; null means 0, no cap, and `absent` is the default."""
    if fields.is_null(name):
        return 0.0
    cap = fields.number(name, absent, least=0)
    if cap == 0 and fields.value(name) is not None:
        fields.refuse(name, "is 0", "a number above 0, or null for no cap")
    return cap


def write_query_scale(config: DecoderConfig) -> int:
    """Return `query_pre_attn_scalar`: scores are divided by its square root."""
    mixer = config.pattern.distinct[0].attention
    if not mixer.scale:
        return mixer.head_dim
    return round(mixer.scale**-2)


def _repeats(kinds: Any, layers: int, pattern: tuple[str, ...]) -> bool:
    if not isinstance(kinds, list) or len(kinds) != layers:
        return False
    return all(kind == pattern[i % len(pattern)] for i, kind in enumerate(kinds))


def check_layer_types(fields: Fields, layers: int, *pattern: str) -> None:
    """Require `layer_types`, if present, to repeat a pattern of attention kinds over all layers."""
    kinds = fields.value("layer_types")
    if kinds is None:
        return
    if not _repeats(kinds, layers, pattern):
        supported = " and ".join(pattern)
        what = f"is {kinds!r:.80}, and this model has {layers} layers of alternating {supported}"
        fields.refuse("layer_types", what)


def write_sizes(
    config: DecoderConfig, eps_field: str = "rms_norm_eps", rotary: Rotary | None = None
) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_sizes`.

    Args:
        config: The config of a model.
        eps_field: Name of the norms' field; empty for none.
        rotary: Rotary positions; by default those of the network.
    """
    if rotary is None:
        rotary = Rotary(config.rope_theta, config.rope_scaling)
    eps = {}
    if eps_field:
        eps[eps_field] = config.norm_eps
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        **write_rotary(rotary),
        **eps,
        "tie_word_embeddings": config.tied,
    }
