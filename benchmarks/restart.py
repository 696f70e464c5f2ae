"""Time from the start of a killed run's process to its first step, beside that of another checkout.

    python -m benchmarks.restart
    python -m benchmarks.restart --against ../spmd-before --repeats 5

The demo is trained until its first checkpoint is saved and killed (SIGKILL); then it is resumed
several times, in turns with the other checkout, and killed after its first step. Programs come from
a compilation cache of their own, as on any machine that has run the config before.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
TIMEOUT = 600.0


def train_until(tree: Path, folder: Path, is_done: Callable[[], bool]) -> float:
    """Train or resume the demo in `folder` until `is_done`, and kill it.

    Return the seconds that it took.
    """
    flags = (
        "--checkpoint-every",
        "2",
        "--log-every",
        "1",
        "--data.cache",
        str(folder.parent / "corpus"),
    )
    command = [
        sys.executable,
        "-m",
        "spmd_command",
        "train",
        "demo",
        "--out",
        str(folder),
        "--resume",
        "auto",
        *flags,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
    }
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while not is_done():
            if process.poll() is not None or time.perf_counter() - began > TIMEOUT:
                raise SystemExit(
                    f"{' '.join(command)} ended with {process.poll()} or took too long"
                )
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_in(folder: Path) -> int:
    """Return the number of steps in the metrics."""
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def restart(tree: Path, folder: Path) -> float:
    """Return the seconds from the start of the process to the metrics of its first step."""
    copy = folder.with_name("restarted")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / "metrics.jsonl").write_text("")
    return train_until(tree, copy, lambda: steps_in(copy) > 0)


def main() -> None:
    """Print the median seconds and, with another checkout, their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    trees = {"this": HERE, **({"other": options.against.resolve()} if options.against else {})}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, name, "run") for name in trees}
        for name, tree in trees.items():
            folders[name].parent.mkdir()
            checkpoint = folders[name] / "checkpoints" / "2"
            train_until(tree, folders[name], checkpoint.exists)
            restart(tree, folders[name])  # fills the caches of Python and of programs
        seconds: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(options.repeats):
            for name, tree in trees.items():
                seconds[name].append(restart(tree, folders[name]))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        print(
            f"{name:<6} {median:6.2f} s   of {', '.join(f'{x:.2f}' for x in sorted(seconds[name]))}"
        )
    if "other" in medians:
        ratios = [a / b for a, b in zip(seconds["this"], seconds["other"], strict=True)]
        print(f"ratio  {statistics.median(ratios):6.2f}")


if __name__ == "__main__":
    main()
