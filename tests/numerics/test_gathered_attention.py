"""Splash attention over all keys, gathered from devices that keep their queries, is attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.chips import SplashBlocks
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.layers import attention as attention_module
from spmd.layers.attention import xla_attention
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.gathered_attention import _gather, _gather_zigzag, gathered_attention
from spmd.layers.splash_attention import (
    KernelBlocks,
    Queries,
    _dividing,
    _unmasked,
    kernel_blocks,
    splash_attention,
)
from spmd.layers.zigzag import zigzag
from spmd.model_interface import attention_config
from spmd.model_interface.attention_config import (
    AttentionCall,
    AttentionConfig,
    make_attention_config,
)
from spmd.model_interface.fused_attention import FusedKernel
from spmd.partition_rules.llama import LLAMA
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.manual import shard_map_over
from spmd.testing import token_batches
from tests import tiny
from tests.one_device import Job
from tests.programs import run_script

SEQ = 512
SEGMENTS = np.where(np.arange(SEQ) < 300, 0, 300).astype(np.int32)
BLOCKS = SplashBlocks((128, 256), (256, 512), (1024, 128), keys_at_once=128)
"""Of other numbers in each kernel: a run of queries has 128 tokens in zigzag order, else 256."""
ONE_KERNEL = dataclasses.replace(BLOCKS, all_gradients=(128, 256))
"""All gradients from one kernel, but those of windows."""
OPTIONS = {
    "causal": (AttentionOptions(), False, False),
    "window and documents": (AttentionOptions(window=200), True, False),
    "cap and sinks": (AttentionOptions(soft_cap=20.0), False, True),
    "all tokens of documents": (AttentionOptions(causal=False), True, False),
}


def arrays():
    rng = np.random.default_rng(0)
    shapes = ((2, SEQ, 4, 64), (2, SEQ, 2, 64), (2, SEQ, 2, 128), (2, SEQ, 4, 128), (4,))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def results(run, has_sinks):
    """Output, and gradients of queries, keys, values and sinks."""
    query, key, value, weights, sinks = arrays()

    def total(query, key, value, sinks):
        out = run(query, key, value, sinks if has_sinks else None)
        return (out * weights).sum(), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(
        query, key, value, sinks
    )
    return [out, *gradients]


def of_one_device(name):
    options, is_packed, has_sinks = OPTIONS[name]
    segments = jnp.asarray(np.stack([SEGMENTS] * 2)) if is_packed else None
    run = functools.partial(_reference, segments=segments, options=options)
    return results(run, has_sinks)


def _reference(query, key, value, sinks, *, segments, options):
    return xla_attention(query, key, value, segments, sinks, options)


def gathered(name, order, queries, blocks=BLOCKS, **sizes):
    """Attention on a mesh, of tokens in some order, in the order of the sequence again."""
    options, is_packed, has_sinks = OPTIONS[name]
    mesh = tiny.mesh(**sizes)
    tokens = NamedSharding(mesh, P("fsdp", "sequence"))

    def split(x):
        return jax.lax.with_sharding_constraint(x[:, order], tokens)

    segments = jnp.asarray(np.stack([SEGMENTS] * 2)) if is_packed else None

    def run(query, key, value, sinks):
        out = gathered_attention(
            *map(split, (query, key, value)),
            None if segments is None else split(segments),
            sinks,
            mesh=mesh,
            queries=queries,
            options=options,
            blocks=blocks,
            interpret=True,
        )
        return out[:, np.argsort(order)]

    return results(run, has_sinks)


CASES = {
    **{name: (name, True, BLOCKS) for name in OPTIONS},
    "window and documents, in order": ("window and documents", False, BLOCKS),
    "causal, one kernel": ("causal", True, ONE_KERNEL),
    "cap and sinks, one kernel": ("cap and sinks", True, ONE_KERNEL),
    "all tokens of documents, one kernel": ("all tokens of documents", False, ONE_KERNEL),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_attention(case):
    """With gradients; beside batches and heads that are split."""
    name, is_zigzag, blocks = CASES[case]
    order = zigzag(SEQ, 2) if is_zigzag else np.arange(SEQ)
    queries = Queries(2, is_zigzag)
    found = gathered(name, order, queries, blocks, fsdp=2, sequence=2, tensor=2)
    for ours, expected in zip(found, of_one_device(name), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_groups_of_heads_in_turn_are_attention():
    """For so many blocks of keys, with documents and sinks of each head."""
    blocks = dataclasses.replace(BLOCKS, all_gradients=(128, 32))
    assert kernel_blocks(blocks, SEQ, 2, 64, Queries(), None).groups == 2
    options = AttentionOptions(soft_cap=20.0)
    segments = jnp.asarray(np.stack([SEGMENTS, np.zeros_like(SEGMENTS)]))

    def in_turn(query, key, value, sinks):
        return splash_attention(
            query, key, value, segments, sinks, options, blocks=blocks, interpret=True
        )

    expected = functools.partial(_reference, segments=segments, options=options)
    for ours, theirs in zip(results(in_turn, True), results(expected, True), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_copies_in_bfloat16_are_as_exact_as_two_kernels():
    """Each copy of the gradient of queries is rounded, and so is their sum: at most a fifth of the error more."""
    query, key, value, weights, _ = (x[:1] for x in arrays())
    narrow = [x.astype("bfloat16") for x in (query[:, :, :2], key[:, :, :1], value[:, :, :1])]
    weights = weights[:, :, :2]

    def gradient(run, *given):
        return jax.jit(jax.grad(lambda query: (run(query, *given[1:]) * weights).sum()))(given[0])

    def kernels(blocks):
        return functools.partial(splash_attention, segments=None, blocks=blocks, interpret=True)

    exact = gradient(xla_attention, *(x.astype("float32") for x in narrow), None)
    errors = []
    for blocks in (BLOCKS, dataclasses.replace(BLOCKS, all_gradients=(128, 128))):
        found = gradient(kernels(blocks), *narrow).astype("float32")
        errors.append(float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)))
    two, one = errors
    assert 1e-4 < one < 1.2 * two


@pytest.mark.upgrades
def test_gradients_of_one_kernel_can_be_mapped():
    """Over an axis of the caller's, as over the batch."""
    query, key, value, weights, _ = arrays()

    def total(query, key, value, weights):
        out = splash_attention(query, key, value, None, blocks=ONE_KERNEL, interpret=True)
        return (out * weights).sum()

    gradient = jax.grad(total, argnums=(0, 1, 2))
    given = query, key, value, weights
    mapped = jax.jit(jax.vmap(gradient))(*(x[:, None] for x in given))
    for ours, expected in zip(mapped, jax.jit(gradient)(*given), strict=True):
        np.testing.assert_allclose(ours[:, 0], expected, atol=2e-5)


def test_control_another_order_of_tokens_is_caught():
    """Tokens in the sequence's own order, taken for zigzag order."""
    found = gathered("causal", np.arange(SEQ), Queries(2, is_zigzag=True), sequence=2)
    assert np.abs(found[0] - of_one_device("causal")[0]).max() > 0.1


SMALL = (128, 128)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("devices", [1, 4])
def test_blocks_are_those_that_jax_finds_in_the_mask(window, devices):
    """For all three kernels: of each row or column, the blocks to fetch, in their order."""
    mask = splash.CausalMask((2048, 2048))
    if window is not None:
        mask = splash.LocalMask((2048, 2048), (window - 1, 0), 0)
    masks = splash.MultiHeadMask([mask])
    options = AttentionOptions(window)
    ours = _unmasked(2048, Queries(devices), options, KernelBlocks(SMALL, SMALL, SMALL))
    shards = {"block_shape": (128, 128), "q_seq_shards": devices}
    by_query, _ = splash_attention_mask_info.process_mask(masks, **shards)
    by_key, _ = splash_attention_mask_info.process_mask_dkv(masks, **shards)
    for blocks, theirs, axis in ((ours[0], by_query, 2), (ours[2], by_key, 1)):
        for device in range(devices):
            own = np.split(theirs.data_next, devices, axis=1)[device]
            active = np.split(theirs.block_mask, devices, axis=1)[device] > 0
            expected = _visited(own, active, axis)
            found = _visited(blocks.data_next[device], blocks.block_mask[device] > 0, axis)
            assert found == expected


@pytest.mark.parametrize("is_zigzag", [False, True])
def test_one_kernel_goes_through_all_blocks_and_fetches_the_unmasked(is_zigzag):
    """As JAX's table that is not shrunk; of one device it is that table."""
    devices = 4 if is_zigzag else 1
    queries = Queries(devices, is_zigzag)
    *_, blocks = _unmasked(2048, queries, AttentionOptions(), KernelBlocks(SMALL, None, SMALL))
    assert blocks.data_next.shape == blocks.block_mask.shape == (devices, 1, 16 // devices, 16)
    rows = np.arange(16 // devices)[:, None]
    active = blocks.block_mask[:, 0] > 0
    assert (blocks.data_next[:, 0] == rows)[active].all()
    if not is_zigzag:
        masks = splash.MultiHeadMask([splash.CausalMask((2048, 2048))])
        theirs, _ = splash_attention_mask_info.process_mask_dkv(
            masks, block_shape=SMALL, shrink_grid=False
        )
        np.testing.assert_array_equal(blocks.block_mask[0] > 0, theirs.block_mask > 0)
        np.testing.assert_array_equal(blocks.data_next[0], theirs.data_next)


def test_where_one_kernel_computes_all_gradients():
    """Not for windows, nor in tiny blocks; of a long sequence, for one group of heads after another."""
    blocks = SplashBlocks(all_gradients=(2048, 2048))
    of = functools.partial(kernel_blocks, blocks, kv_heads=8, queries=Queries())
    one = {
        (512, 128): ((512, 512), 1),
        (8192, 128): ((2048, 2048), 1),
        (8192, 192): ((2048, 1024), 1),
        (131_072, 128): ((2048, 2048), 8),
    }
    for (seq, width), (block, groups) in one.items():
        found = of(seq=seq, width=width, window=None)
        assert (found.query_gradient, found.key_gradient, found.groups) == (None, block, groups)
    two = (
        of(seq=2**20, width=128, window=None),
        of(seq=8192, width=128, window=1024),
        of(seq=8192 - 128, width=128, window=None),
        kernel_blocks(SplashBlocks(), 8192, 8, 128, Queries(), None),
    )
    assert all(found.query_gradient is not None and found.groups == 1 for found in two)


def _visited(data_next, active, axis):
    """Blocks that each row, or column, of the grid visits."""
    rows = np.moveaxis(data_next, axis, -1)[0]
    is_active = np.moveaxis(active, axis, -1)[0]
    return [row[flags].tolist() for row, flags in zip(rows, is_active, strict=True)]


def test_blocks_are_not_much_longer_than_a_window():
    """Blocks are skipped whole: with those of long sequences, a short window would be most of the work."""
    wide, queries = (2048, 2048), Queries()
    assert _dividing(wide, 8192, queries, None) == wide
    assert _dividing(wide, 8192, queries, 1024) == (1024, 1024)
    assert _dividing(wide, 8192, queries, 128) == (512, 512)
    assert _dividing((1024, 512), 8192, Queries(8, is_zigzag=True), None) == (512, 512)
    assert _dividing(wide, 384, queries, None) == (128, 128)


def test_tables_of_a_million_tokens_take_no_time():
    """JAX evaluates the mask of all pairs; here the table has one entry for each pair of blocks."""
    block = 512, 512
    queries = Queries(16, is_zigzag=True)
    blocks = _unmasked(2**20, queries, AttentionOptions(), KernelBlocks(block, block, block))
    assert blocks[0].block_mask.shape == (16, 1, 128, 2048)
    assert blocks[0].block_mask.sum() == blocks[2].block_mask.sum() == 2048 * 2049 / 2
    work = blocks[0].block_mask.sum(axis=(1, 2, 3))
    assert work.max() - work.min() <= 1  # zigzag order: the same on each device


def pretend_splash(monkeypatch):
    """CPU devices whose fused kernel is splash, interpreted."""
    monkeypatch.setattr(attention_config, "find_fused_kernel", lambda mesh: FusedKernel("splash"))
    interpreted = functools.partial(gathered_attention, interpret=True)
    monkeypatch.setattr(attention_module, "gathered_attention", interpreted)


def test_a_model_trains_as_on_one_device(monkeypatch):
    """By what `auto` chooses: loss, gradients and parameters after a step, in zigzag order and with full remat."""
    batches = token_batches((2, SEQ), tiny.CONFIG.vocab, steps=1)
    job = Job(tiny.model(), LLAMA, value_and_grad(tiny.loss_fn()), batches)
    assert job.alone
    pretend_splash(monkeypatch)
    job.assert_parity(options=(("remat", "full"),), fsdp=2, sequence=2)


@pytest.mark.soak
def test_stages_train_as_one_device(monkeypatch):
    """In a pipeline too, where late blocks are reversed after they are gathered, and no task permutes."""
    config = tiny.replaced(layers=2)
    batches = token_batches((4, SEQ), config.vocab, steps=1)
    loss_fn = tiny.loss_fn(config)
    job = Job(tiny.model(config), LLAMA, accumulate(value_and_grad(loss_fn), 2), batches)
    assert job.alone
    pretend_splash(monkeypatch)
    grad_fn = pipeline(loss_fn, tabulate(make_schedule("1f1b", 2, 2)))
    result = job.parity(grad_fn=grad_fn, pipe=2, sequence=4)
    assert result.ok, f"\n{result}"


def test_late_blocks_are_reversed_after_a_gather():
    """Two forms of one gather; the control is the order of devices."""
    mesh, order = tiny.mesh(sequence=4), zigzag(16, 4)
    tokens = jnp.asarray(order)[None]

    def gathered(x):
        return _gather(x, Queries(4, is_zigzag=True)), _gather_zigzag(*jnp.split(x, 2, axis=1))

    run = shard_map_over(mesh, ("sequence",), gathered, P(None, "sequence"), (P(), P()))
    for found in jax.jit(run)(tokens):
        assert found[0].tolist() == list(range(16))
    assert order.tolist() != list(range(16))


def test_who_chooses_gathered_keys(monkeypatch):
    """`auto` with splash; a sequence that does not divide into blocks goes around a ring; by name it is refused."""
    pretend_splash(monkeypatch)
    mesh = tiny.mesh(sequence=2)
    config = make_attention_config(mesh, "auto", "auto")
    assert str(config) == "splash   context gather"
    call = functools.partial(AttentionCall, head_dim=64, dtype="bfloat16", runs=4)
    assert config.context_of(config.choose(call(1024))) == "gather"
    assert config.context_of(config.choose(call(1024 + 256))) == "ring"
    named = AttentionConfig(mesh, "auto", "gather", FusedKernel("splash"))
    with pytest.raises(ConfigError, match=r"1280 / 512 = 2\.5"):
        named.choose(call(1280))


ON_TPU = """
    import json, re
    import jax, spmd
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.distributed.initialize import initialize
    from tests import tiny

    initialize(target_platform="tpu")
    devices = topology_devices(parse_topology("v5e:2x4"))
    batch = {name: jax.ShapeDtypeStruct((8, 2048), "int32") for name in ("tokens", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct((8, 2048), "float32")
    found = {}
    for axis, size in (("fsdp", 8), ("sequence", 8)):
        for remat in ("save:attention_out", "full"):
            mesh = spmd.make_mesh(devices=devices, **{axis: size})
            model = tiny.model(tiny.replaced(layers=1))
            plan = spmd.make_plan(mesh, tiny.LLAMA, model, tiny.OPTIMIZER, remat=remat)
            text = spmd.make_train_step(plan, spmd.next_token_loss(model)).compile(batch).as_text()
            kernels = re.findall(r"splash_mha_(fwd|dq|dkv)[^ ]* = .*custom-call", text)
            found[f"{axis} {remat}"] = [kernels.count(name) for name in ("fwd", "dq", "dkv")]
    print(json.dumps(found))
"""


@pytest.mark.soak
def test_the_kernel_runs_once_where_its_output_is_saved():
    """Its log-sum-exp is saved with it, on whole and on split sequences. Control: full remat runs it again."""
    assert run_script(ON_TPU) == {
        "fsdp save:attention_out": [1, 0, 1],
        "fsdp full": [2, 0, 1],
        "sequence save:attention_out": [1, 0, 1],
        "sequence full": [2, 0, 1],
    }
