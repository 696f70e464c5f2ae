"""A run that is killed again and again loses nothing: SIGKILLs at random moments leave no trace.

Each kill is a real SIGKILL of a real `spmd train` process that saves every few steps, and is
followed by a real `--resume`. A run that reaches its end is compared with one that nothing
disturbed, and another is begun.
"""

import collections
import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.manifest import MANIFEST, verify_manifest, write_manifest
from spmd.run.build import make_setup
from spmd.run.load_config import load_config
from spmd.sharding.mesh import mesh_of
from spmd.training.state import abstract_state
from tests import forked

LANES, KILLS = 2, 100
STEPS, EVERY, KEEP = 120, 4, 2
CONFIG = """
import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=DecoderConfig(vocab=256, d_model=8, layers=1, heads=2, kv_heads=1, d_ff=16),
    rules=LLAMA,
    mesh=spmd.MeshShape(fsdp=2),
    devices=2,
    data=spmd.DataConfig(source=({corpus!r},), sequence=16, batch=2, cache={cache!r}),
    evaluate=spmd.EvaluationConfig(tokens=64),
    steps={steps},
    log_every=1,
    checkpoint_every={every},
    max_to_keep={keep},
)
"""


def lines(out: Path) -> list[str]:
    """The whole lines of a run's metrics."""
    path = out / "metrics.jsonl"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def losses(out: Path) -> list[tuple[int, float]]:
    """Step and loss of each line of training, in the order of the file."""
    records = map(json.loads, lines(out))
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def entries(out: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(out / "checkpoints")
    return []


def await_moment(rng: random.Random, out: Path, log: Path, running: Callable[[], bool]) -> None:
    """Waits for a random moment: of everything, of the steps, of a save, or of its short end."""

    def until(what: Callable[[], bool]) -> None:
        while running() and not what():
            time.sleep(0.001)

    def saving(inside: str = "") -> bool:
        folders = [name for name in entries(out) if name.endswith(".saving")]
        return any((out / "checkpoints" / name / inside).exists() for name in folders)

    kind = rng.choices(("any", "steps", "save", "its end"), (25, 20, 25, 30))[0]
    seconds = {"any": 3.0, "steps": 1.0, "save": 0.15, "its end": 0.02}[kind]
    if kind != "any":
        until(lambda: has_stepped(log))
    if kind in ("save", "its end"):
        for _ in range(rng.randint(1, 4)):
            until(lambda: not saving())
            until(saving)
    if kind == "its end":
        until(lambda: saving("state"))
    end = time.monotonic() + rng.uniform(0, seconds)
    until(lambda: time.monotonic() > end)


def has_stepped(log: Path) -> bool:
    return log.exists() and "\nstep " in log.read_text()


def stage(out: Path, log: Path) -> str:
    """What a process was doing when it died, from what it left."""
    if not has_stepped(log):
        text = log.read_text() if log.exists() else ""
        return (
            "starting: restoring, compiling" if "corpus:" in text else "starting: making the plan"
        )
    names = entries(out)
    if any(name.endswith(".pruned") for name in names):
        return "removing an old checkpoint"
    for name in names:
        if name.endswith(".saving"):
            inside = os.listdir(out / "checkpoints" / name)
            if MANIFEST in inside:
                return "saving: committing"
            return "saving: sealing" if "state" in inside else "saving: writing the arrays"
    return "training between saves"


def run_lane(
    lane: int, most: int, folder: Path, config: Path, cache: Path
) -> tuple[collections.Counter[str], list[Path]]:
    """Kills runs until this lane's share of kills is used up; the stages they died in, and the finished runs."""
    rng, stages, finished, kills = random.Random(lane), collections.Counter[str](), [], 0
    with forked.command_server(config, cache) as start:
        while kills < most:
            out, seen, done = folder / f"{lane}-{len(finished)}", set[int](), False
            while not done:
                log = folder / f"log-{lane}-{len(finished)}-{kills}"
                run = start(log, ["train", config, "--out", out, "--resume", "auto"])
                if kills < most:
                    await_moment(rng, out, log, lambda run=run: not run.ended())
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(run.pid, signal.SIGKILL)
                code = run.wait()
                assert code in (0, -signal.SIGKILL), log.read_text()[-3000:]
                assert "skipped checkpoint" not in log.read_text()
                done = code == 0
                steps = {int(name) for name in entries(out) if name.isdigit()}
                damage = {step: verify_manifest(out / "checkpoints" / str(step)) for step in steps}
                assert not any(damage.values()), damage
                seen |= steps
                assert set(sorted(seen)[-KEEP:]) <= steps, "a finished checkpoint is lost"
                if not done:
                    kills += 1
                    stages[stage(out, log)] += 1
            finished.append(out)
    return stages, finished


def one_batch_off(whole: Path, out: Path) -> Path:
    """A copy of a run that goes on from its last checkpoint but one, a batch too far in the data."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    folder = out / "checkpoints" / str(STEPS - EVERY)
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(
        json.dumps({**record, "position": record["position"] + record["batch"]})
    )
    write_manifest(folder)
    return out


@pytest.mark.soak
def test_kills_at_random_moments_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, optimizer state and every loss are bitwise those of a run that nothing disturbed; nothing is lost."""
    (tmp_path / "corpus.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    config, cache, whole = tmp_path / "tiny.py", tmp_path / "xla", tmp_path / "whole"
    corpus = str(tmp_path / "corpus.txt")
    text = CONFIG.format(
        corpus=corpus, cache=str(tmp_path / "data"), steps=STEPS, every=EVERY, keep=KEEP
    )
    config.write_text(text)
    began = time.monotonic()
    with forked.command_server(config, cache) as start:
        assert start(tmp_path / "log", ["train", config, "--out", whole]).wait() == 0, (
            tmp_path / "log"
        ).read_text()
    with ThreadPoolExecutor(LANES) as pool:
        lanes = list(
            pool.map(
                lambda lane: run_lane(lane, KILLS // LANES, tmp_path, config, cache), range(LANES)
            )
        )
    stages = sum((lane[0] for lane in lanes), collections.Counter[str]())
    finished = [out for lane in lanes for out in lane[1]]

    setup = make_setup(
        load_config(str(config)), mesh_of(load_config(str(config)).mesh, jax.devices()[:2])
    )

    def final(out: Path) -> tuple[Any, Any]:
        with CheckpointManager(out / "checkpoints", read_only=True) as checkpoints:
            assert (checkpoints.latest(), checkpoints.damaged) == (STEPS, {})
            state, record = checkpoints.restore(None, abstract_state(setup.plan))
        return jax.tree.map(np.asarray, state), record

    state, record = final(whole)
    off = one_batch_off(whole, tmp_path / "off")
    with forked.command_server(config, cache) as start:
        assert (
            start(tmp_path / "log-off", ["train", config, "--out", off, "--resume", "auto"]).wait()
            == 0
        )
    with pytest.raises(AssertionError, match="not equal"):  # the control
        jax.tree.map(np.testing.assert_array_equal, final(off)[0], state)
    for out in finished:
        its_state, its_record = final(out)
        jax.tree.map(np.testing.assert_array_equal, its_state, state)
        assert its_record["position"] == record["position"]
        assert losses(out) == losses(whole)
    assert [step for step, _ in losses(whole)] == list(range(1, STEPS + 1))
    assert stages.total() == KILLS
    with capsys.disabled():
        print(
            f"\n{KILLS} kills of {len(finished)} runs in {time.monotonic() - began:.0f} s, by what they hit:"
        )
        for name, count in sorted(stages.items()):
            print(f"  {name:32} {count:3} {'#' * count}")
    assert stages.keys() >= {
        "starting: restoring, compiling",
        "saving: writing the arrays",
        "saving: sealing",
    }
