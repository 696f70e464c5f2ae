"""What it costs in accuracy to send gradients in bfloat16: the final loss of the demo, over several seeds.

    python -m benchmarks.exchange --out /tmp/exchange

Trains `demo` with precision `bf16` on `fsdp=8` of simulated devices, from the same seeds, in three
ways: gradients are sent in float32; in bfloat16, where XLA:CPU adds in float32 and rounds the sum;
and in bfloat16 around a ring that rounds after every addition, the most that a network may lose.
Prints each final validation loss and the differences.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

_RING = """
import jax, jax.numpy as jnp
from spmd.sharding import collectives

def ring(x, mesh, axis, dim, dtype):
    count, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    parts = jnp.stack(jnp.split(x, count, axis=dim))
    to_next = [(device, (device + 1) % count) for device in range(count)]
    total = parts[(me - 1) % count]
    for step in range(2, count + 1):
        total = jax.lax.ppermute(total, axis, to_next)
        wide = total.astype(jnp.float32) + parts[(me - step) % count].astype(jnp.float32)
        total = wide.astype(x.dtype)
    return total.astype(dtype)

collectives.psum_scatter = ring
"""
_RUN = "import sys; sys.argv[0] = 'spmd'; from spmd.cli import main; sys.exit(main())"
WAYS = {
    "float32": ("", ("--exchange", "float32")),
    "bfloat16": ("", ("--exchange", "bfloat16")),
    "bfloat16, ring": (_RING, ("--exchange", "bfloat16")),
}


def final_loss(way: str, seed: int, out: Path, flags: list[str]) -> float:
    """Train once; return the last validation loss, in nats per byte."""
    patch, exchange = WAYS[way]
    mesh = ("--mesh.data", "1", "--mesh.fsdp", "8", "--mesh.tensor", "1", "--data.batch", "8")
    run = (
        "train",
        "demo",
        "--precision",
        "bf16",
        *exchange,
        *mesh,
        "--seed",
        str(seed),
        "--sample.prompt",
        "",
    )
    folder = out / f"{way.replace(', ', '-')}-{seed}"
    command = [
        sys.executable,
        "-c",
        patch + _RUN,
        *run,
        "--checkpoint-every",
        "0",
        "--out",
        str(folder),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}, seed {seed} failed:\n{done.stderr[-2000:]}")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["val_loss"] for row in rows if "val_loss" in row][-1]


def main() -> int:
    """Print a line for each seed, and the mean and spread of the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    arguments, flags = parser.parse_known_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(arguments.seeds):
        for way, losses in found.items():
            losses.append(final_loss(way, seed, arguments.out, flags))
        print(
            f"seed {seed}   "
            + "   ".join(f"{way} {losses[-1]:.4f}" for way, losses in found.items()),
            flush=True,
        )
    exact = found.pop("float32")
    print(
        f"float32   mean {statistics.mean(exact):.4f}   largest − smallest {max(exact) - min(exact):.4f}"
    )
    for way, losses in found.items():
        differences = [loss - other for loss, other in zip(losses, exact, strict=True)]
        print(f"{way} − float32   " + "   ".join(f"{d:+.4f}" for d in differences))
    return 0


if __name__ == "__main__":
    sys.exit(main())
