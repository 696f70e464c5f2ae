"""A user's own Linen module under a table of rules: a small GPT that reads the source of argparse.

    python examples/linen_model.py --steps 200

Attention, norms and layers are Flax's own. Expect a loss near 1.9 nats per byte after 200 steps, in
about a minute on two cores.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import spmd

BATCH = ("data", "fsdp", "expert")
VOCAB, WIDTH, SEQUENCE = 256, 64, 128


class Block(nn.Module):
    """Attention and an MLP, each on a normalised copy of the residual stream."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the residual stream `[batch, sequence, width]` after this layer."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.SelfAttention(num_heads=4, use_bias=False, name="attention")(
            nn.LayerNorm()(x), mask
        )
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(spmd.annotate(hidden, "hidden"))


class Reader(nn.Module):
    """Bytes `[batch, sequence]` in, scores of the next byte out."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the scores `[batch, sequence, vocab]`."""
        places = nn.Embed(SEQUENCE, WIDTH, name="place")(jnp.arange(tokens.shape[1])[None])
        x = spmd.annotate(nn.Embed(VOCAB, WIDTH, name="embed")(tokens) + places, "residual")
        for number in range(2):
            x = spmd.annotate(Block(name=f"block_{number}")(x), "residual")
        return nn.Dense(VOCAB, use_bias=False, name="head")(nn.LayerNorm(name="norm")(x))


RULES = spmd.Rules(
    params=[
        ("(embed|place)/embedding", P(None, "tensor")),  # [256 or 128, 64]
        ("attention/(query|key|value)/kernel", P("fsdp", "tensor")),  # [64, heads, 16]
        ("attention/out/kernel", P("tensor", None, "fsdp")),  # [heads, 16, 64]
        ("up/kernel", P("fsdp", "tensor")),  # [64, 256]
        ("up/bias", P("tensor")),
        ("down/kernel", P("tensor", "fsdp")),  # [256, 64]
        ("head/kernel", P("fsdp", "tensor")),  # [64, 256]
        ("down/bias|(LayerNorm_[01]|norm)/(scale|bias)", spmd.replicate("256 bytes")),
    ],
    activations=[
        ("residual", P(BATCH, "sequence")),  # [batch, sequence, width]
        ("hidden", P(BATCH, "sequence", "tensor")),  # [batch, sequence, 4 · width]
    ],
)


def batches(plan: spmd.ShardingPlan, steps: int) -> Iterator[dict[str, jax.Array]]:
    """Pieces of the text, and what follows each byte."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    draws = np.random.default_rng(0)
    for _ in range(steps):
        starts = draws.integers(0, len(text) - SEQUENCE - 1, 16)
        rows = text[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int32)
        batch = {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": np.ones((16, SEQUENCE), np.float32),
        }
        yield spmd.place_batch(plan, batch)


class Show(spmd.Hook):
    """Prints every twentieth loss."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Print metrics."""
        if step % 20 == 0:
            print(f"step {step}   loss {metrics['loss']:.3f}   accuracy {metrics['accuracy']:.3f}")


def main() -> None:
    """Trains on eight simulated devices and prints the plan and the metrics."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    spmd.simulate_devices(8)
    mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
    model = spmd.from_linen(Reader(), jax.ShapeDtypeStruct((16, SEQUENCE), jnp.int32))
    plan = spmd.make_plan(mesh, RULES, model, optax.adamw(3e-3))
    print(plan)
    step = spmd.make_train_step(plan, spmd.next_token_loss(model))
    spmd.fit(spmd.init_state(plan, seed=0), step, batches(plan, steps), steps=steps, hooks=[Show()])


if __name__ == "__main__":
    main()
