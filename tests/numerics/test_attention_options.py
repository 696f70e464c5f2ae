"""Sinks, chunks and values of their own width: every kernel and every mesh computes the formula, or refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError
from spmd.layers import attention
from spmd.layers import blockwise_attention as online
from spmd.layers.attention import attend
from spmd.layers.kv_cache import decode, prefill
from spmd.layers.splash_attention import splash_attention
from spmd.layers.zigzag import zigzag, zigzag_batch
from spmd.model_interface import attention_config
from spmd.model_interface.attention_config import AttentionCall, AttentionConfig
from spmd.model_interface.fused_attention import FusedKernel
from spmd.plan.context import override, use_plan
from spmd.sharding.mesh import BATCH_AXES
from tests import tiny
from tests.numerics.test_attention import drawn, errors
from tests.rounding import assert_close, noise_of

SEQ = 128
STARTS = ((0, 37, 90), (0, 5, 63))
"""Where the documents of each row begin."""
CASES = {
    "sinks": {"sinks": True},
    "sinks under a cap": {"sinks": True, "soft_cap": 0.7, "window": 20},
    "chunk": {"chunk": 24},
    "chunk of documents": {"chunk": 24, "packed": True},
    "narrow values": {"value_dim": 4},
    "wide values": {"value_dim": 24, "packed": True},
    "all": {"sinks": True, "chunk": 24, "packed": True, "value_dim": 4, "soft_cap": 0.7},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of keys in these sequences; splash attention without a TPU."""
    monkeypatch.setattr(online, "LARGEST_CHUNK", 16)
    splash = functools.partial(splash_attention, interpret=True)
    monkeypatch.setitem(attention._KERNELS, "splash", splash)


def documents():
    """The id of a document is the position of its first token."""
    ids = np.zeros((2, SEQ), np.int32)
    for row, starts in zip(ids, STARTS, strict=True):
        for start in starts:
            row[start:] = start
    return jnp.asarray(ids)


def inputs(value_dim=8, heads=8, kv_heads=4, dim=8):
    """Queries, keys, values, sinks, and weights of the output."""
    query = drawn(2, SEQ, heads, dim, seed=0)
    key = drawn(2, SEQ, kv_heads, dim, seed=1)
    value = drawn(2, SEQ, kv_heads, value_dim, seed=2)
    return query, key, value, drawn(heads, seed=3), drawn(2, SEQ, heads, value_dim, seed=4)


def formula(
    query, key, value, *, sinks=None, window=None, chunk=None, segments=None, soft_cap=None
):
    """Attention with the whole matrix of scores, and a column of sinks beside it."""
    group = query.shape[2] // key.shape[2]
    key = jnp.repeat(key, group, axis=2)
    value = jnp.repeat(value, group, axis=2)
    position = jnp.arange(query.shape[1])[None]
    starts = jnp.zeros_like(position)
    if segments is not None:
        starts = segments
    distance = position[:, :, None] - position[:, None]
    mask = (distance >= 0) & (starts[:, :, None] == starts[:, None])
    if window is not None:
        mask &= distance < window
    if chunk is not None:
        number = (position - starts) // chunk
        mask &= number[:, :, None] == number[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def with_gradients(function, *, sinks=False, packed=False, **options):
    """A compiled function of the inputs: the output, and all gradients of its weighted sum."""
    if packed:
        options["segments"] = documents()

    def total(query, key, value, logits, weights):
        given = {**options, "sinks": logits} if sinks else options
        out = function(query, key, value, **given)
        return (out * weights).sum(), out

    @jax.jit
    def compute(*arrays):
        arguments = (0, 1, 2, 3) if sinks else (0, 1, 2)
        gradients, out = jax.grad(total, argnums=arguments, has_aux=True)(*arrays)
        return out, *gradients

    return compute


@functools.cache
def expected(case):
    """Output and gradients of the formula, and what float32 loses of them."""
    options = dict(CASES[case])
    arrays = inputs(options.pop("value_dim", 8))
    compute = with_gradients(formula, **options)
    return compute(*arrays), noise_of(compute, *arrays)


def computed(case, **changes):
    """Output and gradients of `attend` with the options of a case."""
    options = {**CASES[case], **changes}
    arrays = inputs(options.pop("value_dim", 8))
    return with_gradients(attend, **options)(*arrays)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["xla", "chunked", "splash"])
def test_a_kernel_computes_an_option_as_the_formula(kernel, case):
    """Output and the gradients of queries, keys, values and sinks, with grouped heads."""
    with override(attention=AttentionConfig(None, kernel)):
        found = computed(case)
    assert_close(found, *expected(case))


@pytest.mark.parametrize(
    ("case", "bug"),
    [
        ("sinks", {"sinks": False}),
        ("chunk", {"chunk": None, "window": 24}),
        ("chunk", {"chunk": 25}),
        ("chunk of documents", {"packed": False}),
    ],
)
def test_control_an_ignored_option_is_caught(case, bug):
    """Without sinks, with a window in place of a chunk, a longer chunk, and chunks counted from the text's start."""
    wrong = computed(case, **bug)
    right, _ = expected(case)
    assert min(errors(wrong, right[: len(wrong)])) > 1e-2


def test_control_sinks_of_other_heads_are_caught():
    """Sinks in the wrong order of heads are noticed, such as after a wrong split."""
    query, key, value, sinks, weights = inputs()
    wrong = with_gradients(formula, sinks=True)(query, key, value, sinks[::-1], weights)
    assert errors(wrong, expected("sinks")[0])[0] > 1e-2


def test_cudnn_pads_values(monkeypatch):
    """The padding around cuDNN's kernel, here around XLA's, leaves output and gradients as they are."""
    real = jax.nn.dot_product_attention

    def without_cudnn(query, key, value, **options):
        assert options.pop("implementation") == "cudnn"
        return real(query, key, value, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)

    def kernel(query, key, value):
        return attention.cudnn_attention(query, key, value, None)

    found = with_gradients(kernel)(*inputs(4))
    assert_close(found, *expected("narrow values"))


@pytest.mark.parametrize("kernel", ["xla", "chunked", "splash"])
def test_sinks_are_float32_beside_16_bit_queries(kernel):
    """Sinks are not rounded, and their gradient is float32, near that of float32 queries."""
    arrays = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in inputs()]
    exact = with_gradients(formula, sinks=True)(*arrays)
    *heads, sinks, weights = arrays
    narrow = [x.astype(jnp.bfloat16) for x in heads]
    with override(attention=AttentionConfig(None, kernel)):
        found = with_gradients(attend, sinks=True)(*narrow, sinks, weights)
    assert found[-1].dtype == jnp.float32
    assert max(errors(found, exact)) < 2**-5


LAYOUTS = [
    {"sequence": 2, "tensor": 2},
    {"sequence": 4, "is_zigzag": False},
    {"sequence": 2, "tensor": 2, "context": "all-to-all"},
    {"tensor": 2, "data": 2, "attention": "splash"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", ["all", "chunk"])
def test_options_on_a_mesh_are_those_of_one_device(layout, case):
    """On a ring in both orders of tokens, on exchanged heads, and on heads over `tensor`, with gradients."""
    sizes = dict(layout)
    kernel = sizes.pop("attention", "auto")
    is_ring = "sequence" in sizes and "context" not in sizes
    is_zigzag = sizes.pop("is_zigzag", is_ring)
    plan = tiny.plan(options=(("context", sizes.pop("context", "ring")),), **sizes)
    settings = dataclasses.replace(plan.attention, kernel=kernel)
    order = np.arange(SEQ)
    if is_zigzag:
        order = zigzag(SEQ, sizes["sequence"])
    options = dict(CASES[case])
    *heads, sinks, weights = inputs(options.pop("value_dim", 8))
    spec = NamedSharding(plan.mesh, P(BATCH_AXES, "sequence"))
    placed = [jax.device_put(x[:, order], spec) for x in (*heads, weights)]

    def split(query, key, value, *, segments=None, **options):
        tokens = {"tokens": jnp.zeros(query.shape[:2], jnp.int32)}
        if segments is not None:
            segments = segments[:, order]
        order_of_plan = zigzag_batch(tokens, position_aware=is_zigzag)
        with use_plan(plan), override(attention=settings), order_of_plan:
            return attend(query, key, value, segments=segments, **options)

    out, *gradients = with_gradients(split, **options)(*placed[:3], sinks, placed[3])
    back = np.argsort(order)
    found = [np.asarray(x)[:, back] for x in (out, *gradients[:3])]
    found += [np.asarray(x) for x in gradients[3:]]
    assert_close(tuple(found), *expected(case))


def decoded(options, bug, tokens=12):
    """Tokens decoded one at a time, after prompts of unequal lengths, and the same ones of whole sequences."""
    query, key, value, sinks, _ = inputs(4)
    lengths = jnp.asarray([5, 9])
    rows = jnp.arange(2)

    def call(x, **changes):
        given = {**options, **changes}
        if given.pop("sinks", False):
            given["sinks"] = sinks
        return attend(*x, **given)

    def step(cache, number):
        at = lengths + number
        token = [x[rows, at][:, None] for x in (query, key, value)]
        out, cache = decode(lambda: call(token, **bug), cache, at)
        return cache, out[:, 0]

    @jax.jit
    def run():
        prompts = [x[:, :9] for x in (query, key, value)]
        _, cache = prefill(lambda: call(prompts), 32, lengths)
        _, outputs = jax.lax.scan(step, cache, jnp.arange(tokens))
        at = lengths[:, None] + jnp.arange(tokens)[None]
        return jnp.moveaxis(outputs, 0, 1), call((query, key, value))[rows[:, None], at]

    return run()


@pytest.mark.parametrize(
    "options", [{"sinks": True, "chunk": 6, "soft_cap": 0.7}, {"sinks": True, "window": 4}, {}]
)
def test_decoding_has_the_options_of_whole_sequences(options):
    """Token by token, over the ends of chunks, with values narrower than keys."""
    one_at_a_time, whole = decoded(options, {})
    np.testing.assert_allclose(one_at_a_time, whole, atol=2e-6)


@pytest.mark.parametrize("bug", [{"sinks": False}, {"chunk": None}])
def test_control_decoding_without_an_option_is_caught(bug):
    """A cache that ignores sinks or chunks is far from whole sequences."""
    one_at_a_time, whole = decoded({"sinks": True, "chunk": 6}, bug)
    assert float(jnp.abs(one_at_a_time - whole).max()) > 1e-2


def rows_of_the_table():
    """Each option in the table of kernels, with its answer for each kernel."""
    lines = attention_config.__doc__.split("| option |")[1].splitlines()
    names = [cell.strip().strip("`") for cell in lines[0].strip("|").split("|")]
    for line in lines[2:]:
        if not line.startswith("|"):
            return
        option, *answers = (cell.strip() for cell in line.strip("|").split("|"))
        yield option, dict(zip(names, answers, strict=False))


CALLS = {
    "`window`": {},
    "`segments`, packed documents": {"packed": True},
    "`soft_cap`": {"capped": True},
    "`causal=False`": {"causal": False},
    "`chunk` below the sequence length": {"chunks": True},
    "`sinks`": {"sinks": True},
    "values narrower than keys": {"value_dim": 32},
    "values wider than keys": {"value_dim": 128},
}


def test_the_table_of_options_is_what_kernels_do():
    """An option that a kernel lacks is refused if the kernel is named, and never chosen by `auto`; all others run."""
    rows = dict(rows_of_the_table())
    assert list(rows) == list(CALLS)
    for option, answers in rows.items():
        assert list(answers) == ["xla", "chunked", "cudnn", "splash"]
        call = AttentionCall(8192, 64, "bfloat16", **CALLS[option])
        for kernel, answer in answers.items():
            named = AttentionConfig(None, kernel)
            fused = AttentionConfig(fused=FusedKernel(kernel))
            if answer.startswith("yes"):
                assert named.choose(call) == fused.choose(call) == kernel
                continue
            with pytest.raises(ConfigError, match=f'(?s)attention {kernel}: .*fix: attention "au'):
                named.choose(call)
            assert answers[fused.choose(call)] == "yes"


def test_a_chunk_as_long_as_the_sequence_needs_no_kernel_with_chunks():
    """It masks nothing, so the program is that without chunks."""
    arrays = inputs()[:3]
    plain = str(jax.make_jaxpr(attend)(*arrays))
    assert str(jax.make_jaxpr(functools.partial(attend, chunk=SEQ))(*arrays)) == plain
    assert str(jax.make_jaxpr(functools.partial(attend, chunk=SEQ - 1))(*arrays)) != plain


def test_xla_computes_no_scores_outside_of_chunks():
    """Blocks of queries take the keys of a chunk's length before them, and no more."""
    x = jnp.ones((1, 1024, 1, 8))
    text = str(jax.make_jaxpr(functools.partial(attend, chunk=128))(x, x, x))
    assert "128,255]" in text
    assert "128,1024]" not in text
