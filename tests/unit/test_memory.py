"""The ledger's estimate is made of what the plan, the trace and the compiler's rules say; each is checked alone."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.analysis.bf16_operands import narrow_operands
from spmd.analysis.liveness import Buffer, find_buffers, heap_bytes, peak_buffers, saved_activations
from spmd.analysis.memory import CompiledMemory, Estimate, MemoryReport, estimate_memory
from spmd.analysis.topology import parse_topology
from spmd.jaxpr.propagation import place, propagate
from spmd.jaxpr.traced_program import read_program
from spmd.layers.splash_attention import splash_attention
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.training.step import make_train_step
from tests import tiny

AXES = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 2}
MESH = abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))


def program(function, *arguments, **options):
    """A function of arrays `(shape, spec)` in float32, traced and propagated."""
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(MESH, p)) for s, p in arguments
    ]
    traced = read_program(jax.make_jaxpr(function)(*shapes), **options)
    for value, shape in zip(traced.inputs, shapes, strict=True):
        place(value, shape.sharding)
    propagate(traced)
    return traced


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def test_a_pallas_kernel_is_one_operation():
    """Of splash attention, what goes in and comes out is counted, and nothing of what it does inside."""
    heads = [((2, 256, 4, 128), P())] * 3
    traced = program(lambda q, k, v: splash_attention(q, k, v, None, interpret=True), *heads)
    (kernel,) = [
        operation for operation in traced.operations if operation.primitive == "pallas_call"
    ]
    assert not kernel.bodies
    found = [buffer.bytes for buffer in find_buffers(traced, AXES, traced.outputs)]
    assert 4 * 2 * 4 * 256 * 128 in found


@pytest.mark.parametrize(
    ("function", "arguments", "dims"),
    [
        (
            lambda x, w: x @ w,
            [((8, 6), P("data", "fsdp")), ((6, 4), P("fsdp", "tensor"))],
            [("data",), ("tensor",)],
        ),
        (lambda x, w: x @ w, [((8, 6), P("data")), ((6, 4), P(None, "data"))], [("data",), ()]),
        (lambda x: x.T, [((8, 6), P("data"))], [(), ("data",)]),
        (
            lambda x: x.reshape(8, 2, 3),
            [((8, 6), P("data", "tensor"))],
            [("data",), ("tensor",), ()],
        ),
        (lambda x: x.reshape(4, 12), [((4, 2, 6), P("data", "fsdp"))], [("data",), ("fsdp",)]),
        (lambda x: x.sum(0), [((8, 6), P("data", "tensor"))], [("tensor",)]),
        (
            lambda x, y: jnp.sin(x) + y,
            [((8, 6), P()), ((8, 6), P(None, "tensor"))],
            [(), ("tensor",)],
        ),
        (lambda x: constrain(x, "fsdp"), [((8, 6), P("data"))], [("fsdp",), ()]),
        (
            lambda x: constrain(x, P.UNCONSTRAINED, "fsdp"),
            [((8, 6), P("data", "tensor"))],
            [("data",), ("fsdp",)],
        ),
        (lambda x: jax.jit(jnp.cos)(x)[:4], [((8, 6), P(None, "tensor"))], [(), ("tensor",)]),
        (
            lambda t: t.at[jnp.zeros(3, int)].get(mode="clip"),
            [((8, 6), P(None, "tensor"))],
            [(), ("tensor",)],
        ),
        (
            lambda x: jax.lax.scan(lambda c, row: (c, c * row), x[0], x)[1],
            [((4, 6), P(None, "fsdp"))],
            [(), ("fsdp",)],
        ),
    ],
)
def test_results_are_split_as_their_operands(function, arguments, dims):
    """Products, transposes, reshapes, sums, look-ups, loops and constraints, inside of calls too."""
    (output,) = program(function, *arguments).outputs
    assert output.dims == tuple(dims)


def test_a_value_is_as_large_as_its_part():
    """And a part that does not divide is padded."""
    assert program(jnp.sin, ((8, 6), P("data", "tensor"))).outputs[0].bytes(AXES) == 4 * 3 * 4
    assert program(jnp.sin, ((7, 6), P("data"))).outputs[0].bytes(AXES) == 4 * 6 * 4


def test_what_is_fused_takes_no_memory():
    """A chain of element-wise operations between two products is written over what it begins with."""
    traced = program(
        lambda x, w: jnp.tanh(jnp.sin(x @ w) * 2 + 1) @ w, ((8, 8), P()), ((8, 8), P())
    )
    assert [buffer.bytes for buffer in find_buffers(traced, AXES, traced.outputs)] == [256]


def test_the_peak_is_where_most_is_live():
    """A large value that is read early does not count later."""

    def function(x):
        wide = x @ x.T  # [64, 64], read at once
        return (wide @ x).T @ x  # [64, 8], [8, 8]

    buffers = find_buffers(program(function, ((64, 8), P())), AXES)
    assert sorted(buffer.bytes for buffer in peak_buffers(buffers)) == [64 * 8 * 4, 64 * 64 * 4]


def test_what_a_loop_saves_is_found():
    """The stack of residuals, split as its slices; remat saves the carry alone, and the loop's turns share the rest."""

    def loss(remat):
        def layer(x, w):
            return jnp.tanh(constrain(x @ w, "data", "tensor")) @ w.T, None

        layer = jax.checkpoint(layer) if remat else layer
        return lambda x, ws: jax.lax.scan(layer, x, ws)[0].sum()

    arguments = ((8, 16), P("data")), ((4, 16, 32), P(None, None, "tensor"))
    plain = program(jax.grad(loss(False), argnums=1), *arguments)
    saved = {buffer.shape: buffer.bytes for buffer in saved_activations(plain, AXES)}
    assert saved[(4, 8, 32)] == 4 * 4 * 16 * 4
    remat = program(jax.grad(loss(True), argnums=1), *arguments)
    assert {buffer.shape for buffer in saved_activations(remat, AXES)} == {(4, 8, 16)}


def test_a_condition_writes_over_what_it_may_give_back():
    """A sum that one branch adds to and the other returns as it is is one buffer; what both make anew is another."""

    def function(x, gives_back):
        other = (lambda total: total) if gives_back else (lambda total: total @ total)
        return jax.lax.cond(x[0, 0] > 0, lambda total: total + x @ x, other, x @ x.T) @ x

    def count(gives_back):
        buffers = find_buffers(program(lambda x: function(x, gives_back), ((64, 64), P())), AXES)
        return [buffer.bytes for buffer in buffers].count(64 * 64 * 4)

    assert count(False) == count(True) + 1


def test_slots_are_split_as_what_is_put_into_them():
    """What a loop begins with as zeros lies as what is carried in the end, through branches that know nothing of it."""

    def turn(carry, x):
        slots, last = carry
        slots = jax.lax.dynamic_update_index_in_dim(slots, last, 0, 0)
        zeros = jnp.zeros((8, 16))
        return (
            slots,
            jax.lax.cond(x.sum() > 0, lambda: constrain(x + slots[1], "data"), lambda: zeros),
        ), None

    def function(xs):
        return jax.lax.scan(turn, (jnp.zeros((3, 8, 16)), jnp.zeros((8, 16))), xs)[0][0]

    assert program(function, ((4, 8, 16), P())).outputs[0].dims == ((), ("data",), ())


def test_inside_a_manual_region_values_are_parts():
    """Their shapes are local along its axes; outside, a result is split along those and as it is inside."""

    def function(x):
        specs = {
            "in_specs": P("data"),
            "out_specs": P("data"),
            "axis_names": {"data"},
            "check_vma": False,
        }
        return jax.shard_map(lambda x: x @ x.T @ x, mesh=MESH, **specs)(x)

    traced = program(function, ((8, 6), P("data", "tensor")))
    (region,) = [operation for operation in traced.operations if operation.bodies]
    assert region.bodies[0].inputs[0].dims == ((), ("tensor",))
    assert region.outputs[0].dims == (("data",), ("tensor",))
    assert traced.outputs[0].bytes(AXES) == 4 * 3 * 4


def test_what_a_manual_region_gathers_is_no_gradient():
    """A kernel that a region gathers has its shape, and is a gathered array; a product of that shape is none."""

    def function(x, kernel):
        specs = {"in_specs": (P("fsdp"), P("fsdp")), "out_specs": P("fsdp"), "axis_names": {"fsdp"}}

        def local(x, kernel):
            whole = jax.lax.all_gather(kernel, "fsdp", tiled=True)
            return x @ whole @ (x.T @ x)

        return jax.shard_map(local, mesh=MESH, **specs, check_vma=False)(x, kernel)

    buffers = find_buffers(program(function, ((32, 8), P("fsdp")), ((8, 8), P("fsdp"))), AXES)
    assert sorted(b.kind for b in buffers if b.shape == (8, 8)) == ["gathered", "value"]


def test_a_tpu_rounds_what_it_only_multiplies():
    """What products alone read takes half the bytes, in stacks of a loop too; but not for a sum or a high precision."""

    def stack(read):
        def turn(x, w):
            wide = jnp.tanh(x)
            return x + wide @ w, wide

        traced = program(
            lambda x, ws: read(jax.lax.scan(turn, x, ws)[1]), ((8, 64), P()), ((4, 64, 64), P())
        )
        narrow_operands(traced)
        return {buffer.shape: buffer.bytes for buffer in saved_activations(traced, AXES)}[4, 8, 64]

    def products(stack, precision=None):
        return jnp.einsum("nij,nkj->ik", stack, stack, precision=precision)

    assert stack(products) == 4 * 8 * 64 * 2
    assert stack(lambda wides: wides.sum()) == 4 * 8 * 64 * 4
    assert stack(lambda wides: products(wides, "highest")) == 4 * 8 * 64 * 4


@pytest.mark.parametrize("eager", [False, True])
def test_an_unrolled_loop_is_straight(eager):
    """Its turns are written out; run eagerly, all of them are recomputed before the first is differentiated."""

    def function(x, ws):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) @ w.T, None))
        return jax.lax.scan(layer, x, ws, unroll=4)[0].sum()

    traced = program(jax.grad(function, argnums=1), ((64, 8), P()), ((4, 8, 64), P()), eager=eager)
    assert not any(operation.primitive == "scan" for operation in traced.operations)
    recomputed = [
        buffer for buffer in peak_buffers(find_buffers(traced, AXES)) if buffer.shape == (64, 64)
    ]
    assert (len(recomputed) >= 4) == eager


def test_a_heap_has_holes():
    """Buffers that live apart share a place; a hole that nothing fits into is counted."""

    def buffer(size, start, end):
        return Buffer("value", "", (), size, False, start, end)

    assert heap_bytes([buffer(10, 0, 1), buffer(8, 2, 3)]) == 10
    assert heap_bytes([buffer(10, 0, 1), buffer(8, 1, 3)]) == 18
    assert heap_bytes([buffer(10, 0, 1), dataclasses.replace(buffer(8, 1, 3), on_host=True)]) == 10
    assert heap_bytes([]) == 0


def step(zero, remat="none", precision="float32"):
    mesh = abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    options = {"zero": zero, "remat": remat, "precision": precision}
    plan = make_plan(mesh, tiny.LLAMA, tiny.model(), tiny.OPTIMIZER, **options)
    return make_train_step(plan, tiny.loss_fn())


def batch(examples=8, seq=16):
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((examples, seq), dtype) for name, dtype in dtypes.items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_state_is_what_the_plan_says(zero):
    """Parameters, gradients and optimizer state to the byte; the parts at the peak add up to the total."""
    made = step(zero)
    estimate, known = estimate_memory(made, batch()), made.plan.bytes_per_device()
    assert estimate.held["params"] == known["params"]
    assert estimate.held["grads"] == known["gradients"]
    assert estimate.held["optimizer"] == known["optimizer_state"]
    assert estimate.held["batch"] == 3 * 8 * 16 * 4 // 4
    assert estimate.total == sum(estimate.at_peak.values())
    for name, found in estimate.copies.items():
        assert sum(size * count for (_, size), count in found.items()) == estimate.at_peak[name]


def test_activations_follow_the_policy_the_batch_and_the_dtype():
    """Twice the batch saves twice as much; remat saves the layers' inputs alone; bfloat16 saves half of that."""
    full = estimate_memory(step(3, "full"), batch(), "tpu")
    # split over all eight devices
    layers, each = tiny.CONFIG.layers, 8 * 16 * tiny.CONFIG.d_model // 8
    assert full.held["activations"] == layers * each * 4
    assert (
        estimate_memory(step(3, "full", "bf16"), batch(), "tpu").held["activations"]
        == layers * each * 2
    )
    none = estimate_memory(step(3), batch(), "tpu")
    assert none.held["activations"] > 5 * full.held["activations"]
    assert (
        estimate_memory(step(3), batch(16), "tpu").held["activations"]
        == 2 * none.held["activations"]
    )


def test_the_ledger_says_what_its_columns_are():
    """Each array once, and all copies at the peak; where these are more, the largest are named by their shape."""
    held = {"params": 2**20, "grads": 2**20, "logits": 2**20, "collectives": 7, "temporaries": 7}
    now = {**held, "grads": 6 * 2**20, "logits": 2**19}
    copies = {
        "grads": {("64×4096", 2 * 2**20): 2, ("8×8", 2**20): 2},
        "logits": {("4×4", 2**19): 1},
    }
    lines = str(
        MemoryReport(parse_topology("cpu:8"), Estimate(held, now, {}, {}, 0, copies))
    ).splitlines()
    assert [line.split("  ") for line in map(str.strip, lines[:1])] == [
        ["each array once", "live at the peak"]
    ]
    rows = [[cell for cell in line.strip().split("  ") if cell] for line in lines[1:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["parameters", "1 MiB", "1 MiB"],
        ["gradients", "1 MiB", "6 MiB"],
        ["2 × [64×4096] of 2 MiB", "4 MiB"],
        ["2 × [8×8] of 1 MiB", "2 MiB"],
        ["logits and loss", "1 MiB", "512 KiB"],
        ["gathered arrays", "7 B"],
        ["temporaries", "7 B"],
        ["estimated on each device", "7.5 MiB"],
    ]
    assert {len(line) for line in lines if line.endswith("B")} == {len(lines[0])}


def test_the_ledger_compares_with_the_chip():
    """Compiled bytes count where they are known; what is left may be negative."""
    small, large = (
        Estimate({}, {"params": size, "temporaries": 7}, {}, {"optimizer": 2**30})
        for size in (1, 2**40)
    )
    chip = parse_topology("v5e:2x4")
    assert MemoryReport(chip, small).fits is True
    assert MemoryReport(chip, large).fits is False
    assert MemoryReport(chip, large).largest == "params"
    assert MemoryReport(chip, large, CompiledMemory(1, 1, 1, 1, 0, 0)).fits is True
    assert MemoryReport(parse_topology("cpu:8"), large).fits is None
    printed = str(MemoryReport(chip, large))
    assert "−" in printed.splitlines()[-2]
    assert "on a host of 4" in printed
    assert printed.splitlines()[-1].endswith("4 GiB")
