"""Traces hold the steps that were asked for, by a flag or by a signal, and none that were not."""

import gzip
import json
import os
import signal

import pytest

from spmd.errors import ConfigError
from spmd.observe.profiling import ON_DEMAND, Profile, parse_steps
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.loop import Hook, fit
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

STEPS = 9


class AsksAfter(Hook):
    """Sends SIGUSR2 to this process when a step has finished."""

    def __init__(self, step):
        self.step = step

    def on_metrics(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGUSR2)


def run(folder, steps, *hooks):
    """Trains the tiny model for `STEPS` steps; the steps in each trace that is there then."""
    plan = tiny.plan(data=2, fsdp=4)
    step = make_train_step(plan, tiny.loss_fn())
    batches = [
        place_batch(plan, batch) for batch in token_batches((8, 16), tiny.CONFIG.vocab, STEPS)
    ]
    state = init_state(plan)
    step.compile(batches[0])
    with Profile(folder, steps, print) as profile:
        fit(state, step, batches, steps=STEPS, hooks=[*hooks, profile])
    return [traced(path) for path in sorted(folder.rglob("*.trace.json.gz"))]


def traced(path):
    """The numbers of the steps in a trace."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted(
        {int(event["args"]["step_num"]) for event in events if event.get("name") == "train"}
    )


@pytest.mark.soak
def test_steps_by_flag(tmp_path):
    """`--profile 3:5` traces these three, and what runs beside them; without it, no trace is written."""
    (steps,) = run(tmp_path / "some", parse_steps("3:5"))
    assert {3, 4, 5} <= set(steps) <= {2, 3, 4, 5, 6}
    (steps,) = run(tmp_path / "first", parse_steps("1:1"))
    assert {1} <= set(steps) <= {1, 2}
    assert run(tmp_path / "none", parse_steps("")) == []


@pytest.mark.soak
def test_steps_by_signal(tmp_path):
    """SIGUSR2 traces the next steps, as many as are promised."""
    (steps,) = run(tmp_path, None, AsksAfter(2))
    assert ON_DEMAND <= len(steps) <= ON_DEMAND + 2
    assert steps[0] in (3, 4), "step 3 runs when the signal comes"
    assert steps == list(range(steps[0], steps[0] + len(steps)))


@pytest.mark.soak
def test_a_trace_is_closed_where_training_ends(tmp_path):
    """Of the steps that were asked for, those that there were; where all are behind, it is said."""
    (steps,) = run(tmp_path / "end", (8, 20))
    assert steps[-2:] == [8, 9]
    said = []
    Profile(tmp_path / "behind", (2, 4), said.append).on_start(4)
    assert said == ["no trace: step 4 was before this run"]


@pytest.mark.parametrize("text", ["5", "5:4", "0:3", "a:b", "1:2:3"])
def test_bad_steps_are_refused(text):
    """With the way to write them."""
    with pytest.raises(ConfigError, match='profile="10:15"'):
        parse_steps(text)
