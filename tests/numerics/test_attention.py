"""Every kernel of attention is the same attention, and the plan says which one it is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.layers import blockwise_attention as online
from spmd.layers.attention import attend, chunked_attention, xla_attention
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import chunk_size, unmasked_pairs
from spmd.layers.splash_attention import splash_attention
from spmd.model_interface.attention_config import (
    CHUNKED_FROM,
    KERNELS,
    AttentionCall,
    AttentionConfig,
    make_attention_config,
)
from spmd.model_interface.fused_attention import FUSED, FusedKernel
from spmd.partition_rules.llama import LLAMA
from spmd.plan.context import use_plan
from spmd.run.config import TrainConfig
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.training.step import make_train_step
from tests import tiny
from tests.rounding import assert_close, noise_of


def with_options(kernel):
    """A kernel that takes its options by name."""

    def run(query, key, value, segments, *, sinks=None, **options):
        return kernel(query, key, value, segments, sinks, AttentionOptions(**options))

    return run


HERE = {
    "xla": with_options(xla_attention),
    "chunked": with_options(chunked_attention),
    "splash": with_options(functools.partial(splash_attention, interpret=True)),
}
"""The kernels that this machine can run; cuDNN's needs a GPU."""
MASKS = {
    "causal": (None, False),
    "window": (70, False),
    "documents": (None, True),
    "both": (70, True),
}


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arrays(seq, *, batch=2, heads=4, kv_heads=2, dim=8):
    """Queries, keys, values, what the output is weighed with, and documents of uneven lengths."""
    counts = (heads, kv_heads, kv_heads, heads)
    made = [drawn(batch, seq, count, dim, seed=seed) for seed, count in enumerate(counts)]
    documents = np.sort(np.random.default_rng(9).integers(0, 4, (batch, seq)), axis=1)
    return *made, jnp.asarray(documents, jnp.int32)


def reference(query, key, value, segments, *, window=None, scale=None, soft_cap=None, causal=True):
    """The formula of attention with the whole matrix of scores."""
    seq, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    distance = jnp.arange(seq)[:, None] - jnp.arange(seq)[None]
    seen = ((distance >= 0) | (not causal))[None] & (distance < (window or seq))[None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (scale or query.shape[-1] ** -0.5)
    scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@functools.cache
def with_gradients(kernel, seq, packed, **options):
    """A compiled function of queries, keys, values and weights: the output, and the gradients of its weighted sum."""
    *_, documents = arrays(seq)
    segments = {"segments": documents if packed else None}

    def total(query, key, value, weights):
        out = kernel(query, key, value, **segments, **options)
        return (out * weights).sum(), out

    @jax.jit
    def compute(*inputs):
        gradients, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
        return out, *gradients

    return compute


@functools.cache
def computed(kernel, seq, packed, **options):
    """Output and gradients of a kernel; computed once."""
    *inputs, _ = arrays(seq)
    return with_gradients(kernel, seq, packed, **options)(*inputs)


@functools.cache
def lost(seq, packed, **options):
    """What float32 loses of the output and gradients of the formula."""
    *inputs, _ = arrays(seq)
    return noise_of(with_gradients(reference, seq, packed, **options), *inputs)


def assert_attention(kernel, seq, packed, **options):
    """Asserts that a kernel gives what the formula gives."""
    expected = computed(reference, seq, packed, **options)
    assert_close(computed(kernel, seq, packed, **options), expected, lost(seq, packed, **options))


def errors(ours, theirs):
    """How far each result is from another, relative to its largest value."""
    return [
        float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(ours, theirs, strict=True)
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", HERE)
def test_a_kernel_is_attention(kernel, mask, monkeypatch):
    """Output and gradients are those of the formula, with grouped heads, under every mask."""
    monkeypatch.setattr(online, "LARGEST_CHUNK", 64)
    window, packed = MASKS[mask]
    assert_attention(HERE[kernel], 256, packed, window=window)


@pytest.mark.parametrize("kernel", HERE)
def test_a_soft_cap_is_that_of_the_formula(kernel, monkeypatch):
    """Output and gradients with scores below a cap, in a window and with packed documents; the cap does matter."""
    monkeypatch.setattr(online, "LARGEST_CHUNK", 64)
    assert_attention(HERE[kernel], 256, True, window=70, soft_cap=0.7)
    found = computed(HERE[kernel], 256, True, window=70, soft_cap=0.7)
    assert min(errors(found, computed(reference, 256, True, window=70))) > 1e-2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["xla", "splash"])
def test_all_tokens_may_see_each_other(kernel, packed):
    """Without causality output and gradients are those of the formula, in one document or several."""
    assert_attention(HERE[kernel], 256, packed, causal=False)
    found = computed(HERE[kernel], 256, packed, causal=False)
    assert min(errors(found, computed(reference, 256, packed, window=None))) > 1e-2


def test_a_scale_takes_the_place_of_the_usual_one():
    """Scores are products times the scale, and no longer divided by the root of the head's width."""
    assert_attention(attend, 256, True, scale=0.2, soft_cap=0.7)
    found = computed(attend, 256, True, scale=0.2, soft_cap=0.7)
    assert min(errors(found, computed(reference, 256, True, soft_cap=0.7))) > 1e-2


def test_a_sequence_that_is_no_multiple_of_a_chunk_is_padded():
    """600 tokens are computed as 640, and the last 40 are seen by no one."""
    assert_attention(HERE["chunked"], 600, True, window=70)


@pytest.mark.parametrize("bug", ["window", "documents", "grouping"])
def test_control_a_wrong_mask_is_caught(bug):
    """A window one token longer, documents that see each other, and heads grouped the other way are noticed."""

    def wrong(query, key, value, segments, *, window=None):
        if bug == "grouping":
            key, value = (
                jnp.tile(x, (1, 1, query.shape[2] // x.shape[2], 1)) for x in (key, value)
            )
        return HERE["xla"](
            query,
            key,
            value,
            None if bug == "documents" else segments,
            window=window + (bug == "window"),
        )

    expected = computed(reference, 256, True, window=70)
    assert max(errors(computed(wrong, 256, True, window=70), expected)) > 1e-2


@pytest.mark.parametrize("kernel", HERE)
def test_softmax_is_taken_in_float32(kernel):
    """From 16-bit floats the output is that of float32 up to its own rounding, and has the dtype of the queries."""
    query, key, value, _, _ = arrays(256, batch=1)
    exact = reference(
        *(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (query, key, value)), None
    )
    for dtype, rounding in ((jnp.bfloat16, 2**-8), (jnp.float16, 2**-10)):
        out = HERE[kernel](
            *(x.astype(jnp.bfloat16).astype(dtype) for x in (query, key, value)), None
        )
        assert out.dtype == dtype
        assert float(jnp.abs(out.astype(jnp.float32) - exact).max()) < 4 * rounding


def test_hidden_pairs_of_chunks_are_not_visited():
    """Half of all pairs under causality, a band under a window; what a window hides costs nothing."""
    starts = range(0, 64 * 16, 64)
    assert len(unmasked_pairs(starts, starts, 64, None)) == 16 * 17 // 2
    assert len(unmasked_pairs(starts, starts, 64, 65)) == 16 + 15
    assert len(unmasked_pairs(starts, starts, 64, 66)) == 16 + 15 + 14
    assert len(unmasked_pairs(starts, starts, 64, 1)) == 16


def test_chunks_divide_what_they_cut():
    """A chunk is at most 512 tokens, whatever the length."""
    assert [chunk_size(length) for length in (1, 509, 512, 4096, 1536)] == [1, 509, 512, 512, 512]


def test_the_choice_follows_devices_and_shapes():
    """Splash on TPUs and cuDNN on GPUs where the shapes fit them, else XLA, in chunks from some length on."""

    def choose(platform, seq, head_dim=64, dtype="bfloat16", **options):
        there = AttentionConfig(fused=FusedKernel(FUSED.get(platform, "")))
        return there.choose(AttentionCall(seq, head_dim, dtype, **options))

    for platform in ("", "cpu", "rocm", "cuda", "tpu"):
        assert choose(platform, CHUNKED_FROM - 1, dtype="float32") == "xla"
    assert choose("cpu", CHUNKED_FROM) == choose("rocm", CHUNKED_FROM) == "chunked"
    assert choose("tpu", 1024) == choose("tpu", 8192, dtype="float32") == "splash"
    assert choose("tpu", 8200) == "chunked"
    assert choose("cuda", 8192) == "cudnn"
    assert {
        choose("cuda", 8192, 256),
        choose("cuda", 8192, packed=True),
        choose("cuda", 8192, dtype="float32"),
    } == {"chunked"}
    assert choose("cuda", 8192, capped=True) == "chunked"
    assert choose("cuda", 8192, causal=False) == "cudnn"
    assert choose("tpu", 8192, capped=True) == choose("tpu", 8192, causal=False) == "splash"
    assert choose("cpu", 8192, causal=False) == choose("tpu", 197, causal=False) == "xla"


def test_the_choice_is_in_the_heading_of_a_plan():
    """Whoever reads a plan reads which kernel computes attention, and what a split sequence does."""

    def heading(**sizes):
        options = {name: sizes.pop(name) for name in ("attention", "context") if name in sizes}
        return (
            str(tiny.plan(options=tuple(options.items()), **sizes))
            .splitlines()[0]
            .split("attention ")[1]
        )

    assert heading() == f"xla, chunked from {CHUNKED_FROM}"
    assert heading(attention="chunked", fsdp=2) == "chunked"
    assert heading(sequence=2) == "chunked   context ring"
    assert (
        heading(sequence=2, context="all-to-all")
        == f"xla, chunked from {CHUNKED_FROM}   context all-to-all"
    )


def test_the_kernel_that_a_plan_names_is_the_one_that_runs():
    """Two plans that differ in the kernel alone trace different programs: chunks are a loop, XLA's form has none."""
    x = jnp.ones((1, 16, 2, 8))

    def primitives(kernel):
        with use_plan(tiny.plan(options=(("attention", kernel),))):
            return str(jax.make_jaxpr(attend)(x, x, x))

    assert "while[" in primitives("chunked")
    assert "while[" not in primitives("xla")


@pytest.mark.parametrize(
    ("kernel", "context", "said"),
    [
        ("flash", "ring", r'did you mean "splash"'),
        ("auto", "rings", r'did you mean "ring"'),
        ("cudnn", "ring", r"needs an NVIDIA GPU, and the mesh is of cpu devices"),
        ("splash", "ring", r"needs a TPU, and the mesh is of cpu devices"),
    ],
)
def test_a_kernel_that_cannot_be_is_refused(kernel, context, said):
    """Unknown names and kernels of other devices are errors of the plan."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        tiny.plan(options=(("attention", kernel), ("context", context)))


def test_all_that_is_wrong_is_said_at_once():
    """Two unknown names are two problems; a config finds them by itself."""
    for make in (
        lambda: make_attention_config(abstract_mesh(MeshShape()), "xlaa", "rings"),
        lambda: TrainConfig(tiny.CONFIG, LLAMA, attention="xlaa", context="rings"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert [problem.where for problem in caught.value.problems] == ["attention", "context"]


@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {"chunked"}))
def test_a_ring_takes_no_other_kernel(kernel):
    """A ring computes in chunks; another kernel beside it would be ignored, so it is refused."""
    with pytest.raises(ConfigError, match="context ring needs chunked"):
        make_attention_config(abstract_mesh(MeshShape(sequence=2)), kernel, "ring")


def test_shapes_that_a_named_kernel_cannot_do_are_refused():
    """The arithmetic is written down, when the model is traced."""
    with pytest.raises(ConfigError, match=r"200 / 128 = 1\.562"):
        AttentionConfig(None, "splash").choose(AttentionCall(200, 64, "bfloat16"))
    call = AttentionCall(200, 36, "float32", packed=True, capped=True)
    with pytest.raises(ConfigError) as caught:
        AttentionConfig(None, "cudnn").choose(call)
    assert len(caught.value.problems) == 4


def test_who_sees_only_what_is_before_refuses_to_see_everything():
    """Chunks and rings are causal; where a model is not, they say so, with what is to be done."""
    with pytest.raises(
        ConfigError, match=r'attention chunked: is causal\n.*fix: attention "auto" or "xla"'
    ):
        AttentionConfig(None, "chunked").choose(AttentionCall(256, 64, "bfloat16", causal=False))
    ring = make_attention_config(abstract_mesh(MeshShape(sequence=2)), "auto", "ring")
    with pytest.raises(ConfigError, match=r'is a ring, whose .*\n.*fix: "all-to-all"'):
        ring.choose(AttentionCall(256, 64, "bfloat16", causal=False))


@pytest.mark.parametrize("kernel", ["xla", "chunked"])
def test_selective_remat_acts_on_every_kernel(kernel):
    """XLA's scores are recomputed; chunks recompute theirs anyway, and are no policy that acts on nothing."""
    plan = tiny.plan(options=(("attention", kernel), ("remat", "selective")))
    ids = jax.ShapeDtypeStruct((2, 16), "int32")
    batch = {"tokens": ids, "targets": ids, "weights": jax.ShapeDtypeStruct((2, 16), "float32")}
    make_train_step(plan, tiny.loss_fn()).trace(batch)


def test_a_window_in_the_model_hides_what_is_further_back():
    """With two layers and a window of 3, a logit depends on the last five tokens and no other."""
    config = tiny.replaced(window=3)
    params = tiny.model(config).init(jax.random.key(0))
    tokens = jnp.arange(12)[None]
    before = tiny.model(config).apply(params, tokens)
    after = tiny.model(config).apply(params, tokens.at[0, 4].set(40))
    changed = np.abs(np.asarray(after - before)).max(axis=(0, 2)) > 0
    assert changed.tolist() == [4 <= position <= 8 for position in range(12)]


def test_a_document_is_computed_as_if_alone():
    """Logits of the second of two packed documents are those of the document by itself."""
    params = tiny.model().init(jax.random.key(0))
    tokens = jnp.arange(12)[None]
    apply = jax.jit(tiny.model().apply)
    packed = apply(params, tokens, jnp.asarray([[0] * 5 + [1] * 7]))
    alone = apply(params, tokens[:, 5:])
    assert_close(packed[:, 5:], alone, noise_of(apply, params, tokens[:, 5:]))
    assert np.abs(apply(params, tokens)[:, 5:] - alone).max() > 1e-3


def test_options_that_mean_nothing_are_refused():
    """Every token sees itself, so a window is of one at least; scales and caps are positive; all of it at once."""
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ConfigError) as caught:
        attend(x, x, x, window=0, scale=0.0, soft_cap=-1.0)
    assert [problem.where for problem in caught.value.problems] == ["scale", "soft_cap", "window"]
    with pytest.raises(ConfigError) as caught:
        attend(x, x, x, window=3, chunk=0, causal=False)
    assert [problem.where for problem in caught.value.problems] == [
        "chunk",
        "chunk",
        "chunk",
        "window",
    ]
    with pytest.raises(ConfigError, match=r"sinks: have the shape \(3,\)\n.*: \(2,\)"):
        attend(x, x, x, sinks=jnp.zeros(3))
