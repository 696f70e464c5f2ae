"""Families of decoders as published on Hugging Face: config.json and the names of all tensors.

A family is a reading and a writing of config.json, and a table from the parameters of a layer to
its tensors:

```python
FAMILY = decoder_family("MistralForCausalLM", _read, _write)
```
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx
from flax.core import FrozenDict

from spmd.errors import SpmdError
from spmd.hf.family import Family, Ignored, TensorMapping
from spmd.hf.layout import AS_IS, TRANSPOSED
from spmd.layers.router import RouterConfig
from spmd.models.decoder.declared import MissingPartError
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.experts import RouterBias
from spmd.models.decoder.rules import decoder_rules
from spmd.models.published.tensor_names import Names, module_names

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


@functools.lru_cache(maxsize=8)  # an import asks for the names of one model several times
def _paths(config: DecoderConfig) -> Mapping[str, bool]:
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
        except (SpmdError, MissingPartError):
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
