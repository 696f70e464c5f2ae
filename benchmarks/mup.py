"""Best learning rate of a narrow and of a wide model, with muP and without.

    python -m benchmarks.mup --results results.jsonl

Two layers of Llama at widths of 64 and 512 are trained on the corpus of the demo, at rates a factor
of two apart. With muP the wide one has the best rate of the narrow one, or its neighbour; without
(the control) it does not. Losses are means over the last tenth of the steps and over seeds; runs in
the results are not repeated. The exit code is 1 if either is not so.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import spmd
from spmd.data.loader import Windows, batches, load_corpus
from spmd.run.build import config_mesh, make_setup
from spmd.run.config import TrainConfig
from spmd.run.load_config import load_config
from spmd.sharding.mesh import MeshShape
from spmd.training.state import init_state

HEAD_DIM = 32
NARROW, WIDE = 64, 512
RATES = tuple(2.0**power for power in range(-11, -3))
BATCH, SEQUENCE = 8, 64
PARAMETRIZATIONS = ("muP", "standard")


def sizes(width: int) -> dict[str, int]:
    """Return the fields of a model of some width; the size of its heads is the same for all."""
    heads = width // HEAD_DIM
    return {"d_model": width, "heads": heads, "kv_heads": heads // 2, "d_ff": 3 * width}


def make_config(
    width: int, parametrization: str, rate: float, seed: int, steps: int
) -> TrainConfig:
    """Return the config of one run."""
    config = load_config("demo")
    model = dataclasses.replace(config.model, layers=2, **sizes(width))
    rows = tuple(f"{field}={value}" for field, value in sizes(NARROW).items())
    if parametrization == "standard" or width == NARROW:
        rows = ()
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate, warmup_steps=steps // 10)
    return dataclasses.replace(
        config,
        model=model,
        mesh=MeshShape(),
        optimizer=optimizer,
        data=dataclasses.replace(config.data, batch=BATCH, sequence=SEQUENCE),
        seed=seed,
        steps=steps,
        mup=rows,
    )


def train(config: TrainConfig) -> float:
    """Train, and return the mean loss of the last tenth of the steps; infinite if it is none."""
    setup = make_setup(config, config_mesh(config))
    windows = Windows(load_corpus(config.data).train, config.data.sequence)
    sharding = setup.plan.batch_sharding("tokens")
    state = init_state(setup.plan, config.seed)
    losses = list[float]()
    given = batches(
        windows,
        batch=config.data.batch,
        seed=config.seed,
        start=0,
        steps=config.steps,
        sharding=sharding,
    )
    for batch in given:
        state, metrics = setup.step(state, batch)
        losses.append(float(metrics["loss"]))
    last = losses[-(config.steps // 10) :]
    loss = statistics.mean(last)
    if not math.isfinite(loss):
        return math.inf
    return loss


Row = Mapping[str, Any]


def best_rates(rows: list[Row]) -> dict[tuple[str, int], float]:
    """Return (parametrization, width) → the rate with the smallest mean loss."""
    losses = collections.defaultdict[tuple[str, int], dict[float, list[float]]](dict)
    for row in rows:
        of_rate = losses[row["parametrization"], row["width"]]
        of_rate.setdefault(row["rate"], []).append(row["loss"])
    best = dict[tuple[str, int], float]()
    for key, of_rate in losses.items():
        best[key] = min(of_rate, key=lambda rate: statistics.mean(of_rate[rate]))
    return best


def table(rows: list[Row]) -> str:
    """Return a line for each parametrization and width, with the loss at each rate."""
    heads = " | ".join(f"{rate:.4f}" for rate in RATES)
    lines = [f"| parametrization | width | {heads} |", f"|---|---|{'---|' * len(RATES)}"]
    best = best_rates(rows)
    for key in sorted(best, key=lambda key: (key[1], key[0])):
        parametrization, width = key
        cells = list[str]()
        for rate in RATES:
            losses = list[float]()
            for row in rows:
                if (row["parametrization"], row["width"], row["rate"]) == (*key, rate):
                    losses.append(row["loss"])
            cell = "–"
            if losses:
                cell = f"{statistics.mean(losses):.3f}"
            if rate == best[key]:
                cell = f"**{cell}**"
            cells.append(cell)
        lines.append(f"| {parametrization} | {width} | {' | '.join(cells)} |")
    return "\n".join(lines)


def transfers(rows: list[Row], parametrization: str) -> bool:
    """Return whether the best rate at the large width is that of the small one, or a neighbour."""
    best = best_rates(rows)
    ratio = best[parametrization, WIDE] / best["muP", NARROW]
    return 0.5 <= ratio <= 2


def main() -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    spmd.simulate_devices(1)
    text = ""
    if arguments.results.exists():
        text = arguments.results.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    done = {
        tuple(row[name] for name in ("parametrization", "width", "rate", "seed")) for row in rows
    }
    runs = [("muP", NARROW), *itertools.product(PARAMETRIZATIONS, [WIDE])]
    for seed, (parametrization, width), rate in itertools.product(arguments.seeds, runs, RATES):
        if (parametrization, width, rate, seed) in done:
            continue
        loss = train(make_config(width, parametrization, rate, seed, arguments.steps))
        row = {"parametrization": parametrization, "width": width, "rate": rate, "seed": seed}
        rows.append({**row, "steps": arguments.steps, "loss": loss})
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    if transfers(rows, "muP") and not transfers(rows, "standard"):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
