"""Every test sees eight simulated devices, strict rank promotion, and warnings as errors (see pyproject).

Machine code is made as fast as can be, here and in processes that tests start, which makes the suite several times
faster; XLA's programs are as optimised as ever. Equal programs are compiled once for the whole session.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.programs import FAST_TO_COMPILE

_CACHE = tempfile.TemporaryDirectory(prefix="spmd-tests-")
os.environ |= FAST_TO_COMPILE | {"JAX_COMPILATION_CACHE_DIR": _CACHE.name}

import jax  # noqa: E402 (JAX and XLA read variables when they are imported)
import pytest  # noqa: E402

from spmd.mesh import simulate_devices  # noqa: E402

gc.set_threshold(50_000)  # tracing makes many objects and few cycles
simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


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
