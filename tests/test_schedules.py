"""Pipeline schedules: what builders build can be run, and what cannot be run is refused with stage and tick."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.errors import ScheduleError
from spmd.gradients.schedules import SCHEDULES, Schedule, Task, check_schedule, make_schedule, parse_task
from spmd.gradients.simulate import simulate


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that can be built, up to 8 stages."""
    name = draw(st.sampled_from(SCHEDULES))
    stages = draw(st.integers(1, 8))
    if name == "interleaved":
        return make_schedule(name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(2, 4)))
    return make_schedule(name, stages, draw(st.integers(stages if name in ("zero-bubble", "pipedream") else 1, 24)))


COSTS = st.integers(1, 5)


@settings(max_examples=150, deadline=None)
@given(schedules(), COSTS, COSTS, COSTS)
def test_builders(schedule: Schedule, forward: int, backward: int, weight: int) -> None:
    """Whatever the sizes and costs, every task runs once, and a batch takes as long as the closed form says."""
    assert check_schedule(schedule) == []
    timeline = simulate(schedule, forward=forward, backward=backward, weight=weight)
    p, m, v = schedule.stages, schedule.microbatches, schedule.chunks
    work = forward + backward + weight
    assert timeline.ideal == m * work
    if schedule.name == "zero-bubble":
        assert timeline.period >= m * work + (p - 1) * (forward + backward - weight)
        if weight <= forward:
            assert timeline.period == m * work + (p - 1) * (forward + backward - weight)
    elif schedule.name == "pipedream":
        assert timeline.period == m * work
    else:
        assert timeline.period == m * work + (p - 1) * work / v
