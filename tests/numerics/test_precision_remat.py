"""Precision and rematerialisation do what their names say, seen in the traced program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.gradients.base import value_and_grad
from spmd.jaxpr.equations import equations
from spmd.model_interface.grad_transform import Carry
from spmd.plan.context import use_plan
from spmd.precision import POLICIES
from spmd.testing import token_batches
from spmd.training.state import init_state
from tests import tiny

pytestmark = pytest.mark.compat

BATCH = token_batches((4, 10), tiny.CONFIG.vocab, steps=1)[0]
KERNELS = 7  # of one layer: four of attention and three of the MLP


def gradient_program(config=tiny.CONFIG, grad_fn=None, **options):
    """The jaxpr of a batch's gradients under a plan with these options."""
    plan = tiny.plan(config, options=tuple(options.items()), fsdp=2)
    with use_plan(plan):
        return jax.make_jaxpr(grad_fn or value_and_grad(tiny.loss_fn(config)))(
            plan.abstract_params, Carry(), BATCH, jax.random.key(0)
        )


def outputs(jaxpr, primitive):
    """Shape and dtype of what each equation of a primitive computes."""
    return [
        equation.outvars[0].aval
        for equation in equations(jaxpr)
        if equation.primitive.name == primitive
    ]


def test_compute_follows_the_precision():
    """In bf16 every matmul of the forward pass but the logits gives bfloat16; in float32 none does."""
    for precision, dtype in (("float32", jnp.float32), ("bf16", jnp.bfloat16)):
        plan = tiny.plan(options=(("precision", precision),))
        with use_plan(plan):
            forward = jax.make_jaxpr(tiny.model().apply)(plan.abstract_params, BATCH["tokens"])
        products = outputs(forward, "dot_general")
        activations = [
            aval for aval in products if aval.shape[-1] in (32, 16, 64) and aval.ndim == 3
        ]
        logits = [aval for aval in activations if aval.dtype != dtype]
        assert len(activations) == KERNELS + 1
        assert [aval.shape for aval in logits] == (
            [] if precision == "float32" else [(4, 10, tiny.CONFIG.vocab)]
        )


FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def weight_gradient_dtypes(program):
    """The dtypes in which sums over tokens leave: matmuls to a matrix, and the embedding's scatter."""
    sums = [*outputs(program, "dot_general"), *outputs(program, "scatter-add")]
    return [aval.dtype for aval in sums if aval.ndim == 2]


def widened_matrices(program):
    """Matrices that go from bfloat16 to float32: gradients of weights that have been rounded on their way."""
    return [
        equation.outvars[0].aval
        for equation in equations(program)
        if equation.primitive.name == "convert_element_type"
        and equation.invars[0].aval.dtype == BFLOAT16
        and equation.outvars[0].aval.dtype == FLOAT32
        and equation.outvars[0].aval.ndim == 2
    ]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("remat", "exchange"), [("none", "float32"), ("full", "float32"), ("full", "bfloat16")]
)
def test_in_bf16_weight_gradients_are_float32_from_matmul_to_optimizer(remat, exchange, tied):
    """Each leaves its matmul in float32 and is rounded on its way only to be sent, in the dtype of the exchange."""
    precision = dataclasses.replace(POLICIES["bf16"], exchange=exchange)
    program = gradient_program(tiny.replaced(tied=tied), remat=remat, precision=precision)
    # the head and the embedding besides
    assert weight_gradient_dtypes(program) == [FLOAT32] * (KERNELS + 2)
    assert BFLOAT16 in {aval.dtype for aval in outputs(program, "dot_general")}
    gradients = program.out_avals[: len(jax.tree.leaves(tiny.plan().abstract_params))]
    assert {aval.dtype for aval in gradients} == {FLOAT32}
    reduced = [
        aval.dtype
        for name in ("psum", "reduce_scatter")
        for aval in outputs(program, name)
        if aval.ndim == 2
    ]
    assert reduced == [jnp.dtype(exchange)] * (KERNELS + 1)
    assert len(widened_matrices(program)) == (0 if exchange == "float32" else KERNELS + 1)


def test_control_parameters_cast_beforehand_have_bfloat16_gradients():
    """What the test above looks at does show gradients that are summed in bfloat16 and widened afterwards."""

    def cast_first(params, carry, batch, key):
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        grads = jax.grad(lambda p: tiny.loss_fn()(p, carry.variables, batch, key)[0]["loss"])(
            narrow
        )
        return jax.tree.map(lambda x: x.astype(jnp.float32), grads), {}, carry

    program = gradient_program(grad_fn=cast_first, precision="bf16")
    assert BFLOAT16 in weight_gradient_dtypes(program)
    assert widened_matrices(program)


def test_in_bf16_the_state_stays_float32():
    """Parameters and optimizer state are the float32 master copies."""
    state = init_state(tiny.plan(options=(("precision", "bf16"),)))
    floats = [
        x.dtype
        for x in jax.tree.leaves((state.params, state.optimizer_state))
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert set(floats) == {FLOAT32}


def test_in_bf16_the_gradient_of_a_tied_embedding_has_float32_resolution():
    """The program runs, and what both uses of the table add up to is not made of bfloat16 numbers."""
    config = tiny.replaced(tied=True)
    plan = tiny.plan(config, options=(("precision", "bf16"),))

    def gradients(params):
        with use_plan(plan):
            return value_and_grad(tiny.loss_fn(config))(params, Carry(), BATCH, jax.random.key(0))[
                0
            ]

    gradient = jax.jit(gradients)(init_state(plan).params)["embed"]["embedding"]
    rounded = gradient.astype(jnp.bfloat16).astype(jnp.float32)
    assert (np.asarray(rounded) != np.asarray(gradient)).mean() > 0.9
