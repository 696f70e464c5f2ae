"""Every test sees eight simulated devices, strict rank promotion, and warnings as errors (see pyproject).

XLA's expensive optimisations are off, which makes the suite three times faster, and equal programs are compiled once
for the whole session; what is asked of the optimised program is asked in subprocesses.
"""

import atexit
import os
import tempfile

import jax
import pytest

from spmd.mesh import simulate_devices

simulate_devices(8)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
_CACHE = tempfile.TemporaryDirectory(prefix="spmd-tests-")
atexit.register(_CACHE.cleanup)
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name  # for runs in processes of their own
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Devices are asserted, never skipped for."""
    assert jax.device_count() == 8
