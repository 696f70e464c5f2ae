"""Adapters alone are a folder in the form of `peft`; what has no such form is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd import tree
from spmd.errors import CheckpointError, ConfigError
from spmd.hf.adapter import save_adapter
from spmd.hf.family import family_for
from spmd.lora.adapters import with_adapters, with_lora
from spmd.lora.config import LoRAConfig
from spmd.models.decoder import decoder_rules
from spmd.models.gpt2 import PRESETS as GPT2
from spmd.models.mixtral import PRESETS as MIXTRAL
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL as MIXTRAL_RULES
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.rules import Rules
from tests import tiny


def save(out: Path, config: Any, rules: Rules, lora: LoRAConfig) -> tuple[Any, Any]:
    """The parameters of a model and of its adapters, which are saved."""
    model = from_nnx(config.build)
    base = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(model.init, jax.random.key(0))
    )
    shapes = jax.eval_shape(with_lora(model, lora, rules).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: jax.numpy.asarray(rng.standard_normal(x.shape), x.dtype), shapes
    )
    table = {path: x.shape for path, x in tree.flatten(base).items()}
    save_adapter(out, adapters, lora, family_for(config), config, shapes=table, base="hf")
    return base, adapters


def test_tensors_are_those_of_the_layers(tmp_path: Path) -> None:
    """Of each layer, the product is what is added to its kernel, turned as `transformers` has it."""
    lora = LoRAConfig(targets=("attention/(q|o)_proj/kernel", "lm_head/kernel"), rank=3, alpha=6)
    base, adapters = save(tmp_path / "out", tiny.CONFIG, LLAMA, lora)
    added = tree.flatten(with_adapters(base, adapters, lora))
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qo"]
    assert settings["target_modules"] == sorted(["lm_head", *modules])
    assert (settings["r"], settings["lora_alpha"], settings["fan_in_fan_out"]) == (3, 6, False)
    assert settings["base_model_name_or_path"] == "hf"
    expected = {
        f"base_model.model.{module}.lora_{half}.weight"
        for module in settings["target_modules"]
        for half in "AB"
    }
    assert found.keys() == expected

    def product(module: str) -> np.ndarray:
        a, b = (found[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        return settings["lora_alpha"] / settings["r"] * (b @ a)

    for layer in (0, 1):
        ours = added["layers/attention/q_proj/kernel"][layer].T
        np.testing.assert_allclose(
            product(f"model.layers.{layer}.self_attn.q_proj"), ours, rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(product("lm_head"), added["lm_head/kernel"].T, rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="exists"):
        save(tmp_path / "out", tiny.CONFIG, LLAMA, lora)


def test_layers_that_are_not_turned_are_marked(tmp_path: Path) -> None:
    """GPT-2's kernels are as they are here, which `peft` is told."""
    save(
        tmp_path / "out",
        GPT2["test"],
        decoder_rules(GPT2["test"]),
        LoRAConfig(targets=("mlp/up_proj/kernel",), rank=2),
    )
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["fan_in_fan_out"] is True
    assert settings["target_modules"][0].endswith("mlp.c_fc")


@pytest.mark.parametrize(
    ("config", "rules", "target", "says"),
    [
        (
            GPT2["test"],
            decoder_rules(GPT2["test"]),
            "attention/q_proj/kernel",
            r"is a part of .*c_attn\.weight",
        ),
        (MIXTRAL["test"], MIXTRAL_RULES, "experts/up_proj/kernel", "is of experts"),
        (tiny.CONFIG, LLAMA, "embed/embedding", "is an embedding"),
    ],
    ids=["fused", "experts", "embedding"],
)
def test_what_has_no_adapter_in_peft_is_refused(
    config: Any, rules: Rules, target: str, says: str, tmp_path: Path
) -> None:
    """With its path, and nothing is written."""
    with pytest.raises(ConfigError, match=says):
        save(tmp_path / "out", config, rules, LoRAConfig(targets=(target,), rank=2))
    assert not list(tmp_path.iterdir())
