"""The versions of everything that can change what a checkpoint means."""

import functools
import importlib.metadata
import platform

import jax

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "spmd")


def library_versions() -> dict[str, str]:
    """The versions of Python, of every library that can change what a checkpoint means, and of what runs the programs.

    The last, `runtime`, is what the backend says of itself: on a TPU the build of libtpu, on a GPU that of CUDA. Asking
    it starts the backend, so processes must have met before.

    Example:
        >>> sorted(library_versions())
        ['flax', 'jax', 'jaxlib', 'numpy', 'optax', 'orbax-checkpoint', 'python', 'runtime', 'spmd']
    """
    libraries = {name: _version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **libraries, "runtime": jax.devices()[0].client.platform_version}


@functools.cache  # the file that says so is read once, not at each save
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
