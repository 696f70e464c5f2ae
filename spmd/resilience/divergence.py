"""Divergence of training: a non-finite loss or gradient, a spike, too many skipped steps.

The reaction is decided elsewhere: the compiled step skips the update (`spmd.optim.skip_updates`),
or the run stops, or rolls back to its last checkpoint and skips the batches since, as PaLM did
(Chowdhery et al., arXiv:2204.02311, 5.1).
"""

import collections
import math
import statistics
from collections.abc import Callable

from spmd.errors import DivergenceError, NonFiniteError, Problem, SpikeError
from spmd.training.loop import Hook


class DivergenceCheck(Hook):
    """Raise if a loss or gradient is not finite, a loss is a spike, or too many steps are skipped.

    Args:
        batch: Sequences in a global batch, to name the batch's position in the data; 0 where
            batches have several sizes.
        last_good: Returns the step of the newest checkpoint.
        floor: A step with a larger `loss_scale` passes: its update was skipped, and the scale is
            lowered.
        factor: A loss above this many medians of the last `window` losses is a spike; 0 disables
            the check.
        window: Losses in the median. The check starts after half as many.
        skips_in_a_row: Consecutive steps that may be skipped, by their `skipped_steps`; 0 for any
            number.
        skipped_share: Fraction of all steps that may be skipped, after `skips_in_a_row` of them; at
            the last one of `steps`, if it was skipped, of any number.
        prefix: Prefix of the names of metrics, `name/` of one of several networks.
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
        prefix: str = "",
    ) -> None:
        self.batch = batch
        self.prefix = prefix
        self.skipped_batches = skipped_batches
        self.last_good = last_good
        self.non_finite = non_finite
        self.floor = floor
        self.factor = factor
        self.skips_in_a_row = skips_in_a_row
        self.skipped_share = skipped_share
        self.steps = steps
        self._skipped = 0.0
        self._in_a_row = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=window)
        self._enough = max(window // 2, 1)

    def on_start(self, step: int) -> None:
        """Begin to count skipped steps: of a resumed run, from its second step on."""
        self._skipped = 0.0
        if step:
            self._skipped = math.inf

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Raise a `DivergenceError` with the step, its batch and the newest checkpoint."""
        prefix = self.prefix
        bad = list[str]()
        for name in (f"{prefix}loss", f"{prefix}gradient_norm"):
            if not math.isfinite(metrics.get(name, 0.0)):
                bad.append(name)
        has_lowest_scale = metrics.get(f"{prefix}loss_scale", self.floor) <= self.floor
        if bad and self.non_finite and has_lowest_scale:
            what = " and ".join(f"{name} is {metrics[name]}" for name in bad)
            fix = (
                'lower the learning rate or on_nan="roll-back", and resume="always"; or a new run '
                'with on_nan="skip"'
            )
            title = f"Step {step} is not finite: {what}."
            raise NonFiniteError(title, [self._problem(step, fix)], step)
        self._check_skips(step, metrics.get(f"{prefix}skipped_steps", 0.0))
        if bad:
            return
        loss = metrics.get(f"{prefix}loss", 0.0)
        self._check_spike(step, loss)
        self._losses.append(loss)

    def _check_spike(self, step: int, loss: float) -> None:
        """Raise `SpikeError` if a loss is far above the median of the last ones."""
        if not self.factor or len(self._losses) < self._enough:
            return
        median = statistics.median(self._losses)
        if not loss > self.factor * median:
            return
        count = len(self._losses)
        what = f"the {self.prefix}loss is {loss:.4g}, and the median of the last {count} is {median:.4g}"
        ratio = f"{loss:.4g} / {median:.4g} = {loss / median:.3g}"
        detail = f"{ratio}, which is above {self.factor:g}"
        fix = 'lower the learning rate and resume="always", or recovery.on_spike="roll-back"'
        problems = [
            self._problem(step, fix),
            Problem("recovery.spike_factor", "is exceeded", detail),
        ]
        raise SpikeError(f"Step {step} is a spike: {what}.", problems, step)

    def _check_skips(self, step: int, skipped: float) -> None:
        """Raise `DivergenceError` if too many steps were skipped, `skipped` so far."""
        is_skipped = skipped > self._skipped
        self._skipped = skipped
        if is_skipped:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
        exempt = self.skips_in_a_row
        if step == self.steps:
            exempt = 0
        problems = []
        if self._in_a_row > self.skips_in_a_row > 0:
            detail = f"{self._in_a_row} skipped steps > {self.skips_in_a_row}"
            problems.append(Problem("recovery.skips_in_a_row", "is exceeded", detail))
        if is_skipped and skipped > max(self.skipped_share * step, exempt):
            share = f"{skipped:.0f} skipped / {step} steps = {skipped / step:.3g}"
            detail = f"{share} > {self.skipped_share:g}"
            problems.append(Problem("recovery.skipped_share", "is exceeded", detail))
        if problems:
            fix = (
                'lower the learning rate and resume="always", or raise recovery.skips_in_a_row or '
                "recovery.skipped_share"
            )
            problems.append(self._problem(step, fix))
            title = f"Step {step} was skipped, and too many before it."
            raise DivergenceError(title, problems, step)

    def _problem(self, step: int, fix: str) -> Problem:
        """Return the problem of a step: its batch, and the newest checkpoint."""
        good = self.last_good()
        newest = "there is no checkpoint yet"
        if good is not None:
            newest = f"the newest checkpoint is of step {good}"
        number = step - 1 + self.skipped_batches
        first = number * self.batch
        batch = f"its batch is sequences {first} … {first + self.batch - 1} of the shuffled data"
        if not self.batch:
            batch = f"its batch is number {number} of the shuffled data"
        return Problem(f"step {step}", batch, newest, fix)
