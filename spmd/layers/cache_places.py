"""Places of tokens in the arrays of a cache: prompts with their padding, then decoded tokens.

```
prompt of 3, of 5    a b c · ·    places 0 to 2; padding holds nothing
                     d e f g h    places 0 to 4
two decoded tokens             x y    places 5 and 6, in every row
position of x, y               3 4    after `a b c`; after `d e f g h` 5 6
```

A decoded token has the same place in every row, whatever its position, so writing it is one update
in place on any mesh. (An update at a place of each row's own is a scatter, for which XLA:TPU copies
the cache.)
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

NO_TOKEN = 2**31 - 1
"""Position of a place without a token, behind every other."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachePlaces:
    """Places of tokens in a cache.

    Attributes:
        lengths: Tokens of each prompt.
        decoded: Tokens of each row after the prompt, so far.
        prompt: Places for prompts, the first ones.
        count: All places.

    Example:
        >>> places = CachePlaces(jnp.array([1, 2]), jnp.int32(1), prompt=2, count=4)
        >>> jnp.where(places.positions() == NO_TOKEN, -1, places.positions()).tolist()
        [[0, -1, 1, -1], [0, 1, 2, -1]]
    """

    lengths: Int[Array, "batch"]
    decoded: Int[Array, ""]
    prompt: int = dataclasses.field(metadata={"static": True})
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def next(self) -> Int[Array, ""]:
        """The place of the next token."""
        return self.prompt + self.decoded

    def after_token(self) -> "CachePlaces":
        """Return the places after one more token of each row."""
        return dataclasses.replace(self, decoded=self.decoded + 1)

    def positions(self) -> Int[Array, "batch place"]:
        """Return the position of the token at each place, or `NO_TOKEN`."""
        places = jnp.arange(self.count)[None]
        lengths = self.lengths[:, None]
        is_decoded = (places >= self.prompt) & (places < self.next)
        after_prompt = jnp.where(is_decoded, lengths + places - self.prompt, NO_TOKEN)
        return jnp.where(places < lengths, places, after_prompt)
