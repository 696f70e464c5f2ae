"""The suite stays within its time, and nothing joins it without being measured."""

from pathlib import Path

import pytest

from tests import durations
from tests.conftest import tier_of
from tests.programs import ROOT
from tests.tiers import LONG_ROWS, long_row_problems


def test_every_test_is_recorded_and_all_fit(request: pytest.FixtureRequest) -> None:
    """What `make durations` wrote has each test of this run, and no more than 24 minutes of one core."""
    here = [
        item.nodeid
        for item in request.session.items
        if tier_of(item) not in ("soak", "architecture")
    ]
    assert not durations.problems(durations.read(), here)
    assert all((ROOT / file).exists() for file in durations.by_file(durations.read()))


def test_long_rows_have_another_row_for_every_change() -> None:
    """The control is a list with a row whose test has no other one."""
    recorded = durations.read()
    assert LONG_ROWS
    assert not LONG_ROWS & recorded.keys()
    assert long_row_problems(LONG_ROWS, recorded) == []
    assert len(long_row_problems([*LONG_ROWS, "a.py::one[x]"], recorded)) == 1


def test_control_a_slow_suite_and_a_new_test_are_refused(tmp_path: Path) -> None:
    """A second too many and a test that nobody measured are each said; a file comes back as it was written."""
    recorded = {"a.py::one": float(durations.MOST), "b.py::two[x - y]": 0.0}
    assert durations.problems(recorded, list(recorded)) == []
    assert len(durations.problems({**recorded, "b.py::two[x - y]": 1.0}, ["a.py::one"])) == 1
    assert len(durations.problems(recorded, ["c.py::three", "a.py::one"])) == 1
    durations.write(recorded, tmp_path / "durations.txt")
    assert durations.read(tmp_path / "durations.txt") == recorded
