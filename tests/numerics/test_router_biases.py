"""Biases of routers are variables that checkpoints have: imported, trained from, exported with the same bits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd.errors import CheckpointError
from spmd.hf.family import family_for
from spmd.hf.folder import open_folder
from spmd.hf.load import load_model, load_params
from spmd.hf.save import save_params
from spmd.models.decoder import NormSpec, decoder_rules
from spmd.models.deepseek import PRESETS, V3_FAMILY
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.build import config_mesh, make_setup
from spmd.run.init_from import initial_state
from spmd.run.load_config import load_config
from spmd.training.state import ModelState
from tests import tiny
from tests.command_line import run

CONFIG = dataclasses.replace(PRESETS["test-deepseek"], predict_ahead=1)
BIASES = "e_score_correction_bias"


def plan_of(config, **sizes):
    model = from_nnx(config.build)
    return make_plan(tiny.mesh(**sizes), decoder_rules(config), model, tiny.OPTIMIZER)


@pytest.fixture(scope="module")
def state():
    """Parameters and biases, all different."""
    model = from_nnx(CONFIG.build)
    variables = jax.tree.map(
        lambda x: 0.01 * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape),
        jax.eval_shape(model.init_variables, jax.random.key(0)),
    )
    return ModelState(jax.jit(model.init)(jax.random.key(0)), variables)


@pytest.fixture(scope="module")
def folder(state, tmp_path_factory):
    """A published folder with these, and with copies of embedding and head in the last layer."""
    out = tmp_path_factory.mktemp("published") / "hf"
    save_params(
        out, state.params, family_for(CONFIG), CONFIG, dtype=jnp.bfloat16, variables=state.variables
    )
    return out


def tensors(folder):
    return load_file(folder / "model.safetensors")


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.soak
def test_biases_are_exported_in_float32(folder, state):
    """Other tensors are in the dtype that was asked for."""
    found = tensors(folder)
    biases = {name: x for name, x in found.items() if name.endswith(BIASES)}
    assert sorted(biases) == [f"model.layers.{layer}.mlp.gate.{BIASES}" for layer in (1, 2, 3)]
    assert {x.dtype for x in biases.values()} == {np.dtype(np.float32)}
    expected = state.variables["layers"]["moe"]["router"]["bias"][1]
    np.testing.assert_array_equal(biases[f"model.layers.2.mlp.gate.{BIASES}"], expected)


def test_modules_of_multi_token_prediction_have_their_published_names(folder):
    """They are layers after the last one."""
    found = {name for name in tensors(folder) if name.startswith("model.layers.3.")}
    names = {name.removeprefix("model.layers.3.") for name in found}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= names
    assert "self_attn.kv_b_proj.weight" in names
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_folder_without_its_modules_is_a_model_without_them(state, tmp_path):
    """`transformers` drops them and keeps the number in config.json."""
    alone = dataclasses.replace(CONFIG, predict_ahead=0)
    arrays = {name: x for name, x in state.params.items() if name != "ahead"}
    variables = {"layers": state.variables["layers"]}
    save_params(tmp_path / "a", arrays, V3_FAMILY, alone, variables=variables)
    path = tmp_path / "a" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "num_nextn_predict_layers": 1}))
    with open_folder(tmp_path / "a") as found:
        assert found.config.predict_ahead == 0
    _, ignored = V3_FAMILY.tables(alone, tensors(tmp_path / "a"))
    for name in ("enorm.weight", "embed_tokens.weight", "mlp.experts.7.up_proj.weight"):
        assert any(entry.covers(f"model.layers.3.{name}") for entry in ignored)
        assert not any(entry.covers(f"model.layers.2.{name}") for entry in ignored)


def test_loading_without_biases_is_refused(folder):
    """They would be lost, and other experts chosen."""
    plan = plan_of(CONFIG)
    with pytest.raises(CheckpointError, match=f"{BIASES}: is extra"):
        load_params(folder, plan.abstract_params)


def test_biases_are_loaded_into_the_variables(folder, state):
    """Beside the parameters, on a mesh."""
    plan = plan_of(CONFIG, fsdp=2, expert=2)
    with open_folder(folder) as found:
        assert found.config.predict_ahead == 1
        _, variables = load_model(found, plan.abstract_params, plan.abstract_variables)
    assert equal(variables, state.variables)


@pytest.mark.soak
def test_a_run_folder_and_back(folder, state, tmp_path):
    """`spmd import`, training from the run or from the folder, and `spmd export` keep them."""
    out = tmp_path / "run"
    flags = ("--mesh.fsdp", "2", "--mesh.expert", "2", "--mesh.data", "2", "--devices", "8")
    assert run("import", folder, "--out", out, *flags) == 0
    for init in (out, folder):
        config = dataclasses.replace(load_config(str(out / "config.py")), init=str(init))
        setup = make_setup(config, config_mesh(config))
        assert equal(initial_state(setup).variables, state.variables)
    assert run("export", out, "--out", tmp_path / "back", "--dtype", "bf16") == 0
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_biases_have_a_rule_without_norms_that_have_scales():
    """Norms without parameters have no row of the table, and biases of routers keep theirs."""
    config = dataclasses.replace(CONFIG, norm=NormSpec("layer", scale=False))
    plan = plan_of(config, expert=2)
    assert "lm_head/kernel" in {leaf.path for leaf in plan.params}
    assert all(leaf.rule for leaf in plan.params)
