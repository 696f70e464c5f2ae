"""Numbers carry their formula, what is not reported is None, and a curve joins after a kill."""

import importlib
import io
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from spmd.chips import known_peaks, peak_flops
from spmd.errors import ConfigError
from spmd.observe.console import Console
from spmd.observe.json_lines import read_json_lines
from spmd.observe.metrics import (
    Flops,
    JsonLines,
    StepClock,
    Writers,
    device_memory,
    human_count,
    human_duration,
    mean_keys,
    process_peak_rss,
    transformer_flops,
    utilization,
)
from spmd.observe.tensorboard import TensorBoard, _hidden


class FakeDevice:
    """What a device says of itself."""

    def __init__(self, device_kind: str = "cpu", stats: dict[str, int] | None = None) -> None:
        self.device_kind = device_kind
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def test_transformer_flops_and_their_formula() -> None:
    """The count is 6N + 12LAK, where K is half of a sequence in causal attention; the formula says so."""
    causal = transformer_flops(1_000_000, layers=2, attention_width=64, keys=mean_keys(128))
    assert causal.per_token == 6_000_000 + 6 * 2 * 64 * 128
    assert (
        "6·N + 12·L·A·K with N=1M matmul parameters, L=2, A=64, K=64 keys on average"
        in causal.formula
    )


def test_a_flop_count_of_nothing_is_refused() -> None:
    """A count that is zero or not finite cannot become a utilization."""
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="per_token"):
            Flops(wrong, "")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_device_kind(kind: str, expected: float | None) -> None:
    """The longest name that occurs in whole words decides; a device that is not in the table has no peak."""
    assert peak_flops(kind) == expected


def test_every_peak_is_reachable() -> None:
    """No entry of the table hides behind another."""
    assert {name: peak_flops(f"x {name} y") for name in known_peaks()} == known_peaks()


def test_utilization_is_over_all_devices() -> None:
    """Half of the peak of two devices is 0.5; one device without a known peak makes it not reported."""
    flops = Flops(197e12 / 1000, "")
    tpus: Any = [FakeDevice("TPU v5 lite")] * 2
    assert utilization(flops, 1000, tpus) == 0.5
    assert utilization(flops, 1000, [*tpus, FakeDevice("cpu")]) is None
    assert utilization(flops, 1000, []) is None


def test_step_clock_statistics() -> None:
    """The median and the 95th percentile are over the last steps of the window only."""
    times = np.cumsum([0, 1000, *range(1, 21)]).tolist()
    clock = StepClock(window=20, now=iter(times).__next__)
    assert clock.median is None
    assert clock.p95 is None
    for _ in times:
        clock.finished()
    assert clock.median == 10.5
    assert clock.p95 == 19


def test_step_clock_leaves_pauses_out() -> None:
    """The time between a restart and the next finished step belongs to no step."""
    clock = StepClock(now=iter([0.0, 1.0, 100.0, 101.0]).__next__)
    clock.finished()
    clock.finished()
    clock.restart()
    clock.finished()
    clock.finished()
    assert clock.p95 == 1.0


def test_memory_is_of_the_fullest_device_or_not_reported() -> None:
    """A backend that reports nothing gives None, never 0."""
    assert device_memory(jax.local_devices()) is None
    devices: Any = [FakeDevice(stats={"peak_bytes_in_use": n}) for n in (3, 7)] + [
        FakeDevice(stats={})
    ]
    assert device_memory(devices) == 7


def test_peak_rss_is_in_bytes() -> None:
    """A process with JAX in it holds tens of megabytes, and less than a terabyte."""
    assert 2**25 < process_peak_rss() < 2**40


def test_json_lines_are_plain_json(tmp_path: Path) -> None:
    """The step comes first, scalars of NumPy and JAX are numbers, and what is not finite stays valid JSON."""
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonLines(path)
    values = {
        "loss": np.float32(0.5),
        "rate": jax.device_put(np.float32(0.25)),
        "n": 3,
        "note": "µ",
    }
    writer.write(1, values)
    writer.write(2, {"loss": math.nan, "norm": -math.inf})
    writer.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"step": 1, "loss": 0.5, "rate": 0.25, "n": 3, "note": "µ"}'

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(lines[1], parse_constant=refuse) == {
        "step": 2,
        "loss": None,
        "norm": None,
        "non_finite": {"loss": "nan", "norm": "-inf"},
    }


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_cut_last_line_does_not_break_resume(tmp_path: Path, cut: int) -> None:
    """Wherever a kill cuts the last line, even within a letter, the file opens and the next line is whole."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    writer.write(1, {"loss": 2.0})
    writer.write(2, {"text": "µµ"})
    writer.close()
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    assert len(last) > 23
    path.write_bytes(whole[: len(whole) - cut])
    writer = JsonLines(path, keep_through=2)
    writer.write(3, {"loss": 1.0})
    writer.close()
    assert [record["step"] for record in read_json_lines(path)] == (
        [1, 2, 3] if cut == 1 else [1, 3]
    )
    assert path.read_bytes().count(b"\n") == len(read_json_lines(path))


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    """Lines after the checkpoint's step go, in one replacement; without a step all lines stay."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    for step in range(5):
        writer.write(step, {"loss": float(step)})
    writer.close()
    JsonLines(path).close()
    assert [record["step"] for record in read_json_lines(path)] == [0, 1, 2, 3, 4]
    writer = JsonLines(path, keep_through=2)
    writer.write(3, {"loss": 30.0})
    writer.close()
    assert [record["loss"] for record in read_json_lines(path)] == [0.0, 1.0, 2.0, 30.0]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while later steps are dropped leaves the old file whole."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    for step in range(3):
        writer.write(step, {"loss": 1.0})
    writer.close()
    before = path.read_bytes()

    def crash(_: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(OSError, match="full"):
            JsonLines(path, keep_through=0)
    assert path.read_bytes() == before
    JsonLines(path, keep_through=0).close()
    assert [record["step"] for record in read_json_lines(path)] == [0]


def test_a_killed_process_loses_no_finished_line(tmp_path: Path) -> None:
    """Every line that was written before SIGKILL is in the file."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys; from spmd.observe.metrics import JsonLines; writer = JsonLines(sys.argv[1])\n"
        "for step in range(100): writer.write(step, {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["step"] for record in read_json_lines(path)] == list(range(100))


def test_what_is_not_reported_is_null_or_left_out(tmp_path: Path) -> None:
    """None is null in JSON, no point in TensorBoard and no column on the console."""
    stream = io.StringIO()
    writers = Writers(
        [JsonLines(tmp_path / "m.jsonl"), TensorBoard(tmp_path / "tb"), Console(9, stream)]
    )
    writers.write(1, {"loss": 1.0, "mfu": None, "step_s": None})
    writers.close()
    assert read_json_lines(tmp_path / "m.jsonl") == [
        {"step": 1, "loss": 1.0, "mfu": None, "step_s": None}
    ]
    assert [v.tag for e in read_events(tmp_path / "tb") for v in e.summary.value] == ["loss"]
    assert stream.getvalue() == "step 1/9   loss  1.0000\n"


def test_arrays_are_lists_and_histograms_and_not_on_the_console(tmp_path: Path) -> None:
    """One number for each layer and expert, four digits of it."""
    stream = io.StringIO()
    writers = Writers(
        [JsonLines(tmp_path / "m.jsonl"), TensorBoard(tmp_path / "tb"), Console(9, stream)]
    )
    writers.write(
        1, {"loss": 1.0, "expert_load": np.array([[1.23456, 0.0], [math.inf, 2.0]], np.float32)}
    )
    writers.close()
    (line,) = read_json_lines(tmp_path / "m.jsonl")
    assert line["expert_load"] == [[1.235, 0.0], [None, 2.0]]
    histograms = [
        v for e in read_events(tmp_path / "tb") for v in e.summary.value if v.HasField("histo")
    ]
    assert [(v.tag, v.histo.num) for v in histograms] == [("expert_load", 3)]
    assert stream.getvalue() == "step 1/9   loss  1.0000\n"


def read_events(folder: Path) -> list[Any]:
    """The events of a folder, from the framing of TFRecord: length, its checksum, data, its checksum."""
    events = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return events


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    """Numbers are scalars at their step, texts are texts, and a resume starts a session after its step."""
    for keep_through, step in ((None, 5), (3, 4)):
        writer = TensorBoard(tmp_path, keep_through)
        writer.write(step, {"loss": 2.5, "note": "hello"})
        writer.close()
    events = read_events(tmp_path)
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
    assert scalars == [(5, "loss", 2.5), (4, "loss", 2.5)]
    texts = [
        v.tensor.string_val[0] for e in events for v in e.summary.value if v.HasField("tensor")
    ]
    assert texts == [b"hello", b"hello"]
    assert [event.step for event in events if event.HasField("session_log")] == [4]


def test_tensorboard_starts_no_thread_that_an_interrupt_could_leave_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing after Ctrl-C in the first write does not wait for one: tensorboardX's own writer did, forever."""
    before = threading.active_count()
    writer = TensorBoard(tmp_path)
    monkeypatch.setattr(writer, "_add", lambda **fields: signal.raise_signal(signal.SIGINT))
    # a shell's jobs ignore it
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.write(1, {"loss": 2.5})
    finally:
        signal.signal(signal.SIGINT, before_test)
    assert threading.active_count() == before
    writer.close()


class Recorder:
    """A writer that remembers, and fails to close where told to."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[Any] = []
        self.fails = fails

    def write(self, step: int, values: Any) -> None:
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.seen.append("closed")
        if self.fails:
            raise OSError("the disk is full")


def test_writers_pass_on_and_close_all() -> None:
    """Every writer gets every value, and all are closed even where one of them fails."""
    recorders = [Recorder(), Recorder(fails=True), Recorder()]
    said: list[str] = []
    writers = Writers(recorders, said.append)
    writers.write(3, {"loss": 1.0})
    writers.close()
    assert said == ["Recorder could not be closed: the disk is full"]
    assert [recorder.seen for recorder in recorders] == [[(3, {"loss": 1.0}), "closed"]] * 3


def test_numbers_for_people() -> None:
    """Units change where three digits no longer fit, and never show 1000 of the smaller one."""
    counts = [human_count(n) for n in (0, 999, 999.6, 1500, 999_400, 999_600, 3e12, 3e15)]
    assert counts == ["0", "999", "1k", "1.5k", "999k", "1M", "3T", "3e+03T"]
    times = [human_duration(s) for s in (0, 0.00123, 0.9994, 0.9996, 59.94, 59.96, 3599.6)]
    assert times == ["0 ms", "1.23 ms", "999 ms", "1 s", "59.9 s", "1:00", "1:00:00"]


def test_a_hidden_package_is_missing_inside_and_there_afterwards():
    """One that is imported already stays: whoever has it goes on to use it."""
    sys.modules.pop("this", None)
    with _hidden("this"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("this")
    assert "this" not in sys.modules
    with _hidden("json"):
        assert importlib.import_module("json") is json
    assert sys.modules["json"] is json
