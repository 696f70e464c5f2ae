"""Objects of several arrays that stand for a parameter in the tree that a model takes.

A technique puts it there, and the layer that uses the parameter asks it: `start_layer` makes what a
layer computes with, and a matmul takes the `operand_of` a kernel, the array that rides on it, and
what is added to the product.
"""

import abc
import dataclasses
from typing import Any, Self

import jax
from jaxtyping import Array, Float


class WrappedParam(abc.ABC):
    """Base of these objects. Each is a pytree, and its first array is the parameter."""

    rider: Any = None
    """The array that rides on the parameter, if any; its derivative is what the layer has
    observed."""

    @property
    def is_fetched(self) -> bool:
        """Whether `at_layer` copies it from elsewhere: a scan then takes one layer at a time."""
        return False

    def at_layer(self) -> Any:
        """Return the layer's value of the parameter; called when one layer of a stack starts."""
        return self

    @abc.abstractmethod
    def operand(self) -> Array:
        """Return the operand of a matmul."""

    def addend(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"] | None:
        """Return the addend of the product of an input with the operand; None without one."""
        del x
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RiddenParam(WrappedParam):
    """A parameter and the array that rides on it (`spmd.model_interface.grad_transform.Entered`)."""

    base: Any
    rider: Any

    @property
    def is_fetched(self) -> bool:
        """Whether the parameter itself is."""
        return has_fetched(self.base)

    def at_layer(self) -> Self:
        """Return the parameter that the layer computes with, and its rider."""
        return dataclasses.replace(self, base=start_layer(self.base))

    def operand(self) -> Array:
        """Return the array of the parameter itself."""
        return operand_of(self.base)

    def addend(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"] | None:
        """Return the addend of the parameter itself."""
        return addend_of(self.base, x)


def has_fetched(tree: Any) -> bool:
    """Return whether a layer with these parameters fetches one of them when it starts."""
    params = jax.tree.leaves(tree, is_leaf=is_wrapped)
    return any(is_wrapped(param) and param.is_fetched for param in params)


def is_wrapped(x: Any) -> bool:
    """Return whether a node of a tree is a `WrappedParam`; for `is_leaf`."""
    return isinstance(x, WrappedParam)


def start_layer(tree: Any) -> Any:
    """Return the values of a tree of parameters for a layer that starts."""
    return jax.tree.map(_at_layer, tree, is_leaf=is_wrapped)


def _at_layer(x: Any) -> Any:
    if is_wrapped(x):
        return x.at_layer()
    return x


def operand_of(param: Any) -> Array:
    """Return the operand of a matmul: the parameter, or the operand of a wrapped one."""
    if is_wrapped(param):
        return param.operand()
    return param


def rider_of(param: Any) -> Array | None:
    """Return the array that rides on a parameter; None without one."""
    if is_wrapped(param):
        return param.rider
    return None


def addend_of(param: Any, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"] | None:
    """Return the addend of the product of an input with a kernel; None without one."""
    if is_wrapped(param):
        return param.addend(x)
    return None
