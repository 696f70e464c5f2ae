"""The training loop; everything that is not a step is a hook.

The loop dispatches step *n*, then reads the metrics of step *n − 1*, so it never blocks on the step just dispatched.
Where a hook wants the state, step *n*'s own metrics are read first: nothing is saved before it is known to be finite.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from spmd.errors import BatchesEndedError, ConfigError, Problem, check_call, check_type, did_you_mean, shown
from spmd.gradients.losses import split_arrays
from spmd.training.state import TrainState
from spmd.training.step import TrainStep


class Hook:
    """Base of hooks of the training loop; a method does nothing unless a subclass overrides it.

    Names that begin with `on_` or `wants_` are for these methods: a subclass with another one is an error.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods, problems = {name: f for name, f in vars(Hook).items() if not name.startswith("_")}, []
        for name, method in vars(cls).items():
            if name in methods:
                parameters = ", ".join(inspect.signature(methods[name]).parameters)
                problems += check_call(f"{cls.__name__}.{name}", method, parameters)
            elif callable(method) and name.startswith(("on_", "wants_")):
                what, fix = "is no method of a hook and would never be called", did_you_mean(name, methods)
                problems.append(Problem(f"{cls.__name__}.{name}", what, fix=fix))
        if problems:
            raise ConfigError("This hook would not do what it says:", problems)

    def on_start(self, step: int) -> None:
        """Run before the first step; `step` steps have been taken before."""

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a finished step; later steps may be running.

        They are floats, and NumPy arrays by name in `metrics["arrays"]` if the model returns some.
        """

    def on_dispatch(self, step: int) -> None:
        """Run after a step is dispatched and before the next is: here processes may exchange values."""

    def wants_stop(self, step: int) -> bool:
        """Return whether to stop after this step, which has been dispatched; called before `wants_state`."""
        return False

    def on_stop(self, step: int) -> None:
        """Run before `wants_state` if a hook wants to stop after this step: it is the last one."""

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
        batches: Global batches, the first one for step `start + 1`. Host arrays are placed as `spmd.place_batch`
            does, while nothing else happens: placing them ahead, as `spmd.data.loader.batches` does, is faster.
        hooks: Called in order.

    Raises:
        ConfigError: An argument cannot be used, or the state is not that after `start` steps.
        BatchesEndedError: The batches ended before step `steps`; the error has the state.
    """
    _check_arguments(state, step, batches, steps, start, hooks)
    unread: tuple[int, Any] | None = None

    def report() -> None:
        nonlocal unread
        if unread is not None:
            number, metrics = unread
            unread = None
            scalars, arrays = split_arrays(jax.device_get(metrics))
            values: dict[str, Any] = {name: float(value) for name, value in scalars.items()}
            if arrays:
                values["arrays"] = arrays
            for hook in hooks:
                hook.on_metrics(number, values)

    for hook in hooks:
        hook.on_start(start)
    number, stop = start, False
    for number, batch in zip(range(start + 1, steps + 1), batches, strict=False):
        with jax.transfer_guard("disallow"):  # an implicit transfer is an error, but where batches are drawn
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = step(state, batch)
            report()
            unread = number, metrics
            for hook in hooks:
                hook.on_dispatch(number)
            answers = [hook.wants_stop(number) for hook in hooks]  # of every hook, also after one that wants to stop
            stop = any(answers)
            if stop:
                for hook in hooks:
                    hook.on_stop(number)
            wanting = [hook for hook in hooks if hook.wants_state(number)]
            if wanting:
                report()
            with jax.transfer_guard("allow"):
                for hook in wanting:
                    hook.on_state(number, state)
        if stop:
            break
    with jax.transfer_guard("disallow"):
        report()
    if number < steps and not stop:
        fix = f"give {steps - start} batches, or catch the error: its state is the one after step {number}"
        problem = Problem("batches", f"ended after step {number}", f"steps={steps}, start={start}", fix)
        raise BatchesEndedError("Training ended before the last step:", [problem], state)
    return state


def _check_arguments(state: Any, step: Any, batches: Any, steps: Any, start: Any, hooks: Any) -> None:
    """Raise a `ConfigError` that lists what is wrong with the arguments of `fit`."""
    problems = check_call("step", step, "state, batch", "fit(state, step, batches, steps=…)")
    if not isinstance(steps, int) or not isinstance(start, int) or not 0 <= start <= steps:
        fix = "whole numbers; steps counts from the beginning and is at least start"
        problems.append(Problem("steps", f"is {shown(steps)}, and start is {shown(start)}", fix=fix))
    if isinstance(state, TrainState) and not state.step.is_deleted() and (taken := int(state.step)) != start:
        fix = f"start={taken}, and steps above it; or spmd.init_state for a new beginning"
        problems.append(Problem("start", f"is {start}, and the state is that after {taken} steps", fix=fix))
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        problems += check_type("batches", batches, (), "an iterable of batches, such as [batch] * steps")
    wrong = [x for x in hooks if not isinstance(x, Hook)] if isinstance(hooks, Sequence) else [hooks]
    fix = "a list of instances of subclasses of spmd.Hook"
    problems += [Problem("hooks", f"is or has {shown(x)}", fix=fix) for x in wrong]
    if problems:
        raise ConfigError("Training cannot start:", problems)
