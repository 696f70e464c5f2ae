"""Time from the start of a process to its first step: of a killed run, and of a new one.

    python -m benchmarks.restart
    python -m benchmarks.restart --against ../spmd-before --repeats 5
    python -m benchmarks.restart --against ../spmd-before --crash
    python -m benchmarks.restart --start

The demo is trained until its first checkpoint is saved and killed (SIGKILL); then it is resumed
several times, in turns with the other checkout, and killed after its first step. Programs come from
the run folder and from a compilation cache of their own, as on any machine that has run the config
before.

Beside the seconds there are those of its processor, user and system of all threads, which depend less
on what else the machine does.

With `--crash`, it is the training process of this checkout that is killed, in turns with such
restarts; the time is that from the kill to the next step of the process that its supervisor starts.

With `--start`, new runs begin without anything compiled (cold), in turns with ones whose step was
compiled by `spmd compile` (shipped). Both have an empty compilation cache.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
TIMEOUT = 600.0
STEPS_BEFORE_CRASH = 40
"""Steps before a kill of the training process: until then the next process is prepared."""
STEP_SECONDS = 0.25
TICKS = os.sysconf("SC_CLK_TCK")


def command_of(folder: Path, *words: str) -> list[str]:
    """Return the command line of a command for the demo in `folder`."""
    flags = ["--checkpoint-every", "2", "--log-every", "1"]
    flags += ["--data.cache", str(folder.parent / "corpus")]
    name, *more = words
    program = [sys.executable, "-m", "spmd_command"]
    return [*program, name, "demo", *more, "--out", str(folder), *flags]


def environment_of(tree: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a checkout, with a compilation cache beside `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
    }


class Took(NamedTuple):
    """Seconds of a process: on the clock, and of the processor."""

    clock: float
    cpu: float


@contextlib.contextmanager
def training(tree: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Train or resume the demo in `folder` in the block, and kill it at its end."""
    command = command_of(folder, "train", "--resume", "auto")
    environment = environment_of(tree, folder)
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(
    process: subprocess.Popen[bytes], is_done: Callable[[], bool], without: int | None = None
) -> Took:
    """Wait until `is_done`; return what it took, without the processor time of one process."""
    began = time.perf_counter()
    before = processor_seconds(process.pid, without)
    while not is_done():
        if process.poll() is not None or time.perf_counter() - began > TIMEOUT:
            raise SystemExit(f"the run ended with {process.poll()} or took too long")
        time.sleep(0.005)
    clock = time.perf_counter() - began
    return Took(clock, processor_seconds(process.pid, without) - before)


def processor_seconds(group: int, without: int | None) -> float:
    """Return the processor time of the processes of a group so far, without that of one."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        if path.parent.name == str(without):
            continue
        with contextlib.suppress(OSError):
            _, _, own_group, *rest = path.read_text().rpartition(")")[2].split()
            if int(own_group) == group:
                ticks += int(rest[8]) + int(rest[9])
    return ticks / TICKS


def train_until(tree: Path, folder: Path, is_done: Callable[[], bool]) -> Took:
    """Train or resume the demo in `folder` until `is_done`, and kill it; return what it took."""
    with training(tree, folder) as process:
        return wait(process, is_done)


def last_step(folder: Path) -> int:
    """Return the last step in the metrics; 0 without one."""
    path = folder / "metrics.jsonl"
    steps = [0]
    if path.exists():
        for line in path.read_text().splitlines():
            if line.endswith("}") and '"loss"' in line:
                steps.append(json.loads(line)["step"])
    return max(steps)


def copied(folder: Path) -> Path:
    """Return a copy of a run folder, without its metrics."""
    copy = folder.with_name("restarted")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / "metrics.jsonl").write_text("")
    return copy


def restart(tree: Path, folder: Path) -> Took:
    """Return the time from the start of the process to the metrics of its first step."""
    copy = copied(folder)
    return train_until(tree, copy, lambda: last_step(copy) > 0)


def crash(folder: Path) -> Took:
    """Return the time from a kill of the training process to the metrics of the next step."""
    copy = copied(folder)
    with training(HERE, copy) as process:
        wait(process, lambda: last_step(copy) >= STEPS_BEFORE_CRASH)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        worker, *_ = map(int, children.read_text().split())  # its standby is younger
        time.sleep(random.uniform(0, STEP_SECONDS))  # at any moment of a step
        os.kill(worker, signal.SIGKILL)
        reached = last_step(copy)
        return wait(process, lambda: last_step(copy) > reached, worker)


def is_restartable(tree: Path, folder: Path) -> bool:
    """Return whether a run has everything to be resumed from."""
    writes_step = (tree / "spmd" / "run" / "compiled_step.py").exists()
    if writes_step and not (folder / "compiled_step").exists():
        return False
    return (folder / "checkpoints" / "2").exists()


def time_restarts(
    trees: dict[str, Path], repeats: int, temporary: Path, crashes: bool
) -> dict[str, list[Took]]:
    """Return the time of each restart by the name of the checkout, or of crashes of this one."""
    folders = {name: temporary / name / "run" for name in trees}
    for name, tree in trees.items():
        folders[name].parent.mkdir()
        train_until(tree, folders[name], functools.partial(is_restartable, tree, folders[name]))
        restart(tree, folders[name])  # fills the caches of Python and of programs
    seconds: dict[str, list[Took]] = {name: [] for name in trees}
    for _ in range(repeats):
        for name, tree in trees.items():
            if crashes and tree == HERE:
                seconds[name].append(crash(folders[name]))
            else:
                seconds[name].append(restart(tree, folders[name]))
    return seconds


def start(folder: Path, compiled: Path | None) -> Took:
    """Return the time to the first step of a new run, with a compiled step or without one."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.parent / "programs", ignore_errors=True)
    folder.mkdir()
    if compiled:
        shutil.copyfile(compiled, folder / "compiled_step")
    return train_until(HERE, folder, lambda: last_step(folder) > 0)


def time_starts(repeats: int, temporary: Path) -> dict[str, list[Took]]:
    """Return the time of shipped and of cold starts."""
    shipped = temporary / "shipped"
    command = command_of(shipped, "compile", "--topology", "cpu:8")
    subprocess.run(command, cwd=HERE, env=environment_of(HERE, shipped), check=True)
    start(temporary / "run", None)  # fills the caches of Python and of the corpus
    seconds: dict[str, list[Took]] = {"shipped": [], "cold": []}
    for _ in range(repeats):
        seconds["shipped"].append(start(temporary / "run", shipped / "compiled_step"))
        seconds["cold"].append(start(temporary / "run", None))
    return seconds


def main() -> None:
    """Print the median seconds and, of two kinds, the median of their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--start", action="store_true", help="new runs, shipped and cold")
    parser.add_argument("--crash", action="store_true", help="kills of the training process alone")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    trees = {"this": HERE}
    if options.against:
        trees["other"] = options.against.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        if options.start:
            seconds = time_starts(options.repeats, Path(temporary))
        else:
            seconds = time_restarts(trees, options.repeats, Path(temporary), options.crash)
    for measure in Took._fields:
        of_each = {}
        for name, found in seconds.items():
            of_each[name] = [getattr(took, measure) for took in found]
        print_figures(measure, of_each)


def print_figures(measure: str, seconds: dict[str, list[float]]) -> None:
    """Print the median of each kind and, of two kinds, that of the ratios of pairs."""
    print(f"seconds, {measure}")
    for name, found in seconds.items():
        several = ", ".join(f"{x:.2f}" for x in sorted(found))
        print(f"{name:<7} {statistics.median(found):6.2f}   of {several}")
    if len(seconds) == 2:
        ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
        several = ", ".join(f"{x:.2f}" for x in sorted(ratios))
        print(f"ratio   {statistics.median(ratios):6.2f}   of {several}")


if __name__ == "__main__":
    main()
