"""A derivative in two programs: the gradient of the input first, and gradients of weights from what it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.jaxpr.equations import equations
from spmd.jaxpr.split import SplitProgram

LAYERS, WIDTH, HIDDEN = 3, 4, 8


def layer(weights, x):
    """A gated layer: einsum is a call, and silu another."""
    gate = jax.nn.silu(jnp.einsum("bd,df->bf", x, weights["gate"]))
    return x + jnp.einsum("bf,fd->bd", gate, weights["down"])


def rematted(weights, x):
    return jax.checkpoint(layer, prevent_cse=False)(weights, x)


def conditional(weights, x):
    """A condition belongs to one part."""
    return jax.lax.cond(x[0, 0] > -100.0, lambda x: layer(weights, x), lambda x: x, x)


def products(jaxpr) -> int:
    return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr))


def derivative(body):
    """A stage's derivative as a program, its inputs, and the gradients it should give."""
    rng = np.random.default_rng(0)
    weights = {
        "gate": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, HIDDEN)), jnp.float32),
        "down": jnp.asarray(rng.normal(size=(LAYERS, HIDDEN, WIDTH)), jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(5, WIDTH)), jnp.float32)

    def stage(weights, scale, x):
        y, _ = jax.lax.scan(lambda x, w: (scale * body(w, x), None), x, weights)
        return y

    y, pull = jax.vjp(stage, weights, jnp.float32(1.5), x)
    leaves, structure = jax.tree.flatten(pull)

    def derive(leaves, d_y):
        return jax.tree.unflatten(structure, leaves)(d_y)

    program = jax.make_jaxpr(derive)(leaves, y)
    return program, jax.tree.leaves((leaves, y)), jax.tree.leaves(pull(y))


@pytest.mark.parametrize(("body", "deferred"), [(layer, 2), (rematted, 2), (conditional, 0)])
def test_two_programs_give_all_gradients(body, deferred):
    """Bitwise, each output from one of them; products of weights are in the second, but inside of a condition."""
    program, inputs, expected = derivative(body)
    *_, of_input = [False] * (len(expected) - 1) + [True]
    split = SplitProgram(program, [False] * (len(expected) - 1) + [of_input])
    found, kept = split.run_first(inputs)
    assert [x is None for x in found] == [True] * (len(expected) - 1) + [False]
    rest = split.run_second(inputs, kept)
    merged = [a if b is None else b for a, b in zip(found, rest, strict=True)]
    for x, y in zip(merged, expected, strict=True):
        np.testing.assert_array_equal(x, y)

    def first(inputs):
        return split.run_first(inputs)

    in_first = products(jax.make_jaxpr(first)(inputs))
    in_second = products(jax.make_jaxpr(split.run_second)(inputs, kept))
    assert in_second == deferred
    assert in_first + in_second == products(program)


def test_what_is_kept_is_read():
    """The control: with other values kept, the second part gives other gradients."""
    program, inputs, expected = derivative(layer)
    split = SplitProgram(program, [False] * (len(expected) - 1) + [True])
    _, kept = split.run_first(inputs)
    stale = jax.tree.map(lambda x: 2 * x, kept)
    rest = split.run_second(inputs, stale)
    assert not np.array_equal(rest[0], expected[0])


def test_constants_and_literals():
    """An output may be an input, a constant or a literal, in either part."""
    table = jnp.arange(3.0)

    def program(x):
        return x, table, 2.0, x * table, x + table

    made = jax.make_jaxpr(program)(jnp.ones(3))
    split = SplitProgram(made, [True, False, True, False, True])
    x = jnp.full(3, 3.0)
    found, kept = split.run_first([x])
    rest = split.run_second([x], kept)
    merged = [a if b is None else b for a, b in zip(found, rest, strict=True)]
    for a, b in zip(merged, program(x), strict=True):
        np.testing.assert_array_equal(a, b)
