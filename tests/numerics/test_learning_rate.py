"""Learning-rate schedules have their published form at every edge, and refuse what does not fit."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from spmd.errors import ConfigError
from spmd.optim.config import (
    OptimizerConfig,
    make_learning_rate,
    make_optimizer,
)


def rates(steps: int, **fields: Any) -> list[float]:
    schedule = make_learning_rate(OptimizerConfig(learning_rate=1.0, **fields), steps)
    return [float(schedule(step)) for step in range(steps)]


def test_constant_schedule_warms_up_and_stays() -> None:
    """The rate rises in equal parts, reaches the peak at the last warmup step and stays there."""
    assert rates(6, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(3, schedule="constant") == [1.0, 1.0, 1.0]


def test_cosine_schedule_at_its_edges() -> None:
    """Half of the decay is left at its middle, and the last step is at exactly the final fraction."""
    values = rates(12, schedule="cosine", warmup_steps=2, final_fraction=0.125)
    assert values[:2] == [0.5, 1.0]
    assert values[6] == pytest.approx((1 + 0.125) / 2, abs=5e-7)
    assert values[11] == 0.125
    assert values[1:] == sorted(values[1:], reverse=True)


def test_linear_schedule_at_its_edges() -> None:
    """Equal steps from the peak to the final fraction."""
    values = rates(6, schedule="linear", warmup_steps=2, final_fraction=0.2)
    np.testing.assert_allclose(values, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2], atol=1e-6)


def test_inverse_square_root_joins_its_warmup() -> None:
    """A quarter of the peak is reached after sixteen warmups, however long the run is."""
    values = rates(64, schedule="inverse-sqrt", warmup_steps=4)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(values[4:], np.sqrt(4 / np.arange(5, 65)), rtol=1e-6)
    assert values[63] == 0.25


def test_any_function_of_the_step_is_a_schedule() -> None:
    """It gets the number of completed steps; what is no number for each step, or would be ignored, is refused."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps=2, decay_steps=8)
    found = make_learning_rate(OptimizerConfig(schedule_fn=rate), 5)
    assert [float(found(step)) for step in range(5)] == [float(rate(step)) for step in range(5)]
    optimizer = make_optimizer(
        OptimizerConfig(
            name="sgd",
            momentum=0.0,
            weight_decay=0.0,
            clip_norm=0.0,
            schedule_fn=lambda step: 1.0 + step,
        ),
        steps=3,
    )
    ones = {"w": np.ones(2, np.float32)}
    state = optimizer.init(ones)
    for step in range(3):
        updates, state = optimizer.update(ones, state, ones)
        np.testing.assert_array_equal(updates["w"], [-1.0 - step] * 2)
    with pytest.raises(ConfigError, match=r"schedule_fn: returns float32\[2\]"):
        make_learning_rate(OptimizerConfig(schedule_fn=lambda step: np.ones(2)), 5)
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(schedule_fn=lambda: 1.0, learning_rate=1.0, schedule="wsd", warmup_steps=3)
    where = [problem.where for problem in caught.value.problems]
    assert where == ["learning_rate", "schedule", "schedule_fn", "warmup_steps"]


def test_wsd_schedule_at_its_edges() -> None:
    """The peak holds up to the last fraction of the steps, which then falls as 1 - sqrt to the final rate."""
    values = rates(20, schedule="wsd", warmup_steps=2, decay_fraction=0.2, final_fraction=0.0)
    assert values[:16] == [0.5] + [1.0] * 15
    np.testing.assert_allclose(values[16:], 1 - np.sqrt([0.25, 0.5, 0.75, 1.0]), atol=5e-7)
    assert values[16] == 0.5
    assert values[19] == 0.0


def test_schedule_after_its_end_stays_at_the_final_rate() -> None:
    """Steps past the end, as in a run that goes on, keep the final rate."""
    schedule = make_learning_rate(OptimizerConfig(learning_rate=1.0, final_fraction=0.25), 4)
    assert float(schedule(100)) == 0.25


def test_schedule_takes_a_traced_step_under_strict_promotion() -> None:
    """The schedule is a float32 function of an integer array, also where dtype promotion is strict."""
    with jax.numpy_dtype_promotion("strict"):
        rate = jax.jit(make_learning_rate(OptimizerConfig(schedule="wsd"), 10))(np.int32(3))
    assert rate.dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "steps", "words"),
    [
        ({"warmup_steps": 10}, 10, "(warmup_steps=10) + (decay=0) against (steps=10)"),
        ({"schedule": "wsd", "warmup_steps": 9}, 10, "(warmup_steps=9) + (decay=2)"),
        ({}, 0, "steps: too few"),
    ],
)
def test_schedule_that_does_not_fit_is_refused(
    fields: dict[str, Any], steps: int, words: str
) -> None:
    """Warmup and decay that are longer than the run are an error with the arithmetic."""
    with pytest.raises(ConfigError) as caught:
        make_learning_rate(OptimizerConfig(**fields), steps)
    assert words in str(caught.value)
