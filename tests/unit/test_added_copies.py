"""In a gradient, copies are added to each other, also those of splash attention's kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spmd.chips import SplashBlocks
from spmd.jaxpr.equations import equations
from spmd.layers.added_copies import with_added_copies
from spmd.layers.splash_attention import splash_attention

BLOCK = (128, 128)


def sums_over_copies(function, *arrays):
    """Operands of the sums over one dimension in a gradient, but those of a block inside of a kernel."""

    def total(*arrays):
        return function(*arrays).astype(jnp.float32).sum()

    program = jax.make_jaxpr(jax.grad(total, argnums=tuple(range(len(arrays)))))(*arrays)
    found = []
    for equation in equations(program):
        if equation.primitive.name == "reduce_sum" and len(equation.params["axes"]) == 1:
            found.append(equation.invars[0].aval.shape)
    return [shape for shape in found if shape != BLOCK]


def broadcast(fixed, x):
    return fixed * jnp.broadcast_to(x, (3, *x.shape))


def test_sums_become_additions():
    """But not those over a dimension of a tile. Control: without it there is a sum."""
    x = jax.ShapeDtypeStruct((8, 128), "bfloat16")
    fixed = np.ones((), "bfloat16")
    assert sums_over_copies(lambda x: broadcast(fixed, x), x) == [(3, 8, 128)]
    assert sums_over_copies(lambda x: with_added_copies(broadcast, fixed, x), x) == []
    row = jax.ShapeDtypeStruct((128,), "bfloat16")
    assert sums_over_copies(lambda x: with_added_copies(broadcast, fixed, x), row) == [(3, 128)]


def test_jax_sums_the_gradients_of_queries_and_we_add_them(monkeypatch):
    """As long as JAX sums them, the control sees it."""
    blocks = SplashBlocks(BLOCK, BLOCK, BLOCK, all_gradients=BLOCK)
    heads = [jax.ShapeDtypeStruct((1, 512, count, 128), "bfloat16") for count in (2, 1, 1)]

    def attend(query, key, value):
        return splash_attention(query, key, value, None, blocks=blocks)

    assert sums_over_copies(attend, *heads) == []
    monkeypatch.setattr(
        "spmd.layers.splash_attention.with_added_copies", lambda run, *arrays: run(*arrays)
    )
    assert sums_over_copies(attend, *heads) == [(1, 4, 2, 512, 128)]
    two = dataclasses.replace(blocks, all_gradients=None)
    assert sums_over_copies(lambda *x: splash_attention(*x, None, blocks=two), *heads) == []
