"""Gradients that each device sums over all microbatches of its examples, and that devices exchange once a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.gradients.base import GradFn, LossGradFn, with_loss_of
from spmd.gradients.losses import VALUES, Sums
from spmd.model_api.grad_transform import Carry, observers
from spmd.model_api.model import abstract_key
from spmd.plan.context import constrain, current, use_plan
from spmd.plan.local_param import LocalParam, local_param
from spmd.plan.manual import manual_over, psum, split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.dims import dims_spec, extra_axes, spec_dims
from spmd.sharding.mesh import AnyMesh, entry_axes

AXES = ("data", "fsdp")
"""The axes over which an exchange can wait for the end of a step."""

_TITLE, _FIX = "Gradients cannot be exchanged once a step:", "--exchange-once none"


@dataclasses.dataclass(frozen=True)
class LocalGradients:
    """Gradients that each device has summed over its own examples, and what is needed to exchange them.

    Attributes:
        gradients: The tree; each array is `[device, …]`, with the devices of the axes in `over`.
        over: Path → the axes to sum over.
        weight: The sum of weights of all examples.
    """

    gradients: Any
    over: Callable[[str], tuple[str, ...]]
    weight: jax.Array
    mesh: AnyMesh


LastStage = Callable[[LocalGradients, Carry], tuple[Any, Carry]]
"""`(local gradients, carry) -> (gradients, carry)`, with the gradients as the plan keeps them."""


def sum_exchange(local: LocalGradients, carry: Carry) -> tuple[Any, Carry]:
    """Sum gradients over devices, the last stage by default."""
    return tree.map_with_path(lambda path, g: exchange(path, g, local), local.gradients), carry


def exchange_once(
    grad_fn: GradFn,
    axes: tuple[str, ...],
    last_stage: LastStage = sum_exchange,
    *,
    own: str = "",
    additive: bool = False,
) -> GradFn:
    """Return a gradient function that exchanges the gradients of `grad_fn` over mesh `axes` once.

    Each device calls `grad_fn`, such as `accumulate(…)` or `pipeline(…)`, on its part of the batch. Parameters that are
    split over the axes are gathered before, in the dtype in which they are stored, and stay gathered.

    Args:
        axes: `("data",)` or `("data", "fsdp")`. Nothing changes without them, or where their size is 1.
        last_stage: The exchange itself.
        own: Name of the transform whose state is the last stage's, and which the gradients on a device do not see.
        additive: Whether a gradient function that is not made from a loss function is declared to return sums over the
            examples. `value_and_grad` and pipelines read it from the loss.

    Raises:
        ConfigError: At trace time: results are no sums over the examples, so they would differ.
    """
    if not set(axes) <= {*AXES}:
        raise ConfigError(_TITLE, [Problem("axes", f"are {axes}", fix='("data",) or ("data", "fsdp")')])

    def exchanged(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        mesh, placements = current().mesh, current().placements
        over = () if mesh is None else tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if mesh is None or not over:
            return grad_fn(params, carry, batch, key)
        inner = carry.without(own)
        changing = [path for path in tree.flatten(carry.variables) if path not in placements]
        problems = [Problem(path, "is a variable that the model changes by itself", fix=_FIX) for path in changing]
        if seeing := observers(current().transforms):
            problems.append(Problem(seeing, "must see every microbatch, also of other devices", fix=_FIX))
        codecs = {placements[path].comm.param_codec for path in placements if "fsdp" in over} - {""}
        what, fix = "is {}, and an exchange over fsdp gathers once", "--exchange-once data, or no --compress.gather"
        problems += [Problem("compress.gather", what.format(codec), fix=fix) for codec in codecs]
        problems += [Problem(path, "is in host memory", fix=_FIX) for path in placements if placements[path].on_host]
        if not additive and not isinstance(grad_fn, LossGradFn):
            what = "is not made from a loss function, so it is not known whether it sums over the examples"
            fix = "spmd.value_and_grad(loss_fn), or exchange_once(…, additive=True)"
            problems.append(Problem("grad_fn", what, fix=fix))
        if problems:
            raise ConfigError(_TITLE, problems)
        stages = split_axes(mesh)[: mesh.shape["pipe"] > 1]  # XLA refuses a manual region over an axis left of these

        def summed(path: str) -> tuple[str, ...]:
            """Return the axes to sum a gradient over: of a parameter that all stages use, over stages too."""
            is_staged = path not in placements or "pipe" in placements[path].leading
            return over if is_staged else (*stages, *over)

        def specs(arrays: Any, axes: tuple[str, ...], *, of_gradients: bool = False) -> Any:
            def spec(path: str, x: Any) -> P:
                stored, added = placements[path].of_stack().stored if path in placements else P(), summed(path)
                dims = spec_dims(stored, x.ndim, tuple(axis for axis in axes if axis not in added))
                return P(added, *dims_spec(dims)) if of_gradients else dims_spec(dims)

            return tree.map_with_path(spec, arrays)

        def local(params: Any, variables: Any, states: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums]:
            gradients, sums, _ = grad_fn(params, Carry(variables, states), batch, key)
            if VALUES in sums:
                what = "are reported as they are, and each device has its own"
                problem = Problem(", ".join(sums[VALUES]), what, fix=f"sums in their place; or {_FIX}")
                raise ConfigError(_TITLE, [problem])
            with in_scope(comm_scope("gradients, exchanged once a step")):
                sums = jax.tree.map(lambda x: psum(x, over), sums)
            return jax.tree.map(lambda g: g[None], gradients), sums

        given = params, inner.variables, inner.transforms
        others = tuple(axis for axis in mesh.axis_names if axis not in over)
        kept = tuple(specs(part, others) for part in given)
        with in_scope(comm_scope("parameters, gathered once a step")):
            whole = jax.tree.map(lambda x, spec: constrain(x, mesh, spec, "a parameter"), given, kept)

        def batch_spec(path: str, x: Any) -> P:
            return dims_spec(spec_dims(current().batch.spec(path, x.ndim), x.ndim, over))

        in_specs = (*(specs(part, stages) for part in given), tree.map_with_path(batch_spec, batch), P())
        out_specs = specs(params, stages, of_gradients=True), P()
        run = manual_over(mesh, (*stages, *over), local, in_specs, out_specs)
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*whole, batch, key)
        if dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals))[1][-1]:
            what = "is used, and every device would draw the same numbers for other examples"
            raise ConfigError(_TITLE, [Problem("key", what, fix=_FIX)])
        results = jaxpr_as_fun(jaxpr)(*jax.tree.leaves((whole, batch, key)))
        gradients, sums = jax.tree.unflatten(jax.tree.structure(shapes), results)
        gradients, carry = last_stage(LocalGradients(gradients, summed, sums["weight"], mesh), carry)
        return gradients, sums, carry

    return with_loss_of(grad_fn, exchanged)


def exchange(path: str, g: jax.Array, local: LocalGradients) -> jax.Array:
    """Sum a gradient `[device, …]` over axes, into the sharding in which the plan keeps it."""
    over = local.over(path)
    param = local_gradient(path, g.ndim - 1, over)
    before, after = P(over, *dims_spec(param.used)), dims_spec(param.kept)
    with in_scope(param.scope):
        return manual_over(local.mesh, split_axes(local.mesh), lambda g: param.reduce(g[0], over), before, after)(g)


def local_gradient(path: str, ndim: int, over: tuple[str, ...]) -> LocalParam:
    """Return the layout of a gradient that is whole over some axes, and is kept as the plan says after its sum."""
    whole = local_param(current().placements[path].of_stack(), ndim)
    used = tuple(tuple(axis for axis in dim if axis not in over) for dim in whole.kept)
    kept = tuple(own + more for own, more in zip(used, extra_axes(whole.kept, used), strict=True))
    return dataclasses.replace(whole, used=used, kept=kept)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The axes of size above 1 over which gradients are exchanged once a step; the reason, where none are possible."""

    axes: tuple[str, ...] = ()
    reason: str = ""


def choose_exchange(grad_fn: GradFn, plan: ShardingPlan, batch: Any, choice: str) -> Exchange:
    """Return the exchange of a choice: `none`, `data`, `data+fsdp`, or `auto`, which takes no memory.

    With `auto` the plan splits neither parameters nor gradients over the axes, and there are none if `exchange_once`
    refuses `grad_fn`, traced for a batch of abstract arrays.

    Raises:
        ConfigError: Axes are named, and a transform of the plan must see every microbatch.
    """
    seeing = observers(plan.transforms)
    if seeing and choice not in ("auto", "none"):
        what = f"is {choice}, and {seeing} must see every microbatch, also of other devices"
        raise ConfigError(_TITLE, [Problem("exchange_once", what, fix="--exchange-once auto")])
    axes = tuple(axis for axis in AXES if plan.mesh.shape[axis] > 1 and (choice == "auto" or axis in choice.split("+")))
    if choice == "auto":
        split = {a for leaf in (*plan.params, *plan.gradients) for entry in leaf.spec for a in entry_axes(entry)}
        axes = axes[: next((i for i, axis in enumerate(axes) if axis in split), None)]
        key = abstract_key()
        try:
            with use_plan(plan):
                if axes:
                    once = exchange_once(grad_fn, axes)
                    jax.eval_shape(once, plan.abstract_params, plan.abstract_carry, batch, key)
        except SpmdError as error:
            return Exchange((), f"{error.problems[0].where} {error.problems[0].what}")
    return Exchange(axes)
