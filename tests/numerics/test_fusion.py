"""The barrier of a gradient is in the backward pass alone."""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from spmd.layers.fusion import unfused_gradient
from spmd.models.decoder.mlp import MLP, MLPSpec
from spmd.models.decoder.sizes import Sizes

BARRIER = "optimization_barrier"


@pytest.fixture(autouse=True)
def on_tpu(monkeypatch):
    name = "spmd.layers.fusion.attention_config"
    monkeypatch.setattr(name, lambda: types.SimpleNamespace(platform="tpu"))


def lowered(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text()


def test_other_platforms_have_none(monkeypatch):
    """The control: outside of a plan for TPUs nothing changes."""
    monkeypatch.undo()
    gradient = jax.grad(lambda x: (unfused_gradient(x) ** 3).sum())
    assert BARRIER not in lowered(gradient, jnp.arange(4.0))


def test_only_the_gradient_has_a_barrier():
    """In first and second derivatives, forward and reverse; values are those of the function alone."""
    x = jnp.arange(4.0)

    def cubes(x):
        return (unfused_gradient(x) ** 3).sum()

    assert BARRIER not in lowered(cubes, x)
    assert lowered(jax.grad(cubes), x).count(BARRIER) == 1
    assert BARRIER not in lowered(jax.grad(lambda x: (x**3).sum()), x)  # the control
    assert (jax.grad(cubes)(x) == 3 * x**2).all()
    assert (jax.hessian(cubes)(x) == jnp.diag(6 * x)).all()


def test_a_gated_mlp_has_one_and_a_plain_one_none():
    """The plain one's gradient is one product, with nothing to add before the norm."""
    sizes = Sizes(8, layers=1, heads=1, kv_heads=1, head_dim=8, d_ff=16, norm_eps=1e-6)
    for spec, expected in ((MLPSpec(d_ff=16), 1), (MLPSpec(d_ff=16, gated=False), 0)):
        mlp = MLP(spec, sizes, rngs=nnx.Rngs(0))

        def total(x, mlp=mlp):
            return mlp(x).sum()

        assert lowered(jax.grad(total), jnp.ones((1, 2, 8))).count(BARRIER) == expected
