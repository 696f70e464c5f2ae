"""Which plan the model code that is being traced belongs to.

The plan is in scope only while a step is traced. It is held by `jax.make_user_context`, so JAX's own caches are keyed
by it: an inner jitted function traced under one plan is traced again under another.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError
from spmd.model_api.attention_config import AttentionConfig
from spmd.model_api.precision import Precision
from spmd.model_api.remat import Remat
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import drop_axis
from spmd.sharding.rules import Rules, audit_spec, spec_text


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """What model code needs of a plan.

    Attributes:
        mesh: Of the plan, as are the next five.
        rules: The table.
        zero: The ZeRO stage.
        remat: The policy.
        precision: Which dtype is where.
        attention: How attention is computed.
        hosted: The paths of the parameters in host memory.
        frozen: The path of each variable that never changes, and that of the parameter which it is.
        gathers_again: Whether kernels are gathered again in the backward pass, where no `jax.checkpoint` around the
            layer does so.
        one_token: Whether tokens come one at a time, so that the dimension they are in is not split.
    """

    mesh: AnyMesh
    rules: Rules
    zero: int
    remat: Remat
    precision: Precision
    attention: AttentionConfig
    hosted: frozenset[str] = frozenset()
    frozen: frozenset[tuple[str, str]] = frozenset()
    gathers_again: bool = False
    one_token: bool = False


_SCOPE = jax.make_user_context(default_value=None)


def current() -> TraceContext | None:
    """What is in scope; None outside a plan."""
    return _SCOPE.value


@contextlib.contextmanager
def override(scope: TraceContext) -> Iterator[None]:
    """Puts another scope in the place of the one around it."""
    with _SCOPE(scope):
        yield


@contextlib.contextmanager
def use_plan(plan: ShardingPlan) -> Iterator[None]:
    """Puts `plan` in scope for the model code that is traced inside.

    Args:
        plan: From `make_plan`.
    """
    decided = plan.mesh, plan.rules, plan.zero, plan.remat, plan.precision, plan.attention
    with _SCOPE(TraceContext(*decided, plan.hosted_params, plan.frozen)):
        yield


def constrain(x: jax.Array, mesh: AnyMesh, spec: P, what: str) -> jax.Array:
    """`x` under `spec`, without those axes that are manual here.

    Args:
        x: An array.
        mesh: The plan's mesh.
        spec: How to split it.
        what: What it is, for the error.

    Raises:
        AnnotationError: It cannot be split so. (JAX itself would drop an indivisible constraint without a word.)
    """
    manual = get_abstract_mesh().manual_axes
    for axis in manual:
        spec = drop_axis(spec, axis)
    problems = audit_spec(what, x.shape, spec, mesh.shape, f"its spec {spec_text(spec)}")
    if problems:
        raise AnnotationError("An array cannot be split as the rule table says:", problems)
    return jax.lax.with_sharding_constraint(x, spec if manual else NamedSharding(mesh, spec))
