"""What each layer sends, in the programs that are compiled for a TPU slice and for GPUs that are not here."""

import functools

import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from tests.programs import run_script

LAYERS, D, BATCH, SEQ, LONG = 2, 256, 8, 128, 2048
COMPILE = f"""
    import dataclasses, json, sys
    import jax, optax, spmd
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.layouts import sequence_parallel
    from spmd.partition_rules.llama import LLAMA
    from spmd.distributed.initialize import initialize
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.topology import parse_topology, topology_devices

    topology = parse_topology(sys.argv[1])
    initialize(target_platform=topology.platform)
    model = spmd.from_nnx(DecoderConfig(512, {D}, {LAYERS}, 8, 8, {2 * D}).build)
    table = dict(LLAMA.activations)
    whole = dataclasses.replace(LLAMA, activations=table | {{"residual": table["mlp_input"]}})
    wrong = dataclasses.replace(LLAMA, activations=table | {{"mlp_hidden": table["mlp_input"]}})
    found = {{}}
    for name, rules, shape, sizes, context in (
        ("gather", LLAMA, (1, {LONG}), {{"sequence": 8}}, "gather"),
        ("whole", whole, ({BATCH}, {SEQ}), {{"tensor": 8}}, "ring"),
        ("tokens", sequence_parallel(LLAMA), ({BATCH}, {SEQ}), {{"tensor": 8}}, "ring"),
        ("width", LLAMA, ({BATCH}, {SEQ}), {{"tensor": 8}}, "ring"),
        ("wrong", wrong, ({BATCH}, {SEQ}), {{"tensor": 8}}, "ring"),
        ("ring", LLAMA, (1, {LONG}), {{"sequence": 8}}, "ring"),
        ("all-to-all", LLAMA, (1, {LONG}), {{"sequence": 8}}, "all-to-all"),
        ("two axes", LLAMA, (2, {LONG}), {{"fsdp": 2, "sequence": 4}}, "ring"),
    ):
        mesh = spmd.make_mesh(devices=topology_devices(topology), **sizes)
        try:
            plan = spmd.make_plan(
                mesh, rules, model, optax.sgd(1.0), precision="bf16", context=context
            )
        except spmd.SpmdError as error:
            found[name] = str(error)
            continue
        batch = {{name: jax.ShapeDtypeStruct(shape, "int32") for name in ("tokens", "targets")}}
        batch["weights"] = jax.ShapeDtypeStruct(shape, "float32")
        step = spmd.make_train_step(plan, spmd.next_token_loss(model)).compile(batch)
        records = audit_collectives(step, mesh).records
        found[name] = [(r.kind, r.source, r.op_name, r.array, r.executions, r.payload) for r in records]
    print(json.dumps(found))
"""
TOKENS = 2 * BATCH * SEQ * D  # bytes of a residual stream in bfloat16

ABSENT = [
    t
    for t in ("v5e:2x4", "h100:1x8")
    if t.startswith("v5e") or missing_extra(parse_topology(t)) is None
]
pytestmark = [pytest.mark.soak, pytest.mark.parametrize("topology", ABSENT)]


@functools.cache
def collectives(topology):
    """Layout → what a step has, compiled in one process for all."""
    return run_script(COMPILE, topology)


def of_one_layer(records, source, payload=None):
    """(Kind, direction) → how many there are in each layer, of those from a line of some file, of some bytes."""
    found = {}
    for kind, where, operation, _, times, bytes_ in records:
        if source in where and payload in (None, bytes_):
            direction = "backward" if "transpose(jvp" in operation else "forward"
            found[kind, direction] = found.get((kind, direction), 0) + times / LAYERS
    return found


def test_tensor_parallel_communication_is_the_published_minimum(topology):
    """In each layer two all-reduces forward and two backward (arXiv:1909.08053, section 3)."""
    found = of_one_layer(collectives(topology)["whole"], "linear.py", TOKENS)
    assert found == {("all-reduce", "forward"): 2, ("all-reduce", "backward"): 2}


@pytest.mark.parametrize("split", ["width", "tokens"])
def test_a_split_stream_communicates_as_published(topology, split):
    """Each all-reduce is a reduce-scatter and an all-gather, which on a ring move as much; and the stream, which is
    kept split, is gathered again for the gradients of kernels (arXiv:2205.05198, section 4.2.2)."""
    assert of_one_layer(collectives(topology)[split], "linear.py", TOKENS) == {
        ("all-gather", "forward"): 2,
        ("reduce-scatter", "forward"): 2,
        ("all-gather", "backward"): 2 + 2,
        ("reduce-scatter", "backward"): 2,
    }


def test_control_a_wrong_table_moves_something_else(topology):
    """Where a table leaves hidden units whole, the counts above notice."""
    found = collectives(topology)
    wrong, right = (of_one_layer(found[name], "linear.py", TOKENS) for name in ("wrong", "width"))
    assert wrong != right


def test_each_kernel_is_gathered_over_fsdp_and_sequence_once(topology):
    """In two hops, one over each axis; the order of tokens compiles beside fsdp, too."""
    records = collectives(topology)["two axes"]
    of_kernel = [
        (kind, times / LAYERS)
        for kind, _, _, array, times, _ in records
        if array.startswith("params/layers/mlp/gate_proj") and kind == "all-gather"
    ]
    assert sum(times for _, times in of_kernel) == 2, of_kernel
    assert any("zigzag" in source for _, source, *_ in records)


def test_no_kernel_is_gathered(topology):
    """Over `tensor`, activations travel and never kernels."""
    found = collectives(topology)
    gathered = [
        array
        for name in ("width", "tokens")
        for kind, _, _, array, *_ in found[name]
        if kind == "all-gather"
    ]
    assert not [array for array in gathered if "kernel" in array]


def test_a_ring_sends_keys_and_values_seven_times(topology):
    """On eight devices each goes around in seven permutes, backward again, and their gradients in seven more."""
    found = collectives(topology)["ring"]
    assert of_one_layer(found, "ring_attention.py") == {
        ("collective-permute", "forward"): 2 * 7,
        ("collective-permute", "backward"): 2 * 7 + 2 * 7,
    }
    gathered = [source for kind, source, *_ in found if kind == "all-gather"]
    assert not [source for source in gathered if "attention" in source]


def test_keys_and_values_are_gathered_twice(topology):
    """Forward, and again for the backward pass; their gradients are scattered; late blocks are mirrored each time.

    GPUs, which have no splash attention, refuse it.
    """
    found = collectives(topology)["gather"]
    if parse_topology(topology).platform != "tpu":
        assert "splash needs a TPU, and the mesh is of cuda devices" in found
        return
    assert of_one_layer(found, "gathered_attention.py") == {
        ("collective-permute", "forward"): 2,
        ("all-gather", "forward"): 2,
        ("collective-permute", "backward"): 2 + 2,
        ("all-gather", "backward"): 2,
        ("reduce-scatter", "backward"): 2,
    }


def test_heads_are_exchanged_for_tokens_four_times(topology):
    """Queries, keys, values and the output, forward and backward."""
    found = of_one_layer(collectives(topology)["all-to-all"], "ring_attention.py")
    assert found == {("all-to-all", "forward"): 4, ("all-to-all", "backward"): 4}
