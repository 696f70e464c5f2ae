"""Norms by module and layer are those of NumPy on the arrays of the step, however they are split."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import spmd
from spmd import tree
from spmd.gradients.losses import next_token_loss
from spmd.partition_rules.llama import LLAMA
from spmd.testing import token_batches
from spmd.training.norms import ModuleNorms
from tests import tiny

(BATCH,) = token_batches((8, 16), tiny.CONFIG.vocab, steps=1)


def test_norms_are_those_of_numpy() -> None:
    """On a mesh, of stacked layers: a number for each layer, and one of modules outside of stacks."""
    plan = spmd.make_plan(tiny.mesh(data=2, fsdp=2, tensor=2), LLAMA, tiny.model(), optax.sgd(0.1))
    norms = ModuleNorms(plan)
    loss = next_token_loss(tiny.model())
    step = spmd.make_train_step(plan, loss, keep_gradients=True, norms=norms)
    before = step.init_state(0)
    params = tree.flatten(jax.device_get(before.params))
    after, metrics = step(before, step.place_batch(BATCH))
    gradients = tree.flatten(jax.device_get(metrics.pop("gradients")))
    changed = tree.flatten(jax.device_get(after.params))
    arrays = metrics["arrays"]
    layers = tiny.CONFIG.layers
    path = "layers/attention/q_proj/kernel"
    module = "attention.q_proj"
    (name,) = [key for key in arrays if key.startswith("gradient_norm") and module in key]
    module = name.removeprefix("gradient_norm.")

    def expected(values: dict[str, Any]) -> np.ndarray:
        return np.sqrt((values[path].astype(np.float64) ** 2).reshape(layers, -1).sum(axis=1))

    updates = {key: changed[key] - params[key] for key in params}
    for kind, values in (("param", params), ("gradient", gradients), ("update", updates)):
        np.testing.assert_allclose(arrays[f"{kind}_norm.{module}"], expected(values), rtol=1e-5)
    head = float(np.linalg.norm(gradients["lm_head/kernel"]))
    assert float(metrics["gradient_norm.lm_head"]) == pytest.approx(head, rel=1e-5)
    squares = 0.0
    for key, value in (metrics | arrays).items():
        if key.startswith("gradient_norm."):
            squares += float((np.asarray(value) ** 2).sum())
    assert float(metrics["gradient_norm"]) == pytest.approx(squares**0.5, rel=1e-5)


def test_without_them_a_step_has_none() -> None:
    plan = spmd.make_plan(tiny.mesh(), LLAMA, tiny.model(), optax.sgd(0.1))
    step = spmd.make_train_step(plan, next_token_loss(tiny.model()))
    _, metrics = jax.eval_shape(step.step_fn, step.abstract_state(), BATCH)
    assert "arrays" not in metrics
    assert [name for name in metrics if "norm" in name] == ["gradient_norm"]
