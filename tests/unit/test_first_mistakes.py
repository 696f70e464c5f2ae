"""The first mistakes of everybody: each call is one error of ours, before anything compiles."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import BatchesEndedError, ConfigError, MeshError, SpmdError
from spmd.gradients.losses import classification_loss
from spmd.lora.adapters import with_lora
from spmd.lora.config import LoRAConfig
from spmd.optim.config import check_patterns
from spmd.sharding.mesh import AXES, abstract_mesh
from spmd.sharding.rules import Rules
from spmd.training.state import abstract_state
from tests import tiny

PARAMS = {"w": (8, 4), "b": (4,)}
RULES = Rules([("w", P("fsdp")), ("b", spmd.replicate("16 bytes"))])
OPTIMIZER = optax.adam(1e-2)
MODEL = spmd.Model(
    lambda key: {name: jnp.zeros(shape) for name, shape in PARAMS.items()},
    lambda params, x: x @ params["w"] + params["b"][None],
)
BATCH = {"x": np.ones((16, 8), np.float32), "y": np.ones((16, 4), np.float32)}


@functools.cache
def mesh():
    return spmd.make_mesh(data=2, fsdp=4)


@functools.cache
def plan():
    return spmd.make_plan(mesh(), RULES, MODEL, OPTIMIZER)


def make_plan(on=None, rules=RULES, model=MODEL, optimizer=OPTIMIZER, **options):
    return spmd.make_plan(on or mesh(), rules, model, optimizer, **options)


def plan_of(**params):
    """A plan of a model with other parameters."""
    return make_plan(model=spmd.Model(lambda key: params, MODEL.apply))


def sums(params, batch, **others):
    return {
        "loss": ((MODEL.apply(params, batch["x"]) - batch["y"]) ** 2).sum(),
        "weight": jnp.float32(16),
        **others,
    }


def loss_fn(params, variables, batch, key):
    return sums(params, batch), variables


def traced(returns, batch=BATCH):
    """A step traced with a loss that returns a function of its sums and variables."""
    step = spmd.make_train_step(
        plan(), lambda params, variables, batch, key: returns(sums(params, batch), variables)
    )
    return step.trace(batch)


def states(*, delete=()):
    """A state that no program made, some of whose arrays are gone, as after a donation."""
    state = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract_state(plan())
    )
    for path in delete:
        functools.reduce(
            lambda x, name: x[name] if isinstance(x, dict) else getattr(x, name),
            path.split("/"),
            state,
        ).delete()
    return state


def call_step(state, batch=BATCH):
    return spmd.make_train_step(plan(), loss_fn)(state, batch)


def fit(*batches, state=None, step=lambda state, batch: (state, {}), steps=2, **options):
    return spmd.fit(state, step, options.pop("batches", batches), steps=steps, **options)


def hook(**methods):
    return type("Mine", (spmd.Hook,), methods)


def jax_mesh(names, sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def language_model(batch):
    model = spmd.Model(MODEL.init, lambda params, tokens: jnp.zeros((*tokens.shape, 4)))
    return spmd.make_train_step(plan(), spmd.next_token_loss(model)).trace(batch)


def classify():
    loss = classification_loss(spmd.Model(MODEL.init, lambda params, x: x))
    batch = {
        "images": np.ones((8, 4), np.float32),
        "labels": np.ones((8, 4)),
        "weights": np.ones(8),
    }
    jax.eval_shape(lambda batch: loss({}, {}, batch, None), batch)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.head = self.embed


@functools.cache
def tied():
    return spmd.from_nnx(Tied)


TOKENS = {name: np.zeros((8, 8), np.int32) for name in ("tokens", "targets", "weights")}
CALLS = {
    # What a loss function returns.
    "a scalar": (lambda: traced(lambda s, v: s["loss"]), "loss_fn: returns float32[]\n"),
    "sums alone": (lambda: traced(lambda s, v: s), "loss_fn: returns a dict\n"),
    "a vector and variables": (
        lambda: traced(lambda s, v: (jnp.ones(3), v)),
        "returns (float32[3], a dict)\n",
    ),
    "nothing": (lambda: traced(lambda s, v: None), "loss_fn: returns None\n"),
    "no weight": (
        lambda: traced(lambda s, v: ({"loss": s["loss"]}, v)),
        "no 'weight' among its sums\n      ['loss']",
    ),
    "a vector": (
        lambda: traced(lambda s, v: ({**s, "loss": jnp.ones(16)}, v)),
        "sum 'loss': has the shape (16,)",
    ),
    "a vector beside": (
        lambda: traced(lambda s, v: ({**s, "a": jnp.ones(3)}, v)),
        "sum 'a': has the shape (3,)",
    ),
    "bfloat16": (
        lambda: traced(lambda s, v: ({**s, "weight": jnp.bfloat16(9)}, v)),
        "sum 'weight': is bfloat16",
    ),
    "an integer": (lambda: traced(lambda s, v: ({**s, "loss": 3}, v)), "sum 'loss': is int32"),
    "a name that is taken": (
        lambda: traced(lambda s, v: ({**s, "tokens": 1.0}, v)),
        "a metric that the step adds",
    ),
    "None for variables": (lambda: traced(lambda s, v: (s, None)), "variables: are None"),
    "new variables": (
        lambda: traced(lambda s, v: (s, {"mean": 0.5})),
        "variables/mean: is 0.5, and nothing is needed",
    ),
    "gradients": (lambda: traced(lambda s, v: ({}, s, v)), "fix: pass it as grad_fn="),
    "three arguments": (
        lambda: spmd.make_train_step(plan(), lambda params, batch, key: 0),
        "loss_fn: takes params, batch, key\n      fix: a function of (params, variables, batch, key), such as sp",
    ),
    "a microbatch's": (
        lambda: spmd.make_train_step(
            plan(),
            grad_fn=spmd.accumulate(spmd.value_and_grad(lambda p, v, b, k: (sums(p, b), None)), 2),
        ).trace(BATCH),
        "variables: are None",
    ),
    # make_train_step, accumulate.
    "no loss": (
        lambda: spmd.make_train_step(plan()),
        "loss_fn, grad_fn: are both there, or neither is",
    ),
    "loss and gradient": (
        lambda: spmd.make_train_step(plan(), loss_fn, grad_fn=loss_fn),
        "fix: give one of them",
    ),
    "a step's order": (
        lambda: spmd.make_train_step(loss_fn, plan()),
        "plan: is a function\n      fix: make_train_step(p",
    ),
    "a model for a loss": (lambda: spmd.make_train_step(plan(), MODEL), "loss_fn: is a Model\n"),
    "gradients for a loss": (
        lambda: spmd.make_train_step(plan(), spmd.accumulate(spmd.value_and_grad(loss_fn), 2)),
        "loss_fn: is a gradient function, which is differentiated already\n      fix: make_train_st",
    ),
    "a loss for gradients": (
        lambda: spmd.make_train_step(plan(), grad_fn=loss_fn).trace(BATCH),
        "fix: spmd.value_and_grad(loss_fn)",
    ),
    "2.5 microbatches": (
        lambda: spmd.accumulate(spmd.value_and_grad(loss_fn), 2.5),
        "microbatches: is 2.5\n",
    ),
    "a step's state": (
        lambda: call_step({"w": 1}),
        "state: is a dict\n      fix: step(state, batch), with state from",
    ),
    "a donated state": (
        lambda: call_step(states(delete=("step", "params/w"))),
        "state: was donated to another call: 2 of its 9 arrays are gone\n      such as step\n      fix: use what",
    ),
    "a donated parameter": (lambda: call_step(states(delete=("params/w",))), "such as params/w\n"),
    "another plan's state": (
        lambda: spmd.make_train_step(make_plan(optimizer=optax.sgd(0.1)), loss_fn)(states(), BATCH),
        "state/optimizer_state/0/mu/w: is float32[8, 4], and nothing is needed",
    ),
    # Batches.
    "15 examples": (
        lambda: call_step(states(), {name: x[:15] for name, x in BATCH.items()}),
        "batch x: the sharding of batches cannot split dimension 0 of (15, 8)\n      15 / (data=2 × fsdp=4)",
    ),
    "a list": (
        lambda: call_step(states(), {"x": [1.0]}),
        "batch x/0: is 1.0\n      fix: a NumPy or JAX array",
    ),
    "no targets": (
        lambda: language_model({"tokens": TOKENS["tokens"]}),
        "batch: has no 'targets'\n      it has ['tok",
    ),
    "one-hot targets": (
        lambda: language_model({**TOKENS, "targets": np.zeros((8, 8, 4), np.int32)}),
        "targets and weights: have the shapes (8, 8, 4) and (8, 8), and the logits are of (8, 8)",
    ),
    "one-hot labels": (
        classify,
        "targets and weights: have the shapes (8, 1, 4) and (8, 1), and the logits are",
    ),
    # make_plan.
    "a plan's order": (
        lambda: spmd.make_plan(mesh(), MODEL, RULES, OPTIMIZER),
        "model: is a Rules\n      fix: spmd.from_nnx, spmd.from_linen or spmd.Model(init, apply)\n  rules: is a Mod",
    ),
    "a list of rules": (
        lambda: make_plan(rules=[("w", P("fsdp"))]),
        "rules: is a list\n      fix: spmd.Rules(params=[…])",
    ),
    "a module": (lambda: make_plan(model=nn.Dense(4)), "model: is a Dense\n"),
    "the name of an optimizer": (
        lambda: make_plan(optimizer="adamw"),
        "optimizer: is 'adamw'\n      fix: spmd.make_opt",
    ),
    "an optimizer's config": (
        lambda: make_plan(optimizer=spmd.OptimizerConfig()),
        "optimizer: is an OptimizerConfig",
    ),
    "an optimizer not called": (
        lambda: make_plan(optimizer=optax.adam),
        "optimizer: is a function",
    ),
    "a MeshShape": (
        lambda: make_plan(on=spmd.MeshShape(data=8)),
        "mesh: is a MeshShape\n      fix: spmd.make_mesh(",
    ),
    "two axes": (
        lambda: make_plan(on=jax_mesh(("data", "fsdp"), (2, 4))),
        "mesh: has the axes data (Auto), fsdp (A",
    ),
    "axes of others": (
        lambda: make_plan(on=jax_mesh(("x", "y"), (2, 4))),
        "has the axes x (Auto), y (Auto)\n",
    ),
    "Explicit axes": (
        lambda: make_plan(on=jax_mesh(AXES, (1, 2, 4, 1, 1, 1), AxisType.Explicit)),
        "data (Explicit), fsdp (Explicit)",
    ),
    "a dtype for a precision": (
        lambda: make_plan(precision=jnp.bfloat16),
        "precision: <class 'jax.numpy.bfloat16'> does",
    ),
    "True for remat": (lambda: make_plan(remat=True), "'True' does not exist"),
    "a word for offload": (
        lambda: make_plan(offload="params"),
        "offload: is 'params'\n      fix: (\"params\",)",
    ),
    # Parameters.
    "integers": (
        lambda: plan_of(w=np.zeros((8, 4), np.float32), b=np.zeros(4, np.int32)),
        "b: is int32, which has no gradient\n      fix: a variable: nnx.Variable",
    ),
    "complex numbers": (
        lambda: plan_of(w=np.zeros((8, 4), np.complex64)),
        "w: is complex64: complex parameters are not supported",
    ),
    "random keys": (lambda: plan_of(w=jax.random.key(0)), "w: is key<fry>, which has no gradient"),
    "no parameters": (plan_of, "model.init: returns no parameters"),
    "a list of them": (
        lambda: make_plan(model=spmd.Model(lambda key: [jnp.zeros((8, 4))], MODEL.apply)),
        "model.init: returns no parameters\n      a list\n      fix: a nested dictionary of arrays",
    ),
    "an init without key": (
        lambda: spmd.Model(lambda: {}, MODEL.apply),
        "init: takes nothing\n      fix: a function of (key",
    ),
    # Modules.
    "an instance": (
        lambda: spmd.from_nnx(Empty()),
        "make: is an Empty\n      fix: spmd.from_nnx(lambda rngs: Module(…, rngs=rngs))",
    ),
    "a Linen module": (lambda: spmd.from_nnx(nn.Dense(4)), "or spmd.from_linen(module, *inputs)"),
    "a maker of nothing": (
        lambda: make_plan(model=spmd.from_nnx(lambda rngs: None)),
        "what make returns: is None",
    ),
    "a maker without rngs": (lambda: spmd.from_nnx(lambda: None), "make: takes nothing"),
    "a class": (lambda: spmd.from_linen(nn.Dense, np.ones((4, 8))), "module: is the class Dense"),
    "an NNX module": (
        lambda: spmd.from_linen(Empty(), np.ones((4, 8))),
        "or spmd.from_nnx for a module of nnx",
    ),
    "a transform alone": (
        lambda: make_plan(transforms=spmd.GradTransform()),
        "transforms: is a GradTransform\n      fix: a list, such as",
    ),
    # Optimizers.
    "a name for a config": (
        lambda: spmd.make_optimizer("adamw", 10),
        "config: is 'adamw'\n      fix: spmd.OptimizerConfig(",
    ),
    "a text for a number": (
        lambda: spmd.OptimizerConfig(learning_rate="3e-4"),
        "learning_rate: is '3e-4'",
    ),
    "a schedule": (
        lambda: spmd.OptimizerConfig(learning_rate=lambda step: 1.0),
        "learning_rate: is a function",
    ),
    "one pattern": (
        lambda: spmd.OptimizerConfig(no_decay="bias"),
        "no_decay: is 'bias'\n      fix: (\"bias\",)",
    ),
    "one stack": (
        lambda: spmd.make_optimizer(spmd.OptimizerConfig(), 10, "layers"),
        "stacked: is 'layers'",
    ),
    # States.
    "a text for a seed": (
        lambda: spmd.init_state(plan(), "0"),
        "seed: is '0'\n      fix: a whole number",
    ),
    "half a seed": (lambda: spmd.init_state(plan(), 0.5), "seed: is 0.5"),
    "seed 0 once more": (lambda: spmd.init_state(plan(), 2**32), "seed: is 4294967296"),
    "a key for a seed": (lambda: spmd.init_state(plan(), jax.random.key(0)), "seed: is key<fry>[]"),
    "no devices": (
        lambda: spmd.init_state(make_plan(abstract_mesh(spmd.MeshShape(data=8)))),
        "plan.mesh: has no devices\n      fix: a plan with a mesh from spmd.make_mesh",
    ),
    "other parameters": (
        lambda: spmd.init_state(
            plan(), params={"w": np.zeros((8, 8), np.float32), "b": np.zeros(4, np.float32)}
        ),
        "params/w: is float32[8, 8], and float32[8, 4] is needed",
    ),
    "donated parameters": (
        lambda: spmd.init_state(plan(), params=states(delete=("params/b",)).params),
        "params: was donated to another call: 1 of its 2 arrays are gone",
    ),
    # fit.
    "-5 steps": (lambda: fit(steps=-5), "steps: is -5, and start is 0\n"),
    "steps before the start": (lambda: fit(1, start=7, steps=3), "steps: is 3, and start is 7\n"),
    "2.0 steps": (lambda: fit(1, 2, steps=2.0), "steps: is 2.0"),
    "a start that is none": (
        lambda: fit(1, 2, state=states(), start=1),
        "start: is 1, and the state is that after 0 steps\n      fix: start=0",
    ),
    "too few batches": (
        lambda: fit(1, 2, steps=5),
        "batches: ended after step 2\n      steps=5, start=0\n      fix: give 5 batches",
    ),
    "one batch": (
        lambda: fit(batches=BATCH),
        "batches: is a dict\n      fix: an iterable of batches, such as [batch] *",
    ),
    "a function of batches": (lambda: fit(batches=lambda: []), "batches: is a function"),
    "an order": (
        lambda: fit(1, 2, step=states()),
        "step: is a TrainState\n      fix: fit(state, step, batches, steps=…)",
    ),
    "a function for a hook": (
        lambda: fit(1, 2, hooks=[lambda step: 0]),
        "hooks: is or has a function",
    ),
    "the class of a hook": (lambda: fit(1, 2, hooks=[hook()]), "hooks: is or has the class Mine"),
    "a hook alone": (lambda: fit(1, 2, hooks=hook()()), "hooks: is or has a Mine"),
    "a misspelt method": (
        lambda: hook(on_setp=lambda self, step: None),
        "Mine.on_setp: is no method of a hook and would never be called\n      fix: did you mean",
    ),
    "a method of others": (
        lambda: hook(on_epoch_end=lambda self: None),
        "Mine.on_epoch_end: is no method of a hook",
    ),
    "a method's arguments": (
        lambda: hook(on_metrics=lambda self, metrics: None),
        "Mine.on_metrics: takes self, metrics\n      fix: a function of (self, step, metrics)",
    ),
    # A tied parameter by its second path.
    "in a rule": (
        lambda: make_plan(model=tied(), rules=Rules([("head/embedding", P("fsdp"))])),
        "no rule matches this parameter, and rule 0 ('head/embedding') its other path head/embedding\n"
        "      fix: write the rule for embed/embedding",
    ),
    "in a LoRA target": (
        lambda: with_lora(tied(), LoRAConfig(targets=("head/embedding",)), Rules([])),
        "'head/embedding' matches no parameter\n      fix: the array's first path, embed/embedding",
    ),
}


class Empty(nnx.Module):
    """A module that takes no program to make."""


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_one_error_of_ours(name: str) -> None:
    """Each call raises an error of the library that says where, what and the fix, and compiles nothing."""
    call, sentence = CALLS[name]
    with pytest.raises(SpmdError) as caught:
        call()
    assert sentence in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 12, "a few lines"


def test_the_kinds_of_errors() -> None:
    """Arguments are `ConfigError`s, batches `MeshError`s, and the end of batches has the state of the last step."""
    for name, kind in {"no loss": ConfigError, "15 examples": MeshError}.items():
        with pytest.raises(kind):
            CALLS[name][0]()
    with pytest.raises(BatchesEndedError) as caught:
        fit(1, 2, state=0, step=lambda state, batch: (state + 1, {}), steps=5)
    assert caught.value.state == 2


def test_a_tied_parameter_in_no_decay() -> None:
    """A pattern for the second path of a tied array names the first one."""
    config = spmd.OptimizerConfig(no_decay=("head/embedding",))
    (problem,) = check_patterns(config, ["embed/embedding"], tied=tied().info().tied)
    assert problem.fix == "the array's first path, embed/embedding"


def test_another_dtype_of_the_model_is_said() -> None:
    """A plan names each parameter that the model makes in another dtype than the plan stores, float32 excepted."""
    text = str(plan_of(w=np.zeros((8, 4), jnp.bfloat16), b=np.zeros(4, np.float32)))
    assert "16 B  b (16 bytes)\n" in text
    assert "32 B  w (bfloat16 in the model)\n" in text
    assert "in the model" not in str(make_plan(precision="bf16-params"))


@pytest.mark.parametrize("steps", [0, 2])
def test_controls(steps: int) -> None:
    """What is right is no mistake: hooks with other methods, a NumPy batch, sums of integers, nothing left to do."""
    mine = hook(
        on_metrics=lambda self, step, metrics: None, helper=lambda self: None, on_disk=True
    )()
    assert (
        fit(
            *range(steps),
            state=0,
            step=lambda state, batch: (state + 1, {}),
            steps=steps,
            hooks=(mine,),
        )
        == steps
    )
    traced(lambda s, v: ({**s, "weight": 16, "seen": jnp.int32(3)}, v))
    make_plan(on=jax_mesh(tuple(reversed(AXES)), (1, 1, 1, 4, 2, 1)))
    assert tiny.plan() == tiny.plan()
