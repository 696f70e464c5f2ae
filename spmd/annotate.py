"""What model code says to the plan: this activation has a name, this function is one layer, compute is cheap here.

One mark, `x = annotate(x, "mlp_hidden")`, is a sharding constraint, a remat checkpoint name and an offload name.
Outside a plan every function here is the identity, so a model that uses them runs by itself.

The plan is in scope only while a step is traced. It is held by `jax.make_user_context`, so JAX's own caches are
keyed by it: an inner jitted function traced under one plan is traced again under another.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from spmd.derive import drop_axis
from spmd.errors import AnnotationError, Problem, did_you_mean
from spmd.mesh import AnyMesh
from spmd.plan import ShardingPlan
from spmd.precision import Precision
from spmd.remat import Remat
from spmd.rules import audit_spec, spec_text

F = TypeVar("F", bound=Callable)


@dataclasses.dataclass(frozen=True)
class _Scope:
    mesh: AnyMesh
    activations: tuple[tuple[str, P], ...]
    remat: Remat
    precision: Precision


_SCOPE = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def within(plan: ShardingPlan) -> Iterator[None]:
    """Puts `plan` in scope for the model code that is traced inside.

    Example:
        >>> import jax.numpy as jnp
        >>> annotate(jnp.ones(2), "any name: no plan is in scope").shape
        (2,)
    """
    scope = _Scope(plan.mesh, tuple(plan.rules.activations), plan.remat, plan.precision)
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
    table = dict(scope.activations)
    if name not in table:
        problem = Problem(f"activation {name!r}", "is not in the rule table", fix=did_you_mean(name, table))
        raise AnnotationError("The model marks an activation that the plan does not know:", [problem])
    manual = get_abstract_mesh().manual_axes
    spec = table[name]
    for axis in manual:
        spec = drop_axis(spec, axis)
    problems = audit_spec(f"activation {name!r}", x.shape, spec, scope.mesh.shape, f"its spec {spec_text(spec)}")
    if problems:
        raise AnnotationError("An activation cannot be split as the rule table says:", problems)
    x = jax.lax.with_sharding_constraint(x, spec if manual else NamedSharding(scope.mesh, spec))
    return checkpoint_name(x, name)


def to_compute(x: jax.Array) -> jax.Array:
    """`x` in the plan's compute dtype; call it where activations begin, and let the rest follow their dtype."""
    scope = _SCOPE.value
    return x if scope is None else x.astype(scope.precision.compute_dtype)


def checkpoint_layer(layer: F, *, scanned: bool) -> F:
    """One layer of the model, as a function of arrays, under the plan's remat policy."""
    scope = _SCOPE.value
    return layer if scope is None else scope.remat.apply(layer, scanned=scanned)
