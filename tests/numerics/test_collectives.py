"""The audit finds what hand-written programs are known to send: kind, axes, bytes, how often; and what is too much."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from spmd.analysis.collective_audit import audit_collectives, expect_collectives
from spmd.errors import MeshError
from spmd.sharding.mesh import MeshShape, abstract_mesh, make_mesh
from tests.hlo_texts import ADD, ASYNC, CHAINED, CUBE, FUSED, GATHERED, PAIRS, SCATTERED, text

pytestmark = pytest.mark.compat

ALL = ("data", "fsdp", "tensor")
LOCAL = 16 * 8 * 4  # bytes of float32[16, 8], what each device holds of float32[128, 8]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


def audit(mesh, f, *, dtype=jnp.float32, shape=(128, 8)):
    """The audit of `f` run by hand on each device's part of an array that is split over all of them."""
    spec = P(ALL)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return audit_collectives(mapped.lower(jax.ShapeDtypeStruct(shape, dtype)).compile(), mesh)


def summary(audited):
    return [(r.kind, r.over, r.payload, r.executions) for r in audited.records]


AXES = ["data", "fsdp", "tensor", ("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"), ALL]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_each_kind_over_each_axis(mesh, axes) -> None:
    """Every kind, over each axis and each pair, has exactly its payload, and an all-reduce twice that on the wire."""
    over = axes if isinstance(axes, str) else "+".join(axes)
    n = 2 if isinstance(axes, str) else 2 ** len(axes)
    ring = [(i, (i + 1) % n) for i in range(n)]
    programs = {
        "all-reduce": (lambda x: jax.lax.psum(x, axes), LOCAL),
        "reduce-scatter": (
            lambda x: jnp.tile(jax.lax.psum_scatter(x, axes, tiled=True), (n, 1)),
            LOCAL,
        ),
        "all-gather": (lambda x: jax.lax.all_gather(x, axes, tiled=True)[:16], LOCAL * n),
        "all-to-all": (lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True), LOCAL),
        "collective-permute": (lambda x: jax.lax.ppermute(x, axes, ring), LOCAL),
    }
    for kind, (f, payload) in programs.items():
        audited = audit(mesh, f)
        assert summary(audited) == [(kind, over, payload, 1)], kind
        assert audited.bytes() == payload * (2 if kind == "all-reduce" else 1), kind


def test_sixteen_bits(mesh) -> None:
    """What XLA:CPU widens to float32 counts as the 16-bit data it is, and the record says how it is written."""
    audited = audit(
        mesh,
        lambda x: jax.lax.psum(x, "data") + jax.lax.ppermute(x, "fsdp", [(0, 1)]),
        dtype=jnp.bfloat16,
    )
    assert sorted((r.kind, r.payload, r.hlo_form) for r in audited.records) == [
        ("all-reduce", LOCAL // 2, "f32 all-reduce"),
        ("collective-permute", LOCAL // 2, "f32 collective-permute"),
    ]
    assert "all-reduce is written as f32 all-reduce" in str(audited)


def test_loops(mesh) -> None:
    """A collective runs as often as all loops around it turn; a loop of unknown length is said to be one."""

    def inner(x, _):
        return jnp.sin(jax.lax.psum(x, "data")), None

    def outer(x, _):
        return jax.lax.ppermute(
            jax.lax.scan(inner, x, None, length=3)[0], "tensor", [(0, 1), (1, 0)]
        ), None

    def until(x):
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: jax.lax.psum(y, "fsdp") + 1, x)

    counted = audit(mesh, lambda x: jax.lax.scan(outer, x, None, length=5)[0])
    assert sorted(summary(counted)) == [
        ("all-reduce", "data", LOCAL, 15),
        ("collective-permute", "tensor", LOCAL, 5),
    ]
    assert all(r.is_counted for r in counted.records)
    unknown = audit(mesh, until)
    assert [(r.over, r.executions, r.is_counted) for r in unknown.records] == [("fsdp", 1, False)]
    assert "≥" in str(unknown)
    assert ["unknown length" in w.what for w in unknown.warnings] == [True]
    with pytest.raises(AssertionError, match="loop of unknown length"):
        expect_collectives(unknown, all_reduce=LOCAL, ignore_below=0)


def test_branches(mesh) -> None:
    """A collective in a branch counts once and is marked."""

    def f(x):
        flag = jax.lax.pmax(x[0, 0] > 0, ALL)
        return jax.lax.cond(flag, lambda y: jax.lax.psum(y, "data"), lambda y: y, x)

    records = [r for r in audit(mesh, f).records if r.payload == LOCAL]
    assert [(r.kind, r.over, r.executions, r.is_conditional) for r in records] == [
        ("all-reduce", "data", 1, True)
    ]


def test_where_it_comes_from(mesh) -> None:
    """A record has the operation's name, the line of source, and the argument that is moved, through loops."""

    def f(params, x):
        def layer(y, kernel):
            whole = jax.lax.all_gather(kernel.astype(jnp.bfloat16), "fsdp", tiled=True)
            return y @ whole.astype(y.dtype), None

        return jax.lax.scan(layer, x, params["layers"]["kernel"])[0]

    specs = ({"layers": {"kernel": P(None, "fsdp")}}, P("data"))
    mapped = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    )
    kernels = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    compiled = mapped.lower(
        {"layers": {"kernel": kernels}}, jax.ShapeDtypeStruct((4, 8), jnp.float32)
    ).compile()
    (record,) = audit_collectives(compiled, mesh).records
    assert (record.array, record.executions, record.over) == ("params/layers/kernel", 3, "fsdp")
    assert record.op_name.endswith("all_gather")
    assert record.source.startswith("tests/numerics/test_collectives.py:")


def test_permuted_mesh() -> None:
    """Partition numbers are places in the mesh, whatever numbers the devices have."""
    turned = make_mesh(
        devices=[jax.devices()[i] for i in (5, 2, 7, 0, 1, 4, 3, 6)], data=4, tensor=2
    )
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "tensor"),
        mesh=turned,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    compiled = jax.jit(f).lower(jax.ShapeDtypeStruct((64, 8), jnp.float32)).compile()
    assert summary(audit_collectives(compiled, turned)) == [("all-reduce", "tensor", LOCAL, 1)]


@pytest.mark.parametrize(("body", "expected"), ASYNC)
def test_asynchronous_forms(body, expected) -> None:
    """Starts and ends count once, in pairs, wrapped, combined, and in the chains of fusions that TPUs make of them."""
    assert (
        summary(
            audit_collectives(
                text(body.replace("PAIRS", PAIRS), ADD + CHAINED), CUBE, backend="gpu"
            )
        )
        == expected
    )


@pytest.mark.parametrize(
    ("operation", "keeps_part"), [("remainder", True), ("divide", False), ("add", False)]
)
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_all_reduce_and_slice(operation, keeps_part, backend) -> None:
    """An all-reduce of which each device keeps another part is a reduce-scatter on a CPU, where XLA has no other; on
    other backends it is the all-reduce that it is, with its bytes and a warning or, as a TPU
    does it always, a note."""
    body = SCATTERED.replace("OP", operation).replace("PAIRS", PAIRS)
    if operation == "add":
        body = (
            body.replace("ROOT part", "part")
            + "ROOT used = (f32[4,8]{1,0}, f32[2,8]{1,0}) tuple(whole, part)\n"
        )
    audited = audit_collectives(text(body, ADD), CUBE, backend=backend)
    kind = "reduce-scatter" if keeps_part and backend == "cpu" else "all-reduce"
    assert summary(audited) == [(kind, "tensor", 128, 1), ("all-reduce", "tensor", 4, 1)]
    assert [r.equivalent_kind for r in audited.records] == [
        "reduce-scatter" if keeps_part else "",
        "",
    ]
    assert audited.bytes() == (128 if kind == "reduce-scatter" else 256) + 8
    assert bool(audited.warnings) is (keeps_part and backend == "gpu")
    expect_collectives(
        audited, **{kind.replace("-", "_"): {"tensor": audited.records[0].bytes}}, ignore_below=8
    )


def test_a_tpu_fuses_an_all_reduce_and_a_slice() -> None:
    """Then it is a reduce-scatter, however the places of parts are computed; in another fusion it is not."""
    body = """
        x = f32[3,8]{1,0} parameter(0)
        start = u32[] parameter(1)
        ROOT s = f32[2,8]{1,0} fusion(x, start), kind=kCustom, calls=NAME
    """
    for name, kind in (
        ("all-reduce-scatter.1", "reduce-scatter"),
        ("fused_computation", "all-reduce"),
    ):
        called = FUSED.replace("PAIRS", PAIRS).replace("all-reduce-scatter.1", name)
        audited = audit_collectives(
            text(body.replace("NAME", name), ADD + called), CUBE, backend="tpu"
        )
        assert summary(audited) == [(kind, "tensor", 128, 1)]
        assert audited.bytes() == (128 if kind == "reduce-scatter" else 256)
        assert not audited.warnings
        assert ("reduce-scatter is written as all-reduce-scatter" in str(audited)) is (
            kind == "reduce-scatter"
        )


@pytest.mark.parametrize(
    ("rows", "into", "equivalent_kind"),
    [(2, "zeros", "all-gather"), (1, "zeros", ""), (2, "others", "")],
)
def test_an_all_reduce_of_zeros_with_own_parts(rows, into, equivalent_kind) -> None:
    """It is an all-reduce with twice the bytes of the gather that it stands for, of the array that the parts are of."""
    body = f"""
        x = f32[{rows},8]{{1,0}} parameter(0), metadata={{op_name="state.params['mlp']['kernel']"}}
        id = u32[] partition-id()
        zero = u32[] constant(0)
        nought = f32[] constant(0)
        zeros = f32[4,8]{{1,0}} broadcast(nought), dimensions={{}}
        others = f32[4,8]{{1,0}} parameter(1)
        own = f32[4,8]{{1,0}} dynamic-update-slice({into}, x, id, zero)
        ROOT r = f32[4,8]{{1,0}} all-reduce(own), PAIRS, to_apply=add
    """
    audited = audit_collectives(text(body.replace("PAIRS", PAIRS), ADD), CUBE, backend="tpu")
    assert [(r.kind, r.bytes, r.equivalent_kind) for r in audited.records] == [
        ("all-reduce", 256, equivalent_kind)
    ]
    assert (audited.records[0].array == "params/mlp/kernel") is bool(equivalent_kind)


def test_a_note_tells_what_is_sent_in_vain() -> None:
    """All-reduces of a TPU that stand for another collective are summed in one line, and not warned of."""
    body = (
        SCATTERED.replace("OP", "remainder")
        .replace("PAIRS", PAIRS)
        .replace("4,8", "4,800")
        .replace("2,8", "2,800")
    )
    audited = audit_collectives(text(body, ADD), CUBE, backend="tpu")
    assert (
        "of all-reduce over tensor, 25 KiB stand for reduce-scatters, with twice their bytes"
        in str(audited)
    )
    assert not audited.warnings


@pytest.mark.parametrize(
    ("name", "groups", "operation", "warning"),
    [
        (
            "state.params['mlp']['kernel']",
            "[4,2]<=[8]",
            "dot_general",
            "parameter gathered over tensor",
        ),
        ("state.params['mlp']['kernel']", "[2,4]<=[4,2]T(1,0)", "dot_general", ""),
        ("", "[2,4]<=[4,2]T(1,0)", "dot_general", "made whole"),
        ("", "[4,2]<=[8]", "dot_general", "made whole"),
        ("", "[4,2]<=[8]", "sharding_constraint", ""),
        ("", "[4,2]<=[8]", "sharding_constraint:jit(f)/dot_general", ""),  # of two gathers in one
        ("", "[2,4]<=[4,2]T(1,0)", "all_gather", ""),
    ],
)
def test_warnings(name, groups, operation, warning) -> None:
    """A parameter gathered over tensor and an activation gathered unasked are warned of; what was asked for is not."""
    body = (
        GATHERED.replace("NAME", name)
        .replace("GROUPS", f"replica_groups={groups}")
        .replace("OPERATION", operation)
    )
    audited = audit_collectives(
        text(body), abstract_mesh(MeshShape(fsdp=4, tensor=2)), backend="gpu"
    )
    expected = "fsdp" if "T(1,0)" in groups else "tensor"
    assert [r.over for r in audited.records] == [expected]
    assert [warning in w.what for w in audited.warnings] == [True] * bool(warning)


def test_wrong_mesh() -> None:
    """A program for eight devices is not audited on a mesh of four."""
    with pytest.raises(MeshError, match="the program 8, the mesh 4"):
        audit_collectives(text("ROOT x = f32[] parameter(0)"), abstract_mesh(MeshShape(fsdp=4)))


@pytest.fixture(scope="module")
def known(mesh):
    """Two all-reduces over data, one over data and tensor, and a gather over fsdp."""

    def f(x):
        y = jnp.sin(jax.lax.psum(x, "data")) + 1
        z = jax.lax.psum(jnp.sin(jax.lax.psum(jnp.cos(y), ("data", "tensor"))) * 2, "data")
        return jax.lax.all_gather(z, "fsdp", tiled=True)[:128] + z

    return audit(mesh, f, shape=(1024, 8))


def test_expectations(known) -> None:
    """Exact bytes, any amount, axes in any order, and kinds that must not occur all pass where they are true."""
    size = 8 * LOCAL
    reduced = {"data": 2 * 2 * size, "tensor+data": ...}
    expect_collectives(
        known,
        all_reduce=2 * 3 * size,
        all_gather={"fsdp": 2 * size},
        all_to_all=0,
        collective_permute={},
    )
    expect_collectives(known, all_reduce=reduced, reduce_scatter=0)
    assert known.bytes("all-reduce", "tensor+data") == 2 * size
    assert known.bytes("all-gather") == 2 * size
    assert known.bytes() == 8 * size


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"all_reduce": 0}, "all-reduce over all axes: 24,576 bytes in each step; expected 0"),
        (
            {"all_reduce": {"data": 4 * 8 * LOCAL}},
            r"all-reduce over data\+tensor: 8,192 bytes in each step; expected 0",
        ),
        (
            {"all_gather": {"fsdp": 8000}},
            "all-gather over fsdp: 8,192 bytes in each step; expected 8,000",
        ),
        ({"all_to_all": {"fsdp": ...}}, "all-to-all over fsdp: expected, and there is none"),
    ],
)
def test_control_a_collective_too_many_is_caught(known, expected, message) -> None:
    """Each kind of difference fails, and the message has it and the table."""
    with pytest.raises(AssertionError, match=message) as caught:
        expect_collectives(known, **expected)
    assert str(known) in str(caught.value)


def test_table_and_json(known) -> None:
    """The table is stable and at most 120 columns wide, and JSON has every record."""
    lines = str(known).splitlines()
    assert lines[0].startswith("mesh data=2 fsdp=2 tensor=2   cpu")
    assert max(map(len, lines)) <= 120
    assert [line.split()[2:] for line in lines[3:6]] == [
        ["all-reduce", "data", "2", "4", "KiB"],
        ["all-gather", "fsdp", "1", "8", "KiB"],
        ["all-reduce", "data+tensor", "1", "4", "KiB"],
    ]
    values = json.loads(json.dumps(known.to_json()))
    assert (
        values["bytes"] == known.bytes() == sum(record["bytes"] for record in values["collectives"])
    )
