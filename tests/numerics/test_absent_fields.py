"""A field that config.json lacks has the value here that `transformers` gives it, or the file is refused.

Each field of a family's config class is removed in turn, also those of `rope_parameters`, and the fields of positions
are written as before `transformers` 5. What `transformers` completes the file to must then be read as the same decoder.
No model is built.
"""

import copy
import dataclasses

import pytest

from spmd.errors import SpmdError
from spmd.hf.family import family_of
from spmd.models import mistral
from spmd.models.decoder import LatentAttentionSpec
from tests.numerics.test_config_fields import first_cases
from tests.numerics.test_transformers import CONFIGS, ENDINGS, quiet_transformers
from tests.published_models import cases

NO_FIELDS = ("architectures", "model_type", "transformers_version")
REQUIRED = (
    *("d_model", "head_dim", "hidden_size", "n_embd", "vocab_size"),
    *("intermediate_size", "ffn_dim", "n_inner"),
    *("n_head", "num_attention_heads", "num_heads"),
    *("n_layer", "num_hidden_layers", "num_layers"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
)
"""Sizes that a file must have: a refusal of a file without one is right."""
COPIES_IN_DBRX = (
    *("d_model", "rope_parameters", "rope_theta"),
    "rotary of transformers 4 without rope_theta",
)
"""A DBRX has its width twice, and rope_theta in `attn_config`, where transformers 5 does not look."""
OTHER_DEFAULTS = {
    **{"olmo3": "rope_theta", "gpt-oss": "positions"},
    **{"granite-hybrid": "layer_types", "dbrx": "hidden_size"},
}
"""Case → field with another default in transformers 5.0 than in later versions."""

REFUSED_BY_DEFAULT = ("deepseek-v2", "dots1", "glm4-moe", "lfm2", "lfm2-moe")
"""Cases whose class has values of no model, such as null for the number of experts, or of one without convolutions."""


@pytest.fixture(scope="module")
def transformers():
    """The library, without its progress bars."""
    return quiet_transformers()


def without(values, name):
    """The values but for one."""
    return {key: value for key, value in values.items() if key != name}


def tables_of(positions):
    """Name of a table of positions, in `rope_parameters` → the table; the whole one has no name."""
    if all(isinstance(value, dict) for value in positions.values()):
        return positions
    return {"": positions}


def incomplete(values):
    """Yield the removed field, and a file without it."""
    for name in values:
        if name not in NO_FIELDS:
            yield name, without(values, name)
    positions = values.get("rope_parameters")
    if not isinstance(positions, dict):
        return
    for kind, table in tables_of(positions).items():
        for name in table:
            fewer = without(table, name)
            if kind:
                fewer = {**positions, kind: fewer}
            yield name, {**values, "rope_parameters": fewer}
    if "" in tables_of(positions):
        yield from earlier(values, dict(positions))


def earlier(values, positions):
    """Yield files with the fields of positions of `transformers` 4."""
    fields = without(values, "rope_parameters")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in positions:
            fields[name] = positions.pop(name)
    fields["rope_scaling"] = positions
    if positions.get("rope_type") == "default":
        fields["rope_scaling"] = None
    yield "rotary of transformers 4", fields
    yield "rotary of transformers 4 without rope_theta", without(fields, "rope_theta")
    if fields["rope_scaling"]:
        typed = without(positions, "rope_type") | {"type": positions["rope_type"]}
        yield "type of transformers 4", {**fields, "rope_scaling": typed}


def read(values):
    """The decoder of a file, or the refusal."""
    family = family_of(values["architectures"])
    try:
        found = family.read_config(without(values, "quantization_config"))
    except SpmdError as error:
        return None, str(error)
    # transformers trains no multi-token prediction; its classes claim one such module all the same
    return dataclasses.replace(found, predict_ahead=0), ""


def is_right(name, fewer, complete):
    """Whether a file without a field is read as the complete one, or rightly refused."""
    part, refusal = read(fewer)
    whole, _ = read(complete)
    if part is None and whole is not None:
        return name in REQUIRED and name in refusal
    if part is None or part == whole:
        return True
    # latent attention has as many key/value heads as heads, whatever the class's default is
    latent = isinstance(part.pattern.group[0].mixer, LatentAttentionSpec)
    return latent and name == "num_key_value_heads"


def wrong_fields(transformers, case, fields):
    """Names of fields without which a file is another model here than in transformers."""
    kind, _ = cases("MODELS")[case]
    config_class = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config", None)
    if config_class is None:
        pytest.skip(f"no {kind} in transformers {transformers.__version__}")
    architectures = [kind + ENDINGS.get(kind, "ForCausalLM")]
    values = {**config_class(**fields).to_dict(), "architectures": architectures}
    if read(values)[0] is None:
        assert case in REFUSED_BY_DEFAULT, read(values)[1]
        return []
    wrong = []
    for name, fewer in incomplete(values):
        try:
            complete = config_class.from_dict(copy.deepcopy(fewer)).to_dict()
        except Exception:  # noqa: BLE001  whatever it raises, there is no such model
            continue
        if not is_right(name, fewer, {**complete, "architectures": architectures}):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("case", first_cases())
def test_an_absent_field_is_that_of_transformers(case, transformers):
    """Of a file with the class's values, and of the small model's."""
    if transformers.__version__.startswith("5.0.") and case in OTHER_DEFAULTS:
        pytest.skip(f"{OTHER_DEFAULTS[case]} changed after transformers {transformers.__version__}")
    _, fields = cases("MODELS")[case]
    wrong = {*wrong_fields(transformers, case, {}), *wrong_fields(transformers, case, fields)}
    if case == "dbrx":
        wrong -= {*COPIES_IN_DBRX}
    assert not wrong


def test_another_default_is_seen(transformers, monkeypatch):
    """A control: as many key/value heads as heads."""
    true = mistral.read_sizes
    monkeypatch.setattr(mistral, "read_sizes", lambda fields, kv_heads: true(fields))
    assert wrong_fields(transformers, "mistral", {}) == ["num_key_value_heads"]
