"""Absence of a token mixer: a layer with an MLP or experts alone, as in Nemotron-H."""

import dataclasses

from spmd.errors import Problem
from spmd.models.decoder.declared import Axes, TableRows
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class NoMixerSpec(MixerSpec):
    """No token mixer and no norm before it: the layer has an MLP or experts alone."""

    name = ""
    """No module in a layer."""

    def resolve(self, sizes: Sizes) -> "NoMixerSpec":
        """Return the spec itself: it has no fields."""
        del sizes
        return self

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return no problems."""
        del where, sizes
        return []

    def matmul_params(self, sizes: Sizes) -> int:
        """Return 0: it has no parameters."""
        del sizes
        return 0

    def other_params(self, sizes: Sizes) -> int:
        """Return 0: it has no parameters."""
        del sizes
        return 0

    def rows(self, fsdp: Axes) -> TableRows:
        """Return no rows of the rule table."""
        del fsdp
        return TableRows()
