"""Files of lines outlive a full disk and say so once; damaged lines are kept, and are no tracebacks."""

import contextlib
import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from spmd.observe.goodput import Stopwatch, measure_goodput
from spmd.observe.json_lines import read_json_lines
from spmd.observe.line_file import LineFile
from spmd.observe.metrics import JsonLines, Writers
from spmd.observe.tensorboard import TensorBoard
from spmd.run.run_dir import ProcessLog, RunDir
from tests.unit.test_metrics import read_events


@contextlib.contextmanager
def largest_file(size):
    """No file of this process may be larger: a write beyond is cut, and then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_control_the_limit_cuts_a_line(tmp_path):
    """A plain file has a part of the line, and the write raises."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    with (tmp_path / "file").open("ab", buffering=0) as file, largest_file(6):
        assert file.write(b"line 1\nline 2\n") == 6
        with pytest.raises(OSError, match="File too large"):
            file.write(b"more")


@pytest.mark.parametrize("size", range(15))
def test_lines_wait_while_the_disk_is_full(size, tmp_path):
    """Wherever a line is cut, all are whole afterwards and in order; two sentences say so, with the path."""
    path = tmp_path / "lines"
    said = []
    file = LineFile(path, said.append)
    with largest_file(size):
        for number in range(3):
            file.write(f"line {number}\n")
    assert len(path.read_bytes()) == size
    assert said == [
        f"{path} cannot be written (File too large): the run continues, and what belongs there "
        "waits in memory"
    ]
    file.write("line 3\n")
    file.close()
    file.close()
    assert path.read_text() == "line 0\nline 1\nline 2\nline 3\n"
    assert said[1:] == [f"{path} can be written again"]


def test_what_waits_is_bounded_and_what_is_lost_is_counted(tmp_path):
    """The first lines are kept, the file has no cut line, and a disk that stays full is said at the end."""
    path = tmp_path / "lines"
    said = []
    file = LineFile(path, said.append, most_bytes=21)
    with largest_file(10):
        for number in range(9):
            file.write(f"line {number}\n")
    file.write("line 9\n")
    assert path.read_text().splitlines() == [f"line {number}" for number in (0, 1, 2, 3, 9)]
    assert said[1] == f"{path} can be written again; 5 entries were lost in the meantime"
    with largest_file(36):
        file.write("line 10\n")
        file.close()
    assert said[-1] == f"{path} lacks its last 7 B, because it cannot be written"


def test_a_file_that_a_server_forgot_is_opened_anew(tmp_path, monkeypatch):
    """The descriptor stays the same, as faulthandler keeps it."""
    path = tmp_path / "lines"
    file = LineFile(path, [].append)
    descriptor = file.fileno()
    write = os.write

    def stale(number, data):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", stale)
        file.write("first\n")
    path.unlink()
    file.write("second\n")
    assert path.read_text() == "first\nsecond\n"
    assert file.fileno() == descriptor
    assert os.write is write
    file.close()


def test_a_cut_line_is_ended_first(tmp_path):
    """A line that a killed process left is not joined with the next one; control: a whole one."""
    for text, expected in (("cut", "cut\nnext\n"), ("whole\n", "whole\nnext\n"), ("", "next\n")):
        path = tmp_path / "lines"
        path.write_text(text)
        file = LineFile(path)
        file.write("next\n")
        file.close()
        assert path.read_text() == expected


@pytest.mark.parametrize("is_read", [False, True])
def test_a_pipe_is_refused_and_does_not_wait(is_read, tmp_path):
    """With and without a reader, at once, by its path."""
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    for make in (LineFile, JsonLines):
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            make(path)
    assert read_json_lines(path) == []
    if reader is not None:
        os.close(reader)


def test_metrics_log_and_goodput_outlive_a_full_disk(tmp_path):
    """None of them raises, each names its file once, and all lines are there in the end."""
    said = []
    metrics = JsonLines(tmp_path / "metrics.jsonl", say=said.append)
    watch = Stopwatch()
    with ProcessLog(tmp_path / "process-0.log") as log:
        with largest_file(0):
            for step in range(20):
                metrics.write(step, {"loss": 1.0})
                watch.write(tmp_path, step)
                log.say(f"step {step}")
        metrics.write(20, {"loss": 1.0})
        watch.write(tmp_path, 20)
        log.say("step 20")
    metrics.close()
    watch.close()
    assert [record["step"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == [
        *range(21)
    ]
    assert [record["step"] for record in read_json_lines(tmp_path / "goodput.jsonl")] == [
        *range(21)
    ]
    assert len((tmp_path / "process-0.log").read_text().splitlines()) == 21
    assert len(said) == 2


@pytest.mark.parametrize("size", [0, 30, 200])
def test_tensorboard_outlives_a_full_disk(size, tmp_path):
    """Its events are completed; two sentences say so."""
    said = []
    with largest_file(size):
        writer = TensorBoard(tmp_path, say=said.append)
        for step in range(30):
            writer.write(step, {"loss": 1.0})
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == size
    writer.write(30, {"loss": 1.0})
    writer.close()
    steps = [event.step for event in read_events(tmp_path) if event.summary.value]
    assert steps == list(range(31))
    assert said[0].startswith(f"{file} cannot be written (File too large)")
    assert said[1:] == [f"{file} can be written again"]


class FullAtTimes:
    """A writer whose disk is full at some steps."""

    def __init__(self, full):
        self.full = full
        self.seen = []
        self.now = 0

    def write(self, step, values):
        if self.now in self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.seen.append(step)

    def close(self):
        self.seen.append("closed")


def test_values_wait_for_a_writer(monkeypatch):
    """In order, for the one that fails alone; a writer of the user's, too."""
    said = []
    fails, works = FullAtTimes({2, 3}), FullAtTimes(())
    writers = Writers([fails, works], said.append)
    for step in range(6):
        fails.now = step
        writers.write(step, {})
        if step == 3:
            assert (fails.seen, works.seen) == ([0, 1], [0, 1, 2, 3])
    writers.close()
    assert fails.seen == works.seen == [0, 1, 2, 3, 4, 5, "closed"]
    assert len(said) == 2
    assert "FullAtTimes cannot write metrics" in said[0]
    monkeypatch.setattr("spmd.observe.metrics.MOST_WAITING", 2)
    always = FullAtTimes({0})
    writers = Writers([always], said.append)
    for step in range(5):
        writers.write(step, {})
    writers.close()
    assert said[-1] == "FullAtTimes: the values of 5 lines were lost"


def test_control_other_errors_of_a_writer_are_raised():
    """A mistake of a writer is not a full disk."""

    class Wrong(FullAtTimes):
        def write(self, step, values):
            raise KeyError("loss")

    with pytest.raises(KeyError):
        Writers([Wrong(())]).write(0, {})


DAMAGED = {
    "not JSON": b"garbage",
    "half": b'{"step": 2, "lo',
    "bytes": b"\xff\xfe\x00",
    "nested": b"[" * 200_000,
    "a nested value": b'{"step": 2, "loss": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested by 40": b'{"step": 2, "loss": ' + b"[" * 40 + b"]" * 40 + b"}",
    "10**400": b'{"step": 2, "loss": 1' + b"0" * 400 + b"}",
    "10**5000": b'{"step": 2, "loss": 1' + b"0" * 5000 + b"}",
    "1e400": b'{"step": 2, "loss": 1e400}',
    "NaN": b'{"step": 2, "loss": NaN}',
    "a large step": b'{"step": 1' + b"0" * 400 + b"}",
    "a negative step": b'{"step": -3}',
    "a text as step": b'{"step": "2"}',
    "true as step": b'{"step": true}',
    "a list": b"[3]",
    "null": b"null",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_lines_are_kept_aside(kind, tmp_path):
    """A resume moves them beside the file and says how many; the others stay byte for byte."""
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "loss":  2.5}', b'{"step": 2, "loss": 2.0, "a": [1, null], "t": "x"}']
    later = b'{"step": 9, "loss": 1.0}'
    cut = b'{"step": 3, "lo'
    path.write_bytes(b"\n".join([good[0], DAMAGED[kind], good[1], b"", later, cut]))
    said = []
    for _ in range(2):
        JsonLines(path, keep_through=5, say=said.append).close()
    assert path.read_bytes() == good[0] + b"\n" + good[1] + b"\n"
    aside = tmp_path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == DAMAGED[kind] + b"\n"
    assert said == [f"{path}: 1 line was damaged, moved to metrics.jsonl.damaged"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, aside.name]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    """Restored metrics on a full disk; the control has space."""
    folder = RunDir(tmp_path)
    folder.metrics.write_bytes(b"1\n")
    pending = {"position": 2, "lines": "2\n"}
    write = Path.write_bytes

    def full(self, data):
        write(self, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            folder.restore_metrics(pending)
    assert folder.metrics.read_bytes() == b"1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    folder.restore_metrics(pending)
    assert folder.metrics.read_bytes() == b"1\n2\n"


def test_control_nothing_damaged_nothing_aside(tmp_path):
    """The last line of a killed run goes without a word, and an intact file is not written again."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    said = []
    JsonLines(path, say=said.append).close()
    before = path.stat().st_ino
    JsonLines(path, say=said.append).close()
    assert path.stat().st_ino == before
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert said == []
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_that_cannot_be_kept_is_named(tmp_path, monkeypatch):
    """A full disk at a resume is an error with the path, before anything is lost."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    with largest_file(3), pytest.raises(OSError, match="File too large") as caught:
        JsonLines(path, keep_through=1)
    assert caught.value.filename == str(path.with_name("metrics.jsonl.tmp"))
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("kind", DAMAGED)
def test_goodput_counts_damaged_lines(kind, tmp_path):
    """And the time of the others; also lines of the wrong kind, and a step that is far away."""
    watch = Stopwatch(now=iter([10.0, 10.0, 20.0, 20.0, 30.0, 30.0]).__next__, began=0.0)
    watch.switch_to("step")
    watch.write(tmp_path, 1)
    watch.write(tmp_path, 2)
    watch.close()
    intact = measure_goodput(tmp_path)
    assert intact.damaged == 0
    path = tmp_path / "goodput.jsonl"
    wrong = [
        {"session": "0", "step": 1, "now": 1, "seconds": {"step": 1}},
        {"session": 0, "step": 1, "now": 1, "seconds": 7},
        {"session": 0, "step": 1, "now": 1, "seconds": {"step": "x"}},
        {"session": 0, "step": 1, "now": 1, "seconds": {"data": 1}},
        {"session": 0, "step": 1, "now": 1e300, "seconds": {"step": 1}},
        {"step": 1},
    ]
    lines = [DAMAGED[kind], *(json.dumps(line).encode() for line in wrong)]
    path.write_bytes(b"\n".join([*lines, path.read_bytes()]))
    found = measure_goodput(tmp_path)
    assert (found.seconds, found.damaged) == (intact.seconds, 7)
    with path.open("a") as file:
        far = {"session": 0.0, "step": 10**18, "now": 40.0, "seconds": {**intact.seconds}}
        file.write(json.dumps(far) + "\n")
    assert measure_goodput(tmp_path).sessions == 1
