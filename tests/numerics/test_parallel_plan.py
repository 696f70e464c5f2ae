"""A port trains under the table of a transformers plan as on one device."""

import functools

import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.gradients.base import value_and_grad
from spmd.testing import Reference, scale_gradients, token_batches
from tests import tiny
from tests.parallel_plans import QWEN3_MOE, VOCAB, Port, moe_names, shapes_of

OPTIONS = {"layers": 1, "moe": True, "qk_norms": True, "bias": True}
ROWS = [("embed_tokens/embedding", P("tensor", "fsdp")), ("lm_head/kernel", P("fsdp", "tensor"))]


@functools.cache
def model():
    return spmd.from_nnx(lambda rngs: Port(rngs, **OPTIONS))


@functools.cache
def grad_fn():
    return value_and_grad(spmd.next_token_loss(model()))


@functools.cache
def rules():
    return spmd.rules_from_transformers(
        QWEN3_MOE, shapes_of(**OPTIONS), names=moe_names, rows=ROWS, report=str
    )


def plan(**sizes):
    return spmd.make_plan(tiny.mesh(**sizes), rules(), model(), optax.sgd(1e-2))


@functools.cache
def reference():
    return Reference(plan(), grad_fn(), token_batches((4, 4), VOCAB, steps=1))


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "tensor": 2, "expert": 2}, marks=pytest.mark.soak),
    ],
    ids=["fsdp2-tensor2", "fsdp2-tensor2-expert2"],
)
def test_a_step_under_the_table_equals_one_device(sizes):
    """Attention, norms of queries and keys, biases and experts, each split as the plan says."""
    result = reference().compare(plan(**sizes))
    assert result.ok, result


def test_control_a_wrong_gradient_is_caught():
    """The comparison of the test above can fail."""
    assert not reference().compare(plan(fsdp=2, tensor=2), scale_gradients(grad_fn(), 1.01)).ok
