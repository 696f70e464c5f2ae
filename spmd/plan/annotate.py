"""Marks in model code: this activation has a name, this function is one layer, this is the core of attention.

One mark, `x = annotate(x, "mlp_hidden")`, is a sharding constraint, a remat checkpoint name and an offload name.
Outside a plan every function here is the identity, so a model that uses them runs by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError, Problem, did_you_mean
from spmd.jaxpr.equations import equations, name_of, params_of
from spmd.jaxpr.promoted import split_products
from spmd.jaxpr.source import equation_line
from spmd.jaxpr.upgrades import checkpoints_are_hijax, name_in_rule
from spmd.model_api.attention_config import AttentionConfig
from spmd.model_api.remat import CHOICE, Remat
from spmd.model_api.wrapped_param import start_layer
from spmd.plan.context import TraceContext, constrain, current, override
from spmd.plan.fsdp import gathered
from spmd.plan.manual import split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import ParamPlacement
from spmd.plan.scopes import ATTENTION, OPTIMIZER, annotate_scope, in_scope
from spmd.plan.stored import store, store_problems
from spmd.plan.unseen import unseen_problems
from spmd.sharding.dims import local_shape, spec_dims
from spmd.sharding.mesh import AnyMesh, is_kind
from spmd.sharding.optimizer_state import drop_fsdp

F = TypeVar("F", bound=Callable)

REMAT_MARK = "what the remat policy acts on"
_NUMBERED = "remat_layer(layer, scanned=…, number=i), or a policy without an interval"


def annotate(x: jax.Array, name: str, *, in_rule: bool = False) -> jax.Array:
    """Mark `x` as an activation of the rule table: constrain its sharding, then name it for remat and offload.

    Args:
        x: Has its global shape; inside `shard_map`, the shape within the manual axes.
        name: Its name in the table.
        in_rule: Whether this is the forward rule of a `jax.custom_vjp`, which JAX does not differentiate. Without it, a
            future JAX (`jax_remat3`) saves `x` and yet computes it again.

    Raises:
        AnnotationError: The plan in scope has no such name, or its spec does not divide `x`. (JAX itself drops an
            indivisible constraint silently.)
    """
    found = placement(name, x.shape)
    if found is None:
        return x
    mesh, spec = found
    with in_scope(annotate_scope(name)):
        x = constrain(x, mesh, spec, f"activation {name!r}")
    x, remat = name_in_rule(x, name) if in_rule else checkpoint_name(x, name), current().remat
    if (codec := remat.codec(name)) is None:
        return x

    def place(part: jax.Array) -> jax.Array:
        with in_scope(annotate_scope(name)):
            return constrain(part, mesh, spec, f"stored activation {name!r}")

    dims = spec_dims(spec, x.ndim, split_axes(mesh))
    shard = local_shape(x.shape, dims, mesh.shape)
    host, transposed = name in remat.offload, is_kind(mesh, "TPU7x")
    return store(x, name, codec, shard, place, on_host=host, transposed=transposed, in_rule=in_rule)


def constrain_like(x: jax.Array, name: str) -> jax.Array:
    """Constrain `x` to the spec of activation `name`, without naming it for remat or offload."""
    found = placement(name, x.shape)
    with in_scope(annotate_scope(name)):
        return x if found is None else constrain(x, *found, f"what is split like activation {name!r}")


def placement(name: str, shape: tuple[int, ...] = ()) -> tuple[AnyMesh, P] | None:
    """Return the plan's mesh and the spec of an activation, for code that is manual over the mesh; None outside a plan.

    The shape is needed where a single token is possible.
    """
    context = current()
    return None if context.mesh is None else (context.mesh, _spec_of(context, name, shape))


def annotate_param(x: jax.Array, param: ParamPlacement | None, name: str) -> tuple[jax.Array, ParamPlacement | None]:
    """Mark a parameter as an activation; return its placement as such, over `fsdp` only where the plan splits it so.

    The parameter and its gradient are split as the plan keeps them before: XLA:TPU ends the process if it looks rows up
    in a table, or adds their gradients to one, whose columns are split over fewer axes than those of the rows.
    """
    if param is None:
        return x, None
    whole = drop_fsdp(spec := _spec_of(current(), name))
    stored, gradient = (spec if drop_fsdp(own) != own else whole for own in (param.stored, param.gradient))
    comm = param.comm.without_codec()
    placed = dataclasses.replace(param, stored=stored, used=whole, gradient=gradient, comm=comm)
    for split in (param, placed):
        x = gathered(x, dataclasses.replace(split, used=split.stored))
    return checkpoint_name(x, name), placed


def _spec_of(context: TraceContext, name: str, shape: tuple[int, ...] = ()) -> P:
    if name not in context.activations:
        fix = did_you_mean(name, context.activations)
        problem = Problem(f"activation {name!r}", "is not in the rule table", fix=fix)
        raise AnnotationError("The model marks an activation that the plan does not know:", [problem])
    spec = context.activations[name]
    if not context.single_token:
        return spec
    return P(*(None if shape[dim : dim + 1] == (1,) else entry for dim, entry in enumerate(spec)))


def cast_to_compute(x: jax.Array) -> jax.Array:
    """Cast `x` to the plan's compute dtype; call it where activations begin, and let the rest follow their dtype."""
    precision = current().precision
    return x if precision is None else x.astype(precision.compute_dtype)


def attention_config() -> AttentionConfig:
    """Return the attention settings of the plan in scope; outside a plan, those that work everywhere."""
    return current().attention


def remat_interval() -> int:
    """Return n where the remat policy applies to every n-th layer; 1 outside a plan."""
    return current().remat.every


def is_recomputed() -> bool:
    """Return whether the backward pass recomputes this layer as a whole, so that what it gathers is not kept."""
    return current().remat.kind not in ("none", "selective")


def remat_layer(layer: F, *, scanned: bool, number: int | None = None) -> F:
    """Apply the plan's remat policy to one layer, a function of arrays.

    Args:
        scanned: Whether it is the body of a `lax.scan` of more than one iteration; then XLA cannot merge the
            recomputation with the original, and nothing needs to prevent it.
        number: Its number, from 0; in a scan over groups of layers, its number in the group. A policy with an interval
            needs it.

    Raises:
        AnnotationError: The policy has an interval and the layer no number; or, when the layer runs, the policy names
            activations that the layer does not mark.
    """
    context = current()
    remat = context.remat
    if remat.kind == "none":
        return layer
    if any(placed.on_host for placed in context.placements.values()):
        layer = _starting(layer)
    if number is None and remat.every > 1:
        problem = Problem(f"remat {remat}", "has an interval, and the layers have no numbers", fix=_NUMBERED)
        raise AnnotationError("This model does not number its layers:", [problem])
    if (number or 0) % remat.every:
        return override(remat=Remat("none"), regather=True)(layer)
    if remat.kind == "selective":
        return override(regather=True)(layer)
    named = (placed.comm.checkpoint_name for placed in context.placements.values())
    also = tuple(dict.fromkeys(name for name in named if name))
    checkpointed = _marked(remat.apply(layer, scanned=scanned, also=also))

    def run(*arrays: Any) -> Any:
        if remat.names and not number:
            _check_names(remat, layer, arrays)
        if checkpoints_are_hijax() and not number:
            _check_seen(remat, layer, arrays, also)
        return checkpointed(*arrays)

    return run  # type: ignore[return-value]


def remat_attention(core: F, *, keeps_scores: bool = True) -> F:
    """Apply the policy `selective` to the core of attention, a function of queries, keys and values.

    A core whose derivative recomputes its scores by itself (not `keeps_scores`) needs no other recomputation.
    """
    if current().remat.kind != "selective":
        return core
    checkpointed = _marked(jax.checkpoint(core) if keeps_scores else core)

    def run(*arrays: Any) -> Any:
        if keeps_scores and checkpoints_are_hijax():
            _check_seen(current().remat, core, arrays, ())
        return checkpointed(*arrays)

    return run  # type: ignore[return-value]


def _starting(layer: F) -> F:
    return lambda *arrays: layer(*start_layer(arrays))  # type: ignore[return-value]


def _marked(layer: Callable) -> Callable:
    """Leave a mark in the jaxpr, so that a policy that acts on nothing is noticed."""
    return lambda *arrays: jax.tree.map(lambda x: checkpoint_name(x, REMAT_MARK), layer(*arrays))


def _check_names(remat: Remat, layer: Callable, arrays: tuple[Any, ...]) -> None:
    """Check that a layer marks every name of the policy; JAX ignores a name that is not marked."""
    jaxpr = jax.make_jaxpr(layer)(*arrays)
    problems = remat.check_names(sorted(_marks(jaxpr)), "is marked in no layer")
    title = "The remat policy names activations that the model's layers do not have:"
    if wrong := store_problems(jaxpr, remat):
        title = "The remat policy cannot save these activations of the model's layers:"
    if problems + wrong:
        raise AnnotationError(title, problems + wrong)


def _check_seen(remat: Remat, layer: Callable, arrays: tuple[Any, ...], also: tuple[str, ...]) -> None:
    """Check that JAX applies the policy to all that it names; what JAX does not see, it computes again."""
    chosen = (CHOICE,) if remat.names else ()
    if problems := unseen_problems(jax.make_jaxpr(layer)(*arrays), remat, (*also, *chosen)):
        raise AnnotationError("JAX cannot apply this remat policy under its upgrade flags:", problems)


def check_annotations(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that a model traced under the plan marks every activation of its table, and that its remat policy acts."""
    marked = _marks(jaxpr)
    known = sorted(marked - {REMAT_MARK})
    problems = [
        Problem(f"activation {name!r}", "is marked nowhere in the model", fix=did_you_mean(name, known))
        for name, _ in plan.rules.activations
        if name not in marked
    ]
    if problems:
        raise AnnotationError("The rule table names activations that the model does not have:", problems)
    _check_attention(plan, jaxpr)
    _check_precision(plan, jaxpr)
    if plan.remat.kind != "none" and REMAT_MARK not in marked:
        call = "remat_attention" if plan.remat.kind == "selective" else "remat_layer"
        what = f"the model never calls spmd.plan.annotate.{call}"
        problem = Problem(f"remat {plan.remat}", what, fix="call it, or none")
        raise AnnotationError("The remat policy acts on nothing:", [problem])


def _check_attention(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that a model with settings of attention has attention that follows them."""
    given = {"attention": (plan.attention.kernel, "auto"), "context": (plan.attention.context, "ring")}
    changed = {field: value for field, (value, default) in given.items() if value != default}
    if not changed or any(ATTENTION in str(equation.source_info.name_stack) for equation in equations(jaxpr)):
        return
    what = "and the model never calls spmd.layers.attention.attend"
    problems = [
        Problem(field, f"is {value}, {what}", fix="call it, or leave it out") for field, value in changed.items()
    ]
    raise AnnotationError("These settings of attention act on nothing:", problems)


def _check_precision(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that a product of the model has an operand in the compute dtype, if that is narrower than float32."""
    dtype = plan.precision.compute_dtype
    if dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return
    narrow, wide = split_products(jaxpr, dtype, outside=OPTIMIZER)
    if narrow or not wide:
        return
    lines = dict.fromkeys(equation_line([equation]) for equation in wide)
    what = f"is {plan.precision.name}, and all {len(wide)} products of the step are in wider floats"
    fix = 'layers without dtype=, or precision="float32"'
    problem = Problem("precision", what, ", ".join(filter(None, [*lines][:5])), fix)
    raise AnnotationError("The precision acts on nothing:", [problem])


def _marks(jaxpr: Any) -> set[str]:
    names = {params_of(equation)["name"] for equation in equations(jaxpr) if name_of(equation) == "name"}
    return {name.partition(" (")[0] for name in names}  # as codes of stored activations are named
