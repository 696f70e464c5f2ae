"""Compare the losses of this checkout with those of another commit, bit for bit, on this machine.

    python -m benchmarks.same_losses a4207f9

A change that claims to leave numbers alone proves it with this: 20 steps each of `demo`,
`mixtral-tiny`, and `demo` on two pipeline stages, over simulated devices. The loss and the gradient
norm of every step are compared; it exits with 1 where one differs. The first argument is any commit
that git can find here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = "import sys; sys.argv[0] = 'spmd'; from spmd.cli import main; sys.exit(main())"
STEPS = 20
CASES = {
    "demo": ("demo",),
    "mixtral-tiny": ("mixtral-tiny",),
    "demo on two stages": (
        *("demo", "--mesh.pipe", "2", "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "1"),
        *("--pipeline.microbatches", "2", "--data.batch", "16"),
    ),
}
COMPARED = ("loss", "gradient_norm")


def train(source: Path, arguments: tuple[str, ...], folder: Path) -> list[tuple[float, ...]]:
    """Train with the package in `source`; return what is compared of each step."""
    flags = (
        "--steps",
        str(STEPS),
        "--optimizer.warmup-steps",
        "5",
        "--log-every",
        "1",
        "--checkpoint-every",
        "0",
    )
    command = [sys.executable, "-c", RUN, "train", *arguments, *flags, "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{source}: {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        tuple(row[name] for name in COMPARED)
        for row in rows
        if all(name in row for name in COMPARED)
    ]


def main() -> int:
    """Print a line for each case; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    commit, differ = parser.parse_args().commit, False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (other := folder / "source").mkdir()
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(other)], input=archive, check=True)
        for case, arguments in CASES.items():
            theirs, ours = (
                train(source, arguments, folder / f"{case} {number}")
                for number, source in enumerate((other, ROOT))
            )
            assert len(ours) == STEPS, f"{case}: {len(ours)} steps were logged"
            wrong = [
                number
                for number, rows in enumerate(zip(theirs, ours, strict=True), 1)
                if rows[0] != rows[1]
            ]
            differ |= bool(wrong)
            says = f"differ from step {wrong[0]} on" if wrong else "are bitwise equal"
            print(
                f"{case}: {STEPS} losses {says}; the last is {ours[-1][0]!r} nats per token",
                flush=True,
            )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
