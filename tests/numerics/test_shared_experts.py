"""The shared expert's gate and factor: the numbers of a formula, on one device and on many."""

import jax
import numpy as np
import pytest
from flax import nnx

from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers.router import RouterConfig
from spmd.models import cohere_moe, qwen_moe
from spmd.models.decoder import DecoderConfig, ExpertsSpec, LayerSpec, decoder_rules
from spmd.models.decoder.experts import MixtureOfExperts
from spmd.plan.nnx_model import from_nnx
from spmd.testing import token_batches
from tests.one_device import Job

ROUTER = RouterConfig(experts=4, top_k=2)
SIZES = DecoderConfig(d_model=8, d_ff=6, router=ROUTER, layer=LayerSpec(mlp=ExpertsSpec())).sizes
X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)


def module(**options):
    """The experts of a layer, with the same router and experts whatever the options."""
    spec = ExpertsSpec(**options).resolve(SIZES)
    return MixtureOfExperts(spec, SIZES, ROUTER, rngs=nnx.Rngs(0))


def output(experts):
    """Its output for these tokens."""
    return np.asarray(experts(jax.numpy.asarray(X), None)[0])


def of_shared(experts, *, gate=True, scale=1.0):
    """The output of the shared expert, in NumPy."""
    kernels = {
        name: np.asarray(getattr(experts.shared, name).kernel[...], np.float64)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    hidden = X @ kernels["gate_proj"]
    hidden = hidden / (1 + np.exp(-hidden)) * (X @ kernels["up_proj"])
    y = scale * hidden @ kernels["down_proj"]
    if gate:
        y = y / (1 + np.exp(-X @ np.asarray(experts.shared_gate.kernel[...], np.float64)))
    return y


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_shared_experts_output_is_multiplied_by_its_gate(scale):
    """And by its factor; a formula without either differs, as a control."""
    routed = output(module())
    experts = module(shared_d_ff=7, shared_gate=True, shared_scale=scale)
    found = output(experts) - routed
    np.testing.assert_allclose(found, of_shared(experts, scale=scale), atol=1e-5)
    assert np.abs(found - of_shared(experts, gate=False, scale=scale)).max() > 1e-2
    assert np.abs(found - of_shared(experts, scale=2 * scale)).max() > 1e-2


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"shared_gate": True}, "shared_gate"),
        ({"shared_scale": 0.5}, "shared_scale"),
        ({"shared_d_ff": 8, "shared_scale": 0.0}, "shared_scale"),
    ],
)
def test_an_option_without_a_shared_expert_is_refused(options, where):
    """It is named, and so is a factor of 0."""
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(router=ROUTER, layer=LayerSpec(mlp=ExpertsSpec(**options)))
    (problem,) = caught.value.problems
    assert problem.where == f"model.layer.mlp.{where}"


CONFIGS = {
    "qwen2-moe": qwen_moe.PRESETS["test-qwen2-moe"],
    "cohere2-moe": cohere_moe.PRESETS["test-cohere2-moe"],
}
MESHES = {
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence2-expert2-tensor2": {"sequence": 2, "expert": 2, "tensor": 2},
}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_shared_experts_train_as_on_one_device(name, mesh):
    """The initial state, and of two steps the loss, gradients and updates."""
    config = CONFIGS[name]
    model = from_nnx(config.build)
    grad_fn = value_and_grad(next_token_loss(model, chunk=7))
    job = Job(model, decoder_rules(config), grad_fn, token_batches((8, 16), 64, steps=2))
    job.assert_parity(**MESHES[mesh])
