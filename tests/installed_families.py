"""The small decoder of each installed family, found by entry points."""

import functools
import importlib
import importlib.metadata

from spmd.hf.family import GROUP, Family, families
from spmd.models.decoder import DecoderConfig


@functools.cache
def small_decoders() -> dict[str, DecoderConfig]:
    """Return the presets `test-NAME` of the families' modules by NAME, those `test` by the module.

    Families of other models, such as of images, have none.
    """
    found = {}
    modules = {entry.module for entry in importlib.metadata.entry_points(group=GROUP)}
    for path in sorted(modules):
        presets = getattr(importlib.import_module(path), "PRESETS", {})
        for preset, config in presets.items():
            first, _, name = preset.partition("-")
            if first == "test" and isinstance(config, DecoderConfig):
                found[name or path.rpartition(".")[2]] = config
    return found


@functools.cache
def family_of(name: str) -> Family:
    """Return the first family of the small decoder of a name."""
    config = small_decoders()[name]
    fitting = [family for family in families().values() if family.fits(config)]
    return min(fitting, key=lambda family: family.secondary)
