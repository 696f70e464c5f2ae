"""Processes of one run that are about to do different things all stop, and say who differs in what."""

import pytest

from spmd.distributed.differences import SHOWN, differences
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint


def test_equal_statements_have_no_differences():
    """The control: nothing is reported where nothing differs."""
    assert differences([{"config": {"steps": 3}, "plan": "a\nb"}] * 3) == []
    check_hosts_agree({"steps": 3})


@pytest.mark.parametrize(
    ("everyone", "where", "what", "arithmetic"),
    [
        ([{"a": 1}, {"a": 1}, {"a": 2}], "process 2", "a is 2", "process 0 and 1 more: 1"),
        ([{"a": 2}, {"a": 1}, {"a": 1}], "process 0", "a is 2", "process 1 and 1 more: 1"),
        ([{"a": 1}, {"a": 2}], "process 1", "a is 2", "process 0: 1"),
        (
            [{"c": {"m": {"fsdp": 2}}}, {"c": {"m": {"fsdp": 4}}}],
            "process 1",
            "c.m.fsdp is 4",
            "process 0: 2",
        ),
        ([{"plan": "x\ny"}, {"plan": "x\nz"}], "process 1", "plan, line 2 is z", "process 0: y"),
        ([{"v": {"jax": "1"}}, {"v": {}}], "process 1", "v.jax is nothing", "process 0: 1"),
    ],
)
def test_a_difference_names_the_process_and_the_value(everyone, where, what, arithmetic):
    """The minority is named, by the dotted path of what it has otherwise."""
    (problem,) = differences(everyone)
    assert (problem.where, problem.what, problem.detail) == (where, what, arithmetic)


def test_many_differences_of_one_process_are_counted():
    """A process with another plan does not fill the screen."""
    problems = differences([{f"x{n}": 0 for n in range(20)}, {f"x{n}": 1 for n in range(20)}])
    assert len(problems) == SHOWN + 1
    assert problems[-1].what == f"and {20 - SHOWN} more differences"


def test_the_source_is_fingerprinted():
    """The same source, the same digest."""
    assert source_fingerprint() == source_fingerprint()
    assert len(source_fingerprint()) == 64
