"""The versions of everything that can change what a checkpoint means."""

import functools
import importlib.metadata
import platform

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "spmd")


def library_versions() -> dict[str, str]:
    """The versions of Python and of every library that can change what a checkpoint means.

    Example:
        >>> sorted(library_versions())
        ['flax', 'jax', 'jaxlib', 'numpy', 'optax', 'orbax-checkpoint', 'python', 'spmd']
    """
    return {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}}


@functools.cache  # the file that says so is read once, not at each save
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
