"""Presets of the installed families, found by entry points."""

import functools
import importlib
import importlib.metadata

from spmd.hf.family import GROUP, Family, families
from spmd.models.decoder import DecoderConfig


@functools.cache
def presets_by_module() -> dict[str, dict[str, DecoderConfig]]:
    """Return the decoders among the presets of each module of families, by its last name."""
    found = {}
    modules = {entry.module for entry in importlib.metadata.entry_points(group=GROUP)}
    for path in sorted(modules):
        presets = getattr(importlib.import_module(path), "PRESETS", {})
        decoders = {}
        for preset, config in presets.items():
            if isinstance(config, DecoderConfig):
                decoders[preset] = config
        found[path.rpartition(".")[2]] = decoders
    return found


@functools.cache
def all_decoders() -> dict[str, DecoderConfig]:
    """Return the decoders of all modules by preset."""
    found: dict[str, DecoderConfig] = {}
    for decoders in presets_by_module().values():
        found |= decoders
    return found


@functools.cache
def small_decoders() -> dict[str, DecoderConfig]:
    """Return the small decoder of each family: presets `test-NAME` by NAME, those `test` by the module.

    Families of other models, such as of images, have none.
    """
    found = {}
    for module, decoders in presets_by_module().items():
        for preset, config in decoders.items():
            first, _, name = preset.partition("-")
            if first == "test":
                found[name or module] = config
    return found


@functools.cache
def family_of(name: str) -> Family:
    """Return the first family of the small decoder of a name."""
    config = small_decoders()[name]
    fitting = [family for family in families().values() if family.fits(config)]
    return min(fitting, key=lambda family: family.secondary)
