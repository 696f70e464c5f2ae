"""Stages of unequal numbers of layers give the numbers of one device.

`test_covering_table.py` has them beside each other choice; here are the kinds of stacks, and stages
with several chunks.
"""

import dataclasses

import jax
import pytest

from spmd.gradients.deferred_reduction import choose_deferred_reduction, defer_grad_reduction
from spmd.model_interface.model_config import repeats_of
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec
from spmd.models.deepseek import PRESETS
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.layer_split import LayerSplit
from tests import tiny
from tests.one_device import REORDERED
from tests.parity.decoders import compare
from tests.parity.test_pipelines import BATCHES, OPTIMIZER, alone, parity, tick_table

LOCAL, FULL = LayerSpec(AttentionSpec(window=4)), LayerSpec()
SMALL = {"vocab": 64, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64}
DEEPSEEK = PRESETS["test-deepseek"]
DECODERS = {
    "groups": DecoderConfig(**SMALL, layers=6, group=(LOCAL, FULL)),
    "biases that balance experts": dataclasses.replace(DEEPSEEK, layers=DEEPSEEK.layers + 1),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("expert", "sequence")], ids="-".join)
def test_stacks_of_several_kinds(name, axes):
    """Three repeats of a group on two stages; experts, whose biases are variables of the stack."""
    assert repeats_of(DECODERS[name]) == 3
    sizes = dict.fromkeys((*axes, "pipe"), 2)
    if name == "groups" and "expert" in axes:
        sizes = {"data": 2, "sequence": 2, "pipe": 2}
    result = compare(DECODERS[name], steps=2, **sizes)
    assert result.ok, f"\n{result}"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("schedule", "stages", "layers", "axes"),
    [
        ("interleaved", 2, 7, {"data": 2, "fsdp": 2}),
        ("interleaved", 2, 5, {"fsdp": 2, "tensor": 2}),
        ("1f1b", 4, 6, {"tensor": 2}),
        ("1f1b", 4, 7, {"fsdp": 2}),
    ],
)
def test_chunks_and_more_stages(schedule, stages, layers, axes):
    """Virtual stages differ by one layer at most."""
    result = parity(tick_table(schedule, stages), layers=layers, **axes)
    assert result.ok, f"\n{result}"


@pytest.mark.soak
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_exchange_once_a_step_has_these_numbers_or_is_refused(zero):
    """With ZeRO 1 no axis beside the stages splits a parameter or gradient; else all axes have to be exchanged over."""
    config = tiny.replaced(layers=5)
    plan = tiny.plan(config, OPTIMIZER, (("zero", zero),), pipe=2, data=2, fsdp=2)
    grad_fn = pipeline(tiny.loss_fn(config), tick_table("gpipe", 2))
    chosen = choose_deferred_reduction(grad_fn, plan, BATCHES[0], "auto")
    if zero > 1:
        assert chosen.axes == ()
        assert "is stored over fsdp and pipe" in chosen.reason
    if zero == 2:
        return
    once = defer_grad_reduction(grad_fn, ("data", "fsdp"))
    result = alone(5).compare(plan, once, tolerance=REORDERED)
    assert result.ok, f"\n{result}"


@pytest.mark.soak
def test_control_a_layer_in_another_place_is_caught(monkeypatch):
    """The same comparison fails where gradients come back to the layers of another stage."""
    back = LayerSplit.from_stages

    def rolled(split, gradients):
        return jax.tree.map(lambda d: d[::-1], back(split, gradients))

    monkeypatch.setattr(LayerSplit, "from_stages", rolled)
    assert not parity(tick_table("1f1b", 2), layers=5, fsdp=2, tensor=2).ok
