"""Validation losses of runs with fewer bits, relative to bfloat16, over several seeds.

    python -m benchmarks.fewer_bits --results results.jsonl
    python -m benchmarks.fewer_bits --results results.jsonl --config mixtral-tiny --seeds 0

The table in docs/how-to/benchmark.md is made by it. Every run's loss is appended to the results as
it ends, and runs that are there already are not repeated, so an interrupted table goes on. The last
setting is a control: gradients of each device as their signs, one scale for each array and no error
feedback, with Adam (what 1-bit Adam, Tang et al., arXiv:2102.02888, shows to fail). PowerSGD is
also switched on in the middle of a run, as PyTorch's is after its first 1,000 steps by default.
DiLoCo's replicas are the two of `data`; its period should divide the number of steps. The exit
code is 1 if a setting is further off in the mean over seeds than it may be, or the control is not.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd.data.loader import Windows, batches, evaluation_batches, load_corpus
from spmd.diloco.config import DiLoCoConfig
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.deferred_reduction import LocalGradients, defer_grad_reduction, sum_exchange
from spmd.gradients.losses import next_token_loss
from spmd.run.build import config_mesh, make_setup
from spmd.run.config import TrainConfig
from spmd.run.load_config import load_config
from spmd.settings.compress import CompressConfig
from spmd.sharding.mesh import MeshShape
from spmd.training.state import TrainState, init_state
from spmd.training.step import TrainStep, make_eval_step, make_train_step

CONTROL = "signs of gradients"
"""The setting that must fail."""

LATER = "PowerSGD rank 4 in the second half"
"""The setting with fewer bits from the middle of the run on: it resumes a run without."""

AVERAGE_8 = DiLoCoConfig(every=8, learning_rate=1.0, momentum=0.0)
AVERAGE_32 = dataclasses.replace(AVERAGE_8, every=32)
"""Outer optimizers without momentum, for runs of a few dozen outer steps."""

SETTINGS: Mapping[str, tuple[dict[str, Any], float]] = {
    "bf16": ({}, 0.0),
    "fp8": ({"quantize": "fp8"}, 0.01),
    "fp8-delayed": ({"quantize": "fp8-delayed"}, 0.01),
    "int8 matmuls": ({"quantize": "int8"}, 0.01),
    "int8 gathers": ({"compress": CompressConfig(gather="int8")}, 0.01),
    "int8 gradients": ({"compress": CompressConfig(gradients="int8")}, 0.01),
    "int4 gradients": ({"compress": CompressConfig(gradients="int4")}, 0.02),
    "PowerSGD rank 4": ({"compress": CompressConfig(gradients="powersgd:4")}, 0.01),
    LATER: ({"compress": CompressConfig(gradients="powersgd:4")}, 0.01),
    "int8 activations": ({"remat": ""}, 0.01),
    "DiLoCo every 8": ({"diloco": AVERAGE_8}, 0.06),
    "DiLoCo every 32": ({"diloco": AVERAGE_32}, 0.12),
    "DiLoCo every 32, 4 fragments in int4": (
        {"diloco": dataclasses.replace(AVERAGE_32, fragments=4, codec="int4")},
        0.12,
    ),
    "DiLoCo every 8, with momentum": ({"diloco": DiLoCoConfig(every=8)}, 0.5),
    CONTROL: ({}, 0.01),
}
"""Name → the config's fields, and how much larger the loss may be, relative to bfloat16's."""

STORED = {
    "demo": "store:int8=mlp_gate,mlp_up,attention_out,mlp_input",
    "mixtral-tiny": "store:int8=expert_hidden,attention_out",
}
MESHES = {
    "demo": MeshShape(data=2, fsdp=2, tensor=2),
    "mixtral-tiny": MeshShape(data=2, fsdp=2, expert=2),
}
"""Meshes on which each setting has something to act on."""


def signs(local: LocalGradients, states: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Sum gradients over devices as signs, times the mean magnitude of each array on its device."""

    def signed(g: jax.Array) -> jax.Array:
        size = jnp.mean(jnp.abs(g), axis=tuple(range(1, g.ndim)), keepdims=True)
        return jnp.where(g < 0, -size, size)

    return sum_exchange(
        dataclasses.replace(local, gradients=jax.tree.map(signed, local.gradients)), states
    )


def make_config(name: str, setting: str, seed: int, steps: int) -> TrainConfig:
    """Return the config of one run."""
    config, fields = load_config(name), dict(SETTINGS[setting][0])
    if "remat" in fields:
        fields["remat"] = STORED[name]
    optimizer = dataclasses.replace(
        config.optimizer, warmup_steps=min(config.optimizer.warmup_steps, steps // 4)
    )
    fields |= {"precision": "bf16", "mesh": MESHES[name], "optimizer": optimizer}
    fields["checkpoint_every"] = 0
    fields["evaluate"] = dataclasses.replace(config.evaluate, every=0)  # `train` evaluates
    return dataclasses.replace(config, seed=seed, steps=steps, **fields)


def train(config: TrainConfig, setting: str) -> float:
    """Train, and return the mean loss of the validation tokens."""
    corpus, sequence, state = load_corpus(config.data), config.data.sequence, None
    half = config.steps // 2
    plain = dataclasses.replace(config, compress=CompressConfig())
    parts = (
        [(0, half, plain), (half, config.steps, config)]
        if setting == LATER
        else [(0, config.steps, config)]
    )
    for start, end, part in parts:
        setup = make_setup(part, config_mesh(part))
        step: TrainStep = setup.step
        if setting == CONTROL:
            grad_fn = accumulate(value_and_grad(next_token_loss(setup.plan.model)), 1)
            step = make_train_step(
                setup.plan, grad_fn=defer_grad_reduction(grad_fn, ("data",), signs)
            )
        state = start_state(setup.plan, config.seed, state)
        placed = {"batch": config.data.batch, "sharding": setup.plan.batch_sharding("tokens")}
        for batch in batches(
            Windows(corpus.train, sequence), seed=config.seed, start=start, steps=end, **placed
        ):
            state, metrics = step(state, batch)
            # simulated devices wait for each other forever if too many are dispatched
            jax.block_until_ready(metrics)
    evaluate, total = make_eval_step(setup.plan, setup.evaluation_loss_fn), dict[str, float]()
    windows = Windows(corpus.validation, sequence)
    for batch in evaluation_batches(windows, tokens_at_most=config.evaluate.tokens, **placed):
        sums = evaluate(state.params, state.variables, batch)
        total = {name: total.get(name, 0.0) + float(sums[name]) for name in ("loss", "weight")}
    return total["loss"] / total["weight"]


def start_state(plan: spmd.ShardingPlan, seed: int, before: TrainState | None) -> TrainState:
    """Return the initial state, or that of another run, whose variables may lack those of compression."""
    state = init_state(plan, seed)
    if before is None:
        return state
    before = dataclasses.replace(before, transforms={**state.transforms, **before.transforms})
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), before, state)


def table(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the table of the settings that have a row, and whether each is within its bar."""
    lines, is_good = (
        [
            "| run | setting | seeds | loss | relative to bf16 | may be |",
            "|---|---|---|---|---|---|",
        ],
        True,
    )
    losses = {(row["config"], row["setting"], row["seed"]): row["loss"] for row in rows}
    for name in MESHES:
        for setting, (_, bar) in SETTINGS.items():
            pairs = [
                (loss, losses[name, "bf16", seed])
                for (config, found, seed), loss in losses.items()
                if (config, found) == (name, setting) and (name, "bf16", seed) in losses
            ]
            if not pairs:
                continue
            loss, changes = (
                statistics.mean(loss for loss, _ in pairs),
                [loss / plain - 1 for loss, plain in pairs],
            )
            change = statistics.mean(changes)
            is_good &= change > bar if setting == CONTROL else change <= bar
            limit = f"above {bar:.0%}" if setting == CONTROL else f"{bar:.0%}"
            shown = f"{change:+.2%}, at most {max(changes):+.2%}"
            lines.append(f"| {name} | {setting} | {len(pairs)} | {loss:.4f} | {shown} | {limit} |")
    return "\n".join(lines), is_good


def main() -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--config", choices=MESHES, nargs="+", default=list(MESHES))
    parser.add_argument("--setting", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    spmd.simulate_devices(8)
    text = arguments.results.read_text(encoding="utf-8") if arguments.results.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [row for row in rows if row["steps"] == arguments.steps]
    done = {(row["config"], row["setting"], row["seed"]) for row in rows}
    for seed in arguments.seeds:
        for name in arguments.config:
            for setting in arguments.setting:
                if (name, setting, seed) in done:
                    continue
                began = time.perf_counter()
                loss = train(make_config(name, setting, seed, arguments.steps), setting)
                row = {
                    "config": name,
                    "setting": setting,
                    "seed": seed,
                    "steps": arguments.steps,
                    "loss": loss,
                }
                rows.append(row)
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{name}, {setting}, seed {seed}: {loss:.4f} ({time.perf_counter() - began:.0f} s)",
                    flush=True,
                )
    text, is_good = table(rows)
    print(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
