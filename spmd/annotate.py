"""What model code says to the plan: this activation has a name, this function is one layer, compute is cheap here.

One mark, `x = annotate(x, "mlp_hidden")`, is a sharding constraint, a remat checkpoint name and an offload name.
Outside a plan every function here is the identity, so a model that uses them runs by itself.

The plan is in scope only while a step is traced. It is held by `jax.make_user_context`, so JAX's own caches are
keyed by it: an inner jitted function traced under one plan is traced again under another.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.derive import ZERO_KEEPS, drop_axis
from spmd.errors import AnnotationError, Problem, did_you_mean
from spmd.hosted import Hosted, fetch, is_hosted, misplaced
from spmd.mesh import AnyMesh
from spmd.plan import ShardingPlan
from spmd.precision import Precision, cast_floats
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
    hosted: frozenset[str] = frozenset()
    gathers_again: bool = False  # kernels in the backward pass, where no jax.checkpoint around the layer does


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


_SCOPE = jax.make_user_context(default_value=None)
_NONE = Remat("none")
REMAT_MARK = "what the remat policy acts on"
_NUMBERED = "checkpoint_layer(layer, scanned=…, number=i), or a policy without an interval"


@contextlib.contextmanager
def within(plan: ShardingPlan) -> Iterator[None]:
    """Puts `plan` in scope for the model code that is traced inside.

    Example:
        >>> import jax.numpy as jnp
        >>> annotate(jnp.ones(2), "any name: no plan is in scope").shape
        (2,)
    """
    scope = _Scope(plan.mesh, plan.rules, plan.zero, plan.remat, plan.precision, plan.hosted_params)
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
    return _placed(scope, spec, not scope.gathers_again)


def _placed(scope: _Scope, spec: P, is_kept: bool) -> Weight:
    used = drop_axis(spec, "fsdp")
    stored, gradient = (spec if table in ZERO_KEEPS[scope.zero] else used for table in ("params", "gradients"))
    return Weight(scope.mesh, stored, used, gradient, is_kept)


def gather(kernel: jax.Array, placed: Weight | None) -> jax.Array:
    """A layer's parameter as it is used: whole over `fsdp`. What the backward pass keeps of it is up to remat."""
    return kernel if placed is None else _constrain(kernel, placed.mesh, placed.used, "a layer's parameter")


def scatter(gradient: jax.Array, placed: Weight | None) -> jax.Array:
    """A layer's gradient, summed over devices into the place where the plan keeps it."""
    return gradient if placed is None else _constrain(gradient, placed.mesh, placed.gradient, "a layer's gradient")


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
    scope = _SCOPE.value
    if scope is None:
        return params
    if wrong := [misplaced(path) for path in sorted(scope.hosted) if not gathered_later(path)]:
        raise AnnotationError("This model takes its parameters all at once:", wrong)

    def place(path: str, param: Any) -> Any:
        match = scope.rules.match(path)
        if match is None or gathered_later(path) or not jnp.issubdtype(param.dtype, jnp.floating):
            return param
        return _gathered(param, _placed(scope, match.spec, is_kept=True))

    return tree.map_with_path(place, params, is_leaf=is_hosted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(param: jax.Array, placed: Weight) -> jax.Array:
    return gather(param, placed)


_gathered.defvjp(
    lambda param, placed: (gather(param, placed), None),
    lambda placed, _, gradient: (scatter(gradient, placed),),
)


def to_compute(x: jax.Array) -> jax.Array:
    """`x` in the plan's compute dtype; call it where activations begin, and let the rest follow their dtype."""
    scope = _SCOPE.value
    return x if scope is None else x.astype(scope.precision.compute_dtype)


def gradient_view(params: Any) -> Any:
    """What gradients are taken with respect to: the parameters in the dtype in which the plan sums gradients.

    For a parameter in host memory it is a stand-in on the device.
    """
    scope = _SCOPE.value
    if scope is None:
        return params

    def view(path: str, param: jax.Array) -> jax.Array:
        hosted = path in scope.hosted
        return cast_floats(jnp.zeros(param.shape, param.dtype) if hosted else param, scope.precision.gradients_dtype)

    return tree.map_with_path(view, params)


def as_taken(params: Any, view: Any = None) -> Any:
    """The parameters as a model takes them: of those in host memory, each layer brings its own to the device.

    Args:
        params: A nested dictionary.
        view: What `gradient_view` made of them, to differentiate with respect to it; None to differentiate nothing.
    """
    scope = _SCOPE.value
    seen = params if view is None else view
    if scope is None or not scope.hosted:
        return seen
    views = {} if view is None else tree.flatten(view)

    def take(path: str, param: jax.Array, seen: jax.Array) -> Any:
        placed = weight(path) if path in scope.hosted else None
        if placed is None:
            return seen
        return Hosted(param, views.get(path), NamedSharding(scope.mesh, placed.stored, memory_kind="device"))

    return tree.map_with_path(take, params, seen)


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which gradients of `dtype` are added up over microbatches; `dtype` itself outside a plan."""
    scope = _SCOPE.value
    return dtype if scope is None else jnp.dtype(scope.precision.accumulation)


def remat_interval() -> int:
    """Of this many layers in a row the plan's remat policy is about the first; 1 outside a plan."""
    scope = _SCOPE.value
    return 1 if scope is None else scope.remat.every


def checkpoint_layer(layer: F, *, scanned: bool, number: int | None = None) -> F:
    """One layer of the model, as a function of arrays, under the plan's remat policy.

    Args:
        layer: The layer.
        scanned: Whether it is the body of a `lax.scan` with more than one turn; then nothing needs to keep XLA from
            merging the recomputation with the original.
        number: Which layer it is, counted from 0; in a scan of groups of layers, which of its group. A policy with an
            interval needs it.

    Raises:
        AnnotationError: The policy has an interval and the layer no number; or, when the layer runs, the policy names
            activations that the layer does not mark.
    """
    scope = _SCOPE.value
    if scope is None or scope.remat.kind == "none":
        return layer
    if scope.hosted:
        layer = _fetching(layer)
    if number is None and scope.remat.every > 1:
        problem = Problem(f"remat {scope.remat}", "has an interval, and the layers have no numbers", fix=_NUMBERED)
        raise AnnotationError("This model does not say which of its layers is which:", [problem])
    if (number or 0) % scope.remat.every:
        return _in_scope(dataclasses.replace(scope, remat=_NONE, gathers_again=True), layer)
    if scope.remat.kind == "selective":
        return _in_scope(dataclasses.replace(scope, gathers_again=True), layer)
    checkpointed = _marked(scope.remat.apply(layer, scanned=scanned))

    def run(*arrays: Any) -> Any:
        if scope.remat.names and not number:
            _check_names(scope.remat, layer, arrays)
        return checkpointed(*arrays)

    return run  # type: ignore[return-value]


def checkpoint_core(core: F) -> F:
    """The core of attention, as a function of queries, keys and values: all that `selective` recomputes."""
    scope = _SCOPE.value
    if scope is None or scope.remat.kind != "selective":
        return core
    return _marked(jax.checkpoint(core))  # type: ignore[return-value]


def _fetching(layer: F) -> F:
    return lambda *arrays: layer(*fetch(arrays))  # type: ignore[return-value]


def _in_scope(scope: _Scope, layer: F) -> F:
    def run(*arrays: Any) -> Any:
        with _SCOPE(scope):
            return layer(*arrays)

    return run  # type: ignore[return-value]


def _marked(layer: Callable) -> Callable:
    """`layer`, with a trace of its own in the jaxpr, so that a policy that acts on nothing is seen."""
    return lambda *arrays: jax.tree.map(lambda x: checkpoint_name(x, REMAT_MARK), layer(*arrays))


def _check_names(remat: Remat, layer: Callable, arrays: tuple[Any, ...]) -> None:
    """Whether a layer marks every name of a policy; JAX would keep nothing for one that it does not, without a word."""
    marked = sorted(set(_marks(jax.make_jaxpr(layer)(*arrays))))
    problems = [
        Problem(f"remat {word}:{name}", "is marked in no layer", fix=f"one of: {', '.join(marked)}")
        for word, names in (("save", remat.save), ("offload", remat.offload))
        for name in names
        if name not in marked
    ]
    if problems:
        raise AnnotationError("The remat policy names activations that the model's layers do not have:", problems)


def check_marks(plan: ShardingPlan, jaxpr: Any) -> None:
    """Whether a traced model marks every activation that the plan's table names.

    Args:
        plan: The plan it was traced under.
        jaxpr: Its jaxpr, closed or not.

    Raises:
        AnnotationError: Names of the table that are marked nowhere, so that their specs mean nothing; a remat policy
            that acts on nothing.
    """
    marked = set(_marks(jaxpr))
    known = sorted(marked - {REMAT_MARK})
    problems = [
        Problem(f"activation {name!r}", "is marked nowhere in the model", fix=did_you_mean(name, known))
        for name, _ in plan.rules.activations
        if name not in marked
    ]
    if problems:
        raise AnnotationError("The rule table names activations that the model does not have:", problems)
    if plan.remat.kind != "none" and REMAT_MARK not in marked:
        call = "checkpoint_core" if plan.remat.kind == "selective" else "checkpoint_layer"
        problem = Problem(f"remat {plan.remat}", f"the model never calls spmd.annotate.{call}", fix="call it, or none")
        raise AnnotationError("The remat policy acts on nothing:", [problem])


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
