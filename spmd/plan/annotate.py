"""Marks in model code: the name of an activation, one layer, the core of attention.

One mark, `x = annotate(x, "mlp_hidden")`, is a sharding constraint, a remat checkpoint name and an
offload name. Outside a plan every function here is the identity, so a model that uses them runs by
itself.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from spmd.codecs import Codec
from spmd.errors import AnnotationError, Problem, did_you_mean
from spmd.jaxpr.equations import equations, name_of, params_of
from spmd.jaxpr.promoted import split_products
from spmd.jaxpr.source import equation_line
from spmd.jaxpr.upgrades import checkpoints_are_hijax, name_in_rule
from spmd.model_interface.attention_config import AttentionConfig
from spmd.model_interface.remat import CHOICE, Remat
from spmd.model_interface.wrapped_param import start_layer
from spmd.plan.clipped_gradients import clip_gradient
from spmd.plan.compressed_activations import store, store_problems
from spmd.plan.context import TraceContext, constrain, current, override
from spmd.plan.fsdp import gathered
from spmd.plan.manual import manual_axes, split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import ParamPlacement
from spmd.plan.scopes import ATTENTION, OPTIMIZER, annotate_scope, clip_scope, in_scope
from spmd.plan.unseen import unseen_problems
from spmd.sharding.dims import local_shape, spec_dims
from spmd.sharding.mesh import AnyMesh, chip_of_mesh
from spmd.sharding.optimizer_state import drop_gathered

F = TypeVar("F", bound=Callable)

REMAT_MARK = "what the remat policy acts on"
_NUMBERED = "remat_layer(layer, scanned=…, number=i), or a policy without an interval"


def annotate(x: jax.Array, name: str, *, in_rule: bool = False) -> jax.Array:
    """Constrain the sharding of an activation by the rule table, and name it for remat and offload.

    Args:
        x: Has its global shape; inside `shard_map`, the shape within the manual axes.
        name: Its name in the table.
        in_rule: Whether this is the forward rule of a `jax.custom_vjp`, which JAX does not
            differentiate. If this is False in such a rule, a future JAX (`jax_remat3`) saves `x`
            and yet computes it again.

    Raises:
        AnnotationError: The plan in scope has no such name, or its spec does not divide `x`. (JAX
            itself drops an indivisible constraint silently.)
    """
    found = placement(name, x.shape)
    if found is None:
        return x
    mesh, spec = found
    with in_scope(annotate_scope(name)):
        x = constrain(x, mesh, spec, f"activation {name!r}")
    if in_rule:
        _check_not_clipped(name)
    x = clip_activation(x, name)
    x = name_in_rule(x, name) if in_rule else checkpoint_name(x, name)
    codec = current().remat.codec(name)
    if codec is None:
        return x
    return _store(x, name, codec, mesh, spec, in_rule=in_rule)


def _check_not_clipped(name: str) -> None:
    """Raise if the gradient of an activation in a derivative's own rule is to be clipped."""
    if name in current().activation_clips:
        what = f"has {name}, which is inside of a function with a derivative of its own"
        problem = Problem("clip_activations", what, fix="another activation")
        raise AnnotationError("Clipping without effect:", [problem])


def clip_activation(x: jax.Array, name: str) -> jax.Array:
    """Clip the gradient of an activation, if the plan says so; `annotate` does it, too."""
    context = current()
    limit = context.activation_clips.get(name)
    if limit is None:
        return x
    spec = _spec_of(context, name, x.shape)
    features = spec_dims(spec, x.ndim, manual_axes())[-1]
    return clip_gradient(x, limit, features, name)


def _store(
    x: jax.Array, name: str, codec: Codec, mesh: AnyMesh, spec: P, *, in_rule: bool
) -> jax.Array:
    """Store an activation as codes, split as the activation is."""

    def place(part: jax.Array) -> jax.Array:
        with in_scope(annotate_scope(name)):
            return constrain(part, mesh, spec, f"stored activation {name!r}")

    dims = spec_dims(spec, x.ndim, split_axes(mesh))
    return store(
        x,
        name,
        codec,
        local_shape(x.shape, dims, mesh.shape),
        place,
        on_host=name in current().remat.offload,
        transposed=chip_of_mesh(mesh).reads_transposed,
        in_rule=in_rule,
    )


def constrain_like(x: jax.Array, name: str) -> jax.Array:
    """Constrain `x` to the spec of activation `name`, without naming it for remat or offload."""
    found = placement(name, x.shape)
    if found is None:
        return x
    mesh, spec = found
    with in_scope(annotate_scope(name)):
        return constrain(x, mesh, spec, f"what is split like activation {name!r}")


def placement(name: str, shape: tuple[int, ...] = ()) -> tuple[AnyMesh, P] | None:
    """Return the plan's mesh and the spec of an activation, for manual code; None outside a plan.

    Args:
        shape: Needed where a single token is possible.
    """
    context = current()
    if context.mesh is None:
        return None
    return context.mesh, _spec_of(context, name, shape)


def annotate_param(
    x: jax.Array, param: ParamPlacement | None, name: str
) -> tuple[jax.Array, ParamPlacement | None]:
    """Mark a parameter as an activation; return its placement as an activation.

    That placement is split over the axes of gathers only where the plan splits the parameter so. The
    parameter and its gradient are first constrained to the plan's own specs: XLA:TPU aborts if it
    looks up rows of a table, or adds gradients of rows to a table, with columns split over fewer
    axes than those of the rows.
    """
    if param is None:
        return x, None
    spec = _spec_of(current(), name)
    whole = drop_gathered(spec)
    placed = dataclasses.replace(
        param,
        param_spec=spec if _is_gathered(param.param_spec) else whole,
        compute_spec=whole,
        grad_spec=spec if _is_gathered(param.grad_spec) else whole,
        comm=param.comm.without_codec(),
    )
    for split in (param, placed):
        x = gathered(x, dataclasses.replace(split, compute_spec=split.param_spec))
    return checkpoint_name(x, name), placed


def _is_gathered(spec: P) -> bool:
    return drop_gathered(spec) != spec


def _spec_of(context: TraceContext, name: str, shape: tuple[int, ...] = ()) -> P:
    """Return the spec of an activation; with a single token, a dimension of size 1 is not split."""
    if name not in context.activations:
        fix = did_you_mean(name, context.activations)
        problem = Problem(f"activation {name!r}", "is not in the rule table", fix=fix)
        title = "The model marks an activation that the plan does not know:"
        raise AnnotationError(title, [problem])
    spec = context.activations[name]
    if not context.single_token:
        return spec
    entries = list(spec)
    for dim, size in enumerate(shape[: len(entries)]):
        if size == 1:
            entries[dim] = None
    return P(*entries)


def cast_to_compute(x: jax.Array) -> jax.Array:
    """Cast `x` to the plan's compute dtype, for the first activations; later ones inherit it."""
    precision = current().precision
    if precision is None:
        return x
    return x.astype(precision.compute_dtype)


def attention_config() -> AttentionConfig:
    """Return the attention settings of the plan in scope; outside a plan, the defaults."""
    return current().attention


def remat_interval() -> int:
    """Return the interval of layers under the remat policy; 1 outside a plan."""
    return current().remat.every


def is_recomputed() -> bool:
    """Return whether the backward pass recomputes this layer as a whole, gathers included."""
    return current().remat.kind not in ("none", "selective")


def remat_layer(layer: F, *, scanned: bool, number: int | None = None) -> F:
    """Apply the plan's remat policy to one layer, a function of arrays.

    Args:
        scanned: Whether the layer is the body of a `lax.scan` of more than one iteration; then XLA
            cannot merge the recomputation with the original, so no barrier is needed.
        number: The layer's number, from 0; in a scan over groups of layers, its number in the
            group. A policy with an interval needs it.

    Raises:
        AnnotationError: The policy has an interval and the layer no number; or, when the layer
            runs, the policy names activations that the layer does not mark.
    """
    context = current()
    remat = context.remat
    layer = _starting(layer)
    if remat.kind == "none":
        return layer
    if number is None and remat.every > 1:
        what = "has an interval, and the layers have no numbers"
        problem = Problem(f"remat {remat}", what, fix=_NUMBERED)
        raise AnnotationError("Model without numbered layers:", [problem])
    if (number or 0) % remat.every:
        return override(remat=Remat("none"), regather=True)(layer)
    if remat.kind == "selective":
        return override(regather=True)(layer)
    also = _checkpoint_names(context.placements)
    checkpointed = _marked(remat.apply(layer, scanned=scanned, also=also))
    is_first = not number

    def run(*arrays: Any) -> Any:
        if remat.names and is_first:
            _check_names(remat, layer, arrays)
        if checkpoints_are_hijax() and is_first:
            _check_seen(remat, layer, arrays, also)
        return checkpointed(*arrays)

    return run  # type: ignore[return-value]


def _checkpoint_names(placements: Mapping[str, ParamPlacement]) -> tuple[str, ...]:
    """Return the names of prepared parameters, each once, in the order of the placements."""
    names = dict.fromkeys(placed.comm.checkpoint_name for placed in placements.values())
    return tuple(name for name in names if name)


def remat_attention(core: F, *, keeps_scores: bool = True) -> F:
    """Apply the policy `selective` to the core of attention, from queries, keys and values.

    Args:
        core: The function of queries, keys and values.
        keeps_scores: Whether the derivative of the core keeps its scores. If False, the derivative
            recomputes them by itself, and no `jax.checkpoint` is applied.
    """
    if current().remat.kind != "selective":
        return core
    wrapped: Any = core
    if keeps_scores:
        wrapped = jax.checkpoint(core)
    checkpointed = _marked(wrapped)

    def run(*arrays: Any) -> Any:
        if keeps_scores and checkpoints_are_hijax():
            _check_seen(current().remat, core, arrays, ())
        return checkpointed(*arrays)

    return run  # type: ignore[return-value]


def _starting(layer: F) -> F:
    return lambda *arrays: layer(*start_layer(arrays))  # type: ignore[return-value]


def _marked(layer: Callable) -> Callable:
    """Mark the results in the jaxpr, so that `check_annotations` notices an unused policy."""
    return lambda *arrays: jax.tree.map(lambda x: checkpoint_name(x, REMAT_MARK), layer(*arrays))


def _check_names(remat: Remat, layer: Callable, arrays: tuple[Any, ...]) -> None:
    """Check that a layer marks every name of the policy; JAX ignores unmarked names."""
    jaxpr = jax.make_jaxpr(layer)(*arrays)
    problems = remat.check_names(sorted(_marks(jaxpr)), "is marked in no layer")
    wrong = store_problems(jaxpr, remat)
    title = "The remat policy names activations that the model's layers do not have:"
    if wrong:
        title = "The remat policy cannot save these activations of the model's layers:"
    if problems or wrong:
        raise AnnotationError(title, problems + wrong)


def _check_seen(
    remat: Remat, layer: Callable, arrays: tuple[Any, ...], also: tuple[str, ...]
) -> None:
    """Check that JAX sees all names of the policy; unseen activations are computed again."""
    names = also
    if remat.names:
        names = (*also, CHOICE)
    problems = unseen_problems(jax.make_jaxpr(layer)(*arrays), remat, names)
    if problems:
        title = "JAX cannot apply this remat policy under its upgrade flags:"
        raise AnnotationError(title, problems)


def check_annotations(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that a traced model marks every activation of the rule table, and uses the settings.

    These are the settings of attention, the compute dtype and the remat policy.
    """
    marked = _marks(jaxpr)
    known = sorted(marked - {REMAT_MARK})
    problems = []
    for name, _ in plan.rules.activations:
        if name not in marked:
            fix = did_you_mean(name, known)
            what = "is marked nowhere in the model"
            problems.append(Problem(f"activation {name!r}", what, fix=fix))
    if problems:
        title = "The rule table names activations that the model does not have:"
        raise AnnotationError(title, problems)
    _check_attention(plan, jaxpr)
    _check_precision(plan, jaxpr)
    _check_clips(plan, jaxpr)
    if plan.remat.kind != "none" and REMAT_MARK not in marked:
        call = "remat_layer"
        if plan.remat.kind == "selective":
            call = "remat_attention"
        what = f"the model never calls spmd.plan.annotate.{call}"
        problem = Problem(f"remat {plan.remat}", what, fix="call it, or none")
        raise AnnotationError("Remat policy without effect:", [problem])


def _check_clips(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that the gradient of each activation to be clipped is taken where it is marked."""
    if not plan.activation_clips:
        return
    scopes = {str(equation.source_info.name_stack) for equation in equations(jaxpr)}
    problems = []
    for name in plan.activation_clips:
        if not any(clip_scope(name) in scope for scope in scopes):
            what = f"has {name}, which JAX does not differentiate where the model marks it"
            why = "it has no gradient, or is inside a function with a derivative of its own"
            problems.append(Problem("clip_activations", what, why, "another activation"))
    if problems:
        raise AnnotationError("Clipping without effect:", problems)


def _check_attention(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that a model calls `attend`, if a setting of attention is not the default."""
    changed = {}
    if plan.attention.kernel != "auto":
        changed["attention"] = plan.attention.kernel
    if plan.attention.context != "auto":
        changed["context"] = plan.attention.context
    if not changed or _has_attention(jaxpr):
        return
    problems = []
    for field, value in changed.items():
        what = f"is {value}, and the model never calls spmd.layers.attention.attend"
        problems.append(Problem(field, what, fix="call it, or leave it out"))
    raise AnnotationError("Attention settings without effect:", problems)


def _has_attention(jaxpr: Any) -> bool:
    return any(ATTENTION in str(equation.source_info.name_stack) for equation in equations(jaxpr))


def _check_precision(plan: ShardingPlan, jaxpr: Any) -> None:
    """Check that a product has an operand in the compute dtype, if this is narrower than float32.

    An operand of another dtype, no wider, counts, too. A model without products of floats passes.
    """
    dtype = plan.precision.compute_dtype
    if dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return
    narrow, wide = split_products(jaxpr, dtype, outside=OPTIMIZER)
    if narrow or not wide:
        return
    lines = dict.fromkeys(equation_line([equation]) for equation in wide)
    first_lines = [line for line in [*lines][:5] if line]
    problem = Problem(
        "precision",
        f"is {plan.precision.name}, and all {len(wide)} products of the step are in wider floats",
        ", ".join(first_lines),
        'layers without dtype=, or precision="float32"',
    )
    raise AnnotationError("Precision without effect:", [problem])


def _marks(jaxpr: Any) -> set[str]:
    """Return the checkpoint names in a traced program."""
    names = set()
    for equation in equations(jaxpr):
        if name_of(equation) == "name":
            label = params_of(equation)["name"]
            name, _, _ = label.partition(" (")  # as codes of stored activations are named
            names.add(name)
    return names
