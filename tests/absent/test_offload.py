"""What offload saves, in bytes, as the TPU compiler sees it for eight chips that are not here.

Device bytes are arguments and temporaries. XLA:CPU has host memory by name only, so this cannot be
asked there.
"""

import functools
import importlib.util
import textwrap

import pytest

from tests.programs import LITTLE_EFFORT, run_script

SHARED = """
    import json, sys
    import jax, optax, spmd
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA
    from spmd.distributed.initialize import initialize
    from spmd.analysis.memory import read_memory
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.optim.per_layer import per_layer
    from spmd.optim.two_phase import two_phase

    initialize(target_platform="tpu")
    mesh = spmd.make_mesh(devices=topology_devices(parse_topology("v5e:2x4")), fsdp=8)

    def measure(config, shape, optimizer, **options):
        model = spmd.from_nnx(config.build)
        batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name in ("tokens", "targets")}
        batch["weights"] = jax.ShapeDtypeStruct(shape, "float32")
        plan = spmd.make_plan(mesh, LLAMA, model, optimizer, **options)
        held = read_memory(spmd.make_train_step(plan, spmd.next_token_loss(model)).compile(batch))
        return {"device": held.total, "host": held.host_arguments, "host_temporaries": held.host_temporaries}
"""
STATE = """
    config = DecoderConfig(32_000, 1024, 8, 8, 4, 2816)
    adamw = spmd.make_optimizer(spmd.OptimizerConfig(schedule="constant"), steps=10)
    clip = optax.clip_by_global_norm(1.0)
    adafactor = per_layer(optax.adafactor(1e-2, momentum=0.9))
    adafactor = two_phase(lambda gradients: (clip.update(gradients, clip.init(gradients))[0], {}), adafactor)
    held = {}
    for name, optimizer in {"adamw": adamw, "adafactor": adafactor}.items():
        for offload in ("", "optimizer_state"):
            options = {"remat": "full", "precision": "bf16", "offload": tuple(offload.split())}
            held[f"{name} {offload}".strip()] = measure(config, (8, 512), optimizer, **options)
    print(json.dumps(held))
"""
# Layers are most of this model: where a head is, the most that is held is its logits and gradients,
# and no layer.
PARAMS = """
    config = DecoderConfig(4096, 1024, 8, 8, 4, 2816)
    adamw = spmd.make_optimizer(spmd.OptimizerConfig(schedule="constant"), steps=10)
    held = {}
    for offload in ("optimizer_state", "optimizer_state params"):
        options = {"remat": "full", "precision": "bf16", "offload": tuple(offload.split())}
        held[offload] = measure(config, (8, 128), adamw, **options)
    print(json.dumps(held))
"""
LAYERS, D_FF, WIDTH, SEQUENCES, LENGTH = 4, 1408, 512, 512, 128
ACTIVATIONS = f"""
    config = DecoderConfig(512, {WIDTH}, {LAYERS}, 4, 4, {D_FF})
    held = {{}}
    for remat in ("save:mlp_hidden", "offload:mlp_hidden"):
        options = {{"remat": remat, "precision": "bf16"}}
        held[remat] = measure(config, ({SEQUENCES}, {LENGTH}), optax.sgd(0.1), **options)
    print(json.dumps(held))
"""

# The head, the embedding and a kernel of Llama-3 8B as 256 chips hold them: [128, 16032], [128256,
# 16], [1376, 128].
THIN_SHARDS = """
    from jax.sharding import PartitionSpec as P

    shapes = {"head": (4096, 128_256), "embed": (128_256, 4096), "kernel": (11_008, 16_384)}
    model = spmd.Model(lambda key: {name: jax.numpy.ones(shape) for name, shape in shapes.items()}, None)
    specs = {"head": P("fsdp", "tensor"), "embed": P(None, ("fsdp", "tensor")), "kernel": P("tensor", "fsdp")}
    mesh = spmd.make_mesh(devices=topology_devices(parse_topology("v5e:16x16")), fsdp=32, tensor=8)
    optimizer = spmd.make_optimizer(spmd.OptimizerConfig(schedule="constant"), steps=10)
    plan = spmd.make_plan(mesh, spmd.Rules(list(specs.items())), model, optimizer, offload=("optimizer_state",))
    params, state = plan.abstract_params, plan.abstract_optimizer_state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    update = jax.jit(plan.storage.make_update(plan), out_shardings=shardings, donate_argnums=(1, 2))
    held = read_memory(update.lower(params, state, params).compile())
    print(json.dumps({"moments": {"host": held.host_arguments, "host_temporaries": held.host_temporaries}}))
"""

pytestmark = pytest.mark.soak


@functools.cache
def compiled(script: str, **environment: str) -> dict[str, dict[str, int]]:
    """Setting → bytes of one chip, from one process for all."""
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    return run_script(textwrap.dedent(SHARED) + textwrap.dedent(script), **environment)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_what_optimizer_state_takes_on_the_host_it_takes_no_more_on_the_device(optimizer):
    """A whole model with embedding, head and clip: 97 % of the moved bytes at least, and nothing is kept twice."""
    held = compiled(STATE, **LITTLE_EFFORT)
    before, after = held[optimizer], held[f"{optimizer} optimizer_state"]
    assert before["host"] == after["host_temporaries"] == 0
    assert after["host"] > 10e6
    assert before["device"] - after["device"] >= 0.97 * after["host"]


def test_what_parameters_take_on_the_host_they_take_no_more_on_the_device():
    """Those of the layers, beside the optimizer's state: no more than two layers of them are on their way."""
    held = compiled(PARAMS)
    before, after = held["optimizer_state"], held["optimizer_state params"]
    moved = after["host"] - before["host"]
    assert after["host_temporaries"] == 0
    layer = 4 * (1024 * (2 * 1024 + 2 * 512) + 3 * 1024 * 2816) // 8  # float32, on each of 8 chips
    assert moved == 8 * layer
    assert before["device"] - after["device"] >= moved - 2 * layer


def test_thin_shards_are_cut_where_the_chip_can_cut_them():
    """A TPU lays [128256, 16] out by columns, and cannot write a part of them; it compiles, and all is on the host."""
    held = compiled(THIN_SHARDS, **LITTLE_EFFORT)["moments"]
    assert held["host"] == 2 * 4 * (2 * 4096 * 128_256 + 11_008 * 16_384) // 256
    assert held["host_temporaries"] == 0


# bytes of all layers' mlp_hidden on one chip, in bfloat16
HIDDEN = 2 * LAYERS * SEQUENCES * LENGTH * D_FF // 8


def test_exactly_the_offloaded_activations_are_on_the_host():
    """Of what is named, each layer's on each chip, and nothing else."""
    assert (
        compiled(ACTIVATIONS, **LITTLE_EFFORT)["offload:mlp_hidden"]["host_temporaries"] == HIDDEN
    )


def test_control_a_saved_activation_is_not_on_the_host():
    """The same name, saved, takes no byte of the host."""
    assert compiled(ACTIVATIONS, **LITTLE_EFFORT)["save:mlp_hidden"]["host_temporaries"] == 0


def test_offloaded_activations_leave_the_device():
    """Nine tenths of them at least; in float32 it is half, because a TPU keeps bfloat16 of what it multiplies."""
    held = {name: sizes["device"] for name, sizes in compiled(ACTIVATIONS, **LITTLE_EFFORT).items()}
    assert held["save:mlp_hidden"] - held["offload:mlp_hidden"] >= 0.9 * HIDDEN
