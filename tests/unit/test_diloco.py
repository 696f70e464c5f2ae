"""DiLoCo in a config: its flags, its plan, and what does not go together."""

import dataclasses
import functools

import pytest

import spmd
from spmd.diloco.config import DiLoCoConfig
from spmd.diloco.fragments import Fragment, divide
from spmd.diloco.transform import DiLoCo
from spmd.errors import ConfigError
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import evaluation_config, make_setup, planned_mesh
from spmd.run.config import TrainConfig
from spmd.run.describe import plan_lines
from spmd.run.search import count_alone
from spmd.run.step_time import count_model
from tests import tiny

EVERY = DiLoCoConfig(every=8, fragments=2, codec="int4")


def config(diloco: DiLoCoConfig = EVERY, **fields) -> TrainConfig:
    fields = {
        "mesh": spmd.MeshShape(data=4, fsdp=2),
        "data": spmd.DataConfig(batch=8),
        "steps": 80,
        **fields,
    }
    return TrainConfig(model=tiny.CONFIG, rules=LLAMA, diloco=diloco, **fields)


@functools.cache
def setup():
    return make()


def test_each_replica_is_a_run_of_its_own():
    (diloco,) = setup().plan.transforms
    assert isinstance(diloco, DiLoCo)
    assert (diloco.every, diloco.fragments, diloco.codec) == (8, 2, "int4")
    assert dict(diloco.inner.mesh.shape) == {**setup().mesh.shape, "data": 1}
    assert setup().batch["tokens"].shape[0] == 8
    inner = {entry.path: entry for entry in diloco.inner.plan.optimizer_state}
    states = {entry.path: entry for entry in setup().plan.transform_states}
    (moment,) = (path for path in inner if path.endswith("mu/layers/mlp/up_proj/kernel"))
    found = states[f"diloco/optimizer/{moment}"]
    assert found.shape == (4, *inner[moment].shape)
    assert found.bytes_per_device == inner[moment].bytes_per_device
    outer = {entry.path for entry in setup().plan.optimizer_state}
    remarks = {entry.path: entry.update for entry in setup().plan.params}
    assert remarks["norm/scale"] == "no decay"
    assert outer == {f"0/trace/{entry.path}" for entry in setup().plan.params}


def test_closed_forms_know_what_a_step_updates_and_sends():
    diloco = count_model(setup())
    plain = config(DiLoCoConfig())
    alone = count_model(make_setup(plain, planned_mesh(plain)))
    assert diloco.state_bytes == alone.state_bytes
    assert diloco.params == alone.params


def test_plan_says_what_is_sent():
    text = plan_lines(setup(), "")
    assert "diloco 4 replicas over data, synchronized every 8 steps in 2 fragments:" in text
    assert "in int4 between them" in text


def test_evaluations_have_one_model():
    assert make_setup(evaluation_config(config()), planned_mesh(config())).plan.transforms == ()


def test_layers_are_dealt_to_fragments_and_others_to_the_smallest():
    first, second = divide(setup().plan, 2)
    assert first.stacked == second.stacked
    assert first.stacked["layers/mlp/up_proj/kernel"] == 0
    assert sorted(first.whole | second.whole) == ["embed/embedding", "lm_head/kernel", "norm/scale"]
    assert first.whole
    assert second.whole
    assert [Fragment(number, 3, frozenset(), {}).offset(8) for number in range(3)] == [0, 2, 5]


def make(**fields):
    made = config(**fields)
    return make_setup(made, planned_mesh(made))


def wrong(pattern: str, **fields):
    with pytest.raises(ConfigError, match=pattern):
        make(**fields)


def test_what_does_not_go_together_is_an_error():
    with pytest.raises(ConfigError, match=r"diloco\.every: is 0, and fragments, codec would act"):
        DiLoCoConfig(fragments=2, codec="int8")
    with pytest.raises(ConfigError, match=r"diloco\.codec: is 'int3'"):
        DiLoCoConfig(every=8, codec="int3")
    wrong(
        r"(?s)checkpoint_every: is no multiple.*20 / 8 = 2\.5.*a multiple of 8", checkpoint_every=20
    )
    wrong(r"on_nan, recovery\.on_spike: are skip", on_nan="skip")
    wrong(r"(?s)steps: is no multiple.*21 / 8", steps=21)
    wrong(r"(?s)evaluate\.every: is no multiple", evaluate=spmd.EvaluationConfig(every=4))
    powersgd = spmd.CompressConfig(gradients="powersgd:2")
    wrong(r"compress\.gradients: is PowerSGD over data", compress=powersgd)
    wrong(r"(?s)data\.batch.*8 / \(mesh\.data = 4\) / \(accumulate = 4\) = 0\.5", accumulate=4)
    with pytest.raises(ConfigError, match="no search knows replicas"):
        count_alone(config())
    wrong("precision: is fp16", precision="fp16")
    wrong(r"diloco\.every: is 8, and mesh\.data is 1", mesh=spmd.MeshShape(fsdp=8))
    wrong(
        r"(?s)data\.batch: does not divide.*6 / \(mesh\.data = 4\) = 1\.5",
        data=spmd.DataConfig(batch=6),
    )
    ema = spmd.OptimizerConfig(ema_decay=0.9)
    wrong("has averaged parameters in the state of the inner optimizer", optimizer=ema)
    wrong("is beside magnitudes", precision="bf16", quantize="fp8-delayed")
    wrong("has arrays of the inner plan in host memory", offload=("optimizer_state",))
    keep_more = dataclasses.replace(EVERY, fragments=9)
    wrong("9 fragments in 8 steps", diloco=keep_more)
