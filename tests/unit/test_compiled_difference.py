"""Two compiled steps side by side: totals with limits, the causes of a change, and the exit codes of `spmd diff`."""

import copy
import json
import subprocess

import pytest

from spmd.analysis.compiled_difference import Limits, compare_compiled
from spmd.commands.diff import run_diff
from spmd.errors import ConfigError

GATHER = {"kind": "all-gather", "axes": ["fsdp"], "bytes": 1000, "cause": {"text": "rule 'up'"}}
STEP = {
    "mesh": {"fsdp": 4, "tensor": 1},
    "precision": {"compute": "bfloat16"},
    "compress": {"gather": ""},
    "remat": "full",
    "xla": {"flags": [{"name": "xla_tile", "value": 8}]},
    "memory": {"compiled": {"total": 3000, "arguments": 1000, "temporaries": 2000}},
    "collectives": [GATHER, {**GATHER, "kind": "reduce-scatter"}],
    "compute": {"seconds": 2.0, "cycles": {"fusion": 300, "copy": 100}},
    "time": {
        "seconds": 3.0,
        "spent": {"matmuls": 2.0, "exposed collectives over fsdp": 1.0},
        "collectives": [
            {"kind": "all-gather", "over": "fsdp", "cause": "rule 'up'", "exposed": 1.0}
        ],
    },
    "compilation": {"seconds": 10.0, "processor_seconds": 20.0},
    "versions": {"libtpu": "0.0.42"},
}


def changed(**parts):
    """The step with other parts."""
    return {**copy.deepcopy(STEP), **parts}


def totals(after, limits=None):
    """Name of a total → what is known of it."""
    found = compare_compiled(STEP, after, limits or Limits())
    return found, {total.name: total for total in found.totals}


def test_a_step_is_the_same_as_itself():
    found, known = totals(STEP)
    assert not found.is_exceeded
    assert not found.settings
    assert [total.changed_parts for total in found.totals] == [[]] * len(known)
    assert known["memory of a device"].percent == 0


def test_one_renamed_axis_is_seen_by_its_cause():
    """An axis is renamed, a gather is gone and a larger one there: the control is the step itself, above."""
    wider = {**GATHER, "axes": ["data", "fsdp"], "bytes": 2600, "cause": {"text": "rule 'up'"}}
    after = changed(mesh={"fsdp": 8, "tensor": 1}, collectives=[wider, STEP["collectives"][1]])
    found, known = totals(after)
    assert found.is_exceeded
    assert found.settings == {"mesh.fsdp": (4, 8)}
    sent = known["on the network"]
    assert (sent.before, sent.after, sent.percent) == (2000, 3600, pytest.approx(80))
    assert [(part.name, part.change) for part in sent.changed_parts] == [
        ("all-gather over data+fsdp: rule 'up'", 2600),
        ("all-gather over fsdp: rule 'up'", -1000),
    ]
    assert "+80.0 %  on the network  ABOVE ITS LIMIT of +3 %" in str(found)


def test_each_total_has_its_limit():
    slower = changed(compilation={"seconds": 14.0, "processor_seconds": 28.0})
    assert not totals(slower)[0].is_exceeded
    assert totals(slower, Limits(compilation=30))[0].is_exceeded
    more = changed(memory={"compiled": {"total": 3060, "arguments": 1000, "temporaries": 2060}})
    assert not totals(more)[0].is_exceeded
    assert totals(more, Limits(memory=1.9))[0].is_exceeded


def test_cycles_are_shown_in_seconds_by_operation():
    after = changed(compute={"seconds": 2.5, "cycles": {"fusion": 300, "copy": 200}})
    (part,) = totals(after)[1]["compute"].changed_parts
    assert (part.name, part.before, part.after) == ("copy", 0.5, 1.0)


def test_a_figure_that_is_lost_is_above_its_limit_and_a_new_one_is_not():
    """As of a program without cycles: "nothing is exposed" would be wrong."""
    lost = {name: value for name, value in STEP.items() if name != "time"}
    found, known = totals(lost)
    assert known["predicted step"].is_exceeded
    assert known["exposed communication"].is_exceeded
    assert "not known" in str(found)
    assert not compare_compiled(lost, STEP, Limits()).is_exceeded


def test_the_exit_code_says_whether_a_limit_is_exceeded(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(STEP))
    after.write_text(json.dumps(changed(versions={"libtpu": "0.0.50"}, compute=None, time=None)))
    assert run_diff([str(before), str(before)]) == 0
    capsys.readouterr()
    assert run_diff([str(before), str(after), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["settings"] == {"libtpu": ["0.0.42", "0.0.50"]}
    assert [total["name"] for total in record["totals"] if total["exceeded"]] == [
        "compute",
        "exposed communication",
        "predicted step",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.json"], ["steps: are not two"]),
        (["demo", "b.json"], ["--topology: is needed to compile demo"]),
        (
            ["a.json", "b.json", "--topology", "v5e:2x4", "--after-python", "p", "--", "--steps"],
            [
                *("--topology: has no effect", "--steps: has no effect", "--after-python: has no"),
                *("a.json: cannot be read", "b.json: cannot be read"),
            ],
        ),
        (
            ["nowhere:demo", "demo", "--topology", "v5e:2x4", "--after-python", "none/python"],
            ["git rev-parse --verify nowhere", "--after-python: none/python is no program"],
        ),
    ],
)
def test_all_that_has_no_effect_is_refused_at_once(arguments, said):
    with pytest.raises(ConfigError) as caught:
        run_diff(arguments)
    assert all(text in str(caught.value) for text in said)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "no",
        json.dumps({**STEP, "memory": {"compiled": None}}),
        '{"memory": 5}',
        '{"memory": {"compiled": {"total": 1}}}',
    ],
    ids=["deep", "list", "words", "not compiled", "--time", "of parts"],
)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    """Also one of a plan that was not compiled, and of another view of a plan."""
    file = tmp_path / "step.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--compile --json"):
        run_diff([str(file), str(file)])


def test_a_revision_is_one_of_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    with pytest.raises(ConfigError, match="HEAD"):
        run_diff(["HEAD:demo", "HEAD:demo", "--topology", "v5e:2x4"])


def test_moved_lines_and_other_folders_are_no_change():
    """A cause names the line of its source; the control is another file."""

    def sent(file):
        cause = {"text": f"attention (ppermute) at {file}"}
        return changed(collectives=[{**GATHER, "cause": cause}])

    before, after = sent("/opt/a/spmd/layers/ring.py:143"), sent("spmd/layers/ring.py:150")
    (network,) = [
        total
        for total in compare_compiled(before, after, Limits()).totals
        if total.name == "on the network"
    ]
    assert network.changed_parts == []
    other = compare_compiled(before, sent("spmd/layers/moe.py:143"), Limits())
    assert any(total.changed_parts for total in other.totals)


def test_growth_from_nothing_to_next_to_nothing_is_no_growth():
    """A nanosecond of exposed communication where there was none; a hundredth of the step is."""

    def exposed(seconds):
        time = copy.deepcopy(STEP["time"])
        time["collectives"][0]["exposed"] = seconds
        return changed(time=time)

    assert not compare_compiled(exposed(0.0), exposed(1e-9), Limits()).is_exceeded
    assert compare_compiled(exposed(0.0), exposed(0.03), Limits()).is_exceeded


def test_memory_of_the_host_is_a_total_of_its_own():
    memory = {"compiled": {**STEP["memory"]["compiled"], "host_temporaries": 500}}
    found, known = totals(changed(memory=memory))
    assert found.is_exceeded
    assert known["memory of the host, of a device"].after == 500
    assert not known["memory of a device"].is_exceeded
