"""Codes on the wire: what is gathered and summed is what one device makes of the same codes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.analysis.collective_audit import audit_collectives, expect_collectives
from spmd.analysis.comm_dtypes import comm_dtype_checks, wider_transfers
from spmd.codecs import EXCHANGES, GATHERS
from spmd.coded_comm.comm import CodedComm
from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.deferred_reduction import defer_grad_reduction
from spmd.gradients.losses import next_token_loss
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.fsdp import gather
from spmd.plan.manual import shard_map_over
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.plan.records import ParamPlacement
from spmd.plan.sharded_param import ShardedParam
from spmd.run.describe import compression_lines
from spmd.settings.compress import CompressConfig
from spmd.sharding.mesh import entry_axes, make_mesh
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

CODECS = {**EXCHANGES, **GATHERS}
CONFIG = tiny.replaced(d_model=64, d_ff=256)
INT8 = CompressConfig(gather="int8", gradients="int8")
NORMAL = np.random.default_rng(0).normal(size=(8, 64, 384)).astype(np.float32)
SIGNS = 127 * np.sign(NORMAL)


def recoded(x, name):
    """An array after a round trip through a codec."""
    codec = CODECS[name]
    dim, block = codec.block_dim(x.shape)
    assert block
    return codec.decode(codec.encode(x, block, 1, dim), jnp.float32, 1, dim)


def recoded_shards(x, spec, sizes, name):
    """The same for each shard by itself."""
    parts = [x]
    for dim, axis in enumerate(spec):
        parts = [p for part in parts for p in np.split(part, entry_size(axis, sizes), axis=dim)]
    parts = [np.asarray(recoded(jnp.asarray(part), name)) for part in parts]
    for dim, axis in reversed(list(enumerate(spec))):
        count = entry_size(axis, sizes)
        parts = [
            np.concatenate(parts[i : i + count], axis=dim) for i in range(0, len(parts), count)
        ]
    return parts[0]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("shape", "dim"), [((6, 96), 1), ((96, 6), 0), ((2, 64, 5), 1)])
def test_a_block_of_any_dimension(name, shape, dim):
    """Errors are at most half a step of the block; `int4` has two codes in a byte."""
    codec, x = CODECS[name], NORMAL[0].ravel()[: np.prod(shape)].reshape(shape)
    coded = codec.encode(jnp.asarray(x), 32, 1, dim)
    assert coded.codes.size * codec.packed == x.size
    assert coded.scale.size == x.size / 32
    assert coded.codes.dtype.itemsize == 1
    blocks, back = (
        np.moveaxis(np.asarray(a), dim, -1).reshape(-1, 32)
        for a in (x, codec.decode(coded, jnp.float32, 1, dim))
    )
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    step = (
        np.maximum(np.abs(blocks) / 16, largest / 448 / 2**10)
        if name == "fp8"
        else largest / codec.top / 2
    )
    assert (np.abs(back - blocks) <= step * 1.001).all()


def test_small_gradients_beside_large_ones_are_not_lost():
    """Of a head, int8 keeps the gradients of rare tokens; codes along the vocabulary, the control, are mostly 0."""
    x = jnp.asarray(
        NORMAL[0, :48, :256] * np.where(np.arange(256) % 64, 1e-4, 1).astype(np.float32)
    )
    lost = []
    for codec, dim in ((EXCHANGES["int8"], 0), (GATHERS["int8"], 1)):
        found, block = codec.block_dim(x.shape)
        assert found == dim
        lost.append(float((codec.encode(x, block, 1, dim).codes == 0).mean()))
    assert lost[0] < 0.02
    assert lost[1] > 0.9


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(name, bad):
    """An overflow is not hidden: the block has no finite elements left, and others are untouched."""
    x = jnp.asarray(NORMAL[0, 0, :64]).at[3].set(bad)
    back = np.asarray(recoded(x.reshape(2, 32), name))
    assert not np.isfinite(back[0, 3])
    assert np.isfinite(back[1]).all()


GATHERED = [
    ((64, 384), P("fsdp", "tensor"), P(None, "tensor")),
    ((384, 64), P("tensor", "fsdp"), P("tensor", None)),
    ((2, 64, 128), P(None, "fsdp", "tensor"), P(None, None, "tensor")),
]


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(("shape", "stored", "used"), GATHERED, ids=str)
def test_a_gather_is_that_of_codes_of_each_shard(name, shape, stored, used):
    """Bitwise; blocks that straddle shards, the control, give other numbers."""
    sizes = {"fsdp": 4, "tensor": 2}
    x = NORMAL.ravel()[: np.prod(shape)].reshape(shape)
    placed = ParamPlacement(tiny.mesh(**sizes), stored, used, stored, comm=CodedComm(codec=name))
    found = np.asarray(jax.jit(lambda x: gather(x, placed, jnp.float32))(x))
    np.testing.assert_array_equal(found, recoded_shards(x, stored, sizes, name))
    assert (found != np.asarray(recoded(jnp.asarray(x), name))).any()
    rounded = np.asarray(jax.jit(lambda x: gather(x, placed, jnp.bfloat16))(x))
    np.testing.assert_array_equal(rounded, found.astype(jnp.bfloat16))


def summed(terms, wire, *, scatter, axes=("data", "fsdp"), sizes=None):
    """Sum one term of each device; the result of each device, whole where it is scattered."""
    sizes = sizes or {"data": 2, "fsdp": 4}
    comm = CodedComm(gradients=tuple((axis, wire) for axis in axes), slices=(("fsdp", 2),))
    param = ShardedParam(((), ()), ((), ()), (("fsdp",) * scatter, ()), comm=comm)
    out = P("data", "fsdp", None) if scatter else P(("data", "fsdp"), None, None)
    run = shard_map_over(
        tiny.mesh(**sizes),
        ("data", "fsdp"),
        lambda x: param.reduce(x[0], axes)[None],
        P(("data", "fsdp")),
        out,
    )
    return np.asarray(jax.jit(run)(terms))


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize(("wire", "share"), [("int8", 1 / 254), ("int4", 1 / 14)])
def test_sums_of_codes_are_near_and_equal_on_all_devices(wire, share, scatter):
    """Each element was rounded at most five times, by half a step of the largest; replicas are bitwise equal."""
    found, exact = summed(NORMAL, wire, scatter=scatter), NORMAL.sum(axis=0)
    assert (found == found[:1]).all()
    allowed = share * (np.abs(NORMAL).max() * 8 + 4 * np.abs(exact).max() * 1.5)
    assert 0 < np.abs(found - exact).max() < allowed
    assert np.abs(summed(NORMAL, "float32", scatter=scatter) - exact).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("int8", (8, 128, 256), 1),
        ("int8", (2, 256, 192), 2),
        ("int8", (4, 96, 64), 1),
        ("int4", (2, 512, 128), 1),
    ],
)
def test_sums_of_experts_are_near(name, shape, dim):
    """Kernels of three dimensions: XLA:CPU once read other memory where blocks of five dimensions were summed."""
    terms = np.random.default_rng(2).normal(size=(2, *shape)).astype(np.float32)
    comm = CodedComm(gradients=(("fsdp", name),))
    kept = tuple(("fsdp",) * (i == dim) for i in range(3))
    param = ShardedParam(((),) * 3, ((),) * 3, kept, comm=comm)
    out = P(*("fsdp" if i == dim else None for i in range(3)))
    run = shard_map_over(
        tiny.mesh(fsdp=2), ("fsdp",), lambda x: param.reduce(x[0], ("fsdp",)), P("fsdp"), out
    )
    exact = terms.sum(axis=0)
    most = 2 * np.abs(terms).max() / {"int8": 254, "int4": 14}[name]
    assert most / 4 < np.abs(np.asarray(jax.jit(run)(terms)) - exact).max() < most


def test_two_hops_send_each_part_to_its_device():
    """Codes of equal terms of one magnitude are exact, so the sum over two slices is; an order of one hop is not."""
    terms = np.broadcast_to(SIGNS[:1], SIGNS.shape)
    np.testing.assert_array_equal(summed(terms, "int8", scatter=True)[0], 8 * terms[0])
    shuffled = 8 * terms[0].reshape(2, 2, 16, -1).swapaxes(0, 1).reshape(64, -1)
    assert (shuffled != 8 * terms[0]).any()


def test_a_gradient_without_blocks_is_sent_in_bfloat16():
    """A matrix of 8 × 9 has no block of 32; its sum is that of the rounded terms."""
    terms = NORMAL[:, :8, :9]
    found = summed(terms, "int8", scatter=False)
    np.testing.assert_allclose(found[0], terms.sum(axis=0), rtol=0, atol=0.1)
    param = ShardedParam(
        ((), ()), ((), ()), ((), ()), comm=CodedComm(gradients=(("data", "int8"),))
    )
    assert param.sent((8, 9), ("data",), {"data": 2}) == {"data": "bfloat16"}
    assert param.sent((8, 64), ("data",), {"data": 2}) == {"data": "int8"}


def entry_size(entry, sizes):
    return np.prod([sizes[axis] for axis in entry_axes(entry)], dtype=int)


@functools.cache
def mixtral():
    config = dataclasses.replace(MIXTRALS["test"], d_model=64, d_ff=128, layers=1)
    return from_nnx(config.build)


def first_step(plan, changed=None):
    """The loss and gradients of a step from seed 0, with parameters changed before it."""
    step = make_train_step(plan, next_token_loss(mixtral()), keep_gradients=True)
    state = init_state(plan, 0)
    if changed:
        params = tree.map_with_path(
            lambda path, x: jax.device_put(changed(path, np.asarray(x)), x.sharding), state.params
        )
        state = dataclasses.replace(state, params=params)
    batch = token_batches((8, 16), MIXTRALS["test"].vocab, steps=1)[0]
    metrics = step(state, place_batch(plan, batch))[1]
    return float(metrics["loss"]), {
        path: np.asarray(x) for path, x in tree.flatten(metrics["gradients"]).items()
    }


@pytest.mark.soak
def test_layers_experts_and_head_use_the_codes_forward_and_backward():
    """The step of a mixture is that of one device with recoded kernels; with the kernels themselves, it is not."""
    plan_of = functools.partial(
        make_plan, rules=MIXTRAL, model=mixtral(), optimizer=tiny.OPTIMIZER, remat="full"
    )
    sizes = {"fsdp": 4, "expert": 2}
    plan = plan_of(tiny.mesh(**sizes), compress=CompressConfig(gather="int8"))
    coded = {path for path, placed in plan.placements.items() if placed.comm.param_codec}
    assert coded == {path for path in plan.placements if path.endswith("_proj/kernel")} | {
        "lm_head/kernel"
    }

    def recode(path, x):
        placed = plan.placements[path]
        if path not in coded:
            return x
        sizes = plan.mesh.shape
        layers = x if placed.stacks else x[None]
        found = [recoded_shards(layer, placed.param_spec, sizes, "int8") for layer in layers]
        return np.stack(found) if placed.stacks else found[0]

    loss, gradients = first_step(plan)
    alone = plan_of(tiny.mesh())
    for changed, is_same in ((recode, True), (None, False)):
        expected, expected_gradients = first_step(alone, changed)
        apart = {
            p: np.abs(gradients[p] - g).max() / np.abs(g).max()
            for p, g in expected_gradients.items()
        }
        assert (abs(loss / expected - 1) < 1e-6) is is_same
        assert bool(max(apart.values()) < 1e-4) is is_same, apart


@pytest.mark.parametrize(
    ("remat", "rules", "sizes"),
    [
        pytest.param("full/2", LLAMA, {"fsdp": 8}, marks=pytest.mark.soak, id="full/2-['fsdp']"),
        pytest.param("dots", LLAMA, {"fsdp": 8}, marks=pytest.mark.soak, id="dots-['fsdp']"),
        pytest.param(
            "full",
            MIXTRAL,
            {"fsdp": 4, "expert": 2},
            marks=pytest.mark.soak,
            id="full-['fsdp', 'expert']",
        ),
    ],
)
def test_the_backward_pass_gathers_inside_of_a_slice(remat, rules, sizes):
    """Codes cross slices once a step, not twice, and the step is the same bit for bit."""
    slices, mesh = {"fsdp": 2}, make_mesh(slices={"fsdp": 2}, **sizes)
    config = tiny.replaced(d_model=64, d_ff=256, layers=2)
    model = tiny.model(config) if rules is LLAMA else mixtral()
    found, crossing = [], []
    for secondary in (True, False):
        compress = CompressConfig(gather="int8", secondary=secondary)
        plan = make_plan(
            mesh, rules, model, tiny.OPTIMIZER, compress=compress, slices=slices, remat=remat
        )
        step, state = (
            make_train_step(plan, next_token_loss(model), keep_gradients=True),
            init_state(plan, 0),
        )
        batch = token_batches((8, 16), config.vocab, steps=1)[0]
        metrics = step(state, place_batch(plan, batch))[1]
        found.append((metrics["loss"], metrics["gradients"]))
        audit = audit_collectives(step.programs[-1], mesh, plan=plan, slices=slices)
        assert not audit.broken
        gathers = [
            r
            for r in audit.records
            if r.kind == "all-gather" and r.dtype == "s8" and "fsdp" in r.over
        ]
        crossing.append(sum(r.bytes for r in gathers if r.crosses))
        codes = sum(
            np.prod(e.shape) for e in plan.params if plan.placements[e.path].comm.param_codec
        )
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert crossing[0] == codes / 4  # a device has an eighth, and gets one of the other slice
    # the control: layers are gathered from all devices, in each pass
    assert crossing[1] >= 4 * crossing[0]


def compressed(compress):
    """The plan of the audited step."""
    return tiny.plan(
        CONFIG,
        options=(("compress", compress), ("precision", "bf16"), ("remat", "full")),
        data=2,
        fsdp=4,
    )


@functools.cache
def audited(compress):
    plan = compressed(compress)
    batch = {name: jax.ShapeDtypeStruct((8, 16), dtype) for name, dtype in BATCH.items()}
    step = make_train_step(plan, tiny.loss_fn(CONFIG))
    return plan, audit_collectives(step.compile(batch), plan.mesh, plan=plan)


BATCH = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}


def test_a_step_sends_what_the_plan_promises():
    """All kernels are gathered in one byte an element, forward and backward; gradients are exchanged in one."""
    plan, audit = audited(INT8)
    assert not audit.broken
    layers, head = CONFIG.layers * (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 256), 64 * CONFIG.vocab
    assert layers == sum(
        np.prod(e.shape) for e in plan.params if "layers" in e.path and e.path.endswith("kernel")
    )
    codes = layers + head
    gathers = {
        "fsdp": {"s8": 2 * layers + head, "f32": ..., "s32": ...},
        "data": {"s8": codes // 4, "f32": ...},
    }
    exchange = {
        "fsdp": {"s8": codes, "f32": ..., "bf16": ...},
        "data": {"s8": codes // 4, "f32": ...},
    }
    expect_collectives(audit, ignore_below=1, all_gather=gathers, all_to_all=exchange)
    scales = sum(
        r.bytes
        for r in audit.records
        if r.dtype == "f32" and r.kind == "all-gather" and r.over == "fsdp"
    )
    assert scales <= (2 * layers + head) * 4 / 32


def test_blocks_of_gradients_run_along_the_width():
    """It is the dimension that rules do not split over tensor, also where it is the longer one."""
    placements = compressed(INT8).placements
    found = {
        path.split("/")[-2]: placements[path].comm.width
        for path in placements
        if path.endswith("kernel")
    }
    assert found == {f"{name}_proj": -2 for name in ("q", "k", "v", "gate", "up")} | {
        "o_proj": -1,
        "down_proj": -1,
        "lm_head": -2,
    }
    assert CodedComm(width=-1).gradient_codec("int4").block_dim((32, 192)) == (1, 64)
    # A shard has too little of the width.
    assert CodedComm(width=-2).gradient_codec("int4").block_dim((16, 192)) == (1, 64)
    assert CodedComm().gradient_codec("bfloat16") is None


def test_control_a_step_that_sends_more_breaks_the_promise():
    """Each kernel is named for its gather and its gradient, of a program without compression."""
    plain, promised = audited(CompressConfig()), audited(INT8)[0]
    broken = list(wider_transfers(plain[1].records, comm_dtype_checks(promised)))
    kernels = {e.path for e in promised.params if e.path.endswith("kernel")}
    for what in ("its gradient is sent in", "is sent in bf16 over fsdp, promised s8"):
        assert {p.where for p in broken if p.what.startswith(what)} == kernels
    assert not plain[1].broken


def test_what_is_not_sent_cannot_be_compressed():
    """All problems come at once, before anything compiles; `on` leaves out what is useless."""
    everything = CompressConfig("int8", "int4", "int8")
    with pytest.raises(ConfigError) as error:
        tiny.plan(options=(("compress", everything),), tensor=2)
    fields = [f.name for f in dataclasses.fields(everything) if f.type == "str" or f.type is str]
    assert [p.where for p in error.value.problems] == [f"compress.{name}" for name in fields]
    assert "mesh.fsdp = 1" in str(error.value)
    sizes = {**tiny.mesh(tensor=2).shape}
    assert everything.on(sizes, {}, 3) == CompressConfig()
    assert everything.on(sizes | {"data": 2}, {"data": 2}, 3) == CompressConfig("", "int4", "int8")
    with pytest.raises(ConfigError, match="zero = 2"):
        tiny.plan(options=(("compress", INT8), ("zero", 2)), fsdp=2)
    with pytest.raises(ConfigError) as error:
        tiny.plan(options=(("compress", CompressConfig("int9", "fp8")),), fsdp=2)
    assert [p.where for p in error.value.problems] == ["compress.gather", "compress.gradients"]


def test_an_exchange_over_fsdp_once_a_step_gathers_no_codes():
    """It would gather parameters as they are stored, so it is refused."""
    plan = compressed(INT8)
    step = make_train_step(
        plan, grad_fn=defer_grad_reduction(value_and_grad(tiny.loss_fn(CONFIG)), ("data", "fsdp"))
    )
    batch = {name: jax.ShapeDtypeStruct((8, 16), dtype) for name, dtype in BATCH.items()}
    with pytest.raises(ConfigError, match=r"compress\.gather: is int8"):
        step.lower(batch)


def test_the_plan_says_what_is_compressed():
    """With its axes, the bytes before and with it, and what is sent as it is."""
    others = "without codes: vectors, embed/embedding"
    assert compression_lines(audited(INT8)[0]) == [
        f"layers gather in int8 over fsdp 4: 129 KiB, not 248 KiB in bfloat16, in each pass; {others}",
        f"gradients in int8 over data 2: 68.6 KiB, not 256 KiB in float32, in each sum; {others}",
        f"gradients in int8 over fsdp 4: 137 KiB, not 512 KiB in float32, in each sum; {others}",
    ]
