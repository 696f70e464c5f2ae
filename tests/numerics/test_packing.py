"""Packed documents: each target once, little padding, and the losses and gradients of documents on their own."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd.data.loader import load_corpus
from spmd.data.packing import PackedDocuments
from spmd.errors import DataError
from spmd.gradients.losses import next_token_loss
from spmd.models.decoder import decoder_rules
from spmd.models.gpt2 import gpt2
from spmd.partition_rules.llama import LLAMA
from spmd.plan.context import use_plan
from tests import tiny

SEQ = 32
LENGTHS = (9, 25, 17, 33, 5, 12, 70, 8, 25, 9)
"""Of documents: some end where a device's part of the sequence ends, one is longer than two rows."""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60).filter(lambda lengths: max(lengths) > 1)
)
def test_every_target_is_there_once(lengths):
    """With the token before it, in a segment that begins at its first token; rows hold no more than they can."""
    ends = np.cumsum(lengths)
    packed = PackedDocuments(np.arange(ends[-1]), ends, sequence=16)
    rows = packed.rows(np.arange(len(packed)))
    real = rows["weights"] > 0
    firsts = np.concatenate([[0], ends[:-1]])
    assert sorted(rows["targets"][real]) == sorted(set(range(ends[-1])) - set(firsts))
    assert (rows["targets"][real] == rows["tokens"][real] + 1).all()
    at = np.broadcast_to(np.arange(16), real.shape)
    # first token of each token's segment
    begins = np.take_along_axis(rows["tokens"], rows["segments"], axis=1)
    assert (rows["tokens"][real] - begins[real] == (at - rows["segments"])[real]).all()
    document = np.searchsorted(ends, rows["tokens"], side="right")
    assert (document == np.searchsorted(ends, begins, side="right"))[real].all()
    # no two rows are half empty
    assert len(packed) * 16 < sum(max(n - 1, 0) for n in lengths) * 2 + 16
    assert 0 <= packed.wasted < 1


def test_documents_of_one_token_have_no_rows():
    """They have no target."""
    with pytest.raises(DataError, match="no target"):
        PackedDocuments(np.zeros(3), np.array([1, 2, 3]), 8)


def documents():
    """Tokens and ends."""
    ends = np.cumsum(LENGTHS)
    return np.random.default_rng(0).integers(1, 64, ends[-1]), ends


def packed_batch():
    """All documents in four rows or more, a number that four devices share."""
    packed = PackedDocuments(*documents(), SEQ)
    # at edges of eight or sixteen
    assert {9, 8, 24} & set(np.unique(packed.rows(np.arange(len(packed)))["segments"]))
    batch = packed.rows(np.arange(len(packed)))
    return {name: np.pad(x, ((0, -len(packed) % 4), (0, 0))) for name, x in batch.items()}


def separate_batch():
    """Each piece of a document alone in its row."""
    tokens, ends = documents()
    rows = []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        for start in range(first, end - 1, SEQ):
            ids = tokens[start : min(start + SEQ + 1, end)]
            pad = (0, SEQ + 1 - len(ids))
            rows.append((np.pad(ids, pad), np.pad(np.ones(len(ids) - 1), (0, SEQ + 1 - len(ids)))))
    ids, weights = (np.stack(x) for x in zip(*rows, strict=True))
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "weights": weights.astype(np.float32),
    }


GPT2 = gpt2(64, 32, 1, heads=4, d_ff=64, context=SEQ)
MODELS = {
    "llama": (tiny.replaced(layers=1, heads=4, kv_heads=4), LLAMA),
    "gpt2": (GPT2, decoder_rules(GPT2)),
}


@functools.cache
def separate(name):
    """Model, parameters, and loss and gradients of the documents on their own, on one device."""
    model = spmd.from_nnx(MODELS[name][0].build)
    params = model.init(jax.random.key(0))
    return (
        model,
        params,
        jax.jit(jax.value_and_grad(mean_loss), static_argnums=1)(params, model, separate_batch()),
    )


def mean_loss(params, model, batch):
    """Loss of a target."""
    sums, _ = next_token_loss(model)(params, {}, batch, jax.random.key(1))
    return sums["loss"] / sums["weight"]


def differences(name, batch, **options):
    """Largest differences of a packed batch's loss and gradients on a mesh, relative to the largest gradient."""
    model, params, (loss, gradients) = separate(name)
    sizes = {axis: options.pop(axis) for axis in ("data", "tensor", "sequence") if axis in options}
    mesh = spmd.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    plan = spmd.make_plan(mesh, MODELS[name][1], model, optax.sgd(0.1), **options)
    with use_plan(plan):
        found, packed = jax.jit(jax.value_and_grad(mean_loss), static_argnums=1)(
            params, model, batch
        )
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
    pairs = zip(
        jax.tree.leaves(jax.device_get(packed)),
        jax.tree.leaves(jax.device_get(gradients)),
        strict=True,
    )
    off = max(float(np.abs(a - b).max()) for a, b in pairs)
    return abs(float(found) - float(loss)) / float(loss), off / largest


LAYOUTS = {
    "xla": {"data": 1, "attention": "xla"},
    "chunked": {"data": 2, "attention": "chunked"},
    "ring": {"sequence": 4, "context": "ring"},
    "all-to-all": {"sequence": 2, "tensor": 2, "context": "all-to-all"},
}


COVERED = {("llama", "chunked"), ("gpt2", "ring")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in COVERED else pytest.mark.soak)
    for pair in itertools.product(MODELS, LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_losses_and_gradients_are_those_of_separate_documents(name, layout):
    """To 1e-5, whatever the kernel, with borders of documents at the borders of devices."""
    assert max(differences(name, packed_batch(), **LAYOUTS[layout])) < 1e-5


@pytest.mark.parametrize(("name", "lost"), [("llama", "documents"), ("gpt2", "positions")])
def test_control_documents_that_see_one_another_differ(name, lost):
    """Without segments; or with such that only say which document a token is of, for learned positions."""
    batch = packed_batch()
    if lost == "documents":
        del batch["segments"]
    else:
        batch["segments"] = batch["segments"] // 2
    assert max(differences(name, batch, data=1)) > 1e-3


@pytest.mark.soak
def test_the_demo_corpus_wastes_less_than_two_percent():
    """Cut into its own documents, at several lengths."""
    corpus = load_corpus(spmd.DataConfig())
    for sequence in (256, 1024, 4096):
        assert PackedDocuments(corpus.train, corpus.train_ends, sequence).wasted < 0.02
