"""The training loop; everything that is not a step is a hook.

The loop dispatches step *n*, then reads the metrics of step *n − 1*, so it never blocks on the step just dispatched.
Where a hook wants the state, step *n*'s own metrics are read first: nothing is saved before it is known to be finite.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from spmd.train.state import TrainState
from spmd.train.step import TrainStep


class Hook:
    """Base of hooks of the training loop; a method does nothing unless a subclass overrides it."""

    def on_start(self, step: int) -> None:
        """Run before the first step; `step` steps have been taken before."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the metrics of a finished step; later steps may be running."""

    def on_dispatch(self, step: int) -> None:
        """Run after a step is dispatched and before the next is: here processes may exchange values."""

    def wants_stop(self, step: int) -> bool:
        """Return whether to stop after this step, which has been dispatched; called before `wants_state`."""
        return False

    def wants_state(self, step: int) -> bool:
        """Return whether to call `on_state` after this step."""
        return False

    def on_state(self, step: int, state: TrainState) -> None:
        """Receive the state after a step, which is valid during this call only."""


def fit(
    state: TrainState,
    step: TrainStep,
    batches: Iterable[Any],
    *,
    steps: int,
    start: int = 0,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Take the steps `start + 1 … steps`; return the state after the last one, or after that at which a hook stopped.

    Args:
        state: The state after `start` steps; it is donated.
        batches: Global batches, already on the devices; the first one is for step `start + 1`.
        hooks: Called in order.
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
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = step(state, batch)
            report()
            unread = number, metrics
            for hook in hooks:
                hook.on_dispatch(number)
            stop = any([hook.wants_stop(number) for hook in hooks])
            if wanting := [hook for hook in hooks if hook.wants_state(number)]:
                report()
            with jax.transfer_guard("allow"):
                for hook in wanting:
                    hook.on_state(number, state)
            if stop:
                break
        report()
    return state
