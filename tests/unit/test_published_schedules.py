"""The published figures of pipeline schedules, each from our builders or from its published order, and our simulator.

`published_schedules.json` has every figure with its source and, where there is one, its formula.
Orders are those of the schedulers as run: F forward, BW whole backward, B input gradient, W weight
gradients, cN chunk N; F = B = W = 1.
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
from spmd.pipeline.zero_bubble import fill_bubbles

CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_schedules.json").read_text("utf-8")
)
OURS = {"1f1b": "1f1b", "vpp": "interleaved", "zb1p": "zero-bubble", "zb2p": "zb-h2", "zbv": "zb-v"}
PLACEMENTS = {"zb2p": "loop", "zbv": "v"}
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
    return rows and Schedule(schedule, m, v, parse_orders(rows), PLACEMENTS.get(schedule, "loop"))


def figure(timeline: ScheduleTimeline, name: str) -> Any:
    match name:
        case "makespan" | "span":
            return getattr(timeline, name)
        case "peak_inflight":
            return list(timeline.peak_in_flight)
        case "peak_mem":
            return list(timeline.peak_memory)
    raise AssertionError(name)


@cases("sched.")
def test_schedules(case: dict[str, Any]) -> None:
    """Orders, makespans, spans and peaks are those of the published scheduler: of its orders, and of those we build."""
    ours, theirs = built(**case["inputs"]), published(**case["inputs"])
    name = case["id"].rsplit(".", 1)[1]
    if name == "order":
        assert theirs is not None
        assert check_schedule(theirs) == []
        # orders of those two are found by a search
        if theirs.placement == "loop" and theirs.name != "zb2p":
            assert ours.orders == theirs.orders
        return
    assert figure(simulate(ours), name) == case["expected"]
    if theirs is not None:
        assert figure(simulate(theirs), name) == case["expected"]


def test_schedules_control() -> None:
    """Two tasks that change places are another order, and other figures."""
    schedule = make_schedule("zero-bubble", 4, 12)
    order = list(schedule.orders[0])
    order[4], order[5], order[6] = order[6], order[4], order[5]  # F4 before B0 W0
    changed = dataclasses.replace(schedule, orders=(tuple(order), *schedule.orders[1:]))
    assert check_schedule(changed) == []
    assert figure(simulate(changed), "peak_mem") != figure(simulate(schedule), "peak_mem")


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


@cases("zb.table2.1f1b", "zb.table2.zb_h1")
def test_zero_bubble_table(case: dict[str, Any]) -> None:
    """Table 2 of the zero-bubble paper: the bubble in units of time, whatever the number of microbatches."""
    stages, name = case["inputs"]["p"], "1f1b" if "1f1b" in case["id"] else "zero-bubble"
    for microbatches in (stages, 3 * stages):
        timeline = simulate(make_schedule(name, stages, microbatches))
        assert timeline.makespan - timeline.ideal == case["expected"]
        assert timeline.peak_memory[0] == stages  # its other column: p activations


@cases("zb.table2.zb_h2")
def test_zero_bubble_table_h2(case: dict[str, Any]) -> None:
    """With the memory of 2 p - 1 microbatches every stage is busy from its first task to its last."""
    stages = case["inputs"]["p"]
    timeline = simulate(fill_bubbles(stages, 3 * stages, limit=2 * stages - 1))
    assert timeline.span - timeline.ideal == case["expected"]
    assert max(timeline.peak_memory) <= 2 * stages - 1


V_NAMES = {"vhalf": "v-half", "vmin": "v-min"}


@cases("vsched.")
def test_controllable_memory(case: dict[str, Any]) -> None:
    """V-Half and V-Min hold no more than the published scheduler's, and are busy for no longer."""
    inputs, expected = case["inputs"], case["expected"]
    schedule = make_schedule(V_NAMES[inputs["schedule"]], inputs["p"], inputs["m"])
    assert check_schedule(schedule) == []
    timeline = simulate(schedule)
    assert max(timeline.peak_in_flight) <= expected["peak_inflight"]
    assert timeline.span <= expected["span"]


@cases("vtable.")
def test_controllable_memory_table(case: dict[str, Any]) -> None:
    """Their bubble is at most a half and two thirds of that of 1F1B, whatever the number of microbatches."""
    stages = case["inputs"]["p"]
    for microbatches in (stages, 3 * stages, 5 * stages + 1):
        timeline = simulate(
            make_schedule(V_NAMES[case["inputs"]["schedule"]], stages, microbatches)
        )
        assert timeline.makespan - timeline.ideal <= case["expected"]


@cases("deepspeed.trainschedule")
def test_deepspeed(case: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed's table of slots, read as a file, is our 1F1B; so are its slots and buffers."""
    stages, microbatches = case["inputs"]["p"], case["inputs"]["m"]
    ours = make_schedule("1f1b", stages, microbatches)
    timeline = simulate(ours, forward=1, backward=1, weight=0)
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
        "sched.",
        "check.",
        "bubble.ratio",
        "bubble.dp",
        "bubble.rate",
        "gpipe.negligible",
        "zb.table2.1f1b",
    )
    parsed += (
        "vsched.",
        "vtable.",
        "zb.table2.zb_h1",
        "zb.table2.zb_h2",
        "deepspeed.trainschedule",
        "megatron.warmup",
    )
    assert [case["id"] for case in CASES if not case["id"].startswith(parsed)] == []
    assert all(case["source"] for case in CASES)
