"""Random state of stacked layers: a key and a counter for each, so that stages have their own."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key


class LayerNoise(nnx.Module):
    """Random state of the layers of a stack.

    Args:
        count: The layers.
        key: A random key, which is split among them.
    """

    def __init__(self, count: int, key: Array) -> None:
        self.key = nnx.RngKey(jax.random.split(key, count), tag="noise")
        self.count = nnx.RngCount(jnp.zeros(count, jnp.uint32), tag="noise")

    def draw(self) -> Key[Array, "layer"]:
        """Return a new key for each layer."""
        counts = self.count[...]
        self.count[...] = counts + 1
        return jax.vmap(jax.random.fold_in)(self.key[...], counts)
