"""Padding changes nothing in a mixture of experts: neither numbers nor their rounding depend on what it holds."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmd.errors import ConfigError
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.deferred_reduction import defer_grad_reduction
from spmd.gradients.losses import ModelLoss, next_token_loss, valid_tokens
from spmd.layers.router import RouterConfig, expert_slots, route
from spmd.lora.adapters import with_lora
from spmd.lora.config import LoRAConfig
from spmd.model_interface.model import Model
from spmd.models.mixtral import PRESETS, mixtral
from spmd.partition_rules.layouts import folded
from spmd.partition_rules.mixtral import MIXTRAL, MIXTRAL_SHARED
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny

CONFIG = PRESETS["test"]
SHAPE = {"vocab": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 2, "d_ff": 16}
LENGTHS = np.array([0, 12, 5, 1])
VALID = np.arange(12)[None] < LENGTHS[:, None]
LOGITS = np.random.default_rng(0).standard_normal((4, 12, 8)).astype(np.float32) * 2
ROUTERS = {
    "dropless": RouterConfig(experts=8, top_k=2, z_loss=1e-3),
    "capacity": RouterConfig(
        experts=8, top_k=2, z_loss=1e-3, dispatch="capacity", capacity_factor=1.0
    ),
    "expert choice": RouterConfig(
        experts=8,
        top_k=2,
        choice="expert",
        balance=0,
        z_loss=1e-3,
        dispatch="capacity",
        capacity_factor=1.0,
    ),
    "deepseek": RouterConfig(
        experts=8,
        top_k=2,
        score="sigmoid",
        bias_rate=1e-3,
        groups=4,
        top_groups=2,
        balance_over="example",
    ),
    "gshard": RouterConfig(
        experts=8,
        top_k=2,
        balance_form="gshard",
        dispatch="capacity",
        capacity_factor=1.0,
        random_second=True,
    ),
}
CHUNKED = {"chunked": RouterConfig(experts=8, top_k=2, z_loss=1e-3, chunks=2, buffer_factor=0.5)}


@functools.partial(jax.jit, static_argnums=2)
def routed(logits, valid, config: RouterConfig) -> dict[str, Any]:
    """Everything that comes from a router, and the gradient of its losses and weights."""
    key = jax.random.key(0) if config.random_second else None

    def everything(logits):
        routing, report = route(logits, config, key=key, valid=valid)
        slots = expert_slots(
            routing.experts, config.experts, config.capacity(logits.shape[1]), routing.capacities
        )
        weights = routing.weights * jnp.arange(routing.weights.size).reshape(routing.weights.shape)
        return report.balance + report.z_loss + weights.sum(), (routing, report, slots)

    return jax.value_and_grad(everything, has_aux=True)(logits)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def padded(held: float | np.ndarray) -> np.ndarray:
    return np.where(VALID[..., None], LOGITS, np.float32(held))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_does_not_see_what_padding_holds(name):
    """Not even what is no number. The control is the mask taken out."""
    config = ROUTERS[name]
    some, none = (bits(routed(padded(held), VALID, config)) for held in (-LOGITS, np.nan))
    assert some == none
    unmasked = [bits(routed(padded(held), np.ones_like(VALID), config)) for held in (-LOGITS, 0.0)]
    assert unmasked[0] != unmasked[1]


@pytest.mark.parametrize("name", ["capacity", "expert choice", "deepseek"])
def test_padding_is_as_if_it_were_not_there(name):
    """Losses, load and drops of one row are those of its tokens alone, so capacity counts the row's own length."""
    config, length = ROUTERS[name], LENGTHS[2]
    found, _ = routed(LOGITS, VALID & (np.arange(4) == 2)[:, None], config)
    alone, _ = routed(LOGITS[2:3, :length], np.ones((1, length), bool), config)
    (_, (routing, report, (slots, dropped))), (_, (own, expected, (own_slots, own_dropped))) = (
        found,
        alone,
    )
    np.testing.assert_array_equal(routing.experts[2:3, :length], own.experts)
    assert (np.asarray(routing.experts)[2, length:] == config.experts).all()
    np.testing.assert_allclose(routing.weights[2:3, :length], own.weights, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), report, expected)
    if config.dispatch == "capacity":
        is_kept = slots[2:3, :length] < config.experts * config.capacity(12)
        np.testing.assert_array_equal(is_kept, own_slots < config.experts * config.capacity(length))
        assert dropped == own_dropped


def test_nothing_but_padding_has_losses_of_zero():
    """Losses, load and gradients are 0, where a mean over nothing would be no number."""
    for config in ROUTERS.values():
        (_, (routing, report, _)), gradient = routed(LOGITS, np.zeros_like(VALID), config)
        assert not any(
            np.asarray(x).any() for x in jax.tree.leaves((report, routing.weights, gradient))
        )


def test_padding_follows_the_last_positive_weight_of_a_row():
    """Prompts, which have weight 0, are no padding; a batch's own mask is taken as it is, and must fit."""
    weights = np.float32([[0, 0, 1, 0, 0.5, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(valid_tokens({"weights": weights}).sum(axis=1), [5, 0, 6])
    left = np.int32([[0, 0, 1, 1, 1, 1]] * 3)
    np.testing.assert_array_equal(valid_tokens({"weights": weights, "valid": left}), left != 0)
    assert valid_tokens({"weights": weights[0]}) is None
    assert valid_tokens(weights) is None
    with pytest.raises(
        ConfigError, match=r"batch valid: has the shape \(1, 6\), and the weights have \(3, 6\)"
    ):
        valid_tokens({"weights": weights, "valid": left[:1]})


class Aware(nnx.Module):
    """A stranger's module that asks for the mask."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(8, 4, rngs=rngs)

    def __call__(self, ids, *, valid):
        return self.embed.attend(self.embed(ids) * valid[..., None])


class Unaware(Aware):
    def __call__(self, ids):
        return self.embed.attend(self.embed(ids))


class LinenAware(nn.Module):
    @nn.compact
    def __call__(self, ids, valid=None):
        mask = 1.0 if valid is None else valid[..., None]
        return nn.Dense(8)(nn.Embed(8, 4)(ids) * mask)


def functions(apply: Callable[..., Any]) -> Model:
    return Model(lambda key: {"w": jnp.ones((8, 8))}, apply)


STRANGERS = {
    "nnx": (lambda: from_nnx(Aware), True),
    "nnx without": (lambda: from_nnx(Unaware), False),
    "linen": (lambda: from_linen(LinenAware(), jax.ShapeDtypeStruct((2, 4), jnp.int32)), True),
    "functions": (
        lambda: functions(lambda params, ids, valid: params["w"][ids] * valid[..., None]),
        True,
    ),
    "functions without": (lambda: functions(lambda params, ids: params["w"][ids]), False),
    "adapted": (
        lambda: with_lora(from_nnx(Aware), LoRAConfig(("embedding",), rank=2), Rules(params=[])),
        True,
    ),
    "llama": (tiny.model, False),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_model_gets_the_mask_if_it_has_a_parameter_for_it(name):
    """Whoever wrote it, and however; another gets no input more than before."""
    make, is_aware = STRANGERS[name]
    model = make()
    assert model.info().padding_aware == is_aware
    batch = {"tokens": np.ones((2, 4), np.int32), "targets": np.ones((2, 4), np.int32)}
    batch["weights"] = np.ones((2, 4), np.float32)
    loss, key = next_token_loss(model), jax.random.key(0)
    assert ("valid" in loss.prepare(batch)) == is_aware
    jax.eval_shape(lambda: loss(model.init(key), model.init_variables(key), batch, key))


def test_a_model_in_parts_must_take_the_mask_in_its_first():
    """Or a pipeline would silently leave it out."""

    class Parts(Aware):
        def embed_inputs(self, ids): ...
        def apply_layers(self, x, context): ...
        def compute_outputs(self, x, values): ...

    with pytest.raises(
        ConfigError, match=r"embed_inputs: does not take 'valid', which Parts\.__call__ takes"
    ):
        from_nnx(Parts).layered()


def counting(params, ids, valid=None):
    """Logits that predict how many tokens a row has."""
    return (
        jnp.broadcast_to(jax.nn.one_hot(valid.sum(axis=1), 64)[:, None], (*ids.shape, 64))
        * params["w"][0]
    )


def test_prompts_are_generated_from_without_their_padding():
    """In the first program and in every later one; prompts of two lengths are in one batch."""
    model = Model(lambda key: {"w": jnp.ones(64)}, counting)
    plan = make_plan(
        tiny.mesh(), Rules(params=[("w", replicate("it is small"))]), model, optax.sgd(1.0)
    )
    found = Generator(plan, 32, Sampling(temperature=0.0)).write(
        model.init(jax.random.key(0)), {}, [[1, 2, 3], [4] * 7], tokens=3
    )
    assert [row.tolist() for row in found] == [[3, 4, 5], [7, 8, 9]]


SEQ, VOCAB = 16, CONFIG.vocab


def batch_of(held: int, examples: int = 8) -> dict[str, np.ndarray]:
    """Rows of prompts of weight 0 and answers of weight 1; every second row is padding, and all padding random ids."""
    rng, other = np.random.default_rng(0), np.random.default_rng(held)
    lengths = rng.integers(1, SEQ + 1, examples)
    lengths[::2] = 0  # all rows of one of two microbatches
    is_token, is_prompt = (np.arange(SEQ)[None] < n[:, None] for n in (lengths, lengths // 2))
    ids, padding = (
        draw.integers(0, VOCAB, (2, examples, SEQ), dtype=np.int32) for draw in (rng, other)
    )
    tokens, targets = np.where(is_token, ids, padding)
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": (is_token & ~is_prompt).astype(np.float32),
    }


Wrapped = Callable[[ModelLoss], GradFn]


def accumulated(loss_fn: ModelLoss) -> GradFn:
    return accumulate(value_and_grad(loss_fn), 2)


def once(loss_fn: ModelLoss) -> GradFn:
    return defer_grad_reduction(accumulated(loss_fn), ("data",))


def scheduled(name: str, chunks: int = 1) -> Wrapped:
    return lambda loss_fn: pipeline(loss_fn, tabulate(make_schedule(name, 2, 4, chunks)))


def staged_once(loss_fn: ModelLoss) -> GradFn:
    return defer_grad_reduction(scheduled("1f1b")(loss_fn), ("data",))


def results(
    model: Model, wrapped: Wrapped, batches, rules=MIXTRAL, options: tuple = (), **sizes: int
) -> list[list[bytes]]:
    """The bits of the state, the metrics and an evaluation after a step on each batch; all must be finite."""
    plan = make_plan(tiny.mesh(**sizes), rules, model, optax.adam(1e-2), **dict(options))
    step = make_train_step(plan, grad_fn=wrapped(next_token_loss(model)))
    loss_fn = next_token_loss(model, train=False)
    evaluate = make_eval_step(plan, pipelined(loss_fn, 2, 4) if "pipe" in sizes else loss_fn)
    found = []
    for batch in batches:
        batch = place_batch(plan, batch)
        state, metrics = step(init_state(plan, seed=1), batch)
        sums = evaluate(state.params, state.variables, batch)
        assert all(
            np.isfinite(leaf).all()
            for leaf in jax.tree.leaves(jax.device_get((state.params, metrics, sums)))
        )
        found.append(bits((state, metrics, sums)))
    return found


def model_of(name: str, **fields: Any) -> Model:
    fields = SHAPE | {"router": (ROUTERS | CHUNKED)[name]} | fields
    return from_nnx(mixtral(**fields).build)


def test_steps_do_not_see_what_padding_holds():
    """Bit by bit, also where a microbatch is padding alone; the control is a mask that says that nothing is."""
    batches = [batch_of(1), batch_of(2)]
    masked = [batch | {"valid": np.asarray(valid_tokens(batch))} for batch in batches]
    unmasked = [batch | {"valid": np.ones((8, SEQ), bool)} for batch in batches]
    one, two, wrong, other = results(
        model_of("deepseek", layers=1), accumulated, masked + unmasked, data=2, expert=2
    )
    assert one == two
    assert wrong != other


LAYOUTS: dict[str, tuple[str, Wrapped, dict[str, Any], dict[str, Any]]] = {
    "one device": ("capacity", value_and_grad, {}, {}),
    "data and expert": ("dropless", value_and_grad, {}, {"data": 2, "expert": 2}),
    "three axes": ("gshard", value_and_grad, {}, {"fsdp": 2, "expert": 2, "tensor": 2}),
    "folded": (
        "capacity",
        value_and_grad,
        {},
        {"rules": folded(MIXTRAL), "fsdp": 2, "expert": 2, "tensor": 2},
    ),
    "shared": (
        "deepseek",
        value_and_grad,
        {"layers": 3, "shared_d_ff": 16, "dense_layers": 1, "dense_d_ff": 48},
        {"rules": MIXTRAL_SHARED, "data": 2, "expert": 2},
    ),
    "chunks": ("chunked", value_and_grad, {}, {"data": 2, "expert": 2}),
    "bf16": (
        "dropless",
        value_and_grad,
        {},
        {"options": (("precision", "bf16"),), "data": 2, "expert": 2},
    ),
    "ring": (
        "dropless",
        value_and_grad,
        {},
        {"options": (("context", "ring"),), "expert": 2, "sequence": 2},
    ),
    "all-to-all": (
        "capacity",
        value_and_grad,
        {},
        {"options": (("context", "all-to-all"),), "expert": 2, "sequence": 2},
    ),
    "accumulated": ("expert choice", accumulated, {}, {"data": 2, "expert": 2}),
    "exchanged once": ("capacity", once, {}, {"data": 2, "expert": 2}),
    "gpipe": ("expert choice", scheduled("gpipe"), {}, {"pipe": 2, "expert": 2}),
    "1f1b": ("capacity", scheduled("1f1b"), {}, {"pipe": 2, "data": 2}),
    "1f1b exchanged once": ("dropless", staged_once, {}, {"pipe": 2, "data": 2}),
    "interleaved": (
        "dropless",
        scheduled("interleaved", 2),
        {"layers": 4},
        {"pipe": 2, "expert": 2},
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_sees_what_padding_holds(layout):
    """Bit by bit in training and evaluation, with the mask that weights tell."""
    router, wrapped, fields, options = LAYOUTS[layout]
    one, two = results(
        model_of(router, **fields), wrapped, [batch_of(1, 16), batch_of(2, 16)], **options
    )
    assert one == two
