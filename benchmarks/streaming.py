"""Compare tokens per second of streamed text with those of text in memory, in one process, interleaved.

    python -m benchmarks.streaming demo --rounds 9 --steps 60

Each round trains the same compiled step twice: on text that was tokenized before, and on text that
is tokenized meanwhile, into a cache that is empty at the start of the round. Which of the two is
first alternates. A round's time begins after its first batch, whose wait is printed on its own. The
result is the ratio of the medians.
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import tyro

from spmd.data.loader import ordered_batches
from spmd.data.text_dataset import open_text
from spmd.distributed.initialize import initialize
from spmd.run.build import config_mesh, make_setup
from spmd.run.config import TrainConfig
from spmd.run.load_config import load_config
from spmd.training.state import TrainState, init_state
from spmd.training.step import TrainStep

BAR = 0.98


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command."""

    config: tyro.conf.Positional[str] = "demo"
    """Config file, or a shipped config."""
    rounds: int = 9
    """Rounds of each kind."""
    steps: int = 60
    """Steps of a round."""


def run_round(
    config: TrainConfig,
    step: TrainStep,
    state: TrainState,
    folder: Path,
    *,
    streaming: bool,
    steps: int,
) -> tuple[TrainState, float, float]:
    """Train for some steps.

    Return the state, tokens per second, and seconds until the first batch.
    """
    data = dataclasses.replace(config.data, streaming=streaming, cache=str(folder))
    began = time.perf_counter()
    order = open_text(data).order(config.seed)
    sharding = step.plan.batch_sharding("tokens")
    ahead = {"threads": data.threads, "prefetch": data.prefetch}
    with ordered_batches(
        order, batch=data.batch, sharding=sharding, start=0, steps=steps + 1, **ahead
    ) as batches:
        state, _ = step(state, next(batches))
        jax.block_until_ready(state)
        first = time.perf_counter() - began
        began = time.perf_counter()
        for batch in batches:
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
    return state, steps * data.batch * data.sequence / seconds, first


def main(options: Options) -> None:
    """Print the rate of each round, and the ratio of the medians."""
    config = load_config(options.config)
    initialize(config.devices)
    setup = make_setup(config, config_mesh(config))
    state = init_state(setup.plan, config.seed)
    with tempfile.TemporaryDirectory() as memory:
        rates: dict[bool, list[float]] = {False: [], True: []}
        # the first round compiles, and tokenizes what is in memory
        for number in range(-1, options.rounds):
            for streaming in (number % 2 == 0, number % 2 != 0):
                with tempfile.TemporaryDirectory() as empty:
                    folder = Path(empty if streaming else memory)
                    state, rate, first = run_round(
                        config, setup.step, state, folder, streaming=streaming, steps=options.steps
                    )
                if number >= 0:
                    rates[streaming].append(rate)
                    kind = "streamed " if streaming else "in memory"
                    print(
                        f"{kind}  {rate:>10,.0f} tokens/s   first step after {first:.2f} s",
                        flush=True,
                    )
    streamed, in_memory = statistics.median(rates[True]), statistics.median(rates[False])
    ratio = streamed / in_memory
    verdict = "at least" if ratio >= BAR else "below"
    print(f"\nmedians: {streamed:,.0f} / {in_memory:,.0f} tokens/s = {ratio:.4f}, {verdict} {BAR}")


if __name__ == "__main__":
    main(tyro.cli(Options))
