"""One layer over eight devices, forward and backward, against the same by hand and against one device.

```
python -m benchmarks.layers
python -m benchmarks.layers --layer ring --rounds 40
```

`ours` is the model's own module under a plan; `bare` is `benchmarks/bare_layers.py`, written by
hand with `jax.shard_map`; `one` is the module on one device, with the work of all eight. They
compute with the same numbers in float32, and must agree to 1e-4 before they are timed. Then they
take turns in one process, in another order each time, so that other work on the machine slows all
alike. Each layer prints one JSON line.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks import bare_layers
from benchmarks.collectives import describe
from spmd import tree
from spmd.layers.router import RouterConfig
from spmd.layers.zigzag import positions, zigzag, zigzag_batch
from spmd.models.decoder import DecoderConfig
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.mixtral import mixtral
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.context import use_plan
from spmd.sharding.mesh import BATCH_SPEC
from spmd.sharding.rules import Rules

DEVICES = 8
CLOSE = 1e-4
Tree = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and what it is compared with.

    Attributes:
        axis: The mesh axis of size `DEVICES`.
        name: Under which the module is found in its model, and in the rule table.
        make: `(layer spec, rngs) -> module`.
        call: `(module, x) -> y`.
        rules: The table of its model.
        bare: The same by hand.
        config: The model's.
        x: Its input, `[batch, seq, d]`.
    """

    axis: str
    name: str
    make: Callable[..., nnx.Module]
    call: Callable[[Any, jax.Array], jax.Array]
    rules: Rules
    bare: bare_layers.Layer
    config: DecoderConfig
    x: tuple[int, int, int]


class OneLayer(nnx.Module):
    """The module of a case, under the name that it has in a model."""

    def __init__(self, case: Case, rngs: nnx.Rngs) -> None:
        self.case = case
        setattr(self, case.name, case.make(case.config.pattern.group[0], rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.case.call(getattr(self, self.case.name), x)


class Program:
    """Forward and backward, compiled: `(params, x, dy) -> (y, dparams, dx)`.

    Args:
        apply: `(params, x) -> y`.
        arguments: The global arrays.
        params: How parameters and their gradients are split.
        x: How `x`, `y` and their gradients are.
    """

    def __init__(
        self,
        apply: Callable[..., jax.Array],
        arguments: tuple[Tree, Any, Any],
        params: Tree,
        x: Any,
    ) -> None:
        def both(params: Tree, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, Tree, jax.Array]:
            y, back = jax.vjp(apply, params, x)
            return y, *back(dy)

        self._arguments = jax.device_put(arguments, (params, x, x))
        self.compiled = (
            jax.jit(both, out_shardings=(x, params, x)).lower(*self._arguments).compile()
        )

    def run(self) -> tuple[jax.Array, Tree, jax.Array]:
        return jax.block_until_ready(self.compiled(*self._arguments))

    def time(self) -> tuple[float, float]:
        """Seconds on the wall and, over all threads, on the processor."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.run()
        return time.perf_counter() - start, time.process_time() - cpu_start


def ours(case: Case, devices: int, arguments: tuple[Tree, Any, Any]) -> Program:
    """Return the module under a plan over so many devices."""
    model = spmd.from_nnx(lambda rngs: OneLayer(case, rngs))
    matches = map(case.rules.match, tree.flatten(arguments[0]))
    used = {match.index for match in matches if match}
    rules = Rules(
        [rule for i, rule in enumerate(case.rules.params) if i in used], case.rules.activations
    )
    mesh = spmd.make_mesh(devices=jax.devices()[:devices], **{case.axis: devices})
    plan = spmd.make_plan(mesh, rules, model, optax.identity())

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        tokens = {"tokens": jnp.zeros(x.shape[:2], jnp.int32)}
        with use_plan(plan), zigzag_batch(tokens, position_aware=True):
            return model.apply(params, x)

    params = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract_params)
    return Program(apply, arguments, params, NamedSharding(mesh, BATCH_SPEC))


def bare(case: Case, arguments: tuple[Tree, Any, Any]) -> Program:
    """Return the layer by hand."""
    layer = case.bare

    def bind(spec: P) -> NamedSharding:
        return NamedSharding(layer.mesh, spec)

    params = jax.tree.map(bind, {case.name: layer.params}, is_leaf=lambda leaf: isinstance(leaf, P))
    return Program(
        lambda params, x: layer.apply(params[case.name], x), arguments, params, bind(layer.x)
    )


def layer_inputs(config: DecoderConfig, seq: int) -> LayerInputs:
    """Return the inputs of a layer besides the residual stream."""
    at = positions(seq)
    angles = tuple(rotary.angles(at, width) for rotary, width in config.rotaries)
    return LayerInputs(angles)


def tensor_case(quick: bool) -> Case:
    """Return a Llama block over `tensor`."""
    batch, seq = (2, 32) if quick else (1, 256)
    config = DecoderConfig(d_model=64, heads=8, kv_heads=8, d_ff=128, layers=1)
    if not quick:
        config = dataclasses.replace(config, d_model=2048, heads=16, d_ff=5632)
    return Case(
        axis="tensor",
        name="block",
        make=lambda layer, rngs: layer.build(config.sizes, None, 0, rngs),
        call=lambda block, x: block(x, None, layer_inputs(config, seq))[0],
        rules=LLAMA,
        bare=bare_layers.tensor_layer(DEVICES, config.head_width),
        config=config,
        x=(batch, seq, config.d_model),
    )


def ring_case(quick: bool) -> Case:
    """Llama's attention over `sequence`, in zigzag order."""
    batch, seq = (2, 64) if quick else (1, 4096)
    config = DecoderConfig(d_model=64 if quick else 256, heads=4, kv_heads=2, layers=1)
    return Case(
        axis="sequence",
        name="attention",
        make=lambda layer, rngs: layer.mixer.build(config.sizes, 0, rngs),
        call=lambda layer, x: layer(x, layer_inputs(config, seq)),
        rules=LLAMA,
        bare=bare_layers.ring_layer(DEVICES, config.head_width),
        config=config,
        x=(batch, seq, config.d_model),
    )


def expert_case(quick: bool, dispatch: str) -> Case:
    """Mixtral's experts over `expert`."""
    # Without capacities, each device has room for all rows of all: there, fewer tokens are as much
    # work.
    batch, seq = 8, 16 if quick else {"capacity": 256, "dropless": 64}[dispatch]
    router = RouterConfig(experts=8, top_k=2, dispatch=dispatch)
    config = mixtral(d_model=64, heads=4, kv_heads=4, d_ff=64, layers=1, router=router)
    if not quick:
        config = dataclasses.replace(config, d_model=512, d_ff=1024)
    factor = router.capacity_factor if dispatch == "capacity" else None
    return Case(
        axis="expert",
        name="moe",
        make=lambda layer, rngs: layer.mlp.build(config.sizes, router, rngs),
        call=lambda layer, x: layer(x, None)[0],
        rules=MIXTRAL,
        bare=bare_layers.expert_layer(DEVICES, router.experts, router.top_k, factor),
        config=config,
        x=(batch, seq, config.d_model),
    )


CASES: dict[str, Callable[[bool], Case]] = {
    "tensor": tensor_case,
    "ring": ring_case,
    "expert": lambda quick: expert_case(quick, "capacity"),
    "expert-dropless": lambda quick: expert_case(quick, "dropless"),
}


def make_programs(case: Case) -> dict[str, Program]:
    """Return the three programs; they agree."""
    model = spmd.from_nnx(lambda rngs: OneLayer(case, rngs))
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    x, dy = np.random.default_rng(0).standard_normal((2, *case.x), dtype=np.float32)
    seq = case.x[1]
    order = zigzag(seq, DEVICES) if case.axis == "sequence" else np.arange(seq)
    split = params, x[:, order], dy[:, order]
    programs = {
        "ours": ours(case, DEVICES, split),
        "bare": bare(case, split),
        "one": ours(case, 1, (params, x, dy)),
    }
    results = {name: jax.tree.map(np.asarray, program.run()) for name, program in programs.items()}
    y, dparams, dx = results["one"]
    reference = tree.flatten({"y": y[:, order], "dparams": dparams, "dx": dx[:, order]})
    for name in ("ours", "bare"):
        found = tree.flatten(dict(zip(("y", "dparams", "dx"), results[name], strict=True)))
        for path, expected in reference.items():
            error = float(np.abs(found[path] - expected).max() / np.abs(expected).max())
            if not error <= CLOSE:
                raise SystemExit(
                    f"{name}: {path} is {error:.2g} of its largest value away from one device's"
                )
    return programs


def measure(name: str, quick: bool, rounds: int) -> dict[str, Any]:
    """Return the line of one layer."""
    case = CASES[name](quick)
    programs = make_programs(case)
    order = random.Random(0)
    turns = [
        {k: programs[k].time() for k in order.sample([*programs], len(programs))}
        for _ in range(rounds)
    ]

    def median(clock: int) -> dict[str, float]:
        return {k: round(statistics.median(turn[k][clock] for turn in turns), 4) for k in programs}

    def compare(other: str) -> dict[str, Any]:
        wall, cpu = (
            [turn["ours"][clock] / turn[other][clock] for turn in turns] for clock in (0, 1)
        )
        low, middle, high = np.quantile(wall, (0.25, 0.5, 0.75)).round(4).tolist()
        return {"s": middle, "s_quartiles": [low, high], "cpu_s": round(statistics.median(cpu), 4)}

    mesh = {case.axis: DEVICES}
    memory = {k: program.compiled.memory_analysis() for k, program in programs.items()}
    audits = {k: describe(programs[k].compiled.as_text() or "", mesh) for k in ("ours", "bare")}
    return {
        "layer": name,
        "mesh": mesh,
        "x": case.x,
        **{field: getattr(case.config, field) for field in ("heads", "kv_heads", "d_ff")},
        "ours/bare": compare("bare"),
        "ours/one": compare("one"),
        "s": median(0),
        "cpu_s": median(1),
        "collective_executions": {k: audit["collective_executions"] for k, audit in audits.items()},
        "collective_megabytes": {k: audit["collective_megabytes"] for k, audit in audits.items()},
        "temp_bytes_per_device": {
            k: m.temp_size_in_bytes if m else "not reported" for k, m in memory.items()
        },
        "rounds": rounds,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "jaxlib", "flax")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", choices=CASES, action="append", help="all of them, unless named")
    parser.add_argument("--rounds", type=int, default=12, help="turns that are timed")
    parser.add_argument("--quick", action="store_true", help="small layers, to see that they agree")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least one turn is timed")
    spmd.simulate_devices(DEVICES)
    for name in args.layer or CASES:
        print(json.dumps(measure(name, args.quick, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
