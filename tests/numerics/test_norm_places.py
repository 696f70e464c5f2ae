"""Places of norms in a layer are their formulas in NumPy, and every mesh has equal numbers."""

import functools

import numpy as np
import pytest
from flax import nnx

from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.models.afmoe import PRESETS as AFMOE
from spmd.models.axk1 import PRESETS as AXK1
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, decoder_rules
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.glm_moe import PRESETS as GLM
from spmd.models.laguna import PRESETS as LAGUNA
from spmd.plan.nnx_model import from_nnx
from spmd.testing import token_batches
from tests.one_device import Job

BATCHES = token_batches((8, 16), 64, steps=2)
X = np.random.default_rng(0).standard_normal((2, 6, 32), np.float32)


@functools.cache
def layer(norms):
    """A layer without positions, whose norms have scales of their own."""
    config = DecoderConfig(
        *(64, 32, 1, 4, 2, 64), layer=LayerSpec(AttentionSpec(rotary=None), norms=norms)
    )
    (spec,) = config.pattern.distinct
    made = spec.build(config.sizes, None, 0, nnx.Rngs(0))
    for number, name in enumerate(spec.norm_names):
        scale = getattr(made, name).scale
        rng = np.random.default_rng(number)
        scale[...] = 1 + 0.3 * rng.standard_normal(32).astype(np.float32)
    return made


def normed(made, name, x):
    """The norm of a name in NumPy."""
    scale = np.asarray(getattr(made, name).scale[...])
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def by_hand(made):
    """A layer with norms before the mixer, and on both sides of the MLP."""
    inputs = LayerInputs()
    mixed = X + np.asarray(made.attention(normed(made, "attention_norm", X), inputs))
    y = np.asarray(made.mlp(normed(made, "mlp_norm", mixed)))
    return mixed + normed(made, "mlp_post_norm", y)


def test_the_mlp_alone_may_have_norms_on_both_sides():
    """The formula; the control is a layer without the last norm."""
    made = layer("mlp_both")
    out, report = made(X, None, LayerInputs())
    assert report is None
    np.testing.assert_allclose(out, by_hand(made), atol=1e-5)
    plain, _ = layer("before")(X, None, LayerInputs())
    assert np.abs(plain - out).max() > 0.1


@functools.cache
def job(config):
    model = from_nnx(config.build)
    grad_fn = value_and_grad(next_token_loss(model, chunk=7))
    return Job(model, decoder_rules(config), grad_fn, BATCHES)


CONFIGS = {
    "axk1": AXK1["test-axk1"],
    "afmoe": AFMOE["test-afmoe"],
    "glm4-moe": GLM["test-glm4-moe"],
    "laguna": LAGUNA["test-laguna"],
}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 2}])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_with_experts_trains_as_on_one_device(name, mesh):
    """The initial state, and of two steps the loss, gradients and updates."""
    job(CONFIGS[name]).assert_parity(**mesh)
