"""The benchmark of pods compares every figure with its bar, and says what it could not compile."""

import json
import sys

import pytest

from benchmarks import pods
from benchmarks.pods import GIB, JOBS, Figures, figures, missed
from spmd.commands.parsing import parse_command
from spmd.commands.plan import PlanCommand
from spmd.run.build import planned_mesh

RECORDS = [
    {"kind": "all-gather", "bytes": 3 * GIB},
    {"kind": "all-reduce", "bytes": 2 * GIB},
    {"kind": "reduce-scatter", "bytes": GIB},
    {"kind": "collective-permute", "bytes": GIB // 2},
]


def test_figures() -> None:
    """Gathers and reductions are apart, and everything is in the sum; of ragged buffers tokens are apart."""
    memory = {"temporaries": GIB, "arguments": 2 * GIB}
    # dispatched: as many rows as copies; returned: from a buffer of four times as many
    sent = {"kind": "ragged-all-to-all", "bytes": GIB, "operand": "bf16[2,8,16]"}
    returned = {"kind": "ragged-all-to-all", "bytes": 4 * GIB, "operand": "bf16[64,16]"}
    records = [*RECORDS, sent, returned]
    found = figures(memory, records, 2.5, exposed=0.5, step=3.5, copies=16)
    assert found == Figures(1, 3, 3, 11.5, 2.5, 2, 5, 0.5, 3.5, routed=2)
    assert figures(memory, RECORDS, 2.5, exposed=0.5, step=3.5, copies=0).routed is None


def test_missed() -> None:
    """A figure may be equal to its bar and not above; one that is unknown is missed, and without a bar none is."""
    found = Figures(1, 3, 3, 6.5, None)
    assert missed(found, Figures(temporaries=1, gathered=3)) == []
    assert missed(found, Figures(temporaries=0.999, reduced=2)) == [
        "temporaries is 1, bar 0.999",
        "reduced is 3, bar 2",
    ]
    assert missed(found, Figures(compute=9)) == ["compute is unknown, bar 9"]


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_jobs_are_plans(job) -> None:
    """Each is a `spmd plan` whose mesh is as large as its machine, with the tokens that it says."""
    command, _ = parse_command(PlanCommand, job.arguments[1:], "plan")
    data, devices = command.config.data, job.machine.devices
    assert planned_mesh(command.config).size == devices
    assert data.batch * data.sequence == job.sequences * job.tokens * devices
    assert data.batch % (devices // job.mesh.get("sequence", 1)) == 0
    assert (command.config.precision, command.config.remat) == ("bf16", "full")
    assert command.config.optimizer.name == "adamw"


@pytest.mark.parametrize(("temporaries", "code"), [(1, 0), (10**6, 1), (None, 2)])
def test_exit_code(temporaries, code, monkeypatch, tmp_path, capsys) -> None:
    """0 where all bars are met, 1 where one is missed, 2 where a job was not compiled; the file has what was found."""

    def measure(job):
        if temporaries is None:
            raise RuntimeError("there is no compiler")
        return Figures(temporaries, 1, 1, 2, 1, exposed=0, step=1)

    monkeypatch.setattr(pods, "measure", measure)
    monkeypatch.setattr(pods, "missing_extra", lambda topology: None)
    monkeypatch.setattr(
        sys, "argv", ["pods", "--only", "8b", "--json", str(tmp_path / "found.json")]
    )
    assert pods.main() == code
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    job = next(job for job in JOBS if job.name == "8b")
    wrong = f"temporaries is 1e+06, bar {job.bars.temporaries:g}"
    assert (f"missed: {wrong}" in printed) == (code == 1)
    assert ("not compiled: there is no compiler" in printed) == (code == 2)
    assert [row["missed"] for row in found] == {
        0: [[]],
        1: [[wrong]],
        2: [],
    }[code]
