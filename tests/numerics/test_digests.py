"""One bit that one device holds otherwise than its replicas is found, wherever it is, and nothing else is."""

import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.resilience.digests import make_digest, replica_differences
from spmd.sharding.mesh import make_mesh
from spmd.training.state import abstract_state, init_state
from tests import tiny
from tests.faults import altered, flip, with_flip
from tests.programs import run_script
from tests.tiers import soak_but

ADAMW = spmd.make_optimizer(spmd.OptimizerConfig(learning_rate=1e-2), steps=10)
LAYOUTS = {
    "replicated": ({"data": 8}, {}),
    "three axes": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "stages": ({"pipe": 2, "fsdp": 4}, {}),
    "on the host": (
        {"data": 2, "fsdp": 4},
        {"offload": ("optimizer_state", "params"), "remat": "full"},
    ),
    "bf16, zero 1": ({"fsdp": 4, "tensor": 2}, {"precision": "bf16-params", "zero": 1}),
}


@functools.cache
def layout(name):
    """State, its abstract value, mesh and digest of a tiny Llama."""
    sizes, options = LAYOUTS[name]
    plan = tiny.plan(optimizer=ADAMW, options=tuple(options.items()), **sizes)
    abstract = abstract_state(plan)
    return init_state(plan), abstract, plan.mesh, make_digest(abstract, plan.mesh)


def found(name, state):
    _, abstract, mesh, digest = layout(name)
    return replica_differences(np.asarray(digest(state)), abstract, mesh)


@pytest.mark.parametrize("name", soak_but(LAYOUTS, "replicated", "three axes", "on the host"))
def test_equal_replicas_pass(name):
    """The control of all that follows: a state that nobody touched has no difference on any layout."""
    assert found(name, layout(name)[0]) == []


@pytest.mark.parametrize(
    ("name", "path", "device", "where"),
    [
        ("replicated", "params/layers/mlp/up_proj/kernel", 5, {"element": 700, "bit": 31}),
        ("replicated", "optimizer_state/0/count", 2, {}),
        ("replicated", "key", 7, {"element": 1, "bit": 3}),
        ("three axes", "params/norm/scale", 6, {"bit": 22}),
        ("stages", "params/layers/attention_norm/scale", 4, {"element": 9}),
        ("stages", "step", 3, {}),
        ("bf16, zero 1", "params/lm_head/kernel", 1, {"element": 20, "bit": 15}),
        ("bf16, zero 1", "params/embed/embedding", 0, {"bit": 1}),
    ],
)
def test_a_flipped_bit_is_found_and_named(name, path, device, where):
    """The array, the device and its process, that it is alone with what it holds, and the fix."""
    state, _, mesh, _ = layout(name)
    (problem,) = found(name, with_flip(state, path, mesh.devices.flat[device], **where))
    number = mesh.devices.flat[device].id
    assert problem.where == path
    assert problem.what == f"device {number} (process 0) holds other bits than the other replicas"
    assert "take device" in problem.fix


@pytest.mark.parametrize("name", ["three axes", "on the host"])
def test_of_two_replicas_no_one_is_in_the_minority(name):
    """Both are named: an array split over all but `data` has two copies of each block, also in host memory."""
    state, _, mesh, _ = layout(name)
    (path,) = (
        path for path in tree.flatten(state) if path.endswith("mu/layers/mlp/up_proj/kernel")
    )
    (problem,) = found(name, with_flip(state, path, mesh.devices.flat[1], element=3))
    other = mesh.devices.flat[1 + mesh.size // 2].id
    assert problem.where == path
    assert problem.what.startswith(
        f"device 1 (process 0), device {other} (process 0) hold the same block and differ"
    )


def test_what_has_no_replica_cannot_differ():
    """A shard that only one device holds is not compared with anything: the check does not pretend to see it."""
    state, _, mesh, _ = layout("stages")
    assert (
        found("stages", with_flip(state, "params/layers/mlp/up_proj/kernel", mesh.devices.flat[3]))
        == []
    )


MESH = make_mesh(data=2, fsdp=2, tensor=2)
ARRAYS = {
    "float32": (jnp.arange(48.0).reshape(8, 6), P("fsdp")),
    "bfloat16": (jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16).reshape(4, 8), P(None, "tensor")),
    "float16": (jnp.linspace(-1, 1, 12, dtype=jnp.float16), P()),
    "float8": (jnp.linspace(-1, 1, 8).astype(jnp.float8_e4m3fn), P()),
    "int8": (jnp.arange(24, dtype=jnp.int8).reshape(2, 3, 4), P("data")),
    "uint32": (jnp.arange(2, dtype=jnp.uint32), P()),
    "complex": (jnp.array([1 + 2j, 3 - 4j], jnp.complex64), P()),
    "scalar": (jnp.float32(3), P()),
    "empty": (jnp.zeros((0, 4)), P()),
}
PLACED = {name: jax.device_put(x, NamedSharding(MESH, spec)) for name, (x, spec) in ARRAYS.items()}
ABSTRACT = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in PLACED.items()
}


@functools.cache
def digest():
    return make_digest(ABSTRACT, MESH)


def differences(arrays):
    return replica_differences(np.asarray(digest()(arrays)), ABSTRACT, MESH)


@settings(max_examples=120, deadline=None, database=None)
@given(st.data())
def test_any_bit_of_any_array_on_any_device(data):
    """Each dtype, element, bit and device: exactly that array and that device are named."""
    name = data.draw(st.sampled_from([name for name in ARRAYS if name != "empty"]))
    array = PLACED[name]
    device = data.draw(st.sampled_from(list(MESH.devices.flat)))
    shard = array.addressable_shards[0].data
    where = {
        "element": data.draw(st.integers(0, shard.size - 1)),
        "bit": data.draw(st.integers(0, 8 * shard.dtype.itemsize - 1)),
    }
    (problem,) = differences(PLACED | {name: flip(array, device, **where)})
    assert problem.where == name
    assert (
        problem.what == f"device {device.id} (process 0) holds other bits than the other replicas"
    )


def test_control_untouched_arrays_of_every_dtype_pass():
    """Also one without elements."""
    assert differences(PLACED) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[::-1],
        lambda x: np.roll(x, 1, axis=0),
        lambda x: np.concatenate([x[1:2], x[:1], x[2:]]),
    ],
    ids=["reversed", "shifted", "swapped"],
)
def test_the_same_words_in_other_places_are_found(change):
    """A digest depends on where a word is: reversed, shifted and swapped elements differ, of every dtype."""
    for name in ("float32", "bfloat16", "float16", "int8", "uint32", "complex"):
        (problem,) = differences(
            PLACED | {name: altered(PLACED[name], MESH.devices.flat[2], change)}
        )
        assert (problem.where, "device 2 " in problem.what) == (name, True)


def test_digests_of_counting_words_do_not_collide():
    """Words and places made of the same small numbers, permuted: all 24 orders of four have digests of their own."""
    orders = np.array(list(itertools.permutations(range(4))), np.uint32)
    whole = NamedSharding(MESH, P())
    abstract = {
        str(i): jax.ShapeDtypeStruct((4,), "uint32", sharding=whole) for i in range(len(orders))
    }
    placed = {str(i): jax.device_put(order, whole) for i, order in enumerate(orders)}
    rows = np.asarray(make_digest(abstract, MESH)(placed))[0]
    assert len(np.unique(rows[:, 0])) == len(np.unique(rows[:, 1])) == 24


def test_a_random_key_is_digested():
    """A typed key, of which arithmetic knows nothing."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2), NamedSharding(MESH, P()))
    abstract = {
        "keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=NamedSharding(MESH, P()))
    }
    digests = np.array(make_digest(abstract, MESH)({"keys": keys}))
    assert replica_differences(digests, abstract, MESH) == []
    digests[4, 0, 1] ^= 1
    (problem,) = replica_differences(digests, abstract, MESH)
    assert "device 4 " in problem.what


COLLECTIVE = re.compile(r" = (\S+) (all-\w+|reduce-scatter|collective-\w+|ragged-\w+)(?:-start)?\(")


def test_nothing_is_sent_but_the_digests():
    """One all-gather of eight bytes for each array; the control, a sum over the whole array, sends more."""
    assert COLLECTIVE.findall(digest().as_text()) == [
        (f"u32[8,{len(ARRAYS)},2]{{2,1,0}}", "all-gather")
    ]
    total = jax.jit(lambda x: x.sum()).lower(ABSTRACT["float32"]).compile()
    assert [kind for _, kind in COLLECTIVE.findall(total.as_text())] == ["all-reduce"]


ABSENT = """
    import json
    import jax, spmd
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA
    from spmd.distributed.initialize import initialize
    from spmd.analysis.memory import read_memory
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.resilience.digests import make_digest
    from spmd.training.state import abstract_state

    initialize(target_platform="tpu")
    mesh = spmd.make_mesh(devices=topology_devices(parse_topology("v5e:2x4")), data=2, fsdp=4)
    model = spmd.from_nnx(DecoderConfig(8192, 1024, 8, 8, 4, 2816).build)
    adamw = spmd.make_optimizer(spmd.OptimizerConfig(schedule="constant"), steps=10)
    held = {}
    for offload in ("", "optimizer_state params"):
        plan = spmd.make_plan(mesh, LLAMA, model, adamw, remat="full", offload=tuple(offload.split()))
        memory = make_digest(abstract_state(plan), mesh).memory_analysis()
        hosted, on_host = memory.host_argument_size_in_bytes, memory.host_temp_size_in_bytes
        held[offload] = [memory.argument_size_in_bytes, memory.temp_size_in_bytes, hosted, on_host]
    print(json.dumps(held))
"""


@pytest.mark.soak
def test_no_array_is_copied_on_a_tpu():
    """The device holds next to nothing besides the state; of what is in host memory, about two of eight layers."""
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    held = run_script(ABSENT)
    arguments, temporaries, _, on_host = held[""]
    assert (on_host, arguments > 200e6, temporaries < 0.05 * arguments) == (0, True, True), held
    _, temporaries, hosted, on_host = held["optimizer_state params"]
    assert (on_host, hosted > 200e6, temporaries < 2.4 * hosted / 8) == (0, True, True), held
