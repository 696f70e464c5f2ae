"""Which collectives of a program run beside compute, in each form that compilers write them."""

import pytest

from spmd.analysis.collective_audit import audit_collectives
from tests.hlo_texts import ADD, CHAINED, CUBE, PAIRS, text

MATMUL = """
matmul {
  x = f32[8,8]{1,0} parameter(0)
  ROOT y = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
chain_middle {
  p = f32[4,8]{1,0} parameter(0)
  x = f32[8,8]{1,0} parameter(1)
  g = f32[8,8]{1,0} all-gather(p), PAIRS, dimensions={0}, frontend_attributes={chain_id="6"}
  y = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT c = (f32[4,8]{1,0}, f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(p, g, y)
}
"""
FUSION = 'y = f32[8,8]{1,0} fusion(x), kind=kOutput, calls=matmul, backend_config={"estimated_cycles":"700"}'
PROGRAMS = {
    "start-done": """
        s = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(p), PAIRS, dimensions={0}
        DURING
        d = f32[8,8]{1,0} all-gather-done(s)
    """,
    "SparseCore": """
        s = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=gather
        BEFORE
        u = ((f32[4,8]{1,0}), f32[8,8]{1,0}) call-update(s, p)
        DURING
        d = f32[8,8]{1,0} call-done(u)
    """,
    "wrapped": """
        s = ((f32[4,8]{1,0}), f32[8,8]{1,0}, u32[]) async-start(p), calls=gather
        DURING
        d = f32[8,8]{1,0} async-done(s), calls=gather
    """,
    "synchronous": """
        d = f32[8,8]{1,0} all-gather(p), PAIRS, dimensions={0}
    """,
    "chain": """
        s = (f32[4,8]{1,0}, f32[8,8]{1,0}) fusion(p), kind=kCustom, calls=chain_start
        q = f32[4,8]{1,0} get-tuple-element(s), index=0
        CHAINED
        d = f32[8,8]{1,0} fusion(q), kind=kCustom, calls=chain_end
    """,
}
GATHER = """
gather {
  p = f32[4,8]{1,0} parameter(0)
  ROOT g = f32[8,8]{1,0} all-gather(p), PAIRS, dimensions={0}
}
"""
COMPUTED = {
    "DURING": FUSION,
    "BEFORE": FUSION.replace("y =", "z ="),
    "CHAINED": "m = (f32[4,8]{1,0}, f32[8,8]{1,0}, f32[8,8]{1,0}) fusion(p, x), kind=kOutput, "
    'calls=chain_middle, backend_config={"estimated_cycles":"700"}',
}


def overlap(name: str, *computed: str) -> tuple[bool, int]:
    """What the audit says of the only gather of a program, with compute in some of its places."""
    body = PROGRAMS[name]
    for place, instruction in COMPUTED.items():
        body = body.replace(place, instruction if place in computed else "")
    before = ADD + MATMUL + GATHER + CHAINED
    inputs = "p = f32[4,8]{1,0} parameter(0)\nx = f32[8,8]{1,0} parameter(1)"
    body = f"{inputs}\n{body}\nROOT r = f32[8,8]{{1,0}} copy(d)"
    lines = "\n".join(line.strip() for line in body.splitlines() if line.strip())
    program = text(lines.replace("PAIRS", PAIRS), before.replace("PAIRS", PAIRS))
    (record,) = audit_collectives(program, CUBE, backend="tpu").records
    assert (record.kind, record.bytes, record.executions) == ("all-gather", 256, 1)
    return record.is_overlapped, record.overlapped_cycles


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("start-done", "DURING"),
        ("SparseCore", "DURING"),
        ("wrapped", "DURING"),
        ("chain", "CHAINED"),
    ],
)
def test_compute_between_start_and_end_counts(name: str, computed: str) -> None:
    """With its estimated cycles; without it, an asynchronous collective is not overlapped."""
    assert overlap(name, computed) == (True, 700)
    assert overlap(name) == (False, 0)


def test_compute_elsewhere_does_not_count() -> None:
    """A synchronous collective overlaps with nothing, and a SparseCore's transfer begins when it gets the operands."""
    assert overlap("synchronous") == (False, 0)
    assert overlap("SparseCore", "BEFORE") == (False, 0)


@pytest.mark.parametrize(("rows", "said"), [(4, False), (2**16, True)])
def test_the_table_has_a_line_for_each_kind_of_large_collective(rows: int, said: bool) -> None:
    """Runs, those beside compute, and cycles; small collectives and simulated devices have none."""
    body = f"""
    p = f32[{rows},8]{{1,0}} parameter(0)
    x = f32[8,8]{{1,0}} parameter(1)
    s = (f32[{rows},8]{{1,0}}, f32[{2 * rows},8]{{1,0}}) all-gather-start(p), {PAIRS}, dimensions={{0}}
    {FUSION}
    d = f32[{2 * rows},8]{{1,0}} all-gather-done(s)
    ROOT r = f32[{2 * rows},8]{{1,0}} all-gather(p), {PAIRS}, dimensions={{0}}
    """
    line = "of 2 all-gathers of 1 MiB or more, 1 run beside compute, 700 cycles each"
    for backend in ("tpu", "cpu"):
        printed = str(
            audit_collectives(text(body, MATMUL.replace("PAIRS", PAIRS)), CUBE, backend=backend)
        )
        assert (line in printed) == (said and backend == "tpu")
        assert ("beside compute" in printed) == (said and backend == "tpu")
