"""Compression of what devices send to each other, as fields of the configuration."""

import dataclasses

from spmd.errors import ConfigError, Problem

COMPRESSION = "compression"
"""The name of the state of compression among the model's variables."""

POWERSGD = "powersgd"


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Fewer bytes for what devices send to each other."""

    gradients: str = ""
    """Exchange of gradients: empty for the dtype of the precision policy; powersgd:R for matrices of rank R over data,
    with error feedback."""


def powersgd_rank(gradients: str) -> int:
    """Return the rank of `powersgd:R`, 0 for no compression, or raise a `ConfigError`.

    Example:
        >>> powersgd_rank("powersgd:4"), powersgd_rank("")
        (4, 0)
    """
    if not gradients:
        return 0
    name, _, rank = gradients.partition(":")
    if name == POWERSGD and rank.isascii() and rank.isdigit() and 0 < int(rank) < 2**31:
        return int(rank)
    fix = f"{POWERSGD}:4, with a rank of at least 1; or empty"
    problem = Problem("compress.gradients", f"is {gradients!r}", fix=fix)
    raise ConfigError("Gradients cannot be compressed like this:", [problem])
