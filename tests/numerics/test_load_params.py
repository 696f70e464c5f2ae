"""The parameters of a run are read by themselves, onto any mesh, in any dtype, with adapters where it has some."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
from spmd.lora.adapters import with_adapters
from spmd.lora.config import LoRAConfig
from spmd.optim.config import OptimizerConfig
from spmd.optim.ema import ema_params
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import config_mesh, make_setup
from spmd.run.config import TrainConfig
from spmd.run.load_params import read_params, restore_model
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import MeshShape
from spmd.training.state import init_state
from tests import tiny

SOURCE = """
import spmd
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(model=PRESETS["test"], rules=LLAMA)
"""


def equal(ours, theirs):
    """Whether two trees have the same bits."""
    return all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )


def write_run(folder, **fields):
    """A run folder with one checkpoint, and its state."""
    (folder / "config.py").write_text(SOURCE)
    config = TrainConfig(
        model=tiny.CONFIG, rules=LLAMA, mesh=MeshShape(fsdp=4, tensor=2), devices=8, **fields
    )
    setup = make_setup(config, config_mesh(config))
    RunDir(folder).describe(config, folder / "config.py", str(setup.plan))
    # No two adapters are zero, as they all begin.
    state = jax.tree.map(
        lambda x: x + 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else x,
        init_state(setup.plan, 3),
    )
    with CheckpointManager(RunDir(folder).checkpoints) as checkpoints:
        checkpoints.save(5, state, {"step": 5})
    return setup, state


@pytest.mark.soak
def test_the_optimizer_is_not_read(tmp_path):
    """Of a checkpoint with everything, the parameters and variables alone are read, onto another mesh."""
    _, state = write_run(tmp_path)
    with CheckpointManager(tmp_path / "checkpoints", read_only=True) as checkpoints:
        model = restore_model(checkpoints, None, tiny.plan(fsdp=2, tensor=2))
        assert equal(model.params, state.params)
        assert model.variables == {}
        with pytest.raises(CheckpointError, match="lm_head/kernel: extra"):
            restore_model(checkpoints, None, tiny.plan(dataclasses.replace(tiny.CONFIG, tied=True)))


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("float32", "bf16-params"),
        ("bf16-params", "float32"),
        pytest.param("float32", "float32", marks=pytest.mark.soak),
        pytest.param("bf16-params", "bf16-params", marks=pytest.mark.soak),
    ],
)
def test_parameters_are_cast(precision, wanted, tmp_path):
    """A run in one precision starts one in another."""
    _, state = write_run(tmp_path, precision=precision)
    abstract = tiny.plan(options=(("precision", wanted),), fsdp=2).abstract_params
    read = read_params(tmp_path, abstract)
    assert jax.tree.all(
        jax.tree.map(
            lambda x, leaf: (x.dtype, x.sharding) == (leaf.dtype, leaf.sharding), read, abstract
        )
    )
    assert equal(read, jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), state.params, abstract))


@pytest.mark.soak
def test_adapters_are_added(tmp_path):
    """What was fine-tuned is read as the sum, without the adapters beside it."""
    lora = LoRAConfig(targets=("attention/(q|v)_proj/kernel",), rank=2)
    _, state = write_run(tmp_path, lora=lora)
    base = state.variables["base"]
    expected = with_adapters(base, state.params, lora)
    read = read_params(tmp_path, tiny.plan(fsdp=2, tensor=2).abstract_params)
    for ours, theirs in zip(*map(jax.tree.leaves, (read, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not equal(read, base)


@pytest.mark.parametrize(
    "targets", [pytest.param((), marks=pytest.mark.soak), ("attention/(q|v)_proj/kernel",)]
)
def test_averaged_parameters_are_read_in_their_place(targets, tmp_path):
    """From below the master weights, with adapters too; the trained ones are others."""
    lora = LoRAConfig(targets=targets)
    optimizer = OptimizerConfig(ema_decay=0.9)
    _, state = write_run(tmp_path, lora=lora, optimizer=optimizer, precision="bf16-params")
    averages = ema_params(state.optimizer_state)
    other = dataclasses.replace(state, params=jax.tree.map(lambda x: 3 * x, state.params))
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(6, other, {"step": 6})
    abstract = tiny.plan(fsdp=2, tensor=2).abstract_params
    read = read_params(tmp_path, abstract)
    base = jax.tree.map(lambda x: x.astype(jnp.float32), state.variables.get("base", averages))
    expected = with_adapters(base, averages, lora) if targets else averages
    for ours, theirs in zip(*map(jax.tree.leaves, (read, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not equal(read, read_params(tmp_path, abstract, trained=True))


@pytest.mark.soak
def test_small_changes_survive_a_narrow_base(tmp_path):
    """Beside a base in bfloat16, adapters are added in the dtype that is asked for, where nothing is rounded away."""
    lora = LoRAConfig(targets=("attention/q_proj/kernel",), rank=2, alpha=0.01)
    _, state = write_run(tmp_path, lora=lora, precision="bf16")
    base = jax.tree.map(lambda x: x.astype(jnp.float32), state.variables["base"])
    assert state.variables["base"]["lm_head"]["kernel"].dtype == jnp.bfloat16
    read = read_params(tmp_path, tiny.plan().abstract_params)["layers"]["attention"]["q_proj"][
        "kernel"
    ]
    expected = with_adapters(base, state.params, lora)["layers"]["attention"]["q_proj"]["kernel"]
    change = expected - base["layers"]["attention"]["q_proj"]["kernel"]
    np.testing.assert_allclose(read, expected, rtol=1e-5, atol=1e-3 * np.abs(change).max())


def test_another_model_is_an_error(tmp_path):
    """Every difference is listed, and nothing is cut to fit."""
    write_run(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_params(tmp_path, tiny.plan(tiny.replaced(layers=3)).abstract_params)
    assert len(caught.value.problems) > 3
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        read_params(tmp_path, tiny.plan().abstract_params, step=7)
