"""JAX's upgrade flags: the next forms of checkpoints and custom derivatives.

A later JAX has them by default.

| flag | effect |
|---|---|
| `jax_remat3` | checkpoints and names are hijax objects; a layer is partitioned during tracing |
| `jax_custom_vjp3`, `jax_custom_jvp3` | so are custom derivatives (the second in JAX 0.12) |
| `jax_remat_barrier_no_cotangents` | recomputation does not wait for cotangents (JAX 0.12) |

JAX reads them from the environment, such as `JAX_REMAT3=1`. All of this package works under them,
except for the limits of some JAX versions listed in this module.
"""

from typing import Any

import jax
from jax import ad_checkpoint
from jax.experimental import hijax

HiPrim: Any = getattr(hijax, "HiPrim", object)
"""Base class of hijax primitives; `object`, and unused, in a JAX without it."""

IS_FIRST_FORM = HiPrim is object
"""Whether hijax is as in JAX 0.10.

There, under `jax_remat3`, `jax.checkpoint` ignores combined and offloading policies and recomputes
everything, does not see inside custom derivatives, and evaluates neither a call primitive nor
`shard_map`.
"""

name_in_rule = getattr(ad_checkpoint, "checkpoint_name_fwd", ad_checkpoint.checkpoint_name)
"""`checkpoint_name` for the forward rule of a `jax.custom_vjp`.

Under `jax_remat3` recomputation then reads the saved array only. With the plain `checkpoint_name`
JAX computes the array again, for a derivative without a use.
"""


def checkpoints_are_hijax() -> bool:
    """Return whether checkpoints and their names are hijax objects, as under `jax_remat3`."""
    return bool(getattr(jax.config, "jax_remat3", False))


def checkpoints_ignore_functions() -> bool:
    """Return whether `jax.checkpoint` ignores all policies but JAX's own classes."""
    return checkpoints_are_hijax() and IS_FIRST_FORM
