"""The loop never blocks on the step it has just dispatched, makes no implicit transfer, and stops on NaN."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import NonFiniteError
from spmd.resilience.divergence import DivergenceCheck
from spmd.training.loop import Hook, fit

pytestmark = pytest.mark.compat


class Recorder(Hook):
    def __init__(self, events, at=()):
        self.events, self.at = events, at

    def on_start(self, step):
        self.events.append(f"start {step}")

    def on_metrics(self, step, metrics):
        self.events.append(f"read {step}")
        assert all(type(value) is float for value in metrics.values())

    def wants_state(self, step):
        return step in self.at

    def on_state(self, step, state):
        self.events.append(f"state {step}")


def fake_step(events, loss=lambda n: 1.0):
    def step(state, batch):
        events.append(f"dispatch {state + 1}")
        return state + 1, {"loss": jax.device_put(np.float32(loss(state + 1)))}

    return step


def run(at=(), steps=4, **kwargs):
    events = []
    fit(0, fake_step(events), range(100), steps=steps, hooks=[Recorder(events, at)], **kwargs)
    return events


def test_arrays_of_a_model_are_apart_from_its_numbers():
    """NumPy arrays by name, in "arrays"; without any there is no such entry."""
    seen = []

    class Look(Hook):
        def on_metrics(self, step, metrics):
            seen.append(metrics)

    def step(state, batch):
        return state + 1, {
            "loss": jax.device_put(1.0),
            "arrays": {"load": jax.device_put(np.ones((2, 3)))},
        }

    fit(0, step, range(9), steps=1, hooks=[Look()])
    assert seen[0]["loss"] == 1.0
    assert isinstance(seen[0]["arrays"]["load"], np.ndarray)
    assert seen[0]["arrays"]["load"].shape == (2, 3)


def test_metrics_of_a_step_are_read_while_the_next_one_runs():
    """Step n + 1 is dispatched before the metrics of step n are read."""
    assert run() == [
        "start 0",
        "dispatch 1",
        "dispatch 2",
        "read 1",
        "dispatch 3",
        "read 2",
        "dispatch 4",
        "read 3",
        "read 4",
    ]


def test_a_state_is_handed_out_after_its_own_metrics_were_read():
    """Nothing can be saved that was not seen to be finite."""
    events = run(at=(2,))
    assert events.index("read 2") < events.index("state 2") < events.index("dispatch 3")


def test_it_starts_where_it_is_told():
    """Steps are numbered on from `start`."""
    events = []
    assert fit(2, fake_step(events), range(9), start=2, steps=4, hooks=[Recorder(events)]) == 4
    assert [e for e in events if e.startswith("dispatch")] == ["dispatch 3", "dispatch 4"]


def test_it_does_not_wait_for_the_device():
    """With a device that is slow, dispatching returns while results are not there yet."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y @ y), x).sum())
    x = jax.device_put(np.zeros((600, 600), np.float32))
    slow(x).block_until_ready()
    ready_when_dispatched = []

    def step(state, batch):
        loss = slow(x)
        ready_when_dispatched.append(loss.is_ready())
        return state, {"loss": loss}

    fit(0, step, range(4), steps=4, hooks=[Hook()])
    assert not all(ready_when_dispatched)


def test_an_implicit_transfer_inside_the_loop_is_an_error():
    """A step that feeds a NumPy array to a compiled function fails instead of being slow."""
    f = jax.jit(lambda x: x + 1)
    f(np.ones(3))

    def step(state, batch):
        return state, {"loss": f(np.ones(3)).sum()}

    with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device transfer"):
        fit(0, step, range(2), steps=2)


def test_nan_stops_with_step_position_and_last_good_checkpoint():
    """The message says where the batch is in the data and what to go on from."""
    events = []
    step = fake_step(events, loss=lambda n: float("nan") if n == 3 else 1.0)
    with pytest.raises(NonFiniteError) as caught:
        fit(0, step, range(9), steps=9, hooks=[DivergenceCheck(16, last_good=lambda: 2)])
    text = str(caught.value)
    assert "step 3" in text
    assert "sequences 32 … 47" in text
    assert "the newest checkpoint is of step 2" in text
    assert events[-1] == "dispatch 4"


def test_hooks_do_nothing_by_default():
    """A hook overrides only what it needs."""
    hook = Hook()
    assert hook.wants_state(1) is False
    assert (
        hook.on_start(0)
        is hook.on_metrics(1, {})
        is hook.on_state(1, types.SimpleNamespace())
        is None
    )
