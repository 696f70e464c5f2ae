"""A small model of a user's own for pipelines, whose logits are an array."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.sharding.rules import Rules, replicate

RULES = Rules(
    [("embed/embedding", P(None, "fsdp")), ("kernel", P("fsdp")), ("bias", replicate("small"))],
    stacked={"layers": "pipe"},
)


class LinearStack(nnx.Module):
    """An embedding, which is also the head, and linear layers."""

    def __init__(self, rngs, vocab, layers, width=8):
        make = nnx.vmap(lambda rngs: nnx.Linear(width, width, rngs=rngs), in_axes=0, out_axes=0)
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)

    def embed_inputs(self, tokens):
        return self.embed(tokens), None

    def apply_layers(self, x, context):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(lambda layer, x: x + jnp.tanh(layer(x)))(self.layers, x), None

    def compute_outputs(self, x, values):
        return self.embed.attend(x)

    def __call__(self, tokens):
        return self.compute_outputs(*self.apply_layers(*self.embed_inputs(tokens)))
