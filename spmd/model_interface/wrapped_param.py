"""Objects of several arrays in place of a parameter in a model's parameter tree.

A technique, such as an adapter, puts such an object into the tree, and the layer of the parameter
calls its methods: `start_layer` returns the value to compute with, and a matmul takes the
`operand_of` a kernel, the array that rides on it (`rider_of`), and what completes the product
(`complete_product`).
"""

import abc
import dataclasses
from typing import Any, Self, TypeGuard

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float


class WrappedParam(abc.ABC):
    """Base of objects in place of a parameter: pytrees with the parameter as the first array."""

    rider: Any = None
    """The array that rides on the parameter, if any; its derivative is the layer's observation."""

    @property
    def is_fetched(self) -> bool:
        """Whether `at_layer` copies it from another memory; a scan then runs a layer per step."""
        return False

    def at_layer(self) -> Any:
        """Return the value for one layer; called at the start of each layer of a stack."""
        return self

    @abc.abstractmethod
    def operand(self) -> Array:
        """Return the operand of a matmul."""

    def completed(
        self, y: Float[Array, "*batch out"], x: Float[Array, "*batch in"]
    ) -> Float[Array, "*batch out"]:
        """Complete `y`, the product of an input with the operand of the parameter."""
        del x
        return y


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RiddenParam(WrappedParam):
    """A parameter and its rider, an array for observations (`grad_transform.Entered`)."""

    base: Any
    rider: Any

    @property
    def is_fetched(self) -> bool:
        """Whether the parameter itself is fetched."""
        return has_fetched(self.base)

    def at_layer(self) -> Self:
        """Return the parameter for one layer, with its rider."""
        return dataclasses.replace(self, base=start_layer(self.base))

    def operand(self) -> Array:
        """Return the array of the parameter itself."""
        return operand_of(self.base)

    def completed(
        self, y: Float[Array, "*batch out"], x: Float[Array, "*batch in"]
    ) -> Float[Array, "*batch out"]:
        """Complete the product of the parameter itself."""
        return complete_product(self.base, y, x)


class StoredParam(WrappedParam):
    """A parameter stored in another form than it is computed in: a node of a tree of arrays.

    Its arrays are sharded, saved and gathered as they are; the gathered ones are decoded.
    """

    @abc.abstractmethod
    def abstract_param(self) -> jax.ShapeDtypeStruct:
        """Return the stored parameter, sharded as its codes are."""

    @abc.abstractmethod
    def stored(self, param: Array) -> Self:
        """Return a parameter in this form, each array sharded as the one here."""

    @abc.abstractmethod
    def specs_by(self, spec: P) -> Self:
        """Return the spec of each array for a spec of the parameter."""

    @abc.abstractmethod
    def decoded(self, dtype: Any) -> Array:
        """Return the parameter."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the parameter without a cast."""


def is_stored(x: Any) -> TypeGuard[StoredParam]:
    """Return whether a node of a tree is a `StoredParam`; for `is_leaf`."""
    return isinstance(x, StoredParam)


def abstract_params(tree: Any) -> Any:
    """Return a tree of abstract arrays with the parameters in place of their stored forms."""

    def plain(x: Any) -> Any:
        if is_stored(x):
            return x.abstract_param()
        return x

    return jax.tree.map(plain, tree, is_leaf=is_stored)


def store_as(like: Any, param: Array) -> Any:
    """Return a parameter in the form of a place: as it is, or stored."""
    if is_stored(like):
        return like.stored(param)
    return param


def has_fetched(tree: Any) -> bool:
    """Return whether a layer with these parameters fetches one of them at its start."""
    params = jax.tree.leaves(tree, is_leaf=is_wrapped)
    return any(is_wrapped(param) and param.is_fetched for param in params)


def is_wrapped(x: Any) -> bool:
    """Return whether a node of a tree is a `WrappedParam`; for `is_leaf`."""
    return isinstance(x, WrappedParam)


def start_layer(tree: Any) -> Any:
    """Return the values of a tree of parameters at the start of a layer."""
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
    """Return the rider of a parameter; None without one."""
    if is_wrapped(param):
        return param.rider
    return None


def complete_product(
    param: Any, y: Float[Array, "*batch out"], x: Float[Array, "*batch in"]
) -> Float[Array, "*batch out"]:
    """Complete `y`, the product of an input with the operand of a kernel."""
    if is_wrapped(param):
        return param.completed(y, x)
    return y
