"""Parameters that live in host memory, as a model sees them: brought to the device where a layer begins.

A derivative with respect to an array in host memory would be in host memory too, and the step could not compute with
it. So what is differentiated is a stand-in on the device, of which only the gradient is ever made.
"""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd.errors import AnnotationError, Problem


@jax.tree_util.register_pytree_node_class
class HostParam:
    """A parameter in host memory, one layer's or a stack of them.

    Attributes:
        array: The parameter.
        grad_proxy: Zeros like it on the device, whose gradient is the parameter's, in the dtype of gradients; None
            where nothing is differentiated.
        sharding: Where one layer of it goes on the device.
    """

    def __init__(self, array: Any, grad_proxy: Any, sharding: NamedSharding) -> None:
        self.array, self.grad_proxy, self.sharding = array, grad_proxy, sharding

    def tree_flatten(self) -> tuple[tuple[Any, Any], NamedSharding]:
        """The arrays, and what is static."""
        return (self.array, self.grad_proxy), self.sharding

    @classmethod
    def tree_unflatten(cls, sharding: NamedSharding, arrays: tuple[Any, Any]) -> "HostParam":
        """The inverse of `tree_flatten`."""
        return cls(*arrays, sharding)

    def fetch(self) -> jax.Array:
        """The parameter of one layer on the device."""
        if self.grad_proxy is None:
            return jax.device_put(self.array, self.sharding)
        return _fetch(self.array, self.grad_proxy, self.sharding)

    def __jax_array__(self) -> jax.Array:
        """It is no array where a layer has not begun."""
        raise AnnotationError("A parameter is used where it is in host memory:", [host_param_error("a parameter")])


def host_param_error(path: str) -> Problem:
    """What is wrong with a model that takes a parameter otherwise than layer by layer."""
    fix = "run layers as functions of parameters through spmd.plan.annotate.remat_layer, or do not offload it"
    return Problem(path, "is in host memory, and the model does not take it one layer at a time", fix=fix)


def is_host_param(x: Any) -> bool:
    """Whether a node of a tree is a `HostParam` parameter; for `is_leaf`."""
    return isinstance(x, HostParam)


def fetch(tree: Any) -> Any:
    """A tree with what is in host memory brought to the device."""
    return jax.tree.map(lambda x: x.fetch() if is_host_param(x) else x, tree, is_leaf=is_host_param)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fetch(array: jax.Array, grad_proxy: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.device_put(array, sharding).astype(grad_proxy.dtype)


_fetch.defvjp(
    lambda array, grad_proxy, sharding: (_fetch(array, grad_proxy, sharding), None),
    lambda sharding, _, gradient: (None, gradient),
)
