"""Transforms of the gradient: every pair of techniques works, or is refused in the plan with a fix that then works."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import spmd
from spmd.delayed_scaling.amax_history import AmaxHistory
from spmd.errors import ConfigError, SpmdError
from spmd.gradients.keep_carry import KeepCarry
from spmd.lora.config import LoRAConfig
from spmd.loss_scaling.loss_scale import LossScale
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.pipedream.grad_fn import InFlight
from spmd.powersgd.transform import PowerSGD
from spmd.run import build
from spmd.run.config import TrainConfig
from spmd.run.transforms import TRANSFORMS
from tests import tiny
from tests.tiers import soak_but

SMALL = DecoderConfig(vocab=64, d_model=32, layers=4, heads=4, kv_heads=2, d_ff=64)
STAGES = spmd.MeshShape(pipe=2, data=2, fsdp=2)
TECHNIQUES: dict[str, dict[str, Any]] = {
    "loss scale": {"precision": "fp16"},
    "history": {"quantize": "fp8-delayed"},
    "powersgd": {"compress": spmd.CompressConfig(gradients="powersgd:2")},
    "pipedream": {"mesh": STAGES, "pipeline": spmd.PipelineConfig("pipedream", 4)},
    "1f1b": {"mesh": STAGES, "pipeline": spmd.PipelineConfig("1f1b", 4)},
    "adapters": {"lora": LoRAConfig(targets=("layers/attention/(q|v)_proj/kernel",), rank=16)},
    "skip": {"on_nan": "skip"},
    "accumulation": {"accumulate": 2},
    "exchange": {"defer_grad_reduction": "data", "accumulate": 2},
}
"""Name → fields of a config: what keeps a state around a gradient, and what wraps it."""


def config_of(*names: str) -> TrainConfig:
    fields: dict[str, Any] = {"mesh": spmd.MeshShape(data=2, fsdp=2, tensor=2)}
    for name in names:
        fields |= TECHNIQUES[name]
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=16, batch=32)
    return TrainConfig(model=SMALL, rules=LLAMA, data=data, **fields)


def setup_of(config: TrainConfig) -> build.TrainSetup:
    return build.make_setup(config, build.planned_mesh(config))


def mended(config: TrainConfig, error: SpmdError) -> TrainConfig:
    """The config with the first argument of each fix."""
    for problem in error.problems:
        flag = re.match(r'([\w.]+)="?([\w:]+)', problem.fix)
        assert flag, f"{problem} names no argument"
        *outer, name = flag[1].split(".")
        inner = config
        for part in outer:
            inner = getattr(inner, part)
        value: Any = int(flag[2]) if isinstance(getattr(inner, name), int) else flag[2]
        changed = dataclasses.replace(inner, **{name: value})
        config = dataclasses.replace(config, **{outer[0]: changed}) if outer else changed
    return config


CONFLICTS = {
    frozenset(pair)
    for pair in (
        ("loss scale", "powersgd"),
        ("loss scale", "pipedream"),
        ("history", "powersgd"),
        ("history", "pipedream"),
        ("history", "1f1b"),
        ("history", "exchange"),
        ("history", "adapters"),
        ("powersgd", "pipedream"),
        ("pipedream", "skip"),
        ("pipedream", "accumulation"),
        ("pipedream", "exchange"),
    )
}


PAIRS = list(itertools.combinations(TECHNIQUES, 2))
IN_CI = [
    *(pair for pair in PAIRS if frozenset(pair) in CONFLICTS),
    ("loss scale", "history"),
    ("powersgd", "accumulation"),
    ("pipedream", "adapters"),
    ("history", "skip"),
]


@pytest.mark.parametrize("pair", soak_but(PAIRS, *IN_CI), ids="-".join)
def test_a_pair_works_or_is_refused_before_it_is_traced(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one plan where it works; else with a fix that names a flag, after which it works."""
    if set(pair) == {"pipedream", "1f1b"}:
        pytest.skip("one schedule or the other")
    config, plans = config_of(*pair), []
    make_plan = build.make_plan
    monkeypatch.setattr(
        build, "make_plan", lambda *args, **options: plans.append(1) or make_plan(*args, **options)
    )
    if frozenset(pair) in CONFLICTS:
        with pytest.raises(SpmdError) as caught:
            setup_of(config)
        config = mended(config, caught.value)
        plans.clear()
    made = setup_of(config)
    made.step.trace(build.abstract_batch(config))
    assert len(plans) == 1


@dataclasses.dataclass(frozen=True)
class Plain(spmd.GradTransform):
    """A transform that does nothing."""

    name = "plain"


def plan_of(**options: Any) -> spmd.ShardingPlan:
    return tiny.plan(options=tuple(options.items()), data=2, fsdp=2)


@pytest.mark.parametrize(
    ("transforms", "options", "said"),
    [
        (
            (PowerSGD(2), PowerSGD(3)),
            {},
            "transform compression: has the name of another transform",
        ),
        ((Plain(), PowerSGD(2)), {}, "is PowerSGD inside of another transform"),
        (
            (KeepCarry(), LossScale()),
            {},
            "transforms keep_carry, loss_scale: each undo what all others did",
        ),
        ((AmaxHistory(),), {}, "transform magnitudes: remembers no matmul"),
        ((PowerSGD(2),), {"precision": "fp16"}, "precision: is fp16, with a loss scale"),
        (
            (PowerSGD(2),),
            {"quantize": "fp8-delayed"},
            "quantize: is fp8-delayed, which scales by earlier steps",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_refused(transforms: Any, options: dict[str, Any], said: str) -> None:
    """When transforms are added to a plan, in the words of what is wrong."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan_of(**options).with_transforms(*transforms)


def test_what_a_plan_needs_it_has() -> None:
    """A policy and a recipe bring their transforms; what undoes a step is outside, whenever it was added."""
    plan = plan_of(precision="fp16", quantize="fp8-delayed")
    assert [each.name for each in plan.transforms] == ["magnitudes", "loss_scale"]
    states = {entry.path.partition("/")[0] for entry in plan.transform_states}
    assert states == {"magnitudes", "loss_scale"}
    assert plan_of().transforms == plan_of(quantize="fp8").transforms == ()
    added = plan_of().with_transforms(KeepCarry()).with_transforms(PowerSGD(2))
    assert [each.name for each in added.transforms] == ["compression", "keep_carry"]


def test_variables_are_only_the_models() -> None:
    """States are in a table of their own, in the bytes, and in the text; a model that has such a name is refused."""
    plan = plan_of().with_transforms(PowerSGD(2))
    assert plan.variables == ()
    assert {entry.path.partition("/")[0] for entry in plan.transform_states} == {"compression"}
    assert plan.bytes_per_device()["transforms"] > 0
    assert "compression/error/" in str(plan)
    model = spmd.Model(
        lambda key: {"kernel": jnp.ones((64, 64))},
        lambda params, x: x @ params["kernel"],
        lambda key: {"compression": jnp.zeros(())},
        lambda params, variables, key, x, train: (x @ params["kernel"], variables),
    )
    rules = spmd.Rules(
        [("kernel", spmd.replicate("small")), ("compression", spmd.replicate("a scalar"))]
    )
    own = spmd.make_plan(tiny.mesh(data=2), rules, model, optax.sgd(0.1))
    with pytest.raises(ConfigError, match="has the name of a variable of the model"):
        own.with_transforms(PowerSGD(2))


def test_a_gradient_function_returns_the_carry() -> None:
    """One of one's own that returns other variables in its place is told what to return."""

    def own(params: Any, carry: spmd.Carry, batch: Any, key: jax.Array) -> Any:
        return params, {"loss": jnp.float32(1), "weight": jnp.float32(1)}, carry.variables

    step = spmd.make_train_step(plan_of(), grad_fn=own)
    with pytest.raises(
        ConfigError, match=r"take \(params, carry, batch, key\), and return the carry"
    ):
        step.trace({"tokens": jax.ShapeDtypeStruct((8, 8), "int32")})


def test_runs_know_every_transform() -> None:
    """A checkpoint's states are found by the names of all that keep one."""
    assert {kind.name for kind in TRANSFORMS} == {
        "compression",
        "in_flight",
        "magnitudes",
        "loss_scale",
        "diloco",
    }
    assert InFlight.overlapping_steps
