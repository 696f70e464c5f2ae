"""Checkpoints by time and milestones: which steps are saved, and which are kept."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd.checkpoint.retention import RetentionPolicy
from spmd.errors import ConfigError
from spmd.run import hooks
from spmd.run.hooks import CommonClock, Save
from spmd.run.record import MAY_CHANGE
from spmd.run.run_config import RunConfig


class Checkpoints:
    """A manager that only notes the steps."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, step: int, *others: Any) -> None:
        self.saved.append(step)


def saved_steps(seconds_per_step: float, steps: int, **options: Any) -> list[int]:
    """The steps that are saved in a run with a clock of its own."""
    clock = CommonClock(1, now=iter(np.arange(steps + 1) * seconds_per_step).__next__)
    checkpoints = Checkpoints()
    save = make_save(clock, checkpoints, steps, **options)
    for step in range(1, steps + 1):
        clock.on_dispatch(step)
        if save.wants_state(step):
            save.on_state(step, None)
    return checkpoints.saved


def make_save(
    clock: CommonClock,
    checkpoints: Any,
    steps: int,
    every: int = 0,
    minutes: float = 0.0,
    milestones: int = 0,
) -> Save:
    evaluate: Any = SimpleNamespace(last={}, last_step=-1, best=None, since=0)
    telemetry: Any = SimpleNamespace(
        during=lambda *about: contextlib.nullcontext(),
        watchdog=SimpleNamespace(reset=lambda about: None),
        note=lambda event: None,
    )
    return Save(
        every=every,
        minutes=minutes,
        milestones=milestones,
        clock=clock,
        last_step=steps,
        batch=1,
        record={},
        checkpoints=checkpoints,
        evaluate=evaluate,
        telemetry=telemetry,
        skipped_batches=0,
        saved=lambda state: state,
        loader=None,
    )


def test_a_step_is_saved_when_the_minutes_have_passed() -> None:
    """Counted from the last save of any kind; the control saves the last step only."""
    assert saved_steps(20.0, 10, minutes=1.0) == [3, 6, 9, 10]
    assert saved_steps(20.0, 10, minutes=1.0, every=5) == [3, 5, 8, 10]
    assert saved_steps(20.0, 10) == [10]
    assert saved_steps(0.1, 10, minutes=15.0) == [10]


def test_milestones_are_saved() -> None:
    assert saved_steps(0.1, 10, milestones=4) == [4, 8, 10]
    assert saved_steps(0.1, 10, milestones=4, every=3) == [3, 4, 6, 8, 9, 10]


def test_milestones_are_kept() -> None:
    """Beside the newest; the control keeps the newest only."""
    steps: dict[int, dict[str, float]] = {step: {} for step in (4, 6, 8, 9, 10)}
    assert RetentionPolicy(2, 0, "val_loss", 4).kept(steps) == {4, 8, 9, 10}
    assert RetentionPolicy(2, 0, "val_loss").kept(steps) == {9, 10}


def test_processes_go_by_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds are known one exchange later, at the same step, whatever the own clock says."""
    sent: list[float] = []

    class Gather:
        def gather(self, row: list[float]) -> np.ndarray | None:
            sent.append(row[0])
            if len(sent) == 1:
                return None
            asked = len(sent) - 2
            rows = [[100.0 * (len(sent) - 1), asked], [sent[-2], 7]]
            return np.array(rows, np.float32)

    monkeypatch.setattr(hooks, "AsyncGather", Gather)
    monkeypatch.setattr(hooks.jax, "process_count", lambda: 2)
    clock = CommonClock(5, now=iter(range(100)).__next__)
    seconds, asked = [], []
    for step in range(1, 16):
        clock.on_dispatch(step)
        seconds.append(clock.seconds)
        asked.append(clock.save_requests)
    assert seconds == [0.0] * 9 + [100.0] * 5 + [200.0]
    assert asked == [0] * 14 + [1]


def test_a_request_is_answered_by_one_checkpoint() -> None:
    """At the next step; two that come between the same steps are answered together."""
    asked = [0, 0, 1, 1, 1, 3, 3, 3]
    clock = CommonClock(1, requests=iter(asked).__next__)
    checkpoints = Checkpoints()
    save = make_save(clock, checkpoints, 100)
    for step in range(1, len(asked) + 1):
        clock.on_dispatch(step)
        if save.wants_state(step):
            save.on_state(step, None)
    assert checkpoints.saved == [3, 6]


def test_values_are_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(checkpoint_minutes=-1.0, keep_every=-2)
    assert "checkpoint_minutes: is -1" in str(caught.value)
    assert "keep_every: is -2" in str(caught.value)
    with pytest.raises(ConfigError):
        RunConfig(checkpoint_minutes=float("nan"))
    assert RunConfig().checkpoint_minutes == 15


def test_both_may_change_on_resume() -> None:
    assert {"checkpoint_minutes", "keep_every"} <= set(MAY_CHANGE)
