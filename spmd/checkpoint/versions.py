"""Versions of the libraries with an effect on checkpoints."""

import functools
import importlib.metadata
import platform

import jax

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "spmd")


def library_versions() -> dict[str, str]:
    """Return the versions of Python, the backend's runtime, and libraries relevant to checkpoints.

    `runtime` is the build of libtpu on a TPU and that of CUDA on a GPU. Reading it initializes the
    backend, so `jax.distributed` must be initialized before.
    """
    libraries = {name: library_version(name) for name in _LIBRARIES}
    runtime = jax.devices()[0].client.platform_version
    return {"python": platform.python_version(), **libraries, "runtime": runtime}


@functools.cache  # avoids reading package metadata at each save
def library_version(name: str) -> str:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
