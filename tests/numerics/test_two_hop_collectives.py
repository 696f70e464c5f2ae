"""What only TPUs do, over simulated devices with the same results: collectives in two hops, products of heads."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.chips import CHIPS, SmallGathers
from spmd.gradients.base import value_and_grad
from spmd.layers.kernel_gradient import kernel_gradient
from spmd.models.decoder import linear
from spmd.models.decoder import rotary as rope
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.plan import make_plan
from spmd.plan.records import ParamPlacement
from spmd.sharding import collectives
from spmd.testing import Reference, token_batches
from tests import tiny

pytestmark = pytest.mark.compat

MESHES = ({"fsdp": 8}, {"fsdp": 2}, {"data": 2, "fsdp": 4})
# all sums are exact
INTEGERS = np.random.default_rng(0).integers(-8, 9, (8, 16, 24)).astype(np.float32)


@pytest.fixture
def whole_slice(monkeypatch):
    """Let every axis pass for a whole TPU slice."""
    limits = SmallGathers(devices=2, size=32 * 2**20)
    chip = dataclasses.replace(CHIPS["v5e"], small_gathers=limits)
    monkeypatch.setattr(collectives, "_spans_slice", lambda mesh, axis, slices=1: True)
    monkeypatch.setattr(collectives, "chip_of_mesh", lambda mesh: chip)


def over_fsdp(f, mesh, into, out):
    """Return `f` of each device's part, jitted."""
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=into, out_specs=out, check_vma=False))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("is_whole", [True, False])
def test_they_give_what_one_collective_gives(sizes, dim, is_whole, whole_slice, monkeypatch):
    """A gather in two hops is the array itself, and a reduce-scatter in two hops is its sum, in the same order.

    Over a part of a slice there is one hop, along the first dimension.
    """
    monkeypatch.setattr(collectives, "is_tpu", lambda mesh: True)
    monkeypatch.setattr(collectives, "_spans_slice", lambda mesh, axis: is_whole)
    mesh, count = tiny.mesh(**sizes), sizes["fsdp"]
    split = P(*(None,) * dim, "fsdp")
    gathered = over_fsdp(lambda x: collectives.all_gather(x, mesh, "fsdp", dim), mesh, split, P())(
        INTEGERS[0]
    )
    np.testing.assert_array_equal(gathered, INTEGERS[0])

    def scatter(x):
        return collectives.psum_scatter(x[0], mesh, "fsdp", dim, jnp.float32)

    terms = INTEGERS[:count]
    summed = over_fsdp(scatter, mesh, P("fsdp"), split)(terms)
    np.testing.assert_array_equal(summed, terms.sum(axis=0))


@pytest.mark.parametrize("is_whole", [True, False])
def test_inside_of_a_slice_they_give_what_one_collective_gives(is_whole, whole_slice, monkeypatch):
    """Of two slices of four devices, each device gets those of its own, in order."""
    monkeypatch.setattr(collectives, "_spans_slice", lambda mesh, axis, slices=1: is_whole)
    mesh, numbers = tiny.mesh(fsdp=8), np.arange(8.0)
    gathered = over_fsdp(
        lambda x: collectives.gather_within(x, mesh, "fsdp", 2), mesh, P("fsdp"), P("fsdp")
    )(numbers)
    np.testing.assert_array_equal(gathered.reshape(8, 4), [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4)


def test_bfloat16_is_on_the_wire_and_float32_in_the_last_sum(whole_slice):
    """Two devices' terms of 1 and 2⁻⁹ add up in float32, where bfloat16 would lose the smaller one."""
    mesh = tiny.mesh(fsdp=2)
    terms = jnp.stack([jnp.ones((4, 2)), jnp.full((4, 2), 2.0**-9)]).astype(jnp.bfloat16)

    def scatter(x):
        return collectives.psum_scatter(x[0], mesh, "fsdp", 0, jnp.float32)

    compiled = over_fsdp(scatter, mesh, P("fsdp"), P("fsdp")).lower(terms)
    assert "collective_permute" in compiled.as_text()
    assert "tensor<2x2xbf16>" in compiled.as_text()
    assert (np.asarray(compiled.compile()(terms)) == 1 + 2.0**-9).all()


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        pytest.param(tiny.CONFIG, LLAMA, id="dense"),
        pytest.param(PRESETS["test"], MIXTRAL, id="moe", marks=pytest.mark.soak),
    ],
)
def test_a_model_trains_as_one_device_does(config, rules, whole_slice):
    """Two steps of all layers, experts and the head."""
    batches = token_batches((8, 16), config.vocab, steps=2)
    one, many = (
        make_plan(tiny.mesh(fsdp=n), rules, tiny.model(config), tiny.OPTIMIZER) for n in (1, 8)
    )
    result = Reference(one, value_and_grad(tiny.loss_fn(config)), batches).compare(many)
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize(
    ("examples", "stored"), [(8, P("fsdp", "tensor")), (3, P("fsdp")), (8, P(("fsdp", "tensor")))]
)
def test_a_kernels_gradient_fits_any_batch_and_table(examples, stored):
    """Examples that do not divide over devices, and shards that are not contiguous, are left to the compiler."""
    mesh = tiny.mesh(fsdp=4, tensor=2)
    used = P(*(("tensor" if "tensor" in str(entry) else None) for entry in stored))
    placed = ParamPlacement(mesh, stored, used, stored)
    x, dy = INTEGERS[:examples, :, :16], INTEGERS[:examples, :, 8:]
    product = functools.partial(jnp.einsum, "bsi,bso->io")
    found = jax.jit(lambda x, dy: kernel_gradient(product, x, dy, placed, "io"))(x, dy)
    np.testing.assert_array_equal(found, product(x, dy))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, stored), 2)


@pytest.fixture
def on_tpus(monkeypatch):
    """Let model code take the devices of the plan for TPUs."""
    for module in (linear, rope):
        monkeypatch.setattr(module, "attention_config", lambda: SimpleNamespace(platform="tpu"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_rotation_by_a_product_is_exact(dtype, on_tpus):
    """Forward and backward it gives the numbers of the rotation by halves, to the bit."""
    angles = rope.rotary_angles(np.arange(6)[None], 8, 100.0)
    cos, sin = (jnp.asarray(a)[:, :, None] for a in angles)
    x = jax.random.normal(jax.random.key(0), (2, 6, 3, 8), dtype)
    found, back = jax.vjp(lambda x: rope.rotate(x, angles), x)
    np.testing.assert_array_equal(found, rope._by_halves(x, cos, sin))
    np.testing.assert_array_equal(back(x)[0], rope._by_halves(x, cos, -sin))


@pytest.mark.soak
def test_heads_as_a_dimension_change_no_number(on_tpus):
    """As they are on TPUs, over simulated devices: two steps equal those of one device."""
    batches = token_batches((8, 16), tiny.CONFIG.vocab, steps=2)
    result = Reference(tiny.plan(), value_and_grad(tiny.loss_fn()), batches).compare(
        tiny.plan(fsdp=2, tensor=2)
    )
    assert result.ok, f"\n{result}"
