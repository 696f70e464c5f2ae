"""What one attached GPU computes and how long it takes, beside a CPU's losses and this package's predictions.

    python -m benchmarks.one_gpu losses --out cpu.json --device cpu
    python -m benchmarks.one_gpu losses --against cpu.json
    python -m benchmarks.one_gpu steps --only tinyllama

`losses` trains each of `RUNS` for 20 steps on one device, several at a time. With `--against`, a
run whose losses differ from the other device's by more than its tolerance is wrong, and the exit
code is 1. `steps` takes each of `STEPS` in a process of its own and prints a JSON line: memory as
predicted from the trace, as the compiler counts it and as the runtime measured it, and the time of
a step as predicted by closed forms and as measured.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import spmd
from spmd.analysis.memory import read_memory
from spmd.analysis.topology import parse_topology
from spmd.commands.parsing import parse_command
from spmd.commands.train import TrainCommand
from spmd.data.loader import ordered_batches
from spmd.distributed.initialize import initialize
from spmd.observe.metrics import utilization
from spmd.run.build import TrainSetup, abstract_batch, config_mesh, count_flops, make_setup
from spmd.run.init_from import initial_state
from spmd.run.open_text import open_text_dataset
from spmd.run.planned_step import estimate_step
from spmd.run.step_time import estimate_time
from spmd.tree import size

ROOT = Path(__file__).resolve().parents[1]
ONE_DEVICE = (
    "--devices",
    "0",
    "--mesh.data",
    "1",
    "--mesh.fsdp",
    "1",
    "--mesh.tensor",
    "1",
    "--mesh.expert",
    "1",
)
SHORT = (
    "--steps",
    "20",
    "--optimizer.warmup-steps",
    "2",
    "--model.unroll",
    "1",
    "--sample.prompt",
    "",
    # Text of this repository: the standard library of another Python is another text.
    *("--data.source", "docs/how-to/*.md"),
)
TIMEOUT = 540.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run: a config with flags, and how far its losses may be from another device's, relative to them."""

    flags: tuple[str, ...]
    tolerance: float = 1e-4
    like: str = ""
    """The other device's run to compare with, if not that of the same name."""
    compared: int = 20
    """Steps to compare. A mixture of experts sends a token elsewhere once two scores differ in their
    last bits, and its losses part: here after the seventh step or later."""
    tuned: bool = False
    """XLA tries the algorithms of each product, which takes minutes where several runs compile
    at a time."""


BF16, FP8 = 2e-2, 4e-2
RUNS = {
    "float32": Run(("demo", *SHORT)),
    "float32 again": Run(("demo", *SHORT)),
    "full remat": Run(("demo", *SHORT, "--remat", "full")),
    "moments on the host": Run(("demo", *SHORT, "--remat", "full", "--offload", "optimizer_state")),
    "state on the host": Run(
        ("demo", *SHORT, "--remat", "full", "--offload", "optimizer_state", "params")
    ),
    "activations on the host": Run(("demo", *SHORT, "--remat", "offload:mlp_hidden,attention_out")),
    "accumulated": Run(("demo", *SHORT, "--accumulate", "4")),
    "chunked attention": Run(("demo", *SHORT, "--attention", "chunked")),
    "lora": Run(("demo", *SHORT, "--lora.targets", "layers/attention/(q|v)_proj/kernel")),
    "muon": Run(("demo", *SHORT, "--optimizer.name", "muon")),
    "adafactor": Run(("demo", *SHORT, "--optimizer.name", "adafactor")),
    "experts": Run(("mixtral-tiny", *SHORT), compared=5),
    "bf16": Run(("demo", *SHORT, "--precision", "bf16"), BF16),
    "bf16, cudnn": Run(
        ("demo", *SHORT, "--precision", "bf16", "--attention", "cudnn"), BF16, like="bf16"
    ),
    "bf16 parameters": Run(("demo", *SHORT, "--precision", "bf16-params"), BF16),
    "fp16": Run(("demo", *SHORT, "--precision", "fp16"), BF16),
    "fp8": Run(("demo", *SHORT, "--precision", "bf16", "--quantize", "fp8"), FP8),
    "fp8-delayed": Run(("demo", *SHORT, "--precision", "bf16", "--quantize", "fp8-delayed"), FP8),
    "int8": Run(("demo", *SHORT, "--precision", "bf16", "--quantize", "int8"), FP8, tuned=True),
    "int8 activations": Run(
        ("demo", *SHORT, "--precision", "bf16", "--remat", "store:int8=mlp_gate,mlp_up"), FP8
    ),
    "experts, bf16": Run(("mixtral-tiny", *SHORT, "--precision", "bf16"), BF16, compared=5),
}
"""Name → a run; float32 runs multiply in float32, which GPUs by default do not."""

_TINYLLAMA = ("tinyllama-1b", "--data.batch", "8", "--data.sequence", "2048", "--accumulate", "1")
_LLAMA3 = (
    "llama3-8b",
    "--model.layers",
    "4",
    "--data.batch",
    "2",
    "--data.sequence",
    "8192",
    "--remat",
    "full",
)
STEPS: dict[str, tuple[str, ...]] = {
    "tinyllama": (*_TINYLLAMA, "--remat", "full"),
    "tinyllama, dots": (*_TINYLLAMA, "--remat", "dots", "--data.batch", "4"),
    "tinyllama, none": (*_TINYLLAMA, "--remat", "none", "--data.batch", "4"),
    "tinyllama, moments on the host": (
        *_TINYLLAMA,
        "--remat",
        "full",
        "--offload",
        "optimizer_state",
    ),
    "tinyllama, chunked": (*_TINYLLAMA, "--remat", "full", "--attention", "chunked"),
    "llama3-8b, 4 layers": _LLAMA3,
    "llama3-8b, 4 layers, fp8": (*_LLAMA3, "--quantize", "fp8"),
    "mixtral-8x7b, 1 layer": (
        "mixtral-8x7b",
        "--model.layers",
        "1",
        "--data.batch",
        "4",
        "--data.sequence",
        "4096",
        "--remat",
        "full",
    ),
}
"""Name → a config and its flags, for a GPU with 80 GB."""


def train(name: str) -> list[float]:
    """Return the loss of each step of a run on this process's device."""
    setup = one_device_setup(RUNS[name].flags)
    config = setup.config
    text = open_text_dataset(config)
    sharding = setup.plan.batch_sharding("tokens")
    order = text.order(config.seed)
    losses: list[float] = []
    with ordered_batches(
        order, batch=config.data.batch, sharding=sharding, start=0, steps=config.steps
    ) as batches:
        state = initial_state(setup)
        for batch in batches:
            state, metrics = setup.step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses


def train_apart(name: str, device: str) -> list[float]:
    """Return the loss of each step of a run in a process of its own, which shares the GPU with others."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    if not RUNS[name].tuned:
        environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    if device:
        environment["JAX_PLATFORMS"] = device
    return list(json.loads(own_process("losses", name, environment)))


def own_process(command: str, name: str, environment: Mapping[str, str], *options: str) -> str:
    """Serve a run or step in a new process and return the last line that it prints.

    Raises:
        RuntimeError: It failed.
    """
    arguments = [sys.executable, "-m", "benchmarks.one_gpu", command, *options, "--serve", name]
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    if done.returncode:
        raise RuntimeError(
            f"exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-2500:]}"
        )
    return done.stdout.strip().splitlines()[-1]


def one_device_setup(flags: tuple[str, ...]) -> TrainSetup:
    """Return the setup of a config on this process's one device."""
    initialize(0)
    config = parse_command(TrainCommand, [*flags, *ONE_DEVICE], "train")[0].config
    return make_setup(config, config_mesh(config))


def largest_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses, relative to the second's.

    Infinite if one is shorter.
    """
    if len(found) != len(wanted):
        return float("inf")
    # NaN, if there is one
    return float(np.max(np.abs(np.subtract(found, wanted)) / np.abs(wanted)))


def compare_losses(options: argparse.Namespace) -> int:
    """Train all runs; write their losses, or compare them with another device's."""
    wanted = (
        json.loads(Path(options.against).read_text(encoding="utf-8")) if options.against else {}
    )
    losses: dict[str, list[float]] = {}
    failed = False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # A run that is compared with another one's losses needs a GPU.
        known = [name for name, run in RUNS.items() if options.device != "cpu" or not run.like]
        names = {
            pool.submit(train_apart, name, options.device): name for name in options.only or known
        }
        for future in concurrent.futures.as_completed(names):
            name = names[future]
            run = RUNS[name]
            try:
                losses[name] = future.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name}: FAILED\n{error}", flush=True)
                failed = True
                continue
            line = f"{name}: {losses[name][0]:.6f} … {losses[name][-1]:.6f}"
            other = wanted.get(run.like or name)
            if other:
                compared = slice(run.compared)
                difference = largest_difference(losses[name][compared], other[compared])
                is_wrong = not difference <= run.tolerance
                failed |= is_wrong
                line += f", {difference:.1e} off of {run.tolerance:.0e} allowed"
                line += ": WRONG" if is_wrong else ""
            elif wanted:
                failed = True
                line += ": nothing to compare with"
            print(line, flush=True)
            if options.out:  # after each, in case that time runs out
                Path(options.out).write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def measure_step(name: str, steps: int) -> dict[str, Any]:
    """Return the predicted and measured memory and time of a step, which must be the first thing of this process."""
    setup = one_device_setup(STEPS[name])
    config, device = setup.config, jax.devices()[0]
    topology = parse_topology(f"{device.device_kind.split()[1].lower()}:1x1")
    estimate, predicted = estimate_step(setup, topology.platform), estimate_time(setup, topology)
    began = time.perf_counter()
    compiled = setup.step.compile(abstract_batch(config))
    compile_s = time.perf_counter() - began
    state = spmd.init_state(setup.plan)
    params = size(state.params)
    held = (device.memory_stats() or {}).get("bytes_in_use")
    rng = np.random.default_rng(0)
    shape = (config.data.batch, config.data.sequence)
    times, losses = [], []
    for _ in range(steps + 2):
        tokens = rng.integers(0, config.model.vocab, shape, dtype=np.int32)
        host = {
            "tokens": tokens,
            "targets": np.roll(tokens, -1, 1),
            "weights": np.ones(shape, np.float32),
        }
        batch = jax.block_until_ready(spmd.place_batch(setup.plan, host))
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(setup.step(state, batch))
        times.append(time.perf_counter() - began)
        losses.append(float(metrics["loss"]))
    measured = statistics.median(times[2:])
    memory, flops = read_memory(compiled), count_flops(config)
    tokens_per_s = shape[0] * shape[1] / measured
    return {
        "name": name,
        "device": device.device_kind,
        "jax": jax.__version__,
        "params": params,
        "losses": [losses[0], losses[-1]],
        "memory": {
            "predicted": estimate.total,
            "compiled": memory.total if memory else None,
            "measured": (device.memory_stats() or {}).get("peak_bytes_in_use"),
            "state": held,
            "at_peak": dict(estimate.at_peak),
            "host": dict(estimate.host),
        },
        "seconds": {
            "predicted": predicted.seconds,
            "measured": measured,
            "all": times[2:],
            "compile": compile_s,
        },
        "spread": predicted.spread,
        "tokens_per_s": tokens_per_s,
        "mfu": utilization(flops, tokens_per_s, [device]) if flops else None,
    }


def measure_steps(options: argparse.Namespace) -> int:
    """Measure each step in a process of its own, and print a JSON line for each."""
    failed = False
    for name in options.only or STEPS:
        try:
            line = own_process("steps", name, os.environ, "--steps", str(options.steps))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            failed = True
            continue
        print(line, flush=True)
        if options.out:
            with Path(options.out).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return int(failed)


def main() -> int:
    """Compare losses or measure steps; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    losses = commands.add_parser("losses")
    losses.add_argument(
        "--against", default="", metavar="FILE", help="losses of another device, to compare with"
    )
    losses.add_argument("--device", default="", help="cpu or cuda; JAX's own choice without")
    losses.add_argument("--jobs", type=int, default=4, help="runs at a time")
    losses.set_defaults(
        run=compare_losses, known=RUNS, serve_one=lambda options: train(options.serve)
    )
    steps = commands.add_parser("steps")
    steps.add_argument("--steps", type=int, default=10, help="timed steps of each")
    steps.set_defaults(
        run=measure_steps,
        known=STEPS,
        serve_one=lambda options: measure_step(options.serve, options.steps),
    )
    for command in (losses, steps):
        command.add_argument("--only", nargs="+", default=[], metavar="NAME")
        command.add_argument("--out", default="", metavar="FILE")
        command.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in options.known]:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(options.known)}")
    if options.serve:
        print(json.dumps(options.serve_one(options)))
        return 0
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
