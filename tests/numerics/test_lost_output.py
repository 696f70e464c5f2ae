"""A run outlives its standard output, and a full disk under its metrics: nobody reads, or nothing can be written."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.observe.lasting_output import LastingStream, lasting_output
from spmd.resilience.preemption import EXIT_PREEMPTED
from tests.train_runs import PACED, ROOT, SLOWLY, losses, write_tiny

RULES = spmd.Rules(params=[("w", P("fsdp"))], activations=[])
MODEL = spmd.Model(lambda key: {"w": jnp.ones((4, 2))}, lambda params, x: x @ params["w"])
CONFIG = spmd.RunConfig(steps=4, log_every=1, checkpoint_every=2)


def loss_fn(params, variables, batch, key):
    return {
        "loss": (MODEL.apply(params, batch["x"]) ** 2).sum(),
        "weight": jnp.float32(8),
    }, variables


def numbers(start, steps):
    for n in range(start, steps):
        yield {"x": np.full((8, 4), n, np.float32)}


@pytest.fixture(scope="module")
def step():
    mesh = spmd.make_mesh(devices=jax.devices()[:2], fsdp=2)
    return spmd.make_train_step(spmd.make_plan(mesh, RULES, MODEL, optax.sgd(0.01)), loss_fn)


def unread_pipe():
    """A text stream into a pipe whose reader has exited."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1)


def closed_terminal():
    """A text stream onto a terminal whose other side is closed."""
    ours, theirs = pty.openpty()
    os.close(ours)
    return io.TextIOWrapper(io.FileIO(theirs, "w"), write_through=True)


def full_disk():
    return open("/dev/full", "w", buffering=1)


STREAMS = {"pipe": unread_pipe, "terminal": closed_terminal, "disk": full_disk}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_drops_what_cannot_be_written(kind):
    """With one sentence, and what is left is no error at the end; control: the stream itself raises."""
    reason = "Broken pipe|Input/output error|No space left on device"
    with pytest.raises(OSError, match=reason), STREAMS[kind]() as stream:
        print("text", file=stream, flush=True)
    said = []
    stream = STREAMS[kind]()
    lasting = LastingStream(stream, "standard output")
    lasting.listeners.append(said.append)
    for _ in range(3):
        print("text", file=lasting, flush=True)
    lasting.writelines(["a\n", "b\n"])
    lasting.finish()
    stream.close()
    assert len(said) == 1
    assert said[0].startswith("standard output cannot be written (")


def test_a_full_disk_may_be_free_again(tmp_path):
    """Later lines are written; a pipe without a reader is given up."""
    path = tmp_path / "out.txt"

    class FullAtFirst(io.FileIO):
        tries = 0

        def write(self, data):
            self.tries += 1
            if self.tries == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    file = io.TextIOWrapper(FullAtFirst(path, "w"), write_through=True)
    lasting = LastingStream(file, "standard output")
    for number in range(3):
        print(f"line {number}", file=lasting, flush=True)
    assert "line 2" in path.read_text()
    file.close()


@pytest.mark.parametrize("kind", STREAMS)
def test_a_run_continues_without_its_output(kind, step, tmp_path, monkeypatch, capsys):
    """It trains to its last step and saves; its log and standard error say once what was lost."""
    monkeypatch.setattr(sys, "stdout", STREAMS[kind]())
    run = spmd.Run(tmp_path / "run", step, numbers, config=CONFIG)
    result = run.train()
    assert (result.steps, result.checkpoint, result.exit_code) == (4, 4, 0)
    lines = run.run_dir.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    stream = sys.stdout
    assert not isinstance(stream, LastingStream), "the stream is the user's again"
    stream.close()
    monkeypatch.undo()
    assert capsys.readouterr().err.count("standard output cannot be written") == 1


def test_control_without_lasting_output_a_print_fails(step, tmp_path, monkeypatch):
    """The same pipe, and the same run outside of the block."""
    stream = unread_pipe()
    monkeypatch.setattr(sys, "stdout", stream)
    run = spmd.Run(tmp_path / "run", step, numbers, config=CONFIG)
    with pytest.raises(BrokenPipeError):
        spmd.Run.train.__wrapped__(run)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    stream.close()


def test_a_logging_handler_does_not_close_what_is_wrapped(monkeypatch):
    """The one of absl closes its stream, unless it is a standard one; the control is another stream."""
    stream, other = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with lasting_output():
        for each in (stream, other):
            if each not in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__):  # as absl asks
                each.close()
        print("still here", file=sys.stderr)
    assert stream.getvalue() == "still here\n"
    assert other.closed


def test_a_stream_that_was_closed_needs_no_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with lasting_output():
        sys.stderr.close()


def test_an_inner_block_changes_nothing(capsys):
    """Of `spmd.train` around `Run.train`: one stream, and afterwards the one before."""
    before = sys.stdout
    with lasting_output():
        outer = sys.stdout
        with lasting_output():
            assert sys.stdout is outer
        assert sys.stdout is outer
    assert sys.stdout is before


class FullDisk:
    """`os.write` that fails for files below a folder while `is_full`, but for its checkpoints."""

    def __init__(self, folder):
        self.folder = folder
        self.is_full = False
        self.failed = set()
        self._write = os.write

    def __call__(self, descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.is_full and path.startswith(str(self.folder)):
            self.failed.add(os.path.basename(path).partition(".out.")[0])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, data)


@pytest.mark.parametrize("recovers", [True, False])
def test_a_run_outlives_a_full_disk(recovers, step, tmp_path, monkeypatch, capsys):
    """Metrics, goodput, log and events wait for it; a disk that stays full costs their last lines alone."""
    disk = FullDisk(tmp_path)
    monkeypatch.setattr(os, "write", disk)

    class Fill(spmd.Hook):
        def on_metrics(self, step, metrics):
            disk.is_full = step in (1, 2) or (step > 2 and not recovers)

    config = dataclasses.replace(CONFIG, metrics_to=("tensorboard",))
    run = spmd.Run(tmp_path / "run", step, numbers, config=config, hooks=(Fill(),))
    result = run.train()
    assert (result.steps, result.checkpoint) == (4, 4)
    assert disk.failed >= {"metrics.jsonl", "goodput.jsonl", "process-0.log", "events"}
    lines = run.run_dir.metrics.read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == ([1, 2, 3, 4] if recovers else [1])
    printed = capsys.readouterr()
    said = printed.out + printed.err
    for file in (run.run_dir.metrics, run.run_dir.path / "goodput.jsonl", run.run_dir.log):
        assert said.count(f"{file} cannot be written (No space left on device)") == 1
        assert said.count(f"{file} can be written again") == recovers
        assert said.count(f"{file} lacks its last") == (not recovers)


def test_control_a_full_disk_ends_the_save_of_a_checkpoint(step, tmp_path, monkeypatch):
    """Checkpoints are not metrics: without space for one the run ends, with its path."""
    usage = shutil.disk_usage(tmp_path)._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    run = spmd.Run(tmp_path / "run", step, numbers, config=CONFIG)
    with pytest.raises(spmd.SpmdError, match=r"run/checkpoints.*has not enough disk space"):
        run.train()


@pytest.mark.soak
def test_a_run_outlives_a_disk_that_is_full_for_a_while(tmp_path):
    """A real one, of 4 MiB, between two checkpoints: all lines are there, and it says so; needs root."""
    config = write_tiny(tmp_path, PACED)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    out = disk / "run"
    more = ["--checkpoint-every", 0, "--metrics-to", "tensorboard"]
    try:
        with (tmp_path / "out.txt").open("w") as output:
            process = subprocess.Popen(
                command(config, out, *more),
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, **SLOWLY},
            )
            wait_for_step(out, 3, process)
            filler = disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            deadline = time.monotonic() + 60
            while (tmp_path / "out.txt").read_text().count("cannot be written") < 3:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            filler.unlink()
            assert process.wait(240) == 0
        assert list(losses(out)) == list(range(1, 31))
        assert (out / "checkpoints" / "30").is_dir()
        said = (tmp_path / "out.txt").read_text()
        assert said.count(f"{out / 'metrics.jsonl'} can be written again") == 1
        assert "entries were lost" not in said
    finally:
        process.kill()
        process.wait()
        subprocess.run(["umount", str(disk)], check=True)


def command(config, out, *more):
    given = [config, "--out", out, "--devices", 4, *more]
    return [sys.executable, "-m", "spmd_command", "train", *map(str, given)]


def wait_for_step(out, step, process):
    deadline = time.monotonic() + 240
    while not any(each >= step for each in losses(out)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.soak
def test_a_run_whose_pipe_is_closed_trains_to_its_end(tmp_path):
    """`spmd train … | head -1`: 0, all steps, the last checkpoint, and a sentence in standard error and the log."""
    config = write_tiny(tmp_path)
    out = tmp_path / "run"
    with (tmp_path / "err.txt").open("w") as err:
        train = subprocess.Popen(command(config, out), cwd=ROOT, stdout=subprocess.PIPE, stderr=err)
        head = subprocess.run(["head", "-1"], stdin=train.stdout, capture_output=True, check=True)
        train.stdout.close()
        assert head.stdout.count(b"\n") == 1
        assert train.wait(240) == 0
    assert max(losses(out)) == 30
    assert (out / "checkpoints" / "30").is_dir()
    sentence = "standard output cannot be written (Broken pipe): the run continues without it"
    assert (tmp_path / "err.txt").read_text().count(sentence) == 1
    assert "Traceback" not in (tmp_path / "err.txt").read_text()


@pytest.mark.soak
def test_a_run_whose_terminal_is_closed_saves(tmp_path):
    """The system sends SIGHUP to its session, and every write fails: a checkpoint, and 75."""
    config = write_tiny(tmp_path, PACED)
    out = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command(config, out)],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **SLOWLY},
    )
    os.close(theirs)
    try:
        os.set_blocking(ours, False)
        deadline = time.monotonic() + 240
        while not any(each >= 6 for each in losses(out)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            try:
                os.read(ours, 2**16)
            except BlockingIOError:
                time.sleep(0.02)
        os.close(ours)
        assert process.wait(120) == EXIT_PREEMPTED
    finally:
        process.kill()
    reached = max(losses(out))
    assert 6 <= reached < 30
    assert (out / "checkpoints" / str(reached)).is_dir()


@pytest.mark.soak
@pytest.mark.parametrize("ignored", [True, False])
def test_a_run_under_nohup_ignores_a_hangup(ignored, tmp_path):
    """It trains to its end; the control, without `nohup`, is preempted."""
    config = write_tiny(tmp_path, PACED)
    out = tmp_path / "run"
    prefix = ["nohup"] if ignored else []
    with (tmp_path / "out.txt").open("w") as output:
        process = subprocess.Popen(
            [*prefix, *command(config, out)],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, **SLOWLY},
        )
        try:
            wait_for_step(out, 3, process)
            process.send_signal(signal.SIGHUP)
            code = process.wait(240)
        finally:
            process.kill()
    assert code == (0 if ignored else EXIT_PREEMPTED)
    assert (max(losses(out)) == 30) == ignored
