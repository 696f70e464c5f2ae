"""Every option of a decoder gives the numbers of one device, on every axis of the mesh that it allows.

The rows are those of `options.txt`, which `options.py` writes: a decoder of one layer or one group of
layers, with several options, on a mesh of up to eight devices. A few are tested at every change.
"""

import dataclasses
import itertools
import typing
from typing import Any

import pytest

from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    MLPSpec,
    NormSpec,
    ParallelMixerSpec,
    Rotary,
    StateSpaceSpec,
)
from spmd.models.decoder.layer import Mixer
from spmd.testing import Parity
from tests.parity.covering import Row
from tests.parity.decoders import compare
from tests.parity.layouts import mesh_sizes
from tests.parity.options import (
    CHOICES,
    OPTIONS,
    decoder_of,
    is_possible,
    on_axes,
)

TABLE = OPTIONS.read_table()
ON_AXES = 13
"""Rows with each option on each axis, which are the first ones."""
IN_CI = 6
"""Rows that are tested at every change, which compile fastest; the others are soak."""


def parity(row: Row, bug: str = "") -> Parity:
    """A row's decoder on its mesh against one device."""
    return compare(decoder_of(row), bug=bug, **mesh_sizes(row))


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


@pytest.mark.parametrize("row", list(params_of_rows()))
def test_options_give_the_numbers_of_one_device(row: Row) -> None:
    """Of a step the loss, gradients, routers' biases and updates, up to rounding."""
    result = parity(row)
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize("bug", ["reduction", pytest.param("leaf-scale", marks=pytest.mark.soak)])
def test_control_a_bug_is_caught(bug: str) -> None:
    """A sum over half of the examples, or one parameter's gradient that is 1 % off, fails the same comparison."""
    assert not parity(TABLE[0], bug).ok


def test_every_option_is_on_every_axis() -> None:
    """In the first rows; and every pair of options in all rows. The control: one row fewer."""
    possible = OPTIONS.possible_pairs()
    wanted = on_axes(possible)
    assert all(is_possible(row) for row in TABLE)
    assert not wanted - OPTIONS.proven(TABLE[:ON_AXES])
    assert wanted - OPTIONS.proven(TABLE[: ON_AXES - 1])
    assert not possible - OPTIONS.proven(TABLE)
    assert possible - OPTIONS.proven(TABLE[:-1])


def mixers_and_mlps(config: DecoderConfig) -> list[Any]:
    """The specs of mixers, MLPs and experts in a decoder, as given."""
    layers = (config.layer, *config.first, *config.group, *config.last)
    parts = [part for layer in layers for part in (layer.mixer, layer.mlp)]
    return parts + [part.state_space for part in parts if isinstance(part, ParallelMixerSpec)]


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
