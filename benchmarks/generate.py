"""Tokens per second with keys and values kept, against the whole window for every token, in one JSON line.

    python -m benchmarks.generate
    python -m benchmarks.generate --mesh fsdp=2,tensor=2 --batch 8

Both write the same greedy text with the demo's model and initial parameters. They take turns, so
that other work on the machine slows both alike; the answer is the median of the pairwise ratios.
Compilation is not in it.
"""

import argparse
import json
import math
import statistics
import time

import jax
import numpy as np
import optax

from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import make_mesh, simulate_devices
from spmd.training.state import init_state


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Tokens per second of both, and their ratio; of the first token alone, seconds."""
    plan = make_plan(make_mesh(**args.mesh), LLAMA, from_nnx(PRESETS["demo"].build), optax.sgd(0.1))
    state = init_state(plan)
    prompts = np.random.default_rng(0).integers(0, 256, (args.batch, args.prompt))
    greedy = Sampling(temperature=0.0)
    ways = {
        name: Generator(plan, args.window, greedy, cached=name == "cached")
        for name in ("cached", "window")
    }

    def write(name: str, tokens: int) -> tuple[float, list[np.ndarray]]:
        began = time.perf_counter()
        texts = ways[name].write(state.params, state.variables, list(prompts), tokens=tokens)
        return time.perf_counter() - began, texts

    for name in ways:
        write(name, args.tokens)
    first = {
        name: statistics.median(write(name, 1)[0] for _ in range(args.rounds)) for name in ways
    }
    rounds = [{name: write(name, args.tokens) for name in ways} for _ in range(args.rounds)]
    same = all(
        np.array_equal(*texts) for texts in zip(*(rounds[0][name][1] for name in ways), strict=True)
    )
    seconds = {name: [r[name][0] for r in rounds] for name in ways}
    count = args.batch * args.tokens
    return {
        "model": "demo",
        "devices": f"{math.prod(args.mesh.values())} simulated {jax.devices()[0].platform}",
        **{
            name: getattr(args, name)
            for name in ("mesh", "batch", "prompt", "tokens", "window", "rounds")
        },
        "tokens_per_s": {
            name: round(count / statistics.median(times), 1) for name, times in seconds.items()
        },
        "ratio": round(statistics.median(w / c for c, w in zip(*seconds.values(), strict=True)), 2),
        "first_token_s": {name: round(value, 4) for name, value in first.items()},
        "same_text": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="data=1", help="such as fsdp=2,tensor=2")
    parser.add_argument("--batch", type=int, default=1, help="prompts")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=200, help="added to each")
    parser.add_argument("--window", type=int, default=256, help="the longest sequence")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.mesh = {
        axis: int(size) for axis, size in (pair.split("=") for pair in args.mesh.split(","))
    }
    simulate_devices(math.prod(args.mesh.values()))
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
