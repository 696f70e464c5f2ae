"""What a TPU's programs of generation hold and send: the cache is written in place, parameters move in bfloat16."""

import functools
import importlib.util

import pytest

from tests.programs import run_script

pytestmark = pytest.mark.soak
# a cache larger than the on-chip memory
ROWS, PROMPT, ROOM, LAYERS = 32, 32, 4096, 4
COMPILE = f"""
    import dataclasses, json
    import jax, optax, spmd
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from spmd.distributed.initialize import initialize
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.generate.generator import Generator
    from spmd.generate.model_arrays import ModelArrays, reshard
    from spmd.layers.cache_entry import split_entry
    from spmd.model_interface.model import abstract_key
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA

    topology = parse_topology("v5e:2x4")
    initialize(target_platform=topology.platform)
    mesh = spmd.make_mesh(devices=topology_devices(topology), tensor=8)
    model = spmd.from_nnx(DecoderConfig(512, 1024, {LAYERS}, 8, 8, 2048).build)
    plan = spmd.make_plan(mesh, LLAMA, model, optax.sgd(1.0), precision="bf16")

    def shaped(array, shape, spec, dtype=None):
        return jax.ShapeDtypeStruct(shape, dtype or array.dtype, sharding=NamedSharding(mesh, spec))

    def form_of(array, form):
        own = shaped(array, array.shape, array.sharding.spec, form.dtype)
        if not form.by_layer:
            return own
        return (shaped(own, array.shape[1:], P(*array.sharding.spec[1:])),) * array.shape[0]

    def decode(in_int8=False):
        generator = Generator(plan, {ROOM}, cache_in_int8=in_int8)
        forms = generator._forms(plan.abstract_params, {{}})
        leaves, structure = jax.tree.flatten((plan.abstract_params, {{}}))
        dtypes = tuple(leaf.dtype for leaf in leaves)
        arrays = ModelArrays(tuple(map(form_of, leaves, forms)), dtypes, structure)
        ids = jax.ShapeDtypeStruct(({ROWS}, {PROMPT}), "int32")
        lengths = jax.ShapeDtypeStruct(({ROWS},), "int32")
        room = generator._room({PROMPT}, {ROOM} - {PROMPT})
        prefill = jax.tree_util.Partial(generator._prefill, room=room)
        token, position, carry = jax.eval_shape(prefill, arrays, ids, lengths, abstract_key())
        heads = P(None, None, None, "tensor")
        entries = jax.tree.map(lambda x: shaped(x, x.shape, heads), carry.entries)
        carry = dataclasses.replace(carry, entries=entries)
        return generator._decode.lower(arrays, carry, token, position, abstract_key()).compile()

    def at_a_place_of_each_row(cache, token, places, query):
        def write(row, token, place):
            return jax.lax.dynamic_update_slice_in_dim(row, token, place, axis=1)

        scores = jnp.einsum("lbthd,bhgd->lbhgt", cache, query, preferred_element_type=jnp.float32)
        return scores.max(-1), jax.vmap(write, (1, 1, 0), 1)(cache, token, places)

    cache = shaped(None, ({LAYERS}, {ROWS}, {ROOM}, 8, 128), P(None, None, None, "tensor"), "bfloat16")
    token = shaped(cache, ({LAYERS}, {ROWS}, 1, 8, 128), P(None, None, None, "tensor"))
    places = jax.ShapeDtypeStruct(({ROWS},), "int32")
    query = shaped(cache, ({ROWS}, 8, 4, 128), P(None, "tensor"))
    scatter = jax.jit(at_a_place_of_each_row, donate_argnums=0)
    scatter = scatter.lower(cache, token, places, query).compile()
    programs = dict(
        plain=decode(), coded=decode(in_int8=True), scatter=scatter
    )
    found = {{}}
    for name, program in programs.items():
        memory = program.memory_analysis()
        found[name] = [memory.temp_size_in_bytes, memory.alias_size_in_bytes]
    kernel = plan.abstract_params["layers"]["mlp"]["up_proj"]["kernel"]
    for dtype in ("bfloat16", "float32"):
        moved = reshard.lower(kernel, jnp.dtype(dtype), NamedSharding(mesh, P())).compile()
        (record,) = audit_collectives(moved, mesh).records
        found[dtype] = [record.kind, record.bytes / kernel.size]
    print(json.dumps(found))
"""


@functools.cache
def found():
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    return run_script(COMPILE)


def test_the_cache_is_written_in_place():
    """A token needs no second cache; the control: tokens at a place of each row's own copy it."""
    memory = found()
    cache = 2 * LAYERS * ROWS * ROOM * 128 * 2  # one head of a device, keys and values
    temporaries, aliased = memory["plain"]
    assert aliased >= cache
    assert temporaries < cache / 4
    temporaries, aliased = memory["scatter"]
    assert temporaries >= aliased


def test_a_cache_in_int8_is_half_as_large():
    """With a scale for each 128 elements; codes are multiplied, so they are never decoded whole."""
    (_, plain), (temporaries, coded) = found()["plain"], found()["coded"]
    assert 0.5 < coded / plain < 0.53
    assert temporaries < plain / 4


def test_parameters_move_in_the_dtype_of_their_use():
    """By the audit: one gather of two bytes a parameter; of four, if they are used in float32."""
    assert found()["bfloat16"] == ["all-gather", 2]
    assert found()["float32"] == ["all-gather", 4]
