"""The bugs that `make soak` injects are still there to be injected."""

import pytest

from tests import durations
from tests.programs import ROOT
from tests.soak.test_mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_its_text_is_in_its_file_once(name: str) -> None:
    """A change of the code that a bug is put into must take the bug along."""
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1


def test_control_text_that_is_nowhere() -> None:
    """The same count finds nothing of a text that no file has."""
    mutation = next(iter(MUTATIONS.values()))
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(
        f"{mutation.old} no such text"
    ) == 0


def test_what_notices_it_is_of_cis_tier() -> None:
    """`tests/durations.txt` has each test of `make test`, and no other."""
    of_ci = durations.read()
    noticing = {test for mutation in MUTATIONS.values() for test in mutation.tests}
    assert not noticing - of_ci.keys()
    assert "tests/unit/test_durations.py::no_such_test" not in of_ci, "the control"
