"""`spmd doctor` in two processes of four simulated devices: the one that is slowed is named, and only then."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from spmd.distributed.local import free_port, process_commands

ROOT = Path(__file__).parents[2]


def stop_and_go(process: subprocess.Popen[str], until: threading.Event) -> None:
    """Let a process run a sixth of the time, while devices are measured: that comes first."""
    began = time.monotonic()
    while not until.is_set() and time.monotonic() < began + 8:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)


@pytest.mark.parametrize(
    "slowed", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["slowed", "control"]
)
@pytest.mark.soak
def test_the_slow_one_of_two_processes_is_named(slowed: bool, tmp_path: Path) -> None:
    doctor = ["doctor", "--mesh.fsdp", "8", "--megabytes", "1", "--json"]
    processes = []
    for command in process_commands(doctor, processes=2, devices=4, port=free_port()):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, **pipes)
        )
    first, second = processes
    ended = threading.Event()
    slower = threading.Thread(target=stop_and_go, args=(second, ended))
    try:
        assert first.stderr is not None
        for line in first.stderr:
            if "measuring" in line:
                break
        if slowed:
            slower.start()
        output, errors = first.communicate(timeout=120)
    finally:
        ended.set()
        if slowed:
            slower.join()
        second.communicate(timeout=60)
        first.kill()
    found = json.loads(output)
    named = [problem["where"] for problem in found["problems"] if "is slow" in problem["what"]]
    assert [each["kind"] for each in found["axes"]][:2] == ["all-gather", "reduce-scatter"]
    assert len(found["pairs"]) == 1
    if slowed:
        assert named, errors
        assert all(name.startswith("process 1 (") for name in named)
        assert (first.returncode, second.returncode) == (1, 1)
    else:
        assert named == []
