"""A schedule of a TPU program takes as long as its operations, and as what is not hidden beside them."""

import dataclasses
import json
import sys
from fractions import Fraction
from math import inf

import numpy as np
import pytest

from spmd.analysis.hlo import parse
from spmd.analysis.topology import parse_topology
from spmd.chips import Hardware, Rates
from spmd.sharding.mesh import MeshShape
from spmd.step_time import timeline
from spmd.step_time.network import make_network
from spmd.step_time.program import (
    ProgramSchedule,
    ScheduledBlock,
    ScheduledOp,
    read_program_schedule,
)
from spmd.step_time.report import chrome_trace
from spmd.step_time.timeline import StepTimeline, run_schedule

COST = 'backend_config={{"estimated_cycles":"{}"}}'.format
GROUPS = "replica_groups=[1,4]<=[4], channel_id=1, dimensions={0}"
PROGRAM = f"""HloModule m, num_partitions=4

product {{
  p = bf16[64,32]{{1,0}} parameter(0)
  w = bf16[32,16]{{1,0}} constant({{...}})
  ROOT q = bf16[64,16]{{1,0}} dot(p, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

halved {{
  p = f32[1024] parameter(0)
  ROOT q = f32[1024] multiply(p, p)
}}

chain_start {{
  p = f32[1024] parameter(0)
  g = f32[4096] all-gather(p), {GROUPS}, frontend_attributes={{chain_id="6"}}
  ROOT c = (f32[1024], f32[4096]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}}

chain_end {{
  p = f32[1024] parameter(0)
  g = f32[4096] all-gather(p), {GROUPS}, frontend_attributes={{chain_id="6"}}
  ROOT c = f32[4096] custom-call(g), custom_call_target="AsyncCollectiveDone"
}}

condition {{
  p = (s32[], f32[1024]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}}

turn {{
  p = (s32[], f32[1024]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[1024] get-tuple-element(p), index=1
BODY
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT t = (s32[], f32[1024]) tuple(next, x)
}}

written {{
  t = s8[1,2,4] parameter(0)
  q = bf16[3,512,64] parameter(1)
  k = bf16[3,512,64] parameter(2)
  ALL_GRADIENTS
  z = bf16[8,3,512,64] parameter(3)
  v = bf16[3,512,64] get-tuple-element(splash_mha_dkv.1), index=3
  ROOT u = bf16[8,3,512,64] dynamic-update-slice(z, v)
}}

all-reduce-scatter.1 {{
  p = f32[1024] parameter(0)
  g = f32[1024] all-reduce(p), {GROUPS}, to_apply=sum
  ROOT c = f32[256] dynamic-slice(g, p)
}}

taken {{
  x = f32[1024] parameter(0)
  g = f32[4096] all-gather(x), {GROUPS}
  ROOT y = f32[1024] fusion(x), kind=kLoop, calls=halved, {COST(10_000)}
}}

skipped {{
  x = f32[1024] parameter(0)
  ROOT y = f32[1024] negate(x), {COST(1000)}
}}

ENTRY main {{
  x = f32[1024] parameter(0)
  m = bf16[64,32]{{1,0}} parameter(1)
ENTRY_BODY
  ROOT r = f32[1024] copy(x)
}}
"""
ALL_GRADIENTS = (
    "splash_mha_dkv.1 = (f32[128,64], bf16[4,3,512,64], bf16[3,512,64], bf16[3,512,64]) "
    'custom-call(t, q, k), custom_call_target="tpu_custom_call"'
)
"""The kernel of all gradients, of four blocks of keys."""
PROGRAM = PROGRAM.replace("ALL_GRADIENTS", ALL_GRADIENTS)
ROUND = Hardware(
    peak=1e12, memory_bandwidth=inf, link=1e9, network=1e9, host=1e9, latency=0, network_latency=0
)
NETWORK = make_network(parse_topology("v5e:2x2"), MeshShape(fsdp=4), {}, ROUND, efficiency=1.0)
CLOCK, GATHER = 1e9, 4096 * 4 * 3 / 4 / 2e9
"""Seconds of a gather of 16 KiB over two lines of two chips: 6.144 µs."""

SYNCHRONOUS = f"g = f32[4096] all-gather(x), {GROUPS}"
SCATTERED = "g = f32[256] fusion(x), kind=kCustom, calls=all-reduce-scatter.1"
MATMUL = f"y = bf16[64,16]{{1,0}} fusion(m), kind=kOutput, calls=product, {COST(4000)}"
START = f"s = (f32[1024], f32[4096]) all-gather-start(x), {GROUPS}"
DONE = "d = f32[4096] all-gather-done(s)"
LOOP = """zero = s32[] constant(0)
  before = (s32[], f32[1024]) tuple(zero, x)
  loop = (s32[], f32[1024]) while(before), condition=condition, body=turn"""
BRANCH = """w = s32[] partition-id()
  b = f32[1024] conditional(w, x, x), branch_computations={skipped, taken}, metadata={op_name="jit(f)/forward/cond"}"""
TO_HOST = f"""s = (f32[1024]{{0:T(1024)S(5)}}, f32[1024]{{0:T(1024)}}, u32[]) copy-start(x)
  y = f32[1024] fusion(x), kind=kLoop, calls=halved, {COST(1000)}
  d = f32[1024]{{0:T(1024)S(5)}} copy-done(s)"""
FROM_HOST = """h = f32[1024]{0:T(1024)S(5)} parameter(2)
  s = (f32[1024]{0:T(1024)}, f32[1024]{0:T(1024)S(5)}, u32[]) copy-start(h)
  d = f32[1024]{0:T(1024)} copy-done(s)"""


def schedule(
    *lines: str, body: str = "", taken: dict[str, Fraction] | None = None
) -> ProgramSchedule:
    text = PROGRAM.replace("ENTRY_BODY", "\n".join(f"  {line}" for line in lines)).replace(
        "BODY", f"  {body}"
    )
    return read_program_schedule(
        parse(text), MeshShape(fsdp=4).sizes, taken or {}, np.zeros(4, int)
    )


def run(*lines: str, body: str = "", rates: Rates | None = None, **taken: Fraction) -> StepTimeline:
    found = schedule(*lines, body=body, taken=taken)
    line = run_schedule(found, NETWORK, CLOCK, rates or Rates(), keep_spans=True)
    quick = run_schedule(found, NETWORK, CLOCK, rates or Rates())
    assert quick.seconds == pytest.approx(line.seconds)  # a loop that is run once and counted
    assert quick.exposed == pytest.approx(line.exposed)
    assert line.seconds == pytest.approx(sum(line.spent.values()))
    return line


def test_operations_have_kinds_cycles_and_flops() -> None:
    """A product of M × K × N has 2·M·K·N FLOPs; a gather moves the bytes of all members over its axes."""
    matmul, gather = schedule(MATMUL, SYNCHRONOUS)
    assert isinstance(matmul, ScheduledOp)
    assert (matmul.kind, matmul.cycles) == ("matmul", 4000)
    assert matmul.flops == pytest.approx(2 * 64 * 32 * 16)
    assert isinstance(gather, ScheduledOp)
    assert gather.kind == "transfer"
    assert gather.transfer is not None
    moved = gather.transfer
    assert (moved.kind, moved.payload, moved.over, moved.group) == (
        "all-gather",
        4096 * 4,
        "fsdp",
        (0, 1, 2, 3),
    )


def test_matmuls_and_memory_have_their_rates() -> None:
    """Cycles at the clock, times the rate of their kind."""
    lines = MATMUL, f"z = f32[1024] fusion(x), kind=kLoop, calls=halved, {COST(1000)}"
    assert run(*lines).spent == pytest.approx({"matmuls": 4e-6, "memory-bound work": 1e-6})
    slow = run(*lines, rates=Rates(matmul=2.0, memory=3.0))
    assert slow.spent == pytest.approx({"matmuls": 8e-6, "memory-bound work": 3e-6})


def test_a_synchronous_gather_is_exposed() -> None:
    """The device only waits."""
    line = run(SYNCHRONOUS, MATMUL)
    assert line.spent == pytest.approx({"exposed collectives over fsdp": GATHER, "matmuls": 4e-6})
    assert line.exposed == line.moving == pytest.approx({"g": GATHER})


def test_a_fusion_that_keeps_a_part_is_a_reduce_scatter() -> None:
    """XLA:TPU's fused all-reduce and slice is sent once, a plain all-reduce twice."""
    reduced = run("g = f32[1024] all-reduce(x), replica_groups={{0,1,2,3}}, channel_id=1")
    scattered = run(SCATTERED)
    assert scattered.seconds == pytest.approx(GATHER / 4)
    assert reduced.seconds == pytest.approx(2 * scattered.seconds)


@pytest.mark.parametrize(
    ("cycles", "exposed"), [(10_000, 0.0), (4000, GATHER - 4e-6)], ids=["all", "a part"]
)
def test_an_asynchronous_gather_is_hidden(cycles, exposed) -> None:
    """Beside a fusion that lasts longer nothing is exposed, else what is left of it."""
    line = run(START, MATMUL.replace(COST(4000), COST(cycles)), DONE)
    assert line.exposed == pytest.approx({"s": exposed})
    assert line.seconds == pytest.approx(cycles / CLOCK + exposed)
    assert line.moving == pytest.approx({"s": GATHER})


def test_a_hidden_transfer_takes_bandwidth_of_the_memory() -> None:
    """A gather's 16 KiB are written and read: of one that is hidden for a share of its time, that share."""
    network = dataclasses.replace(
        NETWORK, hardware=dataclasses.replace(ROUND, memory_bandwidth=1e10)
    )
    passes = 2 * 4096 * 4 / 1e10
    for cycles, share in (10_000, 1.0), (4000, 4e-6 / GATHER):
        found = schedule(START, MATMUL.replace(COST(4000), COST(cycles)), DONE)
        spent = run_schedule(found, network, CLOCK, Rates()).spent
        assert spent["memory of hidden transfers"] == pytest.approx(share * passes)
    waited = run_schedule(schedule(SYNCHRONOUS, MATMUL), network, CLOCK, Rates()).spent
    assert "memory of hidden transfers" not in waited


def test_the_order_of_the_program_decides() -> None:
    """The control: the same operations, with the end before the matmul, hide nothing."""
    beside, after = run(START, MATMUL, DONE), run(START, DONE, MATMUL)
    assert after.seconds == pytest.approx(4e-6 + GATHER)
    assert beside.seconds == pytest.approx(max(4e-6, GATHER))
    assert beside.moving == after.moving


def test_a_chain_of_fusions_is_asynchronous() -> None:
    """The forms of XLA:TPU for v5e: first and last fusions with the collective inside."""
    first = "async-collective-start.1 = (f32[1024], f32[4096]) fusion(x), kind=kCustom, calls=chain_start"
    last = "async-collective-done.1 = f32[4096] fusion(x), kind=kCustom, calls=chain_end"
    line = run(first, MATMUL, last)
    assert line.exposed == pytest.approx({"g": GATHER - 4e-6})


def test_a_transfer_that_is_waited_for_goes_first() -> None:
    """It takes its own time, by which the one in the background ends later: links are idle in neither order."""
    line = run(START, SYNCHRONOUS, MATMUL, DONE)
    assert line.exposed["g"] == pytest.approx(GATHER)
    assert line.exposed["s"] == pytest.approx(max(0.0, 2 * GATHER - GATHER - 4000 / CLOCK))
    assert line.seconds == pytest.approx(max(2 * GATHER, GATHER + 4000 / CLOCK))


def test_a_long_loop_is_run_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other turns are counted: `run` compares with all of them, also where a transfer ends in the next turn."""
    monkeypatch.setattr(
        sys.modules[__name__],
        "PROGRAM",
        PROGRAM.replace("n = s32[] constant(3)", "n = s32[] constant(40)"),
    )
    body = f"{START}\n  {MATMUL}\n  {DONE}\n  {SYNCHRONOUS}"
    line = run(LOOP, body=body)
    assert line.exposed == pytest.approx({"g": 40 * GATHER, "s": 40 * (GATHER - 4000 / CLOCK)})
    monkeypatch.setattr(timeline, "_STEADY", 10**9)
    assert run(LOOP, body=body).seconds == pytest.approx(line.seconds)


def test_transfers_share_the_network() -> None:
    """A second gather begins when the first has ended; both are hidden only in part."""
    second = START.replace("s = ", "s2 = "), DONE.replace("d = ", "d2 = ").replace("(s)", "(s2)")
    line = run(START, second[0], MATMUL, DONE, second[1])
    assert line.exposed == pytest.approx({"s": GATHER - 4e-6, "s2": GATHER})
    gathers = [span for span in line.spans if span.lane == "network"]
    assert [span.start for span in gathers] == pytest.approx([0, GATHER])


def test_transfers_to_the_host() -> None:
    """4 KiB at 1 GB/s, in each direction its own lane; a copy between memories of the device moves nothing."""
    moved = 4096 / 1e9
    assert run(TO_HOST).spent == pytest.approx(
        {"memory-bound work": 1e-6, "host transfers": moved - 1e-6}
    )
    assert run(TO_HOST).exposed == pytest.approx({"s": moved - 1e-6})
    assert run(FROM_HOST).spent == pytest.approx({"host transfers": moved})
    assert {span.lane for span in run(FROM_HOST).spans} == {"from host", "device"}
    assert "to host" in {span.lane for span in run(TO_HOST).spans}
    assert run(FROM_HOST.replace("S(5)", "S(1)")).seconds == 0


def test_a_loop_repeats_its_body() -> None:
    """Three turns, each of a gather beside a matmul."""
    body = "\n  ".join((START, MATMUL.replace("fusion(m)", "fusion(x)"), DONE))
    line = run(LOOP, body=body)
    assert line.spent == pytest.approx(
        {"matmuls": 3 * 4e-6, "exposed collectives over fsdp": 3 * (GATHER - 4e-6)}
    )
    (block,) = schedule(LOOP, body=body)
    assert isinstance(block, ScheduledBlock)
    assert (block.times, block.is_counted) == (3, True)
    assert len([span for span in line.spans if span.what == "matmuls"]) == 3


def test_a_loop_of_unknown_length_counts_once() -> None:
    """And the schedule has the information."""
    (block,) = schedule(LOOP.replace("constant(0)", "partition-id()"), body=SYNCHRONOUS)
    assert isinstance(block, ScheduledBlock)
    assert (block.times, block.is_counted) == (1, False)
    assert list(run(LOOP.replace("constant(0)", "partition-id()"), body=SYNCHRONOUS).uncounted) == [
        "loop"
    ]
    assert not run(LOOP, body=SYNCHRONOUS).uncounted


def test_branches_are_weighted() -> None:
    """By the share of the schedule: the listed second is taken in two fifths; of an unknown share, each in half."""
    line = run(BRANCH, forward=Fraction(2, 5))
    assert line.spent == pytest.approx(
        {
            "memory-bound work": 0.4 * 10e-6 + 0.6 * 1e-6,
            "exposed collectives over fsdp": 0.4 * GATHER,
        }
    )
    unknown = run(BRANCH)
    assert unknown.spent["memory-bound work"] == pytest.approx(0.5 * 11e-6)
    assert [
        block.is_counted for block in schedule(BRANCH) if isinstance(block, ScheduledBlock)
    ] == [
        False,
        False,
    ]


def test_a_branch_does_not_delay_what_follows() -> None:
    """A gather in a branch of a tenth of the cases keeps the network busy for a tenth of its time."""
    line = run(BRANCH, SYNCHRONOUS, forward=Fraction(1, 10))
    assert line.exposed["g"] == pytest.approx(1.1 * GATHER)


def test_kernels_have_the_time_of_flops_or_bytes() -> None:
    """Three heads of splash attention of 2 of 2 blocks, causal: 3/4 of all pairs; other kernels move their bytes."""
    lines = (
        "t = s8[3,2,2] constant({...})",
        "q = bf16[3,512,64]{2,1,0} constant({...})",
        "k = bf16[3,512,64]{2,1,0} constant({...})",
        'splash_mha_fwd.1 = bf16[3,512,64]{2,1,0} custom-call(t, q, k), custom_call_target="tpu_custom_call"',
        'other = f32[1024] custom-call(x), custom_call_target="tpu_custom_call"',
    )
    attention, other = schedule(*lines)
    assert isinstance(attention, ScheduledOp)
    assert isinstance(other, ScheduledOp)
    assert attention.flops == 2 * 2 * 3 * 512 * 512 * 64 * 0.75
    assert (other.kind, other.bytes) == ("kernel", 2 * 4096)
    fast = dataclasses.replace(NETWORK, hardware=dataclasses.replace(ROUND, memory_bandwidth=1e12))
    spent = run_schedule((attention, other), fast, CLOCK, Rates(attention=0.5)).spent
    assert spent == pytest.approx(
        {"attention": attention.flops / 0.5e12, "other kernels, by their bytes": 2 * 4096 / 1e12}
    )
    twice_as_wide = dataclasses.replace(
        NETWORK, hardware=dataclasses.replace(fast.hardware, matrix_unit=128)
    )
    assert (
        run_schedule((attention,), twice_as_wide, CLOCK, Rates(attention=0.5)).seconds
        == 2 * spent["attention"]
    )


@pytest.mark.parametrize(
    ("kernel", "table", "matmuls", "share"),
    [
        ("fwd_residuals", "1,4,4", 2, 5 / 8),
        ("fwd_residuals", "1,4,2", 2, 2 / 4),
        ("dq_no_residuals", "1,4,2", 3, 2 / 4),
        ("dkv_no_residuals", "1,2,4", 4, 2 / 4),
    ],
)
def test_kernels_of_windows_compute_the_blocks_of_their_table(
    kernel, table, matmuls, share
) -> None:
    """Causal attention of 4 of 4 blocks; a window of 2 blocks; the gradient of the keys lists the queries' blocks."""
    lines = (
        f"t = s8[{table}] constant({{...}})",
        "q = bf16[3,512,64]{2,1,0} constant({...})",
        "k = bf16[3,512,64]{2,1,0} constant({...})",
        f'splash_mha_{kernel}.1 = bf16[3,512,64] custom-call(t, q, k), custom_call_target="tpu_custom_call"',
    )
    (attention,) = schedule(*lines)
    assert isinstance(attention, ScheduledOp)
    assert attention.flops == matmuls * 2 * 3 * 512 * 512 * 64 * share


@pytest.mark.parametrize(
    ("kernel", "table", "matmuls", "share"),
    [
        ("fwd_residuals", "1,2,8", 2, (4 + 8) / 16),
        ("dq_no_residuals", "1,4,8", 3, (2 + 4 + 6 + 8) / 32),
        ("dkv_no_residuals", "1,4,8", 4, (2 + 4 + 6 + 8) / 32),
        ("fwd_residuals", "1,2,5", 2, 5 / 8),
        ("dkv_no_residuals", "1,1,8", 4, 1 / 4),
    ],
)
def test_blocks_of_kernels_need_not_be_square(kernel, table, matmuls, share) -> None:
    """The kernel's metadata say how long they are: causal ones, windows, and the queries of a block of keys."""
    forward = r"\"block_q\": 256, \"block_kv\": 64, \"block_kv_compute\": 32"
    backward = (
        r"\"block_q_dkv\": 128, \"block_kv_dkv\": 64, \"block_q_dq\": 128, \"block_kv_dq\": 64"
    )
    metadata = f'frontend_attributes={{kernel_metadata={{"{forward}, {backward}"}}}}'
    call = 'bf16[3,512,64] custom-call(t, q, k), custom_call_target="tpu_custom_call"'
    lines = (
        f"t = s8[{table}] constant({{...}})",
        "q = bf16[3,512,64]{2,1,0} constant({...})",
        "k = bf16[3,512,64]{2,1,0} constant({...})",
        f"splash_mha_{kernel}.1 = {call}, {metadata}",
    )
    (attention,) = schedule(*lines)
    assert isinstance(attention, ScheduledOp)
    assert attention.flops == matmuls * 2 * 3 * 512 * 512 * 64 * share


@pytest.mark.parametrize("is_fused", [False, True])
def test_one_kernel_of_all_gradients_has_five_matmuls(is_fused) -> None:
    """Also in a fusion with the writing of a result into a stack, which has no cycles of its own."""
    lines = [
        "t = s8[1,4,4] constant({...})",
        "q = bf16[3,512,64]{2,1,0} constant({...})",
        "k = bf16[3,512,64]{2,1,0} constant({...})",
    ]
    if is_fused:
        lines.append("z = bf16[8,3,512,64] constant({...})")
        lines.append("f = bf16[8,3,512,64] fusion(t, q, k, z), kind=kCustom, calls=written")
    else:
        lines.append(ALL_GRADIENTS)
    (attention,) = schedule(*lines)
    assert isinstance(attention, ScheduledOp)
    table = 2 * 4 / (4 * 4) if is_fused else (1 + 4) / (2 * 4)
    assert attention.flops == 5 * 2 * 3 * 512 * 512 * 64 * table


def test_a_part_of_the_queries_meets_half_of_the_keys() -> None:
    """As many as the mean of all queries, wherever the part is: 8 of 8 blocks meet 4.5."""
    lines = (
        "t = s8[1,2,8] constant({...})",
        "q = bf16[3,128,64]{2,1,0} constant({...})",
        "k = bf16[3,512,64]{2,1,0} constant({...})",
        'splash_mha_fwd.1 = bf16[3,128,64] custom-call(t, q, k), custom_call_target="tpu_custom_call"',
    )
    (attention,) = schedule(*lines)
    assert isinstance(attention, ScheduledOp)
    assert attention.flops == 2 * 2 * 3 * 128 * 512 * 64 * 4.5 / 8


def test_a_trace_has_no_two_events_at_once() -> None:
    """For trace viewers: what a lane does starts when its last event has ended, and so does the device's."""
    body = "\n  ".join((START, MATMUL.replace("fusion(m)", "fusion(x)"), DONE))
    line = run(
        LOOP, BRANCH, TO_HOST, SYNCHRONOUS.replace("g =", "g2 ="), body=body, forward=Fraction(2, 5)
    )
    events = json.loads(chrome_trace(line.spans, "v5e:2x2"))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert (
        {names[e["tid"]] for e in slices}
        == {span.lane for span in line.spans}
        >= {"network", "to host", "device"}
    )
    moving = {"network", "to host", "from host"}
    device = [e for e in slices if names[e["tid"]] not in moving]
    lanes = [[e for e in slices if names[e["tid"]] == lane] for lane in moving]
    for lane in (device, *lanes):
        ordered = sorted(lane, key=lambda e: e["ts"])
        ends = [e["ts"] + e["dur"] for e in ordered]
        assert all(
            end <= after["ts"] + 0.002 for end, after in zip(ends, ordered[1:], strict=False)
        )
    assert sum(e["dur"] for e in device) == pytest.approx(line.seconds * 1e6, abs=0.05)
