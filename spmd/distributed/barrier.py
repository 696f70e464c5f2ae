"""Barrier of all processes with a time limit.

It is one of JAX's coordination service, not of the devices: a collective waits forever for a
process that does not take part.
"""

import contextlib
import hashlib

import jax
import orbax.checkpoint as ocp


def all_reach(name: str, seconds: float) -> bool:
    """Wait for all processes at the barrier of a name; return false if some are not there in time.

    Example:
        >>> all_reach("an error of all processes", seconds=1.0)
        True
    """
    if not jax.distributed.is_initialized():
        return True
    wait = ocp.multihost.get_barrier_sync_fn()
    key = hashlib.sha256(name.encode()).hexdigest()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        wait(key=f"spmd-{key}", timeout_ms=round(1000 * seconds))
        return True
    return False
