"""The context of a trace: the plan in scope, and settings of the code being traced.

`spmd.model_interface.ambient` holds it in a context of JAX, so JAX's own caches are keyed by it: an
inner jitted function traced under one plan is traced again under another. Outside a plan it has
neutral defaults.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError, RuleError
from spmd.model_interface.ambient import AMBIENT
from spmd.model_interface.attention_config import AttentionConfig
from spmd.model_interface.grad_transform import GradTransform
from spmd.model_interface.remat import Remat
from spmd.optim.storage import ON_DEVICES, Storage
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import ParamPlacement
from spmd.precision import Precision
from spmd.sharding.batch import BatchTable
from spmd.sharding.layer_paths import Stack
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import drop_axis
from spmd.sharding.rules import Rules, audit_spec, spec_text

_NO_REMAT = Remat("none")
_ANY_ATTENTION = AttentionConfig()
_EXAMPLES_FIRST = BatchTable()


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """The plan in scope and the settings of one trace; derive another with `override`.

    Attributes:
        mesh: The plan's mesh; None outside a plan.
        placements: Parameter path → its placement, as the plan decided it.
        variables: Variable path → its spec; of a parameter in another form, that of its codes.
        activations: Activation name → spec.
        logical: Pairs of logical name and mesh axes, for constraints that Flax resolves.
        stacks: The stacks of layers by path component.
        batch: The split of the arrays of a batch.
        activation_clips: Activation → the largest norm of a token's gradient.
        transforms: The transforms of the gradient.
        storage: The place of the training state between steps.
        precision: The plan's precision; None outside a plan.
        regather: Whether the backward pass gathers kernels again, where no `jax.checkpoint` around
            the layer does so.
        single_token: Whether each row has one token, so that the token dimension is not split
            (decoding).
        zigzag: Whether tokens are in zigzag order (`spmd.layers.zigzag`).
        lazy_logits: Whether a model may return `spmd.layers.lm_head.LazyLogits`.
        run_stages: Replaces the run over stacked layers (`spmd.layers.sequential_stages`); None for
            a plain run.
        kv_cache: The cache of generation that this trace reads or fills (`spmd.layers.kv_cache`),
            compared by identity.
    """

    mesh: AnyMesh | None = None
    placements: Mapping[str, ParamPlacement] = FrozenDict()
    variables: Mapping[str, P] = FrozenDict()
    activations: Mapping[str, P] = FrozenDict()
    activation_clips: Mapping[str, float] = FrozenDict()
    logical: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stacks: Mapping[str, Stack] = FrozenDict()
    batch: BatchTable = _EXAMPLES_FIRST
    transforms: tuple[GradTransform, ...] = ()
    storage: Storage = ON_DEVICES
    remat: Remat = _NO_REMAT
    precision: Precision | None = None
    attention: AttentionConfig = _ANY_ATTENTION
    regather: bool = False
    single_token: bool = False
    zigzag: bool = False
    lazy_logits: bool = False
    run_stages: Callable[..., Any] | None = None
    kv_cache: Any = None


_OUTSIDE = TraceContext()


def current() -> TraceContext:
    """Return the context of the trace."""
    return AMBIENT.value or _OUTSIDE


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[None]:
    """Change fields of the context for the code traced inside."""
    with AMBIENT(dataclasses.replace(current(), **changes)):
        yield


@contextlib.contextmanager
def use_plan(plan: ShardingPlan) -> Iterator[None]:
    """Put `plan` in scope for the model code traced inside."""
    context = TraceContext(
        mesh=plan.mesh,
        placements=plan.placements,
        variables=_variable_specs(plan),
        activations=FrozenDict(plan.rules.activations),
        activation_clips=plan.activation_clips,
        logical=plan.rules.logical_rows,
        stacks=FrozenDict(plan.rules.stacks),
        batch=plan.rules.batch_table,
        transforms=plan.transforms,
        storage=plan.storage,
        remat=plan.remat,
        precision=plan.precision,
        attention=plan.attention,
    )
    with AMBIENT(context):
        yield


def _variable_specs(plan: ShardingPlan) -> Mapping[str, P]:
    """Return the specs of variables, and of the nodes that hold codes."""
    specs = {entry.path: entry.spec for entry in plan.variables}
    info = plan.model.info()
    for path, node in info.stored_nodes.items():
        specs[node] = specs[info.stored_as[path]]
    return FrozenDict(specs)


@contextlib.contextmanager
def use_rules(rules: Rules, mesh: AnyMesh) -> Iterator[None]:
    """Put a table's activations in scope for the model code traced inside, without a plan.

    `spmd.annotate` constrains them there as the table says; parameters are left to the caller
    (`Rules.shardings`), as are remat and dtypes.

    Args:
        mesh: A mesh with axes of any names and types; along Explicit ones an annotation is a
            `jax.sharding.reshard`.

    Raises:
        RuleError: The table has axes that the mesh does not have.
    """
    problems = rules.on_mesh(mesh).audit_axes(mesh.shape)
    if problems:
        raise RuleError("The rule table does not fit the mesh:", problems)
    context = TraceContext(
        mesh=mesh,
        activations=FrozenDict(rules.activations),
        logical=rules.logical_rows,
        batch=rules.batch_table,
    )
    with AMBIENT(context):
        yield


def constrain(x: jax.Array, mesh: AnyMesh, spec: P, what: str) -> jax.Array:
    """Constrain `x` to `spec`, without the manual axes of the region.

    Args:
        what: Describes `x` in the error.

    Raises:
        AnnotationError: The spec does not fit `x`. (JAX itself drops an indivisible constraint
            silently.)
    """
    for axis in get_abstract_mesh().manual_axes:
        spec = drop_axis(spec, axis)
    problems = audit_spec(what, x.shape, spec, mesh.shape, f"its spec {spec_text(spec)}")
    if problems:
        raise AnnotationError("An array cannot be split as the rule table says:", problems)
    return _constrain(x, mesh, spec)


def keep_whole(x: jax.Array, mesh: AnyMesh, dims: Sequence[int]) -> jax.Array:
    """Constrain some dimensions of `x` to be whole, and leave the others to the compiler."""
    entries = []
    for dim in range(x.ndim):
        entries.append(None if dim in dims else P.UNCONSTRAINED)
    return _constrain(x, mesh, P(*entries))


def _constrain(x: jax.Array, mesh: AnyMesh, spec: P) -> jax.Array:
    if get_abstract_mesh().manual_axes:  # a spec alone is of the mesh of the region
        return jax.lax.with_sharding_constraint(x, spec)
    sharding = NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types:  # there a constraint only asserts
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)
