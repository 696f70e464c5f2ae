"""`spmd status`: what a run folder says about its run, and who holds it."""

import json
import os
import time
from pathlib import Path

import pytest

from spmd.errors import CheckpointError
from spmd.resilience.lease import request_save
from spmd.resilience.lease_files import LeaseName, LocalLeaseFiles
from spmd.run.status import RunStatus, read_status

RECORDS = [
    {"step": 10, "loss": 5.0, "step_s": 2.0, "tokens_per_s": 1000.0},
    {"step": 10, "val_loss": 5.5},
    {"step": 20, "loss": 4.0, "step_s": 0.5, "tokens_per_s": 4000.0},
]


def write_run(folder: Path, steps: int = 100) -> LocalLeaseFiles:
    """A run of these records with a checkpoint, and its lease, which nobody holds yet."""
    (folder / "checkpoints" / "10").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {"steps": steps}}))
    lines = [json.dumps(record) for record in RECORDS]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 30, "los']))
    files = LocalLeaseFiles(folder)
    files.prepare()
    return files


def status(folder: Path) -> RunStatus:
    before = sorted(path for path in folder.rglob("*"))
    found = read_status(folder)
    assert sorted(path for path in folder.rglob("*")) == before  # nothing is written
    return found


def test_a_running_run_says_when_it_ends(tmp_path: Path) -> None:
    """80 steps of half a second; the loss of validation is of an earlier step."""
    files = write_run(tmp_path)
    files.create(LeaseName(1))
    found = status(tmp_path)
    assert (found.step, found.steps, found.seconds_left) == (20, 100, 40.0)
    assert found.lease.is_alive
    text = str(found)
    assert f"training: process {os.getpid()} on" in text
    assert "loss 4.0000   val_loss 5.5000 at step 10" in text
    assert "500 ms a step   4,000 tokens/s   40 s left" in text
    assert "step 10, " in text
    assert json.loads(json.dumps(found.to_json()))["lease"]["is_alive"] is True


def test_a_run_that_ended_says_how(tmp_path: Path) -> None:
    """Released, it is done or stopped; a lease without heartbeats or without its process is of a crash."""
    files = write_run(tmp_path)
    files.create(LeaseName(1))
    other = json.loads((tmp_path / "lease" / "1.json").read_text())
    (tmp_path / "lease" / "1.json").write_text(json.dumps({**other, "machine": "another"}))
    assert status(tmp_path).lease.is_alive  # it has beaten just now, and cannot be seen
    old = time.time() - 600
    os.utime(tmp_path / "lease" / "1.json", (old, old))
    assert not status(tmp_path).lease.is_alive
    assert "ended without a word" in str(status(tmp_path))
    assert "last heartbeat 10:00 ago" in str(status(tmp_path))
    (tmp_path / "lease" / "1.json").write_text(json.dumps({**other, "started": "another process"}))
    assert "ended without a word" in str(status(tmp_path))
    files.release(LeaseName(1))
    assert "stopped; --resume auto goes on" in str(status(tmp_path))
    assert "left" not in str(status(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"config": {"steps": 20}}))
    assert "done" in str(status(tmp_path))


def test_a_request_to_save_is_taken_once(tmp_path: Path) -> None:
    """Only a living holder is asked; it removes the request, and counts it."""
    files = write_run(tmp_path)
    with pytest.raises(CheckpointError, match="trained by no process"):
        request_save(tmp_path)
    files.create(LeaseName(1))
    request_save(tmp_path)
    request_save(tmp_path)
    assert [files.take_request(), files.take_request()] == [True, False]


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    """A run that has not logged a step, one without a config, and a folder without a run."""
    with pytest.raises(CheckpointError, match="contains no run"):
        status(tmp_path)
    (tmp_path / "config.json").write_text("{")
    found = status(tmp_path)
    assert (found.step, found.steps, found.seconds_left) == (0, None, None)
    assert str(found).splitlines()[1:] == ["step        0", "last save   none yet"]
