"""A file with a train step of a user's own, for the command line."""

import textwrap
from pathlib import Path

STEP = '''
    """A small network in plain Flax, with its table."""

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn
    from jax.sharding import PartitionSpec as P

    import spmd


    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.gelu(nn.Dense(64, name="up")(x))
            return nn.Dense(4, name="head")(nn.Dense(16, name="down")(h))


    rules = spmd.Rules(
        [
            ("up/kernel", P("fsdp", "tensor")),
            ("down/kernel", P("tensor", "fsdp")),
            ("head/kernel", P("fsdp", None)),
            ("bias", spmd.replicate("small")),
        ]
    )


    def make(mesh, *, zero: int = 3, batch: int = 16, arrays: bool = True):
        model = spmd.from_linen(Net(), jnp.ones((1, 16)))
        plan = spmd.make_plan(mesh, rules, model, optax.adamw(1e-3), zero=zero)

        def loss_fn(params, variables, batch, key):
            logits = model.apply(params, batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return {"loss": losses.sum(), "weight": jnp.float32(len(losses))}, variables

        if arrays:
            rng = np.random.default_rng(0)
            x = rng.normal(size=(batch, 16)).astype(np.float32)
            y = rng.integers(0, 4, batch).astype(np.int32)
        else:
            x = jax.ShapeDtypeStruct((batch, 16), "float32")
            y = jax.ShapeDtypeStruct((batch,), "int32")
        return spmd.make_train_step(plan, loss_fn), {"x": x, "y": y}
'''
"""Text of a file with `make`."""


def write_step(folder: Path, more: str = "", name: str = "mine.py") -> Path:
    """A file with `make`, and lines after it."""
    path = folder / name
    path.write_text(textwrap.dedent(STEP) + textwrap.dedent(more), encoding="utf-8")
    return path
