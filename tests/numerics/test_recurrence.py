"""Recurrent token mixers equal their recurrences, token by token in float64, forward and backward."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError
from spmd.layers.gated_delta_rule import gated_delta_rule, gated_delta_step, l2_normalized
from spmd.layers.recurrence import chunk_decay
from spmd.layers.short_convolution import short_convolution, short_convolution_step
from spmd.layers.state_space import state_space_scan, state_space_step

BATCH, HEADS, SHARED, DIM, WIDE = 2, 4, 2, 8, 6
SEQ = 37
"""No multiple of any chunk here."""


# The recurrences, written for NumPy and for JAX.


def delta_loop(xp, query, key, value, log_decay, beta, state):
    """The gated delta rule, token by token."""
    repeats = value.shape[2] // key.shape[2]
    query, key = xp.repeat(query, repeats, axis=2), xp.repeat(key, repeats, axis=2)
    out = []
    for t in range(value.shape[1]):
        state = state * xp.exp(log_decay[:, t])[..., None, None]
        recalled = xp.einsum("bhd,bhdv->bhv", key[:, t], state)
        error = beta[:, t][..., None] * (value[:, t] - recalled)
        state = state + xp.einsum("bhd,bhv->bhdv", key[:, t], error)
        out.append(xp.einsum("bhd,bhdv->bhv", query[:, t], state) * query.shape[-1] ** -0.5)
    return xp.stack(out, axis=1), state


def state_space_loop(xp, x, dt, a, b, c, d, state):
    """The recurrence of Mamba 2, token by token."""
    repeats = x.shape[2] // b.shape[2]
    b, c = xp.repeat(b, repeats, axis=2), xp.repeat(c, repeats, axis=2)
    out = []
    for t in range(x.shape[1]):
        written = xp.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        state = state * xp.exp(dt[:, t] * a[None])[..., None, None] + written
        read = xp.einsum("bhpn,bhn->bhp", state, c[:, t])
        out.append(read + d[None, :, None] * x[:, t])
    return xp.stack(out, axis=1), state


def convolution_loop(xp, x, kernel, bias, state):
    """The convolution, token by token, with SiLU."""
    out = []
    for t in range(x.shape[1]):
        window = xp.concatenate([state, x[:, t : t + 1]], axis=1)
        total = (window * kernel[None]).sum(axis=1) + bias[None]
        out.append(total / (1 + xp.exp(-total)))
        state = window[:, 1:]
    return xp.stack(out, axis=1), state


# Each mixer: its arguments, the chunked form, the loop and the form of one token.


def delta_arrays(rng, seq=SEQ, decay=1.0):
    key = rng.normal(size=(BATCH, seq, SHARED, DIM))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    return {
        "query": rng.normal(size=(BATCH, seq, SHARED, DIM)),
        "key": key,
        "value": rng.normal(size=(BATCH, seq, HEADS, WIDE)),
        "log_decay": -decay * rng.exponential(size=(BATCH, seq, HEADS)),
        "beta": rng.uniform(size=(BATCH, seq, HEADS)),
        "state": rng.normal(size=(BATCH, HEADS, DIM, WIDE)),
    }


def state_space_arrays(rng, seq=SEQ, decay=1.0):
    return {
        "x": rng.normal(size=(BATCH, seq, HEADS, WIDE)),
        "dt": rng.exponential(size=(BATCH, seq, HEADS)),
        "a": -decay * rng.exponential(size=HEADS),
        "b": rng.normal(size=(BATCH, seq, SHARED, DIM)) * DIM**-0.5,
        "c": rng.normal(size=(BATCH, seq, SHARED, DIM)),
        "d": rng.normal(size=HEADS),
        "state": rng.normal(size=(BATCH, HEADS, WIDE, DIM)),
    }


def convolution_arrays(rng, seq=SEQ, decay=1.0):
    return {
        "x": rng.normal(size=(BATCH, seq, HEADS * DIM)),
        "kernel": rng.normal(size=(4, HEADS * DIM)),
        "bias": rng.normal(size=HEADS * DIM),
        "state": rng.normal(size=(BATCH, 3, HEADS * DIM)),
    }


def silu_convolution(*, chunk=None, **arrays):
    return short_convolution(**arrays, activation=jax.nn.silu)


MIXERS = {
    "delta": (delta_arrays, gated_delta_rule, delta_loop, gated_delta_step),
    "state space": (state_space_arrays, state_space_scan, state_space_loop, state_space_step),
    "convolution": (
        convolution_arrays,
        silu_convolution,
        convolution_loop,
        functools.partial(short_convolution_step, activation=jax.nn.silu),
    ),
}
RECURRENT = ("delta", "state space")
PER_TOKEN = {"query", "key", "value", "log_decay", "beta", "x", "dt", "b", "c"}
every_mixer = pytest.mark.parametrize("name", MIXERS)
recurrent = pytest.mark.parametrize("name", RECURRENT)


def narrow(arrays):
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


def tokens_of(arrays, part):
    """The arguments for some tokens."""
    return {name: x[:, part] if name in PER_TOKEN else x for name, x in arrays.items()}


def assert_equal(found, expected, tolerance=1e-5):
    for x, y in zip(found, expected, strict=True):
        assert np.isfinite(np.asarray(x)).all()
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def largest_difference(found, expected):
    return max(np.abs(x - y).max() for x, y in zip(found, expected, strict=True))


@every_mixer
def test_equals_the_recurrence_in_float64_for_each_size_of_chunk(name):
    """From an initial state to the final one, whether chunks divide the sequence or not."""
    make, mixer, loop, _ = MIXERS[name]
    arrays = make(np.random.default_rng(0))
    expected = loop(np, **arrays)
    for chunk in (1, 16, 64):
        assert_equal(jax.jit(functools.partial(mixer, chunk=chunk))(**narrow(arrays)), expected)
    control = {**arrays, "state": np.zeros_like(arrays["state"])}
    assert largest_difference(jax.jit(mixer)(**narrow(control)), expected) > 0.01


def weighted(outputs, weights):
    return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))


@every_mixer
@pytest.mark.parametrize("decay", [1.0, 50.0])
def test_gradients_equal_those_of_the_recurrence_in_float64(name, decay):
    """Of all arguments, for decays of −1 and −50 a token, which overflow unless masked before exp."""
    make, mixer, loop, _ = MIXERS[name]
    rng = np.random.default_rng(1)
    arrays = make(rng, seq=12, decay=decay)
    weights = [rng.normal(size=x.shape) for x in loop(np, **arrays)]
    with jax.enable_x64(True):
        wanted = jax.jit(jax.grad(lambda arrays: weighted(loop(jnp, **arrays), weights)))(arrays)
        wanted = {name: np.asarray(x) for name, x in wanted.items()}
    weights = [jnp.asarray(w, jnp.float32) for w in weights]
    narrowed = narrow(arrays)
    found = jax.jit(jax.grad(lambda arrays: weighted(mixer(**arrays, chunk=8), weights)))(narrowed)
    for part, gradient in found.items():
        assert np.isfinite(gradient).all(), part
        scale = np.abs(wanted[part]).max()
        np.testing.assert_allclose(
            gradient, wanted[part], rtol=1e-4, atol=1e-4 * scale + 1e-12, err_msg=part
        )


@every_mixer
def test_one_token_after_another_equals_the_sequence(name):
    """The form for decoding, from the state after a prefix of the chunked form."""
    make, mixer, _, step = MIXERS[name]
    arrays = narrow(make(np.random.default_rng(2), seq=9))
    expected = jax.jit(mixer)(**arrays)
    _, state = jax.jit(mixer)(**tokens_of(arrays, slice(0, 5)))
    out, step = [], jax.jit(step)
    for t in range(5, 9):
        latest, state = step(**{**tokens_of(arrays, t), "state": state})
        out.append(latest)
    assert_equal((jnp.stack(out, axis=1), state), (expected[0][:, 5:], expected[1]))


def padded(arrays, valid):
    """The arguments with NaN in place of padded tokens."""
    found = {}
    for name, x in arrays.items():
        if name in PER_TOKEN:
            keep = np.expand_dims(valid, tuple(range(2, x.ndim)))
            found[name] = jnp.where(keep, x, jnp.nan)
        else:
            found[name] = x
    return found


VALID = np.ones((BATCH, SEQ), bool)
VALID[0, 20:] = False  # behind a prompt
VALID[1, :5] = VALID[1, 9:12] = False  # before it, and in it


def row_of(arrays, row):
    """The arguments of one row."""
    batched = PER_TOKEN | {"state"}
    return {name: x[row : row + 1] if name in batched else x for name, x in arrays.items()}


@every_mixer
def test_padding_leaves_the_state_and_other_outputs_as_they_are(name):
    """Padding behind, before and in a prompt, whatever it holds; gradients have no NaN of it."""
    make, mixer, _, _ = MIXERS[name]
    arrays = narrow(make(np.random.default_rng(3)))
    run = jax.jit(functools.partial(mixer, chunk=16))
    found, state = run(**padded(arrays, VALID), valid=VALID)
    _, unmasked = run(**arrays)
    for row in range(BATCH):
        kept = np.flatnonzero(VALID[row])
        out, final = jax.jit(mixer)(**tokens_of(row_of(arrays, row), kept))
        assert_equal((found[row, kept], state[row]), (out[0], final[0]))
        assert not found[row, ~VALID[row]].any()
    assert np.abs(unmasked[0] - state[0]).max() > 0.01, "control"

    def loss(arrays):
        return weighted(mixer(**arrays, valid=VALID), (1.0, 1.0))

    gradients = jax.jit(jax.grad(loss))(padded(arrays, VALID))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@every_mixer
def test_a_row_that_is_not_valid_keeps_its_state_in_decoding(name):
    """The other row moves on."""
    make, _, _, step = MIXERS[name]
    step = jax.jit(step)
    arrays = tokens_of(narrow(make(np.random.default_rng(4), seq=1)), 0)
    _, state = step(**arrays, valid=jnp.array([True, False]))
    _, control = step(**arrays)
    assert (state[1] == arrays["state"][1]).all()
    assert (state[0] == control[0]).all()
    assert (control[1] != arrays["state"][1]).any()


LENGTHS = (3, 1, 2, 16, 15)
"""Of documents: shorter than the convolution, and as long as a chunk."""


def packed():
    """Numbers of documents, which come again, so that only neighbours can be compared."""
    numbers = np.repeat([0, 1, 0, 1, 2], LENGTHS)
    return jnp.asarray(np.stack([numbers] * BATCH), jnp.int32)


@every_mixer
@pytest.mark.parametrize("chunk", [16, 64])
def test_packed_documents_equal_each_alone(name, chunk):
    """The first continues the initial state, each other starts from zeros; the final state is the last one's."""
    make, mixer, loop, _ = MIXERS[name]
    arrays = make(np.random.default_rng(5), decay=0.1)
    run = jax.jit(functools.partial(mixer, chunk=chunk))
    found = run(**narrow(arrays), segments=packed())
    state, outs, start = arrays["state"], [], 0
    for length in LENGTHS:
        document = {**tokens_of(arrays, slice(start, start + length)), "state": state}
        out, final = loop(np, **document)
        outs.append(out)
        state, start = np.zeros_like(state), start + length
    assert_equal(found, (np.concatenate(outs, axis=1), final))
    assert largest_difference(run(**narrow(arrays)), found) > 0.01, "control"


@every_mixer
def test_padding_between_and_in_documents_is_passed_over(name):
    """Whatever the number of its document is, it neither starts nor ends one."""
    make, mixer, _, _ = MIXERS[name]
    arrays = narrow(make(np.random.default_rng(6)))
    kept = np.flatnonzero(VALID[1])
    segments = np.array(packed())
    segments[1, ~VALID[1]] = 7
    run = jax.jit(functools.partial(mixer, chunk=16))
    out, state = run(**arrays, segments=segments, valid=VALID)
    alone = tokens_of(row_of(arrays, 1), kept)
    expected = run(**alone, segments=segments[1:, kept])
    assert_equal((out[1:, kept], state[1:]), expected)


@every_mixer
def test_nothing_flows_back_to_another_document(name):
    """The last document's outputs have no gradient to the tokens before it, and have one to its own."""
    make, mixer, _, _ = MIXERS[name]
    arrays = narrow(make(np.random.default_rng(7), decay=0.1))

    def loss(arrays):
        out, _ = mixer(**arrays, segments=packed(), chunk=16)
        return out[:, -LENGTHS[-1] :].sum()

    gradients = jax.jit(jax.grad(loss))(arrays)
    for part in PER_TOKEN & set(gradients):
        assert not gradients[part][:, : -LENGTHS[-1]].any(), part
        assert gradients[part][:, -LENGTHS[-1] :].any(), part
    assert not gradients["state"].any()


def test_weak_decays_after_strong_ones_keep_their_digits():
    """Sums of each pair, not differences of cumulative sums, which lose them: the control."""
    log_decay = np.full((1, 1, 1, 64), -50.0)
    log_decay[..., 32:] = -1e-3
    found = chunk_decay(jnp.asarray(log_decay, jnp.float32), None).pairs[0, 0, 0, -1, 32:]
    expected = np.exp(-1e-3 * np.arange(31, -1, -1))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    total = np.cumsum(log_decay[0, 0, 0], dtype=np.float32)
    assert np.abs(np.exp(total[-1] - total[32:]) - expected).max() > 1e-5


def test_equal_keys_that_overwrite_each_other_keep_their_digits():
    """The hardest triangular system: β = 1 without decay. The control is the Neumann series, whose terms explode."""
    shape = (1, 64, 1)
    key = jnp.ones((*shape, 1))
    value = jnp.asarray(np.random.default_rng(8).normal(size=(*shape, 1)), jnp.float32)
    out, state = gated_delta_rule(key, key, value, jnp.zeros(shape), jnp.ones(shape))
    assert_equal((out, state[0, 0]), (value, value[0, -1]))
    lower, series, power = np.tri(64, k=-1, dtype=np.float32), np.eye(64, dtype=np.float32), 1
    while power < 64:
        series = series @ (np.eye(64) + np.linalg.matrix_power(-lower, power)).astype(np.float32)
        power *= 2
    assert np.abs(series @ (np.eye(64) + lower) - np.eye(64)).max() > 1


@recurrent
def test_bfloat16_tokens_have_float32_states(name):
    """Within the rounding of bfloat16 of the recurrence of the same rounded tokens."""
    make, mixer, loop, _ = MIXERS[name]
    arrays = make(np.random.default_rng(9))
    wide = {"log_decay", "dt", "a", "state"}
    arrays = {
        name: jnp.asarray(x, jnp.float32 if name in wide else jnp.bfloat16)
        for name, x in arrays.items()
    }
    out, state = jax.jit(mixer)(**arrays)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    exact = loop(np, **{name: np.asarray(x, np.float64) for name, x in arrays.items()})
    for found, expected in zip((out, state), exact, strict=True):
        error = np.abs(np.asarray(found, np.float64) - expected).max()
        assert error < 0.02 * np.abs(expected).max()


def residual_bytes(f, arrays):
    """Bytes of the arrays that the backward pass of `f` reads."""
    saved = jax.eval_shape(lambda arrays: jax.vjp(f, arrays)[1], arrays)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved))


@recurrent
def test_the_backward_pass_saves_one_state_for_each_chunk(name):
    """Inputs and states; with the chunks of one token, as a scan over tokens has, a state for each: the control."""
    make, mixer, _, _ = MIXERS[name]
    seq = 1024
    arrays = narrow(make(np.random.default_rng(10), seq=seq))
    inputs = sum(x.nbytes for x in arrays.values())
    masks = 64 * 64 * 4  # bytes of one of a chunk

    def saved(chunk):
        return residual_bytes(lambda arrays: mixer(**arrays, chunk=chunk), arrays)

    state = arrays["state"].nbytes
    allowed = inputs + seq // 64 * state + 4 * masks
    assert saved(64) <= allowed < seq * state <= saved(1)


def test_the_convolution_saves_its_inputs_only():
    """Not a shifted copy for each tap."""
    arrays = narrow(convolution_arrays(np.random.default_rng(11)))
    inputs = sum(x.nbytes for x in arrays.values())
    assert residual_bytes(lambda arrays: silu_convolution(**arrays), arrays) < inputs + 100


LAYOUTS = {
    "query": P("data", None, "tensor"),
    "x": P("data", None, "tensor"),
    "a": P("tensor"),
    "d": P("tensor"),
    "bias": P("tensor"),
    "kernel": P(None, "tensor"),
    "state": P("data", "tensor"),
}
COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)")


def collectives(name, *, sequence, masked):
    """Collectives of a mixer and its gradients of tokens, batch over data=2 and heads over tensor=2."""
    make, mixer, _, _ = MIXERS[name]
    arrays = narrow(make(np.random.default_rng(12), seq=32))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "sequence", "tensor"))
    layouts = {}
    for part in arrays:
        spec = LAYOUTS.get(part, P("data", None, "tensor"))
        if part in PER_TOKEN:
            spec = P("data", sequence, "tensor")
        if part == "state" and name == "convolution":
            spec = P("data", None, "tensor")
        layouts[part] = NamedSharding(mesh, spec)
    masks = {}
    if masked:
        masks = {"segments": packed()[:, :32], "valid": jnp.asarray(VALID[:, :32])}
        masks = jax.device_put(masks, NamedSharding(mesh, P("data")))

    def run(arrays, masks):
        def loss(tokens):
            outputs = mixer(**{**arrays, **tokens}, **masks, chunk=16)
            return outputs, outputs

        tokens = {part: arrays[part] for part in arrays if part in PER_TOKEN | {"state"}}
        outputs, backward, _ = jax.vjp(loss, tokens, has_aux=True)
        return outputs, backward(outputs)

    compiled = jax.jit(run).lower(jax.device_put(arrays, layouts), masks).compile()
    return sorted(set(COLLECTIVE.findall(compiled.as_text())))


@every_mixer
@pytest.mark.parametrize("masked", [False, True])
def test_batch_and_heads_are_split_without_collectives(name, masked):
    """Forward and backward."""
    assert collectives(name, sequence=None, masked=masked) == []


def test_control_a_split_sequence_has_collectives():
    """Which the count sees."""
    assert collectives("convolution", sequence="sequence", masked=False)


def test_heads_that_do_not_divide_are_named():
    """With the arithmetic."""
    arrays = narrow(delta_arrays(np.random.default_rng(13)))
    arrays["value"] = arrays["value"][:, :, :3]
    with pytest.raises(ConfigError, match=r"(?s)chunk: is 0.*heads of keys.*3 heads / 2 = 1\.5"):
        gated_delta_rule(**arrays, chunk=0)
    arrays = narrow(convolution_arrays(np.random.default_rng(13)))
    arrays["state"] = arrays["state"][:, 1:]
    with pytest.raises(ConfigError, match=r"state: has 2 inputs\n.*width 4 reads 3 preceding"):
        short_convolution(**arrays)


def test_normalized_keys_have_norm_one():
    """But for the term that keeps zeros finite."""
    x = jnp.asarray(np.random.default_rng(14).normal(size=(3, DIM)), jnp.float32)
    np.testing.assert_allclose(np.linalg.norm(l2_normalized(x), axis=-1), 1.0, rtol=1e-5)
    assert not l2_normalized(jnp.zeros(3)).any()
