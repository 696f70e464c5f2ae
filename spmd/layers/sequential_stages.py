"""Stages of stacked layers over `pipe`, one after the other, for work without overlap.

Text is generated token by token, so there are no microbatches to fill a pipeline. Inside
`sequential_stages`, each stage runs its own layers and sends the result to the next; otherwise the
compiler would gather all layers everywhere.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd.plan.context import current, override
from spmd.plan.manual import shard_map_over
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.mesh import AnyMesh

_PURPOSE = "pipeline, stages in sequence"

Run = Callable[[Any, Any], tuple[jax.Array, Any]]
"""`(x, layers) -> (x after them, a value of each layer, stacked)`, for any number of layers."""


@contextlib.contextmanager
def sequential_stages() -> Iterator[None]:
    """Run layers inside stage by stage, if the plan in scope splits them over `pipe`.

    Layers that `pipe` does not divide are gathered over it one by one, as over `fsdp`.
    """
    mesh = current().mesh
    is_even = all(stack.is_even for stack in current().stacks.values())
    stages = None
    if mesh is not None and mesh.shape["pipe"] > 1 and is_even:
        stages = functools.partial(_run_stages, mesh)
    with override(run_stages=stages):
        yield


def run_stack(run: Run, x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
    """Return `run(x, layers)`, stage by stage inside `sequential_stages`.

    `layers` have a leading layer dimension.

    Example:
        >>> import jax.numpy as jnp
        >>> run = lambda x, layers: jax.lax.scan(lambda x, w: (x * w, x), x, layers)
        >>> float(run_stack(run, jnp.float32(1), jnp.array([2.0, 3.0]))[0])
        6.0
    """
    run_stages = current().run_stages
    if run_stages is None:
        return run(x, layers)
    return run_stages(run, x, layers)


def _run_stages(mesh: AnyMesh, run: Run, x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
    local = functools.partial(_turns, run, mesh.shape["pipe"])
    specs = (P(), P("pipe"))
    return shard_map_over(mesh, ("pipe",), local, specs, specs)(x, layers)


def _turns(run: Run, stages: int, x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
    """Run one stage in each turn; return the last stage's output, and this stage's values."""
    stage = jax.lax.axis_index("pipe")
    _, shapes = jax.eval_shape(run, x, layers)
    nothing = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), shapes)
    path = [(i, (i + 1) % stages) for i in range(stages)]

    def turn(carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        x, values = carry
        # Inactive stages also run (collectives must match); their output is discarded.
        y, own = run(x, layers)
        values = jax.tree.map(lambda new, old: jnp.where(stage == number, new, old), own, values)
        with in_scope(comm_scope(_PURPOSE)):
            y = jax.lax.ppermute(y, "pipe", path)
        return (y, values), None

    (y, values), _ = jax.lax.scan(turn, (x, nothing), jnp.arange(stages))
    # The first stage holds the last one's output. In float32: XLA:CPU cannot add up bfloat16 here.
    last = jnp.where(stage == 0, y, 0).astype(jnp.float32)
    with in_scope(comm_scope(_PURPOSE)):
        output = jax.lax.psum(last, "pipe")
    return output.astype(y.dtype), values
