"""Families are found by entry points, and name maps that do not fit are refused."""

import pytest

from spmd.errors import ConfigError
from spmd.hf.family import TensorMapping, families, family_for, family_of, tensor_sources
from spmd.hf.save import parse_size
from spmd.models.mixtral import PRESETS as MIXTURES


def test_a_name_map_that_does_not_fit_is_said():
    """A parameter without a line, and a line without a parameter."""
    with pytest.raises(ConfigError) as caught:
        tensor_sources(
            [TensorMapping("a/kernel", "a.weight"), TensorMapping("c/scale", "c")],
            {"a/kernel": (2, 3), "b/kernel": (2,)},
        )
    assert {problem.where for problem in caught.value.problems} == {"b/kernel", "name 'c/scale'"}


def test_families_are_found_by_entry_points():
    """Those that ship, by their architectures; what is none is said with the nearest."""
    assert {"llama", "mistral", "mixtral"} <= set(families())
    assert family_of(["X", "MixtralForCausalLM"]) is families()["mixtral"]
    with pytest.raises(ConfigError, match="matches no Hugging Face architecture"):
        family_for(object())
    with pytest.raises(ConfigError, match="matches no Hugging Face architecture"):
        family_for(MIXTURES["switch-c"])  # of one expert a token, without normalized weights
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        family_of(["LamaForCausalLM"])


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5KB", 1500), ("5", 0), ("0GB", 0), ("GB", 0)]
)
def test_sizes(text, size):
    """Of files, in powers of ten; anything else is refused."""
    if size:
        assert parse_size(text) == size
    else:
        with pytest.raises(ConfigError, match="number of bytes"):
            parse_size(text)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LlamaForCausalLN", "LlamaForCausalLM"),
        ("llamaforcausallm", "LlamaForCausalLM"),
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("GemmmaForCausalLM", "GemmaForCausalLM"),
        ("Gpt2LMHeadModel", "GPT2LMHeadModel"),
    ],
)
def test_a_typo_of_an_architecture_is_mended(name, near):
    """The case, a doubled letter and the task."""
    with pytest.raises(ConfigError) as caught:
        family_of([name])
    assert caught.value.problems[0].fix == f'did you mean "{near}"?'


@pytest.mark.parametrize(
    "name",
    [
        "Llama7ForCausalLM",
        "Llama7ForConditionalGeneration",
        "Gemma7ForCausalLM",
        "Gemma9ForCausalLM",
        "Mixtral2ForCausalLM",
        "GlamaForCausalLM",
        "Qwen22ForCausalLM",
        "LlamaForSequenceClassification",
    ],
)
def test_no_other_family_is_offered(name):
    """A number, another letter or another task is another model; the fix names the page of all families."""
    with pytest.raises(ConfigError) as caught:
        family_of([name])
    assert "docs/families" in caught.value.problems[0].fix
    assert "did you mean" not in str(caught.value)
