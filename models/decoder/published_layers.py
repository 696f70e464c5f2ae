"""Kinds of layers as in config.json: `layer_types`, a word for each layer, and the window.

```python
kinds = read_layer_types(fields, layers, default=every(4, layers))
window = read_window_of(fields, kinds, absent=4096)
fields.build(DecoderConfig, **sizes, **attention_table(LayerSpec(), window, kinds))
```
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from spmd.errors import did_you_mean
from spmd.hf.fields import Fields
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.pattern import find_pattern

FULL = "full_attention"
"""Attention to all preceding tokens."""
SLIDING = "sliding_attention"
"""Attention in a sliding window of `sliding_window` tokens, the attending one included."""

_MOST_LAYERS = 1000
_UNUSED_WINDOW = 4096

Kind = TypeVar("Kind", bound=str | tuple[Any, ...])


def every(interval: int, layers: int, often: str = SLIDING, seldom: str = FULL) -> list[str]:
    """Return the kinds of layers, with `seldom` for the last one of each interval.

    Example:
        >>> every(3, 4, "s", "f")
        ['s', 's', 'f', 's']
    """
    kinds = []
    for number in range(1, min(layers, _MOST_LAYERS) + 1):
        kind = often
        if number % interval == 0:
            kind = seldom
        kinds.append(kind)
    return kinds


def read_layer_types(
    fields: Fields,
    layers: int,
    default: Sequence[str],
    known: Collection[str] = (FULL, SLIDING),
) -> list[str]:
    """Parse `layer_types`; a wrong number of words and unknown ones are reported to `fields`.

    Args:
        fields: Fields of config.json.
        layers: Number of layers.
        default: The kinds if the field is absent or null.
        known: The supported words.
    """
    if layers > _MOST_LAYERS:
        fields.refuse("num_hidden_layers", f"is {layers}, and at most {_MOST_LAYERS} have kinds")
        return list(default)
    found = fields.value("layer_types")
    if found is None:
        return list(default)
    if not isinstance(found, list):
        fields.refuse("layer_types", f"is {found!r:.80}, not a list of words")
        return list(default)
    if len(found) != layers:
        fields.refuse("layer_types", f"has {len(found)} words for {layers} layers")
        return list(default)
    unknown = [(number, word) for number, word in enumerate(found) if word not in known]
    for number, word in unknown[:3]:
        what = f"is {word!r:.80}, and this model supports only {' or '.join(known)}"
        fields.refuse(f"layer_types[{number}]", what, did_you_mean(str(word), known))
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
    pattern = find_pattern(kinds)
    return {
        "first": tuple(specs[kind] for kind in pattern.first),
        "group": tuple(specs[kind] for kind in pattern.group),
        "last": tuple(specs[kind] for kind in pattern.last),
    }


def attention_table(
    layer: LayerSpec,
    window: int,
    kinds: Sequence[str],
    *,
    rotated: Sequence[bool] | None = None,
) -> dict[str, Any]:
    """Return the layer table, arguments of `DecoderConfig`, of layers that differ in attention.

    Args:
        layer: A layer of full attention with rotary positions.
        window: Sliding window of layers of kind `sliding_attention`.
        kinds: The kind of each layer.
        rotated: Whether each layer has rotary positions; by default all have.
    """
    if rotated is None:
        rotated = [True] * len(kinds)
    pairs = [*zip(kinds, rotated, strict=True)]
    specs = {}
    for kind, has_positions in dict.fromkeys(pairs):
        changes: dict[str, Any] = {"window": 0}
        if kind == SLIDING:
            changes["window"] = window
        if not has_positions:
            changes["rotary"] = None
        mixer = dataclasses.replace(layer.mixer, **changes)
        specs[kind, has_positions] = dataclasses.replace(layer, mixer=mixer)
    return layer_table(pairs, specs)


def layer_types(config: DecoderConfig) -> list[str]:
    """Return `layer_types` of a config: the inverse of `read_layer_types`."""
    kinds = []
    for spec in config.pattern.kinds:
        kind = FULL
        if spec.mixer.window:
            kind = SLIDING
        kinds.append(kind)
    return kinds


def write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields `layer_types` and `sliding_window`.

    `transformers` needs a window also if no layer has one.
    """
    window = max(spec.mixer.window or 0 for spec in config.pattern.kinds)
    return {"layer_types": layer_types(config), "sliding_window": window or _UNUSED_WINDOW}


def rotated_layers(config: DecoderConfig) -> list[bool]:
    """Return whether each layer has rotary positions."""
    return [spec.mixer.rotary is not None for spec in config.pattern.kinds]
