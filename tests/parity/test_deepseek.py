"""A small DeepSeek-V3 on meshes that together have every pair of axes: the numbers of one device, and resumed bits.

It has latent attention, a dense first layer, shared and routed experts that biases balance, and a
module that predicts one token more.
"""

import dataclasses
import itertools

import pytest

from spmd.models.deepseek import PRESETS
from spmd.sharding.mesh import AXES
from tests.command_line import TEXT, run
from tests.parity.decoders import compare
from tests.tiers import soak_but
from tests.train_runs import assert_same, state

DEEPSEEK = dataclasses.replace(PRESETS["test-deepseek"], predict_ahead=1)
MESHES = (
    "data-fsdp-expert",
    "data-fsdp-sequence",
    "data-tensor-pipe",
    "fsdp-tensor-pipe",
    "expert-sequence-tensor",
    "expert-sequence-pipe",
)
"""The axes of two devices."""
CONFIG = """
import dataclasses

import spmd
from spmd.models.decoder import decoder_rules
from spmd.models.deepseek import PRESETS

MODEL = dataclasses.replace(PRESETS["test-deepseek"], predict_ahead=1, vocab=256)
config = spmd.TrainConfig(
    model=MODEL,
    rules=decoder_rules(MODEL),
    data=spmd.DataConfig(source=({corpus!r},), sequence=16, batch=8, cache={cache!r}),
    optimizer=spmd.OptimizerConfig(learning_rate=1e-2, schedule="constant"),
    context="all-to-all",
    evaluate=spmd.EvaluationConfig(tokens=256),
    steps=4,
    checkpoint_every=2,
)
"""


def sizes_of(mesh):
    """The sizes of a mesh's axes."""
    return dict.fromkeys(mesh.split("-"), 2)


@pytest.mark.parametrize("mesh", soak_but(MESHES))
def test_it_trains_as_on_one_device(mesh):
    """Of two steps the loss, gradients, updates and the biases that balance the experts."""
    result = compare(DEEPSEEK, steps=2, **sizes_of(mesh))
    assert result.ok, f"\n{result}"
    assert "variables" in {row.what for row in result.rows}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["expert-sequence-tensor", "fsdp-tensor-pipe"])
def test_control_a_bug_is_caught(mesh):
    """The same comparison fails where one parameter's gradient is 1 % off, also in stages."""
    assert not compare(DEEPSEEK, steps=2, bug="leaf-scale", **sizes_of(mesh)).ok


def test_every_pair_of_axes_is_on_a_mesh():
    """The control: without the last mesh, one is not."""

    def pairs(meshes):
        found = [itertools.combinations(sorted(sizes_of(mesh)), 2) for mesh in meshes]
        return set(itertools.chain.from_iterable(found))

    every = set(itertools.combinations(sorted(AXES), 2))
    assert pairs(MESHES) == every
    assert pairs(MESHES[:-1]) < every


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
def test_a_resumed_run_has_the_same_bits(mesh, tmp_path):
    """`spmd train` of four steps, and of two, resumed; the control is the state before."""
    (tmp_path / "corpus.txt").write_text(TEXT)
    path = tmp_path / "deepseek.py"
    path.write_text(
        CONFIG.format(corpus=str(tmp_path / "corpus.txt"), cache=str(tmp_path / "cache"))
    )
    sizes = sizes_of(mesh)
    flags = [f"--mesh.{axis}={sizes.get(axis, 1)}" for axis in AXES]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run("train", path, "--out", whole, *flags) == 0
    assert run("train", path, "--out", cut, *flags, "--steps", 2) == 0
    assert run("train", path, "--out", cut, *flags, "--resume", "always") == 0
    expected = state(path, whole, 4, **sizes)
    assert_same(state(path, cut, 4, **sizes), expected)
    with pytest.raises(AssertionError):
        assert_same(state(path, whole, 2, **sizes), expected)
