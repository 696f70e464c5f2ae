"""A linear function with a transpose of its own is differentiated in every mode, and so is a loss under a plan."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P

from spmd.gradients.base import value_and_grad
from spmd.model_interface.grad_transform import Carry
from spmd.plan import fsdp, partition_safe
from spmd.plan.context import use_plan
from spmd.plan.linear_call import linear_call
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules
from tests import tiny
from tests.numerics.test_partition_safe import TOLERANCE, WIDTH, errors, on_mesh, on_one_device
from tests.tiers import soak_but

MATRIX = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
POINT, TANGENT = ROWS[0], ROWS[1]


def direct(x):
    return jnp.tanh(jnp.tanh(MATRIX @ x) * x)


def called(x, factor=1.0):
    """The same function, with the product in a linear call; another factor makes its transpose wrong."""
    product = linear_call(lambda x: MATRIX @ x, lambda y: factor * (MATRIX.T @ y), x)
    return jnp.tanh(jnp.tanh(product) * x)


def total(f):
    return lambda x: (f(x) ** 2).sum()


def along(f):
    """The product of a gradient with a vector."""
    return lambda x: jax.grad(total(f))(x) @ TANGENT


def scanned(f):
    return lambda x: jax.lax.scan(lambda x, _: (f(x), x.sum()), x, length=3)[0]


def looped(f):
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, x: f(x), x)


def chosen(f):
    return lambda x: jax.lax.cond(x[0] > 0, f, lambda x: -f(x), x)


FORWARD = {
    "value": lambda f: f(POINT),
    "jit": lambda f: jax.jit(f)(POINT),
    "vmap": lambda f: jax.vmap(f)(ROWS),
    "vmap over columns": lambda f: jax.vmap(f, in_axes=1, out_axes=1)(ROWS.T),
    "jvp": lambda f: jax.jvp(f, (POINT,), (TANGENT,)),
    "jvp of jvp": lambda f: jax.jvp(
        lambda x: jax.jvp(f, (x,), (TANGENT,))[1], (POINT,), (TANGENT,)
    ),
    "linearize": lambda f: jax.linearize(f, POINT)[1](TANGENT),
    "jacfwd": lambda f: jax.jacfwd(f)(POINT),
    "jvp of a loop": lambda f: jax.jvp(looped(f), (POINT,), (TANGENT,)),
    "jet": lambda f: jet(f, (POINT,), ((TANGENT, jnp.zeros(3), jnp.zeros(3)),)),
}
"""Modes that do not transpose."""
MODES = FORWARD | {
    "vjp": lambda f: jax.vjp(f, POINT)[1](TANGENT),
    "jacrev": lambda f: jax.jacrev(f)(POINT),
    "grad": lambda f: jax.grad(total(f))(POINT),
    "grad of vmap": lambda f: jax.grad(lambda rows: (jax.vmap(f)(rows) ** 2).sum())(ROWS),
    "grad of grad": lambda f: jax.grad(along(f))(POINT),
    "hessian": lambda f: jax.hessian(total(f))(POINT),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f))(POINT),
    "forward over reverse": lambda f: jax.jvp(jax.grad(total(f)), (POINT,), (TANGENT,))[1],
    "reverse over forward": lambda f: jax.grad(lambda x: jax.jvp(total(f), (x,), (TANGENT,))[1])(
        POINT
    ),
    "reverse over jet": lambda f: jax.grad(
        lambda x: jet(f, (x,), ((TANGENT, jnp.zeros(3)),))[1][1].sum()
    )(POINT),
    "scan": lambda f: jax.grad(total(scanned(f)))(POINT),
    "grad of grad of scan": lambda f: jax.grad(along(scanned(f)))(POINT),
    "branches": lambda f: jax.grad(along(chosen(f)))(POINT),
    "checkpoint in scan": lambda f: jax.grad(along(scanned(jax.checkpoint(f))))(POINT),
}
"""Mode → a function of the function to differentiate."""


@pytest.fixture(autouse=True)
def promotion():
    """Derivatives by `jet` broadcast scalars, as JAX writes them."""
    with jax.numpy_rank_promotion("allow"):
        yield


def differs(mode, factor=1.0):
    """Return whether a mode has other numbers for the call than for the product itself."""
    found, wanted = (
        jax.tree.leaves(MODES[mode](f)) for f in (functools.partial(called, factor=factor), direct)
    )
    return not all(
        np.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(
    "mode", soak_but(MODES, *FORWARD, "vjp", "grad", "hessian", "checkpoint in scan", "branches")
)
def test_every_mode_differentiates_the_call(mode):
    """Each mode gives what it gives for the product itself."""
    assert not differs(mode)


def test_control_another_transpose():
    """With a transpose of twice the size, reverse modes are wrong, and forward modes stay as they are."""
    modes = ("jvp", "linearize", "jacfwd", "vjp", "grad", "forward over reverse", "scan")
    assert {mode for mode in modes if differs(mode, 2.0)} == {*modes} - FORWARD.keys()


def test_shapes_may_change():
    """The results of function and transpose have shapes of their own, also under `jax.vmap`."""
    wide = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)

    def product(x):
        return linear_call(lambda x: wide @ x, lambda y: wide.T @ y, x)

    np.testing.assert_allclose(jax.jacfwd(product)(POINT), wide, rtol=1e-6)
    np.testing.assert_allclose(jax.jacrev(product)(POINT), wide, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(product, in_axes=1, out_axes=1)(ROWS.T), wide @ ROWS.T, rtol=1e-5
    )


def test_the_transpose_of_a_transpose_is_the_function():
    """A function and its transpose alternate, however often they are transposed."""
    marked = functools.partial(linear_call, lambda x: jnp.sin(1.0) * x, lambda y: jnp.sin(2.0) * y)
    for factor in (1, 2, 1, 2):
        np.testing.assert_allclose(marked(POINT), np.sin(float(factor)) * POINT, rtol=1e-6)
        marked = (lambda f: lambda x: jax.linear_transpose(f, POINT)(x)[0])(marked)


# Losses under a plan.


class Net(nnx.Module):
    """A network with biases, which are gathered, too."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


MODEL = from_nnx(Net)
RULES = Rules([("kernel", P("fsdp", "tensor")), ("bias", P("fsdp"))])
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
BATCH = {"x": np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)}


def ones(params):
    return jax.tree.map(jnp.ones_like, params)


def size(params, x):
    return (MODEL.apply(params, x) ** 2).sum()


def newton(params, x):
    """A product of a matrix of second derivatives and a vector, forward over reverse."""
    return jax.jvp(jax.grad(lambda p: size(p, x)), (params,), (ones(params),))[1]["a"]["kernel"]


def slopes(params, x):
    """The derivative by one parameter of each output."""

    def outputs(bias):
        return MODEL.apply({**params, "b": {**params["b"], "bias": bias}}, x)

    return jax.jacfwd(outputs)(params["b"]["bias"]) * MODEL.apply(params, x)[..., None]


def curvature(params, x):
    """The second derivative by inputs, of Taylor mode."""
    return jet(lambda x: MODEL.apply(params, x), (x,), ((jnp.ones_like(x), jnp.zeros_like(x)),))[1][
        1
    ]


def moved(params, x):
    """Inputs moved along the derivative by parameters."""
    return jnp.tanh(
        x
        + jax.jvp(lambda p: MODEL.apply(p, x), (params,), (ones(params),))[1].mean(
            -1, keepdims=True
        )
    )


TERMS = {
    "jvp": lambda p, x: jax.jvp(lambda p: MODEL.apply(p, x), (p,), (ones(p),))[1],
    "linearize": lambda p, x: jax.linearize(lambda p: MODEL.apply(p, x), p)[1](ones(p)),
    "jacfwd": slopes,
    "forward over reverse": newton,
    "jet": curvature,
    "examples one by one": lambda p, x: jax.vmap(
        lambda x: jax.grad(lambda p: size(p, x[None]))(p)["a"]["bias"]
    )(x),
    "scan of checkpoints": lambda p, x: jax.lax.scan(
        jax.checkpoint(lambda x, _: (moved(p, x), None)), x, length=2
    )[0],
}
"""Name → an array that a loss squares and sums, and that needs a derivative over parameters or inputs."""


def loss_of(term):
    def loss_fn(params, variables, batch, key):
        return {
            "loss": (TERMS[term](params, batch["x"]) ** 2).mean(),
            "weight": jnp.float32(1),
        }, variables

    return loss_fn


@pytest.mark.parametrize("term", TERMS)
def test_a_loss_may_differentiate_its_parameters_in_any_mode(term):
    """Value and gradients of a loss with derivatives inside are those of one device, to 1e-5."""
    found = on_mesh(MODEL, RULES, loss_of(term), BATCH, **SIZES)
    found = errors(found, on_one_device(MODEL, loss_of(term), BATCH))
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("term", ["jvp", "forward over reverse"])
def test_control_without_the_gather(term, monkeypatch):
    """Where parameters stay as they are stored, the same losses are wrong by more than a tenth."""
    monkeypatch.setattr(partition_safe, "gathered", lambda x, *_, **options: x)
    found = on_mesh(MODEL, RULES, loss_of(term), BATCH, **SIZES)
    assert max(errors(found, on_one_device(MODEL, loss_of(term), BATCH)).values()) > 0.1


def derivatives_of_a_bias():
    """First and second derivatives of the squares of a bias that a layer gathers, forward over reverse."""
    plan = make_plan(tiny.mesh(**SIZES), RULES, MODEL, optax.sgd(0.1))

    def squares(bias):
        return fsdp.gathered(bias, plan.placements["b/bias"]) ** 2

    def run(bias):
        with use_plan(plan):
            return jax.jacfwd(squares)(bias), jax.hessian(lambda bias: squares(bias).sum())(bias)

    return jax.jit(run)(np.arange(float(WIDTH), dtype=np.float32))


def test_a_bias_that_a_layer_gathers_is_differentiated_in_any_mode(monkeypatch):
    """Its tangents are gathered as it is; the control: with `jax.custom_vjp` there is no forward mode."""
    first, second = derivatives_of_a_bias()
    np.testing.assert_allclose(first, np.diag(2 * np.arange(float(WIDTH))))
    np.testing.assert_allclose(second, 2 * np.eye(WIDTH))
    monkeypatch.setattr(fsdp, "linear_call", by_custom_vjp)
    with pytest.raises(TypeError, match="forward-mode"):
        derivatives_of_a_bias()


# Cost.


def by_custom_vjp(function, transpose, x):
    """The same with JAX's own rule, in reverse mode alone."""
    call = jax.custom_vjp(function)
    call.defvjp(lambda x: (function(x), None), lambda _, g: (transpose(g),))
    return call(x)


def program_of_gradients():
    """Kind of operation → number of those in the compiled gradients of a plain loss."""
    plan = make_plan(tiny.mesh(**SIZES), RULES, MODEL, optax.sgd(0.1))
    loss = value_and_grad(
        lambda p, v, b, k: ({"loss": size(p, b["x"]), "weight": jnp.float32(1)}, v)
    )

    def run(params, batch):
        with use_plan(plan):
            return loss(params, Carry(), batch, jax.random.key(0))[:2]

    batch = {"x": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32, sharding=plan.batch_sharding("x"))}
    compiled = (
        jax.jit(run, out_shardings=(plan.gradient_shardings, None))
        .lower(plan.abstract_params, batch)
        .compile()
    )
    return Counter(re.findall(r"[]})] ([a-z-]+)\(", compiled.as_text()))


def test_a_call_costs_nothing(monkeypatch):
    """A compiled gradient has the operations that it has with `jax.custom_vjp`, among them gathers and sums."""
    ours = program_of_gradients()
    assert ours["all-gather"]
    assert ours["all-reduce"]
    monkeypatch.setattr(fsdp, "linear_call", by_custom_vjp)
    assert program_of_gradients() == ours


def test_control_another_cost(monkeypatch):
    """A call that gathers twice is another program."""
    ours = program_of_gradients()

    def twice(function, transpose, x):
        return linear_call(
            lambda x: function(x) + function(2 * x) - function(x * 2.5) / 2.5, transpose, x
        )

    monkeypatch.setattr(fsdp, "linear_call", twice)
    assert program_of_gradients() != ours
