"""PipeDream: a pipeline that never runs dry, whose gradients are one update behind their weights.

Between two batches 1F1B drains the pipeline and fills it again. Here the next batch begins while the last microbatches
of the one before are under way, so no stage is ever idle. They go on with the weights that they began with, which are
kept for them (weight stashing, Narayanan et al., PipeDream, SOSP 2019). Two versions of the weights are enough
(PipeDream-2BW, arXiv:2006.09503, section 3.1), and the update is that of its equation:

    W(t + 1) = W(t) − ν · ∇f(W(t − 1))

A step takes in batch *t* and gives the gradients and sums of batch *t* − 1; those of the first step are zero. What is
under way between steps is kept with the training state, among the variables.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.model_api.model import PRNG, Model, ModelInfo
from spmd.pipeline.executor import first_carry, run_ticks
from spmd.pipeline.grad_fn import shard_over_stages
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import IN_FLIGHT, TITLE, StageModel, partition, split_in_flight
from spmd.pipeline.tick_table import TickTable
from spmd.plan.context import use_plan
from spmd.plan.fsdp import grad_targets
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import batch_sharding


def pipedream(loss_fn: LossFn, table: TickTable) -> GradFn:
    """Gradients of the batch before, in a pipeline that is full when the step begins and when it ends.

    Args:
        loss_fn: As for `spmd.pipeline.grad_fn.pipeline`.
        table: Of a schedule without a flush.

    Raises:
        ConfigError: At trace time: as for `pipeline`; a plan whose model has nothing under way. A loss scale is a
            variable of the model here, and refused: it may change while a microbatch is under way.
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, flight = split_in_flight(variables)
        if flight is None:
            fix = "make the plan for with_in_flight(model, …)"
            raise ConfigError(TITLE, [Problem(IN_FLIGHT, "is not among the variables", fix=fix)])
        data = {"batch": batch, "key": jax.random.key_data(key)}

        def arrays(params: Any, data: Any) -> tuple[Any, Any, Any]:
            key = jax.random.wrap_key_data(data["key"], impl=PRNG)
            return partition(grad_targets(params), own, data["batch"], key, table.stages, 1, table.microbatches)

        now, before = arrays(params, data), arrays(flight["params"], flight["data"])
        local = functools.partial(_steady, loss_fn=loss_fn, table=table)
        flying = now[0], before[0], flight["stages"]
        d_layers, d_shared, sums, flying = shard_over_stages(
            local, (P(AXIS), P(), P(), P(AXIS)), flying, now[1:], before[1:]
        )
        merged = tree.flatten(tree.merge(d_layers, d_shared))
        after = {"params": params, "data": data, "stages": flying}
        return tree.map_with_path(lambda path, _: merged[path], params), sums, {**own, IN_FLIGHT: after}

    return grad_fn


def _steady(layers: Any, now: Any, before: Any, *, loss_fn: LossFn, table: TickTable) -> Any:
    """What one stage does in the ticks of one batch."""
    (layers, frozen), (layers_before, _), flying = layers
    (shared, others), (shared_before, _) = now[0], before[0]
    chunks, shared = jax.tree.map(lambda x, y: jnp.stack([x, y]), (layers, shared), (layers_before, shared_before))
    parts = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), now[1], before[1])
    model = StageModel(loss_fn, parts, layers, table.stages, (jax.tree.map(lambda w: w[None], frozen), others))
    carry = _resumed(first_carry(model, chunks, shared, table), flying)
    carry = run_ticks(model, chunks, shared, jnp.float32(1), table, carry)
    d_layers, d_shared, sums = jax.tree.map(lambda x: x[1], carry["totals"])
    return d_layers, *jax.lax.psum((d_shared, sums), AXIS), _kept(carry, table)


def _kept(carry: Any, table: TickTable) -> dict[str, Any]:
    """What of a carry the next batch begins with, each array with a dimension for the stages."""
    d_layers, d_shared, sums = jax.tree.map(lambda x: x[0], carry["totals"])
    # A microbatch's slot is its number, which becomes less by a batch, modulo the slots.
    inputs = jax.tree.map(lambda x: jnp.roll(x, -(table.microbatches % table.depth), axis=0), carry["inputs"])
    arrived, sent_back, d_shared, sums = jax.tree.map(
        lambda x: x[None], (carry["arrived"], carry["sent_back"], d_shared, sums)
    )
    streams = {"inputs": inputs, "arrived": arrived, "sent_back": sent_back}
    totals = {"of_layers": d_layers, "of_others": d_shared, "sums": sums}
    return {**{name: _as_dict(stream) for name, stream in streams.items()}, **totals}


def _resumed(carry: Any, kept: dict[str, Any]) -> Any:
    """The carry that begins with what `_kept` kept."""

    def stream(name: str) -> Any:
        leaves = [kept[name][str(number)] for number in range(len(kept[name]))]
        return jax.tree.unflatten(jax.tree.structure(carry[name]), leaves)

    arrived, sent_back, d_shared, sums = jax.tree.map(
        lambda x: x[0], (stream("arrived"), stream("sent_back"), kept["of_others"], kept["sums"])
    )
    totals = jax.tree.map(lambda x, y: x.at[1].set(y), carry["totals"], (kept["of_layers"], d_shared, sums))
    return {**carry, "inputs": stream("inputs"), "arrived": arrived, "sent_back": sent_back, "totals": totals}


def _as_dict(value: Any) -> dict[str, Any]:
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(value))}


def with_in_flight(model: Model, plan: ShardingPlan, loss_fn: LossFn, batch: Any, table: TickTable) -> Model:
    """The model with what is under way between steps among its variables.

    Args:
        model: The model.
        plan: Of the model as it is.
        loss_fn: As for `pipedream`.
        batch: Its arrays as `jax.ShapeDtypeStruct`s.
        table: As for `pipedream`.
    """

    def under_way(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        with use_plan(plan):
            arrays = partition(grad_targets(params), variables, batch, key, table.stages, 1, table.microbatches)
            (layers, frozen), (shared, others), parts = arrays
            some, frozen = jax.tree.map(lambda w: w[: w.shape[0] // table.stages], (layers, frozen))
            chunks, shared = jax.tree.map(lambda w: jnp.stack([w, w]), (some, shared))
            stages = StageModel(loss_fn, parts, some, table.stages, (jax.tree.map(lambda w: w[None], frozen), others))
            carry = first_carry(stages, chunks, shared, table)
        return _kept(carry, table)

    abstract = plan.abstract_params, plan.abstract_variables, batch
    local = jax.eval_shape(under_way, *abstract, jax.random.key(0, impl=PRNG))

    def stages() -> Any:
        return jax.tree.map(lambda x: jnp.zeros((table.stages * x.shape[0], *x.shape[1:]), x.dtype), local)

    def init_variables(key: jax.Array) -> Any:
        data = {"batch": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch), "key": jnp.zeros((2,), jnp.uint32)}
        flight = {"params": model.init(key), "data": data, "stages": stages()}
        return {**model.init_variables(key), IN_FLIGHT: flight}

    def forward(params: Any, variables: Any, *inputs: Any, train: bool) -> tuple[Any, Any]:
        own, flight = split_in_flight(variables)
        outputs, after = model.forward(params, own, *inputs, train=train)
        return outputs, {**after, IN_FLIGHT: flight}

    def info() -> ModelInfo:
        return dataclasses.replace(model.info(), placed={f"{IN_FLIGHT}/{path}": spec for path, spec in placed.items()})

    rows = batch_sharding(plan.mesh).spec
    placed = {f"data/{path}": rows if path != "key" else P() for path in ("key", *(f"batch/{name}" for name in batch))}
    for name in ("inputs", "arrived", "sent_back", "of_others", "sums"):
        for path in tree.flatten(local[name]):
            of_stage = _spec(plan, path) if name == "of_others" else rows if path == "0" else P()
            placed[f"stages/{name}/{path}"] = P(AXIS, *of_stage)
    return dataclasses.replace(model, init_variables=init_variables, forward=forward, info=info)


def _spec(plan: ShardingPlan, path: str) -> P:
    """How the plan keeps a gradient."""
    return next(leaf.spec for leaf in plan.gradients if leaf.path == path)
