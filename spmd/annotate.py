"""What model code says to the plan: this activation has a name, this function is one layer, compute is cheap here.

One mark, `x = annotate(x, "mlp_hidden")`, is a sharding constraint, a remat checkpoint name and an offload name.
Outside a plan every function here is the identity, so a model that uses them runs by itself.

The plan is in scope only while a step is traced. It is held by `jax.make_user_context`, so JAX's own caches are
keyed by it: an inner jitted function traced under one plan is traced again under another.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from spmd.derive import ZERO_KEEPS, drop_axis
from spmd.errors import AnnotationError, Problem, did_you_mean
from spmd.mesh import AnyMesh
from spmd.plan import ShardingPlan
from spmd.precision import Precision
from spmd.remat import Remat
from spmd.rules import Replicate, Rules, audit_spec, spec_text

F = TypeVar("F", bound=Callable)


@dataclasses.dataclass(frozen=True)
class _Scope:
    mesh: AnyMesh
    rules: Rules
    zero: int
    remat: Remat
    precision: Precision


def _constrain(x: jax.Array, mesh: AnyMesh, spec: P, what: str) -> jax.Array:
    """`x` under `spec`, without those axes that are manual here; what cannot be split is an error."""
    manual = get_abstract_mesh().manual_axes
    for axis in manual:
        spec = drop_axis(spec, axis)
    problems = audit_spec(what, x.shape, spec, mesh.shape, f"its spec {spec_text(spec)}")
    if problems:
        raise AnnotationError("An array cannot be split as the rule table says:", problems)
    return jax.lax.with_sharding_constraint(x, spec if manual else NamedSharding(mesh, spec))


@dataclasses.dataclass(frozen=True)
class Weight:
    """How one layer's parameter is placed while it is used, and how its gradient is afterwards.

    Attributes:
        mesh: The plan's mesh.
        used: Its spec in a matmul: as stored, but whole over `fsdp`.
        gradient: The spec its gradient is reduced to, by the plan's ZeRO stage.
    """

    mesh: AnyMesh
    used: P
    gradient: P


_SCOPE = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def within(plan: ShardingPlan) -> Iterator[None]:
    """Puts `plan` in scope for the model code that is traced inside.

    Example:
        >>> import jax.numpy as jnp
        >>> annotate(jnp.ones(2), "any name: no plan is in scope").shape
        (2,)
    """
    scope = _Scope(plan.mesh, plan.rules, plan.zero, plan.remat, plan.precision)
    with _SCOPE(scope):
        yield


def annotate(x: jax.Array, name: str) -> jax.Array:
    """Marks `x` as the activation `name`: constrains its sharding, then names it for remat and offload.

    Args:
        x: An activation, with its global shape; inside `shard_map`, the shape within the manual axes.
        name: Its name in the `activations` table of the rules.

    Returns:
        The same values.

    Raises:
        AnnotationError: The plan in scope has no such name, or its spec cannot split `x`. (JAX itself would drop
            an indivisible constraint without a word.)
    """
    scope = _SCOPE.value
    if scope is None:
        return x
    table = dict(scope.rules.activations)
    if name not in table:
        problem = Problem(f"activation {name!r}", "is not in the rule table", fix=did_you_mean(name, table))
        raise AnnotationError("The model marks an activation that the plan does not know:", [problem])
    return checkpoint_name(_constrain(x, scope.mesh, table[name], f"activation {name!r}"), name)


def weight(path: str | None) -> Weight | None:
    """What the plan in scope says of the parameter at `path` inside its layer; None outside a plan.

    Args:
        path: The path that `spmd.flax` gave to the parameter, if it did.
    """
    scope = _SCOPE.value
    match = scope.rules.match(path) if scope and path else None
    if match is None:
        return None
    spec = P() if isinstance(match.requested, Replicate) else match.requested
    used = drop_axis(spec, "fsdp")
    return Weight(scope.mesh, used, spec if "gradients" in ZERO_KEEPS[scope.zero] else used)


def gather(kernel: jax.Array, placed: Weight | None) -> jax.Array:
    """A layer's parameter as it is used: whole over `fsdp`. What the backward pass keeps of it is up to remat."""
    return kernel if placed is None else _constrain(kernel, placed.mesh, placed.used, "a layer's parameter")


def scatter(gradient: jax.Array, placed: Weight | None) -> jax.Array:
    """A layer's gradient, summed over devices into the place where the plan keeps it."""
    return gradient if placed is None else _constrain(gradient, placed.mesh, placed.gradient, "a layer's gradient")


def to_compute(x: jax.Array) -> jax.Array:
    """`x` in the plan's compute dtype; call it where activations begin, and let the rest follow their dtype."""
    scope = _SCOPE.value
    return x if scope is None else x.astype(scope.precision.compute_dtype)


def checkpoint_layer(layer: F, *, scanned: bool) -> F:
    """One layer of the model, as a function of arrays, under the plan's remat policy."""
    scope = _SCOPE.value
    return layer if scope is None else scope.remat.apply(layer, scanned=scanned)


def check_marks(plan: ShardingPlan, jaxpr: Any) -> None:
    """Whether a traced model marks every activation that the plan's table names.

    Args:
        plan: The plan it was traced under.
        jaxpr: Its jaxpr, closed or not.

    Raises:
        AnnotationError: Names of the table that are marked nowhere, so that their specs mean nothing.
    """
    marked = set(_marks(jaxpr))
    problems = [
        Problem(f"activation {name!r}", "is marked nowhere in the model", fix=did_you_mean(name, sorted(marked)))
        for name, _ in plan.rules.activations
        if name not in marked
    ]
    if problems:
        raise AnnotationError("The rule table names activations that the model does not have:", problems)


def _marks(node: Any) -> Iterator[str]:
    """Every checkpoint name in a jaxpr and in those inside its equations."""
    if isinstance(node, list | tuple):
        for part in node:
            yield from _marks(part)
    elif hasattr(node, "eqns"):  # a jaxpr, closed or not
        for equation in node.eqns:
            if equation.primitive.name == "name":
                yield equation.params["name"]
            yield from _marks(list(equation.params.values()))
