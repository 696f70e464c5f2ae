"""What model code says to the plan: this activation has a name, this function is one layer, compute is cheap here.

One mark, `x = annotate(x, "mlp_hidden")`, is a sharding constraint, a remat checkpoint name and an offload name.
Outside a plan every function here is the identity, so a model that uses them runs by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

from spmd.errors import AnnotationError, Problem, did_you_mean
from spmd.jaxpr import equations
from spmd.model_api.attention_config import AttentionConfig
from spmd.model_api.remat import Remat
from spmd.plan.context import TraceContext, constrain, current, override
from spmd.plan.fsdp import ParamPlacement
from spmd.plan.host_params import fetch
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import AnyMesh

F = TypeVar("F", bound=Callable)

_NONE = Remat("none")
REMAT_MARK = "what the remat policy acts on"
_NUMBERED = "checkpoint_layer(layer, scanned=…, number=i), or a policy without an interval"


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
    scope = current()
    if scope is None:
        return x
    return checkpoint_name(constrain(x, scope.mesh, _spec_of(scope, name, x.shape), f"activation {name!r}"), name)


def constrain_like(x: jax.Array, name: str) -> jax.Array:
    """`x`, split as activation `name` is, without being one: it has no name for remat or offload.

    Args:
        x: As for `annotate`.
        name: The activation's name.

    Raises:
        AnnotationError: As for `annotate`.
    """
    scope = current()
    what = f"what is split like activation {name!r}"
    return x if scope is None else constrain(x, scope.mesh, _spec_of(scope, name, x.shape), what)


def placement(name: str, shape: tuple[int, ...] = ()) -> tuple[AnyMesh, P] | None:
    """The mesh of the plan in scope and the spec of an activation, for code that is manual over the mesh; else None.

    Args:
        name: The activation's name.
        shape: Its shape, if a token may come alone.

    Raises:
        AnnotationError: The plan has no such name.
    """
    scope = current()
    return None if scope is None else (scope.mesh, _spec_of(scope, name, shape))


def has_other_spec(name: str, other: str) -> bool:
    """Whether the table of the plan in scope splits activations `name` and `other` differently."""
    scope = current()
    return scope is not None and _spec_of(scope, name) != _spec_of(scope, other)


def placement_like(name: str) -> ParamPlacement | None:
    """A parameter that lies as the activation `name` does, in use and as its gradient; None outside a plan."""
    found = placement(name)
    return None if found is None else ParamPlacement(found[0], found[1], found[1], found[1])


def _spec_of(scope: TraceContext, name: str, shape: tuple[int, ...] = ()) -> P:
    table = dict(scope.rules.activations)
    if name not in table:
        problem = Problem(f"activation {name!r}", "is not in the rule table", fix=did_you_mean(name, table))
        raise AnnotationError("The model marks an activation that the plan does not know:", [problem])
    if not scope.one_token:
        return table[name]
    return P(*(None if shape[dim : dim + 1] == (1,) else entry for dim, entry in enumerate(table[name])))


def cast_to_compute(x: jax.Array) -> jax.Array:
    """`x` in the plan's compute dtype; call it where activations begin, and let the rest follow their dtype."""
    scope = current()
    return x if scope is None else x.astype(scope.precision.compute_dtype)


def attention_config() -> AttentionConfig:
    """How the plan in scope computes attention; what works everywhere, outside a plan."""
    scope = current()
    return AttentionConfig() if scope is None else scope.attention


def manual_over(mesh: AnyMesh, axes: tuple[str, ...], f: F, in_specs: Any, out_specs: Any) -> F:
    """`f` on what one device holds along some axes of size above 1; the others are left to the compiler.

    Where no other is larger than 1, nothing is left to it: a Pallas kernel asks for that. It does not check what varies
    over which axes, so a region around it must not either (`check_vma=False`), or its derivative is refused.

    Args:
        mesh: The plan's mesh.
        axes: The axes; without any, `f` as it is.
        f: A function of arrays, which may name the axes in collectives.
        in_specs: As of `jax.shard_map`.
        out_specs: As of `jax.shard_map`.
    """
    if not axes:
        return f
    around = get_abstract_mesh().manual_axes
    left = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in (*axes, *around)]
    names = set(axes) if left else set(mesh.axis_names) - set(around)
    return jax.shard_map(
        f,
        mesh=None if around else mesh,  # inside of another such region, that one's mesh
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=names,
        check_vma=False,
    )


def remat_interval() -> int:
    """Of this many layers in a row the plan's remat policy is about the first; 1 outside a plan."""
    scope = current()
    return 1 if scope is None else scope.remat.every


def remat_layer(layer: F, *, scanned: bool, number: int | None = None) -> F:
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
    scope = current()
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


def remat_attention(core: F, *, keeps_scores: bool = True) -> F:
    """The core of attention, as a function of queries, keys and values: all that `selective` recomputes.

    Args:
        core: The core.
        keeps_scores: Whether its derivative keeps what grows with the square of the sequence. If not, it computes its
            scores again by itself, and there is nothing else to recompute.
    """
    scope = current()
    if scope is None or scope.remat.kind != "selective":
        return core
    return _marked(jax.checkpoint(core) if keeps_scores else core)  # type: ignore[return-value]


def _fetching(layer: F) -> F:
    return lambda *arrays: layer(*fetch(arrays))  # type: ignore[return-value]


def _in_scope(scope: TraceContext, layer: F) -> F:
    def run(*arrays: Any) -> Any:
        with override(scope):
            return layer(*arrays)

    return run  # type: ignore[return-value]


def _marked(layer: Callable) -> Callable:
    """`layer`, with a trace of its own in the jaxpr, so that a policy that acts on nothing is seen."""
    return lambda *arrays: jax.tree.map(lambda x: checkpoint_name(x, REMAT_MARK), layer(*arrays))


def _check_names(remat: Remat, layer: Callable, arrays: tuple[Any, ...]) -> None:
    """Whether a layer marks every name of a policy; JAX would keep nothing for one that it does not, without a word."""
    marked = sorted(_marks(jax.make_jaxpr(layer)(*arrays)))
    problems = [
        Problem(f"remat {word}:{name}", "is marked in no layer", fix=f"one of: {', '.join(marked)}")
        for word, names in (("save", remat.save), ("offload", remat.offload))
        for name in names
        if name not in marked
    ]
    if problems:
        raise AnnotationError("The remat policy names activations that the model's layers do not have:", problems)


def check_annotations(plan: ShardingPlan, jaxpr: Any) -> None:
    """Whether a traced model marks every activation that the plan's table names.

    Args:
        plan: The plan it was traced under.
        jaxpr: Its jaxpr, closed or not.

    Raises:
        AnnotationError: Names of the table that are marked nowhere, so that their specs mean nothing; a remat policy
            that acts on nothing.
    """
    marked = _marks(jaxpr)
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
        problem = Problem(
            f"remat {plan.remat}", f"the model never calls spmd.plan.annotate.{call}", fix="call it, or none"
        )
        raise AnnotationError("The remat policy acts on nothing:", [problem])


def _marks(jaxpr: Any) -> set[str]:
    """Return every checkpoint name in a jaxpr."""
    return {equation.params["name"] for equation in equations(jaxpr) if equation.primitive.name == "name"}
