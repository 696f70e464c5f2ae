"""Metrics are read back by the libraries of Weights & Biases and MLflow, one run each, whatever interrupted it."""

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

import spmd
from spmd.observe.metrics import JsonLines
from spmd.observe.writers import WriterConfig, open_writers
from tests.numerics.test_ema import loss_fn, numbers, step
from tests.train_runs import ROOT, Run, metrics, write_tiny

CONFIG = spmd.RunConfig(
    steps=6,
    log_every=1,
    checkpoint_every=2,
    metrics_to=("wandb", "mlflow"),
    evaluate=spmd.EvaluationInterval(every=3),
)


def leveldb_records(data):
    """Records of a file of W&B, which has the format of LevelDB's log behind seven bytes of its own."""
    record, place = b"", 7
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # a block ends with zeros where no header fits
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if kind == 0:
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_rows(folder):
    """Steps of the history of each process of a W&B run, with their values, and the ids of the runs."""
    from wandb.proto import wandb_internal_pb2

    rows, ids = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            items = {
                "/".join(item.nested_key) or item.key: item.value_json
                for item in record.history.item
            }
            if items:
                rows.append({name: json.loads(value) for name, value in items.items()})
    return rows, ids


def mlflow_run(folder):
    """The only run of a file store, and a client for it."""
    import mlflow
    import mlflow.environment_variables

    mlflow.environment_variables.MLFLOW_ALLOW_FILE_STORE.set(True)
    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").absolute().as_uri())
    experiment = client.get_experiment_by_name("spmd")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_an_interrupted_run_is_one_run_without_a_step_twice(tmp_path):
    """Its data fail after the third step, so that it repeats steps from its checkpoint of the second. Signals keep
    their handlers."""
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def failing(start, steps):
        yield from numbers(start, 4)
        raise OSError("the disk is gone")

    sets = {"val": lambda: numbers(50, 52)}
    run = spmd.Run(
        tmp_path, step(), failing, config=CONFIG, evaluation=sets, evaluation_loss=loss_fn
    )
    with pytest.raises(OSError, match="the disk is gone"):
        run.train()
    (tmp_path / "checkpoints/4").rename(tmp_path / "gone")
    again = spmd.Run(
        tmp_path, step(), numbers, config=CONFIG, evaluation=sets, evaluation_loss=loss_fn
    )
    again.train("always")
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers

    lines = metrics(tmp_path)
    rows, ids = wandb_rows(tmp_path)
    assert len(ids) == 2  # one for each attempt
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert {row["_step"]: row["loss"] for row in rows} == losses
    assert [row["_step"] for row in rows if "val_loss" in row] == [3, 6]

    client, found = mlflow_run(tmp_path)
    assert found.info.status == "FINISHED"
    assert found.data.params["steps"] == "6"
    assert found.data.params["recovery.on_spike"] == "ignore"
    for name in ("loss", "val_loss"):
        history = client.get_metric_history(found.info.run_id, name)
        assert [(p.step, p.value) for p in history] == [
            (line["step"], line[name]) for line in lines if name in line
        ]


def test_texts_arrays_and_what_is_not_finite(tmp_path):
    """Arrays are histograms of W&B, and nothing of MLflow; one that is not finite is skipped. A run that did not
    write to them before has its lines from the start."""
    values = {
        "loss": float("nan"),
        "kind": "word",
        "of": np.array([1.0, 2.0, np.inf]),
        "none": None,
        "n": 3,
    }
    lines = JsonLines(tmp_path / "lines")
    lines.write(1, values)
    lines.close()
    for writer in open_writers(CONFIG.writers, tmp_path, tmp_path / "lines", 1, {}):
        writer.write(2, values)
        writer.close()
    ((before, row), _), (_, run) = wandb_rows(tmp_path), mlflow_run(tmp_path)
    assert {**before, "_step": 2}.keys() == row.keys()
    assert {"kind", "n", "loss", "none"} & row.keys() == {"kind", "n"}
    assert row["of/_type"] == "histogram"
    assert run.data.metrics == {"n": 3.0}
    assert run.data.tags["kind"] == "word"


def test_mlflow_starts_no_thread(tmp_path):
    """Nothing waits for a network at the end of the process."""
    before = Counter(type(thread) for thread in threading.enumerate())
    (writer,) = open_writers(WriterConfig(("mlflow",)), tmp_path, tmp_path / "none", 0, {"a": 1})
    writer.write(1, {"loss": 1.0})
    assert Counter(type(thread) for thread in threading.enumerate()) == before
    writer.close()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_run_of_a_command_stops_and_goes_on(stop, tmp_path, monkeypatch):
    """Within seconds of the signal, and no process is left over; after it, every step is there once."""
    # of this process, which W&B's children would share
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    flags = ("--metrics-to", "wandb", "mlflow", "--checkpoint-every", "4")
    with Run(write_tiny(tmp_path), tmp_path / "run", *flags, devices=2) as run:
        run.wait_for_step(6)
        began = time.monotonic()
        run.processes[0].send_signal(stop)
        run.codes(seconds=30)
        assert time.monotonic() - began < 30
    time.sleep(2)
    assert not subprocess.run(
        ["pgrep", "-f", "--", f"--pid {run.processes[0].pid}"], capture_output=True
    ).stdout
    command = [
        sys.executable,
        "-m",
        "spmd.cli",
        "train",
        tmp_path / "tiny.py",
        "--out",
        tmp_path / "run",
    ]
    command += ["--devices", "2", "--resume", "auto", *flags]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows, ids = wandb_rows(tmp_path / "run")
    steps = Counter(row["_step"] for row in rows)
    attempts = 2
    if stop == signal.SIGKILL:  # the run of the killed attempt is removed, and written again
        attempts = 1
    assert (len(ids), steps) == (attempts, Counter(range(1, 31)))
    client, found = mlflow_run(tmp_path / "run")
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [point.step for point in history] == list(range(1, 31))


def test_wandb_is_offline(tmp_path):
    """Its settings say so, and the values of the config are there."""
    (writer,) = open_writers(
        WriterConfig(("wandb",)), tmp_path, tmp_path / "none", 0, {"a": {"b": 1}}
    )
    assert writer._run.offline
    assert writer._run.config["a"] == {"b": 1}
    writer.close()
