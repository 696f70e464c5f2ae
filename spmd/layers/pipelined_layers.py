"""Where a model's layers begin and end, said by the model, so that a pipeline may cut it into stages.

A model runs its stacked layers through `pipelined_layers`. Outside a pipeline that is a plain call. A pipeline
(`spmd.pipeline.grad_fn`) traces the same loss function three times, and each time answers the call in another way:

```
enter    loss_fn ──▶ embedding ──▶ through_layers                     the stream as it enters the first layer
inside   loss_fn ──────────────▶ through_layers: own layers           the stream as it leaves this stage's layers
leave    loss_fn ──────────────▶ through_layers ──▶ norm, head, loss  sums over the microbatch
```

What stands before the layers and is not asked for (the embedding, for any stage but the first) is dead code, and so is
what stands behind them.

Where nothing can overlap, as in generation token by token, the stages run one after the other (`sequential_stages`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd.plan.annotate import manual_over
from spmd.plan.context import current, override
from spmd.sharding.mesh import AnyMesh

Run = Callable[[Any, Any], tuple[jax.Array, Any]]
"""`(x, layers) -> (x after them, a value of each layer, stacked)`, for any number of layers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """What goes from stage to stage.

    Attributes:
        x: The residual stream of one microbatch.
        values: What layers returned besides, stacked over all layers; of layers that are still to come, zeros.
    """

    x: Any
    values: Any


class Reached(Exception):
    """The model came to its layers, and nothing behind them is asked for.

    Attributes:
        stream: What there is at that point.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream


Answer = Callable[[Run, jax.Array, Any], tuple[jax.Array, Any]]
"""What a pipeline does in the place of `run(x, layers)`."""

SLOTS = "stage_inputs"
"""What a pipeline marks the slots as in which a stage keeps what arrives, until it is needed."""


@contextlib.contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Inside, `pipelined_layers` does what `answer` says."""
    with override(run_stages=answer):
        yield


@contextlib.contextmanager
def sequential_stages() -> Iterator[None]:
    """Inside, each stage of mesh axis `pipe` runs its own layers in its turn, and passes the stream on.

    Left to itself, the compiler would bring all layers to every stage.
    """
    mesh = current().mesh
    if mesh is None or mesh.shape["pipe"] == 1:
        yield
        return
    with answered(functools.partial(_in_turns, mesh)):
        yield


def _in_turns(mesh: AnyMesh, run: Run, x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
    stages = mesh.shape["pipe"]

    def local(x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
        stage = jax.lax.axis_index("pipe")
        nothing = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), jax.eval_shape(run, x, layers)[1])

        def turn(carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
            x, values = carry
            # Stages that are not at turn run too, and nobody takes what they make: all of them meet in collectives.
            y, own = run(x, layers)
            values = jax.tree.map(lambda new, old: jnp.where(stage == number, new, old), own, values)
            return (jax.lax.ppermute(y, "pipe", [(i, (i + 1) % stages) for i in range(stages)]), values), None

        (y, values), _ = jax.lax.scan(turn, (x, nothing), jnp.arange(stages))
        # The first stage has what the last one made. In float32: XLA:CPU cannot add up bfloat16 here.
        last = jnp.where(stage == 0, y, 0).astype(jnp.float32)
        return jax.lax.psum(last, "pipe").astype(y.dtype), values

    return manual_over(mesh, ("pipe",), local, (P(), P("pipe")), (P(), P("pipe")))(x, layers)


def pipelined_layers(run: Run, x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
    """`run(x, layers)`; in a pipeline, on the layers of one stage.

    Args:
        run: Runs some layers, one after the other.
        x: What enters the first one.
        layers: A tree of arrays with a leading layer dimension.

    Returns:
        What leaves the last layer, and a value of each layer, stacked.

    Example:
        >>> import jax.numpy as jnp
        >>> run = lambda x, layers: jax.lax.scan(lambda x, w: (x * w, x), x, layers)
        >>> float(through_layers(run, jnp.float32(1), jnp.array([2.0, 3.0]))[0])
        6.0
    """
    answer = current().run_stages
    return run(x, layers) if answer is None else answer(run, x, layers)
