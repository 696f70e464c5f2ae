"""How a layer's parameters come to it, and where their gradients go: gathered over `fsdp`, or from host memory.

Outside a plan every function here is the identity.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import AnnotationError
from spmd.model_api.precision import cast_floats
from spmd.plan.context import TraceContext, constrain, current
from spmd.plan.host_params import HostParam, host_param_error, is_host_param
from spmd.plan.lora_layer import is_lora
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import ZERO_KEEPS, drop_axis
from spmd.sharding.rules import Replicate


@dataclasses.dataclass(frozen=True)
class ParamPlacement:
    """How one layer's parameter is placed while it is used, and how its gradient is afterwards.

    Attributes:
        mesh: The plan's mesh.
        stored: Its spec in the training state.
        used: Its spec in a matmul: as stored, but whole over `fsdp`.
        gradient: The spec its gradient is reduced to, by the plan's ZeRO stage.
        is_kept: Whether a derivative keeps it as it is used; else as it is stored, to be gathered again.
    """

    mesh: AnyMesh
    stored: P
    used: P
    gradient: P
    is_kept: bool = True


def placement_of(path: str | None) -> ParamPlacement | None:
    """What the plan in scope says of the parameter at `path` inside its layer; None outside a plan.

    Args:
        path: The path that `spmd.plan.flax` gave to the parameter, if it did.
    """
    scope = current()
    match = scope.rules.match(path) if scope and path else None
    if scope is None or match is None:
        return None
    spec = P() if isinstance(match.requested, Replicate) else match.requested
    return _placed(scope, spec, not scope.gathers_again)


def _placed(scope: TraceContext, spec: P, is_kept: bool) -> ParamPlacement:
    used = drop_axis(spec, "fsdp")
    stored, gradient = (spec if table in ZERO_KEEPS[scope.zero] else used for table in ("params", "gradients"))
    return ParamPlacement(scope.mesh, stored, used, gradient, is_kept)


def saves_gathered(placed: ParamPlacement | None) -> bool:
    """Whether a derivative keeps the parameter as it is used."""
    return placed is None or placed.is_kept


def gather(kernel: jax.Array, placed: ParamPlacement | None) -> jax.Array:
    """A layer's parameter as it is used: whole over `fsdp`. What the backward pass keeps of it is up to remat."""
    return kernel if placed is None else constrain(kernel, placed.mesh, placed.used, "a layer's parameter")


def scatter(gradient: jax.Array, placed: ParamPlacement | None) -> jax.Array:
    """A layer's gradient, summed over devices into the place where the plan keeps it."""
    return gradient if placed is None else constrain(gradient, placed.mesh, placed.gradient, "a layer's gradient")


def gather_params(params: Any, gathered_later: Callable[[str], bool] = lambda path: False) -> Any:
    """All parameters as a model that knows of no plan takes them: whole over `fsdp`, gradients as the plan keeps them.

    Left to itself, XLA computes some matmuls of kernels that are split over `fsdp` wrongly where activations are split
    over it as well (decision 0011).

    Args:
        params: A nested dictionary.
        gathered_later: Whether the layer that uses the parameter at a path gathers it itself.

    Raises:
        AnnotationError: A parameter is in host memory and not gathered by its layer.
    """
    scope = current()
    if scope is None:
        return params
    if wrong := [host_param_error(path) for path in sorted(scope.hosted) if not gathered_later(path)]:
        raise AnnotationError("This model takes its parameters all at once:", wrong)

    def place(path: str, param: Any) -> Any:
        match = scope.rules.match(path)
        if match is None or gathered_later(path) or not jnp.issubdtype(param.dtype, jnp.floating):
            return param
        return gathered(param, _placed(scope, match.spec, is_kept=True))

    return tree.map_with_path(place, params, is_leaf=lambda x: is_host_param(x) or is_lora(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(param: jax.Array, placed: ParamPlacement | None) -> jax.Array:
    """`gather`, whose derivative is `scatter`: for a parameter that is used as it is, such as a bias."""
    return gather(param, placed)


gathered.defvjp(
    lambda param, placed: (gather(param, placed), None),
    lambda placed, _, gradient: (scatter(gradient, placed),),
)


def grad_targets(params: Any) -> Any:
    """What gradients are taken with respect to: the parameters in the dtype in which the plan sums gradients.

    For a parameter in host memory it is a stand-in on the device.
    """
    scope = current()
    if scope is None:
        return params

    def view(path: str, param: jax.Array) -> jax.Array:
        hosted = path in scope.hosted
        return cast_floats(jnp.zeros(param.shape, param.dtype) if hosted else param, scope.precision.gradients_dtype)

    return tree.map_with_path(view, params)


def params_for_forward(params: Any, view: Any = None) -> Any:
    """The parameters as a model takes them: of those in host memory, each layer brings its own to the device.

    Args:
        params: A nested dictionary.
        view: What `grad_targets` made of them, to differentiate with respect to it; None to differentiate nothing.
    """
    scope = current()
    seen = params if view is None else view
    if scope is None or not scope.hosted:
        return seen
    views = {} if view is None else tree.flatten(view)

    def take(path: str, param: jax.Array, seen: jax.Array) -> Any:
        placed = placement_of(path) if path in scope.hosted else None
        if placed is None:
            return seen
        return HostParam(param, views.get(path), NamedSharding(scope.mesh, placed.stored, memory_kind="device"))

    return tree.map_with_path(take, params, seen)


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which gradients of `dtype` are added up over microbatches; `dtype` itself outside a plan."""
    scope = current()
    return dtype if scope is None else jnp.dtype(scope.precision.accumulation)
