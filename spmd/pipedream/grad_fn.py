"""PipeDream: a pipeline without a flush, whose gradients are one update behind their weights.

The next batch starts while the last microbatches of the batch before are in flight, so no stage is idle. Those keep the
weights with which they started (weight stashing, Narayanan et al., PipeDream, SOSP 2019). Two versions of the weights
suffice (PipeDream-2BW, arXiv:2006.09503, section 3.1), with the update

    W(t + 1) = W(t) − ν · ∇f(W(t − 1))

A step takes batch *t* and returns the gradients and sums of batch *t* − 1; those of the first step are zero. The state
in flight between steps is part of the training state, as that of a transform.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.model_api.grad_transform import Carry, GradTransform, StateArray
from spmd.model_api.model import PRNG, abstract_key
from spmd.pipeline.executor import Carry as TickCarry
from spmd.pipeline.executor import first_carry, run_ticks
from spmd.pipeline.grad_fn import merge_like, shard_over_stages, sum_of_stages
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import TITLE, StageModel, Stream, partition
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

    The plan must have the state `InFlight(loss_fn, table, …)` among its transforms, the table be of a schedule without
    a flush.
    """

    def grad_fn(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        if InFlight.name not in carry.transforms:
            fix = "plan.with_transforms(InFlight.of(loss_fn, table, batch))"
            raise ConfigError(TITLE, [Problem(InFlight.name, "is no transform of the plan", fix=fix)])
        own, flight = carry.variables, carry.transforms[InFlight.name]
        data = {"batch": batch, "key": jax.random.key_data(key)}

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
        gradients = merge_like(params, d_layers, sum_over_stages(d_shared))
        return gradients, sums, carry.with_state(InFlight.name, after)

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


def _save_carry(carry: TickCarry, table: TickTable) -> dict[str, Any]:
    """Return the carry between steps as nested dictionaries, each array with a leading dimension for stages."""
    d_layers, d_shared, sums = jax.tree.map(lambda x: x[0], carry["totals"])
    # The slot of a microbatch is its number modulo the slots, and the next batch numbers it lower by a batch.
    inputs = jax.tree.map(lambda x: jnp.roll(x, -(table.microbatches % table.depth), axis=0), carry["inputs"])

    def leaves(stream: Stream) -> dict[str, Any]:
        return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(stream))}

    streams = {name: leaves(carry[name]) for name in ("arrived", "sent_back")}
    of_others = {"of_others": d_shared} if d_shared else {}  # a state has no empty dictionaries
    per_stage = jax.tree.map(lambda x: x[None], {**streams, **of_others, "sums": sums})
    return {"inputs": leaves(inputs), "of_layers": d_layers, **per_stage}


def _restore_carry(carry: TickCarry, saved: dict[str, Any]) -> TickCarry:
    """Return an empty carry with what `_save_carry` saved."""
    first = jax.tree.map(lambda x: x[0], {name: saved[name] for name in saved if name not in ("inputs", "of_layers")})
    leaves = {**first, "inputs": saved["inputs"]}

    def stream(name: str) -> Stream:
        arrays = [leaves[name][str(number)] for number in range(len(leaves[name]))]
        return jax.tree.unflatten(jax.tree.structure(carry[name]), arrays)

    added = saved["of_layers"], first.get("of_others", {}), first["sums"]
    totals = jax.tree.map(lambda x, y: x.at[1].set(y), carry["totals"], added)
    return {**carry, **{name: stream(name) for name in _STREAMS}, "totals": totals}


@dataclasses.dataclass(frozen=True)
class InFlight(GradTransform):
    """What is in flight between the steps of `pipedream`: a batch, the weights it started with, and streams of stages.

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
        """Return the state for batches of these shapes, arrays or abstract ones."""
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
        return cls(loss_fn, table, tuple(shapes.items()))

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
        made = tree.flatten(jax.eval_shape(functools.partial(self.init, plan), abstract_key(), plan.abstract_params))
        state = dict[str, StateArray]()
        for path, x in made.items():
            part, _, rest = path.partition("/")
            if part == "params":
                spec = params[rest]
            elif part == "data":
                spec = plan.rules.batch_table.spec(rest.removeprefix("batch/"), x.ndim) if rest != "key" else P()
            else:
                name, _, leaf = rest.partition("/")
                is_activation = name in _STREAMS and leaf == "0"
                inner = gradients[leaf] if name == "of_others" else BATCH_SPEC if is_activation else P()
                spec = P(AXIS, *inner)
            state[path] = StateArray(x.shape, x.dtype, drop_fsdp(spec) if plan.zero < 3 else spec)
        return state

    def _stages(self, plan: ShardingPlan) -> Any:
        """Return what one stage carries between steps, abstract."""
        loss_fn, table = self.loss_fn, self.table

        def empty_carry(params: Any, variables: Any, batch: Any, key: Any) -> Any:
            with use_plan(plan):
                counts = table.stages, 1, table.microbatches
                arrays = partition(loss_fn, grad_targets(params), variables, batch, key, *counts)
                (layers, frozen), (shared, others), parts = arrays
                layers, frozen = jax.tree.map(lambda w: w[: w.shape[0] // table.stages], (layers, frozen))
                chunks, shared = jax.tree.map(lambda w: jnp.stack([w, w]), (layers, shared))
                frozen = jax.tree.map(lambda w: w[None], frozen)
                stage = StageModel(loss_fn, parts, layers, table.stages, (frozen, others))
                return _save_carry(first_carry(stage, chunks, shared, table), table)

        abstract = plan.abstract_params, plan.abstract_variables, dict(self.batch)
        return jax.eval_shape(empty_carry, *abstract, abstract_key())
