"""A model that knows nothing of precision computes in the compute dtype of its plan, as if it were cast by hand."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.analysis.wide_products import find_wide_products
from spmd.errors import AnnotationError
from spmd.jaxpr.equations import equations
from spmd.jaxpr.promoted import split_products
from spmd.model_interface.grad_transform import Carry
from spmd.plan.context import use_plan
from spmd.testing import token_batches
from tests import tiny

VOCAB, WIDTH, SIDE, CLASSES = 32, 16, 8, 10
RNG = np.random.default_rng(0)
TOKENS, TARGETS = RNG.integers(0, VOCAB, (2, 8, 8)).astype(np.int32)
TEXT = {"tokens": TOKENS, "targets": TARGETS, "weights": np.ones((8, 8), np.float32)}
IMAGES = {
    "images": RNG.normal(size=(8, SIDE, SIDE, 3)).astype(np.float32),
    "labels": RNG.integers(0, CLASSES, 8).astype(np.int32),
    "weights": np.ones(8, np.float32),
}
SHAPE = jax.ShapeDtypeStruct((8, 8), "int32")
EXACT = {"xla_allow_excess_precision": False}
TABLE = np.sin(np.outer(np.arange(8.0), np.arange(WIDTH)), dtype=np.float32)[None]


class Net(nnx.Module):
    """A multilayer perceptron on tokens; `dtype` is that of its layers."""

    def __init__(self, rngs, dtype=None, head=None):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, VOCAB, dtype=head or dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.up(self.embed(tokens))))


class Attention(nnx.Module):
    """A layer of attention; with `table`, positions in float32 make everything after them float32."""

    def __init__(self, rngs, table=False):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.table = table

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + TABLE if self.table else x
        return self.head(x + self.attention(self.norm(x)))


class Recurrent(nnx.Module):
    """A recurrent net whose state begins as zeros of float32, which its loop carries."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.into, self.again = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        )
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        def step(state, x):
            state = jnp.tanh(self.into(x) + self.again(state))
            return state, state

        steps = self.embed(tokens).swapaxes(0, 1)
        _, states = jax.lax.scan(step, jnp.zeros((tokens.shape[0], WIDTH)), steps)
        return self.head(states.swapaxes(0, 1))


class LinenNet(nn.Module):
    """A layer of attention and a perceptron of Linen."""

    table: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        x = x + TABLE if self.table else x
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(VOCAB)(nn.relu(nn.Dense(2 * WIDTH)(x)))


class ConvNet(nn.Module):
    """Convolution, batch norm, pooling."""

    @nn.compact
    def __call__(self, images, train=False):
        x = nn.Conv(8, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


def make_by_hand():
    """A model written as two functions."""

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"table": (VOCAB, WIDTH), "inner": (WIDTH, WIDTH), "out": (WIDTH, VOCAB)}
        return {
            name: jax.random.normal(k, shape)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def apply(params, tokens):
        return jnp.tanh(params["table"][tokens] @ params["inner"]) @ params["out"]

    return spmd.Model(init, apply)


MAKERS = {
    "net": lambda: spmd.from_nnx(Net),
    "attention": lambda: spmd.from_nnx(Attention),
    "linen": lambda: spmd.from_linen(LinenNet(), SHAPE),
    "by hand": make_by_hand,
    "convolution": lambda: spmd.from_linen(
        ConvNet(), jax.ShapeDtypeStruct((8, SIDE, SIDE, 3), "float32"), train={"train": True}
    ),
}
WIDENED = {
    "attention and a table": lambda: spmd.from_nnx(lambda rngs: Attention(rngs, table=True)),
    "linen and a table": lambda: spmd.from_linen(LinenNet(table=True), SHAPE),
    "recurrent": lambda: spmd.from_nnx(Recurrent),
    "cell": lambda: spmd.from_linen(Cells(), SHAPE),
}


class Cells(nn.Module):
    """A recurrent cell of Flax, whose carry is float32."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(VOCAB)(nn.RNN(nn.OptimizedLSTMCell(WIDTH))(nn.Embed(VOCAB, WIDTH)(tokens)))


@functools.cache
def made(name):
    return {**MAKERS, **WIDENED}[name]()


def plan_of(model, precision="bf16", mesh=None, optimizer=None, **options):
    """Split every matrix over `fsdp`, by default of eight devices; the rest is replicated."""
    shapes = spmd.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    shapes |= spmd.tree.flatten(jax.eval_shape(model.init_variables, jax.random.key(0)))
    rows = []
    for path, x in shapes.items():
        dims = [dim for dim, size in enumerate(x.shape) if size % 4 == 0]
        is_matrix = len(x.shape) > 1 and dims
        rows.append((path, P(*(None,) * dims[0], "fsdp") if is_matrix else spmd.replicate("small")))
    rows = [row for row in rows if not any(part in row[0] for part in ("rngs", "rng"))]
    mesh, optimizer = mesh or tiny.mesh(data=2, fsdp=4), optimizer or optax.sgd(0.1)
    return spmd.make_plan(mesh, spmd.Rules(rows), model, optimizer, precision=precision, **options)


def loss_and_batch(model, name):
    if name == "convolution":
        return spmd.classification_loss(model), IMAGES
    return spmd.next_token_loss(model), TEXT


def cast(values, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, values
    )


def with_dtype(make, dtype):
    """A module of NNX whose layers are given a dtype, as one writes it by hand."""

    def build(rngs):
        module = make(rngs)
        for _, layer in nnx.iter_modules(module):
            if hasattr(layer, "dtype"):
                layer.dtype = dtype
        return module

    return spmd.from_nnx(build)


def by_hand(loss, model, dtype):
    """The gradient function of a loss of a model that is cast by hand, outside of any plan."""

    def forward(params, variables, key, *inputs, **keywords):
        outputs, after = model.forward(
            cast(params, dtype), variables, key, *cast(inputs, dtype), **keywords
        )
        return cast(outputs, jnp.float32), after

    grad_fn = spmd.value_and_grad(
        dataclasses.replace(loss, model=dataclasses.replace(model, forward=forward))
    )

    def of_variables(params, variables, batch, key):
        found, sums, carry = grad_fn(params, Carry(variables), batch, key)
        return found, sums, carry.variables

    return of_variables


def distance(found, wanted):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    square = sum(float(jnp.sum((a - b) ** 2)) for a, b in leaves)
    return (square / sum(float(jnp.sum(b**2)) for b in jax.tree.leaves(wanted))) ** 0.5


SLOW = pytest.mark.soak
NNX = {"net": Net, "attention": Attention}
QUICK = ("net",)
TRACED = (
    "net",
    "by hand",
    "convolution",
    "attention and a table",
    "linen and a table",
    "recurrent",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in MAKERS]
)
def test_bf16_equals_a_cast_by_hand(name):
    """Gradients and updated variables equal those of a model that is cast by hand; without the cast, they do not.

    Programs are compared on one device, without the freedom to skip a rounding.
    """
    model, dtype = made(name), jnp.bfloat16
    loss, batch = loss_and_batch(model, name)
    params, variables = model.init(jax.random.key(0)), model.init_variables(jax.random.key(0))
    arguments = params, variables, batch, jax.random.key(1)

    def gradients(precision):
        def under_plan(params, variables, batch, key):
            with use_plan(plan_of(model, precision, tiny.mesh())):
                found, sums, carry = spmd.value_and_grad(loss)(params, Carry(variables), batch, key)
            return found, sums, carry.variables

        return jax.jit(under_plan, compiler_options=EXACT)(*arguments)

    plain = with_dtype(NNX[name], dtype) if name in NNX else model
    wanted, _, after = jax.jit(by_hand(loss, plain, dtype), compiler_options=EXACT)(*arguments)
    found, _, own = gradients("bf16")
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert distance(found, wanted) < 1e-4
    if name == "net":
        assert distance(gradients("float32")[0], wanted) > 1e-3
    states = zip(jax.tree.leaves(own), jax.tree.leaves(after), strict=True)
    for x, y in states:
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=SLOW)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TRACED else SLOW) for name in (*MAKERS, *WIDENED)],
)
def test_products_are_narrow(name, precision):
    """Every product of a step has a narrow operand, also behind a float32 constant; under float32 none has."""
    model = made(name)
    loss, batch = loss_and_batch(model, name)
    plan = plan_of(model, precision)
    jaxpr = spmd.make_train_step(plan, loss).trace(batch).jaxpr
    narrow, wide = split_products(jaxpr, plan.precision.compute_dtype)
    assert narrow
    assert not wide
    forward = {atom.aval.dtype for equation in narrow[:1] for atom in equation.invars}
    assert forward == {plan.precision.compute_dtype}
    if name == "net":
        control = spmd.make_train_step(plan_of(model, "float32"), loss).trace(batch)
        assert not split_products(control.jaxpr, jnp.bfloat16)[0]


def test_own_dtype_of_a_layer_is_honoured():
    """A head with a float32 `dtype` gets its kernel unrounded, multiplies in float32, and is listed with its line.

    Products of the optimizer, here Muon's, are not listed.
    """
    model = spmd.from_nnx(lambda rngs: Net(rngs, head=jnp.float32))
    # It has as many outputs as there are words, so it could be the head.
    kernels = {"up/kernel": (0, 1)}
    muon = spmd.make_optimizer(spmd.OptimizerConfig(name="muon"), 10, model=model, matrices=kernels)
    step = spmd.make_train_step(plan_of(model, optimizer=muon), spmd.next_token_loss(model))
    found = find_wide_products(step, TEXT)
    (primitive, line), *others = found.wide
    assert primitive == "dot_general"
    assert not others
    assert found.wide[primitive, line] == 3
    assert "test_compute_dtype.py:" in line
    assert line in str(found)
    assert model.info().cast_by_layer == {"head/kernel", "head/bias"}
    linen = spmd.from_linen(
        nn.Sequential([nn.Embed(VOCAB, WIDTH), nn.Dense(VOCAB, dtype=jnp.float32)]), SHAPE
    )
    assert linen.info().cast_by_layer == {"layers_1/kernel", "layers_1/bias"}


def test_a_precision_that_acts_on_nothing_is_refused():
    """A model whose layers are all float32 by themselves is refused with their lines; under float32 it is not."""
    model = spmd.from_nnx(lambda rngs: Net(rngs, dtype=jnp.float32))
    with pytest.raises(
        AnnotationError,
        match=r"precision: is bf16, and all 6 products(.|\n)*test_compute_dtype.py:",
    ):
        spmd.make_train_step(plan_of(model), spmd.next_token_loss(model)).trace(TEXT)
    spmd.make_train_step(plan_of(model, "float32"), spmd.next_token_loss(model)).trace(TEXT)


def test_parameters_are_gathered_in_the_compute_dtype():
    """The program gathers the shards of a model of Flax in bfloat16, half of the bytes; under float32 in float32."""
    model = made("net")
    for precision, dtype in (("bf16", jnp.bfloat16), ("float32", jnp.float32)):
        step = spmd.make_train_step(plan_of(model, precision), spmd.next_token_loss(model))
        jaxpr = step.trace(TEXT).jaxpr
        gathers = [
            equation
            for equation in equations(jaxpr)
            if equation.primitive.name.startswith("all_gather")
        ]
        shards = [equation.invars[0].aval for equation in gathers]
        assert {shard.dtype for shard in shards if shard.ndim > 1} == {jnp.dtype(dtype)}


@SLOW
def test_fp16_trains_with_loss_scaling():
    """A model of Flax trains in float16 with a dynamic loss scale, and its loss falls as in float32."""
    model, losses = made("linen"), {}
    for precision in ("fp16", "float32"):
        plan = plan_of(model, precision)
        state, step = spmd.init_state(plan), spmd.make_train_step(plan, spmd.next_token_loss(model))
        losses[precision] = []
        for _ in range(4):
            state, metrics = step(state, TEXT)
            losses[precision].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses["fp16"], losses["float32"], rtol=2e-3)
    assert losses["fp16"] != losses["float32"]
    assert losses["fp16"][-1] < losses["fp16"][0]


def test_settings_of_attention_without_attention_are_refused():
    """A kernel or a context for a model without our attention is an error; for one of ours a kernel is not."""
    model = made("net")
    for field, value in (("attention", "chunked"), ("context", "all-to-all")):
        step = spmd.make_train_step(
            plan_of(model, "float32", **{field: value}), spmd.next_token_loss(model)
        )
        with pytest.raises(
            AnnotationError, match=f"{field}: is {value}, and the model never calls"
        ):
            step.trace(TEXT)
    ours = tiny.plan(options=(("attention", "chunked"),), fsdp=2)
    spmd.make_train_step(ours, tiny.loss_fn()).trace(
        token_batches((8, 8), tiny.CONFIG.vocab, steps=1)[0]
    )
