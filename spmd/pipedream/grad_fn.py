"""PipeDream: a pipeline without a flush, with gradients one update behind their weights.

The next batch starts while the last microbatches of the batch before are in flight, so no stage is
idle. Those keep the weights with which they started (weight stashing, Narayanan et al., PipeDream,
SOSP 2019). Two versions of the weights suffice (PipeDream-2BW, arXiv:2006.09503, section 3.1), with
the update

    W(t + 1) = W(t) − ν · ∇f(W(t − 1))

A step takes batch *t* and returns the gradients and sums of batch *t* − 1; those of the first step
are zero. The state in flight between steps is part of the training state, as that of a transform.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, describe_value
from spmd.gradients.base import GradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.model_interface.grad_transform import Carry, GradTransform, StateArray
from spmd.model_interface.model import NO_PIPELINE, PRNG, abstract_key
from spmd.pipeline.executor import Carry as TickCarry
from spmd.pipeline.executor import first_carry, run_ticks
from spmd.pipeline.grad_fn import merge_like, shard_over_stages
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.layer_split import LayerSplit
from spmd.pipeline.partition import StageModel, Stream, in_parts, partition
from spmd.pipeline.shared_params import sum_over_stages
from spmd.pipeline.tick_table import TickTable
from spmd.pipeline.transfers import sum_of_stages
from spmd.plan.context import use_plan
from spmd.plan.fsdp import grad_targets
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import BATCH_SPEC
from spmd.sharding.optimizer_state import drop_axis, drop_gathered

_STREAMS = ("inputs", "arrived", "sent_back")


def pipedream(loss_fn: LossFn, table: TickTable) -> GradFn:
    """Return a gradient function of the previous batch; its pipeline stays full between steps.

    The plan must have the state `InFlight(loss_fn, table, …)` among its transforms, the table be of
    a schedule without a flush.
    """

    def grad_fn(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        states = carry.transforms
        if InFlight.name not in states:
            fix = "plan.with_transforms(InFlight.of(loss_fn, table, batch))"
            problem = Problem(InFlight.name, "is no transform of the plan", fix=fix)
            raise ConfigError(NO_PIPELINE, [problem])
        flight = states[InFlight.name]
        data = {"batch": batch, "key": jax.random.key_data(key)}
        loss, _ = in_parts(loss_fn)

        def arrays_of(
            params: Any, data: Any, ordered: Any
        ) -> tuple[LayerSplit, tuple[Any, Any, Any]]:
            key = jax.random.wrap_key_data(data["key"], impl=PRNG)
            given = grad_targets(params), carry.variables, data["batch"], ordered, key
            return _partition(loss_fn, table, *given)

        with loss.ordered(batch) as now, loss.ordered(flight["data"]["batch"]) as before:
            split, (layers, *others) = arrays_of(params, data, now)
            _, (layers_before, *others_before) = arrays_of(flight["params"], flight["data"], before)
            local = functools.partial(_run_batch, loss_fn=loss_fn, table=table, split=split)
            out_specs = P(AXIS), P(AXIS), P(), P(AXIS)
            staged = layers, layers_before, flight["stages"]
            d_layers, d_shared, sums, stages = shard_over_stages(
                local, out_specs, staged, tuple(others), tuple(others_before)
            )
        after = {"params": params, "data": data, "stages": stages}
        gradients = merge_like(params, d_layers, sum_over_stages(d_shared))
        return gradients, sums, carry.with_state(InFlight.name, after)

    return grad_fn


def _partition(
    loss_fn: LossFn,
    table: TickTable,
    params: Any,
    variables: Any,
    batch: Any,
    ordered: Any,
    key: Any,
) -> tuple[LayerSplit, tuple[Any, Any, Any]]:
    """Split arrays as `partition` does, with one chunk on each stage.

    Raises:
        ConfigError: Variables change in a step, and microbatches in flight would read those of
            another one; or layers do not divide.
    """
    loss, _ = in_parts(loss_fn)
    split, arrays, _ = partition(
        loss_fn,
        params,
        variables,
        batch,
        ordered,
        key,
        stages=table.stages,
        chunks=1,
        microbatches=table.microbatches,
    )
    (_, of_layers), (_, others), _ = arrays
    changing = tree.flatten(tree.merge(of_layers.changing, of_layers.statistics, others.changing))
    problems = []
    for path in sorted({*loss.model.info().step_variables, *changing}):
        what = "changes while microbatches are in flight"
        problems.append(Problem(path, what, fix="a schedule with a flush, such as 1f1b"))
    if problems:
        raise ConfigError(NO_PIPELINE, problems)
    if not split.is_even:
        what = "do not divide into stages, and weights of the batch before are stored by stages"
        detail = f"{split.layers} / (pipe={split.stages})"
        fix = f"a multiple of {split.stages}, or a schedule with a flush, such as 1f1b"
        raise ConfigError(NO_PIPELINE, [Problem("layers", what, detail, fix)])
    return split, arrays


def _run_batch(
    layers: Any, now: Any, before: Any, *, loss_fn: LossFn, table: TickTable, split: LayerSplit
) -> Any:
    """Run the ticks of one batch on one stage."""
    (layers, of_layers), (layers_before, _), saved = layers
    (shared, others), microbatches = now
    (shared_before, _), microbatches_before = before
    versions = (layers, shared), (layers_before, shared_before)
    chunks, shared = jax.tree.map(lambda x, y: jnp.stack([x, y]), *versions)  # [version, …]
    parts = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), microbatches, microbatches_before)
    of_layers = _with_dim(of_layers)  # [chunk, layer, …] of the only chunk
    model = StageModel(loss_fn, parts, layers, split, (of_layers, others))
    tasks, empty = first_carry(model, chunks, shared, table)
    carry = _restore_carry(empty, saved)
    carry = run_ticks(model, tasks, chunks, shared, jnp.float32(1), table, carry)
    totals = carry["totals"]
    d_layers, d_shared, sums = _at(1, totals)  # of the batch before
    d_shared = _with_dim(d_shared)
    sums = sum_of_stages(sums)
    after = _save_carry(carry, table)
    return d_layers, d_shared, sums, after


def _at(index: int, arrays: Any) -> Any:
    """Return one index of the first dimension of each array."""
    return jax.tree.map(lambda x: x[index], arrays)


def _with_dim(arrays: Any) -> Any:
    """Return arrays with one more dimension, the first."""
    return jax.tree.map(lambda x: x[None], arrays)


def _save_carry(carry: TickCarry, table: TickTable) -> dict[str, Any]:
    """Return the carry between steps as nested dictionaries, of arrays `[stage, …]`."""
    totals = carry["totals"]
    d_layers, d_shared, sums = _at(0, totals)
    # The slot of a microbatch is its number modulo the slots, and the next batch numbers it lower
    # by a batch.
    turn = -(table.microbatches % table.depth)
    inputs = jax.tree.map(lambda x: jnp.roll(x, turn, axis=0), carry["inputs"])
    own = dict[str, Any]()
    own["arrived"] = _numbered_leaves(carry["arrived"])
    own["sent_back"] = _numbered_leaves(carry["sent_back"])
    if d_shared:  # a state has no empty dictionaries
        own["of_others"] = d_shared
    own["sums"] = sums
    inputs = _numbered_leaves(inputs)
    return {"inputs": inputs, "of_layers": d_layers, **_with_dim(own)}


def _numbered_leaves(stream: Stream) -> dict[str, Any]:
    """Return the arrays of a stream by their numbers, as text."""
    numbered = dict[str, Any]()
    for number, leaf in enumerate(jax.tree.leaves(stream)):
        numbered[str(number)] = leaf
    return numbered


def _restore_carry(carry: TickCarry, saved: dict[str, Any]) -> TickCarry:
    """Fill an empty carry from the result of `_save_carry`."""
    per_stage = dict(saved)
    inputs = per_stage.pop("inputs")
    d_layers = per_stage.pop("of_layers")
    own = _at(0, per_stage)
    leaves = {**own, "inputs": inputs}
    restored = dict(carry)
    added = d_layers, own.get("of_others", {}), own["sums"]
    restored["totals"] = jax.tree.map(lambda x, y: x.at[1].set(y), carry["totals"], added)
    for name in _STREAMS:
        numbered = leaves[name]
        arrays = [numbered[str(number)] for number in range(len(numbered))]
        structure = jax.tree.structure(carry[name])
        restored[name] = jax.tree.unflatten(structure, arrays)
    return restored


@dataclasses.dataclass(frozen=True)
class InFlight(GradTransform):
    """The state between steps of `pipedream`: a batch, its weights, and streams of stages.

    Attributes:
        batch: Name of each array of a batch → its `jax.ShapeDtypeStruct`, as pairs.
    """

    name = "in_flight"
    overlapping_steps = True

    loss_fn: LossFn
    table: TickTable
    batch: tuple[tuple[str, jax.ShapeDtypeStruct], ...]

    @classmethod
    def of(cls, loss_fn: LossFn, table: TickTable, batch: Mapping[str, Any]) -> "InFlight":
        """Return the state for batches of these shapes, arrays or abstract ones.

        Raises:
            ConfigError: An entry of the batch is no array, such as one with a mark.
        """
        shapes = []
        for name, x in batch.items():
            if not hasattr(x, "shape"):
                fix = f'an array, and Rules(batch=[("{name}", spmd.whole("why"))]) if it is whole'
                problem = Problem(f"batch {name}", f"is {describe_value(x)}", fix=fix)
                raise ConfigError("A pipeline without a flush keeps arrays alone:", [problem])
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            shapes.append((name, shape))
        return cls(loss_fn, table, tuple(shapes))

    def parity_problems(self) -> list[Problem]:
        """Return a problem: gradients are of the batch before."""
        what = "has gradients that are one update late, unlike one device"
        fix = "a schedule with a flush, such as 1f1b, to check the layout"
        return [Problem("schedule pipedream", what, fix=fix)]

    def init(self, plan: ShardingPlan, key: jax.Array, params: Any) -> Any:
        """Return the state before the first step: nothing is in flight."""
        del key
        batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.batch}

        def of_all_stages(x: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((self.table.stages * x.shape[0], *x.shape[1:]), x.dtype)

        return {
            "params": params,
            "data": {"batch": batch, "key": jnp.zeros((2,), jnp.uint32)},
            "stages": jax.tree.map(of_all_stages, self._stages(plan)),
        }

    def state(self, plan: ShardingPlan) -> dict[str, StateArray]:
        """Return the state's arrays; none is split over `fsdp` unless parameters are."""
        params = {leaf.path: leaf.spec for leaf in plan.params}
        gradients = {leaf.path: drop_axis(leaf.spec, AXIS) for leaf in plan.gradients}
        init = functools.partial(self.init, plan)
        made = jax.eval_shape(init, abstract_key(), plan.abstract_params)
        state = dict[str, StateArray]()
        for path, x in tree.flatten(made).items():
            part, _, rest = path.partition("/")
            if part == "params":
                spec = params[rest]
            elif part == "data":
                spec = _data_spec(plan, rest, x)
            else:
                spec = _stage_spec(rest, gradients)
            if plan.zero < 3:
                spec = drop_gathered(spec, ("fsdp",))
            state[path] = StateArray(x.shape, x.dtype, spec)
        return state

    def _stages(self, plan: ShardingPlan) -> Any:
        """Return the abstract carry of one stage between steps."""
        loss_fn = self.loss_fn
        table = self.table
        loss, _ = in_parts(loss_fn)

        def empty_carry(params: Any, variables: Any, batch: Any, key: Any) -> Any:
            with use_plan(plan), loss.ordered(batch) as ordered:
                given = grad_targets(params), variables, batch, ordered, key
                split, arrays = _partition(loss_fn, table, *given)
                (layers, of_layers), (shared, others), parts = arrays
                layers, of_layers = jax.tree.map(
                    lambda w: w[: w.shape[0] // table.stages], (layers, of_layers)
                )
                chunks, shared = jax.tree.map(lambda w: jnp.stack([w, w]), (layers, shared))
                of_layers = _with_dim(of_layers)
                stage = StageModel(loss_fn, parts, layers, split, (of_layers, others))
                _, carry = first_carry(stage, chunks, shared, table)
                return _save_carry(carry, table)

        abstract = plan.abstract_params, plan.abstract_variables, dict(self.batch)
        return jax.eval_shape(empty_carry, *abstract, abstract_key())


def _data_spec(plan: ShardingPlan, path: str, x: jax.ShapeDtypeStruct) -> P:
    """Return the spec of the key or of an array of the batch in flight."""
    if path == "key":
        return P()
    name = path.removeprefix("batch/")
    return plan.rules.batch_table.spec(name, x.ndim)


def _stage_spec(path: str, gradients: Mapping[str, P]) -> P:
    """Return the spec of an array `[stage, …]`, given those of gradients by path."""
    name, _, leaf = path.partition("/")
    inner = P()
    if name == "of_others":
        inner = gradients[leaf]
    elif name in _STREAMS and leaf == "0":  # activations
        inner = BATCH_SPEC
    return P(AXIS, *inner)
