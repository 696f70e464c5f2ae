"""The bits of a transfer: its dtype in every form that compilers write, and promises of it that a program breaks."""

import dataclasses
import functools
import json

import numpy as np
import optax
import pytest

from spmd.analysis.causes import USED_WHOLE
from spmd.analysis.collective_audit import audit_collectives, expect_collectives
from spmd.analysis.comm_dtypes import CommDtypeCheck, comm_dtype_checks, wider_transfers
from spmd.analysis.replica_groups import cross_slice_count
from spmd.commands import plan as plan_command
from spmd.commands.plan import run_plan
from spmd.partition_rules.llama import LLAMA
from spmd.plan.plan import make_plan
from spmd.precision import make_precision
from spmd.run.planned_step import CompiledStep, CompileTime
from spmd.run.step_source import CompiledOn
from spmd.sharding.mesh import MeshShape, abstract_mesh
from tests import tiny
from tests.hlo_texts import ADD, CUBE, PAIRS, text

SEND = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="KIND.1_0",'
    '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="KIND"}'
)
BETWEEN = f"""
    x = f32[4,256]{{1,0}} parameter(0), metadata={{op_name="state.params['mlp']['kernel']"}}
    c = s8[4,256]{{1,0}} convert(x)
    t = token[] after-all()
    s = (s8[4,256]{{1,0}}, u32[], token[]) send(c, t), channel_id=1, {SEND}
    r = (s8[8,256]{{1,0}}, u32[], token[]) recv(t), channel_id=2, {SEND}
    e = token[] send-done(s), channel_id=1
    d = (s8[8,256]{{1,0}}, token[]) recv-done(r), channel_id=2
    g = s8[8,256]{{1,0}} get-tuple-element(d), index=0
    ROOT a = s8[16,256]{{1,0}} all-gather(g), replica_groups={{{{0,1}}}}, channel_id=3, dimensions={{0}}
"""
WIDENED = """
    x = f32[4,8]{1,0} parameter(0)
    n = NARROW[4,8]{1,0} convert(x)
    w = WIDE[4,8]{1,0} convert(n)
    g = WIDE[8,8]{1,0} all-gather(w), PAIRS, dimensions={0}
    ROOT r = NARROW[8,8]{1,0} convert(g)
"""
# XLA:CPU combines all-reduces after it widened them, and drops the mark.
COMBINED = """
    x = f32[4,8]{1,0} parameter(0)
    n = bf16[4,8]{1,0} convert(x)
    w = f32[4,8]{1,0} convert(n)
    s = (f32[4,8]{1,0}, f32[4,8]{1,0}) all-reduce(w, x), PAIRS, to_apply=add
    g = f32[4,8]{1,0} get-tuple-element(s), index=0
    h = f32[4,8]{1,0} get-tuple-element(s), index=1
    ROOT r = (AFTER[4,8]{1,0}, f32[4,8]{1,0}) tuple(k, h)
    k = AFTER[4,8]{1,0} convert(g)
"""
SEVERAL = """
    x = s8[4,8]{1,0} parameter(0)
    y = f8e4m3fn[4,8]{1,0} parameter(1)
    s = ((s8[4,8], f8e4m3fn[4,8]), (s8[8,8], f8e4m3fn[8,8])) all-gather-start(x, y), PAIRS, dimensions={0}
    ROOT d = (s8[8,8]{1,0}, f8e4m3fn[8,8]{1,0}) all-gather-done(s)
"""


def audit(body, backend="gpu", mesh=CUBE, devices=8, **options):
    return audit_collectives(
        text(body.replace("PAIRS", PAIRS), ADD, devices), mesh, backend=backend, **options
    )


@pytest.mark.parametrize(
    ("body", "backend", "expected"),
    [
        (WIDENED.replace("NARROW", "bf16").replace("WIDE", "f32"), "cpu", [("bf16", 128)]),
        (WIDENED.replace("NARROW", "f8e4m3fn").replace("WIDE", "f16"), "cpu", [("f8e4m3fn", 64)]),
        (WIDENED.replace("NARROW", "f8e5m2").replace("WIDE", "f16"), "cpu", [("f8e5m2", 64)]),
        (WIDENED.replace("NARROW", "s8").replace("WIDE", "f32"), "cpu", [("f32", 256)]),
        (WIDENED.replace("NARROW", "bf16").replace("WIDE", "f32"), "gpu", [("f32", 256)]),
        (COMBINED.replace("AFTER", "bf16"), "cpu", [("bf16", 64), ("f32", 128)]),
        (COMBINED.replace("AFTER", "f32"), "cpu", [("f32", 128), ("f32", 128)]),
        (SEVERAL, "gpu", [("s8", 64), ("f8e4m3fn", 64)]),
    ],
)
def test_dtypes_are_those_of_the_data(body, backend, expected) -> None:
    """XLA:CPU's widening of floats is undone, and only that; a combined collective has a record for each dtype."""
    assert [(r.dtype, r.payload) for r in audit(body, backend).records] == expected


@pytest.mark.parametrize(("kind", "payload"), [("ALL_GATHER", 2048), ("ALL_TO_ALL", 1024)])
def test_transfers_between_slices_have_a_dtype_and_an_array(kind, payload) -> None:
    """A send has the dtype of its data and no other operand; the gather of what was received is of the same array."""
    mesh = abstract_mesh(MeshShape(fsdp=4))
    records = audit(BETWEEN.replace("KIND", kind), "tpu", mesh, 2, slices={"fsdp": 2}).records
    sent = ("s8", "s8[4,256]", payload, True, "params/mlp/kernel")
    inside = ("s8", "s8[8,256]", 4096, False, "params/mlp/kernel")
    assert [(r.dtype, r.operand, r.payload, r.crosses, r.array) for r in records] == [sent, inside]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "f/param(layers/(up/kernel)/g:down/kernel)/g)",
            ["f/param(layers/up/kernel)/g", "f/param(layers/down/kernel)/g"],
        ),
        ("f/param(layers/up/kernel)/g", ["f/param(layers/up/kernel)/g"] * 2),
        # names of three
        ("f/param((up)/g:down)/g:head)/g)", ["f/param((up)/g:down)/g:head)/g)"] * 2),
    ],
    ids=["of two arrays", "alike", "of three arrays"],
)
def test_names_of_a_combined_collective(name, expected) -> None:
    """XLA:GPU joins the names of the arrays: each has its own again."""
    last = "dimensions={0}\n    ROOT"
    records = audit(
        SEVERAL.replace(last, f'dimensions={{0}}, metadata={{op_name="{name}"}}\n    ROOT')
    ).records
    assert [record.op_name for record in records] == expected


def test_bytes_by_dtype() -> None:
    """They are in the tables, in JSON, and may be asked for."""
    audited = audit(SEVERAL.replace("4,8]", "400,8]").replace("[8,8]", "[800,8]"))
    assert ["6.25", "KiB", "s8", "tensor", "1"] in [
        line.split()[:5] for line in str(audited).splitlines()
    ]
    assert audited.bytes(dtype="s8") == audited.bytes("all-gather", "tensor", "f8e4m3fn") == 6400
    values = json.loads(json.dumps(audited.to_json()))
    assert values["dtype_bytes"] == {"f8e4m3fn": 6400, "s8": 6400}
    assert [record["dtype"] for record in values["collectives"]] == ["s8", "f8e4m3fn"]


def test_expectations_by_dtype() -> None:
    """The bytes of each dtype over some axes, or any amount of it; a dtype that is not named is one too many."""
    audited = audit(SEVERAL)
    expect_collectives(audited, all_gather={"tensor": {"s8": 64, "f8e4m3fn": ...}}, ignore_below=0)
    for amounts, message in (
        ({"s8": 64}, "all-gather over tensor in f8e4m3fn: 64 bytes in each step; expected 0"),
        ({"s8": 64, "f8e4m3fn": 32}, "in f8e4m3fn: 64 bytes in each step; expected 32"),
        (
            {"s8": ..., "f8e4m3fn": 64, "f32": ...},
            "all-gather over tensor in f32: expected, and there is none",
        ),
    ):
        with pytest.raises(AssertionError, match=message):
            expect_collectives(audited, all_gather={"tensor": amounts}, ignore_below=0)


def test_bytes_into_a_slice() -> None:
    """A group gets a gathered array once for each slice, and in an all-to-all each device gets its own part."""
    slices = np.array([0, 0, 1, 1])
    flat, hop, inside = [[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    counts = [
        cross_slice_count(groups, slices, "all-gather", pairs=False)
        for groups in (flat, hop, inside)
    ]
    assert counts == [1, 2, 0]
    assert cross_slice_count(flat, slices, "all-to-all", pairs=False) == 2
    assert (
        cross_slice_count(
            [[0, 1], [1, 2], [2, 3], [3, 0]], slices, "collective-permute", pairs=True
        )
        == 1
    )
    mesh = abstract_mesh(MeshShape(fsdp=4))
    audited = audit(BETWEEN.replace("KIND", "ALL_GATHER"), "tpu", mesh, 2, slices={"fsdp": 2})
    assert (
        audited.slice_bytes()
        == audited.to_json()["slice_bytes"]
        == 2 * audited.bytes(crossing=True)
        == 4096
    )


@functools.cache
def plan_of(exchange="bfloat16", slow=None):
    over = {"data": slow} if slow else {}
    policy = dataclasses.replace(make_precision("bf16"), exchange=exchange, exchange_over=over)
    mesh = abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    return make_plan(mesh, LLAMA, tiny.model(), optax.sgd(0.1), precision=policy)


UP = "param(layers/mlp/up_proj/kernel)"
GROUPS = {
    "data": "{{0,4},{1,5},{2,6},{3,7}}",
    "fsdp": "{{0,2},{1,3},{4,6},{5,7}}",
    "tensor": "{{0,1},{2,3},{4,5},{6,7}}",
}


def reduced(dtype="f32", over="fsdp", operation=f"{UP}/shard_map/psum", rows=400):
    """A sum of one gradient."""
    return f"""
        x = {dtype}[{rows},8]{{1,0}} parameter(0)
        ROOT r = {dtype}[{rows},8]{{1,0}} all-reduce(x), replica_groups={GROUPS[over]}, channel_id=1, to_apply=add,
            metadata={{op_name="jit(_step)/transpose(jvp())/{operation}"}}
    """.replace("to_apply=add,\n            ", "to_apply=add, ")


BF16, WHOLE = {}, {"exchange": "float32"}
SLOW = {"exchange": "float32", "slow": "bfloat16"}


@pytest.mark.parametrize(
    ("precision", "sent", "is_broken"),
    [
        (BF16, {}, True),
        (BF16, {"operation": f"{UP}/dot_general"}, True),
        (BF16, {"operation": "param(lm_head/kernel)/psum"}, True),
        (SLOW, {"over": "data"}, True),
        (BF16, {"dtype": "bf16"}, False),
        (BF16, {"dtype": "s8"}, False),
        (WHOLE, {}, False),
        (SLOW, {}, False),
        (BF16, {"over": "tensor"}, False),
        (BF16, {"rows": 8}, False),
        (BF16, {"operation": "param(layers/mlp_norm/scale)/sharding_constraint"}, False),
        (BF16, {"operation": "scatter-add"}, False),
    ],
)
def test_gradients_are_sent_as_the_precision_policy_says(precision, sent, is_broken) -> None:
    """A kernel's gradient may not be wider over any axis; sums of others and over other axes have no promise."""
    audited = audit(reduced(**sent), plan=plan_of(**precision))
    assert len(audited.broken) == is_broken, audited
    assert ("WIDER THAN PLANNED" in str(audited)) is is_broken
    assert len(audited.to_json()["wider_transfers"]) == is_broken


@pytest.mark.parametrize(("dtype", "is_broken"), [("s8", False), ("f32", True)])
def test_codes_are_exchanged_by_all_to_all(dtype, is_broken) -> None:
    """XLA:TPU names the exchange of a gradient's codes after a reshape; floats in their place break the promise."""
    text = f"""
        x = {dtype}[8,400,128]{{2,1,0}} parameter(0)
        ROOT r = {dtype}[8,400,128]{{2,1,0}} all-to-all(x), replica_groups={GROUPS["fsdp"]}, dimensions={{0}},
            metadata={{op_name="jit(_step)/transpose(jvp())/{UP}/shard_map/reshape"}}
    """.replace("dimensions={0},\n            ", "dimensions={0}, ")
    audited = audit(text, plan=plan_of(exchange="int8"))
    assert [record.cause.use for record in audited.records] == ["gradient"]
    assert [problem.where for problem in audited.broken] == [
        "layers/mlp/up_proj/kernel"
    ] * is_broken


def test_a_broken_promise_names_array_dtypes_bytes_and_fix() -> None:
    """The message says all that is needed to find it."""
    (problem,) = audit(reduced(), plan=plan_of()).broken
    assert str(problem).splitlines() == [
        "layers/mlp/up_proj/kernel: its gradient is sent in f32 over fsdp, promised bf16",
        "    all-reduce: 25 KiB in each step, not 12.5 KiB",
        '    fix: compress.gradients="float32", if these bytes are meant',
    ]


@pytest.mark.parametrize(("scales", "is_broken"), [(3, False), (6, True)])
def test_scales_of_blocks_may_be_wider(scales, is_broken) -> None:
    """Of a promised int8 gather, float32 scales may have the share of bytes that the promise allows."""
    name = f'metadata={{op_name="jit(_step)/{UP}/shard_map/all_gather"}}'
    how = f"replica_groups={GROUPS['fsdp']}, dimensions={{0}}, {name}"
    body = f"""
        x = s8[64,100]{{1,0}} parameter(0)
        y = f32[64,{scales}]{{1,0}} parameter(1)
        g = s8[128,100]{{1,0}} all-gather(x), channel_id=1, {how}
        h = f32[128,{scales}]{{1,0}} all-gather(y), channel_id=2, {how}
        ROOT r = (s8[128,100]{{1,0}}, f32[128,{scales}]{{1,0}}) tuple(g, h)
    """
    promise = CommDtypeCheck("layers/mlp/up_proj/kernel", USED_WHOLE, {"fsdp": "s8"}, overhead=0.13)
    assert len(list(wider_transfers(audit(body, plan=plan_of()).records, [promise]))) == is_broken


def test_promises_come_from_the_plan() -> None:
    """Each axis that splits tokens has the dtype of the policy; layers promise it for all collectives of kernels."""
    promises = {promise.param: promise for promise in comm_dtype_checks(plan_of(**SLOW))}
    assert promises.keys() == {entry.path for entry in plan_of().params}
    assert {tuple(promise.dtypes.items()) for promise in promises.values()} == {
        (("data", "bf16"), ("fsdp", "f32"))
    }
    explicit = {path for path, promise in promises.items() if promise.explicit}
    assert (
        "layers/mlp/up_proj/kernel"
        not in explicit
        >= {"embed/embedding", "norm/scale", "lm_head/kernel"}
    )


def test_a_plan_that_breaks_a_promise_exits_with_4(monkeypatch, capsys) -> None:
    """`spmd plan --compile` prints it."""
    audited = audit(reduced(), plan=plan_of())
    compiled = CompiledStep(audited, None, None, None, CompileTime(1, 2))
    monkeypatch.setattr(
        plan_command,
        "compile_on",
        lambda source, *_: CompiledOn(source.on(source.planned_mesh()), compiled),
    )
    assert run_plan(["demo", "--compile"]) == 4
    assert "WIDER THAN PLANNED: layers/mlp/up_proj/kernel" in capsys.readouterr().out
