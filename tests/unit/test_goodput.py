"""Every second of a run is accounted for once, over kills and roll-backs."""

import itertools
import json
import time

import pytest

from spmd.observe import goodput
from spmd.observe.goodput import Stopwatch, command_start, measure_goodput, process_start


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def session(clock, folder, lines, start=5.0):
    """A session that takes a second a step and logs at the steps of `lines`."""
    watch = Stopwatch(clock, clock.now)
    clock.now += start
    watch.switch_to("step")
    before = lines[0]
    for step in lines:
        clock.now += max(step - before, 0)
        watch.write(folder, step)
        before = step
    return watch


def test_every_moment_belongs_to_one_activity():
    """What is nested is not counted twice, and nothing is lost."""
    clock = Clock()
    watch = Stopwatch(clock, 90.0)
    watch.switch_to("step")
    with watch.measure("checkpoint"):
        clock.now += 3
        with watch.measure("data"):
            clock.now += 4
        clock.now += 1
    clock.now += 2
    watch.switch_to("step")
    assert watch.seconds["start"] == 10
    assert watch.seconds["checkpoint"] == 4
    assert watch.seconds["data"] == 4
    assert watch.seconds["step"] == 2
    assert sum(watch.seconds.values()) == clock.now - 90


def test_waiting_for_items_is_data():
    """Only the wait is counted, not what is done with an item."""
    clock = Clock()
    watch = Stopwatch(clock, clock.now)
    watch.switch_to("step")

    def slow():
        for n in range(3):
            clock.now += 2
            yield n

    for _ in watch.time_batches(slow()):
        clock.now += 1
    watch.switch_to("step")
    assert (watch.seconds["data"], watch.seconds["step"]) == (6, 3)


def test_steps_taken_again_are_rework(tmp_path):
    """Killed after step 20, resumed from 15: five seconds of the first session count for nothing."""
    clock = Clock()
    session(clock, tmp_path, [0, 10, 20])
    clock.now += 7
    session(clock, tmp_path, [15, 25, 30])
    found = measure_goodput(tmp_path)
    assert found.sessions == 2
    assert found.seconds["rework"] == pytest.approx(5)
    assert found.seconds["step"] == pytest.approx(30)
    assert found.seconds["between"] == pytest.approx(7)
    assert found.seconds["start"] == pytest.approx(10)
    assert found.total == pytest.approx(clock.now - 100)
    assert found.goodput == pytest.approx(30 / found.total)
    assert "repeated steps" in str(found)


def test_a_roll_back_within_a_session_is_rework(tmp_path):
    """The step number falls: what lies behind it is taken again."""
    clock = Clock()
    session(clock, tmp_path, [0, 10, 20, 12, 20, 30])
    found = measure_goodput(tmp_path)
    assert found.seconds["rework"] == pytest.approx(8)
    assert found.seconds["step"] == pytest.approx(30)


def test_steps_after_the_last_line_are_rework_where_a_line_says_how_far_it_came(tmp_path):
    """As a roll-back from step 19 to step 10 writes it: nine steps are taken again, whatever is logged between."""
    clock = Clock()
    session(clock, tmp_path, [0, 10, 19, 10, 20, 30])
    found = measure_goodput(tmp_path)
    assert found.seconds["rework"] == pytest.approx(9)
    assert found.seconds["step"] == pytest.approx(29 - 9 + 10)


def test_nothing_twice_over_several_kills(tmp_path):
    """Three sessions that overlap: each step counts once."""
    clock = Clock()
    session(clock, tmp_path, [0, 5, 10])
    session(clock, tmp_path, [5, 10, 15])
    session(clock, tmp_path, [10, 20])
    found = measure_goodput(tmp_path)
    assert found.seconds["step"] == pytest.approx(20)
    assert found.seconds["rework"] == pytest.approx(10)
    assert found.total == pytest.approx(clock.now - 100)


def test_a_cut_line_is_left_out(tmp_path):
    """A kill in the middle of a write costs that line alone; no file is no goodput."""
    assert measure_goodput(tmp_path).total == 0
    session(Clock(), tmp_path, [0, 10])
    with (tmp_path / "goodput.jsonl").open("a") as file:
        file.write(json.dumps({"session": 1, "step": 3})[:-4])
    assert measure_goodput(tmp_path).seconds["step"] == pytest.approx(10)


def test_each_session_of_a_process_is_one(tmp_path):
    """Sessions of one process have different starts, and the second does not count what the first took."""
    Stopwatch().write(tmp_path, 1)
    between = time.time()
    second = Stopwatch()
    second.write(tmp_path, 1)
    assert measure_goodput(tmp_path).sessions == 2
    assert second.began >= between


def test_a_command_counts_from_the_start_of_its_process(monkeypatch):
    """Only the first command of a process does; a stopwatch by itself begins now."""
    monkeypatch.setattr(goodput, "_COMMANDS", itertools.count())
    before = time.time()
    assert command_start() == pytest.approx(process_start(), abs=1.0)
    assert command_start() >= before
    assert Stopwatch().began >= before


def test_this_process_was_started_before_now():
    """The start-up of Python and its imports count."""
    assert 0 < time.time() - process_start() < 86_400
