"""PipeDream: a pipeline without a flush, whose gradients are one update behind their weights.

The next batch starts while the last microbatches of the batch before are in flight, so no stage is idle. Those keep the
weights with which they started (weight stashing, Narayanan et al., PipeDream, SOSP 2019). Two versions of the weights
suffice (PipeDream-2BW, arXiv:2006.09503, section 3.1), with the update

    W(t + 1) = W(t) − ν · ∇f(W(t − 1))

A step takes batch *t* and returns the gradients and sums of batch *t* − 1; those of the first step are zero. The state
in flight between steps is part of the training state, among the variables.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.model_api.model import PRNG, Model, abstract_key
from spmd.model_api.variables import split_variables, with_variables
from spmd.pipeline.executor import Carry, first_carry, run_ticks
from spmd.pipeline.grad_fn import merge_like, shard_over_stages, sum_of_stages
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import IN_FLIGHT, TITLE, StageModel, Stream, partition
from spmd.pipeline.shared_params import sum_over_stages
from spmd.pipeline.tick_table import TickTable
from spmd.plan.context import use_plan
from spmd.plan.fsdp import grad_targets
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import BATCH_SPEC
from spmd.sharding.optimizer_state import drop_axis, drop_fsdp

_STREAMS = ("inputs", "arrived", "sent_back")


def pipedream(loss_fn: LossFn, table: TickTable) -> GradFn:
    """Return a gradient function of the batch before, whose pipeline stays full between steps.

    The model must be from `with_in_flight`, the table of a schedule without a flush. A loss scale is refused as a
    variable of the model, since it may change while a microbatch is in flight.
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, states = split_variables(variables, IN_FLIGHT)
        if not states:
            fix = "make the plan for with_in_flight(model, …)"
            raise ConfigError(TITLE, [Problem(IN_FLIGHT, "is not among the variables", fix=fix)])
        flight, data = states[IN_FLIGHT], {"batch": batch, "key": jax.random.key_data(key)}

        def arrays(params: Any, data: Any) -> tuple[Any, Any, Any]:
            key = jax.random.wrap_key_data(data["key"], impl=PRNG)
            counts = table.stages, 1, table.microbatches
            return partition(loss_fn, grad_targets(params), own, data["batch"], key, *counts)

        now, before = arrays(params, data), arrays(flight["params"], flight["data"])
        local = functools.partial(_run_batch, loss_fn=loss_fn, table=table)
        out_specs = P(AXIS), P(AXIS), P(), P(AXIS)
        layers = now[0], before[0], flight["stages"]
        d_layers, d_shared, sums, stages = shard_over_stages(local, out_specs, layers, now[1:], before[1:])
        after = {"params": params, "data": data, "stages": stages}
        return merge_like(params, d_layers, sum_over_stages(d_shared)), sums, {**own, IN_FLIGHT: after}

    return grad_fn


def _run_batch(layers: Any, now: Any, before: Any, *, loss_fn: LossFn, table: TickTable) -> Any:
    """Run the ticks of one batch on one stage."""
    (layers, frozen), (layers_before, _), saved = layers
    (shared, others), (shared_before, _) = now[0], before[0]
    chunks, shared = jax.tree.map(lambda x, y: jnp.stack([x, y]), (layers, shared), (layers_before, shared_before))
    parts = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), now[1], before[1])
    model = StageModel(loss_fn, parts, layers, table.stages, (jax.tree.map(lambda w: w[None], frozen), others))
    carry = _restore_carry(first_carry(model, chunks, shared, table), saved)
    carry = run_ticks(model, chunks, shared, jnp.float32(1), table, carry)
    d_layers, d_shared, sums = jax.tree.map(lambda x: x[1], carry["totals"])
    d_shared = jax.tree.map(lambda x: x[None], d_shared)
    return d_layers, d_shared, sum_of_stages(sums), _save_carry(carry, table)


def _save_carry(carry: Carry, table: TickTable) -> dict[str, Any]:
    """Return the carry between steps as nested dictionaries, each array with a leading dimension for stages."""
    d_layers, d_shared, sums = jax.tree.map(lambda x: x[0], carry["totals"])
    # The slot of a microbatch is its number modulo the slots, and the next batch numbers it lower by a batch.
    inputs = jax.tree.map(lambda x: jnp.roll(x, -(table.microbatches % table.depth), axis=0), carry["inputs"])

    def leaves(stream: Stream) -> dict[str, Any]:
        return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(stream))}

    streams = {name: leaves(carry[name]) for name in ("arrived", "sent_back")}
    per_stage = jax.tree.map(lambda x: x[None], {**streams, "of_others": d_shared, "sums": sums})
    return {"inputs": leaves(inputs), "of_layers": d_layers, **per_stage}


def _restore_carry(carry: Carry, saved: dict[str, Any]) -> Carry:
    """Return an empty carry with what `_save_carry` saved."""
    first = jax.tree.map(lambda x: x[0], {name: saved[name] for name in saved if name not in ("inputs", "of_layers")})
    leaves = {**first, "inputs": saved["inputs"]}

    def stream(name: str) -> Stream:
        arrays = [leaves[name][str(number)] for number in range(len(leaves[name]))]
        return jax.tree.unflatten(jax.tree.structure(carry[name]), arrays)

    added = saved["of_layers"], first["of_others"], first["sums"]
    totals = jax.tree.map(lambda x, y: x.at[1].set(y), carry["totals"], added)
    return {**carry, **{name: stream(name) for name in _STREAMS}, "totals": totals}


def with_in_flight(model: Model, plan: ShardingPlan, loss_fn: LossFn, batch: Any, table: TickTable) -> Model:
    """Return the model with the state in flight among its variables.

    `plan` is that of the model without this state, `batch` the arrays of a batch as `jax.ShapeDtypeStruct`s.
    """

    def empty_carry(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        with use_plan(plan):
            counts = table.stages, 1, table.microbatches
            arrays = partition(loss_fn, grad_targets(params), variables, batch, key, *counts)
            (layers, frozen), (shared, others), parts = arrays
            layers, frozen = jax.tree.map(lambda w: w[: w.shape[0] // table.stages], (layers, frozen))
            chunks, shared = jax.tree.map(lambda w: jnp.stack([w, w]), (layers, shared))
            stage = StageModel(loss_fn, parts, layers, table.stages, (jax.tree.map(lambda w: w[None], frozen), others))
            return _save_carry(first_carry(stage, chunks, shared, table), table)

    abstract = plan.abstract_params, plan.abstract_variables, batch
    local = jax.eval_shape(empty_carry, *abstract, abstract_key())

    def init(key: jax.Array) -> Any:
        data = {"batch": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch), "key": jnp.zeros((2,), jnp.uint32)}
        stages = jax.tree.map(lambda x: jnp.zeros((table.stages * x.shape[0], *x.shape[1:]), x.dtype), local)
        return {"params": model.init(key), "data": data, "stages": stages}

    batch_table = plan.rules.batch_table
    gradients = {leaf.path: drop_axis(leaf.spec, AXIS) for leaf in plan.gradients}
    placed = {"data/key": P(), **{f"data/batch/{name}": batch_table.spec(name, x.ndim) for name, x in batch.items()}}
    for name in (*_STREAMS, "of_others", "sums"):
        for path in tree.flatten(local[name]):
            is_x = name in _STREAMS and path == "0"
            spec = gradients[path] if name == "of_others" else BATCH_SPEC if is_x else P()
            placed[f"stages/{name}/{path}"] = P(AXIS, *spec)
    if plan.zero < 3:  # then no state is split over fsdp by its parameters' rules
        placed = {path: drop_fsdp(spec) for path, spec in placed.items()}
    return with_variables(model, IN_FLIGHT, init, placed=placed)
