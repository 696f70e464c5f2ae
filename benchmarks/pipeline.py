"""Step times of pipeline schedules on simulated devices, against what the simulator predicts.

```
python -m benchmarks.pipeline
python -m benchmarks.pipeline --work matmuls --stages 4 --microbatches 8
```

All schedules run the same layers, four on each stage, and must agree on the loss before they are
timed; they take turns, in another order each time. Times are relative to GPipe's of the same turn,
and so are predictions: the makespan of `spmd.pipeline.simulate`, and the time in step, of
`spmd.pipeline.tick_table`.

Simulated devices share the machine's cores. So there are two kinds of layers:

- `waits`: a layer occupies its device for a fixed time, and no core: it waits in a callback, twice as long in the
  backward pass. As many devices as there are can do so at once, as real ones compute, and a bubble
  costs what it would.
- `matmuls`: a layer multiplies matrices. Where stages are more than cores, a step takes the sum of all work and bubbles
  cost nothing: every schedule is predicted to take as long as GPipe, and what it takes longer is
  the cost of a tick.

Each schedule prints one JSON line, and a table goes to stderr.
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.gradients.losses import ModelLoss, Sums
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import LayeredModel, Model, Outputs
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.simulate import simulate
from spmd.pipeline.tick_table import TickTable, tabulate
from spmd.plan.context import use_plan

DEVICES = 8
LAYERS = 4  # of each stage, so that it can have up to four chunks
# the first is what others are relative to
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
FORWARD, BACKWARD = 1, 2
CLOSE = 1e-5

Layer = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a layer does.

    Attributes:
        layer: `(x, kernel) -> x`, for `x` `[rows, width]`.
        rows: Of one microbatch.
        width: Of the kernels, which are square.
        seconds: How long the layer waits forward; 0 where it does not wait.
    """

    layer: Layer
    rows: int
    width: int
    seconds: float


def occupy(seconds: float, x: jax.Array) -> jax.Array:
    """Zero, after so many seconds in which no core works.

    `x` must be there, and so is different for every call.
    """

    def wait(x: Any) -> np.ndarray:
        del x
        time.sleep(seconds)
        return np.zeros((), np.float32)

    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])


def waits(seconds: float) -> Work:
    """Return a layer that waits forward, and twice as long backward."""

    @jax.custom_vjp
    def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return x @ kernel + occupy(seconds, x)

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
        return layer(x, kernel), (x, kernel)

    def backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = kept
        return dy @ kernel.T + occupy(2 * seconds, dy), x.T @ dy

    layer.defvjp(forward, backward)
    return Work(layer, rows=1, width=8, seconds=seconds)


def matmuls(rows: int = 256, width: int = 512) -> Work:
    """Return a layer that computes; its derivative is twice as much."""
    return Work(lambda x, kernel: jnp.tanh(x @ kernel), rows, width, seconds=0.0)


class Step:
    """The gradients of a step under one schedule, compiled."""

    def __init__(self, schedule: Schedule, work: Work) -> None:
        self.schedule = schedule
        self.table: TickTable = tabulate(schedule)
        shape = (LAYERS * schedule.stages, work.width, work.width)

        def init(key: jax.Array) -> Any:
            kernels = jax.random.normal(key, shape) / work.width**0.5
            return {"layers": {"kernel": kernels}, "head": {"scale": jnp.ones(work.width)}}

        def apply_layers(
            params: Any, variables: Any, x: jax.Array, context: None, *, train: bool
        ) -> Any:
            layer = lambda x, kernel: (work.layer(x, kernel), jnp.zeros(()))  # noqa: E731
            return jax.lax.scan(layer, x, params["layers"]["kernel"]), variables

        layered = LayeredModel(
            lambda params, variables, key, x, train: ((x, None), variables),
            apply_layers,
            lambda params, variables, x, values, train: (x @ params["head"]["scale"], variables),
        )

        def sums(outputs: Outputs, batch: Any) -> Sums:
            y = outputs.logits
            return {"loss": (y**2).sum(), "weight": jnp.float32(y.size)}

        small = spmd.replicate("a benchmark of schedules, not of kernels")
        rules = spmd.Rules([("(kernel|scale)", small)], [], stacked={"layers": "pipe"})
        mesh = spmd.make_mesh(devices=jax.devices()[: schedule.stages], pipe=schedule.stages)
        model = Model(init, lambda params, x: None, layered=lambda: layered)
        plan = spmd.make_plan(mesh, rules, model, optax.identity())
        loss_fn = ModelLoss(model, lambda batch: (batch["x"],), sums, additive=True)
        grad_fn = pipeline(loss_fn, self.table)

        def gradients(params: Any, batch: Any, key: jax.Array) -> Any:
            with use_plan(plan):
                return grad_fn(params, Carry(), batch, key)[:2]

        x = np.random.default_rng(0).standard_normal(
            (schedule.microbatches * work.rows, work.width), np.float32
        )
        batch = {"x": jax.device_put(x, jax.NamedSharding(mesh, P()))}
        self._arguments = spmd.init_state(plan, seed=0).params, batch, jax.random.key(0)
        self._compiled = jax.jit(gradients).lower(*self._arguments).compile()

    def run(self) -> tuple[Any, Sums]:
        return jax.block_until_ready(self._compiled(*self._arguments))

    def time(self) -> float:
        """Seconds on the wall."""
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


def measure(stages: int, microbatches: int, work: Work, rounds: int) -> list[dict[str, Any]]:
    """Return the lines of one pipeline, one for each schedule."""
    steps = [
        Step(make_schedule(name, stages, microbatches, chunks), work) for name, chunks in CASES
    ]
    losses = [float(step.run()[1]["loss"]) for step in steps]
    if not np.allclose(losses, losses[0], rtol=CLOSE):
        raise SystemExit(f"the schedules do not agree: losses are {losses}")
    order = random.Random(0)
    turns = [
        {i: steps[i].time() for i in order.sample(range(len(steps)), len(steps))}
        for _ in range(rounds)
    ]
    makespans = [
        simulate(step.schedule, forward=FORWARD, backward=BACKWARD).makespan for step in steps
    ]
    in_step = [float(step.table.time(FORWARD, BACKWARD)) for step in steps]
    lines = []
    for i, step in enumerate(steps):
        measured = [turn[i] / turn[0] for turn in turns]
        low, middle, high = np.quantile(measured, (0.25, 0.5, 0.75)).round(4).tolist()
        predicted = makespans[i] / makespans[0] if work.seconds else 1.0
        line = {
            "schedule": step.schedule.name,
            "chunks": step.schedule.chunks,
            "stages": stages,
            "microbatches": microbatches,
            "work": "waits" if work.seconds else "matmuls, bound by the cores",
            "predicted": round(predicted, 4),
            "measured": middle,
            "measured_quartiles": [low, high],
            "error": round(middle / predicted - 1, 4),
            "ticks": step.table.ticks,
            "s": round(statistics.median(turn[i] for turn in turns), 4),
        }
        if work.seconds:
            stage = work.seconds * LAYERS
            line["predicted_in_step"] = round(in_step[i] / in_step[0], 4)
            line["makespan_s"] = round(makespans[i] * stage, 4)
        versions = {package: version(package) for package in ("jax", "jaxlib")}
        lines.append(
            line
            | {
                "rounds": rounds,
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                **versions,
            }
        )
    return lines


def row(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    name = line["schedule"] + (f" v={line['chunks']}" if line["chunks"] > 1 else "")
    size = f"p={line['stages']} m={line['microbatches']}"
    numbers = (
        f"{line['predicted']:9.3f} {line['measured']:9.3f} {line['error']:+7.1%} {line['s']:8.3f} s"
    )
    return f"{size:<9} {name:<16} {numbers}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", choices=("waits", "matmuls"), default="waits", help="what the layers do"
    )
    parser.add_argument("--stages", type=int, action="append", help="4 and 8, unless given")
    parser.add_argument("--microbatches", type=int, action="append", help="8 and 16, unless given")
    parser.add_argument(
        "--milliseconds", type=float, default=80.0, help="how long a stage waits forward"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns that are timed")
    args = parser.parse_args()
    if args.rounds < 1 or args.milliseconds <= 0:
        parser.error("at least one turn is timed, and a stage waits for more than nothing")
    spmd.simulate_devices(DEVICES)
    works = {
        "waits": functools.partial(waits, args.milliseconds / 1000 / LAYERS),
        "matmuls": matmuls,
    }
    work = works[args.work]()
    print(
        f"{'pipeline':<9} {'schedule':<16} {'predicted':>9} {'measured':>9} {'error':>7}     step",
        file=sys.stderr,
    )
    for stages in args.stages or (4, 8):
        for microbatches in args.microbatches or (8, 16):
            for line in measure(stages, microbatches, work, args.rounds):
                print(json.dumps(line), flush=True)
                print(row(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
