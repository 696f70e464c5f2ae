"""Learning rates by path: a factor of the update, the first row that matches, zero to freeze."""

import dataclasses

import jax
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.optim.config import OptimizerConfig, check_patterns, make_optimizer
from tests import tiny

CONFIG = OptimizerConfig(learning_rate=0.1, schedule="constant", clip_norm=0.0)


def updates(**fields):
    """Updates of the tiny Llama by path, from equal gradients."""
    params = tiny.model().init(jax.random.key(0))
    optimizer = make_optimizer(dataclasses.replace(CONFIG, **fields), steps=3, model=tiny.model())
    return optimizer.update(params, optimizer.init(params), params)[0]


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.soak)])
def test_an_update_is_scaled_by_the_first_row_that_matches(name):
    """Stacked layers with the others."""
    plain = updates(name=name)
    scaled = updates(
        name=name, scales=("attention/q_proj/kernel=0", "embed/embedding=0.5", "kernel=2")
    )
    layer, other = scaled["layers"]["attention"], plain["layers"]["attention"]
    assert not np.any(layer["q_proj"]["kernel"])
    np.testing.assert_array_equal(layer["k_proj"]["kernel"], 2 * other["k_proj"]["kernel"])
    np.testing.assert_array_equal(scaled["embed"]["embedding"], 0.5 * plain["embed"]["embedding"])
    np.testing.assert_array_equal(scaled["norm"]["scale"], plain["norm"]["scale"])


def test_rows_that_are_none_are_refused():
    """All at once; a pattern that matches nothing once the model is known."""
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(scales=("kernel", "kernel=-1", "kernel=x", "(=1"))
    assert [problem.where for problem in caught.value.problems] == [
        f"scales[{n}]" for n in range(4)
    ]
    (problem,) = check_patterns(OptimizerConfig(scales=("kernle=0",)), ["a/kernel"])
    assert "matches no parameter" in problem.what
    assert "kernel" in problem.fix
