"""Activations are those of `transformers`, and save only their inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.models.decoder.activations import (
    FROM_HF,
    GATED,
    LEARNED,
    UNGATED,
    XIELU_INIT,
    clamped_swiglu,
    xielu,
)

X = np.linspace(-9, 9, 37, dtype=np.float32)[None]
UP = np.linspace(9, -8, 37, dtype=np.float32)[None]
SCALARS = {name: jnp.array([value]) for name, value in XIELU_INIT.items()}


def theirs(name, x):
    """Values of `transformers` and the gradient of their sum."""
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    function = activations.ACT2FN[name]
    function.to(torch.float32)
    x = torch.from_numpy(x.copy()).requires_grad_()
    values = function(x)
    values.sum().backward()
    return values.detach().numpy(), x.grad.numpy()


def ours(name):
    if name in LEARNED:
        return lambda x: LEARNED[name](x, SCALARS["alpha_p"], SCALARS["alpha_n"])
    return UNGATED[name]


@pytest.mark.parametrize("name", FROM_HF)
def test_activations_are_those_of_transformers(name):
    """With and without a gate, values and gradients; control: another one differs."""
    function = ours(FROM_HF[name])
    values, gradient = theirs(name, X)
    # transformers has the scalars of xIELU in bfloat16
    tolerance = 2e-2 if name == "xielu" else 1e-5
    np.testing.assert_allclose(function(X), values, rtol=tolerance, atol=tolerance)
    found = jax.grad(lambda x: function(x).sum())(X)
    np.testing.assert_allclose(found, gradient, rtol=tolerance, atol=tolerance)
    other = UNGATED["relu" if FROM_HF[name] != "relu" else "silu"]
    assert np.abs(other(X) - values).max() > 0.1
    if name not in LEARNED:
        gated = GATED[FROM_HF[name]](X, UP)
        np.testing.assert_allclose(gated, values * UP, rtol=1e-5, atol=1e-5)


def test_xielu_learns_its_scalars():
    """Gradients of both are those of `transformers`, in float32."""
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    function = activations.XIELUActivation(dtype=torch.float32)
    values = function(torch.from_numpy(X))
    values.square().sum().backward()

    def loss(scalars):
        return jnp.square(xielu(X, **scalars)).sum()

    np.testing.assert_allclose(xielu(X, **SCALARS), values.detach().numpy(), rtol=1e-5, atol=1e-6)
    found = jax.grad(loss)(SCALARS)
    np.testing.assert_allclose(found["alpha_p"], function.alpha_p.grad.numpy(), rtol=1e-4)
    np.testing.assert_allclose(found["alpha_n"], function.alpha_n.grad.numpy(), rtol=1e-4)


def test_the_clamped_gate_is_that_of_gpt_oss():
    """Beyond both limits, too; control: SwiGLU is another function."""
    torch = pytest.importorskip("torch")
    model = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    experts = model.GptOssExperts.__new__(model.GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    both = np.stack([X, UP], axis=-1).reshape(1, -1)
    expected = experts._apply_gate(torch.from_numpy(both)).numpy()
    np.testing.assert_allclose(clamped_swiglu(X, UP), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(GATED["silu"](X, UP) - expected).max() > 1


FUNCTIONS = [
    *((function, (X, UP)) for function in GATED.values()),
    # JAX's own saves the mask in place of its input
    *((function, (X,)) for name, function in UNGATED.items() if name != "relu"),
    *((function, (X, *SCALARS.values())) for function in LEARNED.values()),
]


def saved_arrays(function, *arguments):
    """The number of arrays of hidden units that the backward pass keeps."""
    _, back = jax.vjp(function, *map(jnp.asarray, arguments))
    return sum(leaf.size >= X.size for leaf in jax.tree.leaves(back))


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS)
def test_only_inputs_are_saved(function, arguments):
    """Control: without the checkpoint, the product saves what it multiplies, too."""
    inputs = sum(array.size >= X.size for array in arguments)
    assert saved_arrays(function, *arguments) <= inputs
    assert saved_arrays(lambda x: jax.nn.sigmoid(x) * jnp.tanh(x), X) > 1
