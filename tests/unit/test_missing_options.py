"""The refusal of an architecture without a family names the option that it needs."""

import importlib.metadata

import pytest

from spmd.errors import ConfigError
from spmd.hf import family
from spmd.models.published.unsupported import MISSING_OPTIONS


@pytest.fixture
def declared(monkeypatch):
    """The entry point of the table, installed or not."""
    entry = importlib.metadata.EntryPoint(
        "decoder", "spmd.models.published.unsupported:MISSING_OPTIONS", family.OPTIONS_GROUP
    )
    installed = importlib.metadata.entry_points

    def found(group):
        if group == family.OPTIONS_GROUP:
            return [entry]
        return installed(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", found)


@pytest.mark.parametrize(
    ("architecture", "option"),
    [
        ("DeepseekV32ForCausalLM", "indexer"),
        ("Gemma4ForCausalLM", "embeddings for each layer"),
        ("MambaForCausalLM", "selective scan"),
        ("BloomForCausalLM", "ALiBi"),
    ],
)
@pytest.mark.usefixtures("declared")
def test_the_refusal_names_the_missing_option(architecture, option):
    """And offers no other family in its place."""
    with pytest.raises(ConfigError, match=option) as error:
        family.family_of([architecture])
    assert "did you mean" not in str(error.value)


@pytest.mark.usefixtures("declared")
def test_control_an_architecture_of_the_table_is_no_family():
    """A family that is added takes its architecture out of the table."""
    for known in family.families().values():
        assert not set(known.architectures) & set(MISSING_OPTIONS)


@pytest.mark.soak
def test_architectures_of_the_table_exist():
    """Each name is an architecture of the installed transformers."""
    from transformers.models.auto import modeling_auto

    names = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    }
    assert set(MISSING_OPTIONS) <= names
