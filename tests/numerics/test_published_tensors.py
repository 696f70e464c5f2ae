"""Tensors of published checkpoints that are not parameters as they are: codes of gpt-oss, constants of Apertus."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from spmd.errors import CheckpointError
from spmd.hf.load import load_params
from spmd.hf.save import save_params
from spmd.models import apertus, gpt_oss
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from tests import tiny
from tests.numerics.test_quantized_checkpoints import dequantized_mxfp4, edit, equal_bits, write

GPT_OSS = gpt_oss.gpt_oss(
    *(2,),
    window=5,
    **{"vocab": 64, "d_model": 64, "heads": 4, "kv_heads": 2, "d_ff": 32, "head_dim": 16},
    router=gpt_oss.PRESETS["test-gpt-oss"].router,
)
APERTUS = apertus.PRESETS["test-apertus"]


def saved(folder, family, config):
    """A folder with initial parameters; their shapes on a mesh."""
    model = from_nnx(config.build)
    save_params(folder, model.init(jax.random.key(0)), family, config)
    mesh = tiny.mesh(fsdp=2, tensor=2)
    return make_plan(mesh, family.rules(config), model, optax.sgd(0.1)).abstract_params


def test_experts_of_gpt_oss_are_read_from_codes(tmp_path):
    """The folder as published has the parameters of the folder of its values, bit for bit."""
    abstract = saved(tmp_path / "plain", gpt_oss.FAMILY, GPT_OSS)
    values = load_file(tmp_path / "plain" / "model.safetensors")
    codes = dict(values)
    rng = np.random.default_rng(0)
    for name, tensor in values.items():
        if not name.endswith("_proj"):
            continue
        experts, width, out = tensor.shape
        blocks = rng.integers(0, 256, (experts, out, width // 32, 16), np.uint8)
        scales = rng.integers(118, 130, (experts, out, width // 32), np.uint8)
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del codes[name]
        dequantized = dequantized_mxfp4(blocks, scales).swapaxes(1, 2)
        values[name] = np.ascontiguousarray(dequantized, np.float32)
    assert len(codes) == len(values) + 2 * GPT_OSS.layers
    for name, table in (("plain", values), ("published", codes)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").unlink(missing_ok=True)
        write(tmp_path / name / "model.safetensors", table)
    config = (tmp_path / "plain" / "config.json").read_text()
    (tmp_path / "published" / "config.json").write_text(config)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    edit(tmp_path / "published", quantization_config=quantization)
    found, expected = (load_params(tmp_path / name, abstract) for name in ("published", "plain"))
    assert jax.tree.all(jax.tree.map(equal_bits, found, expected))


def test_constants_of_apertus_are_written_and_checked(tmp_path):
    """In the dtype of the checkpoint; another value is refused by name."""
    abstract = saved(tmp_path / "a", apertus.FAMILY, APERTUS)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    beta = "model.layers.1.mlp.act_fn.beta"
    assert tensors[beta] == np.float32(0.5)
    assert tensors["model.layers.0.mlp.act_fn.eps"] == np.float32(-1e-6)
    params = load_params(tmp_path / "a", abstract)
    save_params(tmp_path / "b", params, apertus.FAMILY, APERTUS, dtype=jnp.bfloat16)
    load_params(tmp_path / "b", abstract)
    (tmp_path / "a" / "model.safetensors").unlink()
    write(tmp_path / "a" / "model.safetensors", tensors | {beta: np.float32(0.25).reshape(())})
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path / "a", abstract)
    (problem,) = caught.value.problems
    assert problem.where == f"tensor {beta}"
    assert "0.25" in problem.what
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
