"""Models of decoder configs, and parameters in which no norm is 1 and no bias 0, where nothing would be seen."""

import functools

import jax
import numpy as np

from spmd.plan.nnx_model import from_nnx


@functools.cache
def model(config):
    """The model of a config."""
    return from_nnx(config.build)


@functools.cache
def params(config):
    """Initial parameters with noise added to each."""
    rng = np.random.default_rng(0)

    def moved(x):
        return x + 0.3 * rng.standard_normal(x.shape).astype(np.float32)

    return jax.tree.map(moved, model(config).init(jax.random.key(0)))
