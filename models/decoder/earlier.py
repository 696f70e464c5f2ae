"""Recorded configs of runs from the time of a class for each family."""

from collections.abc import Collection, Mapping
from typing import Any

KINDS = (
    "LlamaConfig",
    "QwenConfig",
    "MistralConfig",
    "GemmaConfig",
    "Gemma2Config",
    "MixtralConfig",
    "GPT2Config",
    "TransformerConfig",
)
"""Earlier classes of decoders."""


def current_values(values: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the recorded values with a field of today, by its name.

    The others say how layers are made: today this is in the layer table of the run's config file.

    Args:
        values: Recorded values of a config, of an earlier class or of today's.
        fields: Names of today's fields.

    Example:
        >>> current_values({"d_model": 64, "context": 48, "qkv_bias": True}, ["d_model", "positions"])
        {'d_model': 64, 'positions': 48}
    """
    current = dict(values)
    if "context" in current:
        current["positions"] = current.pop("context")
    if "query_scale" in current:  # of a Gemma 2, whose window was of every other layer
        current.pop("window", None)
    return {name: value for name, value in current.items() if name in fields}
