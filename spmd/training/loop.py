"""The training loop: steps, and hooks for everything else.

The loop dispatches step *n*, then reads the metrics of step *n − 1*, so it never blocks on the step
just dispatched. Where a hook wants the state, step *n*'s own metrics are read first: nothing is
saved before it is known to be finite.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from spmd.errors import (
    BatchesEndedError,
    ConfigError,
    Problem,
    check_call,
    check_type,
    describe_value,
    did_you_mean,
)
from spmd.gradients.losses import split_arrays
from spmd.training.alternating import AlternatingState
from spmd.training.state import TrainState
from spmd.training.step import Metrics

_READ = contextvars.ContextVar("the file that is being read", default="")


@contextlib.contextmanager
def refuse_training(file: str) -> Iterator[None]:
    """Refuse to train inside the block: a file is read for its step, not to run its training."""
    token = _READ.set(file)
    try:
        yield
    finally:
        _READ.reset(token)


def check_may_train() -> None:
    """Raise `ConfigError` while a file is read for its step."""
    file = _READ.get()
    if file:
        problem = Problem(
            file,
            "trains when it is imported",
            fix='if __name__ == "__main__": before its training',
        )
        raise ConfigError("Training while a file is read:", [problem])


class Hook:
    """Base of hooks of the training loop; a method does nothing unless a subclass overrides it.

    Names that begin with `on_` or `wants_` are for these methods: a subclass with another one is an
    error.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods = {name: f for name, f in vars(Hook).items() if not name.startswith("_")}
        problems = list[Problem]()
        for name, method in vars(cls).items():
            where = f"{cls.__name__}.{name}"
            if name in methods:
                parameters = ", ".join(inspect.signature(methods[name]).parameters)
                problems += check_call(where, method, parameters)
            elif callable(method) and name.startswith(("on_", "wants_")):
                what = "is no method of a hook and would never be called"
                problems.append(Problem(where, what, fix=did_you_mean(name, methods)))
        if problems:
            raise ConfigError("Invalid hook:", problems)

    def on_start(self, step: int) -> None:
        """Run before the first step; `step` steps have been taken before."""

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a finished step; later steps may be running.

        They are floats, and NumPy arrays by name in `metrics["arrays"]` if the model returns some.
        """

    def on_dispatch(self, step: int) -> None:
        """Run after a step is dispatched, before the next: here processes may exchange values."""

    def wants_stop(self, step: int) -> bool:
        """Return whether to stop after this step, now dispatched; called before `wants_state`."""
        return False

    def on_stop(self, step: int) -> None:
        """Run before `wants_state` if a hook wants to stop after this step: it is the last one."""

    def wants_state(self, step: int) -> bool:
        """Return whether to call `on_state` after this step."""
        return False

    def on_state(self, step: int, state: Any) -> None:
        """Receive the state after a step, valid during this call only.

        It is a `TrainState`, or of several networks an `AlternatingState`.
        """


State = TypeVar("State", TrainState, AlternatingState)


def fit(
    state: State,
    step: Callable[[State, Any], tuple[State, Metrics]],
    batches: Iterable[Any],
    *,
    steps: int,
    start: int = 0,
    hooks: Sequence[Hook] = (),
) -> State:
    """Take the steps `start + 1 … steps`, or until a hook stops; return the state after the last.

    Args:
        state: The state after `start` steps; it is donated.
        step: From `spmd.make_train_step`, or an `spmd.AlternatingStep` of several networks.
        batches: Global batches, the first one for step `start + 1`. Host arrays are placed as
            `spmd.place_batch` does, while nothing else happens: placing them ahead, as
            `spmd.data.loader.batches` does, is faster.
        hooks: Called in order.

    Raises:
        ConfigError: An argument cannot be used, or the state is not that after `start` steps.
        BatchesEndedError: The batches ended before step `steps`; the error has the state.
    """
    check_may_train()
    _check_arguments(state, step, batches, steps, start, hooks)
    unread = _UnreadMetrics(hooks)
    for hook in hooks:
        hook.on_start(start)
    number = start
    is_last = False
    for number, batch in zip(range(start + 1, steps + 1), batches, strict=False):
        # An implicit transfer is an error, but where batches are drawn.
        with jax.transfer_guard("disallow"):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = step(state, batch)
            unread.report()
            unread.keep(number, metrics)
            is_last = _stops_after(hooks, number)
            wanting = [hook for hook in hooks if hook.wants_state(number)]
            if wanting:
                unread.report()
            with jax.transfer_guard("allow"):
                for hook in wanting:
                    hook.on_state(number, state)
        if is_last:
            break
    with jax.transfer_guard("disallow"):
        unread.report()
    if number < steps and not is_last:
        problem = Problem(
            "batches",
            f"ended after step {number}",
            f"steps={steps}, start={start}",
            f"give {steps - start} batches, or catch the error: its state is the one after step "
            f"{number}",
        )
        # Batches of several processes say which of these had no further one.
        reasons: Sequence[Problem] = getattr(batches, "end_problems", ())
        raise BatchesEndedError("Training ended before the last step:", [problem, *reasons], state)
    return state


class _UnreadMetrics:
    """The metrics of the step dispatched last, until hooks receive them."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks
        self._unread: tuple[int, Any] | None = None

    def keep(self, number: int, metrics: Any) -> None:
        """Keep the metrics of a step, still on the devices."""
        self._unread = number, metrics

    def report(self) -> None:
        """Give the metrics to all hooks, if they have not got them; wait for the step."""
        if self._unread is None:
            return
        number, metrics = self._unread
        self._unread = None
        scalars, arrays = split_arrays(jax.device_get(metrics))
        values: dict[str, Any] = {name: float(value) for name, value in scalars.items()}
        if arrays:
            values["arrays"] = arrays
        for hook in self._hooks:
            hook.on_metrics(number, values)


def _stops_after(hooks: Sequence[Hook], number: int) -> bool:
    """Tell all hooks about a dispatched step; return whether one of them stops after it."""
    for hook in hooks:
        hook.on_dispatch(number)
    # Every hook is asked, also after one that wants to stop.
    answers = [hook.wants_stop(number) for hook in hooks]
    if not any(answers):
        return False
    for hook in hooks:
        hook.on_stop(number)
    return True


def _check_arguments(
    state: Any, step: Any, batches: Any, steps: Any, start: Any, hooks: Any
) -> None:
    """Raise a `ConfigError` with all problems of the arguments of `fit`."""
    problems = check_call("step", step, "state, batch", "fit(state, step, batches, steps=…)")
    if not isinstance(steps, int) or not isinstance(start, int) or not 0 <= start <= steps:
        what = f"is {describe_value(steps)}, and start is {describe_value(start)}"
        fix = "whole numbers; steps counts from the beginning and is at least start"
        problems.append(Problem("steps", what, fix=fix))
    if isinstance(state, TrainState | AlternatingState) and not state.step.is_deleted():
        problems += _start_problems(int(state.step), start)
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        fix = "an iterable of batches, such as [batch] * steps"
        problems += check_type("batches", batches, (), fix)
    problems += _hook_problems(hooks)
    if problems:
        raise ConfigError("Training cannot start:", problems)


def _start_problems(taken: int, start: Any) -> list[Problem]:
    """Return a problem if a state after so many steps is not the one to start with."""
    if taken == start:
        return []
    what = f"is {start}, and the state is that after {taken} steps"
    fix = f"start={taken}, and steps above it; or spmd.init_state for a new beginning"
    return [Problem("start", what, fix=fix)]


def _hook_problems(hooks: Any) -> list[Problem]:
    """Return a problem for each hook of another type."""
    wrong = [hooks]
    if isinstance(hooks, Sequence):
        wrong = [hook for hook in hooks if not isinstance(hook, Hook)]
    fix = "a list of instances of subclasses of spmd.Hook"
    return [Problem("hooks", f"is or has {describe_value(hook)}", fix=fix) for hook in wrong]
