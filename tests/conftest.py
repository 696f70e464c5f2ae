"""Every test sees eight simulated devices, strict rank promotion, and warnings as errors (see pyproject).

XLA's expensive optimisations are off, which makes the suite three times faster; what is asked of the optimised program
is asked in subprocesses.
"""

import jax
import pytest

from spmd.mesh import simulate_devices

simulate_devices(8)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Devices are asserted, never skipped for."""
    assert jax.device_count() == 8
