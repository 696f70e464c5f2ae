"""Files config.json as they were published are read, and give the decoders of our presets.

tests/published_models/files.json has them by their names on huggingface.co, without the fields about tokens, dtypes,
quantization and images. Most are from the public repositories of aiconfigurator (NVIDIA), MaxText (Google) and MLC LLM,
which have copies.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from spmd.errors import ConfigError
from spmd.hf.family import family_of
from tests.installed_families import all_decoders, small_decoders
from tests.installed_families import family_of as family_of_preset

FILES = json.loads((Path(__file__).parents[1] / "published_models" / "files.json").read_text())
PRESETS = {
    "baidu/ERNIE-4.5-21B-A3B-PT": "ernie-4.5-21b-a3b",
    "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
    "microsoft/phi-2": "phi-2",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "allenai/OLMo-2-1124-13B": "olmo2-13b",
    "allenai/Olmo-3-1025-7B": "olmo3-7b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "google/gemma-2-9b": "gemma2-9b",
    "google/gemma-3-1b-it": "gemma3-1b",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama4-maverick",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4-scout",
    "meta-llama/Meta-Llama-3.1-8B": "llama3.1-8b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "Qwen/Qwen1.5-MoE-A2.7B": "qwen1.5-moe",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "stabilityai/stablelm-2-zephyr-1_6b": "stablelm-2-1.6b",
    "XiaomiMiMo/MiMo-V2-Flash": "mimo-v2-flash",
}
"""File → the preset of the same decoder."""
BILLIONS = {
    "mistralai/Ministral-3-3B-Instruct-2512": 3.4,
    "nvidia/Nemotron-H-56B-Base-8K": 56.3,
    "nvidia/Qwen3.6-27B-NVFP4": 26.9,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480.2,
    "Qwen/Qwen3.5-27B": 26.9,
    "Qwen/Qwen3.5-35B-A3B": 34.7,
}
"""File without a preset → parameters of its text part."""


def read(values):
    """The decoder of a file."""
    return family_of(values["architectures"]).read_config(values)


def assert_same(found, expected):
    """The decoders have the same layers, sizes and tables."""
    assert found.pattern.kinds == expected.pattern.kinds
    for field in ("vocab", "d_model", "tied", "norm_eps", "logits_soft_cap"):
        assert getattr(found, field) == getattr(expected, field), field
    if found.router is not None:
        assert (found.router.experts, found.router.top_k) == (
            expected.router.experts,
            expected.router.top_k,
        )
    assert found.total_params == expected.total_params


def test_each_file_has_a_preset_or_a_count():
    """No file is read without a comparison."""
    assert FILES.keys() == PRESETS.keys() | BILLIONS.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_read(name):
    """It is the preset's decoder, or has the published number of parameters."""
    config = read(FILES[name])
    if name in PRESETS:
        without = dataclasses.replace(config, predict_ahead=0)  # as presets are
        assert_same(without, all_decoders()[PRESETS[name]])
    else:
        assert round(config.total_params / 1e9, 1) == BILLIONS[name]


def test_multi_token_prediction_is_read():
    """DeepSeek-V3 has a module for it."""
    assert read(FILES["deepseek-ai/DeepSeek-V3"]).predict_ahead == 1


def test_another_field_is_seen():
    """A control: with another base of positions, the file is not that of the preset."""
    values = FILES["meta-llama/Meta-Llama-3.1-8B"] | {"rope_theta": 10_000.0}
    with pytest.raises(AssertionError):
        assert_same(read(values), all_decoders()["llama3.1-8b"])


def test_fields_that_a_model_lacks_are_refused():
    """Those of later versions of Qwen 3.5 and Nemotron are required to have the value of the model."""
    qwen = FILES["nvidia/Qwen3.6-27B-NVFP4"]
    text = qwen["text_config"] | {"output_gate_type": "sigmoid"}
    with pytest.raises(ConfigError, match="output_gate_type: is 'sigmoid'"):
        read(qwen | {"text_config": text})
    nemotron = FILES["nvidia/Nemotron-H-56B-Base-8K"]
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        read(nemotron | {"rms_norm_eps": 1e-3})


def test_the_decoder_is_that_of_text_config():
    """Fields outside of it are of images or refused, also where it has them; its kind is a Mistral by default."""
    qwen = FILES["Qwen/Qwen3.5-27B"]
    with pytest.raises(ConfigError, match=r"vocab_size \(outside of text_config\): is 99"):
        read(qwen | {"vocab_size": 99})
    ministral = FILES["mistralai/Ministral-3-3B-Instruct-2512"]
    text = dict(ministral["text_config"])
    assert read(ministral).pattern.kinds[0].attention.temperature is not None
    del text["model_type"], text["rope_parameters"]
    mistral = read(ministral | {"text_config": text})
    assert mistral.pattern.kinds[0].attention.temperature is None
    assert mistral.rope_theta == 10_000.0


def test_null_in_place_of_true_is_refused():
    """It is false in transformers; where the default is false, it is read as such."""
    deepseek = FILES["deepseek-ai/DeepSeek-V3"]
    with pytest.raises(ConfigError, match="norm_topk_prob: is null"):
        read(deepseek | {"norm_topk_prob": None})
    assert read(deepseek | {"attention_bias": None}).pattern == read(deepseek).pattern


def test_positions_without_effect_are_required_to_be_those_of_the_model():
    """MiMo has its positions in a table for each kind of layers, or those of the published model."""
    mimo = FILES["XiaomiMiMo/MiMo-V2-Flash"]
    with pytest.raises(ConfigError, match="rope_theta: is 640000"):
        read(mimo | {"rope_theta": 640_000})


@pytest.mark.parametrize("name", small_decoders())
def test_too_many_layers_are_refused(name):
    """In each family, before a list of them is made."""
    family = family_of_preset(name)
    values = family.write_config(small_decoders()[name])
    (field,) = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"} & values.keys()
    with pytest.raises(ConfigError, match=f"{field}: is 1000000000, and at most 1000"):
        family.read_config(values | {field: 10**9})
