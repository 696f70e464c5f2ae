"""Runs with batches of several shapes take the steps that each batch by itself would."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd.gradients.losses import next_token_loss
from spmd.run.build import build_model, make_setup
from spmd.run.open_text import open_text_dataset
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import MeshShape
from spmd.training.step import make_train_step
from tests import tiny
from tests.command_line import run
from tests.train_runs import write_tiny

STEPS = 8
RAMP = ("--data.batch-ramp", "8:3", "16:6", "--data.batch", 32, "--accumulate", 4)
GROUPS = ("--data.packing", "grouped", "--data.sequence", 128, "--data.length-groups", 3)


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def by_hand(out: Path, seed: int = 0) -> tuple[list[float], set[tuple[int, int]]]:
    """Losses of a run's batches at once on one device, padded to the longest, and their shapes."""
    config = RunDir(out).config()
    config = dataclasses.replace(config, mesh=MeshShape(), accumulate=1, seed=seed)
    setup = make_setup(config, tiny.mesh())
    order = open_text_dataset(config).batch_order(config.data, config.seed)
    step = make_train_step(setup.plan, next_token_loss(build_model(config)))
    state = step.init_state(seed=0)
    found = []
    shapes = set()
    for number in range(STEPS):
        rows, length = order.shape(number)
        shapes.add((rows, length))
        batch = order.read(number, np.arange(rows))
        missing = ((0, 0), (0, config.data.sequence - length))
        state, metrics = step(state, {name: np.pad(x, missing) for name, x in batch.items()})
        found.append(float(metrics["loss"]))
    return found, shapes


@pytest.mark.soak
def test_a_run_may_end_within_its_ramp(tmp_path: Path, capsys: Any) -> None:
    """Its steps are of the first size, and so are the tokens that it counts."""
    path = write_tiny(tmp_path)
    flags = ["--data.batch", 32, "--data.batch-ramp", "8:1000", "--steps", 4]
    assert run("train", path, *flags, "--out", tmp_path / "out") == 0
    assert "done: 4 steps in " in (said := capsys.readouterr().out)
    assert " 512 tokens " in said  # 4 × 8 × 16
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert [line["tokens"] for line in lines if "tokens" in line] == [128] * 4


@pytest.mark.soak
@pytest.mark.parametrize("flags", [RAMP, GROUPS], ids=["ramp", "groups"])
def test_a_run_takes_the_steps_of_its_batches(flags: tuple[Any, ...], tmp_path: Path) -> None:
    """In fewer microbatches, or less padding; a run that is resumed on the way has the same losses, bitwise."""
    path = write_tiny(tmp_path)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "ab c " * (n % 30)}) for n in range(200)))
    given = [path, *flags, "--optimizer.schedule", "constant", "--data.source", texts]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("train", *given, "--out", whole, "--steps", STEPS) == 0
    assert run("train", *given, "--out", parts, "--steps", 4) == 0
    resumed = ["--out", parts, "--steps", STEPS, "--resume", "always"]
    assert run("train", *given, *resumed) == 0
    assert losses(parts) == losses(whole)
    expected, shapes = by_hand(whole)
    assert len(shapes) > 1
    np.testing.assert_allclose(losses(whole), expected, rtol=2e-5)
    unlike, _ = by_hand(whole, seed=1)
    assert np.abs(np.subtract(unlike, expected)).max() > 1e-2
