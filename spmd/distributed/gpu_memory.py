"""JAX's share of a GPU's memory: one limit for plans, searches and runs.

JAX's own default is 0.75, of which a plan would know nothing. So a run sets the share before JAX
starts, unless the user has set it.
"""

import contextlib
from collections.abc import Mapping

from spmd.errors import ConfigError, Problem

FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
"""Environment variable of the share; JAX reads it when it starts."""
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"

DEFAULT_FRACTION = 0.9
"""Share that a run takes: the rest is for CUDA, NCCL's buffers, and other libraries."""


def read_fraction(environment: Mapping[str, str]) -> float | None:
    """Return the user's share; None if there is none.

    Raises:
        ConfigError: It is no positive number, or both of its names are set, which jaxlib refuses.

    Example:
        >>> read_fraction({"XLA_CLIENT_MEM_FRACTION": "0.8"}), read_fraction({})
        (0.8, None)
    """
    found = {}
    for name in (FRACTION_VARIABLE, _OLD_NAME):
        if environment.get(name):
            found[name] = environment[name]
    problems = []
    if len(found) > 1:
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        what = "is set twice, and jaxlib refuses both"
        problems.append(Problem(FRACTION_VARIABLE, what, values, f"unset {_OLD_NAME}"))
    fraction: float | None = None
    for name, value in found.items():
        fraction = 0.0
        with contextlib.suppress(ValueError):
            fraction = float(value)
        if not fraction > 0:
            what = f"is {value!r}, and no share of a GPU's memory"
            problems.append(Problem(name, what, fix=f"such as {DEFAULT_FRACTION}"))
    if problems:
        raise ConfigError("Invalid share of GPU memory:", problems)
    return fraction
