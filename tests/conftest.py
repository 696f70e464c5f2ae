"""Every test sees eight simulated devices, strict rank promotion, and warnings as errors (see pyproject).

XLA's expensive optimisations are off and its CPU code is the kind that compiles fastest, which makes the suite five
times faster, and equal programs are compiled once for the whole session; what is asked of the optimised program is
asked in subprocesses, which start with the environment that pytest started with.
"""

import atexit
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from spmd.mesh import simulate_devices
from tests.programs import FAST_TO_COMPILE

gc.set_threshold(50_000)  # tracing makes many objects and few cycles
simulate_devices(8)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
_CACHE = tempfile.TemporaryDirectory(prefix="spmd-tests-")
atexit.register(_CACHE.cleanup)
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name  # for runs in processes of their own
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

with pytest.MonkeyPatch.context() as _environment:
    _environment.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {FAST_TO_COMPILE}".strip())
    jax.devices()  # XLA reads its flags once, here


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Devices are asserted, never skipped for."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """After a file, programs are forgotten where there are many: each has mappings of memory, of which Linux allows a
    process 65,530, and XLA aborts without one. Those that are needed again are on the disk."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()
