"""A sequence that is split over devices attends to itself, in a ring or by heads, as on one device."""

import functools
import importlib.util
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.analysis.collective_audit import audit_collectives
from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers import blockwise_attention as online
from spmd.layers.attention import attend
from spmd.layers.blockwise_attention import unmasked_pairs
from spmd.layers.zigzag import positions, zigzag, zigzag_batch
from spmd.partition_rules.llama import LLAMA
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.mesh import BATCH_AXES
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.step import make_train_step
from tests import tiny
from tests.numerics.test_attention import MASKS, arrays, computed, lost, reference
from tests.one_device import Job
from tests.programs import run_script
from tests.rounding import assert_close

CONFIG = tiny.replaced(layers=1, heads=8, kv_heads=4, d_model=64)
MASKED = tiny.replaced(layers=1, heads=8, kv_heads=4, d_model=64, window=13)
SEQ = 32


@functools.cache
def batches(packed=False):
    """One batch with padding; with documents of uneven lengths, on request."""
    (batch,) = token_batches((4, SEQ), CONFIG.vocab, steps=1)
    documents = np.sort(np.random.default_rng(3).integers(0, 3, (4, SEQ)), axis=1).astype(np.int32)
    return [{**batch, "segments": documents} if packed else batch]


@functools.cache
def job(packed=False):
    """A step; with a window and packed documents, on request."""
    config = MASKED if packed else CONFIG
    return Job(tiny.model(config), LLAMA, value_and_grad(tiny.loss_fn(config)), batches(packed))


@pytest.mark.parametrize(
    ("context", "sizes"),
    [
        pytest.param("ring", {"fsdp": 2, "sequence": 4}, marks=pytest.mark.soak),
        ("all-to-all", {"sequence": 4}),
    ],
)
@pytest.mark.soak
def test_a_split_sequence_of_documents_trains_as_on_one_device(context, sizes):
    """Loss, gradients and parameters after a step, with a window and packed documents, over four devices."""
    job(packed=True).assert_parity(options=(("context", context),), **sizes)


def test_control_wrong_positions_are_caught(monkeypatch):
    """A model that takes its tokens for contiguous where they are in zigzag order does not pass."""
    monkeypatch.setattr("spmd.models.decoder.decoder.positions", lambda seq: np.arange(seq)[None])
    fresh = value_and_grad(next_token_loss(from_nnx(CONFIG.build)))
    assert not job().parity(grad_fn=fresh, sequence=2).ok


def split_attention(window, packed, *, is_zigzag, scores, **layout):
    """Output and gradients of attention on a mesh, in the order of the sequence."""
    *inputs, segments = arrays(128)
    context = layout.pop("context", "ring")
    plan = tiny.plan(options=(("context", context),), **layout)
    order = zigzag(128, plan.mesh.shape["sequence"]) if is_zigzag else np.arange(128)
    spec = NamedSharding(plan.mesh, P(BATCH_AXES, "sequence"))
    query, key, value, weights, segments = (
        jax.device_put(x[:, order], spec) for x in (*inputs, segments)
    )

    def total(query, key, value):
        tokens = {"tokens": jnp.zeros(query.shape[:2], jnp.int32)}
        with use_plan(plan), zigzag_batch(tokens, position_aware=is_zigzag):
            out = attend(
                query, key, value, window=window, segments=segments if packed else None, **scores
            )
        return (out * weights).sum(), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    back = np.argsort(order)
    return tuple(np.asarray(x)[:, back] for x in (out, *gradients))


def assert_attention(window, packed, scores=None, **layout):
    """Split attention is that of the formula, but for the order of sums."""
    options = {"window": window, **(scores or {})}
    found = split_attention(window, packed, scores=scores or {}, **layout)
    assert_close(found, computed(reference, 128, packed, **options), lost(128, packed, **options))


@pytest.mark.parametrize("context", ["ring", "all-to-all"])
def test_attention_runs_inside_of_another_manual_region(context):
    """In a program that is manual over `data` already, the other axes are split as ever."""
    plan = tiny.plan(options=(("context", context),), data=2, sequence=2)
    query, key, value, *_ = arrays(128)
    data = P("data")

    def local(query, key, value):
        with use_plan(plan):
            return attend(query, key, value)

    nested = jax.shard_map(
        local, mesh=plan.mesh, in_specs=data, out_specs=data, axis_names={"data"}, check_vma=False
    )
    spec = NamedSharding(plan.mesh, P("data", "sequence"))
    out = jax.jit(nested)(*(jax.device_put(x, spec) for x in (query, key, value)))
    expected, noise = (
        computed(reference, 128, False, window=None)[0],
        lost(128, False, window=None)[0],
    )
    assert_close({"out": out}, {"out": expected}, {"out": noise})


@pytest.mark.parametrize("mask", ["causal", "both"])
@pytest.mark.parametrize(
    ("is_zigzag", "layout"),
    [
        (True, {"sequence": 4, "data": 2}),
        (False, {"sequence": 4}),
        (True, {"sequence": 2, "tensor": 2}),
        (False, {"sequence": 2, "context": "all-to-all"}),
    ],
    ids=str,
)
def test_split_attention_is_attention(is_zigzag, layout, mask, monkeypatch):
    """In zigzag order and in the sequence's own, in several chunks on each device, with gradients, under both masks."""
    monkeypatch.setattr(online, "LARGEST_CHUNK", 8)
    assert_attention(*MASKS[mask], is_zigzag=is_zigzag, **layout)


SCORES = {"scale": 0.5, "soft_cap": 0.7}


@pytest.mark.parametrize("context", ["ring", "all-to-all"])
def test_split_attention_caps_scores_as_any(context, monkeypatch):
    """A scale and a soft cap act on a ring and on exchanged heads as the formula says, with gradients."""
    monkeypatch.setattr(online, "LARGEST_CHUNK", 8)
    assert_attention(70, True, SCORES, is_zigzag=context == "ring", sequence=2, context=context)


def test_encoders_split_heads_and_not_a_ring():
    """Tokens that all see each other are exchanged for heads; a ring says that it cannot do that."""
    scores = {"causal": False}
    assert_attention(None, False, scores, is_zigzag=False, sequence=2, context="all-to-all")
    with pytest.raises(ConfigError, match="whose kernel is causal"):
        split_attention(None, False, is_zigzag=False, scores=scores, sequence=2)


@pytest.mark.parametrize("is_zigzag", [True, False])
def test_a_window_may_leave_nothing_to_do_at_a_turn(is_zigzag):
    """Where no query sees any of the keys that are there, nothing is computed, and they are passed on."""
    assert_attention(3, False, is_zigzag=is_zigzag, sequence=4)


def test_control_the_order_matters():
    """Attention to tokens in zigzag order, taken for contiguous, is something else."""
    order = zigzag(128, 4)
    query, key, value, *_ = arrays(128)
    wrong = reference(*(x[:, order] for x in (query, key, value)), None)[:, np.argsort(order)]
    assert float(jnp.abs(wrong - computed(reference, 128, False, window=None)[0]).max()) > 0.1


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_batch_is_put_into_zigzag_order(devices):
    """Every array of a batch that has one entry for each token, and none that has not."""
    plan = tiny.plan(sequence=devices)
    tokens = np.arange(2 * SEQ, dtype=np.int32).reshape(2, SEQ)
    batch = {"tokens": tokens, "weights": tokens.astype(np.float32), "lengths": np.array([3, 4])}

    def moved(batch):
        with use_plan(plan), zigzag_batch(batch, position_aware=True) as moved:
            return moved, jnp.asarray(positions(SEQ))

    placed = place_batch(plan, batch)
    moved_batch, order = jax.jit(moved)(placed)
    np.testing.assert_array_equal(order[0], zigzag(SEQ, devices))
    for name in ("tokens", "weights"):
        np.testing.assert_array_equal(moved_batch[name], batch[name][:, zigzag(SEQ, devices)])
    np.testing.assert_array_equal(moved_batch["lengths"], batch["lengths"])


@pytest.mark.parametrize(
    ("position_aware", "layout"),
    [
        (False, {"sequence": 2}),
        (True, {"fsdp": 2}),
        (True, {"sequence": 2, "options": (("context", "all-to-all"),)}),
    ],
    ids=str,
)
def test_a_batch_stays_as_it_is_where_no_ring_asks_for_more(position_aware, layout):
    """A model that knows of no order, a whole sequence, and an exchange by heads keep the sequence's own order."""
    batch = {"tokens": np.zeros((2, SEQ), np.int32)}
    with use_plan(tiny.plan(**layout)), zigzag_batch(batch, position_aware=position_aware) as same:
        assert same is batch
        assert positions(4).tolist() == [[0, 1, 2, 3]]


def test_only_a_model_that_says_so_gets_another_order():
    """Llama does; a module that mixes tokens in its own way, and says nothing, does not."""

    class Mixes(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(4, 4, rngs=rngs)

        def __call__(self, tokens):
            return jnp.cumsum(self.embed(tokens), axis=1)

    assert tiny.model().info().position_aware
    assert not from_nnx(Mixes).info().position_aware


@pytest.mark.parametrize("turn", range(4))
def test_zigzag_order_gives_every_device_the_same_work(turn):
    """At every turn of a ring of 4 each device visits as many pairs of chunks; in contiguous order it does not."""

    def pairs(order):
        starts = order.reshape(4, -1)[:, ::4].tolist()
        return [len(unmasked_pairs(starts[i], starts[(i - turn) % 4], 4, None)) for i in range(4)]

    assert len(set(pairs(zigzag(64, 4)))) == 1
    assert turn == 0 or len(set(pairs(np.arange(64)))) == 2


@pytest.mark.parametrize(
    ("seq", "config", "context", "said"),
    [
        (20, CONFIG, "ring", r"20 / \(2 × sequence=4\) = 2.5"),
        (SEQ, tiny.CONFIG, "all-to-all", r"2 / \(sequence=4\) = 0.5"),
        (8 * 521, CONFIG, "ring", "521 tokens, which divide into chunks of at most 1"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_compiles(seq, config, context, said):
    """A sequence without two blocks for each device, or in blocks of a prime number of tokens, and key/value heads
    without a device: the arithmetic and the fix."""
    step = make_train_step(
        tiny.plan(config, options=(("context", context),), sequence=4), tiny.loss_fn(config)
    )
    ids = jax.ShapeDtypeStruct((4, seq), "int32")
    batch = {"tokens": ids, "targets": ids, "weights": jax.ShapeDtypeStruct((4, seq), "float32")}
    with pytest.raises(ConfigError, match=said) as caught:
        step.trace(batch)
    assert all(problem.fix for problem in caught.value.problems)


AUDITED = tiny.replaced(kv_heads=4)
LAYERS, TURNS = AUDITED.layers, 4 - 1


def compile_step(length, sizes, **options):
    """A plan, and the compiled step of a batch of one example."""
    ids = jax.ShapeDtypeStruct((1, length), "int32")
    shapes = {
        "tokens": ids,
        "targets": ids,
        "weights": jax.ShapeDtypeStruct((1, length), "float32"),
    }
    plan = tiny.plan(AUDITED, options=tuple(options.items()), **sizes)
    return plan, make_train_step(plan, tiny.loss_fn(AUDITED)).compile(shapes)


APART = {
    "spmd/layers/zigzag": "order",
    "spmd/models/decoder/": "embedding",
    "spmd/training/step": "embedding",  # its gradient, whole for the update
}


def sent(context):
    """How often each kind of collective over `sequence` runs; and warnings.

    Those of the order of tokens and of the embedding are apart. Parameters are whole.
    """
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)  # audits read whole stacks
    plan, compiled = compile_step(64, {"sequence": 4}, context=context, zero=0)
    jax.config.update("jax_traceback_in_locations_limit", before)
    audited, found = audit_collectives(compiled, plan.mesh), Counter()
    for record in audited.records:
        kind = "rest"
        for file, name in APART.items():
            if record.source.startswith(file):
                kind = name
        found[f"{record.kind} {kind}"] += record.executions
    return found, audited.warnings


def of_attention(counts):
    """The kinds of collectives, but those of the embedding.

    JAX 0.12 names the gather of ids of tokens, for the owners of columns, after their order.
    """
    return {
        name for name in counts if not name.endswith("embedding") and name != "all-gather order"
    }


def test_a_ring_sends_what_it_says():
    """`sequence − 1` permutes of keys and of values forward and again backward, and as many of their gradients.

    The batch, of three arrays, takes two for each; nothing of the sequence is gathered.
    """
    counts, warnings = sent("ring")
    assert counts["collective-permute rest"] == LAYERS * TURNS * (2 + 2 + 2)
    assert counts["collective-permute order"] == 3 * 2
    assert of_attention(counts) == {
        "collective-permute rest",
        "collective-permute order",
        "all-reduce rest",
    }
    assert not warnings


def test_an_exchange_by_heads_sends_what_it_says():
    """Four all-to-alls forward and four backward for each layer, and nothing is gathered, not the batch either."""
    counts, warnings = sent("all-to-all")
    assert counts["all-to-all rest"] == LAYERS * 8
    assert of_attention(counts) == {"all-to-all rest", "all-reduce rest"}
    assert not warnings


@pytest.mark.soak
def test_no_buffer_grows_with_the_square_of_the_sequence():
    """In chunks, the largest array of the whole step is smaller than one head's scores; XLA's form holds more."""

    def largest(attention):
        _, compiled = compile_step(1024, {}, attention=attention)
        sizes = re.findall(r" (?:pred|[a-z]+[0-9]+)\[([0-9,]+)\]", compiled.as_text())
        return max(math.prod(map(int, size.split(","))) for size in sizes)

    assert largest("chunked") <= 4 * 512 * 512  # four heads of one pair of chunks
    assert largest("xla") > 1024 * 1024 / 2


@pytest.mark.soak
def test_memory_falls_as_devices_are_added():
    """Temporaries of 32,768 tokens: of 8 devices, each needs less than half of what each of 2 needs."""
    of_2, of_8 = (
        compile_step(32768, {"sequence": n})[1].memory_analysis().temp_size_in_bytes for n in (2, 8)
    )
    assert of_8 < of_2 / 2


ON_TPU = """
    import json
    import jax, jax.numpy as jnp, spmd
    from jax.sharding import NamedSharding, PartitionSpec as P
    from spmd.distributed.initialize import initialize
    from spmd.plan.context import use_plan
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.layers.attention import attend
    from tests import tiny

    initialize(target_platform="tpu")
    devices = topology_devices(parse_topology("v5e:2x4"))
    found = {}
    for name, context, sizes in (
        ("splash", "ring", {"fsdp": 4, "tensor": 2}),
        ("splash by heads", "all-to-all", {"fsdp": 2, "sequence": 2, "tensor": 2}),
        ("gather", "auto", {"fsdp": 2, "sequence": 2, "tensor": 2}),
        ("ring", "ring", {"fsdp": 2, "sequence": 2, "tensor": 2}),
    ):
        mesh = spmd.make_mesh(devices=devices, **sizes)
        plan = spmd.make_plan(mesh, tiny.LLAMA, tiny.model(), tiny.OPTIMIZER, context=context)

        def loss(query, key, value, sinks, segments):
            with use_plan(plan):
                out = attend(query, key, value, window=300, segments=segments)
                with_sinks = attend(query, key, value[..., :64], sinks=sinks, chunk=512, segments=segments)
                both_ways = [] if name == "ring" else [attend(query, key, value, causal=False)]
            return sum(x.astype(jnp.float32).sum() for x in (out, with_sinks, *both_ways))

        heads = NamedSharding(mesh, P(("data", "fsdp", "expert"), "sequence", "tensor"))
        shapes = [jax.ShapeDtypeStruct((4, 1024, count, 128), "bfloat16", sharding=heads) for count in (8, 4, 4)]
        ids = jax.ShapeDtypeStruct((4, 1024), "int32", sharding=plan.batch_sharding("tokens"))
        shapes.append(jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P("tensor"))))
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes, ids).compile().as_text()
        words = ("tpu_custom_call", "all-gather", "all-to-all", "collective-permute-start")
        found[name] = {word: text.count(word) for word in words}
    print(json.dumps(found))
"""


@pytest.mark.soak
def test_every_form_compiles_for_tpus():
    """Splash attention, alone, on exchanged heads and on gathered keys, and the ring, for eight chips.

    Once with a window and documents, once with sinks, chunks and values narrower than keys, once for all tokens.
    """
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    found = run_script(ON_TPU)
    # forward, the queries' gradient, the keys' and values'; for all tokens one kernel of gradients
    kernels = 3 + 3 + 2
    assert found["splash"]["tpu_custom_call"] >= kernels
    assert found["gather"]["tpu_custom_call"] >= kernels
    assert found["gather"]["all-gather"] > 0 == found["gather"]["all-to-all"]
    assert found["splash"]["all-gather"] == found["splash"]["all-to-all"] == 0
    assert found["splash by heads"]["tpu_custom_call"] >= kernels
    assert found["splash by heads"]["all-to-all"] > 0
    assert found["ring"]["tpu_custom_call"] == found["ring"]["all-gather"] == 0
    assert found["ring"]["collective-permute-start"] > 0
