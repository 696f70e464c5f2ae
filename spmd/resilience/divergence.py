"""Divergence of training: a loss or gradient that is not finite, or a loss spike.

The reaction is decided elsewhere: the compiled step skips the update (`spmd.optim.skip_updates`), or the run stops, or
rolls back to its last checkpoint and skips the batches since, as PaLM did (Chowdhery et al., arXiv:2204.02311, 5.1).
"""

import collections
import math
import statistics
from collections.abc import Callable

from spmd.errors import NonFiniteError, Problem, SpikeError
from spmd.train.loop import Hook


class DivergenceCheck(Hook):
    """Raise when a step's loss or gradient is NaN or infinite, or its loss a spike.

    Args:
        batch: Sequences in a global batch, to name the batch's position in the data.
        last_good: Returns the step of the newest checkpoint.
        floor: A step with a larger `loss_scale` passes: its update was skipped, and the scale is lowered.
        factor: A loss above this many medians of the last `window` losses is a spike; 0 disables the check.
        window: Losses in the median. The check starts after half as many.
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
        """Raise `NonFiniteError` or `SpikeError` with the step, the batch's position and the newest checkpoint."""
        bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(metrics.get(name, 0.0))]
        if bad:
            if self.non_finite and metrics.get("loss_scale", self.floor) <= self.floor:
                what = " and ".join(f"{name} is {metrics[name]}" for name in bad)
                fix = "lower the learning rate and --resume always, or --on-nan skip or roll-back"
                raise NonFiniteError(f"Step {step} is not finite: {what}.", [self._problem(step, fix)], step)
            return
        loss = metrics.get("loss", 0.0)
        if self.factor and len(self._losses) >= self._enough:
            median = statistics.median(self._losses)
            if loss > self.factor * median:
                what = f"the loss is {loss:.4g}, and the median of the last {len(self._losses)} is {median:.4g}"
                detail = f"{loss:.4g} / {median:.4g} = {loss / median:.3g}, which is above {self.factor:g}"
                fix = "lower the learning rate and --resume always, or --recovery.on-spike roll-back"
                problems = [self._problem(step, fix), Problem("recovery.spike-factor", "is exceeded", detail)]
                raise SpikeError(f"Step {step} is a spike: {what}.", problems, step)
        self._losses.append(loss)

    def _problem(self, step: int, fix: str) -> Problem:
        good = self.last_good()
        newest = f"the newest checkpoint is of step {good}" if good is not None else "there is no checkpoint yet"
        first = (step - 1 + self.skipped_batches) * self.batch
        batch = f"its batch is sequences {first} … {first + self.batch - 1} of the shuffled data"
        return Problem(f"step {step}", batch, newest, fix)
