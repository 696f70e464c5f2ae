"""The same devices in one, two or four processes: every one compiles a step that sends the same, and no more."""

import functools
import json
import sys

import pytest

from tests.train_runs import finish_together, free_port, write_tiny

pytestmark = pytest.mark.soak
DEVICES = 8
AUDIT = """
import dataclasses
import json
import sys

import jax
import optax

from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import SINGLE_PROCESS, initialize
from spmd.run.config import with_values
from spmd.run.load_config import load_config
from spmd.analysis.collective_audit import audit_collectives
from spmd.run.build import abstract_batch, build_watch, config_mesh, make_setup
from spmd.run.planned_step import compile_step
from spmd.training.step import make_train_step

config, port, processes, process = sys.argv[1], *map(int, sys.argv[2:])
launch_args = LaunchArgs(f"127.0.0.1:{port}", processes, process) if processes > 1 else SINGLE_PROCESS
initialize(8 // processes, launch_args)
config = with_values(load_config(config), {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}})
setup = make_setup(config, config_mesh(config))


def sent(audit):
    return [
        dict(kind=r.kind, axes=r.over, payload=r.payload, executions=r.executions, array=r.array, groups=r.groups)
        for r in audit.records
    ]


found = {"processes": jax.process_count(), "devices": jax.local_device_count(), "step": sent(compile_step(setup).audit)}
if processes == 1:
    watch = {**build_watch(setup.config), "norm": lambda state, _: optax.global_norm(state.params)}
    step = make_train_step(setup.plan, grad_fn=setup.grad_fn, watch=watch)
    found["step with one more"] = sent(audit_collectives(step.compile(abstract_batch(setup.config)), setup.mesh))
print()
print("FOUND", json.dumps(found))
"""
"""A process of a group that trains together: it compiles the step, and says what the program sends."""


@functools.cache
def audits(config, processes):
    """What each of so many processes found."""
    port = free_port()
    printed = finish_together(
        *(
            [sys.executable, "-c", AUDIT, config, port, processes, process]
            for process in range(processes)
        )
    )
    # Gloo's threads print there too.
    return [json.loads(out.rpartition("FOUND ")[2].partition("\n")[0]) for out in printed]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("weak"))


@pytest.mark.parametrize("processes", [2, 4])
def test_more_processes_send_nothing_more(config, processes):
    """With eight devices in all, each process's program has the same collectives, of the same bytes, as that of one."""
    (alone,) = audits(config, 1)
    found = audits(config, processes)
    assert [(one["processes"], one["devices"]) for one in found] == [
        (processes, DEVICES // processes)
    ] * processes
    assert {record["axes"] for record in alone["step"]} >= {"fsdp", "tensor", "data+fsdp"}
    assert [one["step"] for one in found] == [alone["step"]] * processes


def test_control_one_more_collective_is_found(config):
    """A step that reports the parameters' norm besides sums it over devices, in a few bytes: another audit."""
    (alone,) = audits(config, 1)
    kept, more = alone["step"], alone["step with one more"]
    assert more != kept
    assert sum(r["payload"] * r["executions"] for r in more) > sum(
        r["payload"] * r["executions"] for r in kept
    )
