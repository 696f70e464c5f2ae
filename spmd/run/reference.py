"""Log-probabilities of a run's pairs under the reference model: the model before its first step.

They are computed once, by a forward pass on the mesh and under the plan of the run, so that no second
model is in memory while it trains.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spmd.data.loader import RandomAccessDataset, evaluation_batches
from spmd.data.log_probs import LogProbs
from spmd.data.packed_pairs import PackedPairs
from spmd.gradients.losses import (
    ModelLoss,
    Sums,
    take_arrays,
    token_inputs,
    token_losses,
)
from spmd.model_interface.model import Outputs
from spmd.observe.metrics import human_duration
from spmd.observe.spinner import spinner
from spmd.run.build import TrainSetup, in_stages
from spmd.run.hooks import Telemetry
from spmd.run.init_from import initial_state
from spmd.training.evaluated_params import evaluated_params
from spmd.training.step import make_eval_step

REFERENCE = "reference"
"""Folder in a run with the log-probabilities of its pairs."""


def pairs_with_reference(parts: Iterable[RandomAccessDataset]) -> list[PackedPairs]:
    """Return rows with places for a reference model's log-probabilities, each once."""
    found = dict[LogProbs, PackedPairs]()
    for part in parts:
        if isinstance(part, PackedPairs) and part.reference is not None:
            found.setdefault(part.reference, part)
    return list(found.values())


def keep_references(parts: Iterable[PackedPairs], run: Path) -> None:
    """Set the folder of rows' log-probabilities: they are read from there unless computed anew."""
    for part in parts:
        assert part.reference is not None, "others have no places"
        part.reference.keep_in(run / REFERENCE)


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
        for part in parts:
            assert part.reference is not None, "others have no places"
            name = part.reference.name
            for done in fill_reference(setup, part, state):
                telemetry.watchdog.reset(f"{done} rows of {name} under the reference model")
            if jax.process_index() == 0:
                part.reference.save()
    rows = sum(map(len, parts))
    took = human_duration(time.perf_counter() - began)
    telemetry.note(f"log-probabilities of the reference model: {rows:,} sequences in {took}")
    telemetry.lease.renew_at_once()


def find_references(setup: TrainSetup, parts: Iterable[PackedPairs], run: Path) -> None:
    """Give rows the log-probabilities in a run's folder; compute missing ones.

    The reference model is made again from the config: with the parameters of `init`, or the seed.
    """
    listed = list(parts)
    keep_references(listed, run)
    missing = [part for part in listed if part.reference and not part.reference.path.exists()]
    if not missing:
        return
    state = initial_state(setup)
    for part in missing:
        for _ in fill_reference(setup, part, state):
            pass


def fill_reference(setup: TrainSetup, part: PackedPairs, state: Any) -> Iterator[int]:
    """Fill in the log-probabilities of rows, and yield the number of rows done.

    All processes take part, and each has all numbers.
    """
    assert part.reference is not None, "rows with places"
    plan = setup.plan
    size = setup.config.data.batch
    log_probs = make_eval_step(plan, in_stages(_loss(setup, size), setup.schedule))
    params = evaluated_params(plan, state)
    batches = evaluation_batches(
        _NumberedRows(part, size),
        batch=size,
        sharding=plan.batch_sharding("tokens"),
        tokens_at_most=len(part) * part.sequence,
    )
    for number, batch in enumerate(batches):
        arrays = log_probs(params, state.variables, batch)["arrays"]
        found, columns = multihost_utils.process_allgather(
            (arrays["log_probs"], arrays["columns"]), tiled=True
        )
        in_order = np.zeros_like(found)
        np.put_along_axis(in_order, columns, found, axis=1)
        first = number * size
        indices = np.arange(first, min(first + size, len(part)))
        places = part.targets(indices)
        is_target = places >= 0
        part.reference.fill(places[is_target], in_order[: len(indices)][is_target])
        yield int(indices[-1]) + 1


class _NumberedRows:
    """Rows of pairs without log-probabilities, with the number of each row and of each column."""

    def __init__(self, pairs: PackedPairs, batch: int) -> None:
        self._pairs = pairs
        self._batch = batch

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._pairs.sequence

    def __len__(self) -> int:
        return len(self._pairs)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of some rows, in batches from the first on."""
        found = self._pairs.rows(indices, with_reference=False)
        columns = np.arange(self.sequence, dtype=np.int32)
        found["columns"] = np.tile(columns, (len(indices), 1))
        found["rows"] = (indices % self._batch).astype(np.int32)
        return found


def _loss(setup: TrainSetup, rows: int) -> ModelLoss:
    """Return a loss with the log-probabilities of a batch as its arrays."""
    sums = functools.partial(_place_log_probs, rows=rows, chunk=setup.config.logits_chunk)
    return ModelLoss(setup.plan.model, token_inputs, sums, train=False, weighted=True)


def _place_log_probs(outputs: Outputs, batch: Any, *, rows: int, chunk: int) -> Sums:
    """Return the log-probabilities of targets, `[rows, seq]`, and their columns.

    As sums, zero in the rows of other microbatches, they pass through a pipeline. A sequence over
    several devices may be in another order.
    """
    targets, weights, numbers, columns = take_arrays(batch, "targets", "weights", "rows", "columns")
    log_probs = -token_losses(outputs.logits, targets, chunk=chunk)
    known = jnp.where(weights > 0, log_probs, 0.0)
    is_row = numbers[:, None, None] == jnp.arange(rows)[None, :, None]  # [batch, row, 1]

    def placed(values: jax.Array) -> jax.Array:
        zero = jnp.zeros((), values.dtype)
        return jnp.where(is_row, values[:, None], zero).sum(axis=0)

    arrays = {"log_probs": placed(known), "columns": placed(columns)}
    return {"loss": jnp.float32(0), "weight": weights.sum(), "arrays": arrays}
