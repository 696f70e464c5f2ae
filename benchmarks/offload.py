"""How much longer a step takes with its state in host memory, on simulated devices: ratios to the step without offload.

    python benchmarks/offload.py
    python benchmarks/offload.py --layers 8 --steps 20 --remat full

The steps take turns in one process, so that other work on the machine slows all alike; each line
holds the median of the ratios of neighbours. Simulated devices and their host share one memory, so
this is the cost of the pieces, not of the copies: those of a real machine go over its bus while
other pieces compute.
"""

import argparse
import json
import statistics
import time

import jax

import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.testing import token_batches

SETTINGS = ((), ("optimizer_state",), ("params",), ("optimizer_state", "params"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "layers": 4,
        "d-model": 512,
        "heads": 8,
        "kv-heads": 4,
        "d-ff": 1408,
        "vocab": 8192,
        "sequence": 256,
    }
    for option, default in (sizes | {"batch": 16, "steps": 10}).items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument(
        "--remat", default="full", help="parameters in host memory need a policy that recomputes"
    )
    options = parser.parse_args()
    spmd.simulate_devices(8)
    config = DecoderConfig(
        options.vocab,
        options.d_model,
        options.layers,
        options.heads,
        options.kv_heads,
        options.d_ff,
    )
    model, mesh = spmd.from_nnx(config.build), spmd.make_mesh(fsdp=8)
    optimizer = spmd.make_optimizer(spmd.OptimizerConfig(), steps=1000)
    (batch,) = token_batches((options.batch, options.sequence), options.vocab, steps=1)
    steps, states = [], []
    for offload in SETTINGS:
        plan = spmd.make_plan(mesh, LLAMA, model, optimizer, remat=options.remat, offload=offload)
        steps.append(spmd.make_train_step(plan, spmd.next_token_loss(model)))
        states.append(steps[-1](spmd.init_state(plan), batch)[0])  # compiled, and warm

    seconds: list[list[float]] = [[] for _ in SETTINGS]
    for _ in range(options.steps):
        for number, step in enumerate(steps):
            start = time.perf_counter()
            states[number] = jax.block_until_ready(step(states[number], batch)[0])
            seconds[number].append(time.perf_counter() - start)
    for offload, mine in zip(SETTINGS, seconds, strict=True):
        ratio = statistics.median(ours / base for ours, base in zip(mine, seconds[0], strict=True))
        line = {
            "offload": offload,
            "step_s": round(statistics.median(mine), 4),
            "ratio": round(ratio, 4),
        }
        print(
            json.dumps(
                line | {"steps": options.steps, "remat": options.remat, "jax": jax.__version__}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
