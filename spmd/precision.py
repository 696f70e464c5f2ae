"""Which dtype is where: one frozen value that the model, the optimizer and the memory ledger all read.

| name | parameters | compute | gradients and their sums over devices | optimizer state |
|---|---|---|---|---|
| `float32` | float32 | float32 | float32 | float32 |
| `bf16` | float32 | bfloat16 | float32 | float32 |

In `bf16` the parameters are the float32 master weights; each is cast where it is used. Norms, softmax and the loss
are computed in float32, and weight gradients leave their matmul in float32, so they are summed in it.
"""

import dataclasses

import jax.numpy as jnp

from spmd.errors import ConfigError, NotYetError, Problem, did_you_mean


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a training run.

    Attributes:
        name: How it is asked for.
        params: The dtype of stored parameters (and of gradients, their reductions and accumulation).
        compute: The dtype of activations and of the operands of matmuls.
    """

    name: str
    params: str
    compute: str

    @property
    def params_dtype(self) -> jnp.dtype:
        """The parameters' dtype as JAX's."""
        return jnp.dtype(self.params)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The activations' dtype as JAX's."""
        return jnp.dtype(self.compute)


_PRECISIONS = {
    "float32": Precision("float32", params="float32", compute="float32"),
    "bf16": Precision("bf16", params="float32", compute="bfloat16"),
}
_LATER = ("bf16-params", "fp16")


def make_precision(name: str | Precision) -> Precision:
    """The precision policy called `name`.

    Raises:
        ConfigError: There is no such policy.
        NotYetError: It is planned and not built.

    Example:
        >>> make_precision("bf16").compute
        'bfloat16'
    """
    if isinstance(name, Precision):
        return name
    if name in _LATER:
        fix = f"until then one of: {', '.join(_PRECISIONS)}"
        raise NotYetError("Not yet:", [Problem("precision", f"{name!r} is planned and not built", fix=fix)])
    if name not in _PRECISIONS:
        problem = Problem("precision", f"{name!r} does not exist", fix=did_you_mean(name, _PRECISIONS))
        raise ConfigError("This precision cannot be used:", [problem])
    return _PRECISIONS[name]
