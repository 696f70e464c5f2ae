"""Log-probabilities of single tokens of a text, by a forward pass on the mesh of a setup."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spmd.data.loader import RandomAccessDataset, evaluation_batches
from spmd.gradients.losses import ModelLoss, Sums, take_arrays, token_inputs, token_losses
from spmd.model_interface.model import Outputs
from spmd.run.build import TrainSetup, in_stages
from spmd.training.step import make_eval_step


class TargetedRows(RandomAccessDataset, Protocol):
    """Rows with a place for each target: packed documents or pairs."""

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Return the place of each target among all tokens, −1 of padding."""


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Scores of the targets of a batch, all `[targets]`; of targets without a weight they are 0.

    Attributes:
        places: Place of each target among all tokens.
        log_probs: Log-probability after the tokens before it, in nats, float32.
        correct: Whether it is the most likely token.
        rows_done: Number of rows so far.
    """

    places: np.ndarray
    log_probs: np.ndarray
    correct: np.ndarray
    rows_done: int


class TokenScorer:
    """The compiled forward pass of a setup, with the scores of single tokens as its result.

    Every shape of rows is compiled once.

    Args:
        setup: Its plan and schedule are used, and its batch size unless `batch` is given.
    """

    def __init__(self, setup: TrainSetup, batch: int = 0) -> None:
        self._plan = setup.plan
        self._batch = batch or setup.config.data.batch
        sums = functools.partial(_place_scores, rows=self._batch, chunk=setup.config.logits_chunk)
        loss = ModelLoss(setup.plan.model, token_inputs, sums, train=False, weighted=True)
        self._step: Callable[..., Sums] = make_eval_step(
            setup.plan, in_stages(loss, setup.schedule)
        )

    def score(
        self, params: Any, variables: Any, rows: TargetedRows, count: int = 0
    ) -> Iterator[TokenScores]:
        """Yield the scores of each batch of the first `count` rows, in order; 0 for all.

        All processes take part, and each has all scores.
        """
        count = min(count or len(rows), len(rows))
        batches = evaluation_batches(
            _NumberedRows(rows, self._batch),
            batch=self._batch,
            sharding=self._plan.batch_sharding("tokens"),
            tokens_at_most=count * rows.sequence,
        )
        for number, batch in enumerate(batches):
            arrays = self._step(params, variables, batch)["arrays"]
            found = multihost_utils.process_allgather(arrays, tiled=True)
            first = number * self._batch
            indices = np.arange(first, min(first + self._batch, count))
            places = rows.targets(indices)
            is_target = places >= 0
            columns = found["columns"]
            log_probs = _in_order(found["log_probs"], columns)[: len(indices)]
            correct = _in_order(found["correct"], columns)[: len(indices)] > 0
            done = first + len(indices)
            yield TokenScores(
                places[is_target], log_probs[is_target], correct[is_target], rows_done=done
            )


def _in_order(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return values `[row, column]` in the order of the columns."""
    ordered = np.zeros_like(values)
    np.put_along_axis(ordered, columns, values, axis=1)
    return ordered


class _NumberedRows:
    """Rows with the number of each row in its batch, and of each column."""

    def __init__(self, rows: TargetedRows, batch: int) -> None:
        self._rows = rows
        self._batch = batch

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self._rows.sequence

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of some rows, in batches from the first on."""
        found = self._rows.rows(indices)
        columns = np.arange(self.sequence, dtype=np.int32)
        found["columns"] = np.tile(columns, (len(indices), 1))
        found["rows"] = (indices % self._batch).astype(np.int32)
        return found


def _place_scores(outputs: Outputs, batch: Any, *, rows: int, chunk: int) -> Sums:
    """Return log-probabilities of targets, `[rows, seq]`, which are predicted, and their columns.

    As sums, zero in the rows of other microbatches, they pass through a pipeline. A sequence over
    several devices may be in another order.
    """
    targets, weights, numbers, columns = take_arrays(batch, "targets", "weights", "rows", "columns")
    losses, correct = token_losses(outputs.logits, targets, chunk=chunk)
    is_row = numbers[:, None, None] == jnp.arange(rows)[None, :, None]  # [batch, row, 1]

    def placed(values: jax.Array) -> jax.Array:
        zero = jnp.zeros((), values.dtype)
        return jnp.where(is_row, values[:, None], zero).sum(axis=0)

    arrays = {
        "log_probs": placed(jnp.where(weights > 0, -losses, 0.0)),
        "correct": placed(jnp.where(weights > 0, correct, 0.0)),
        "columns": placed(columns),
    }
    return {"loss": jnp.float32(0), "weight": weights.sum(), "arrays": arrays}
