"""Divergence of training: a loss or gradient that is not finite, a loss spike, or too many skipped steps.

The reaction is decided elsewhere: the compiled step skips the update (`spmd.optim.skip_updates`), or the run stops, or
rolls back to its last checkpoint and skips the batches since, as PaLM did (Chowdhery et al., arXiv:2204.02311, 5.1).
"""

import collections
import math
import statistics
from collections.abc import Callable

from spmd.errors import DivergenceError, NonFiniteError, Problem, SpikeError
from spmd.training.loop import Hook


class DivergenceCheck(Hook):
    """Raise when a step's loss or gradient is NaN or infinite, or its loss a spike, or too many steps were skipped.

    Args:
        batch: Sequences in a global batch, to name the batch's position in the data.
        last_good: Returns the step of the newest checkpoint.
        floor: A step with a larger `loss_scale` passes: its update was skipped, and the scale is lowered.
        factor: A loss above this many medians of the last `window` losses is a spike; 0 disables the check.
        window: Losses in the median. The check starts after half as many.
        skips_in_a_row: Consecutive steps that may be skipped, by their `skipped_steps`; 0 for any number.
        skipped_share: Fraction of all steps that may be skipped, after `skips_in_a_row` of them; at the last one of
            `steps`, if it was skipped, of any number.
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
        skips_in_a_row: int = 0,
        skipped_share: float = 1.0,
        steps: int = 0,
    ) -> None:
        self.skips_in_a_row, self.skipped_share, self.steps = skips_in_a_row, skipped_share, steps
        self._skipped, self._in_a_row = 0.0, 0
        self.batch, self.skipped_batches, self.last_good = batch, skipped_batches, last_good
        self.non_finite, self.floor, self.factor = non_finite, floor, factor
        self._losses: collections.deque[float] = collections.deque(maxlen=window)
        self._enough = max(window // 2, 1)

    def on_start(self, step: int) -> None:
        """Begin to count skipped steps: of a resumed run, from its second step on."""
        self._skipped = math.inf if step else 0.0

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Raise a `DivergenceError` with the step, the batch's position and the newest checkpoint."""
        bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(metrics.get(name, 0.0))]
        if bad and self.non_finite and metrics.get("loss_scale", self.floor) <= self.floor:
            what = " and ".join(f"{name} is {metrics[name]}" for name in bad)
            fix = "lower the learning rate or --on-nan roll-back, and --resume always; or a new run --on-nan skip"
            raise NonFiniteError(f"Step {step} is not finite: {what}.", [self._problem(step, fix)], step)
        self._check_skips(step, metrics.get("skipped_steps", 0.0))
        if bad:
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

    def _check_skips(self, step: int, skipped: float) -> None:
        is_skipped = skipped > self._skipped
        self._skipped, self._in_a_row = skipped, self._in_a_row + 1 if is_skipped else 0
        share, exempt = self.skipped_share, 0 if step == self.steps else self.skips_in_a_row
        problems = []
        if self._in_a_row > self.skips_in_a_row > 0:
            detail = f"{self._in_a_row} skipped steps > {self.skips_in_a_row}"
            problems.append(Problem("recovery.skips-in-a-row", "is exceeded", detail))
        if is_skipped and skipped > max(share * step, exempt):
            detail = f"{skipped:.0f} skipped / {step} steps = {skipped / step:.3g} > {share:g}"
            problems.append(Problem("recovery.skipped-share", "is exceeded", detail))
        if problems:
            fix = "lower the learning rate and --resume always, or raise --recovery.skips-in-a-row or .skipped-share"
            problems.append(self._problem(step, fix))
            raise DivergenceError(f"Step {step} was skipped, and too many before it.", problems, step)

    def _problem(self, step: int, fix: str) -> Problem:
        good = self.last_good()
        newest = f"the newest checkpoint is of step {good}" if good is not None else "there is no checkpoint yet"
        first = (step - 1 + self.skipped_batches) * self.batch
        batch = f"its batch is sequences {first} … {first + self.batch - 1} of the shuffled data"
        return Problem(f"step {step}", batch, newest, fix)
