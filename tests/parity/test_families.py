"""`spmd check` of each installed family on meshes of two and four devices, as the command does it.

A family is included by its entry point. A mesh that a decoder does not allow is refused, by its
structure: recurrent mixers need whole sequences, and without experts `expert` splits nothing.
Layers that do not divide into stages are in tests/unit/test_stages.py.
"""

import dataclasses
import functools

import pytest

from spmd.data.loader import DataConfig
from spmd.errors import SpmdError
from spmd.models.decoder import (
    DecoderConfig,
    GatedConvolutionSpec,
    GatedDeltaNetSpec,
    ParallelMixerSpec,
    StateSpaceSpec,
)
from spmd.run.check import Check
from spmd.run.config import PipelineConfig, TrainConfig
from tests import tiny
from tests.command_line import TEXT
from tests.installed_families import family_of, small_decoders

MESHES = {
    "fsdp2-tensor2": {"fsdp": 2, "tensor": 2},
    "pipe2": {"pipe": 2},
    "sequence2": {"sequence": 2},
    "expert2": {"expert": 2},
}
RECURRENT = (GatedConvolutionSpec, GatedDeltaNetSpec, ParallelMixerSpec, StateSpaceSpec)
"""Mixers that need whole sequences."""
BYTES = 256
STAGES = 2


def divided(model: DecoderConfig) -> DecoderConfig:
    """The decoder with repeats for both stages: one more where they are odd."""
    pattern = model.pattern
    missing = -pattern.repeats % STAGES
    return dataclasses.replace(model, layers=model.layers + missing * len(pattern.group))


@pytest.fixture(scope="module")
def check_of(tmp_path_factory):
    """A function: name of a family → the check of the command, with one device compiled once."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus = folder / "corpus.txt"
    corpus.write_text(TEXT)

    @functools.cache
    def make(name: str) -> Check:
        model = divided(dataclasses.replace(small_decoders()[name], vocab=BYTES))
        config = TrainConfig(
            model=model,
            rules=family_of(name).rules(model),
            data=DataConfig(
                source=(str(corpus),), sequence=16, batch=8, cache=str(folder / "cache")
            ),
            pipeline=PipelineConfig("1f1b", STAGES),
        )
        return Check(config, 2)

    return make


def refusal(model: DecoderConfig, sizes: dict[str, int]) -> str:
    """What the refusal of a mesh says; empty where it is allowed."""
    mixers = [spec.mixer for spec in model.pattern.distinct]
    if "expert" in sizes and model.router is None:
        return "splits no parameter: this model has no experts"
    if "sequence" in sizes and any(isinstance(mixer, RECURRENT) for mixer in mixers):
        return "a recurrent mixer needs whole sequences on each device"
    return ""


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", small_decoders())
def test_a_family_gives_the_numbers_of_one_device(name, mesh, check_of):
    """Two steps of training, leaf by leaf; or a refusal before anything compiles, for the reason that there is."""
    check = check_of(name)
    sizes = MESHES[mesh]
    reason = refusal(check.config.model, sizes)
    if reason:
        with pytest.raises(SpmdError) as caught:
            check.setup_on(tiny.mesh(**sizes))
        assert reason in str(caught.value)
        return
    result = check.compare(tiny.mesh(**sizes))
    assert result.ok, f"\n{result}"
    assert len(result.losses) == 2


@pytest.mark.soak
def test_control_a_bug_is_found(check_of):
    """Gradients of which a parameter is 1 % off fail the same comparison."""
    result = check_of("llama").compare(tiny.mesh(fsdp=2, tensor=2), "gradient-scale")
    assert not result.ok
