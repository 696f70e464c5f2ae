"""Compare numbers, checkpoints and compiled programs of this tree with those of an earlier commit, bit for bit.

    python -m tests.earlier COMMIT [--only demo lora] [--programs]

A change that only moves code must print "the same" on every line. Each run of `RUNS` trains 20
steps in both trees, and this tree goes on from the earlier tree's checkpoint of step 10: every
metric of every step must be equal. With `--programs`, each step of `PROGRAMS` is compiled in both
trees for absent TPU slices instead: equal text without names and metadata, or else the bytes of
collectives and of temporaries, and the compiler's cycles, side by side. Exits with 1 if a run
differs.

Both trees run on this machine, one after the other, so nothing depends on whose processor it is.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    "--steps",
    "20",
    "--optimizer.warmup-steps",
    "2",
    "--log-every",
    "1",
    "--checkpoint-every",
    "10",
    *("--evaluate.every", "0", "--evaluate.tokens", "4096", "--sample.prompt", ""),
)
STAGES = ("--mesh.pipe", "2", "--mesh.data", "1")
CODES = ("--compress.gather", "int8", "--compress.gradients", "int8")
RUNS = {
    "demo": ("demo",),
    "mixtral": ("mixtral-tiny",),
    "stages": ("demo", *STAGES, "--pipeline.schedule", "1f1b"),
    "fp16": ("demo", "--precision", "fp16"),
    "powersgd": ("demo", "--compress.gradients", "powersgd:4"),
    "fp8-delayed": ("demo", "--quantize", "fp8-delayed"),
    "lora": ("demo", "--lora.targets", "layers/attention/(q|v)_proj/kernel"),
    "pipedream": ("demo", *STAGES, "--pipeline.schedule", "pipedream"),
    "codes": ("demo", "--remat", "full", *CODES),
    "host memory": ("demo", "--remat", "full", "--offload", "optimizer_state", "params"),
}
"""Name → a config and its flags: each technique that keeps a state or wraps a parameter."""
OF_A_MACHINE = ("_s", "_s_p95", "_per_s", "_bytes", "mfu")
"""Endings of the metrics that no two runs share."""

EIGHT = ("--mesh.data", "1", "--mesh.fsdp", "8", "--mesh.tensor", "1")
PROGRAMS = {
    "fsdp": ("demo", *EIGHT, "--precision", "bf16", "--remat", "full"),
    "three axes": ("demo", "--precision", "bf16"),
    "moments on the host": ("demo", *EIGHT, "--precision", "bf16", "--offload", "optimizer_state"),
    "codes": ("demo", *EIGHT, "--precision", "bf16", "--remat", "full", *CODES),
    "codes of experts": ("mixtral-tiny", "--precision", "bf16", "--remat", "full", *CODES),
    "experts": ("mixtral-tiny", "--precision", "bf16"),
    "fp8-delayed": ("demo", "--precision", "bf16", "--quantize", "fp8-delayed"),
    "lora": ("demo", "--precision", "bf16", "--lora.targets", "layers/attention/(q|v)_proj/kernel"),
}
"""Name → a config and its flags.

None has a region that is manual over one axis: commits before 26 November 2026 do not compile
layers that are unrolled there, as those of `demo` are.
"""
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2")
COMPILE = """
import pathlib, sys
import jax

compile, texts = jax.stages.Lowered.compile, []

def kept(lowered, *arguments, **options):
    program = compile(lowered, *arguments, **options)
    texts.append(program.as_text())
    return program

jax.stages.Lowered.compile = kept
from spmd.cli import main
try:
    main(sys.argv[2:])
finally:
    pathlib.Path(sys.argv[1]).write_text(max(texts, key=len))
"""
"""Lines that run a command and write the largest program that it compiles."""


def in_tree(tree: Path, *arguments: str, check: bool = True) -> str:
    """Run Python in a tree and return what it prints; the end of its errors, if it fails, is an exception."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True
    )
    if check and done.returncode not in (0, 3):  # 3: a plan that does not fit
        raise RuntimeError(
            f"{' '.join(arguments[1:])} in {tree}: {done.returncode}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def train(tree: Path, out: Path, flags: tuple[str, ...]) -> None:
    """Train a config in a tree."""
    command = "import sys; from spmd.cli import main; sys.exit(main(sys.argv[1:]))"
    in_tree(tree, "-c", command, "train", *flags, *SHORT, "--out", str(out))


def metrics(out: Path) -> dict[int, dict[str, Any]]:
    """Return step → the metrics of a run that do not depend on the time of day or the machine's load."""
    found: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept = {name: value for name, value in record.items() if not name.endswith(OF_A_MACHINE)}
        found[record["step"]] |= kept
    return dict(found)


def first_difference(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> str:
    """Return the first step and metric that differ, empty if none does."""
    for step in sorted(one.keys() | other.keys()):
        before, after = one.get(step, {}), other.get(step, {})
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                return f"step {step}, {name}: {before.get(name)} before, {after.get(name)} now"
    return ""


def compare_runs(earlier: Path, names: list[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of a run and how it differs, empty if it is the same."""
    for name in names:
        before, now = folder / f"{name}-before", folder / f"{name}-now"
        train(earlier, before, RUNS[name])
        train(ROOT, now, RUNS[name])
        yield name, first_difference(metrics(before), metrics(now))
        resumed = folder / f"{name}-resumed"
        subprocess.run(["cp", "-r", str(before), str(resumed)], check=True)
        subprocess.run(["rm", "-r", str(resumed / "checkpoints/20")], check=True)
        train(ROOT, resumed, (*RUNS[name], "--resume", "always"))
        yield f"{name}, resumed at step 10", first_difference(metrics(before), metrics(resumed))


def lines_of(text: str) -> collections.Counter[str]:
    """Return the lines of a program without names of operations, metadata, and the order of its arguments."""
    text = re.sub(r",? ?metadata=\{[^}]*\}", "", text)
    text = re.sub(r'"body":"[^"]*"', "", text)
    text = re.sub(r"%[A-Za-z_][\w.\-]*", "%", text)
    text = re.sub(r"param_[\d.]+", "param", text)
    text = re.sub(r"parameter\(\d+\)", "parameter", text)
    text = re.sub(r"(calls|to_apply|body|condition)=%?[\w.\-]*", r"\1", text)
    text = re.sub(r'"estimated_cycles":"\d+"', "", text)
    text = re.sub(r'(channel_id|"barrier_type"|used_scoped_memory)[^,}]*', "", text)
    kept = (line.strip() for line in text.splitlines())
    tables = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames|HloModule|ENTRY|\d+ )")
    return collections.Counter(line for line in kept if not tables.match(line))


def compiled(
    tree: Path, flags: tuple[str, ...], topology: str, file: Path
) -> tuple[collections.Counter[str], Any]:
    """Return the lines of a step's program for an absent machine, and the plan's record of it."""
    printed = in_tree(
        tree,
        "-c",
        COMPILE,
        str(file),
        "plan",
        *flags,
        "--topology",
        topology,
        "--compile",
        "--json",
    )
    return lines_of(file.read_text(encoding="utf-8")), json.loads(printed)


def compare_programs(earlier: Path, names: list[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of a program and how it differs, empty if it is the same."""
    for name in names:
        for topology in TOPOLOGIES:
            before, old = compiled(earlier, PROGRAMS[name], topology, folder / "before.hlo")
            now, new = compiled(ROOT, PROGRAMS[name], topology, folder / "now.hlo")
            lines = (before - now).total(), (now - before).total()
            changed = [
                f"{key}: {old.get(key)} before, {new.get(key)} now"
                for key in ("memory", "collectives", "compute")
                if old.get(key) != new.get(key)
            ]
            said = f"{lines[0]} lines gone and {lines[1]} new of {before.total()}; " + (
                "; ".join(changed) or "no figure"
            )
            yield f"{name}, {topology}", said if any(lines) else ""


def main() -> int:
    """Compare, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="names of runs, or of programs"
    )
    parser.add_argument(
        "--programs", action="store_true", help="compare compiled programs in place of runs"
    )
    asked = parser.parse_args()
    known = PROGRAMS if asked.programs else RUNS
    if unknown := [name for name in asked.only if name not in known]:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(known)}")
    compare = compare_programs if asked.programs else compare_runs
    differs = False
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "earlier"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", earlier, asked.commit],
            cwd=ROOT,
            check=True,
        )
        try:
            for name, difference in compare(earlier, asked.only or list(known), Path(folder)):
                print(f"{name}: {difference or 'the same'}", flush=True)
                differs |= bool(difference)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", earlier], cwd=ROOT, check=True)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
