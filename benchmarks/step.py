"""The framework's train step against the same step written by hand: time, compilation, memory, collectives.

```
python benchmarks/step.py --quick
python benchmarks/step.py --mesh data=2,fsdp=2,tensor=2 --steps 16
```

Each side lives in its own process with its own simulated CPU devices. The parent lets them take
turns, one timed step each, so that other work on the machine slows both alike; the answer is the
median of the pairwise ratios. Every side prints one JSON line, and a last line compares them. Time
is wall-clock seconds from a host batch to a ready loss; processor seconds over all threads stand
beside it, because they suffer less from a busy machine.
"""

import argparse
import importlib
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

# Named and not imported: the hand-written side must run without the framework in its process. The
# audit is part of the framework, so it comes when all is measured.
SIDES = {"bare": "benchmarks.bare_jax", "spmd": "benchmarks.ours"}
AUDIT = "benchmarks.collectives"
AXES = ("data", "fsdp", "tensor")
QUICK = {
    "layers": 2,
    "d_model": 64,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 128,
    "vocab": 256,
    "seq": 32,
    "steps": 3,
}


class Side(Protocol):
    """What `make(args)` of a side returns.

    Attributes:
        params: Number of parameters.
        compile_s: Seconds to trace, lower and compile the step, with no cache.
        compiled: The compiled step.
    """

    params: int
    compile_s: float
    compiled: jax.stages.Compiled

    def run(self, batch: Mapping[str, np.ndarray]) -> jax.Array:
        """Take one step; the loss is ready when the step is."""
        ...


def make_batches(args: argparse.Namespace) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of uniform tokens from one seed: the same on every side.

    Yields:
        `tokens` and `targets`, int32, and `weights`, float32, about a tenth of them zero; `[batch,
        seq]` each.
    """
    rng = np.random.default_rng(0)
    while True:
        text = rng.integers(0, args.vocab, (args.batch, args.seq + 1), dtype=np.int32)
        weights = (rng.random((args.batch, args.seq)) > 0.1).astype(np.float32)
        yield {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": weights}


def serve(name: str, args: argparse.Namespace) -> None:
    """Be one side: compile and warm up, then take one step for every line read, and report when the lines end."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", math.prod(args.mesh.values()))
    jax.config.update("jax_enable_compilation_cache", False)
    side: Side = importlib.import_module(SIDES[name]).make(args)
    batches = make_batches(args)
    losses = [float(side.run(next(batches)))]
    print("ready", flush=True)
    times: list[float] = []
    cpu_times: list[float] = []
    for _ in sys.stdin:
        batch = next(batches)
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = jax.block_until_ready(side.run(batch))
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
        losses.append(float(loss))
        print(times[-1], cpu_times[-1], flush=True)
    memory = side.compiled.memory_analysis()
    report = {
        "name": name,
        "params": side.params,
        "compile_s": side.compile_s,
        "step_s_median": statistics.median(times),
        "step_s_all": times,
        "step_cpu_s_median": statistics.median(cpu_times),
        "tokens_per_s": args.batch * args.seq / statistics.median(times),
        "losses": losses,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "temp_bytes_per_device": memory.temp_size_in_bytes if memory else "not reported",
    }
    report |= importlib.import_module(AUDIT).describe(side.compiled.as_text() or "", args.mesh)
    print(json.dumps(report), flush=True)


class Child:
    """One side's process.

    Args:
        name: A key of `SIDES`.
        options: The command line it inherits.
    """

    def __init__(self, name: str, options: list[str]) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.step", *options, "--serve", name]
        root = Path(__file__).resolve().parent.parent
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
        self._read("ready")

    def step(self) -> tuple[float, float]:
        """Take one step; its seconds on the wall and, over all threads, on the processor."""
        assert self._process.stdin
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        wall, cpu = self._read("a step's times").split()
        return float(wall), float(cpu)

    def finish(self) -> dict[str, Any]:
        """End the process; its report."""
        assert self._process.stdin
        self._process.stdin.close()
        report: dict[str, Any] = json.loads(self._read("a report"))
        self._process.wait()
        return report

    def _read(self, expected: str) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"side {self.name}: ended with {self._process.wait()} before {expected}; see its error above"
            )
        return line


def compare(args: argparse.Namespace, options: list[str]) -> None:
    """Run the sides in turns and print one JSON line each, then the ratio of the second to the first."""
    # One after the other, so that neither compiles while the other does.
    children = [Child(name, options) for name in args.sides]
    pairs = [[child.step() for child in children] for _ in range(args.steps)]
    reports = [child.finish() for child in children]
    for report in reports:
        print(json.dumps(report))
    if len(reports) == 2:
        first, second = reports
        ratio = {
            "name": "ratio",
            "of": f"{second['name']}/{first['name']}",
            "step_s": statistics.median(b[0] / a[0] for a, b in pairs),
            "step_cpu_s": statistics.median(b[1] / a[1] for a, b in pairs),
            "compile_s": second["compile_s"] / first["compile_s"],
            "temp_bytes": second["temp_bytes_per_device"] / first["temp_bytes_per_device"],
        }
        print(json.dumps(ratio))


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=1,fsdp=8,tensor=1"` as sizes by axis; an omitted axis is 1."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not one of {', '.join(f'{a}=N' for a in AXES)}"
            )
        sizes[axis] = int(size)
    return sizes


def parse_sides(text: str) -> list[str]:
    """`"bare,spmd"` as a list of one or two known sides."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SIDES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the sides are {', '.join(SIDES)}")
    if len(names) > 2:
        raise argparse.ArgumentTypeError("one or two sides")
    return names


def parse(options: list[str]) -> argparse.Namespace:
    """Read the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        description="the framework's train step against hand-written JAX"
    )
    sizes = {
        "layers": 4,
        "d-model": 512,
        "heads": 8,
        "kv-heads": 4,
        "d-ff": 1408,
        "vocab": 8192,
        "seq": 256,
    }
    for option, default in (sizes | {"batch": 16, "steps": 8}).items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--mesh", type=parse_mesh, default="data=1,fsdp=8,tensor=1")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of computation"
    )
    parser.add_argument("--remat", choices=("none", "full"), default="none")
    parser.add_argument("--sides", type=parse_sides, default="bare,spmd")
    parser.add_argument(
        "--quick", action="store_true", help=f"a small run; defaults become {QUICK}"
    )
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    if "--quick" in options:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(options)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least one step is timed")
    rows = args.mesh["data"] * args.mesh["fsdp"]
    if args.batch % rows:
        parser.error(
            f"--batch {args.batch} / (data × fsdp = {rows}) = {args.batch / rows}: not a whole number"
        )
    if (
        args.d_model % args.heads
        or args.heads % args.kv_heads
        or args.kv_heads % args.mesh["tensor"]
    ):
        parser.error(
            "tensor must divide --kv-heads, --kv-heads must divide --heads, --heads must divide --d-model"
        )
    return args


def main() -> None:
    """Compare the sides, or be one of them."""
    options = sys.argv[1:]
    args = parse(options)
    if args.serve:
        serve(args.serve, args)
    else:
        compare(args, options)


if __name__ == "__main__":
    main()
