"""What clumsy and hostile people type: no traceback, no hang, no exit code 0 with nothing done.

The calls are in `hostile_calls`. Each is a process of its own, forked from one that has imported
everything.
"""

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import write_config
from tests.forked import ROOT, command_server
from tests.programs import HEEDING_INTERRUPTS
from tests.soak.hostile_calls import CALLS, Call

SECONDS = 10.0
"""Longest that a call may take."""
CRASHES = (
    "Traceback (most recent call last)",
    "terminate called",
    "Fatal Python error",
    "Check failure stack trace",
)
TINY = {
    "d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64": "d_model=16, layers=1, heads=2, kv_heads=1, d_ff=32",
    "mesh=spmd.MeshShape(data=2, fsdp=2, tensor=2)": "mesh=spmd.MeshShape()",
    "sequence=16, batch=8": "sequence=8, batch=2",
    "steps=4": "steps=2",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with the file of a tiny config."""
    folder = tmp_path_factory.mktemp("hostile")
    config = write_config(folder)
    text = config.read_text()
    for old, new in TINY.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    return folder


@pytest.fixture(scope="module")
def start(base):
    """Starts `spmd` with arguments; there is a finished run in the folder `run`, and its tokens in `cache-of-run`."""
    with command_server(base / "tiny.py", base / "programs") as start:
        assert start(base / "log", ["train", base / "tiny.py", "--out", base / "run"]).wait() == 0
        shutil.copytree(base / "cache", base / "cache-of-run")  # other calls have other texts
        yield start


def write_files(files: Mapping[str, str], folder: Path, config: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        name, _, target = name.partition(" -> ")
        path = folder / name.rstrip("|")
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(target)
        elif name.endswith("|"):
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        else:
            path.write_text(text.replace("{config!r}", repr(str(config))))


def problems_of(call: Call, code: int | None, output: str, seconds: float) -> list[str]:
    """What is wrong with how a call ended; `code` is None if it had to be killed."""
    problems = [f"printed {crash!r}" for crash in CRASHES if crash in output]
    if code is None or seconds > SECONDS:
        problems.append(f"hangs: {seconds:.0f} s")
    elif code != call.code:
        problems.append(f"exit code {code}, not {call.code}")
    if not re.search(call.says, output, re.DOTALL):
        problems.append(f"does not say {call.says!r}")
    return problems


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, i) for kind, calls in CALLS.items() for i in range(len(calls))]
)
def test_every_call_is_answered(kind, number, base, start, tmp_path):
    """A mistake is an error of ours that names it, at once; what can work does."""
    call = CALLS[kind][number]
    folder, log, config = tmp_path / "folder", tmp_path / "log", base / "tiny.py"
    write_files(call.files, folder, config)
    copy = tmp_path / "copy"
    if call.damage:
        shutil.copytree(base / "run", copy)
        write_files(call.damage, copy, config)
    values = {"config": config, "run": base / "run", "out": tmp_path / "out", "folder": folder}
    values["copy"] = copy
    began = time.monotonic()
    process = start(log, [argument.format(**values) for argument in shlex.split(call.arguments)])
    ended = select.select([process._output], [], [], SECONDS)[0]
    if not ended:
        subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
        subprocess.run(["kill", "-KILL", str(process.pid)], check=False)
    code = process.wait()
    output = log.read_text(errors="replace")
    problems = problems_of(call, code if ended else None, output, time.monotonic() - began)
    assert not problems, f"spmd {call.arguments}: {problems}\n{output[-3000:]}"


def change(array, how):
    """Ids as damage leaves them in a file that NumPy reads without an error."""
    if how == "shorter":
        return array[: len(array) // 2]
    if how == "longer":
        return np.concatenate([array, array])
    other = array.copy()
    other[len(other) // 2 :] = 40_000
    return other


@pytest.mark.parametrize("name", ["train", "validation", "train_ends", "validation_ends"])
@pytest.mark.parametrize("how", ["shorter", "longer", "beyond the vocabulary"])
def test_a_cache_of_other_tokens_is_said_and_made_again(how, name, base, start, tmp_path):
    """The metrics are those of the intact cache, to the bit."""
    cache = shutil.copytree(base / "cache-of-run", tmp_path / "cache")
    (path,) = cache.glob(f"*/{name}.npy")
    np.save(path, change(np.load(path), how))
    out = tmp_path / "out"
    arguments = ["train", base / "tiny.py", "--out", out, "--data.cache", cache]
    assert start(tmp_path / "log", arguments).wait() == 0
    output = (tmp_path / "log").read_text()
    assert f"were damaged ({name} " in " ".join(output.split())
    losses = [
        [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (out, base / "run")
    ]
    assert losses[0] == losses[1]


def test_there_are_enough_calls():
    """At least 250 calls, and none twice."""
    calls = [
        (call.arguments, tuple(call.files.items()), tuple(call.damage.items()))
        for calls in CALLS.values()
        for call in calls
    ]
    assert len(calls) >= 250
    assert len(set(calls)) == len(calls)


@pytest.mark.parametrize(
    ("code", "output", "seconds"),
    [
        (0, "steps", 1.0),
        (2, "nothing", 1.0),
        (2, "steps\nTraceback (most recent call last)", 1.0),
        (None, "steps", 99.0),
    ],
)
def test_control_every_kind_of_bad_answer_is_seen(code, output, seconds):
    """Exit code 0, an error that names nothing, a traceback and a hang are each a problem; a good answer is none."""
    call = Call("train --steps 0", "steps")
    assert problems_of(call, code, output, seconds)
    assert not problems_of(call, 2, "steps: is 0", 1.0)


def wait_for_a_second_thread(process):
    """Return once a process has started a thread, or raise when it ended or took a minute."""
    threads = Path("/proc", str(process.pid), "task")
    deadline = time.monotonic() + 60
    while len(list(threads.iterdir())) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("after", [0.0, 0.1, 0.6, 1.3, 2.3, 4.0, 6.0])
def test_an_interrupt_ends_a_run_at_any_moment(after, times, tmp_path):
    """Ctrl-C once or twice, while Python imports, XLA compiles or it trains: 130 at once, and no traceback.

    Seconds are counted from the thread that waits for interrupts, the first one that the command
    starts: until then Python itself starts, for as long as a busy machine takes, and no line of
    this project has run.
    """
    command = [
        sys.executable,
        "-m",
        "spmd_command",
        "train",
        "demo",
        "--out",
        str(tmp_path / "out"),
        "--devices",
        "2",
    ]
    mesh = ["--mesh.data", "1", "--mesh.tensor", "1", "--compilation-cache-dir", "none"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*HEEDING_INTERRUPTS, *command, *mesh], **pipes, cwd=ROOT)
    try:
        wait_for_a_second_thread(process)
        time.sleep(after)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        began = time.monotonic()
        output, _ = process.communicate(timeout=SECONDS)
        assert time.monotonic() - began < SECONDS
    finally:
        process.kill()
    assert "Traceback" not in output
    assert process.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize(
    "arguments", [["plan", "demo"], ["--help"], ["plan", "demo", "--json"], ["train", "--help"]]
)
def test_a_full_disk_behind_the_output(arguments):
    """Output to /dev/full: one line that says so, and not 0."""
    command = [sys.executable, "-m", "spmd_command", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=60
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
