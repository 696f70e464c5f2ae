"""Mixtral and its relatives: published sizes, auxiliary losses that every mesh and microbatch count alike, biases."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd import tree
from spmd.cli import main
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import cross_entropy, next_token_loss
from spmd.jaxpr.equations import equations
from spmd.layers.expert_exchange import describe_exchange, expert_axes
from spmd.layers.router import RouterConfig
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import Model, Outputs
from spmd.models.decoder import decoder_rules
from spmd.models.deepseek import V3_ROUTER
from spmd.models.mixtral import GSHARD, PRESETS, SWITCH, mixtral
from spmd.partition_rules.mixtral import MIXTRAL, MIXTRAL_SHARED
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.load_config import load_config
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import assert_parity, token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny
from tests.rounding import assert_close, noise_of

CONFIG = PRESETS["test"]
SHAPE = {"vocab": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 2, "d_ff": 16}
BATCH = token_batches((4, 16), CONFIG.vocab, steps=1)[0]

# Number of elements in the published checkpoints' tensors, or the figures of the papers where those
# are rounded. Mixtral: arXiv:2401.04088 (47B, 13B active) and mistral.ai/news/mixtral-8x22b (141B,
# 39B active); the elements follow from huggingface.co/mistralai/Mixtral-8x7B-v0.1 and
# Mixtral-8x22B-v0.1, shapes in their config.json. Switch-C: arXiv:2101.03961, table 9
# (1571B). GShard MoE(2048E, 36L): arXiv:2006.16668, table 1 (600B).
PUBLISHED = {
    "mixtral-8x7b": (46.7e9, 12.9e9),
    "mixtral-8x22b": (141e9, 39e9),
    "switch-c": (1571e9, None),
    "gshard-600b": (600e9, None),
}
EXACT = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "mixtral-8x22b": (140_620_634_112, 39_152_031_744),
}


def count(config):
    """The number of parameters, without making any."""
    return tree.size(jax.eval_shape(from_nnx(config.build).init, jax.random.key(0)))


def replaced(router=None, **fields):
    return mixtral(
        **SHAPE | {"router": dataclasses.replace(CONFIG.router, **(router or {}))} | fields
    )


@functools.cache
def model(config=CONFIG):
    return from_nnx(config.build)


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(config, train, params, variables):
    return model(config).forward(params, variables, None, BATCH["tokens"], train=train)


def run(config, train=True):
    """The model's outputs and variables after them."""
    key = jax.random.key(0)
    params, variables = model(config).init(key), model(config).init_variables(key)
    return (*forward(config, train, params, variables), variables)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_their_properties_say(name):
    """Counted on the model itself; active are all but the experts that a token does not choose."""
    c = PRESETS[name]
    assert c.total_params == count(c)
    unused = (
        c.pattern.repeats
        * (c.router.experts - c.router.top_k)
        * (2 + c.layer.mlp.gated)
        * c.d_model
        * c.d_ff
    )
    assert c.active_params == c.total_params - unused
    norms = (2 * c.layers + 1) * c.d_model
    assert c.matmul_params == c.active_params - norms - c.vocab * c.d_model


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameter_counts(name):
    """Within 1 % in all and 1.5 % active; GShard's 600B is rounded by 3 %."""
    total, active = PUBLISHED[name]
    c = PRESETS[name]
    assert c.total_params == pytest.approx(total, rel=0.035 if name == "gshard-600b" else 0.01)
    if active:
        assert c.active_params == pytest.approx(active, rel=0.015)
    if name in EXACT:
        assert (c.total_params, c.active_params) == EXACT[name]


def test_every_published_count_belongs_to_a_preset():
    """Only the small shapes have none."""
    assert set(PRESETS) - set(PUBLISHED) == {"test", "mixtral-tiny"}
    assert set(PUBLISHED) <= set(PRESETS)


def test_switch_has_its_published_defaults():
    """α = 0.01, capacity factors from 1 to 1.25, a tenth of the usual initial variance; routers are float32."""
    assert SWITCH.balance == 0.01
    assert 1.0 <= SWITCH.capacity_factor <= 1.25
    assert PRESETS["switch-c"].layer.mlp.init_scale == 0.1
    params = jax.eval_shape(model().init, jax.random.key(0))
    assert params["layers"]["moe"]["router"]["kernel"].dtype == jnp.float32


def test_a_smaller_initial_variance_is_that_of_router_and_experts():
    """A tenth of the variance, in router and expert kernels alone."""
    small, usual = (model(replaced(init_scale=s)).init(jax.random.key(0)) for s in (0.1, 1.0))
    ratios = jax.tree.map(
        lambda a, b: float(jnp.var(a) / jnp.maximum(jnp.var(b), 1e-9)), small, usual
    )
    moe, attention = ratios["layers"]["moe"], ratios["layers"]["attention"]
    assert jax.tree.leaves(moe) == pytest.approx([0.1] * 4, rel=1e-3)
    assert jax.tree.leaves(attention) == pytest.approx([1.0] * 4)


def test_outputs_have_the_losses_that_the_router_asks_for():
    """Balance and z-loss by name, where their weight is not zero; the part that was dropped, where some can be."""
    outputs, *_ = run(CONFIG)
    assert set(outputs.losses) == {"balance_loss", "z_loss"}
    assert set(outputs.metrics) == {"load_spread", "idle_experts", "extra_passes"}
    outputs, *_ = run(
        replaced({"balance": 0.0, "z_loss": 0.0, "dispatch": "capacity", "capacity_factor": 0.5})
    )
    assert (set(outputs.losses), set(outputs.metrics)) == (
        set(),
        {"load_spread", "idle_experts", "extra_passes", "dropped"},
    )
    assert 0.4 < float(outputs.metrics["dropped"]) < 1
    assert float(outputs.metrics["load_spread"]) > 1


def test_the_load_of_each_expert_is_relative_to_even_load():
    """Of a router that knows half of the experts: twice as much for those, and none for the others, which are idle."""
    config, key = replaced({"bias_rate": 1e-9}), jax.random.key(0)
    params, variables = model(config).init(key), model(config).init_variables(key)
    shape = config.layers, config.router.experts
    known = np.arange(config.router.experts) < config.router.experts // 2
    variables["layers"]["moe"]["router"]["bias"] = jnp.broadcast_to(
        jnp.where(known, 1e3, -1e3), shape
    )
    outputs, _ = forward(config, True, params, variables)
    load = np.asarray(outputs.arrays["expert_load"])
    assert load.shape == shape
    np.testing.assert_allclose(load.mean(axis=1), 1, rtol=1e-6)
    assert not load[:, ~known].any()
    assert (load == 0).sum() == float(outputs.metrics["idle_experts"])


def test_the_loss_is_cross_entropy_and_the_routers_losses():
    """In training they are added to the mean loss of a token; in evaluation they are reported and not added."""
    params = model().init(jax.random.key(0))

    @jax.jit
    def parts(params):
        outputs = model().apply(params, BATCH["tokens"])
        plain = cross_entropy(outputs.logits, BATCH["targets"], BATCH["weights"])
        return {"loss": plain["loss"] / plain["weight"], **outputs.losses}

    expected, rounding = parts(params), noise_of(parts, params)
    for train in (True, False):
        sums, _ = next_token_loss(model(), train=train)(params, {}, BATCH, jax.random.key(0))
        means = {name: sums[name] / sums["weight"] for name in expected}
        extra = sum(value for name, value in expected.items() if name != "loss") if train else 0.0
        assert_close(means, expected | {"loss": expected["loss"] + extra}, rounding)


def test_a_router_is_float32_in_both_directions():
    """Its products are of the highest precision: scores, and the gradients of tokens and of the kernel."""
    params = model().init(jax.random.key(0))
    loss_fn = next_token_loss(model())
    jaxpr = jax.make_jaxpr(
        jax.grad(lambda params: loss_fn(params, {}, BATCH, jax.random.key(0))[0]["loss"])
    )(params)
    highest = jax.lax.Precision.HIGHEST
    products = [
        equation for equation in equations(jaxpr) if equation.primitive.name == "dot_general"
    ]
    precise = [
        equation for equation in products if equation.params["precision"] == (highest, highest)
    ]
    assert len(precise) == 3
    assert len(products) > 3


def test_auxiliary_losses_add_up_over_microbatches():
    """Each enters with its microbatch's tokens; one of nothing but padding adds nothing."""
    aux = Model(
        lambda key: {"w": jnp.ones(())},
        lambda params, tokens: Outputs(
            jnp.zeros((*tokens.shape, 4)), {"aux": params["w"] * tokens.mean(dtype=jnp.float32)}
        ),
    )
    batch = {
        "tokens": np.array([[1, 1], [3, 3]], np.int32),
        "targets": np.zeros((2, 2), np.int32),
        "weights": np.array([[1, 1], [1, 0]], np.float32),
    }
    for weights, expected in (
        (batch["weights"], 1 * 2 + 3 * 1),
        (np.array([[1, 1], [0, 0]], np.float32), 1 * 2),
    ):
        grad_fn = accumulate(value_and_grad(next_token_loss(aux)), 2)
        gradients, sums, _ = grad_fn(
            {"w": jnp.ones(())}, Carry(), {**batch, "weights": weights}, jax.random.key(0)
        )
        assert float(sums["aux"]) == pytest.approx(expected)
        assert float(gradients["w"]) == pytest.approx(expected)


def test_biases_are_variables_that_a_step_moves_and_evaluation_does_not():
    """Up or down by the rate for every expert of every layer that is not exactly at the mean; no parameter is one."""
    config = replaced({"bias_rate": 0.5, "score": "sigmoid"})
    loss_fn = next_token_loss(model(config))
    plan = make_plan(tiny.mesh(), decoder_rules(config), model(config), optax.sgd(0.1))
    step = make_train_step(plan, grad_fn=accumulate(value_and_grad(loss_fn), 2))
    state, metrics = step(init_state(plan), place_batch(plan, BATCH))
    bias = np.asarray(state.variables["layers"]["moe"]["router"]["bias"])
    load = np.asarray(metrics["arrays"]["expert_load"])
    np.testing.assert_array_equal(bias, 0.5 * np.sign(np.where(np.isclose(load, 1), 0, 1 - load)))
    assert bias.shape == (2, 8)
    assert np.abs(bias).max() == 0.5
    assert not any("bias" in path for path in tree.flatten(model(config).init(jax.random.key(0))))
    for train in (True, False):
        _, after, before = run(config, train=train)
        jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_loss_without_the_load_of_experts_is_refused():
    """Biases would not move, and nobody would see it."""
    config = replaced({"bias_rate": 0.5, "score": "sigmoid"})
    with pytest.raises(ConfigError, match="needs the load of experts"):
        model(config).update_variables(model(config).init_variables(jax.random.key(0)), {})


def test_noise_is_for_training_alone_and_new_in_each_step():
    """With jitter and random second choices two steps differ, and two evaluations do not."""
    config = replaced({"jitter": 0.3, "random_second": True})
    trained, after, before = run(config)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(*map(jax.tree.leaves, (after, before)), strict=True)
    )
    evaluated, after, before = run(config, train=False)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert np.abs(trained.logits - evaluated.logits).max() > 1e-3


STYLES = {
    "deepseek": (
        replaced(
            dataclasses.asdict(
                dataclasses.replace(V3_ROUTER, experts=8, top_k=2, groups=4, top_groups=2)
            ),
            **{"layers": 3, "shared_d_ff": 16, "dense_layers": 1, "dense_d_ff": 48},
        ),
        MIXTRAL_SHARED,
        {"data": 2, "expert": 2, "tensor": 2},
        "none",
    ),
    "gpt-oss": (
        replaced({"logit_bias": True, "top_k": 4}, layers=2),
        MIXTRAL,
        {"fsdp": 2, "expert": 2, "tensor": 2},
        "none",
    ),
    "llama 4": (
        replaced(
            {"top_k": 2, "score": "sigmoid", "normalise": False, "weight_on": "input"}, layers=2
        ),
        MIXTRAL,
        {"fsdp": 2, "expert": 2, "tensor": 2},
        "full",
    ),
    "gshard": (
        replaced(dataclasses.asdict(GSHARD), gated=False, stacked=False),
        MIXTRAL,
        {"fsdp": 2, "expert": 4},
        "full",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("style", STYLES)
def test_relatives_equal_one_device(style):
    """Biases and noise are the same on every mesh; dense layers, shared experts and unrolled layers as well."""
    config, rules, sizes, remat = STYLES[style]
    grad_fn = value_and_grad(next_token_loss(model(config)))
    batches = token_batches((8, 16), config.vocab, steps=2)

    def plan(**sizes):
        return make_plan(tiny.mesh(**sizes), rules, model(config), optax.adamw(1e-3), remat=remat)

    result = assert_parity(plan(**sizes), plan(), grad_fn, batches)
    has_variables = config.router.has_choice_bias or config.router.is_random
    assert ("variables" in {row.what for row in result.rows}) == has_variables


def test_stacked_and_unrolled_layers_are_the_same_model():
    """Logits and what is collected from the layers agree."""

    def outputs(config, params):
        found, _ = forward(config, True, params, {})
        return {"logits": found.logits, **found.losses}

    configs = [replaced(layers=3, stacked=stacked) for stacked in (True, False)]
    params = [model(config).init(jax.random.key(0)) for config in configs]
    stacked, unrolled = map(outputs, configs, params)
    assert_close(stacked, unrolled, noise_of(functools.partial(outputs, configs[0]), params[0]))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"dense_layers": 2, "dense_d_ff": 8}, ["layers"]),
        ({"dense_layers": 1}, ["dense_d_ff"]),
        ({"dense_d_ff": 8}, ["dense_d_ff"]),
        (
            {"heads": 3, "shared_d_ff": -1, "init_scale": 0.0},
            ["heads", "kv_heads", "layer.mlp.shared_d_ff", "layer.mlp.init_scale"],
        ),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_built_lists_every_reason(fields, wrong):
    """Llama's reasons and its own, in one error."""
    with pytest.raises(ConfigError) as caught:
        replaced(**fields)
    assert {p.where for p in caught.value.problems} >= {f"model.{field}" for field in wrong}
    assert all(p.fix for p in caught.value.problems)


def test_shipped_configs_are_found_and_planned(capsys):
    """`spmd plan mixtral-8x7b` counts the published parameters without a device; the tiny one is as active as demo."""
    with pytest.raises(SystemExit) as done:
        main(["plan", "mixtral-8x7b", "--devices", "64", "--json"])
    assert done.value.code in (0, None)
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == EXACT["mixtral-8x7b"][0]
    specs = {leaf["path"]: leaf["spec"] for leaf in plan["params"]}
    assert specs["layers/moe/experts/up_proj/kernel"] == "P(pipe, expert, fsdp+sequence, tensor)"
    exchange = "dropless, all-to-all, buffers of 1.25 × even load, batched products"
    assert plan["experts"] == f"experts 8 over expert=8, 2 a token: {exchange}"
    active = load_config("mixtral-tiny").model.matmul_params
    assert active == pytest.approx(load_config("demo").model.matmul_params, rel=0.01)


@pytest.mark.parametrize(
    ("names", "device", "dispatch", "said"),
    [
        (
            ("expert",),
            ("tpu", "TPU v5"),
            "dropless",
            "ragged all-to-all, buffers of 1.25 × even load, jax.lax.ragged_dot",
        ),
        (
            ("expert",),
            ("tpu", "TPU v5 lite"),
            "dropless",
            "all-to-all, buffers of 1.25 × even load, batched products",
        ),
        (
            ("expert",),
            ("cuda", "H100"),
            "capacity",
            "all-to-all, slots of 1.25 × even load, batched products",
        ),
        ((), ("tpu", "TPU v5 lite"), "dropless", "no exchange, jax.lax.ragged_dot"),
        (
            (),
            ("cuda", "H100"),
            "dropless",
            "no exchange, buffers of 1.25 × even load, batched products",
        ),
    ],
    ids=["v5p", "v5e-64", "slots", "v5e-alone", "h100-alone"],
)
def test_the_exchange_is_that_of_the_devices(names, device, dispatch, said):
    """A slice of more than 16 v5e and GPUs send blocks, other TPUs what there is."""
    axes = expert_axes(abstract_mesh(MeshShape(fsdp=8, expert=8)), names, device)
    found = describe_exchange(axes, RouterConfig(dispatch=dispatch), slots=dispatch == "capacity")
    assert found == f"{dispatch}, {said}"


def test_router_errors_reach_the_config():
    """A router that cannot be built stops the config before anything else, with the numbers."""
    with pytest.raises(ConfigError, match="top_k 9 > experts 8"):
        mixtral(router=RouterConfig(experts=8, top_k=9, capacity_factor=math.inf))
