"""Low-rank adapters beside frozen parameters: the same numbers on every mesh, and nothing of the rest changes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.lora.adapters import BASE, lora_rules, with_adapters, with_lora
from spmd.lora.config import LoRAConfig
from spmd.model_interface.model import Model
from spmd.models.mixtral import PRESETS as MIXTRAL_PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.sharding.rules import Rules
from spmd.training.batch import place_batch
from spmd.training.state import TrainState, init_state
from spmd.training.step import make_train_step
from tests import tiny
from tests.rounding import FACTOR, assert_close, noise_of, ratios

LORA = LoRAConfig(targets=("attention/(q|v)_proj/kernel", "mlp/down_proj/kernel"), rank=4)
STEPS = 3


@functools.cache
def adapted(lora: LoRAConfig = LORA) -> Model:
    return with_lora(tiny.model(), lora, LLAMA)


@functools.cache
def plan(lora: LoRAConfig = LORA, options: tuple = (), **sizes: int) -> ShardingPlan:
    rules = lora_rules(tiny.model(), lora, LLAMA)
    return make_plan(tiny.mesh(**sizes), rules, adapted(lora), tiny.OPTIMIZER, **dict(options))


def batch(of: ShardingPlan) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, tiny.CONFIG.vocab, (8, 17)).astype(np.int32)
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((8, 16), np.float32),
    }
    return place_batch(of, arrays)


@functools.cache
def gradients_of(lora: LoRAConfig) -> GradFn:
    return value_and_grad(next_token_loss(adapted(lora)))


def trained(
    of: ShardingPlan, lora: LoRAConfig = LORA, grad_fn: GradFn | None = None, start: Any = None
) -> tuple[TrainState, list[float]]:
    """The state after some steps and the losses of them; `start` is what it begins with: parameters and variables."""
    step, state, losses = (
        make_train_step(of, grad_fn=grad_fn or gradients_of(lora)),
        init_state(of),
        [],
    )
    if start:
        state = dataclasses.replace(state, params=start[0], variables=start[1])
    for _ in range(STEPS):
        state, metrics = step(state, batch(of))
        losses.append(float(metrics["loss"]))
    return state, losses


def lost(
    of: ShardingPlan, lora: LoRAConfig = LORA, grad_fn: GradFn | None = None
) -> tuple[Any, Any]:
    """What float32 loses of the adapters and the losses after some steps."""

    def run(*start: Any) -> tuple[Any, list[float]]:
        state, losses = trained(of, lora, grad_fn, jax.tree.map(jnp.copy, start))
        return state.params, losses

    state = init_state(of)
    return noise_of(run, state.params, state.variables)


@functools.cache
def reference() -> tuple[TrainState, list[float]]:
    return trained(plan())


@functools.cache
def lost_of_reference() -> tuple[Any, Any]:
    return lost(plan())


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [{"sequence": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_adapters_train_alike_on_every_mesh(sizes: dict[str, int]) -> None:
    """Losses and adapters after some steps are those of one device."""
    (state, losses), (expected, expected_losses) = trained(plan(**sizes)), reference()
    assert_close((state.params, losses), (expected.params, expected_losses), lost_of_reference())


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        pytest.param("1f1b", {"pipe": 2, "data": 2}, marks=pytest.mark.soak),
        pytest.param("interleaved", {"pipe": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.soak),
    ],
)
def test_adapters_train_alike_in_a_pipeline(schedule: str, sizes: dict[str, int]) -> None:
    """Each stage has its own frozen layers, and gradients are those of its adapters alone."""
    model = tiny.model(tiny.replaced(layers=4))
    low, rules = with_lora(model, LORA, LLAMA), lora_rules(model, LORA, LLAMA)
    table = tabulate(make_schedule(schedule, 2, 4, 2 if schedule == "interleaved" else 1))
    loss_fn = next_token_loss(low)
    one, many = (make_plan(tiny.mesh(**axes), rules, low, tiny.OPTIMIZER) for axes in ({}, sizes))
    accumulated = accumulate(value_and_grad(loss_fn), 4)
    expected, expected_losses = trained(one, grad_fn=accumulated)
    state, losses = trained(many, grad_fn=pipeline(loss_fn, table))
    rounding = lost(one, grad_fn=accumulated)
    assert_close((state.params, losses), (expected.params, expected_losses), rounding)
    specs = {leaf.path: leaf.spec for leaf in many.variables}
    assert specs["base/layers/attention/k_proj/kernel"][0] == "pipe"


@pytest.mark.soak
def test_control_another_scale_is_seen() -> None:
    """With another alpha the same adapters learn otherwise: each of them, and every loss but the first."""
    other = dataclasses.replace(LORA, alpha=4.0)
    (state, losses), (expected, expected_losses) = trained(plan(other), other), reference()
    found = ratios((state.params, losses), (expected.params, expected_losses), lost_of_reference())
    assert all(ratio > 20 * FACTOR for path, ratio in found.items() if path != "1/0")


def test_nothing_but_adapters_changes() -> None:
    """Frozen parameters are bitwise as they began, gradients and optimizer state are of adapters alone."""
    layout, (state, losses) = plan(), reference()
    assert losses[-1] < losses[0]
    for path, array in tree.flatten(init_state(layout).variables).items():
        np.testing.assert_array_equal(tree.flatten(state.variables)[path], array, err_msg=path)
    assert all("_lora_" in leaf.path for leaf in (*layout.params, *layout.gradients))
    assert all("_lora_" in leaf.path or leaf.shape == () for leaf in layout.optimizer_state)


def test_it_begins_as_the_model_and_stays_what_merging_makes_of_it() -> None:
    """Logits before a step are bitwise the model's; afterwards, those of the model with its adapters merged in."""
    tokens = batch(plan())["tokens"]
    start, (state, _) = init_state(plan()), reference()
    plain = tiny.model().apply(start.variables[BASE], tokens)
    np.testing.assert_array_equal(_logits(start, tokens), plain)

    def merged(params: Any) -> jax.Array:
        return tiny.model().apply(with_adapters(state.variables[BASE], params, LORA), tokens)

    expected = merged(state.params)
    assert_close(_logits(state, tokens), expected, noise_of(merged, state.params))
    assert not np.allclose(expected, plain, atol=1e-3)


def _logits(state: TrainState, tokens: jax.Array) -> jax.Array:
    return adapted().forward(state.params, state.variables, None, tokens, train=False)[0]


@pytest.mark.parametrize("alpha", [0.0, float("nan"), float("inf")])
def test_an_alpha_that_trains_nothing_is_refused(alpha: float) -> None:
    """With 0 every gradient would be zero."""
    with pytest.raises(ConfigError, match=r"lora\.alpha"):
        LoRAConfig(targets=("kernel",), alpha=alpha)


def test_a_rank_that_is_none_is_refused() -> None:
    """Without targets it would be of nothing; above a matrix's own it would be no low one."""
    with pytest.raises(ConfigError, match=r"lora\.targets: is empty"):
        LoRAConfig(rank=4)
    with pytest.raises(ConfigError, match=r"33 > 32 of \(2, 32, 32\)"):
        with_lora(tiny.model(), LoRAConfig(targets=("attention/q_proj/kernel",), rank=33), LLAMA)


def test_an_adapter_lies_as_its_parameter_does() -> None:
    """A is split as the rows and B as the columns, neither over fsdp, and stacks as their parameter."""
    specs = {leaf.path: leaf.spec for leaf in plan(data=2, fsdp=2, tensor=2).params}
    assert specs["layers/attention/q_proj/kernel_lora_a"] == P("pipe")
    assert specs["layers/attention/q_proj/kernel_lora_b"] == P("pipe", None, "tensor")
    assert specs["layers/mlp/down_proj/kernel_lora_a"] == P("pipe", "tensor", None)
    assert specs["layers/mlp/down_proj/kernel_lora_b"] == P("pipe")


@pytest.mark.soak
def test_frozen_parameters_may_be_in_host_memory() -> None:
    """Offloaded, they are in host memory before and after a step, and the numbers are the same."""
    layout = plan(options=(("offload", ("params",)), ("remat", "full")), fsdp=2)
    state, losses = trained(layout)
    assert_close(losses, reference()[1], lost_of_reference()[1])
    kinds = {
        path: leaf.sharding.memory_kind
        for path, leaf in tree.flatten(state.variables[BASE]).items()
    }
    assert {path for path, kind in kinds.items() if kind == "pinned_host"} == {
        path for path in kinds if path.startswith("layers/") and path.endswith("kernel")
    }
    assert all(leaf.memory_kind == "device" for leaf in layout.params)


@pytest.mark.soak
@pytest.mark.parametrize("target", ["lm_head/kernel", "embed/embedding"])
def test_what_no_layer_multiplies_with_is_merged(target: str) -> None:
    """An embedding and an output head may have an adapter too."""
    lora = LoRAConfig(targets=(target,), rank=2)
    losses = trained(plan(lora, fsdp=2, tensor=2), lora)[1]
    assert_close(losses, trained(plan(lora), lora)[1], lost(plan(lora), lora)[1])
    assert losses[-1] < losses[0]


def test_a_module_that_knows_of_no_adapter_can_have_one() -> None:
    """A user's own Flax module is given the sum of parameter and adapter."""
    model = from_nnx(lambda rngs: nnx.Linear(4, 6, rngs=rngs))
    lora, rules = LoRAConfig(targets=("kernel",), rank=2), Rules([("kernel", P("fsdp", "tensor"))])
    low = with_lora(model, lora, rules)
    params = jax.tree.map(jnp.ones_like, low.init(jax.random.key(0)))
    variables = low.init_variables(jax.random.key(0))
    x = jnp.ones((3, 4))

    def out(params: Any, variables: Any) -> jax.Array:
        return low.forward(params, variables, None, x, train=False)[0]

    expected = model.apply(variables[BASE], x) + 4 * 2 * lora.scale_of(2)
    assert_close(out(params, variables), expected, noise_of(out, params, variables))


def test_targets_that_cannot_be_adapted_are_all_named() -> None:
    """A pattern without a match, one that is no matrix, no regex, a rank of zero."""
    with pytest.raises(ConfigError) as caught:
        with_lora(
            tiny.model(), LoRAConfig(targets=("attention/x_proj/kernel", "norm/scale")), LLAMA
        )
    assert [problem.where for problem in caught.value.problems] == [
        "lora.targets[0]",
        "lora.targets[1]",
    ]
    with pytest.raises(ConfigError) as caught:
        LoRAConfig(targets=("(",), rank=0)
    assert [problem.where for problem in caught.value.problems] == ["lora.rank", "lora.targets[0]"]


@pytest.mark.soak
def test_experts_may_have_adapters() -> None:
    """Merged before the model runs, they lie over `expert` as kernels do; numbers are those of one device."""
    model = from_nnx(MIXTRAL_PRESETS["test"].build)
    lora = LoRAConfig(targets=("experts/(up|down)_proj/kernel", "attention/q_proj/kernel"), rank=2)
    low, rules = with_lora(model, lora, MIXTRAL), lora_rules(model, lora, MIXTRAL)
    grad_fn = value_and_grad(next_token_loss(low))
    one, many = (
        make_plan(tiny.mesh(**sizes), rules, low, tiny.OPTIMIZER)
        for sizes in ({}, {"expert": 2, "fsdp": 2, "tensor": 2})
    )
    _, losses = trained(one, grad_fn=grad_fn)
    assert_close(trained(many, grad_fn=grad_fn)[1], losses, lost(one, grad_fn=grad_fn)[1])
    assert losses[-1] < losses[0]
    specs = {leaf.path: leaf.spec for leaf in many.params}
    assert specs["layers/moe/experts/up_proj/kernel_lora_b"] == P("pipe", "expert", None, "tensor")
