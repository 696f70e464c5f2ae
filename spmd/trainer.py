"""The training loop, one screen; everything that is not a step is a hook.

The order of work: dispatch step *n*, then read the metrics of step *n − 1*, which finished meanwhile, so the loop
never blocks on the step it has just dispatched. Where a hook wants the state (to evaluate, to save), step *n*'s own
metrics are read first, so nothing is ever saved that was not seen to be finite.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from spmd.errors import NonFiniteError, Problem
from spmd.state import TrainState
from spmd.step import TrainStep


class Hook:
    """Something that watches training. Every method does nothing unless a subclass overrides it."""

    def on_start(self, step: int) -> None:
        """Training starts; `step` steps have been taken before."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Step number `step` has finished with these metrics; later steps may be running."""

    def wants_state(self, step: int) -> bool:
        """Whether `on_state` is to be called after step number `step`."""
        return False

    def on_state(self, step: int, state: TrainState) -> None:
        """Step number `step` has finished with `state`, which is valid during this call only."""


def fit(
    state: TrainState,
    step: TrainStep,
    batches: Iterable[Any],
    *,
    steps: int,
    start: int = 0,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Takes the steps `start + 1 … steps`.

    Args:
        state: The state after `start` steps; it is donated.
        step: From `make_train_step`.
        batches: Global batches, already on the devices; the first one is for step `start + 1`.
        steps: The number of the last step.
        start: How many steps `state` has behind it.
        hooks: Called in order.

    Returns:
        The state after the last step.
    """
    unread: tuple[int, Any] | None = None

    def report() -> None:
        nonlocal unread
        if unread is not None:
            number, metrics = unread
            unread = None
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            for hook in hooks:
                hook.on_metrics(number, values)

    for hook in hooks:
        hook.on_start(start)
    with jax.transfer_guard("disallow"):  # inside the loop an implicit transfer is an error
        for number, batch in zip(range(start + 1, steps + 1), batches, strict=False):
            state, metrics = step(state, batch)
            report()
            unread = number, metrics
            wanting = [hook for hook in hooks if hook.wants_state(number)]
            if wanting:
                report()
            with jax.transfer_guard("allow"):
                for hook in wanting:
                    hook.on_state(number, state)
        report()
    return state


class StopOnNonFinite(Hook):
    """Stops training when the loss or the gradient is NaN or infinite.

    Args:
        batch: Sequences in a global batch, to name the batch's position in the data.
        last_good: Says where training can go on from.
        floor: A step with a larger `loss_scale` is let through: it was left out, and the scale is lowered.
    """

    def __init__(self, batch: int, last_good: Any = lambda: None, floor: float = 0.0) -> None:
        self.batch, self.last_good, self.floor = batch, last_good, floor

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Raises `NonFiniteError` with the step, the batch's position and the last good checkpoint."""
        bad = _non_finite(metrics)
        if bad and metrics.get("loss_scale", self.floor) <= self.floor:
            good = self.last_good()
            kept = f"the last good checkpoint is of step {good}" if good is not None else "there is no checkpoint yet"
            first = (step - 1) * self.batch
            raise NonFiniteError(
                f"Training stopped: {' and '.join(f'{name} is {metrics[name]}' for name in bad)}.",
                [
                    Problem(
                        f"step {step}",
                        f"its batch is sequences {first} … {first + self.batch - 1} of the shuffled data",
                        kept,
                        "lower the learning rate and --resume, or --on-nan skip to leave such steps out",
                    )
                ],
            )


def _non_finite(metrics: dict[str, float]) -> list[str]:
    return [name for name in ("loss", "gradient_norm") if not abs(metrics.get(name, 0.0)) < float("inf")]
