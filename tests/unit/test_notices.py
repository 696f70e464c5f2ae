"""Notices of preemption and maintenance in the metadata server save as SIGTERM does."""

import signal
import time

import pytest

from spmd.distributed.metadata_server import MetadataServer
from spmd.resilience.notices import MAINTENANCE, PREEMPTED, Notices
from spmd.resilience.preemption import Preemption
from spmd.training.loop import fit
from tests.metadata_servers import MetadataStub

QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}


def steps(stub, at, notice, steps=400):
    """Train with the notice given in a step; the last step."""
    said = []

    def step(state, batch):
        if state == at:
            stub.set(*notice)
        time.sleep(0.005)
        return state + 1, {}

    server = MetadataServer.of(stub.environment)
    with Preemption() as preemption, Notices(server, said.append):
        # A thread reads each key, then waits for a change: a notice in the first read is an old one.
        while min(map(stub.asked.count, QUIET)) < 2:
            time.sleep(0.001)
        fit(0, step, range(steps), steps=steps, hooks=[preemption])
    return preemption.stop_step, said


@pytest.mark.parametrize("notice", [PREEMPTED, MAINTENANCE], ids=["preempted", "maintenance"])
def test_a_notice_ends_training_after_the_step(notice):
    """Both keys; the log says which it was."""
    with MetadataStub(QUIET) as stub:
        stop, said = steps(stub, 20, notice)
    assert 20 < stop < 400
    assert f"{notice[0]} is {notice[1]}" in said[0]


def test_other_values_are_no_notices():
    """The control: a live migration is not waited for, and a server that has neither key changes nothing."""
    with MetadataStub(QUIET) as stub:
        assert steps(stub, 5, ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE"), 60) == (
            None,
            [],
        )
    with MetadataStub() as stub:
        assert steps(stub, 5, ("other", "TRUE"), 60) == (None, [])


def test_maintenance_that_was_known_at_the_start_is_not_acted_on_again():
    """A run that saved and started again on the machine would save after each step; a preemption still counts."""
    with MetadataStub({**QUIET, "maintenance-event": MAINTENANCE[1]}) as stub:
        stop, said = steps(stub, 5, ("other", "x"), 60)
        assert stop is None
        assert "not acted on again" in said[0]
        assert steps(stub, 5, PREEMPTED)[0] is not None


def test_without_a_server_there_are_no_threads():
    """Machines that are none of Compute Engine's: signals alone."""
    before = signal.getsignal(signal.SIGTERM)
    with Notices(None, print):
        assert signal.getsignal(signal.SIGTERM) == before
