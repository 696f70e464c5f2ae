"""Every option of a decoder gives the numbers of one device, on every axis of the mesh that it allows.

The rows are those of `options.txt`, which `options.py` writes: a decoder of one layer or one group of
layers, with several options, on a mesh of up to eight devices. The rows that have each option on
each axis are tested at every change; those with the other pairs of options are soak.
"""

import dataclasses
import functools
import itertools
import typing
from typing import Any

import pytest

from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    MLPSpec,
    NormSpec,
    Rotary,
    StateSpaceSpec,
    decoder_rules,
)
from spmd.models.decoder.layer import Mixer
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan import flax
from spmd.testing import BUGS, Parity, token_batches
from tests.one_device import REORDERED, Job
from tests.parity.covering import Row
from tests.parity.layouts import mesh_sizes
from tests.parity.options import (
    CHOICES,
    OPTIONS,
    SEQUENCE,
    VOCAB,
    decoder_of,
    is_possible,
    on_axes,
)

MICROBATCHES = 2
BATCHES = token_batches((8, SEQUENCE), VOCAB, steps=1)
TABLE = OPTIONS.read_table()
IN_CI = 15
"""Rows with each option on each axis, which are the first ones."""


@functools.cache
def job_of(config: DecoderConfig, microbatches: int) -> Job:
    """The training of a decoder on one device."""
    model = flax.from_nnx(config.build)
    grad_fn = accumulate(value_and_grad(next_token_loss(model, chunk=7)), microbatches)
    return Job(model, decoder_rules(config), grad_fn, BATCHES)


def grad_fn_of(row: Row, job: Job) -> GradFn:
    """The gradient function of a row's mesh, through stages where it has some."""
    if row["pipe"] == "1":
        return job.grad_fn
    table = tabulate(make_schedule("1f1b", int(row["pipe"]), MICROBATCHES, 1))
    return pipeline(next_token_loss(job.model, chunk=7), table)


def parity(row: Row, bug: str = "") -> Parity:
    """A row's decoder on its mesh against one device."""
    sizes = mesh_sizes(row)
    microbatches = 1
    context = "ring"
    if "pipe" in sizes:
        microbatches = MICROBATCHES
        context = "all-to-all"
    job = job_of(decoder_of(row), microbatches)
    grad_fn = grad_fn_of(row, job)
    if bug:
        grad_fn = BUGS[bug](grad_fn)
    options = (("context", context),)
    return job.parity(grad_fn=grad_fn, options=options, tolerance=REORDERED, **sizes)


def name_of(row: Row) -> str:
    return "-".join(
        f"{name}{choice}" if choice == "2" else choice
        for name, choice in row.items()
        if choice != CHOICES[name][0]
    )


def params_of_rows():
    """The rows, of which the first are for every change."""
    for number, row in enumerate(TABLE):
        marks = [pytest.mark.soak] * (number >= IN_CI)
        yield pytest.param(row, marks=marks, id=name_of(row))


@pytest.mark.parametrize("row", params_of_rows())
def test_options_give_the_numbers_of_one_device(row: Row) -> None:
    """The initial state bitwise; of a step loss, gradients, routers' biases and updates up to rounding."""
    result = parity(row)
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize("bug", ["reduction", pytest.param("leaf-scale", marks=pytest.mark.soak)])
def test_control_a_bug_is_caught(bug: str) -> None:
    """A sum over half of the examples, or one parameter's gradient that is 1 % off, fails the same comparison."""
    assert not parity(TABLE[0], bug).ok


def test_every_option_is_on_every_axis() -> None:
    """In the rows for every change; and every pair of options in all rows. The control: one row fewer."""
    possible = OPTIONS.possible_pairs()
    wanted = on_axes(possible)
    assert all(is_possible(row) for row in TABLE)
    assert not wanted - OPTIONS.proven(TABLE[:IN_CI])
    assert wanted - OPTIONS.proven(TABLE[: IN_CI - 1])
    assert not possible - OPTIONS.proven(TABLE)
    assert possible - OPTIONS.proven(TABLE[:-1])


def mixers_and_mlps(config: DecoderConfig) -> list[Any]:
    """The specs of mixers, MLPs and experts in a decoder, as given."""
    layers = (config.layer, *config.first, *config.group, *config.last)
    return [part for layer in layers for part in (layer.mixer, layer.mlp)]


def specs_of(config: DecoderConfig) -> list[Any]:
    """All specs in a decoder."""
    parts = mixers_and_mlps(config)
    rotaries = [part.rotary for part in parts if hasattr(part, "rotary")]
    return [config, config.norm, *parts, *rotaries]


ELSEWHERE = {
    AttentionSpec: {"causal"},  # of encoders, which are no decoders
    # defaults of layers; tests/parity/test_layouts.py; tests/parity/test_pipelines.py
    DecoderConfig: {"window", "rope_scaling", "stacked", "unroll"},
    StateSpaceSpec: {"norm"},  # excludes gate_first; tests/numerics/test_state_space_mixer.py
}
"""Fields that no row varies, with the reason."""
KINDS = (
    DecoderConfig,
    NormSpec,
    Rotary,
    StateSpaceSpec,
    *typing.get_args(Mixer),
    MLPSpec,
    ExpertsSpec,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_an_option_of_the_table(kind: type) -> None:
    """A new field of a spec, or a new kind of mixer, needs a choice in the table."""
    varied = set()
    for spec in itertools.chain.from_iterable(map(specs_of, map(decoder_of, TABLE))):
        if type(spec) is kind:
            own = dataclasses.fields(spec)
            varied |= {field.name for field in own if getattr(spec, field.name) != field.default}
    assert {field.name for field in dataclasses.fields(kind)} - varied == ELSEWHERE.get(kind, set())
