"""The report of a compiled step has the collectives and the memory of its audit."""

import pytest

from spmd.analysis.topology import parse_topology
from spmd.report.plan_data import collect_plan
from spmd.report.plan_page import plan_page
from spmd.run.load_config import load_config
from spmd.run.step_source import ConfigSource
from tests.command_line import write_config


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    config = load_config(str(write_config(tmp_path_factory.mktemp("config"))))
    source = ConfigSource(config)
    planned = source.on(source.planned_mesh())
    return collect_plan("tiny", source, planned, parse_topology("cpu:8"), compiles=True)


def test_rows_are_the_bytes_of_the_audit(report):
    """Rows by cause and bars by axes both add up to what a device sends, and each row has a cause."""
    assert report.audit.bytes() > 0
    assert sum(row.bytes for row in report.collectives()) == report.audit.bytes()
    assert (
        sum(sum(kinds.values()) for kinds in report.collective_bytes().values())
        == report.audit.bytes()
    )
    assert all(row.cause for row in report.collectives())
    assert "rule 'mlp/down_proj/kernel'" in {
        row.cause.partition(" →")[0] for row in report.collectives()
    }


def test_memory_is_that_of_the_compiler(report):
    """The third bar is the compiled step's, and nothing is timed on simulated devices."""
    assert sum(dict(report.memory_rows())["compiled"].values()) == report.memory.compiled.total
    assert report.time is None
    assert [note.partition(":")[0] for note in report.notes] == [
        "No time is predicted of simulated devices"
    ]
    assert "<h2>Collectives</h2>" in plan_page(report)
