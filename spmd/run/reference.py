"""Log-probabilities of a run's pairs under the reference model: the model before its first step.

They are computed once, by a forward pass on the mesh and under the plan of the run, so that no second
model is in memory while it trains.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmd.data.loader import RandomAccessDataset
from spmd.data.log_probs import LogProbs
from spmd.data.packed_pairs import PackedPairs
from spmd.observe.metrics import human_duration
from spmd.observe.spinner import spinner
from spmd.run.build import TrainSetup
from spmd.run.hooks import Telemetry
from spmd.run.init_from import initial_state
from spmd.run.token_scores import TokenScorer
from spmd.training.evaluated_params import evaluated_params


def pairs_with_reference(parts: Iterable[RandomAccessDataset]) -> list[PackedPairs]:
    """Return rows with places for a reference model's log-probabilities, each once."""
    found = dict[LogProbs, PackedPairs]()
    for part in parts:
        if isinstance(part, PackedPairs) and part.reference is not None:
            found.setdefault(part.reference, part)
    return list(found.values())


def keep_references(parts: Iterable[PackedPairs], folder: Path) -> None:
    """Set the folder of rows' log-probabilities: they are read from there unless computed anew."""
    for part in parts:
        assert part.reference is not None, "others have no places"
        part.reference.keep_in(folder)


def compute_references(
    setup: TrainSetup, parts: Sequence[PackedPairs], state: Any, telemetry: Telemetry
) -> None:
    """Compute the log-probabilities of rows under the model of an initial state, and write them."""
    doing = "computing log-probabilities of the reference model"
    shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if jax.process_index() == 0:
        shown = spinner(doing, plain=True)
    began = time.perf_counter()
    with telemetry.during("evaluate", doing), shown:
        for part, done in fill_references(setup, parts, state):
            telemetry.watchdog.reset(f"{done} rows of {part.name} under the reference model")
            if jax.process_index() == 0 and done == part.rows:
                part.log_probs.save()
    rows = sum(map(len, parts))
    took = human_duration(time.perf_counter() - began)
    telemetry.note(f"log-probabilities of the reference model: {rows:,} sequences in {took}")
    telemetry.lease.renew_at_once()


def find_references(
    setup: TrainSetup, parts: Iterable[PackedPairs], folder: Path, rows: int = 0
) -> None:
    """Give rows the log-probabilities in a folder; compute missing ones.

    The reference model is made again from the config: with the parameters of `init`, or the seed.

    Args:
        rows: The first rows of each part to compute; 0 for all.
    """
    listed = list(parts)
    keep_references(listed, folder)
    missing = [part for part in listed if part.reference and not part.reference.path.exists()]
    if missing:
        for _ in fill_references(setup, missing, initial_state(setup), rows):
            pass


class Filling(NamedTuple):
    """Log-probabilities that are computed, of so many rows."""

    name: str
    rows: int
    log_probs: LogProbs


def fill_references(
    setup: TrainSetup, parts: Iterable[PackedPairs], state: Any, rows: int = 0
) -> Iterator[tuple[Filling, int]]:
    """Fill in the log-probabilities of rows; yield each part with the number of its rows done.

    All processes take part, and each has all numbers. `rows` is as in `find_references`.
    """
    params = evaluated_params(setup.plan, state)
    scorer = TokenScorer(setup)
    for part in parts:
        assert part.reference is not None, "rows with places"
        plain = dataclasses.replace(part, reference=None)
        filling = Filling(part.reference.name, min(rows or len(part), len(part)), part.reference)
        for scores in scorer.score(params, state.variables, plain, rows):
            part.reference.fill(scores.places, scores.log_probs)
            yield filling, scores.rows_done
