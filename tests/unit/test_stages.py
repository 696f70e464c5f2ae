"""Too few layers for the stages are refused in repeats of their group, before anything is built."""

import dataclasses

import optax
import pytest

from spmd.data.loader import DataConfig
from spmd.errors import ConfigError, RuleError
from spmd.model_interface.model_config import repeats_of
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, decoder_rules
from spmd.pipeline.schedules import make_schedule
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.build import make_setup
from spmd.run.config import PipelineConfig, TrainConfig
from spmd.run.describe import pipeline_line
from spmd.run.stages import check_stages
from spmd.sharding.mesh import MeshShape, abstract_mesh

LOCAL, FULL = LayerSpec(AttentionSpec(window=4)), LayerSpec()
PATTERNS = {
    "plain": (
        DecoderConfig(layers=3),
        "mesh.pipe: does not divide the layers",
        "3 layers / (pipe=4) = 0.75",
    ),
    "group": (
        DecoderConfig(layers=6, group=(LOCAL, FULL)),
        "mesh.pipe: does not divide the repeats of the group of layers",
        "3 repeats × 2 layers = 6 layers; 3 repeats / (pipe=4) = 0.75",
    ),
    "ends": (
        DecoderConfig(layers=7, first=(FULL,), group=(LOCAL, FULL), last=(LOCAL, LOCAL)),
        "mesh.pipe: does not divide the repeats of the group of layers",
        "1 first + 2 repeats × 2 layers + 2 last = 7 layers; 2 repeats / (pipe=4) = 0.5",
    ),
    "aperiodic": (
        DecoderConfig(layers=8, group=(LOCAL, FULL, FULL, LOCAL, LOCAL, FULL, LOCAL, LOCAL)),
        "the longest period of this pattern, 8 layers, occurs once",
        "1 repeat × 8 layers = 8 layers; 1 repeat / (pipe=4) = 0.25",
    ),
}


def config(model, stages, **pipeline):
    """The config of a run over so many stages."""
    return TrainConfig(
        model=model,
        rules=decoder_rules(model),
        mesh=MeshShape(pipe=stages),
        data=DataConfig(batch=16, sequence=16),
        pipeline=PipelineConfig(microbatches=4, **pipeline),
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_too_few_layers_are_refused(name):
    """One problem, with the arithmetic of repeats; a pattern without any names its period."""
    model, what, arithmetic = PATTERNS[name]
    with pytest.raises(ConfigError) as caught:
        make_setup(config(model, 4), abstract_mesh(MeshShape(pipe=4)))
    (problem,) = caught.value.problems
    assert what in str(problem)
    assert problem.detail == arithmetic
    assert problem.fix


def test_chunks_are_counted():
    """An interleaved schedule divides layers into two chunks for each stage."""
    model = DecoderConfig(layers=4, group=(LOCAL, FULL))
    mesh = abstract_mesh(MeshShape(pipe=2))
    with pytest.raises(ConfigError, match=r"2 repeats / \(pipe=2 × 2 chunks\) = 0.5"):
        make_setup(config(model, 2, schedule="interleaved"), mesh)


@pytest.mark.parametrize(
    ("schedule", "chunks", "layers", "fix"),
    [
        ("1f1b", 1, 5, ""),
        ("interleaved", 2, 7, ""),
        ("interleaved", 3, 8, "a multiple of 6 layers, or a pipeline.chunks that divides 4"),
        ("pipedream", 1, 5, "a multiple of 2 layers, or a schedule with a flush, such as 1f1b"),
    ],
)
def test_stages_may_have_unequal_numbers_of_layers(schedule, chunks, layers, fix):
    """Two stages of three and two; not without a flush, and not where equal stages have unequal chunks."""
    made = make_schedule(schedule, 2, 4, chunks)
    if not fix:
        check_stages(DecoderConfig(layers=layers), made)
        return
    with pytest.raises(ConfigError) as caught:
        check_stages(DecoderConfig(layers=layers), made)
    (problem,) = caught.value.problems
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("model", "pipeline", "said"),
    [
        ({"layers": 5}, {}, "stages have unequal numbers of layers, 1 × 3 + 1 × 2 = 5"),
        (
            {"layers": 6, "group": (LOCAL, FULL)},
            {},
            "stages have unequal numbers of groups of layers, 1 × 2 + 1 × 1 = 3",
        ),
        (
            {"layers": 7},
            {"schedule": "interleaved"},
            "chunks of stages have unequal numbers of layers, 3 × 2 + 1 × 1 = 7",
        ),
        ({"layers": 4}, {}, ""),
    ],
    ids=["layers", "groups", "chunks", "equal"],
)
def test_a_plan_says_what_the_stages_have(model, pipeline, said):
    """Layers, groups of them, or chunks; nothing where all have as many."""
    setup = make_setup(
        config(DecoderConfig(**model), 2, **pipeline), abstract_mesh(MeshShape(pipe=2))
    )
    line = pipeline_line(setup)
    assert line.endswith(said)
    assert ("unequal" in line) == bool(said)


def test_repeats_that_divide_are_not_refused():
    """Twelve layers of a period of three are four repeats; first and last layers are no part of them."""
    schedule = make_schedule("1f1b", 4, 4, 1)
    period = DecoderConfig(layers=12, group=(LOCAL, LOCAL, FULL))
    odd = dataclasses.replace(period, layers=15, first=(FULL,), last=(FULL, LOCAL))
    for model in (period, odd, DecoderConfig(layers=8)):
        check_stages(model, schedule)
        assert repeats_of(model) % 4 == 0
    check_stages(DecoderConfig(layers=5), None)


def test_a_plan_alone_names_the_stack_once():
    """A table's audit has one problem for all parameters of a stack, beside those of other dimensions."""
    model = DecoderConfig(layers=2, group=(LOCAL, FULL), d_ff=63)
    with pytest.raises(RuleError) as caught:
        make_plan(
            abstract_mesh(MeshShape(pipe=2, tensor=2)),
            decoder_rules(model),
            from_nnx(model.build),
            optax.sgd(0.1),
        )
    stack, *others = caught.value.problems
    assert stack.where == "layers"
    assert stack.detail == "1 / (pipe=2) = 0.5"
    assert {problem.detail for problem in others} == {"63 / (tensor=2) = 31.5"}
