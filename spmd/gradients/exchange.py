"""Gradients that each device sums over the microbatches of a step, and that devices exchange once.

```
parameters, gathered over the axes ──▶ all microbatches, on this device's examples ──▶ this device's sums
                                        nothing is sent over the axes                   │  summed over devices, split
                                                                                        ▼  as the plan keeps gradients
```

The axes split the batch, from the outermost, so each microbatch has the same examples as without. Over other axes, such
as `tensor`, layers exchange gradients in each microbatch.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.layers.manual import dims_spec, extra_axes, psum, psum_scatter, spec_dims, split_axes
from spmd.model_api.model import PRNG
from spmd.model_api.precision import split_loss_scale
from spmd.plan.annotate import manual_over
from spmd.plan.context import constrain, current, use_plan
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.sharding.mesh import AnyMesh, entry_axes
from spmd.sharding.optimizer_state import drop_axis, shard_bytes

AXES = ("data", "fsdp")
"""The axes over which an exchange can wait for the end of a step."""

_TITLE = "Gradients cannot be exchanged once a step:"
_FIX = "exchange_once none"


def exchange_once(grad_fn: GradFn, axes: tuple[str, ...]) -> GradFn:
    """Return a gradient function that exchanges the gradients of `grad_fn` over mesh `axes` once.

    Each device calls `grad_fn`, such as `accumulate(…)` or `pipeline(…)`, on its part of the batch. Parameters that are
    split over the axes are gathered before, in the dtype in which they are stored, and stay gathered.

    Args:
        axes: `("data",)` or `("data", "fsdp")`. Nothing changes without them, or where their size is 1.

    Raises:
        ConfigError: At trace time: results are no sums over the examples, so they would differ.
    """
    if not set(axes) <= {*AXES}:
        raise ConfigError(_TITLE, [Problem("axes", f"are {axes}", fix='("data",) or ("data", "fsdp")')])

    def exchanged(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        mesh, placements = current().mesh, current().placements
        over = () if mesh is None else tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if mesh is None or not over:
            return grad_fn(params, variables, batch, key)
        problems = [
            Problem(path, "is a variable that the model changes by itself, from the whole batch", fix=_FIX)
            for path in tree.flatten(split_loss_scale(variables)[0])
            if path not in placements
        ]
        problems += [Problem(path, "is in host memory", fix=_FIX) for path in placements if placements[path].on_host]
        if problems:
            raise ConfigError(_TITLE, problems)
        others = tuple(axis for axis in mesh.axis_names if axis not in over)
        stages = split_axes(mesh)[: mesh.shape["pipe"] > 1]  # XLA refuses a manual region over an axis left of these

        def spec(path: str, x: Any, axes: tuple[str, ...]) -> P:
            stored = placements[path].of_stack().stored if path in placements else P()
            return dims_spec(spec_dims(stored, x.ndim, axes))

        def local(*arrays: Any) -> tuple[Any, Sums]:
            gradients, sums, _ = grad_fn(*arrays)
            return jax.tree.map(lambda g: g[None], gradients), jax.tree.map(lambda x: psum(x, over), sums)

        given = params, variables
        given = tuple(
            tree.map_with_path(lambda path, x: constrain(x, mesh, spec(path, x, others), path), part) for part in given
        )
        specs = tuple(tree.map_with_path(lambda path, x: spec(path, x, stages), part) for part in given)
        sums_of = tree.map_with_path(lambda path, x: P(over, *spec(path, x, stages)), params)
        run = manual_over(mesh, (*stages, *over), local, (*specs, P(over), P()), (sums_of, P()))
        gradients, sums = _without_key(run)(*given, batch, key)
        return tree.map_with_path(lambda path, g: _exchange(path, g, mesh, over), gradients), sums, variables

    return exchanged


def _exchange(path: str, g: jax.Array, mesh: AnyMesh, over: tuple[str, ...]) -> jax.Array:
    """Sum a gradient `[device, …]` over axes, into the sharding in which the plan keeps it."""
    split = split_axes(mesh)
    wanted = spec_dims(current().placements[path].of_stack().gradient, g.ndim - 1, split)
    kept = [tuple(axis for axis in dim if axis not in over) for dim in wanted]
    scatters = extra_axes(wanted, kept)
    rest = tuple(axis for axis in over if not any(axis in dim for dim in scatters))
    after = dims_spec([(*own, *more) for own, more in zip(kept, scatters, strict=True)])

    def local(g: jax.Array) -> jax.Array:
        return psum(psum_scatter(g[0], scatters), rest)

    return manual_over(mesh, split, local, P(over, *dims_spec(kept)), after)(g)


def _without_key(run: Any) -> Any:
    """Return a function of arrays, the last a random key, that refuses to use the key: devices would draw the same."""

    def checked(*arrays: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*arrays)
        if dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals))[1][-1]:
            what = "is used, and every device would draw the same numbers for other examples"
            raise ConfigError(_TITLE, [Problem("key", what, fix=_FIX)])
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arrays)))

    return checked


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The axes of size above 1 over which gradients are exchanged once a step; the reason, where none are possible."""

    axes: tuple[str, ...] = ()
    reason: str = ""


def choose_exchange(grad_fn: GradFn, plan: ShardingPlan, batch: Any, choice: str) -> Exchange:
    """Return the exchange of a choice: `none`, `data`, `data+fsdp`, or `auto`, which takes no memory.

    With `auto` the plan splits neither parameters nor gradients over the axes, and there are none if `exchange_once`
    refuses `grad_fn`, traced for a batch of abstract arrays.
    """
    axes = () if choice == "none" else tuple(choice.split("+"))
    if choice == "auto":
        split = {a for leaf in (*plan.params, *plan.gradients) for entry in leaf.spec for a in entry_axes(entry)}
        axes = tuple(itertools.takewhile(lambda axis: plan.mesh.shape[axis] == 1 or axis not in split, AXES))
    over = tuple(axis for axis in axes if plan.mesh.shape[axis] > 1)
    if choice == "auto" and over:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=PRNG))
        try:
            with use_plan(plan):
                jax.eval_shape(exchange_once(grad_fn, over), plan.abstract_params, plan.abstract_variables, batch, key)
        except SpmdError as error:
            return Exchange((), f"{error.problems[0].where} {error.problems[0].what}")
    return Exchange(over)


def exchange_bytes(plan: ShardingPlan, axes: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the bytes of an exchange over axes of size above 1: gradients sent, parameters gathered, both held.

    Those on the wire count as in `spmd.analysis.collective_record`; held ones are beyond what the plan holds.
    """

    def whole(leaf: PlanEntry, dtype: str) -> int:
        return shard_bytes(leaf.shape, dtype, functools.reduce(drop_axis, axes, leaf.spec), plan.mesh.shape)

    sent = gathered = held = 0
    for leaf in plan.gradients:
        own = shard_bytes(leaf.shape, plan.precision.accumulation, leaf.spec, plan.mesh.shape)
        local = whole(leaf, plan.precision.accumulation)
        is_whole = not {axis for entry in leaf.spec for axis in entry_axes(entry)}.issuperset(axes)
        sent += local * (local > own) + 2 * own * is_whole
        held += local - own
    for leaf in (*plan.params, *plan.variables):
        if (size := whole(leaf, leaf.dtype)) > leaf.bytes_per_device:
            gathered += size
            held += size if leaf in plan.variables else whole(leaf, plan.precision.gradients)
    return sent, gathered, held
