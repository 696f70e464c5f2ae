"""Runs whose folder is in a bucket: the same bits as on a disk, whatever happens to them and to the store."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.report.run_data import read_run
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.run.run_dir import RunDir
from spmd.storage.address import locate
from spmd.storage.bucket import Bucket
from tests.object_stores import FaultProxy, started_servers
from tests.train_runs import (
    PACED,
    ROOT,
    Run,
    assert_same,
    children,
    losses,
    metrics,
    state,
    train,
    write_tiny,
)

NUMBER = itertools.count()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with started_servers(tmp_path_factory.mktemp("gcs")) as found:
        yield found


@pytest.fixture
def s3(servers):
    return servers["s3"]


@pytest.fixture
def key():
    return f"runs/{next(NUMBER)}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A config, and the folder of its run on disk, which nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_tiny(folder, PACED)
    train(config, folder / "whole")
    return config, folder / "whole"


def assert_same_run(config, out, whole):
    """The same metrics, but for times, and the same state."""

    def values(place):
        lines = []
        for line in metrics(place):
            lines.append(
                {name: line[name] for name in ("step", "loss", "val_loss") if name in line}
            )
        return lines

    assert values(out) == values(whole)
    assert_same(state(config, out, 30, fsdp=4), state(config, whole, 30, fsdp=4))


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "spmd.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.soak
def test_a_killed_run_resumes_with_the_same_bits(s3, key, whole, tmp_path):
    """Killed between saves and in one, also the training process alone, and with SIGTERM."""
    config, expected = whole
    out = s3.address(key)
    with Run(config, out, printed=tmp_path / "killed") as run:
        run.wait_for_step(8)
        run.processes[0].kill()
    with Run(config, out, "--resume", "auto", printed=tmp_path / "stopped") as run:
        run.wait_for_step(14)
        os.kill(children(run.processes[0].pid)[0], signal.SIGKILL)
        run.wait_for_step(20)
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes() == [EXIT_PREEMPTED]
    train(config, out, "--resume", "auto", "--max-restarts", "5", printed=tmp_path / "last")
    assert_same_run(config, out, expected)
    assert (tmp_path / "last.0.txt").read_text().count("resuming from step") == 1
    assert re.search(
        r"^resuming from step 1[4-9] in memory$",
        (tmp_path / "stopped.0.txt").read_text(),
        re.MULTILINE,
    )
    assert "attempts/process-0.jsonl" in Bucket(locate(out)).list("attempts/")
    report = read_run(out)
    assert report.step == 30
    assert report.name == key.rpartition("/")[2]
    assert report.goodput.sessions == 4
    assert report.checkpoints[-1] == 30


@pytest.mark.soak
def test_commands_take_a_run_in_a_bucket(s3, key, whole, tmp_path):
    """Each command that takes a run."""
    config, _ = whole
    out = s3.address(key)
    train(config, out, "--steps", "10", printed=tmp_path / "short")
    code, text, errors = command("eval", out, "--json", "--tokens", "256", "--devices", "4")
    assert (code, errors.count("Traceback")) == (0, 0)
    assert json.loads(text)["tokens"] > 0
    code, text, errors = command("generate", out, "--prompt", "line", "--tokens", "3")
    assert code == 0
    assert text.startswith("line")
    code, text, errors = command("status", out, "--json")
    status = json.loads(text)
    assert (code, status["step"], status["is_done"]) == (0, 10, True)
    assert not status["lease"]["is_alive"]
    code, text, errors = command("report", out, "--out", f"{out}/report.html")
    assert (code, errors.count("Traceback")) == (0, 0)
    assert f"written to {out}/report.html" in text
    assert Bucket(locate(out)).read("report.html").startswith(b"<!DOCTYPE html>")
    code, text, errors = command("export", out, "--out", tmp_path / "exported")
    assert code == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_run_in_google_cloud_storage(servers, key, whole, tmp_path):
    config, expected = whole
    out = servers["gs"].address(key)
    with Run(config, out, printed=tmp_path / "killed") as run:
        run.wait_for_step(8)
        run.processes[0].kill()
    train(config, out, "--resume", "auto", printed=tmp_path / "last")
    assert_same_run(config, out, expected)


@pytest.mark.soak
def test_what_a_run_starts_from_may_be_in_a_bucket(s3, key, whole, tmp_path):
    """Its text, and a Hugging Face folder or a run as initial parameters: the losses of the same on a disk."""
    config, expected = whole
    assert command("export", expected, "--out", tmp_path / "hf")[0] == 0
    train(config, s3.address(f"{key}/run"), printed=tmp_path / "first")
    objects = Bucket(locate(s3.address(key)))
    objects.write("texts/corpus.txt", (config.parent / "corpus.txt").read_bytes())
    for file in (tmp_path / "hf").iterdir():
        objects.write(f"hf/{file.name}", file.read_bytes())
    flags = ("--steps", 4, "--optimizer.warmup-steps", 1)
    source = ("--data.source", s3.address(f"{key}/texts/corpus.txt"))
    home = {"environment": {"HOME": str(tmp_path)}}
    for name, on_disk in (("hf", tmp_path / "hf"), ("run", expected)):
        train(config, tmp_path / name, "--init", on_disk, *flags)
        out = s3.address(f"{key}/from-{name}")
        init = s3.address(f"{key}/{name}")
        train(config, out, "--init", init, *source, *flags, printed=tmp_path / f"{name}-2", **home)
        assert losses(out) == losses(tmp_path / name)
        assert losses(out) != dict(itertools.islice(losses(expected).items(), 4))
    assert list((tmp_path / ".cache").rglob("config.json"))
    assert not list((tmp_path / ".cache").rglob("*.safetensors"))  # read in ranges


@pytest.mark.soak
def test_a_model_is_imported_from_a_bucket_into_another_place_of_it(s3, key, whole, tmp_path):
    """Its config is read there, too, and it trains under a supervisor as the folder does by `--init`."""
    config, expected = whole
    assert command("export", expected, "--out", tmp_path / "hf")[0] == 0
    objects = Bucket(locate(s3.address(key)))
    for file in (tmp_path / "hf").iterdir():
        objects.write(f"hf/{file.name}", file.read_bytes())
    made = s3.address(f"{key}/imported")
    importing = ("import", s3.address(f"{key}/hf"), "--out", made, "--devices", "4")
    code, text, errors = command(*importing)
    assert code == 0, errors
    assert f"spmd train {made}/config.py --init {made}" in text
    assert objects.list("imported/checkpoints/steps/") == ["imported/checkpoints/steps/0.json"]
    code, _, errors = command(*importing)
    assert code == 2
    assert f"{made}: contains a run" in errors
    used = s3.address(f"{key}/hf")
    code, _, errors = command("import", used, "--out", used, "--devices", "4")
    assert code == 2
    assert f"{used}: exists" in errors
    flags = ("--steps", 4, "--log-every", 1, "--data.source", config.parent / "corpus.txt")
    shapes = ("--data.sequence", 16, "--data.batch", 8)
    cache = ("--compilation-cache-dir", s3.address(f"{key}/programs"))
    out = s3.address(f"{key}/tuned")
    code, _, errors = command(
        "train", f"{made}/config.py", "--init", made, "--out", out, *flags, *shapes, *cache
    )
    assert code == 0, errors
    assert "without a supervisor" not in errors
    assert any("jit__step" in name for name in objects.list("programs/"))
    on_disk = tmp_path / "config.py"
    on_disk.write_bytes(objects.read("imported/config.py"))
    train(on_disk, tmp_path / "tuned", "--init", tmp_path / "hf", *flags, *shapes)
    assert losses(out) == losses(tmp_path / "tuned")


@pytest.mark.soak
def test_two_processes_import_into_a_bucket(s3, key, whole, tmp_path):
    """They train as from the Hugging Face folder; a second run finds its step in a cache of programs."""
    config, expected = whole
    hf, made = tmp_path / "hf", s3.address(f"{key}/imported")
    assert command("export", expected, "--out", hf)[0] == 0
    importing = ("import", hf, "--out", made, "--devices", "4", "--mesh.fsdp", "4")
    code, _, errors = command("launch", "--processes", "2", "--", *importing)
    assert code == 0, errors
    flags = ("--steps", 4, "--optimizer.warmup-steps", 1)
    cache = ("--compilation-cache-dir", s3.address(f"{key}/programs"))
    options = {"processes": 2, "devices": 2}
    train(config, tmp_path / "from-hf", "--init", hf, *flags, **options)
    programs = []
    for name in ("first", "second"):
        out = s3.address(f"{key}/{name}")
        own = {"printed": tmp_path / name, "environment": {"HOME": str(tmp_path / name)}}
        train(config, out, "--init", made, *flags, *cache, **options, **own)
        assert losses(out) == losses(tmp_path / "from-hf")
        found = Bucket(locate(s3.address(f"{key}/programs"))).list()
        # others are kept if they took a second to compile
        programs.append([program for program in found if "jit__step" in program])
    assert programs[0] == programs[1]
    assert programs[0]


@pytest.mark.soak
def test_a_step_is_compiled_ahead_into_a_bucket(s3, key, whole, tmp_path):
    """In place of the one that is there; the run loads it, and is that of a step that it compiled."""
    config, expected = whole
    out = s3.address(key)
    Bucket(locate(out)).write("compiled_step", b"of another step")
    code, text, errors = command("compile", config, "--topology", "cpu:4", "--out", out)
    assert code == 0, errors
    assert f"written to {out}/compiled_step" in text
    assert Bucket(locate(out)).list() == ["compiled_step"]
    train(config, out, printed=tmp_path / "run")
    log = RunDir(locate(out)).log.read_text()
    assert f"loaded the compiled step from {out}/compiled_step" in log
    assert "compiled the step in" not in log
    assert losses(out) == losses(expected)


@pytest.mark.soak
def test_two_processes_save_their_shards(s3, key, whole, tmp_path):
    config, expected = whole
    out = s3.address(key)
    options = {"processes": 2, "devices": 2}
    with Run(config, out, printed=tmp_path / "killed", **options) as run:
        run.wait_for_step(8)
        for process in run.processes:
            process.kill()
    train(config, out, "--resume", "auto", printed=tmp_path / "last", **options)
    assert [line["step"] for line in metrics(out)] == [line["step"] for line in metrics(expected)]
    assert {"logs/process-0.log", "logs/process-1.log"} <= set(Bucket(locate(out)).list("logs/"))
    restored = state(config, out, 30, fsdp=4)
    assert int(restored.step) == 30


@pytest.mark.soak
def test_two_processes_go_on_from_memory(s3, key, whole, tmp_path):
    """One is killed: the other's supervisor learns it from the bucket or from its process, and both start again."""
    config, expected = whole
    out = s3.address(key)
    options = {"processes": 2, "devices": 2}
    with Run(config, out, printed=tmp_path / "run", **options) as run:
        run.wait_for_step(8)
        os.kill(children(run.processes[1].pid)[0], signal.SIGKILL)
        assert run.codes() == [0, 0]
    assert "in memory" in (tmp_path / "run.0.txt").read_text()
    assert [line["step"] for line in metrics(out)] == [line["step"] for line in metrics(expected)]
    assert Bucket(locate(out)).list("generations/") == ["generations/1.failed"]


@pytest.mark.soak
def test_training_goes_on_while_the_store_is_away(s3, key, whole, tmp_path):
    """For ten seconds, with saves in them: the run ends as if nothing had been, and its log says what was."""
    config, expected = whole
    with FaultProxy(s3) as proxy:
        out = s3.through(proxy, key)
        with Run(config, out, printed=tmp_path / "run") as run:
            run.wait_for_step(6)
            proxy.fault = "cut"
            time.sleep(10)
            proxy.fault = "none"
            assert run.codes() == [0]
    address = s3.address(key)
    assert_same_run(config, address, expected)
    log = RunDir(locate(address)).log.read_text()
    assert "does not answer" in log
    assert "answers again" in log


@pytest.mark.soak
def test_a_second_run_is_refused(s3, key, whole, tmp_path):
    config, _ = whole
    out = s3.address(key)
    with Run(config, out, "--steps", "3000", printed=tmp_path / "run") as run:
        run.wait_for_step(2)
        code, _, errors = command(
            "train", config, "--out", out, "--resume", "auto", "--devices", "4"
        )
        assert code == 2
        assert f"{out}: process {children(run.processes[0].pid)[0]} on" in errors
        assert run.processes[0].poll() is None


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("s3://no-such-bucket/run", "the bucket no-such-bucket does not exist"),
        pytest.param(
            "gs://no-such-bucket/run",
            "the bucket no-such-bucket does not exist",
            marks=pytest.mark.soak,
        ),
        ("s3://test-bucket", "names a bucket without a key"),
        pytest.param(
            "s3://test-bucket/run?endpoint=http://127.0.0.1:1",
            "does not answer",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_bad_places_are_one_sentence(servers, whole, out, expected, monkeypatch):
    config, _ = whole
    code, text, errors = command("train", config, "--out", out, "--devices", "4")
    assert code == 2
    assert expected in errors
    assert "Traceback" not in errors
    assert "compiling" not in text


def test_refused_credentials_are_one_sentence(s3, key, whole):
    """At the start; nothing is written."""
    config, _ = whole
    with FaultProxy(s3, "deny") as proxy:
        code, _, errors = command(
            "train", config, "--out", s3.through(proxy, key), "--devices", "4"
        )
    assert code == 2
    assert "access is refused" in errors
    assert "Traceback" not in errors
    assert not Bucket(locate(s3.address(key))).list()


SAVE = """
import jax, jax.numpy as jnp, sys
from jax.sharding import NamedSharding, PartitionSpec as P
from spmd.checkpoint.manager import CheckpointManager
from spmd.sharding.mesh import simulate_devices

simulate_devices(2)
mesh = jax.make_mesh((2,), ("fsdp",))
state = {name: jax.device_put(jnp.arange(8.0) + int(sys.argv[2]), NamedSharding(mesh, P("fsdp"))) for name in "ab"}
with CheckpointManager(sys.argv[1], owner=int(sys.argv[3]), max_to_keep=1, keep_best=0) as checkpoints:
    print("open", checkpoints.latest_valid(), flush=True)
    input()
    checkpoints.save(int(sys.argv[2]), state)
print("saved", flush=True)
"""


def kill_in_save(proxy, address, step, requests):
    """A process that is killed when a number of its save's requests were answered; whether that was before its end."""
    arguments = [sys.executable, "-c", SAVE, address, str(step), str(step)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdout.readline().startswith("open")
        proxy.skip, proxy.times = requests, float("inf")
        proxy.fault = "hang"
        begun = proxy.requests
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None and proxy.requests - begun <= requests:
            time.sleep(0.005)
        killed = process.poll() is None
        process.kill()
        proxy.fault = "none"
    return killed


@pytest.mark.soak
def test_kills_at_random_moments_leave_the_last_checkpoint(s3, key, whole, tmp_path):
    """Eight kills of a supervisor and its process: committed checkpoints stay, and in the end the run is the whole."""
    config, expected = whole
    out = s3.address(key)
    rng = random.Random(0)
    flags = ("--resume", "auto", "--checkpoint-every", 1)
    newest = 0
    for number in range(8):
        with Run(config, out, *flags, printed=tmp_path / f"killed-{number}") as run:
            run.wait_for_step(newest + 1)
            time.sleep(rng.uniform(0, 0.4))
            run.processes[0].kill()
        steps = RunDir(locate(out)).checkpoint_steps()
        with CheckpointManager(RunDir(locate(out)).checkpoints, read_only=True) as checkpoints:
            assert checkpoints.latest_valid() == max(steps, default=None)
            assert not checkpoints.damaged
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    train(config, out, *flags, printed=tmp_path / "last")
    assert_same_run(config, out, expected)


@pytest.mark.soak
def test_three_kills_without_a_checkpoint_end_the_run(s3, key, whole, tmp_path):
    """Attempts are counted in the bucket, as on a disk."""
    config, _ = whole
    out = s3.address(key)
    flags = ("--resume", "auto", "--max-restarts", 3, "--steps", 3000, "--checkpoint-every", 0)
    attempts = Bucket(locate(out)).below("attempts")
    for number in range(1, 4):
        with Run(config, out, *flags, printed=tmp_path / f"killed-{number}") as run:
            while f'"attempt": {number}' not in attempts_text(attempts):
                assert run.processes[0].poll() is None, run.text()
                time.sleep(0.05)
            run.processes[0].kill()
    with Run(config, out, *flags, printed=tmp_path / "refused") as run:
        assert run.codes() == [2]
        assert "3 attempts in a row ended without a checkpoint" in run.text()


def attempts_text(attempts):
    return b"".join(attempts.read(name) for name in attempts.list("process-0")).decode()


@pytest.mark.soak
def test_a_save_that_is_killed_at_any_request_leaves_the_last_checkpoint(s3, key):
    """After each number of answered requests; until the manifest is written, the checkpoint before is the newest."""
    address = s3.address(key)
    with FaultProxy(s3) as proxy:
        through = s3.through(proxy, key)
        assert not kill_in_save(proxy, through, 1, 10_000)
        newest = []
        for requests in range(40):
            step = requests + 2
            killed = kill_in_save(proxy, through, step, requests)
            done = subprocess.run(
                [sys.executable, "-c", SAVE, address, "0", "0"],
                input="",
                capture_output=True,
                cwd=ROOT,
                text=True,
            )
            newest.append(int(done.stdout.split()[1]))
            if not killed:
                break
    assert newest[0] == 1
    assert newest[-1] == len(newest) + 1
    changes = [step for step in newest if step != 1]
    assert changes == sorted(changes)
    assert os.environ["AWS_ENDPOINT_URL"]
