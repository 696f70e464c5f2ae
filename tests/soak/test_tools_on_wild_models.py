"""Every tool of the command line on files with models of others, for a TPU slice and simulated devices."""

import json
import os
import subprocess
import sys

import pytest

from tests.numerics.test_wild import EXAMPLES

pytestmark = pytest.mark.soak

FILE = """
import jax
import jax.numpy as jnp

import spmd
from tests.numerics.test_wild import EXAMPLES

jax.config.update("jax_numpy_rank_promotion", "allow")
example = EXAMPLES[{name!r}]


def make(mesh, *, zero: int = 3):
    model = example.model()

    def loss_fn(params, variables, batch, key):
        outputs, variables = model.forward(params, variables, key, *example.inputs(batch), train=True)
        loss, weight = example.loss(outputs, batch)
        return {{"loss": loss, "weight": jnp.float32(weight)}}, variables

    plan = spmd.make_plan(mesh, example.rules, model, example.optimizer, zero=zero)
    return spmd.make_train_step(plan, loss_fn), example.batches[:2]
"""
MESH = ("--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2")


def spmd(folder, *arguments):
    """What a command prints, which ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "spmd_command", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_tools_take_models_of_others(name, tmp_path):
    """The compiled time is in the range of the traced step; layouts agree with one device; a setting is searched."""
    file = tmp_path / "wild.py"
    file.write_text(FILE.format(name=name), encoding="utf-8")
    machine = ("--topology", "v5e:2x4", *MESH, "--json")
    plan = json.loads(spmd(tmp_path, "plan", file, *machine, "--compile"))
    assert plan["fits"]
    assert plan["collectives"]
    assert plan["memory"]["compiled"]["total"]
    traced = json.loads(spmd(tmp_path, "plan", file, *machine, "--estimate"))
    compiled = json.loads(spmd(tmp_path, "plan", file, *machine, "--time"))
    print(name, traced["range"], compiled["seconds"])
    assert traced["range"][0] <= compiled["seconds"] <= traced["range"][1]
    page = tmp_path / "page.html"
    spmd(tmp_path, "report", file, "--topology", "v5e:2x4", *MESH, "--out", page)
    assert page.stat().st_size > 100_000
    spmd(tmp_path, "check", file, "--devices", "8", *MESH, "--check-steps", "1")
    found = json.loads(
        spmd(tmp_path, "search", file, "--topology", "v5e:2x2", "--confirm", "1", "--json")
    )
    assert found["best"]["compiled"]
