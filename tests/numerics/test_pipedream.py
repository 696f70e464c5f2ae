"""PipeDream: full pipelines, gradients that are one update behind, and exactly those."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import SpmdError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.lora.adapters import lora_rules, with_lora
from spmd.lora.config import LoRAConfig
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.pipedream.grad_fn import InFlight, pipedream
from spmd.pipeline.grad_fn import pipelined
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.context import use_plan
from spmd.plan.plan import make_plan
from spmd.run.build import TrainSetup, make_setup, planned_mesh
from spmd.run.check import Check, StepCheck
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.state import abstract_state, init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny
from tests.rounding import assert_close, noise_of

CONFIG = tiny.replaced(layers=4)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
BATCHES = token_batches((16, 16), CONFIG.vocab, steps=4)
MICROBATCHES = 8


@functools.cache
def trained(lora):
    """A model, its table and its loss; with `lora`, adapters beside frozen parameters are what is trained."""
    model, rules = tiny.model(CONFIG), LLAMA
    if lora:
        model, rules = with_lora(model, lora, LLAMA), lora_rules(model, lora, LLAMA)
    return model, rules, next_token_loss(model)


@functools.cache
def layout(stages, microbatches=MICROBATCHES, lora=None, **axes):
    """A plan with what is under way, and the step."""
    table = tabulate(make_schedule("pipedream", stages, microbatches))
    model, rules, loss_fn = trained(lora)
    plan = make_plan(tiny.mesh(pipe=stages, **axes), rules, model, OPTIMIZER)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCHES[0].items()}
    plan = plan.with_transforms(InFlight.of(loss_fn, table, batch))
    return plan, make_train_step(plan, grad_fn=pipedream(loss_fn, table))


def placed(plan, batch):
    return place_batch(plan, batch)


@functools.cache
def one_device(lora):
    """The state before the first step on one device, and its compiled gradients and loss."""
    model, rules, loss_fn = trained(lora)
    plan = make_plan(tiny.mesh(), rules, model, OPTIMIZER)
    grad_fn, state = accumulate(value_and_grad(loss_fn), MICROBATCHES), init_state(plan)

    @jax.jit
    def gradients(params, batch):
        with use_plan(plan):
            found, sums, _ = grad_fn(params, state.carry, batch, jax.random.key(0))
        return jax.tree.map(lambda g: g / sums["weight"], found), sums["loss"] / sums["weight"]

    return state, gradients


def steps(params, behind, lora=None):
    """Loss and parameters of each step on one device, with gradients that are so many updates behind."""
    state, gradients = one_device(lora)
    held, history, out = state.optimizer_state, [], []
    for batch in BATCHES:
        history.append((params, batch))
        found, loss = jax.tree.map(jnp.zeros_like, params), 0.0
        if len(history) > behind:
            found, loss = gradients(*history[-1 - behind])
        updates, held = OPTIMIZER.update(found, held, params)
        params = optax.apply_updates(params, updates)
        out.append((loss, jax.device_get(params)))
    return out


@functools.cache
def delayed(behind, lora=None):
    """Loss and parameters of each step from the initial parameters on."""
    return steps(one_device(lora)[0].params, behind, lora)


@functools.cache
def lost(lora=None):
    """What float32 loses of them where gradients are one update behind."""
    return noise_of(functools.partial(steps, behind=1, lora=lora), one_device(lora)[0].params)


def trained_in_a_pipeline(plan, step):
    """Loss and parameters of each step."""
    state, out = init_state(plan), []
    for batch in BATCHES:
        state, metrics = step(state, placed(plan, batch))
        out.append((metrics["loss"], jax.device_get(state.params)))
    return out


def difference(params, expected):
    """The largest one, relative to the largest value of each leaf."""
    apart = jax.tree.map(
        lambda x, y: float(np.abs(x - y).max() / (np.abs(y).max() or 1)), params, expected
    )
    return max(jax.tree.leaves(apart))


SLOW = [(4, {"fsdp": 2}), (2, {"data": 2, "tensor": 2})]


@pytest.mark.parametrize(
    ("stages", "axes"),
    [(2, {}), *(pytest.param(*layout, marks=pytest.mark.soak) for layout in SLOW)],
    ids=str,
)
def test_gradients_are_exactly_one_update_behind(stages, axes):
    """Over four steps losses and parameters are those of W(t + 1) = W(t) − ν ∇f(W(t − 1)) on one device."""
    found = trained_in_a_pipeline(*layout(stages, **axes))
    assert_close(found, delayed(1), lost())
    assert difference(found[-1][1], delayed(0)[-1][1]) > 1e-3, (
        "the control: gradients without delay"
    )


@pytest.mark.soak
def test_adapters_are_one_update_behind_too():
    """What is frozen is there once, for the batch before as well."""
    lora = LoRAConfig(targets=("attention/(q|v)_proj/kernel",), rank=4)
    plan, step = layout(2, lora=lora)
    found = trained_in_a_pipeline(plan, step)
    assert_close(found, delayed(1, lora), lost(lora))
    assert difference(found[-1][1], delayed(0, lora)[-1][1]) > 1e-3, "the control: without delay"
    assert not any(
        "base" in leaf.path for leaf in plan.transform_states if leaf.path.startswith(InFlight.name)
    )


def test_what_is_under_way_is_saved_and_restored(tmp_path):
    """A run that stops between two steps goes on bitwise, with its microbatches under way."""
    plan, step = layout(2)
    state = init_state(plan)
    for batch in BATCHES[:2]:
        state, _ = step(state, placed(plan, batch))
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(2, state, {"seed": 0})
        checkpoints.wait()
        restored, _ = checkpoints.restore(None, abstract_state(plan))
    assert (
        np.abs(jax.device_get(restored.transforms[InFlight.name]["stages"]["inputs"]["0"])).max()
        > 0
    )
    for batch in BATCHES[2:]:
        state, _ = step(state, placed(plan, batch))
        restored, _ = step(restored, placed(plan, batch))
    for ours, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(restored.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_the_layout_of_what_is_under_way():
    """Each stage has its own inputs; the weights that are kept lie as the parameters do."""
    plan, _ = layout(2)
    specs = {leaf.path: leaf.spec for leaf in plan.transform_states}
    for leaf in plan.params:
        assert specs[f"{InFlight.name}/params/{leaf.path}"] == leaf.spec
    assert specs[f"{InFlight.name}/stages/inputs/0"][0] == "pipe"
    assert specs[f"{InFlight.name}/stages/of_others/embed/embedding"][0] == "pipe"


def setup(**fields) -> TrainSetup:
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=64, batch=16)
    fields = {
        "mesh": spmd.MeshShape(pipe=2),
        "pipeline": spmd.PipelineConfig("pipedream", 8),
        **fields,
    }
    config = spmd.TrainConfig(model=PRESETS["demo"], rules=LLAMA, data=data, **fields)
    return make_setup(config, planned_mesh(config))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"accumulate": 2}, "accumulate: is 2: a batch does not end"),
        ({"on_nan": "skip"}, "on_nan: is skip: a step cannot be skipped"),
        ({"precision": "fp16"}, "the scale may change while microbatches are in flight"),
        (
            {"mesh": spmd.MeshShape(pipe=4), "pipeline": spmd.PipelineConfig("pipedream", 4)},
            "4 < 2 × (stages=4 - 1)",
        ),
    ],
    ids=str,
)
def test_what_goes_only_with_a_flush_is_refused(fields, said):
    """What needs the end of a batch is refused before anything compiles."""
    with pytest.raises(SpmdError) as caught:
        setup(**fields)
    assert said in str(caught.value)


def test_it_is_not_compared_with_one_device():
    """`spmd check` says why there is nothing to compare, of a config and of a step at hand."""
    config = dataclasses.replace(setup().config, devices=8)
    with pytest.raises(SpmdError, match="one update late"):
        Check(config, 1).compare(tiny.mesh(pipe=2))

    def make(mesh):
        made = setup()
        return make_train_step(made.plan, made.grad_fn), [None]

    with pytest.raises(SpmdError, match="one update late"):
        StepCheck(make).compare(tiny.mesh(pipe=2))


def test_evaluation_leaves_out_what_is_under_way():
    """A plan with microbatches under way evaluates as one without."""
    plan, _ = layout(2)
    plain = tiny.plan(CONFIG, OPTIMIZER)
    loss_fn = next_token_loss(tiny.model(CONFIG), train=False)

    def evaluated(under, loss_fn):
        evaluate, state = make_eval_step(under, loss_fn), init_state(under)
        batch = placed(under, BATCHES[0])
        return lambda params: evaluate(params, state.variables, batch)["loss"], state.params

    found, params = evaluated(plan, pipelined(loss_fn, 2, 4))
    expected, plain_params = evaluated(plain, loss_fn)
    assert_close(found(params), expected(plain_params), noise_of(expected, plain_params))
