"""The published figures of pipeline schedules, each from our builders or from its published order, and our simulator.

`published_schedules.json` has every figure with its source and, where there is one, its formula.
Orders are those of the schedulers as run: F forward, BW backward, cN chunk N; F = 1, BW = 2.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spmd.pipeline.schedule import Schedule, Task, check_schedule, parse_task
from spmd.pipeline.schedule_files import read_schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.simulate import ScheduleTimeline, simulate

CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_schedules.json").read_text("utf-8")
)
OURS = {"1f1b": "1f1b", "vpp": "interleaved"}
ORDERS = {
    tuple(case["inputs"][key] for key in ("schedule", "p", "m", "v")): case["expected"]
    for case in CASES
    if case["id"].startswith("sched.") and case["id"].endswith(".order")
}


def cases(*prefixes: str) -> pytest.MarkDecorator:
    """The published cases whose name begins so."""
    chosen = [case for case in CASES if case["id"].startswith(prefixes)]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


def parse_orders(rows: list[str]) -> tuple[tuple[Task, ...], ...]:
    return tuple(tuple(parse_task(word) for word in row.split()) for row in rows)


def built(schedule: str, p: int, m: int, v: int) -> Schedule:
    """The schedule as we build it."""
    return make_schedule(OURS[schedule], p, m, v if schedule == "vpp" else 1)


def published(schedule: str, p: int, m: int, v: int) -> Schedule | None:
    """The schedule as it was published, if its order was."""
    rows = ORDERS.get((schedule, p, m, v))
    return rows and Schedule(schedule, m, v, parse_orders(rows))


def figure(timeline: ScheduleTimeline, name: str) -> Any:
    match name:
        case "makespan" | "span":
            return getattr(timeline, name)
        case "peak_inflight":
            return list(timeline.peak_in_flight)
    raise AssertionError(name)


@cases("sched.")
def test_schedules(case: dict[str, Any]) -> None:
    """Orders, makespans, spans and peaks are those of the published scheduler: of its orders, and of those we build."""
    ours, theirs = built(**case["inputs"]), published(**case["inputs"])
    name = case["id"].rsplit(".", 1)[1]
    if name == "order":
        assert theirs is not None
        assert check_schedule(theirs) == []
        assert ours.orders == theirs.orders
        return
    assert figure(simulate(ours), name) == case["expected"]
    if theirs is not None:
        assert figure(simulate(theirs), name) == case["expected"]


def test_schedules_control() -> None:
    """Two tasks that change places are another order, and other figures."""
    schedule = make_schedule("1f1b", 4, 12)
    order = list(schedule.orders[0])
    order[4], order[5] = order[5], order[4]  # F4 before BW0
    changed = dataclasses.replace(schedule, orders=(tuple(order), *schedule.orders[1:]))
    assert check_schedule(changed) == []
    assert figure(simulate(changed), "peak_inflight") != figure(simulate(schedule), "peak_inflight")


@cases("check.")
def test_closed_forms(case: dict[str, Any]) -> None:
    """The closed forms of makespan and peak hold for the schedules that we build."""
    _, schedule, kind, *_ = case["id"].split(".")
    inputs = case["inputs"]
    timeline = simulate(make_schedule(OURS[schedule], inputs["p"], inputs["m"], inputs.get("v", 1)))
    assert (timeline.peak_in_flight[0] if kind == "peak" else timeline.makespan) == case["expected"]


@cases("bubble.ratio", "bubble.dp")
def test_bubble(case: dict[str, Any]) -> None:
    """Idle time relative to ideal time, for GPipe and for 1F1B."""
    inputs = case["inputs"]
    # d-way data parallelism without tensor parallelism: n/d stages, b'/d microbatches
    if "d" in inputs:
        inputs = {"p": inputs["n"] // inputs["d"], "m": inputs["bprime"] // inputs["d"]}
    for name in ("gpipe", "1f1b"):
        assert simulate(make_schedule(name, inputs["p"], inputs["m"])).bubble == pytest.approx(
            case["expected"], 1e-9
        )


@cases("bubble.rate", "gpipe.negligible")
def test_bubble_share(case: dict[str, Any]) -> None:
    """Idle time relative to the whole, for GPipe and for 1F1B."""
    inputs = case["inputs"]
    for name in ("gpipe", "1f1b"):
        timeline = simulate(
            make_schedule(name, inputs.get("p", inputs.get("K")), inputs.get("m", inputs.get("M")))
        )
        assert timeline.bubble_share == pytest.approx(case["expected"], 1e-9)


@cases("zb.table2.1f1b")
def test_zero_bubble_table(case: dict[str, Any]) -> None:
    """Table 2 of the zero-bubble paper: 1F1B's bubble in units of time, whatever the number of microbatches."""
    stages = case["inputs"]["p"]
    for microbatches in (stages, 3 * stages):
        timeline = simulate(make_schedule("1f1b", stages, microbatches))
        assert timeline.makespan - timeline.ideal == case["expected"]
        assert timeline.peak_in_flight[0] == stages  # its other column: p activations


@cases("deepspeed.trainschedule")
def test_deepspeed(case: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed's table of slots, read as a file, is our 1F1B; so are its slots and buffers."""
    stages, microbatches = case["inputs"]["p"], case["inputs"]["m"]
    ours = make_schedule("1f1b", stages, microbatches)
    timeline = simulate(ours, forward=1, backward=1)
    match case["id"].rsplit(".", 1)[1]:
        case "rows":
            path = tmp_path / "deepspeed.csv"
            path.write_text("\n".join(case["expected"]).replace("B", "BW"), encoding="utf-8")
            assert read_schedule(path).orders == ours.orders
        case "steps":
            assert timeline.makespan == case["expected"]
        case "buffers":  # of which it never has fewer than two
            assert [max(2, n) for n in timeline.peak_in_flight] == case["expected"]
        case name:
            raise AssertionError(name)


@cases("megatron.warmup")
def test_megatron_warmup(case: dict[str, Any]) -> None:
    """Before its first pair of forward and backward, a stage of the interleaved schedule runs as many forwards."""
    stages, stage = case["inputs"]["p"], case["inputs"]["stage"]
    order = make_schedule("interleaved", stages, 4 * stages, case["inputs"]["v"]).orders[stage]
    first_pair = next(i for i, task in enumerate(order) if task.kind == "BW") - 1
    assert first_pair == case["expected"]


def test_every_case_is_used() -> None:
    """No published case is in the file without a test."""
    parsed = (
        *("sched.", "check.", "bubble.ratio", "bubble.dp", "bubble.rate", "gpipe.negligible"),
        *("zb.table2.1f1b", "deepspeed.trainschedule", "megatron.warmup"),
    )
    assert [case["id"] for case in CASES if not case["id"].startswith(parsed)] == []
    assert all(case["source"] for case in CASES)
