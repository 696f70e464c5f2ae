"""Kinds of layers as in config.json: `layer_types`, a word for each layer, and the window.

```python
kinds = read_layer_types(fields, layers, default=every(4, layers))
window = read_window_of(fields, kinds, absent=4096)
fields.build(DecoderConfig, **sizes, **attention_table(LayerSpec(), window, kinds))
```
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from spmd.errors import did_you_mean, shorten
from spmd.hf.fields import Fields
from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.declared import MissingPartError
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.pattern import find_pattern
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.published.rotary import (
    read_rotary,
    read_rotary_by_layer,
    write_rotary_by_layer,
)

FULL = "full_attention"
"""Attention to all preceding tokens."""
SLIDING = "sliding_attention"
"""Attention in a sliding window of `sliding_window` tokens, the attending one included."""
LINEAR = "linear_attention"
"""A recurrent mixer: a gated delta net, or a state-space mixer."""

MOST_LAYERS = 1000
"""Most layers in a list with an entry for each; a file may claim more than fit in memory."""
_UNUSED_WINDOW = 4096
_LOCAL_THETA = "rope_local_base_freq"
"""Field with the base of layers with a window, in files before `transformers` 5."""

Kind = TypeVar("Kind", bound=Hashable)
M = TypeVar("M", bound=MixerSpec)


def every(interval: int, layers: int, often: str = SLIDING, seldom: str = FULL) -> list[str]:
    """Return the kinds of layers, with `seldom` for the last one of each interval.

    Example:
        >>> every(3, 4, "s", "f")
        ['s', 's', 'f', 's']
    """
    kinds = []
    for number in range(1, layers + 1):
        kind = often
        if number % interval == 0:
            kind = seldom
        kinds.append(kind)
    return kinds


def limit_layers(fields: Fields, layers: int, name: str = "num_hidden_layers") -> int:
    """Return a number of layers, at most 1000; a larger one is reported to `fields`."""
    if layers > MOST_LAYERS:
        fields.refuse(name, f"is {layers}, and at most {MOST_LAYERS} are supported")
        return MOST_LAYERS
    return layers


def read_layer_types(
    fields: Fields,
    layers: int,
    default: Sequence[str],
    known: Collection[str] = (FULL, SLIDING),
    name: str = "layer_types",
) -> list[str]:
    """Parse `layer_types`; a wrong number of words and unknown ones are reported to `fields`.

    Args:
        fields: Fields of config.json.
        layers: Number of layers.
        default: The kinds if the field is absent or null.
        known: The supported words.
        name: Name of the field.
    """
    found = fields.value(name)
    if found is None:
        return list(default)
    if not isinstance(found, list):
        fields.refuse(name, f"is {found!r:.80}, not a list of words")
        return list(default)
    if len(found) != layers:
        fields.refuse(name, f"has {len(found)} words for {layers} layers")
        return list(default)
    unknown = [(number, word) for number, word in enumerate(found) if word not in known]
    for number, word in unknown[:3]:
        what = f"is {word!r:.80}, and this model supports only {' or '.join(known)}"
        fields.refuse(f"{name}[{number}]", what, did_you_mean(str(word), known))
    if unknown:
        return list(default)
    return found


def read_window_of(fields: Fields, kinds: Collection[str], absent: int) -> int:
    """Parse `sliding_window`, of the layers of kind `sliding_attention`; 0 without such layers.

    Args:
        fields: Fields of config.json.
        kinds: The kinds of all layers.
        absent: The value if the field is absent.
    """
    found = fields.value("sliding_window", absent)
    if SLIDING not in kinds:
        return 0
    if fields.is_null("sliding_window") or not found:
        fields.refuse("sliding_window", f"is {found}, and layers are of kind {SLIDING}")
        return 1
    return fields.integer("sliding_window", absent)


def layer_table(kinds: Sequence[Kind], specs: Mapping[Kind, LayerSpec]) -> dict[str, Any]:
    """Return the layer table, arguments of `DecoderConfig`, of the kinds of all layers.

    Args:
        kinds: The kind of each layer.
        specs: Spec of each kind.

    Example:
        >>> table = layer_table("ssfssf", {"s": LayerSpec(), "f": LayerSpec(norms="both")})
        >>> [spec.norms for spec in table["group"]]
        ['before', 'before', 'both']
    """
    if len(set(kinds)) == 1:
        return {"layer": specs[kinds[0]]}
    pattern = find_pattern(kinds, lambda kind: not specs[kind].has_experts)
    return {
        "first": tuple(specs[kind] for kind in pattern.first),
        "group": tuple(specs[kind] for kind in pattern.group),
        "last": tuple(specs[kind] for kind in pattern.last),
    }


def table_of(layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """Return the layer table, arguments of `DecoderConfig`, of the specs of all layers."""
    numbers: dict[LayerSpec, int] = {}
    for spec in layers:
        numbers.setdefault(spec, len(numbers))
    specs = {number: spec for spec, number in numbers.items()}
    return layer_table([numbers[spec] for spec in layers], specs)


def attention_table(
    layer: LayerSpec,
    window: int,
    kinds: Sequence[str],
    *,
    rotary: Sequence[Rotary | None] | None = None,
) -> dict[str, Any]:
    """Return the layer table, arguments of `DecoderConfig`, of `attention_layers`."""
    return table_of(attention_layers(layer, window, kinds, rotary=rotary))


def attention_layers(
    layer: LayerSpec,
    window: int,
    kinds: Sequence[str],
    *,
    rotary: Sequence[Rotary | None] | None = None,
) -> list[LayerSpec]:
    """Return the specs of layers with different attention.

    Args:
        layer: A layer of full attention.
        window: Sliding window of layers of kind `sliding_attention`.
        kinds: The kind of each layer.
        rotary: The rotary positions of each layer; by default those of `layer`.
    """
    if rotary is None:
        rotary = [layer.attention.rotary] * len(kinds)
    layers = []
    for kind, positions in zip(kinds, rotary, strict=True):
        size = 0
        if kind == SLIDING:
            size = window
        mixer = dataclasses.replace(layer.attention, window=size, rotary=positions)
        layers.append(dataclasses.replace(layer, mixer=mixer))
    return layers


def rotary_where(rotated: Sequence[bool], rotary: Rotary) -> list[Rotary | None]:
    """Return the rotary positions of each layer: none where `rotated` is false."""
    positions: list[Rotary | None] = []
    for has_positions in rotated:
        if has_positions:
            positions.append(rotary)
        else:
            positions.append(None)
    return positions


def rotated_windows(
    layer: LayerSpec, window: int, kinds: Sequence[str], *, rotate_all: bool = False
) -> list[LayerSpec]:
    """Return the specs of layers with rotary positions only where they have a window.

    Args:
        layer: A layer of full attention.
        window: Sliding window of layers of kind `sliding_attention`.
        kinds: The kind of each layer.
        rotate_all: Rotate in all layers.
    """
    rotated = [kind == SLIDING or rotate_all for kind in kinds]
    return attention_layers(layer, window, kinds, rotary=rotary_where(rotated, Rotary()))


def read_rotated_windows(
    fields: Fields,
    layer: LayerSpec,
    layers: int,
    default: Sequence[str],
    *,
    absent: int,
    nullable: bool = False,
) -> list[LayerSpec]:
    """Parse `layer_types` and `sliding_window` of layers as in `rotated_windows`.

    Args:
        fields: Fields of config.json.
        layer: A layer of full attention.
        layers: Number of layers.
        default: The kind of each layer if `layer_types` is absent or null.
        absent: The window if the field is absent.
        nullable: Whether it may be null; then all layers have positions.
    """
    rotate_all = fields.is_null("sliding_window")
    if rotate_all and not nullable:
        fields.refuse("sliding_window", "is null, and this model needs a number")
    kinds = read_layer_types(fields, layers, default)
    window = read_window_of(fields, kinds, absent)
    return rotated_windows(layer, window, kinds, rotate_all=rotate_all)


def write_rotated_windows(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_rotated_windows`."""
    fields = write_layer_types(config)
    if FULL in fields["layer_types"] and all(rotated_layers(config)):
        fields["sliding_window"] = None  # with one, layers without it have no positions
    return fields


def read_rotary_by_kind(fields: Fields, theta: float, local_theta: float) -> dict[str, Rotary]:
    """Parse the rotary positions of layers of both kinds.

    In files before `transformers` 5, only full attention has a scaling of positions, and
    `rope_local_base_freq` is the base of layers with a window.

    Args:
        fields: Fields of config.json.
        theta: Default of the base in full attention.
        local_theta: Default of the base in layers with a window.
    """
    plain = RopeScaling()
    defaults = {FULL: Rotary(theta, plain), SLIDING: Rotary(local_theta, plain)}
    if fields.value("rope_parameters") is not None:
        fields.only("rope_scaling", None)
        return read_rotary_by_layer(fields, defaults, theta_fields={SLIDING: _LOCAL_THETA})
    local = fields.number(_LOCAL_THETA, local_theta, least=1)
    return {FULL: read_rotary(fields, defaults[FULL]), SLIDING: Rotary(local, plain)}


def write_rotary_by_kind(config: DecoderConfig, theta: float, local_theta: float) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_rotary_by_kind`.

    `theta` and `local_theta` are the bases of kinds without a layer.
    """
    plain = RopeScaling()
    found = {FULL: Rotary(theta, plain), SLIDING: Rotary(local_theta, plain)}
    for kind, spec in zip(layer_types(config), config.pattern.kinds, strict=True):
        if spec.attention.rotary is not None:
            found[kind] = spec.attention.rotary
    return write_rotary_by_layer(found)


def layer_types(config: DecoderConfig) -> list[str]:
    """Return `layer_types` of a config: the inverse of `read_layer_types`."""
    kinds = []
    for spec in config.pattern.kinds:
        kind = FULL
        if spec.attention.window:
            kind = SLIDING
        kinds.append(kind)
    return kinds


def write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields `layer_types` and `sliding_window`.

    `transformers` needs a window also if no layer has one.
    """
    window = max(spec.attention.window or 0 for spec in config.pattern.distinct)
    return {"layer_types": layer_types(config), "sliding_window": window or _UNUSED_WINDOW}


def mixer_of(config: DecoderConfig, kind: type[M]) -> M:
    """Return the first mixer of a kind.

    Raises:
        MissingPartError: No layer has one.
    """
    for spec in config.pattern.distinct:
        if isinstance(spec.mixer, kind):
            return spec.mixer
    raise MissingPartError(f"no layer has a {kind.__name__}")


_WITHOUT_POSITIONS = AttentionSpec(rotary=None)


def attention_of(
    config: DecoderConfig, default: AttentionSpec = _WITHOUT_POSITIONS
) -> AttentionSpec:
    """Return the attention of the first layer with one; without one, `default`."""
    for spec in config.pattern.distinct:
        if isinstance(spec.mixer, AttentionSpec):
            return spec.mixer
    return default.resolve(config.sizes)


def read_rotated(fields: Fields, layers: int, *, empty_is_absent: bool = False) -> list[bool]:
    """Parse `no_rope_layers`, 1 for each layer with rotary positions and 0 for the others.

    By default, the last layer of each `no_rope_layer_interval` has none.

    Args:
        fields: Fields of config.json.
        layers: Number of layers.
        empty_is_absent: Whether an empty list means the default (Llama 4).
    """
    interval = fields.integer("no_rope_layer_interval", 4)
    default = [word == "rotated" for word in every(interval, layers, "rotated", "not")]
    found = fields.value("no_rope_layers", [int(is_rotated) for is_rotated in default])
    if found == [] and empty_is_absent:
        return default
    if not isinstance(found, list) or len(found) != layers or not {*map(repr, found)} <= {"0", "1"}:
        what = f"is {shorten(found)}, not a list of 0 or 1 for each layer"
        fields.refuse("no_rope_layers", what)
        return default
    return [number == 1 for number in found]


def rotated_layers(config: DecoderConfig) -> list[bool]:
    """Return whether each layer has rotary positions."""
    return [spec.attention.rotary is not None for spec in config.pattern.kinds]
