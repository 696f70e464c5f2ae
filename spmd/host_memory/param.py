"""Parameters in host memory. A layer copies its own to the device when it starts.

A gradient with respect to an array in host memory would be in host memory too, where the step
cannot compute with it. So the step differentiates with respect to a proxy on the device, of which
only the gradient is materialized.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd.errors import AnnotationError, Problem
from spmd.model_interface.wrapped_param import WrappedParam


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HostParam(WrappedParam):
    """A parameter in host memory, of one layer or a stack of layers.

    Attributes:
        grad_proxy: Zeros of its shape on the device, in the dtype of gradients; None without
            differentiation.
        sharding: The sharding of one layer of it on the device.
        path: Its path, for the error.
    """

    array: Any
    grad_proxy: Any
    sharding: NamedSharding = dataclasses.field(metadata={"static": True})
    path: str = dataclasses.field(metadata={"static": True})

    @property
    def is_fetched(self) -> bool:
        """True: `at_layer` copies it to the device."""
        return True

    def at_layer(self) -> jax.Array:
        """Copy the parameter of one layer to the device."""
        if self.grad_proxy is None:
            return jax.device_put(self.array, self.sharding)
        return _fetch(self.array, self.grad_proxy, self.sharding)

    def operand(self) -> jax.Array:
        """Refuse a matmul outside of its layer."""
        return self.__jax_array__()

    def __jax_array__(self) -> jax.Array:
        """Refuse a use as an array outside of its layer."""
        what = "is in host memory, and the model does not use it layer by layer"
        fix = (
            "run layers as functions of parameters through spmd.plan.annotate.remat_layer, or "
            "do not offload it"
        )
        problem = Problem(self.path, what, fix=fix)
        raise AnnotationError("Model reads all parameters at once:", [problem])

    def __getitem__(self, index: Any) -> jax.Array:
        """Refuse an index, as Flax's layers take the arrays of their parameters."""
        return self.__jax_array__()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fetch(array: jax.Array, grad_proxy: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.device_put(array, sharding).astype(grad_proxy.dtype)


_fetch.defvjp(
    lambda array, grad_proxy, sharding: (_fetch(array, grad_proxy, sharding), None),
    lambda sharding, _, gradient: (None, gradient),
)
