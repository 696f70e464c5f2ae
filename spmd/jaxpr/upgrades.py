"""JAX's upgrade flags: the next forms of checkpoints and custom derivatives.

A later JAX has them by default.

| flag | what it changes |
|---|---|
| `jax_remat3` | checkpoints and their names are objects of hijax; a layer is divided while traced |
| `jax_custom_vjp3`, `jax_custom_jvp3` | so are custom derivatives (the second in JAX 0.12) |
| `jax_remat_barrier_no_cotangents` | what is recomputed does not wait for cotangents (JAX 0.12) |

JAX reads them from the environment, such as `JAX_REMAT3=1`. All of this package works under them,
except for what this module says that a version of JAX cannot do.
"""

from typing import Any

import jax
from jax import ad_checkpoint
from jax.experimental import hijax

HiPrim: Any = getattr(hijax, "HiPrim", object)
"""Base of what hijax applies; in a JAX without it, `object`, and nothing is made of it."""

IS_FIRST_FORM = HiPrim is object
"""Whether hijax is as in JAX 0.10.

There, under `jax_remat3`, `jax.checkpoint` recomputes what a combined policy or one that offloads
should keep, sees nothing in custom derivatives, and evaluates neither a call primitive nor
`shard_map`.
"""

name_in_rule = getattr(ad_checkpoint, "checkpoint_name_fwd", ad_checkpoint.checkpoint_name)
"""`checkpoint_name` for the forward rule of a `jax.custom_vjp`.

Under `jax_remat3`, what is recomputed then reads the saved array alone; with the name for other
code JAX computes the array again, for a derivative that nothing asks for.
"""


def checkpoints_are_hijax() -> bool:
    """Return whether checkpoints and their names are objects of hijax, under `jax_remat3`."""
    return bool(getattr(jax.config, "jax_remat3", False))


def checkpoints_ignore_functions() -> bool:
    """Return whether `jax.checkpoint` ignores any policy that is not one of JAX's own classes."""
    return checkpoints_are_hijax() and IS_FIRST_FORM
