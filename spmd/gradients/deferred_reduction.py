"""Exchange of gradients once a step, after each device has summed them over its microbatches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.gradients.base import GradFn, LossGradFn, with_loss_of
from spmd.gradients.losses import VALUES, Sums
from spmd.gradients.variable_changes import may_change, read_changes
from spmd.jaxpr.dependence import needed_inputs
from spmd.model_interface.grad_transform import Carry, observers
from spmd.model_interface.model import abstract_key
from spmd.plan.context import constrain, current, use_plan
from spmd.plan.manual import psum, shard_map_over, split_axes
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import ParamPlacement
from spmd.plan.scopes import comm_scope, in_scope
from spmd.plan.sharded_param import ShardedParam, sharded_param
from spmd.sharding.dims import Dims, dims_spec, extra_axes, spec_dims
from spmd.sharding.layer_paths import is_staged, own_stacks
from spmd.sharding.mesh import AnyMesh, spec_axes

DEFERRABLE_AXES = ("data", "fsdp")
"""The axes over which an exchange can wait for the end of a step."""

_TITLE = "Gradients cannot be exchanged once a step:"
_FIX = 'defer_grad_reduction="none"'


@dataclasses.dataclass(frozen=True)
class LocalGradients:
    """Gradients summed on each device over its own examples, and the axes of their exchange.

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
    gradients = tree.map_with_path(lambda path, g: reduce_local(path, g, local), local.gradients)
    return gradients, carry


def defer_grad_reduction(
    grad_fn: GradFn,
    axes: tuple[str, ...],
    last_stage: LastStage = sum_exchange,
    *,
    own: str = "",
    additive: bool = False,
) -> GradFn:
    """Exchange the gradients of a gradient function over mesh `axes` once a step.

    Each device calls `grad_fn`, such as `accumulate(…)` or `pipeline(…)`, on its part of the batch.
    Parameters that are split over the axes are gathered before, in the dtype in which they are
    stored, and stay gathered.

    Args:
        axes: `("data",)` or `("data", "fsdp")`. Nothing changes without them, or where their size
            is 1.
        last_stage: The exchange itself.
        own: Name of the transform whose state belongs to `last_stage`; it is hidden from `grad_fn`.
        additive: Whether a gradient function that is not made from a loss function is declared to
            return sums over the examples. `value_and_grad` and pipelines read it from the loss.

    Raises:
        ConfigError: At trace time: results are no sums over the examples, so they would differ.
    """
    if not set(axes) <= set(DEFERRABLE_AXES):
        problem = Problem("axes", f"are {axes}", fix='("data",) or ("data", "fsdp")')
        raise ConfigError(_TITLE, [problem])

    def exchanged(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        mesh = current().mesh
        if mesh is None:
            return grad_fn(params, carry, batch, key)
        over = _axes_above_one(mesh, axes)
        if not over:
            return grad_fn(params, carry, batch, key)
        inner = carry.without(own)
        problems = [
            *_variable_problems(grad_fn, params, inner.variables, batch, key),
            *_problems(grad_fn, over, additive),
        ]
        if problems:
            raise ConfigError(_TITLE, problems)
        region = _Region(mesh, current().placements, over, _stage_axes(mesh))
        arguments = (params, inner.variables, inner.transforms, batch, key)
        gradients, sums = region.run(grad_fn, *arguments)
        local = LocalGradients(gradients, region.summed_axes, sums["weight"], mesh)
        gradients, carry = last_stage(local, carry)
        return gradients, sums, carry

    return with_loss_of(grad_fn, exchanged)


def _axes_above_one(mesh: AnyMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of a size above 1."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _stage_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return `("pipe",)` in a pipeline.

    XLA refuses a manual region over some axes if an axis to the left of them is not manual.
    """
    if mesh.shape["pipe"] == 1:
        return ()
    return split_axes(mesh)[:1]


def _variable_problems(
    grad_fn: GradFn, params: Any, variables: Any, batch: Any, key: jax.Array
) -> Iterator[Problem]:
    """Yield a problem for each variable changed by the forward pass, surely or possibly."""
    if not isinstance(grad_fn, LossGradFn):
        for path in tree.flatten(variables):
            if path not in current().placements:
                what = "is a variable, and grad_fn does not tell whether it changes"
                yield Problem(path, what, fix=f"spmd.value_and_grad(loss_fn), or {_FIX}")
        return
    loss_fn = grad_fn.loss.loss_fn
    if not may_change(loss_fn, variables):
        return
    changes = read_changes(loss_fn, params, variables, batch, key)
    for path in changes.by_itself:
        what = "is a variable that changes by itself, and every device would draw the same numbers"
        yield Problem(path, what, fix=_FIX)
    for path in changes.by_examples:
        what = "is a variable that the examples change, and each device would have its own"
        yield Problem(path, what, fix=_FIX)


def _problems(grad_fn: GradFn, over: tuple[str, ...], additive: bool) -> Iterator[Problem]:
    """Yield the reasons against an exchange once a step."""
    context = current()
    placements = context.placements
    seeing = observers(context.transforms)
    if seeing:
        yield Problem(seeing, "must see every microbatch, also of other devices", fix=_FIX)
    if "fsdp" in over:
        yield from _codec_problems(placements)
    for path, placement in placements.items():
        if placement.on_host:
            yield Problem(path, "is in host memory", fix=_FIX)
    yield from _stage_problems(placements, over)
    if not additive and not isinstance(grad_fn, LossGradFn):
        yield Problem(
            "grad_fn",
            "is not made from a loss function, so it is not known whether it sums over the "
            "examples",
            fix="spmd.value_and_grad(loss_fn), or defer_grad_reduction(…, additive=True)",
        )


def _stage_problems(
    placements: Mapping[str, ParamPlacement], over: tuple[str, ...]
) -> Iterator[Problem]:
    """Yield a problem for uneven stages whose parameters the region would split in another order.

    A region that is manual over `pipe`, and not over the axes before it in a dimension, takes
    blocks of `pipe` that are split over those axes, and not the blocks as stored.
    """
    known = set[tuple[str, ...]]()
    for path, placement in placements.items():
        beside = _axes_beside_stages(placement, over)
        if not beside or beside in known:
            continue
        known.add(beside)
        axes = "+".join(beside)
        what = f"is stored over {axes} and pipe, as stages have unequal numbers of layers"
        fix = "a number of layers that pipe divides"
        if {*beside} <= {*DEFERRABLE_AXES}:
            fix = f"{fix}, or an exchange over {axes} too"
        yield Problem(path, what, fix=f"{fix}, or one in each microbatch ({_FIX})")


def _axes_beside_stages(placement: ParamPlacement, over: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes, but those of the exchange, that split a dimension beside uneven stages."""
    dim = placement.over_stages
    if dim is None:
        return ()
    beside = dict[str, None]()
    for spec in (placement.param_spec, placement.grad_spec):
        own = spec_dims(spec, dim + 1, split_axes(placement.mesh))[dim]
        beside |= dict.fromkeys(axis for axis in own if axis not in over)
    return tuple(beside)


def _codec_problems(placements: Mapping[str, ParamPlacement]) -> Iterator[Problem]:
    """Yield a problem for each codec of gathers: an exchange gathers parameters as stored."""
    codecs = {placement.comm.param_codec for placement in placements.values()}
    for codec in codecs - {""}:
        yield Problem(
            "compress.gather",
            f"is {codec}, and an exchange over fsdp gathers once",
            fix='defer_grad_reduction="data", or compress.gather=""',
        )


@dataclasses.dataclass(frozen=True)
class _Region:
    """The manual region of a step, where each device sums the gradients of its own examples.

    Attributes:
        placements: Parameter path → its placement.
        over: The axes of the exchange.
        stages: `("pipe",)` in a pipeline; the region is manual over it, too.
    """

    mesh: AnyMesh
    placements: Mapping[str, ParamPlacement]
    over: tuple[str, ...]
    stages: tuple[str, ...]

    def run(
        self, grad_fn: GradFn, params: Any, variables: Any, states: Any, batch: Any, key: jax.Array
    ) -> tuple[Any, Sums]:
        """Return gradients `[device, …]`, and the sums of all devices.

        Raises:
            ConfigError: The loss draws random numbers, or returns `values`.
        """
        stored = params, variables, states
        in_specs = (
            *self.specs(stored, self.stages),
            self.batch_specs(batch),
            P(),
        )
        out_specs = self.gradient_specs(params), P()
        local = functools.partial(_local_sums, grad_fn=grad_fn, over=self.over)
        whole = self.gather(stored)
        region = shard_map_over(self.mesh, (*self.stages, *self.over), local, in_specs, out_specs)
        return _call_without_draws(region, (*whole, batch, key))

    def gather(self, stored: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather trees of arrays over the axes of the exchange."""
        others = tuple(axis for axis in self.mesh.axis_names if axis not in self.over)
        specs = self.specs(stored, others)
        with in_scope(comm_scope("parameters, gathered once a step")):
            return jax.tree.map(
                lambda x, spec: constrain(x, self.mesh, spec, "a parameter"), stored, specs
            )

    def summed_axes(self, path: str) -> tuple[str, ...]:
        """Return the axes to sum a gradient over.

        `pipe` is one of them for a parameter that all stages of a pipeline use.
        """
        is_staged = path not in self.placements or self.placements[path].is_staged
        if is_staged:
            return self.over
        return (*self.stages, *self.over)

    def specs(self, trees: tuple[Any, ...], axes: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the spec of each array of some trees, restricted to some axes."""

        def spec(path: str, x: Any) -> P:
            return dims_spec(self._dims(path, x, axes))

        return tuple(tree.map_with_path(spec, each) for each in trees)

    def gradient_specs(self, params: Any) -> Any:
        """Return the spec of each local gradient, `[device, …]`."""

        def spec(path: str, x: Any) -> P:
            dims = self._dims(path, x, self.stages)
            return P(self.summed_axes(path), *dims_spec(dims))

        return tree.map_with_path(spec, params)

    def batch_specs(self, batch: Any) -> Any:
        """Return the spec of each array of the batch, restricted to the axes of the exchange."""
        arrays = current().batch.arrays(batch)

        def spec(path: str, x: Any) -> P:
            return dims_spec(spec_dims(arrays[path].compute_spec, x.ndim, self.over))

        return tree.map_with_path(spec, batch)

    def _dims(self, path: str, x: Any, axes: tuple[str, ...]) -> Dims:
        """Return the axes of each dimension, without the axes of the gradient's sum."""
        if path in self.placements:
            stored = self.placements[path].of_stack().param_spec
        else:
            stored = _variable_spec(path, x, self.mesh)
        summed = self.summed_axes(path)
        kept = tuple(axis for axis in axes if axis not in summed)
        return spec_dims(stored, x.ndim, kept)


def _variable_spec(path: str, x: Any, mesh: AnyMesh) -> P:
    """Return the spec of a variable; stages have their own layers of one with a layer dimension.

    The state of a transform is whole.
    """
    context = current()
    if path not in context.variables:
        return P()
    stored = context.variables[path]
    stacks = own_stacks(path, context.stacks)
    if not is_staged(stacks) or not stacks[0].is_even or not x.ndim:
        return stored
    axis = stacks[0].axis
    if x.shape[0] % mesh.shape[axis]:
        return stored
    return P(axis, *stored[1:])


def _local_sums(
    params: Any,
    variables: Any,
    states: Any,
    batch: Any,
    key: jax.Array,
    *,
    grad_fn: GradFn,
    over: tuple[str, ...],
) -> tuple[Any, Sums]:
    """Return the gradients of a device, `[1, …]`, and the sums of all devices."""
    gradients, sums, _ = grad_fn(params, Carry(variables, states), batch, key)
    if VALUES in sums:
        problem = Problem(
            ", ".join(sums[VALUES]),
            "are reported as they are, and each device has its own",
            fix=f"sums in their place; or {_FIX}",
        )
        raise ConfigError(_TITLE, [problem])
    with in_scope(comm_scope("gradients, exchanged once a step")):
        sums = jax.tree.map(lambda x: psum(x, over), sums)
    return jax.tree.map(lambda g: g[None], gradients), sums


def _call_without_draws(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function of `(params, variables, states, batch, key)` without random draws.

    It is traced once.

    Raises:
        ConfigError: The key is used, or a variable that may be one.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    params, variables, *_ = arguments
    needed = needed_inputs(jaxpr)
    of_variables = needed[len(jax.tree.leaves(params)) :]
    used = []
    for (path, x), is_needed in zip(tree.flatten(variables).items(), of_variables, strict=False):
        if is_needed and _may_be_a_key(path, x):
            used.append(path)
    if needed[-1]:
        used.append("key")
    if used:
        what = "is used, and every device would draw the same numbers for other examples"
        raise ConfigError(_TITLE, [Problem(path, what, fix=_FIX) for path in used])
    results = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _may_be_a_key(path: str, x: Any) -> bool:
    """Return whether a variable has the dtype of random keys, and is no frozen parameter."""
    return path not in current().placements and x.dtype == jnp.uint32


def reduce_local(path: str, g: jax.Array, local: LocalGradients, scope: str = "") -> jax.Array:
    """Sum a gradient `[device, …]` over devices, into its planned sharding.

    Args:
        scope: Name scope of the collectives, by default the parameter's.
    """
    over = local.over(path)
    param = local_gradient(path, g.ndim - 1, over)
    before = P(over, *dims_spec(param.compute_dims))
    after = dims_spec(param.grad_dims)

    def reduce(g: jax.Array) -> jax.Array:
        return param.reduce(g[0], over)  # [1, …] on a device

    with in_scope(scope or param.scope):
        return shard_map_over(local.mesh, split_axes(local.mesh), reduce, before, after)(g)


def local_gradient(path: str, ndim: int, over: tuple[str, ...]) -> ShardedParam:
    """Return the layout of a gradient: whole over some axes, then summed and kept as planned."""
    whole = sharded_param(current().placements[path].of_stack(), ndim)
    used = extra_axes(whole.grad_dims, [over] * len(whole.grad_dims))
    scattered = extra_axes(whole.grad_dims, used)
    kept = tuple(axes + more for axes, more in zip(used, scattered, strict=True))
    return dataclasses.replace(whole, compute_dims=used, grad_dims=kept)


@dataclasses.dataclass(frozen=True)
class DeferredReduction:
    """The axes of an exchange once a step, of sizes above 1, and the reason for a refusal."""

    axes: tuple[str, ...] = ()
    reason: str = ""


def choose_deferred_reduction(
    grad_fn: GradFn, plan: ShardingPlan, batch: Any, choice: str
) -> DeferredReduction:
    """Return the exchange of a choice: `none`, `data`, `data+fsdp`, or `auto`.

    `auto` chooses axes over which the plan splits neither parameters nor gradients, so that no
    memory is added; there are none if `defer_grad_reduction` refuses `grad_fn`, traced for a batch
    of abstract arrays.

    Raises:
        ConfigError: Axes are named, and a transform of the plan must see every microbatch.
    """
    seeing = observers(plan.transforms)
    if seeing and choice not in ("auto", "none"):
        what = f"is {choice}, and {seeing} must see every microbatch, also of other devices"
        raise ConfigError(
            _TITLE, [Problem("defer_grad_reduction", what, fix='defer_grad_reduction="auto"')]
        )
    if choice == "auto":
        return _automatic_exchange(grad_fn, plan, batch)
    named = [axis for axis in DEFERRABLE_AXES if axis in choice.split("+")]
    return DeferredReduction(_axes_above_one(plan.mesh, named))


def _automatic_exchange(grad_fn: GradFn, plan: ShardingPlan, batch: Any) -> DeferredReduction:
    """Return the exchange over the axes of `_unsplit_axes`, or without axes if it is refused.

    Over these axes it adds no memory.
    """
    axes = _unsplit_axes(plan)
    if not axes:
        return DeferredReduction()
    once = defer_grad_reduction(grad_fn, axes)
    key = abstract_key()
    try:
        with use_plan(plan):
            jax.eval_shape(once, plan.abstract_params, plan.abstract_carry, batch, key)
    except SpmdError as error:
        first = error.problems[0]
        return DeferredReduction((), f"{first.where} {first.what}")
    return DeferredReduction(axes)


def _unsplit_axes(plan: ShardingPlan) -> tuple[str, ...]:
    """Return the leading axes of `DEFERRABLE_AXES` without a split of parameters or gradients."""
    split = set[str]()
    for leaf in (*plan.params, *plan.gradients):
        split.update(spec_axes(leaf.spec))
    axes = _axes_above_one(plan.mesh, DEFERRABLE_AXES)
    for number, axis in enumerate(axes):
        if axis in split:
            return axes[:number]
    return axes
