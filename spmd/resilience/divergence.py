"""Steps whose numbers cannot be trusted: a loss or gradient that is not finite, a loss that leaps.

What is done about one is decided elsewhere: the compiled step can skip its update (`spmd.optim.skip_updates`), or the
run stops, or rolls back to its last checkpoint and skips the batches since, as PaLM was trained (Chowdhery et al.,
arXiv:2204.02311, section 5.1).
"""

import collections
import math
import statistics
from collections.abc import Callable

from spmd.errors import NonFiniteError, Problem, SpikeError
from spmd.train.loop import Hook


class DivergenceCheck(Hook):
    """Raises when a step's loss or gradient is NaN or infinite, or its loss a spike.

    Args:
        batch: Sequences in a global batch, to name the batch's position in the data.
        skipped_batches: How many batches of the data were passed over before.
        last_good: Says where training can go on from.
        non_finite: Whether to look for what is not finite.
        floor: A step with a larger `loss_scale` is let through: it was left out, and the scale is lowered.
        factor: A loss above this many medians of the last `window` losses is a spike; 0: none is.
        window: How many losses the median is over; before half as many were seen, no loss is a spike.
    """

    def __init__(
        self,
        batch: int,
        *,
        skipped_batches: int = 0,
        last_good: Callable[[], int | None] = lambda: None,
        non_finite: bool = True,
        floor: float = 0.0,
        factor: float = 0.0,
        window: int = 50,
    ) -> None:
        self.batch, self.skipped_batches, self.last_good = batch, skipped_batches, last_good
        self.non_finite, self.floor, self.factor = non_finite, floor, factor
        self._losses: collections.deque[float] = collections.deque(maxlen=window)
        self._enough = max(window // 2, 1)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Raises `NonFiniteError` or `SpikeError` with the step, the batch's position and the newest checkpoint."""
        bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(metrics.get(name, 0.0))]
        if bad:
            if self.non_finite and metrics.get("loss_scale", self.floor) <= self.floor:
                what = " and ".join(f"{name} is {metrics[name]}" for name in bad)
                fix = "lower the learning rate and --resume always, or --on-nan skip or roll-back"
                raise NonFiniteError(f"Step {step} is not finite: {what}.", [self._problem(step, fix)], step)
            return
        loss = metrics.get("loss", 0.0)
        if self.factor and len(self._losses) >= self._enough:
            usual = statistics.median(self._losses)
            if loss > self.factor * usual:
                what = f"the loss is {loss:.4g}, and the median of the last {len(self._losses)} is {usual:.4g}"
                arithmetic = f"{loss:.4g} / {usual:.4g} = {loss / usual:.3g}, which is above {self.factor:g}"
                fix = "lower the learning rate and --resume always, or --recovery.on-spike roll-back"
                raise SpikeError(
                    f"Step {step} is a spike: {what}.",
                    [self._problem(step, fix), Problem("recovery.spike-factor", "is exceeded", arithmetic)],
                    step,
                )
        self._losses.append(loss)

    def _problem(self, step: int, fix: str) -> Problem:
        good = self.last_good()
        kept = f"the newest checkpoint is of step {good}" if good is not None else "there is no checkpoint yet"
        first = (step - 1 + self.skipped_batches) * self.batch
        batch = f"its batch is sequences {first} … {first + self.batch - 1} of the shuffled data"
        return Problem(f"step {step}", batch, kept, fix)
