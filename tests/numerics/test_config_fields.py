"""No field of config.json is ignored: another value changes the model here as in `transformers`, or is refused.

Each field of a family's config class has other values in turn. If `transformers` builds such a model, then the import
refuses it by name, or both have the same logits.
"""

import functools
import json
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

from spmd.errors import SpmdError
from spmd.hf.folder import open_folder
from spmd.hf.load import load_model
from spmd.model_interface.model import as_outputs
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import make_mesh
from tests.numerics.test_transformers import (
    CONFIGS,
    ENDINGS,
    TOKENS,
    TOLERANCE,
    logits_there,
    quiet_transformers,
)
from tests.programs import forget_programs
from tests.published_models import cases

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Fields in which every case differs from the default anyway."""
NO_PART_OF_A_MODEL = (
    *("architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id", "model_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "transformers_version"),
    *("is_encoder_decoder", "problem_type", "initializer_range", "attn_implementation"),
)
"""Fields of every config class, about outputs and files."""
NUMBERS = {int: lambda number: [number + 1, 2 * number], float: lambda number: [0.7 * number + 0.1]}
WORDS = {"act": ["gelu", "relu", "gelu_pytorch_tanh", "silu"]}
"""Part of a field's name → words to try."""
WRITTEN_WRONG = {
    "olmo-hybrid": ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
}
"""Case → fields whose files are damaged: transformers 5.24 cuts the convolution into three equal parts."""
OF_NONE = (4, 0.5, True)
"""What a field may be whose default is null."""


def first_cases():
    """The first case of each class of `transformers`, of decoders."""
    found = {}
    for name, (kind, _) in cases("MODELS").items():
        if kind != "ViT":
            found.setdefault(kind, name)
    return sorted(found.values())


def others(name, value):
    """Other values of a field."""
    if isinstance(value, bool):
        return [not value, None]
    if value is None:
        return list(OF_NONE)
    if type(value) in NUMBERS:
        return [*NUMBERS[type(value)](value), None]
    if isinstance(value, str):
        return [word for part, words in WORDS.items() if part in name for word in words]
    return []


def variants(config_class, fields):
    """Yield a field and another value of it."""
    values = config_class(**fields).to_dict()
    for name, value in values.items():
        if name in SIZES or name in NO_PART_OF_A_MODEL or name.startswith("_"):
            continue
        for other in others(name, value):
            yield name, other


def built(transformers, kind, fields):
    """A small random model of `transformers`; None if it builds none or one without finite logits."""
    import torch

    torch.manual_seed(0)
    config_class = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")
    model_class = getattr(transformers, kind + ENDINGS.get(kind, "ForCausalLM"))
    try:
        model = model_class(config_class(**fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        logits = logits_there(model)
    except Exception:  # noqa: BLE001  whatever it raises, there is no such model
        return None
    if not np.isfinite(logits).all():
        return None
    return model, logits


@functools.cache
def compiled(family, config):
    """The plan of a config on one device, and its compiled forward pass."""
    mesh = make_mesh(devices=jax.devices()[:1])
    model = from_nnx(config.build)
    plan = make_plan(mesh, family.rules(config), model, optax.sgd(0.1))

    @jax.jit
    def run(params, variables):
        outputs, _ = model.forward(params, variables, None, TOKENS, train=False)
        return as_outputs(outputs).logits

    return plan, run


def imported_logits(folder):
    """Logits of the folder here; an error if it is refused."""
    with open_folder(folder) as found:
        plan, run = compiled(found.family, found.config)
        arrays = load_model(found, plan.abstract_params, plan.abstract_variables)
    return np.asarray(run(*arrays))


class Outcomes(NamedTuple):
    """Changed fields, by what becomes of them; `wrong` and `unnamed` should be empty."""

    equal: list[str]
    refused: list[str]
    unnamed: dict[str, str]
    wrong: dict[str, float]


def outcomes(transformers, case, folder, only=None, forgotten=()):
    """Compare the model with each other value of each field, or of one.

    Fields that are forgotten are removed from config.json, as if a family ignored them.
    """
    kind, fields = cases("MODELS")[case]
    config_class = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")
    result = Outcomes([], [], {}, {})
    for number, (name, value) in enumerate(variants(config_class, fields)):
        if only is not None and name != only:
            continue
        if name in WRITTEN_WRONG.get(case, ()):
            continue
        found = built(transformers, kind, {**fields, name: value})
        if found is None:
            continue
        model, theirs = found
        model.save_pretrained(folder / str(number))
        forget(folder / str(number) / "config.json", forgotten)
        label = f"{name}={value}"
        try:
            ours = imported_logits(folder / str(number))
        except SpmdError as error:
            result.refused.append(label)
            if name not in str(error):
                result.unnamed[label] = str(error)
            continue
        difference = float(np.abs(ours - theirs).max())
        if difference < TOLERANCE * max(1.0, float(np.abs(theirs).max())):
            result.equal.append(label)
        else:
            result.wrong[label] = difference
    return result


def forget(path, fields):
    """Remove fields of a config.json."""
    values = json.loads(path.read_text())
    kept = {name: value for name, value in values.items() if name not in fields}
    path.write_text(json.dumps(kept))


@pytest.fixture(autouse=True)
def room_for_the_next_case():
    """A case has dozens of programs, and the whole file more than a process can hold."""
    yield
    compiled.cache_clear()
    forget_programs()


@pytest.fixture(scope="module")
def transformers():
    """The library, without its progress bars."""
    return quiet_transformers()


@pytest.mark.soak
@pytest.mark.parametrize("case", first_cases())
def test_every_field_has_its_effect_or_is_refused(case, transformers, tmp_path):
    """All wrong ones are named at once, and a refusal names the field."""
    found = outcomes(transformers, case, tmp_path)
    print(f"{case}: {len(found.equal)} equal; refused: {', '.join(found.refused)}")
    assert not found.wrong
    assert not found.unnamed
    assert found.equal


@pytest.mark.soak
def test_an_ignored_field_is_seen(transformers, tmp_path):
    """A control: with the field, the models are equal; without it they are not."""
    field = "residual_multiplier"
    assert outcomes(transformers, "granite", tmp_path / "a", only=field).equal
    ignored = outcomes(transformers, "granite", tmp_path / "b", only=field, forgotten=(field,))
    assert ignored.wrong
