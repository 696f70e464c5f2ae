"""Tensor and sequence parallelism: the numbers of one device, and the published memory."""

import dataclasses
import functools

import jax
import optax
import pytest

from spmd.analysis.memory import estimate_memory
from spmd.errors import AnnotationError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.models.decoder import DecoderConfig
from spmd.models.mixtral import PRESETS as MIXTRAL_PRESETS
from spmd.partition_rules.layouts import sequence_parallel
from spmd.partition_rules.llama import LLAMA, LLAMA_REPLICATED_KV
from spmd.plan.plan import make_plan
from spmd.testing import Reference, token_batches
from spmd.training.step import make_train_step
from tests import tiny

BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=2)
MIXTRAL_CONFIG = MIXTRAL_PRESETS["test"]


def parity(config, rules, plain, batches=BATCHES, **sizes):
    """Steps under a rule table on a mesh, against the plain table on one device."""
    model = tiny.model(config)
    ours, theirs = (
        make_plan(tiny.mesh(**axes), table, model, tiny.OPTIMIZER)
        for axes, table in ((sizes, rules), ({}, plain))
    )
    return Reference(theirs, value_and_grad(next_token_loss(model, chunk=24)), batches).compare(
        ours
    )


@pytest.mark.soak
def test_key_value_heads_are_replicated_where_the_table_says_so():
    """Two key/value heads on four devices: an error under the plain table, one device's numbers under the other."""
    with pytest.raises(AnnotationError, match=r"attention_key(.|\n)*2 / \(tensor=4\) = 0.5"):
        parity(tiny.CONFIG, LLAMA, LLAMA, tensor=4)
    result = parity(tiny.CONFIG, LLAMA_REPLICATED_KV, LLAMA, data=2, tensor=4)
    assert result.ok, f"\n{result}"


def test_query_heads_that_do_not_divide_are_refused():
    """Six heads on four devices: their kernel divides, they do not."""
    config = DecoderConfig(vocab=64, d_model=48, layers=1, heads=6, kv_heads=6, d_ff=64)
    with pytest.raises(AnnotationError, match=r"attention_query(.|\n)*6 / \(tensor=4\) = 1.5"):
        parity(config, LLAMA, LLAMA, tensor=4)


SHAPES = {"tokens": "int32", "targets": "int32", "weights": "float32"}


def saved(rules, tensor, layers=4, batch=8, seq=128, d=64):
    """What the layers save for the backward pass with `remat="selective"`: bytes, in those of one residual stream."""
    model = tiny.model(DecoderConfig(64, d, layers, 4, 4, 2 * d))
    mesh = tiny.mesh(tensor=tensor)
    plan = make_plan(mesh, rules, model, optax.sgd(1.0), remat="selective", precision="bf16")
    step = make_train_step(plan, tiny_loss(model))
    arrays = {name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in SHAPES.items()}
    return sum(estimate_memory(step, arrays, "tpu").saved.values()) / (2 * layers * batch * seq * d)


@functools.cache
def tiny_loss(model):
    return next_token_loss(model)


# two norms and their inputs; q, k, v and the output; gate, up and hidden, 2 d wide each
OUTSIDE, INSIDE = 4, 4 + 3 * 2


WHOLE = dataclasses.replace(
    LLAMA,
    activations=dict(LLAMA.activations) | {"residual": dict(LLAMA.activations)["attention_input"]},
)
"""The residual stream whole on every device of `tensor`, as in Megatron-LM's first paper."""


@pytest.mark.parametrize("tensor", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_activations_fall_as_published(tensor):
    """Where the residual stream is split, all are divided, and else those inside of regions (table 2 of the paper)."""
    assert saved(LLAMA, 1) == OUTSIDE + INSIDE
    assert saved(WHOLE, tensor) == OUTSIDE + INSIDE / tensor
    assert (
        saved(LLAMA, tensor)
        == saved(sequence_parallel(LLAMA), tensor)
        == (OUTSIDE + INSIDE) / tensor
    )


@pytest.mark.soak
def test_any_number_of_tokens_is_split():
    """By width, 15 tokens go over two devices; by tokens they are refused."""
    batches = token_batches((8, 15), tiny.CONFIG.vocab, steps=1)
    result = parity(tiny.CONFIG, LLAMA, LLAMA, batches, tensor=2)
    assert result.ok, f"\n{result}"
    with pytest.raises(AnnotationError, match=r"residual(.|\n)*15 / \(tensor=2\) = 7.5"):
        parity(tiny.CONFIG, sequence_parallel(LLAMA), LLAMA, batches, tensor=2)
