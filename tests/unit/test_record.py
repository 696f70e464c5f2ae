"""A resumed run keeps its model, its data and its stored state; what else may change is declared, field by field."""

import dataclasses
from pathlib import Path

import optax
import pytest

from spmd.errors import CheckpointError
from spmd.models.decoder import DecoderConfig
from spmd.models.decoder.rotary import Llama3Scaling
from spmd.optim.config import OptimizerConfig
from spmd.partition_rules.llama import LLAMA
from spmd.run.config import TrainConfig, config_values, with_values
from spmd.run.record import MAY_CHANGE, changed_fields, check_resumable

CONFIG = TrainConfig(model=DecoderConfig(d_model=32, layers=2), rules=LLAMA)
RECORD = {
    "step": 4,
    "position": 64,
    "data": "abc",
    "model": "DecoderConfig",
    "config": config_values(CONFIG),
}


def problems(values, record=RECORD, data="abc", batch=16):
    """What a resume with these fields is refused for."""
    config = values if isinstance(values, TrainConfig) else with_values(CONFIG, values)
    try:
        check_resumable(record, config, data, batch, Path("runs/x"))
    except CheckpointError as error:
        return {problem.where: f"{problem.what}; {problem.fix}" for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model": {"layers": 4}},
            {"model.layers": "was 2 and is 4; model.layers=2, or another folder"},
        ),
        (
            {"model": {"heads": 8, "kv_heads": 4}},
            {"model.heads": "was 4 and is 8", "model.kv_heads": "was 2 and is 4"},
        ),
        (
            {"model": {"rope_theta": 500.0}},
            {"model.rope_theta": "was 10000.0 and is 500.0; model.rope_theta=10000.0"},
        ),
        (
            {"lora": {"targets": ["q_proj/kernel"], "alpha": 3.0}},
            {"lora.alpha": "", "lora.targets": ""},
        ),
        ({"init": "runs/other"}, {"init": "was empty and is runs/other; the value that"}),
        ({"optimizer": {"name": "lion"}}, {"optimizer.name": "was adamw and is lion"}),
        (
            {"data": {"batch": 8}, "seed": 1},
            {"data.batch": "was 16 and is 8; data.batch=16", "seed": "was 0 and is 1"},
        ),
        ({"steps": 3}, {"steps": "is 3, and the checkpoint is of step 4; steps=4 or more"}),
        ({"precision": "bf16-params"}, {"precision": "was float32 and is bf16-params"}),
        ({"on_nan": "skip"}, {"on_nan": "was stop and is skip"}),
        ({"recovery": {"on_spike": "skip"}}, {"recovery.on_spike": "was ignore and is skip"}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_field_that_must_stay_is_refused(values, expected):
    """By its dotted path, with both values and the argument, whether or not a shape changes."""
    found = problems(values)
    assert found.keys() == expected.keys()
    assert all(text in found[name] for name, text in expected.items())


def leaves(values, prefix=""):
    for name, value in values.items():
        yield from (
            leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
        )


def test_every_field_is_decided():
    """A field that is not declared must stay; these are all. A new field that may change is added to `MAY_CHANGE`."""
    fields = list(leaves(config_values(CONFIG)))
    may = [
        name
        for name in fields
        if any(name == field or name.startswith(f"{field}.") for field in MAY_CHANGE)
    ]
    rest = [name for name in fields if name not in may and not name.startswith(("model.", "lora."))]
    optimizer = [
        f"optimizer.{name}" for name in ("name", "scales", "moments", "moments_block", "ema_decay")
    ]
    data = [f"data.{name}" for name in ("sequence", "packing", "streaming", "batch")]
    data += ["data.batch_ramp", "data.length_groups"]
    dpo = [f"dpo.{name}" for name in ("loss", "beta", "margin", "label_smoothing", "nll")]
    ends = ["task", "diloco.momentum", "mup", *dpo]
    assert rest == ["seed", "precision", "init", *optimizer, *data, *ends]
    unused = [
        field
        for field in MAY_CHANGE
        if not any(name == field or name.startswith(f"{field}.") for name in fields)
    ]
    assert unused == []


def test_another_schedule_function_is_printed():
    """By name and arguments; an equal one made anew is no change, and a record of functions restores none."""

    def config(schedule_fn):
        return dataclasses.replace(CONFIG, optimizer=OptimizerConfig(schedule_fn=schedule_fn))

    before = config(optax.linear_schedule(1e-3, 0.0, 100))
    record = {**RECORD, "config": config_values(before)}
    assert problems(config(optax.linear_schedule(1e-3, 0.0, 100)), record) == {}
    assert changed_fields(record, config(optax.linear_schedule(1e-3, 0.0, 100))) == {}
    assert problems(config(optax.constant_schedule(0.1)), record) == {}
    was, now = changed_fields(record, config(optax.linear_schedule(1e-3, 0.0, 200)))[
        "optimizer.schedule_fn"
    ]
    assert (was, now) == tuple(
        f"optax.polynomial_schedule(end_value=0.0, init_value=0.001, power=1, transition_begin=0, transition_steps={n})"
        for n in (100, 200)
    )
    assert changed_fields(RECORD, before)["optimizer.schedule_fn"] == [None, was]
    assert with_values(before, record["config"]) == before


@pytest.mark.parametrize(
    "values",
    [
        {
            "steps": 2000,
            "mesh": {"fsdp": 4},
            "out": "runs/y",
            "log_every": 3,
            "zero": 1,
            "remat": "full",
        },
        {
            "optimizer": {"learning_rate": 1e-5, "schedule": "constant"},
            "recovery": {"rollbacks": 9},
        },
        {"precision": "bf16", "on_nan": "roll-back", "model": {"unroll": 2}},
        {"data": {"threads": 0, "source": ["moved"], "cache": "elsewhere"}},
    ],
)
def test_what_may_change_is_printed(values):
    """Nothing is refused, and every changed field has its old and new value."""
    assert problems(values) == {}
    assert set(changed_fields(RECORD, with_values(CONFIG, values))) == set(leaves(values))


def test_another_text_is_refused():
    """By the field that says so, or as files that have changed."""
    found = problems({"data": {"validation": 0.5, "threads": 0}}, data="xyz")
    assert list(found) == ["data.validation"]
    assert "is not that with which" in problems({}, data="xyz")["data.source"]


def test_another_class_of_model_is_refused():
    """Equal shapes and names suffice as little as they do for `--init`; a record without the class is not refused."""
    found = problems({}, RECORD | {"model": "ViTConfig"})
    assert list(found) == ["model"]
    assert "was ViTConfig and is DecoderConfig" in found["model"]
    assert problems({}, {name: value for name, value in RECORD.items() if name != "model"}) == {}


def test_a_record_of_an_earlier_class_of_a_family_is_read():
    """Its fields that have a place today are compared, and the layer table is that of the config file."""
    old = config_values(CONFIG)
    kept = ("vocab", "d_model", "layers", "heads", "kv_heads", "d_ff", "window", "tied")
    old["model"] = {name: old["model"][name] for name in kept} | {"qkv_bias": True}
    record = RECORD | {"model": "QwenConfig", "config": old}
    assert problems({}, record) == {}
    wider = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, d_ff=96))
    assert list(problems(wider, record)) == ["model.d_ff"]


def test_a_field_that_an_earlier_version_lacked_had_its_default():
    """An old checkpoint resumes; what changes from the default of a field is refused or printed like anything else."""
    old = config_values(CONFIG)
    del old["recovery"]["skips_in_a_row"], old["model"]["rope_scaling"], old["model"]["window"]
    record = {**RECORD, "config": old}
    assert problems({}, record) == {}
    assert changed_fields(record, with_values(CONFIG, {"recovery": {"skips_in_a_row": 3}})) == {
        "recovery.skips_in_a_row": [20, 3]
    }
    scaling = Llama3Scaling(2.0)
    model = dataclasses.replace(CONFIG.model, window=8, rope_scaling=scaling)
    scaled = dataclasses.replace(CONFIG, model=model)
    found = problems(scaled, record)
    fields = [f"model.rope_scaling.{field.name}" for field in dataclasses.fields(scaling)]
    assert set(found) == {*fields, "model.window"}


def test_a_record_of_unscaled_positions_by_an_earlier_version_is_read():
    """It had the fields of one scaling with factor 1; control: with factor 8 it is refused, and is itself."""
    unscaled = config_values(Llama3Scaling())
    for factor in (1.0, 8.0):
        model = {**RECORD["config"]["model"], "rope_scaling": {**unscaled, "factor": factor}}
        record = {**RECORD, "config": {**RECORD["config"], "model": model}}
        scaled = dataclasses.replace(CONFIG.model, rope_scaling=Llama3Scaling(8.0))
        is_scaled = factor == 8
        assert bool(problems({}, record)) == is_scaled
        other = dataclasses.replace(CONFIG, model=scaled)
        assert bool(problems(other, record)) != is_scaled


def test_a_record_by_an_earlier_name_of_a_field_is_read():
    """It is that field; control: a name that no field ever had is one that differs."""
    values = dict(RECORD["config"])
    values["exchange" + "_once"] = values.pop("defer_grad_reduction")
    assert problems(CONFIG, {**RECORD, "config": values}) == {}
    values["exchange_twice"] = "auto"
    assert set(problems(CONFIG, {**RECORD, "config": values})) == {"exchange_twice"}
