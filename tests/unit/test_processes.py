"""Commands know which process of several they are before a device is started."""

import pytest

from spmd.commands.parsing import launch_args_of
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import SINGLE_PROCESS, collectives_environment, native_debug
from tests.command_line import run

TWO = ("--coordinator", "127.0.0.1:7", "--processes", 2, "--process-id")


def test_flags_of_processes_are_read_beside_those_of_a_command():
    """They are found between others; an invalid one is left to the command's own parser."""
    arguments = ["runs/demo", "--processes", "2", "--prompt", "a", "--process-id", "1"]
    assert launch_args_of(arguments) == LaunchArgs(processes=2, process_id=1)
    assert launch_args_of(["runs/demo", "--seed", "1"]) == LaunchArgs()
    assert launch_args_of(["--processes", "two"]) == SINGLE_PROCESS
    assert launch_args_of(["--help"]) == SINGLE_PROCESS


def test_one_of_several_processes_searches(capsys):
    """Process 1 exits at once and says so, where process 0 reports what it lacks."""
    assert run("search", "demo", *TWO, 1) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "process 0 does it alone; --cluster none" in shown.err
    assert run("search", "demo", *TWO, 0) == 2
    assert "--topology: is not given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_compared"),
    [
        ("NCCL_ALGO", True),
        ("NCCL_NET_GDR_LEVEL", True),
        ("FI_PROVIDER", True),
        ("UCX_TLS", True),
        ("MEGASCALE_NUM_SLICES", True),
        ("MEGASCALE_SLICE_ID", False),
        ("NCCL_SOCKET_IFNAME", False),
        ("NCCL_IB_HCA", False),
        ("UCX_NET_DEVICES", False),
        ("NCCL_DEBUG_FILE", False),
        ("FI_LOG_LEVEL", False),
        ("NCCL_TOPO_DUMP_FILE", False),
        ("WIFI_NAME", False),
    ],
)
def test_variables_of_collectives_are_compared_but_not_those_of_a_machine(
    monkeypatch, name, is_compared
):
    """What names network cards, logs or one process may differ."""
    monkeypatch.setenv(name, "1")
    assert (name in collectives_environment()) == is_compared


def test_output_is_asked_for_by_nccl_debug_alone(monkeypatch):
    """With a file of its own, NCCL does not write to standard output."""
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    assert native_debug() == ""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert native_debug() == "NCCL_DEBUG=WARN"
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/nccl.%h.%p")
    assert native_debug() == ""
