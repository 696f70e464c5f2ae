"""A pipeline over the mesh axis `pipe` as one more gradient function: any schedule, in one SPMD program.

The program is manual over `pipe` alone; all other axes are left to the plan, as without a pipeline. It scans over the
ticks of a `Program`. In each, a stage does what its row of the tables says:

```
what the stage before sent ──▶ slots ──▶ forward task ──▶ to the stage behind, while the backward task computes
                                  │
                                  ▼
to the stage before ◀────── backward task (forward again, then its derivative) ◀── the gradient, from its slot
while the forward task computes        └──▶ added to the stage's gradients
```

A stage with nothing to do computes nothing (`lax.cond`). Before the first task of a microbatch comes the embedding, and
the last one ends with the head and the loss. Only what enters a task is kept for its backward task, which computes the
rest again, under the plan's remat policy.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.annotate import manual_over
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import cut_batch
from spmd.gradients.base import GradFn
from spmd.gradients.lockstep import IDLE, Program
from spmd.loss import LossFn, Sums
from spmd.parallel.stages import SLOTS, Answer, Reached, Run, Stream, answered
from spmd.precision import scale_loss, split_loss_scale
from spmd.scope import current
from spmd.weights import accumulation_dtype, as_taken, gradient_view

AXIS = "pipe"


def pipeline(loss_fn: LossFn, program: Program) -> GradFn:
    """Gradients of the batch, which goes in microbatches through stages that each have some of the layers.

    The stages are those of mesh axis `pipe`: the parameters that the plan splits over it are the layers, everything
    else is on every stage. Layers stay where the plan has them; where stages have several chunks, they travel to their
    stage when the step begins, shard by shard, and their gradients travel back (`exchange`).

    Args:
        loss_fn: Of a model that runs its layers through `spmd.parallel.stages.through_layers`.
        program: What each stage does when, from `spmd.gradients.lockstep.make_program`.

    Raises:
        ConfigError: At trace time: the mesh has another number of stages, the layers do not divide into so many
            groups, the model does not say where its layers are, or keeps variables.
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, scaling = split_loss_scale(variables)
        scope = current()
        assert scope is not None, "a step is traced within its plan"

        def is_layer(path: str) -> bool:
            return AXIS in scope.rules.layer_path(path)[1]

        view = as_taken(params, gradient_view(params))
        layers, shared = tree.select(view, is_layer), tree.select(view, lambda path: not is_layer(path))
        _check(program, scope.mesh.shape[AXIS], tree.flatten(layers), tree.flatten(own))
        parts = cut_batch(batch, program.microbatches), jax.random.split(key, program.microbatches)
        scale = scale_loss(jnp.float32(1), scaling)
        local = functools.partial(_local, loss_fn=loss_fn, program=program)
        run = manual_over(scope.mesh, (AXIS,), local, (P(AXIS), P(), P(), P()), (P(AXIS), P(), P()))
        d_layers, d_shared, sums = run(layers, shared, parts, scale)
        merged = tree.flatten(tree.merge(d_layers, d_shared))
        return tree.map_with_path(lambda path, _: merged[path], params), sums, variables

    return grad_fn


def _check(program: Program, stages: int, layers: dict[str, Any], variables: dict[str, Any]) -> None:
    """Whether the program is one for this mesh and this model."""
    problems = []
    if program.stages != stages:
        what = f"is for {program.stages} stages"
        problems.append(Problem("schedule", what, f"mesh.pipe = {stages}", "make it for the mesh"))
    if not layers:
        fix = 'stack the layers, and name the stack in the rule table: stacked={"layers": "pipe"}'
        problems.append(Problem("mesh.pipe", "splits no parameter", f"pipe={stages}", fix))
    groups = program.stages * program.chunks
    counts = {leaf.shape[0] for leaf in layers.values()}
    if len(counts) > 1:
        what = f"are {len(counts)} stacks, of {' and '.join(map(str, sorted(counts)))} layers"
        problems.append(Problem("layers", what, fix="one stack"))
    for count in counts:
        if count % groups:
            product = f"pipe={program.stages}" + (f" × {program.chunks} chunks" if program.chunks > 1 else "")
            arithmetic = f"{count} / ({product}) = {count / groups:.4g}"
            problems.append(Problem("layers", "do not divide into stages", arithmetic, f"a multiple of {groups}"))
    problems += [
        Problem(path, "is a variable that the model changes by itself", fix="pipe=1; stages would each change it")
        for path in variables
    ]
    if problems:
        raise ConfigError("This model cannot be cut into stages:", problems)


class _Stages:
    """The parts of a loss function that a stage has, as functions of arrays.

    Args:
        loss_fn: The whole.
        parts: The microbatches, and a key for each.
        chunks: The stage's layers, `[chunk, layer, …]`.
        count: How many layers there are in all.
    """

    def __init__(self, loss_fn: LossFn, parts: Any, chunks: Any, count: int) -> None:
        self.loss_fn, self.parts, self.count = loss_fn, parts, count
        self.some_layers = jax.tree.map(lambda w: w[0], chunks)
        self.size = jax.tree.leaves(self.some_layers)[0].shape[0]

    def enter(self, shared: Any, i: jax.Array) -> Stream:
        """What enters the first layer."""

        def answer(run: Run, x: jax.Array, layers: Any) -> Any:
            values = jax.eval_shape(run, x, self._own(layers, 0))[1]
            raise Reached(Stream(x, jax.tree.map(lambda v: jnp.zeros((self.count, *v.shape[1:]), v.dtype), values)))

        return self._until(answer, self.some_layers, shared, i)

    def inside(self, layers: Any, shared: Any, stream: Stream, i: jax.Array, first: jax.Array) -> Stream:
        """What leaves some layers, of which `first` is the number of the first."""

        def answer(run: Run, x: jax.Array, stack: Any) -> Any:
            x, values = run(stream.x, self._own(stack, first))
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            raise Reached(Stream(x, jax.tree.map(put, stream.values, values)))

        return self._until(answer, layers, shared, i)

    def leave(self, shared: Any, stream: Stream, i: jax.Array) -> tuple[jax.Array, Sums]:
        """The loss and all sums."""
        calls = []

        def answer(run: Run, x: jax.Array, layers: Any) -> Any:
            calls.append(run)
            return stream.x, stream.values

        batch, key = self._part(i)
        with answered(answer):
            sums, _ = self.loss_fn(tree.merge(self.some_layers, shared), {}, batch, key)
        if len(calls) > 1:
            problem = Problem("layers", f"are {len(calls)} stacks", fix="one call of through_layers")
            raise ConfigError("This model cannot be cut into stages:", [problem])
        return sums["loss"], sums

    def _until(self, answer: Answer, layers: Any, shared: Any, i: jax.Array) -> Stream:
        batch, key = self._part(i)
        try:
            with answered(answer):
                self.loss_fn(tree.merge(layers, shared), {}, batch, key)
        except Reached as reached:
            return reached.stream
        fix = "run stacked layers through spmd.parallel.stages.through_layers"
        problem = Problem("layers", "are nowhere: the model does not say where they begin", fix=fix)
        raise ConfigError("This model cannot be cut into stages:", [problem])

    def _part(self, i: jax.Array) -> Any:
        return jax.tree.map(lambda x: _at(x, i), self.parts)

    def _own(self, stack: Any, first: Any) -> Any:
        """Of what is there for all layers, the part that is for these."""

        def own(x: jax.Array) -> jax.Array:
            return x if x.shape[0] == self.size else jax.lax.dynamic_slice_in_dim(x, first, self.size)

        return jax.tree.map(own, stack)


def _local(layers: Any, shared: Any, parts: Any, scale: jax.Array, *, loss_fn: LossFn, program: Program) -> Any:
    """What one stage does: gradients of its layers, and its part of all others and of the sums."""
    stage = jax.lax.axis_index(AXIS)
    chunks = exchange(layers, program.stages, program.chunks)
    count = program.stages * jax.tree.leaves(layers)[0].shape[0]
    model = _Stages(loss_fn, parts, chunks, count)
    stream = jax.eval_shape(model.enter, shared, jnp.int32(0))
    empty = _zeros(stream)

    def total(like: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), like)

    sums = jax.eval_shape(lambda: model.leave(shared, empty, jnp.int32(0))[1])
    carry = {
        "inputs": _zeros(stream, program.depth),
        "gradients": _zeros(stream, program.gradient_depth),
        "arrived": empty,
        "sent back": empty,
        "totals": (total(chunks), total(shared), _zeros(sums)),
    }

    def first_layer(chunk: jax.Array) -> jax.Array:
        return (chunk * program.stages + stage) * model.size

    def tick(carry: dict[str, Any], row: dict[str, jax.Array]) -> tuple[dict[str, Any], None]:
        do = {name: column[stage] for name, column in row.items()}
        arrived_back = _shift(carry["sent back"], program, -1)  # while the forward task computes
        inputs = _put(carry["inputs"], do["arrives"], carry["arrived"])

        # The embedding is looked up on all stages at once: no stage waits for it, and no matrix is multiplied.
        begins = (row["forward"][0] >= 0) & (row["forward_chunk"][0] == 0)
        entered = _cond(begins, lambda: model.enter(shared, row["forward"][0]), lambda: empty)
        inputs = _put(inputs, jnp.where(begins & (stage == 0), do["forward_slot"], IDLE), entered)

        def forward() -> Stream:
            entered, layers = _take(inputs, do["forward_slot"]), _chunk(chunks, do["forward_chunk"])
            return model.inside(layers, shared, entered, do["forward"], first_layer(do["forward_chunk"]))

        arrived = _shift(_cond(do["forward"] >= 0, forward, lambda: empty), program, 1)  # while the backward one does
        gradients = _put(carry["gradients"], do["gradient_arrives"], arrived_back)

        def backward(totals: Any) -> tuple[Stream, Any]:
            i, chunk = do["backward"], do["backward_chunk"]
            d_chunks, d_shared, sums = totals
            left, pull = jax.vjp(
                lambda layers, shared, stream: model.inside(layers, shared, stream, i, first_layer(chunk)),
                *(_chunk(chunks, chunk), shared, _take(inputs, do["backward_slot"])),
            )

            def from_loss(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                _, pull, own = jax.vjp(lambda shared, x: model.leave(shared, x, i), shared, left, has_aux=True)
                d, d_left = pull(scale)
                return d_left, _added(d_shared, d), _added(sums, own)

            def from_behind(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                return _take(gradients, do["gradient_slot"]), d_shared, sums

            ends = (stage == program.stages - 1) & (chunk == program.chunks - 1)
            d_left, d_shared, sums = _cond(ends, from_loss, from_behind, d_shared, sums)
            d_layers, d, d_entered = pull(d_left)
            return d_entered, (_add_chunk(d_chunks, d_layers, chunk), _added(d_shared, d), sums)

        sent_back, totals = _cond(do["backward"] >= 0, backward, lambda totals: (empty, totals), carry["totals"])

        def into_embedding(d_shared: Any) -> Any:
            own = jax.tree.map(lambda d: jnp.where(stage == 0, d, jnp.zeros_like(d)), sent_back)
            return _added(d_shared, jax.vjp(lambda w: model.enter(w, row["backward"][0]), shared)[1](own)[0])

        d_chunks, d_shared, sums = totals
        begins = (row["backward"][0] >= 0) & (row["backward_chunk"][0] == 0)
        d_shared = _cond(begins, into_embedding, lambda d_shared: d_shared, d_shared)
        totals = d_chunks, d_shared, sums
        slots = {"inputs": inputs, "gradients": gradients}
        slots = jax.tree.map(lambda x: checkpoint_name(x, SLOTS), slots)
        after = {**slots, "arrived": arrived, "sent back": sent_back, "totals": totals}
        return after, None

    table = {name: jnp.asarray(column) for name, column in program.columns.items()}
    (d_chunks, d_shared, sums) = jax.lax.scan(tick, carry, table)[0]["totals"]
    d_layers = exchange(d_chunks, program.stages, program.chunks, back=True)
    return d_layers, *jax.lax.psum((d_shared, sums), AXIS)


def exchange(layers: Any, stages: int, chunks: int, *, back: bool = False) -> Any:
    """Each stage's layers as they lie in the training state, in order, to chunks as they are computed, or back.

    Group *j* of all layers lies on stage *j* // `chunks`, and is computed on stage *j* mod `stages`. In each of
    `chunks` permutes, every stage sends one group and gets one, so a stage sends and gets what it holds, once.

    Args:
        layers: Arrays `[chunks · size, …]`, or `[chunks, size, …]` to go back.
        stages: The size of `pipe`.
        chunks: Groups of layers of each stage.
        back: Whether to go back.
    """
    if not back:
        layers = jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[1:]), layers)
    if chunks > 1:
        stage = jax.lax.axis_index(AXIS)
        moves = _rounds(stages, chunks)

        def move(w: jax.Array) -> jax.Array:
            out = w
            for sent, to, got in moves:
                pairs = [(s, int(to[s])) for s in range(stages)]
                if back:
                    pairs, sent, got = [(t, s) for s, t in pairs], got, sent
                part = jax.lax.ppermute(_at(w, jnp.asarray(sent)[stage]), AXIS, pairs)
                out = jax.lax.dynamic_update_index_in_dim(out, part, jnp.asarray(got)[stage], 0)
            return out

        layers = jax.tree.map(move, layers)
    return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), layers) if back else layers


def _rounds(stages: int, chunks: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each permute: which of its groups a stage sends, to whom, and where what a stage gets is put.

    A stage's groups go to stages that follow each other. Stages whose first groups go to the same one begin with
    another group, so no two send to one.
    """
    stage, blocks = np.arange(stages), math.gcd(stages, chunks)
    rounds = []
    for turn in range(chunks):
        sent = (turn + stage * blocks // stages) % chunks
        group = stage * chunks + sent
        to, got = group % stages, np.zeros(stages, int)
        got[to] = group // stages
        rounds.append((sent, to, got))
    return rounds


def _cond(predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond`, whose branches end in no sharding constraint: XLA refuses two that end in different ones."""

    def ended(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    return jax.lax.cond(predicate, ended(yes), ended(no), *operands)


def _shift(stream: Stream, program: Program, by: int) -> Stream:
    """To the stage behind (1) or before (-1); round the ring only where stages have several chunks."""
    ring = [(s, (s + by) % program.stages) for s in range(program.stages)]
    pairs = ring if program.chunks > 1 else [(s, to) for s, to in ring if to - s == by]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), stream)


def _zeros(like: Any, *leading: int) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def _at(x: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _take(slots: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x: _at(x, slot), slots)


def _put(slots: Any, slot: jax.Array, value: Any) -> Any:
    """The slots with `value` in one of them; as they are, for slot -1."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        at = jnp.maximum(slot, 0)
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot >= 0, new, _at(x, at)), at, 0)

    return jax.tree.map(put, slots, value)


def _chunk(chunks: Any, chunk: jax.Array) -> Any:
    return jax.tree.map(lambda w: w[0] if w.shape[0] == 1 else _at(w, chunk), chunks)


def _add_chunk(total: Any, d: Any, chunk: jax.Array) -> Any:
    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y.astype(x.dtype)
        if x.shape[0] == 1:
            return x + y[None]
        return jax.lax.dynamic_update_index_in_dim(x, _at(x, chunk) + y, chunk, 0)

    return jax.tree.map(add, total, d)


def _added(total: Any, d: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, d)
