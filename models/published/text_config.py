"""Text parts of published models of images and text.

Its config.json has the decoder's fields in `text_config`, and its tensors have another prefix. Only
the text part is read; it is exported as a model of text.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from spmd.hf.family import Ignored
from spmd.hf.fields import is_harmless
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.published.family import ENDS, TensorNames
from spmd.models.published.tensor_names import Names

TEXT_PREFIX = "model.language_model."
"""Prefix of the decoder's tensors in a model of images and text."""
EARLIER_HEAD = "language_model.lm_head"
"""Module of the output head in models with `earlier_names`."""

_TEXT = "text_config"
_TIED = "tie_word_embeddings"


def text_values(values: Mapping[str, Any], others: Collection[str]) -> dict[str, Any]:
    """Return the fields of the decoder from a config.json of text, or of images and text.

    Other fields outside of `text_config` get a name that no family reads, so that they are refused.

    Args:
        values: The fields of config.json.
        others: Fields of images, which are without effect on text.

    Example:
        >>> text_values({"text_config": {"vocab_size": 64}, "image_token_id": 7}, ["image_token_id"])
        {'vocab_size': 64}
    """
    text = values.get(_TEXT)
    if not isinstance(text, Mapping):
        return dict(values)
    # Of the two fields about a tied head, the outer one has an effect.
    found = {name: value for name, value in text.items() if name != _TIED}
    for name, value in values.items():
        if name == _TIED:
            found[name] = value
        elif name not in (_TEXT, *others) and not is_harmless(name, value):
            found[f"{name} (outside of {_TEXT})"] = value  # is refused as unknown
    return found


def earlier_names(layer: Names) -> Callable[[DecoderConfig], TensorNames]:
    """Return the names of the tensors of a text part with the prefix `language_model`.

    Args:
        layer: Tensors of a layer.
    """
    names = TensorNames(layer, ENDS, "language_model.model.", head=EARLIER_HEAD)
    return lambda config: names


def ignored_images(modules: Iterable[str], others: Iterable[str] = ()) -> tuple[Ignored, ...]:
    """Return the tensors of images.

    Args:
        modules: Modules with a weight and perhaps a bias.
        others: Other tensors.

    Example:
        >>> [entry.tensor for entry in ignored_images(["norm"], ["class_embedding"])]
        ['class_embedding', 'norm.weight', 'norm.bias']
    """
    names = [*others]
    for module in modules:
        names += [f"{module}.weight", f"{module}.bias"]
    why = "is for images, and this is a model of text"
    return tuple(Ignored(name, why) for name in names)
