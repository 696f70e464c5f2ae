"""How long a save keeps the training loop waiting, as a part of one step, in one JSON line.

    python -m benchmarks.save_stall demo --steps 40 --every 8
    python -m benchmarks.save_stall benchmarks/llama_20m.py --steps 25 --bucket

`blocked` is what a step is late by when it is followed by a save: the wait for the copies to the
host. What follows is written in the background, and where it shares processors with training, as
simulated devices do, it makes those steps
slower: `beside` is the median of the steps that run while a save is written, `between` that of all
others.

With `--bucket`, checkpoints are saved to S3's interface, of moto's server on this machine. `more_host_memory`
is how far the memory of this process rose above that before the first save, in states.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks.bucket_saves import start_server
from spmd.checkpoint.manager import CheckpointManager
from spmd.data.loader import Windows, batches, load_corpus
from spmd.distributed.initialize import initialize
from spmd.run.build import TrainSetup, config_mesh, make_setup
from spmd.run.load_config import load_config
from spmd.storage.address import Location, parse_address
from spmd.training.loop import Hook, fit
from spmd.training.state import TrainState, init_state


class TimedSave(Hook):
    """Saves every so many steps and after the last.

    Takes when each step was finished and how long saves block.
    """

    def __init__(self, checkpoints: CheckpointManager, every: int, steps: int) -> None:
        self.checkpoints, self.every, self.steps = checkpoints, every, steps
        self.blocked, self.finished = dict[int, float](), dict[int, float]()
        self.bytes = 0
        self.memory_before, self.memory_most = 0, 0
        threading.Thread(target=self.watch_memory, daemon=True).start()

    def watch_memory(self) -> None:
        while True:
            if self.blocked:
                self.memory_most = max(self.memory_most, resident_bytes())
            time.sleep(0.005)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.finished[step] = time.perf_counter()

    def wants_state(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def on_state(self, step: int, state: TrainState) -> None:
        # the step ends here: its metrics are there before its last device is done
        jax.block_until_ready(state)
        if not self.blocked:
            self.memory_before = resident_bytes()
            self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        began = time.perf_counter()
        self.checkpoints.save(step, state, {"step": step}, {})
        self.blocked[step] = time.perf_counter() - began


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def place(in_bucket: bool) -> Iterator[Location]:
    """Yield a folder for checkpoints, or a path in the bucket of a server."""
    if in_bucket:
        process, url = start_server()
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "a"}
        try:
            yield parse_address(f"s3://bucket/run?endpoint={url}")
        finally:
            process.kill()
            process.wait()
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)


def measure(setup: TrainSetup, directory: Location) -> dict[str, object]:
    """Trains and saves; seconds."""
    config, windows = (
        setup.config,
        Windows(load_corpus(setup.config.data).train, setup.config.data.sequence),
    )
    written: list[float] = []
    with CheckpointManager(directory, max_to_keep=config.max_to_keep, owner=1) as checkpoints:
        watch = TimedSave(checkpoints, config.checkpoint_every, config.steps)
        sharding = setup.plan.batch_sharding("tokens")
        stream = batches(
            windows,
            batch=config.data.batch,
            sharding=sharding,
            seed=config.seed,
            start=0,
            steps=config.steps,
        )
        with stream:
            fit(
                init_state(setup.plan, config.seed),
                setup.step,
                stream,
                steps=config.steps,
                hooks=[watch],
            )
        began = time.perf_counter()
        checkpoints.wait()
        written.append(time.perf_counter() - began)
    # The first steps after the start, with what they compile and load, are not counted.
    taken = {n: watch.finished[n] - watch.finished[n - 1] for n in range(4, config.steps + 1)}
    after = {n: seconds for n, seconds in taken.items() if n - 1 in watch.blocked}
    beside = [seconds - watch.blocked[n - 1] for n, seconds in after.items()]
    between = statistics.median(seconds for n, seconds in taken.items() if n not in after)
    blocked = list(watch.blocked.values())[1:]  # the first one imports and compiles what copies
    return {
        "bytes": watch.bytes,
        "step_s": between,
        "blocked_s": blocked,
        "blocked_of_a_step": round(statistics.median(blocked) / between, 4),
        "worst_of_a_step": round(max(blocked) / between, 4),
        "first_blocked_s": next(iter(watch.blocked.values())),
        "step_beside_a_save_s": statistics.median(beside),
        "left_to_write_at_the_end_s": written[0],
        "more_host_memory": round((watch.memory_most - watch.memory_before) / watch.bytes, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="demo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--bucket", action="store_true", help="save to a server of S3")
    options = parser.parse_args()
    config = dataclasses.replace(
        load_config(options.config), steps=options.steps, checkpoint_every=options.every
    )
    initialize(config.devices)
    with place(options.bucket) as directory:
        line = measure(make_setup(config, config_mesh(config)), directory)
    print(
        json.dumps(
            {
                "config": options.config,
                "steps": options.steps,
                "every": options.every,
                "bucket": options.bucket,
                **line,
            }
        )
    )


if __name__ == "__main__":
    main()
