"""Llama is the published architecture: its parameter counts, its attention, its numbers in bfloat16."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd import tree
from spmd.errors import ConfigError
from spmd.layers.attention import xla_attention
from spmd.models.decoder import DecoderConfig
from spmd.models.decoder.linear import dense, unembed
from spmd.models.decoder.norms import RMSNorm
from spmd.models.decoder.rotary import rotary_angles, rotate
from spmd.models.llama import PRESETS
from spmd.plan.nnx_model import from_nnx
from tests import tiny
from tests.rounding import assert_close, noise_of

# Number of elements in the published checkpoints' tensors, without the rotary frequencies that some
# of them store. Llama 2: huggingface.co/meta-llama/Llama-2-{7b,13b,70b}-hf; shapes in their
# config.json and in arXiv:2307.09288. Llama 3: huggingface.co/meta-llama/Meta-Llama-3-{8B,70B},
# Llama-3.1-8B and Llama-3.2-1B, and Llama-3.1-405B, whose count follows from table 3 of
# arXiv:2407.21783: 126 layers of 2·16384² + 2·16384·1024 + 3·16384·53248 + 2·16384, and
# 2·128256·16384 + 16384. TinyLlama:
# huggingface.co/TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T; arXiv:2401.02385.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "tinyllama-1b": 1_100_048_384,
}
TOKENS = np.random.default_rng(0).integers(0, tiny.CONFIG.vocab, (2, 12), dtype=np.int32)


def count(config):
    """The number of parameters, without making any."""
    return tree.size(jax.eval_shape(from_nnx(config.build).init, jax.random.key(0)))


@functools.cache
def params(config=tiny.CONFIG):
    return tiny.model(config).init(jax.random.key(0))


@functools.cache
def applied(config=tiny.CONFIG):
    """The model as a compiled function of parameters and tokens."""
    return jax.jit(tiny.model(config).apply)


@functools.cache
def lost(config=tiny.CONFIG):
    """What float32 loses of the model's logits."""
    return noise_of(applied(config), params(config), TOKENS)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_parameter_counts(name):
    """Counted on the model itself and by the closed form of layers, width, heads and vocabulary."""
    c = PRESETS[name]
    found = count(c)
    attention = 2 * c.d_model**2 * (1 + c.kv_heads / c.heads)
    tables = (2 - c.tied) * c.vocab * c.d_model
    assert (
        found
        == c.layers * (attention + 3 * c.d_model * c.d_ff + 2 * c.d_model) + tables + c.d_model
    )
    assert found == PUBLISHED.get(name, found)


def test_every_published_count_belongs_to_a_preset():
    """No count above is left unchecked, and only the small shapes have none."""
    assert set(PRESETS) - set(PUBLISHED) == {"test", "demo"}
    assert set(PUBLISHED) <= set(PRESETS)


@pytest.mark.parametrize("tied", [False, True])
def test_matmul_params_are_all_but_lookup_and_norms(tied):
    """What counts as FLOPs is every parameter but the norms' and, with a head of its own, the embedding's."""
    c = tiny.replaced(tied=tied, layers=3)
    norms = (2 * c.layers + 1) * c.d_model
    lookup = 0 if tied else c.vocab * c.d_model
    assert c.matmul_params == count(c) - norms - lookup


def test_unrolled_layers_count_the_same():
    """A list of layers has the parameters of the stack."""
    assert count(tiny.replaced(stacked=False)) == count(tiny.CONFIG)


def test_a_later_token_changes_no_earlier_logit():
    """Changing one token leaves all logits before it bitwise as they were, and does change its own."""
    before = np.asarray(tiny.model().apply(params(), TOKENS))
    for at in (3, 11):
        changed = TOKENS.copy()
        changed[:, at] = (changed[:, at] + 1) % tiny.CONFIG.vocab
        after = np.asarray(tiny.model().apply(params(), changed))
        np.testing.assert_array_equal(after[:, :at], before[:, :at])
        assert (np.abs(after[:, at:] - before[:, at:]).max(axis=-1) > 1e-4).all()


def test_logits_are_float32_and_one_for_each_token_of_the_vocabulary():
    """Shape and dtype of the output."""
    logits = tiny.model().apply(params(), TOKENS)
    assert (logits.shape, logits.dtype) == ((2, 12, tiny.CONFIG.vocab), jnp.float32)


def naive_attention(query, key, value):
    """Softmax attention written out in NumPy, in float64, one head and one query at a time."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    batch, seq, heads, dim = query.shape
    group = heads // key.shape[2]
    out = np.zeros_like(query)
    for b, t, h in np.ndindex(batch, seq, heads):
        scores = key[b, : t + 1, h // group] @ query[b, t, h] / math.sqrt(dim)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ value[b, : t + 1, h // group]
    return out


@pytest.mark.parametrize("block", [1, 4, 10, 128])
def test_attention_in_blocks_equals_softmax_written_out(block):
    """Whether blocks divide the sequence or not; query heads next to each other share a key/value head."""
    query, key, value = (
        random(2, 10, 4, 8),
        random(2, 10, 2, 8, seed=1),
        random(2, 10, 2, 8, seed=2),
    )
    out = jax.jit(lambda *x: xla_attention(*x, None, block=block))(query, key, value)
    expected = naive_attention(query, key, value)
    assert_close(out, expected, noise_of(naive_attention, query, key, value))


def test_attention_in_blocks_has_the_gradient_of_one_block():
    """Cutting the queries changes no derivative."""
    inputs = random(1, 10, 4, 8), random(1, 10, 2, 8, seed=1), random(1, 10, 2, 8, seed=2)
    weights = random(1, 10, 4, 8, seed=3)

    def gradient(block):
        return jax.jit(jax.grad(lambda x: (xla_attention(*x, None, block=block) * weights).sum()))

    whole = gradient(10)
    assert_close(gradient(4)(inputs), whole(inputs), noise_of(whole, inputs))


def test_grouped_query_attention_is_attention_with_repeated_heads():
    """The model with 2 key/value heads equals one with 4 whose projections repeat them, and not one that tiles them."""
    c = tiny.CONFIG
    full = tiny.replaced(kv_heads=c.heads)

    def with_heads(spread):
        def widen(path, leaf):
            if not path.endswith(("k_proj/kernel", "v_proj/kernel")):
                return leaf
            heads = leaf.reshape(c.layers, c.d_model, c.kv_heads, c.head_width)
            return spread(heads).reshape(c.layers, c.d_model, -1)

        return applied(full)(tree.map_with_path(widen, params()), TOKENS)

    grouped = applied()(params(), TOKENS)
    repeated = with_heads(lambda heads: jnp.repeat(heads, c.heads // c.kv_heads, axis=2))
    assert_close(grouped, repeated, lost())
    tiled = with_heads(lambda heads: jnp.tile(heads, (1, 1, c.heads // c.kv_heads, 1)))
    assert np.abs(grouped - tiled).max() > 1e-2


def test_rotation_keeps_norms_and_sees_only_distances():
    """The product of a rotated query and key is a function of how far apart they are, and not a constant."""
    angles = rotary_angles(np.arange(12)[None], 8, 10_000.0)
    query, key = (jnp.broadcast_to(random(8, seed=seed), (1, 12, 1, 8)) for seed in (0, 1))

    rotated_query, rotated_key = (np.asarray(rotate(x, angles))[0, :, 0] for x in (query, key))
    norms = np.linalg.norm(rotated_query, axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(query[0, :, 0], axis=-1), rtol=1e-6)
    # position 0 is not turned
    np.testing.assert_allclose(rotated_query[0], query[0, 0, 0], rtol=1e-6)
    products = rotated_query @ rotated_key.T
    rounding = noise_of(lambda query, key: query @ key.T, rotated_query, rotated_key)
    for distance in range(-11, 12):
        alike = np.diagonal(products, distance)
        assert_close(alike, np.full_like(alike, alike[0]), rounding)
    assert np.ptp(products) > 0.1


def test_rotation_turns_the_first_pair_by_one_radian_a_token():
    """Frequencies go from 1 down to nearly 1 / theta; pairs are (i, i + dim/2)."""
    cos, sin = rotary_angles(np.arange(5)[None], 4, 100.0)
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 1], [1.0, 0.1], rtol=1e-6)
    x = jnp.zeros((1, 5, 1, 4)).at[..., 0].set(1.0)
    expected = [math.cos(2), 0.0, math.sin(2), 0.0]
    np.testing.assert_allclose(rotate(x, (cos, sin))[0, 2, 0], expected, atol=1e-6)


def test_rms_norm_is_computed_in_float32():
    """From bfloat16 it equals the float32 norm rounded once, which the same formula in bfloat16 does not."""
    norm = RMSNorm(64, eps=1e-5)
    norm.scale[...] = random(64, seed=1)
    x = (random(2, 3, 64) * 30).astype(jnp.bfloat16)
    out = norm(x)
    wide = np.asarray(x, np.float64)
    exact = (
        wide
        / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
        * np.asarray(norm.scale[...], np.float64)
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(out), np.asarray(exact.astype(jnp.float32).astype(jnp.bfloat16))
    )
    narrow = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.bfloat16(1e-5))
    narrow = narrow * norm.scale[...].astype(jnp.bfloat16)[None, None]
    assert (np.asarray(narrow) != np.asarray(out)).any()


def test_dense_equals_a_matmul_and_its_gradient():
    """In float32, values and both gradients are those that JAX derives from `x @ kernel`."""
    x, kernel, weights = random(2, 5, 8), random(8, 6, seed=1), random(2, 5, 6, seed=2)

    def gradients(product):
        return jax.value_and_grad(lambda x, k: (product(x, k) * weights).sum(), argnums=(0, 1))

    ours, reference = gradients(lambda x, k: dense(x, nnx.Param(k))), gradients(jnp.matmul)
    assert_close(ours(x, kernel), reference(x, kernel), noise_of(reference, x, kernel))


def test_the_gradient_of_a_kernel_is_never_rounded_to_bfloat16():
    """From bfloat16 activations it is float32; what autodiff makes of a cast kernel is bfloat16 in disguise."""
    x, kernel, weights = (
        random(2, 5, 8).astype(jnp.bfloat16),
        random(8, 6, seed=1),
        random(2, 5, 6, seed=2),
    )

    def gradient(product):
        def loss(kernel, x):
            y = product(x, kernel)
            assert y.dtype == jnp.bfloat16
            return (y * weights.astype(jnp.bfloat16)).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1))(kernel, x)

    def rounded(a):
        return np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32))

    dkernel, dx = gradient(lambda x, k: dense(x, nnx.Param(k)))
    assert (dkernel.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)
    factors = rounded(x), rounded(weights)
    exact = functools.partial(np.einsum, "bsi,bso->io", dtype=np.float64)
    assert_close(dkernel, exact(*factors), noise_of(exact, *factors))
    assert (rounded(dkernel) != np.asarray(dkernel)).any()
    derived, _ = gradient(lambda x, k: x @ k.astype(jnp.bfloat16))
    np.testing.assert_array_equal(rounded(derived), np.asarray(derived))  # the control


def test_logits_are_wider_than_what_they_are_made_of():
    """They leave a bfloat16 matmul in float32, unrounded."""
    x, kernel = random(2, 5, 8).astype(jnp.bfloat16), random(8, 6, seed=1)
    y = unembed(x, kernel, None, "io")
    factors = [np.asarray(a.astype(jnp.bfloat16), np.float32) for a in (x, kernel)]
    exact = functools.partial(np.matmul, dtype=np.float64)
    assert y.dtype == jnp.float32
    assert_close(y, exact(*factors), noise_of(exact, *factors))


def test_a_tied_head_is_the_embedding():
    """No lm_head; the logits are products with the rows of the table."""
    tied = tiny.replaced(tied=True)
    assert "lm_head" in params()
    assert "lm_head" not in params(tied)
    assert count(tiny.CONFIG) - count(tied) == tied.vocab * tied.d_model
    untied = {**params(tied), "lm_head": {"kernel": params(tied)["embed"]["embedding"].T}}
    assert_close(applied(tied)(params(tied), TOKENS), applied()(untied, TOKENS), lost(tied))


def test_unrolling_the_scan_changes_no_logit():
    """`unroll` is a matter of speed."""
    logits = applied(tiny.replaced(unroll=2))(params(), TOKENS)
    assert_close(logits, applied()(params(), TOKENS), lost())


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"heads": 3, "kv_heads": 3, "d_model": 32}, ["heads"]),
        ({"kv_heads": 3}, ["kv_heads"]),
        ({"d_model": 30, "heads": 4, "kv_heads": 3}, ["heads", "kv_heads"]),
        ({"d_model": 12, "heads": 4, "kv_heads": 2}, ["heads"]),
        ({"heads": 0}, ["heads"]),
        (
            {"heads": 0, "kv_heads": 0, "layers": 0, "vocab": -1},
            ["heads", "kv_heads", "layers", "vocab"],
        ),
        ({"d_model": 0, "d_ff": 0, "unroll": 0}, ["d_model", "d_ff", "unroll"]),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_built_lists_every_reason(fields, wrong):
    """Heads that do not divide, heads of odd width, sizes below one: one error with all of them."""
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**fields)
    assert {problem.where for problem in caught.value.problems} == {
        f"model.{field}" for field in wrong
    }
    assert all(problem.fix for problem in caught.value.problems)


def test_a_bad_shape_shows_the_arithmetic():
    """The division that does not come out is written down."""
    with pytest.raises(ConfigError, match=r"32 / 3 = 10\.67"):
        tiny.replaced(heads=3)
    with pytest.raises(ConfigError, match="heads = 3"):
        DecoderConfig(d_model=12, heads=4, kv_heads=2)
