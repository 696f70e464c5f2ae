"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

After the last layer, each module predicts one token more: it joins the hidden state of the main
model, or of the module before, with the embedding of the next token.

```
hidden state of token i ─────▶ hidden_norm ─┬─▶ proj [2d, d] ─▶ layer ─▶ norm ─▶ head: token i + 2
embedding of token i + 1 ────▶ embed_norm ──┘                             └────▶ the next module
```

Embedding and head are those of the main model. Hidden states are those after the final norm, as in
the published code for these models.
"""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from spmd.layers.ahead import has_ahead, tokens_ahead
from spmd.layers.router import RouterConfig, Valid
from spmd.models.decoder.declared import TOKENS, Axes, TableRows
from spmd.models.decoder.experts import MixtureOfExperts
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.linear import Dense, column_parallel
from spmd.models.decoder.norms import make_norm
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate

NORMS = ("embed_norm", "hidden_norm", "norm")
"""Names of the norms of a module."""

_INPUT = "ahead_input"

OwnInputs = tuple[Array | None, Float[Array, "batch seq d"], Valid]
"""Inputs of one module: the key of the router's noise, embeddings of tokens ahead, and the mask of
tokens with one ahead."""


class AheadLayer(nnx.Module):
    """One module of multi-token prediction, with a layer of a resolved spec."""

    def __init__(
        self,
        spec: LayerSpec,
        sizes: Sizes,
        router: RouterConfig | None,
        angles: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        width = sizes.d_model
        for name in NORMS:
            setattr(self, name, make_norm(width, sizes))
        self.proj = Dense(2 * width, width, rngs=rngs)
        self.layer = spec.build(sizes, router, angles, rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], own: OwnInputs, inputs: LayerInputs
    ) -> tuple[Float[Array, "batch seq d"], tuple[Array, dict[str, Array] | None]]:
        """Return the normalised hidden state twice, the second time with its router's report."""
        key, embedded, valid = own
        next_token = annotate(self.embed_norm(embedded), _INPUT)
        hidden = annotate(self.hidden_norm(x), _INPUT)
        pair = jnp.concatenate([next_token, hidden], axis=-1)
        (x,) = column_parallel(pair, (self.proj.kernel,), _INPUT, stream=_INPUT)
        x = annotate(x, "residual")
        x, report = self.layer(x, key, inputs._replace(valid=valid))
        x = self.norm(x)
        return x, (x, report)

    @property
    def moe(self) -> MixtureOfExperts:
        """The experts of the layer."""
        return self.layer.moe


def ahead_rows(fsdp: Axes) -> TableRows:
    """Return the rows of the rule table besides those of norms and of the layer."""
    kernel = ("ahead/proj/kernel", P(fsdp, "tensor"))  # [2d, d]
    return TableRows((kernel,), ((_INPUT, TOKENS),))


def ahead_params(sizes: Sizes) -> int:
    """Return the number of parameters in the matmul of a module before its layer."""
    return 2 * sizes.d_model**2


def valid_ahead(inputs: LayerInputs, seq: int, steps: int) -> Bool[Array, "#batch seq"]:
    """Return the mask of tokens with one that is `steps` ahead, both no padding."""
    valid = has_ahead(inputs.segments, seq, steps)
    if inputs.valid is None:
        return valid
    return valid & inputs.valid & tokens_ahead(inputs.valid, steps)
