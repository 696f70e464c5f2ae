"""The cycles of a compiled TPU program are the compiler's, times the executions: of loops, branches and kinds."""

import json
import types
from fractions import Fraction

import pytest

from spmd.analysis.collective_audit import audit_collectives
from spmd.analysis.cycles import count_cycles
from spmd.analysis.hlo import parse
from spmd.chips import CHIPS, peak_flops
from spmd.commands import plan
from spmd.commands.plan import run_plan
from spmd.errors import ConfigError
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.run.planned_step import CompiledStep, CompileTime, compile_step
from spmd.run.step_source import CompiledOn
from spmd.sharding.mesh import MeshShape, abstract_mesh

COST = 'backend_config={{"estimated_cycles":"{}"}}'.format
PROGRAM = f"""HloModule m, num_partitions=2

add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}

product {{
  p = f32[8] parameter(0)
  ROOT q = f32[8] multiply(p, p)
}}

started {{
  p = f32[8] parameter(0)
  ROOT all = f32[8] all-reduce(p), replica_groups={{{{0,1}}}}, channel_id=1, to_apply=add
}}

inner_body {{
  p = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[8] get-tuple-element(p), index=1
  y = f32[8] fusion(x), kind=kLoop, calls=product, {COST(7)}
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT t = (s32[], f32[8]) tuple(next, y)
}}

inner_condition {{
  p = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}}

yes {{
  p = f32[8] parameter(0)
  z = f32[8] copy(p), {COST(100)}
  ROOT s = f32[8] all-reduce(z), replica_groups={{{{0,1}}}}, channel_id=2, to_apply=add
}}

no {{
  p = f32[8] parameter(0)
  ROOT z = f32[8] negate(p), {COST(10)}
}}

outer_body {{
  p = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[8] get-tuple-element(p), index=1
  zero = s32[] constant(0)
  start = (s32[], f32[8]) tuple(zero, x)
  loop.1 = (s32[], f32[8]) while(start), condition=inner_condition, body=inner_body
  y = f32[8] get-tuple-element(loop.1), index=1
  which = s32[] parameter(1)
  z = f32[8] conditional(which, y, y), BRANCHES, metadata={{op_name="jit(f)/while/body/pipeline_forward/cond"}}
  one = s32[] constant(1)
  next = s32[] add(i, one), {COST(1)}
  ROOT t = (s32[], f32[8]) tuple(next, z)
}}

into_a_stack {{
  p = f32[8] parameter(0)
  k = f32[8] custom-call(p), custom_call_target="tpu_custom_call"
  ROOT r = f32[8] bitcast(k)
}}

outer_condition {{
  p = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = u32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}}

ENTRY main {{
  x = f32[8] parameter(0)
  copied = f32[8] copy(x), frontend_attributes={{kernel_metadata={{
"xprof_metadata":"of several lines"
}}}}, {COST(1000)}
  kernel = f32[8] custom-call(copied), custom_call_target="tpu_custom_call"
  buffer = f32[8] custom-call(), custom_call_target="AllocateBuffer"
  written = f32[8] fusion(kernel), kind=kCustom, calls=into_a_stack
  rows = f32[8] fusion(written), kind=kCustom, calls=product
  async-collective-start.1 = f32[8] fusion(rows), kind=kCustom, calls=started
  async-collective-done.1 = f32[8] fusion(async-collective-start.1), kind=kCustom, calls=product
  moving = (f32[8], f32[8], u32[]) copy-start(async-collective-done.1)
  moved = f32[8] copy-done(moving)
  first = s32[] START
  start = (s32[], f32[8]) tuple(first, moved)
  ROOT loop.2 = (s32[], f32[8]) while(start), condition=outer_condition, body=outer_body, metadata={{op_name="until"}}
}}
"""
LISTED, NAMED = "branch_computations={no, yes}", "true_computation=yes, false_computation=no"


def text(branches: str = LISTED, start: str = "constant(0)") -> str:
    return PROGRAM.replace("BRANCHES", branches).replace("START", start)


@pytest.mark.parametrize("branches", [LISTED, NAMED])
def test_loops_and_branches_are_weighted(branches) -> None:
    """Five turns of three, a branch taken in two fifths, and a cost behind metadata of several lines, all by kind."""
    found = count_cycles(parse(text(branches)), {"pipeline_forward": Fraction(2, 5)})
    assert found is not None
    assert found.cycles == {"copy": 1000 + 2 * 100, "fusion": 5 * 3 * 7, "negate": 3 * 10, "add": 5}
    assert list(found.cycles) == ["copy", "fusion", "negate", "add"]
    assert not found.is_bound


def test_a_branch_of_unknown_share_is_a_bound() -> None:
    """The control: without the schedule each branch counts as always taken, and the line says that it is a bound."""
    found = count_cycles(parse(text()), {"pipeline_backward": Fraction(2, 5)})
    assert found is not None
    assert found.cycles == {"copy": 1000 + 5 * 100, "fusion": 5 * 3 * 7, "negate": 5 * 10, "add": 5}
    assert "compute of a step: at most 1.66e-06 s" in found.text(1e9)


def test_what_has_no_cycles_is_listed() -> None:
    """Kernels, collectives in fusions and in branches, copies and other fusions; not ends, scalars and buffers."""
    found = count_cycles(parse(text()), {"pipeline_forward": Fraction(2, 5)})
    assert found is not None
    assert found.uncounted == {
        "Pallas kernels": 2,
        "rows": 1,
        "collectives": 1 + 2,
        "copy-start": 1,
    }
    line = "by the compiler's cycles at 1.5 GHz; without waiting, 3 collectives, 2 Pallas kernels, 1 rows, 1 copy-start"
    assert found.text(1.5e9).endswith(line)
    assert found.to_json(1.5e9)["seconds"] == sum(found.cycles.values()) / 1.5e9
    assert "1,340 cycles;" in found.text(None)
    assert found.to_json(None)["seconds"] is None


def test_the_largest_number_is_no_estimate() -> None:
    """Libtpu writes it for some small fusions: six of them were a step of a million years."""
    most = text().replace(COST(7), COST(2**63 - 1))
    assert most != text()
    found = count_cycles(parse(most), {"pipeline_forward": Fraction(2, 5)})
    assert found is not None
    assert "fusion" not in found.cycles
    assert found.uncounted["y"] == 5 * 3


def test_a_loop_of_unknown_length_is_refused() -> None:
    """By its name, and not counted as one turn; a program without estimates has no cycles, whatever its loops."""
    unknown = text(start="partition-id()")
    with pytest.raises(ConfigError, match=r"loop\.2 \(until\): is a loop of unknown length"):
        count_cycles(parse(unknown), {})
    assert count_cycles(parse(unknown.replace("estimated_cycles", "other")), {}) is None


def test_a_plan_warns_of_a_loop_of_unknown_length() -> None:
    """The step's collectives and memory are still shown."""
    compiled = types.SimpleNamespace(
        as_text=lambda: text(start="partition-id()"), memory_analysis=lambda: None
    )
    traced = types.SimpleNamespace(jaxpr=None)
    step = types.SimpleNamespace(compile=lambda batch: compiled, trace=lambda batch: traced)
    mesh = abstract_mesh(MeshShape(fsdp=2))
    planned = types.SimpleNamespace(
        mesh=mesh, slices={}, tick_table=None, step=step, plan=None, batch=None
    )
    found = compile_step(planned)
    assert found.cycles is None
    assert "is a loop of unknown length" in {warning.what for warning in found.audit.warnings}


def test_a_plan_has_the_compute_time(monkeypatch, capsys) -> None:
    """`spmd plan --compile` prints the line, at the clock of the machine; with `--json` it is `compute`."""
    cycles = count_cycles(parse(text()), {"pipeline_forward": Fraction(2, 5)})
    audit = audit_collectives(text(), abstract_mesh(MeshShape(fsdp=2)), backend="tpu")
    monkeypatch.setattr(plan, "missing_extra", lambda topology: None)
    compiled = CompiledStep(audit, None, cycles, parse(text()), CompileTime(1, 2))
    monkeypatch.setattr(
        plan,
        "compile_on",
        lambda source, *_: CompiledOn(source.on(source.planned_mesh()), compiled),
    )
    command = [
        "demo",
        "--topology",
        "v5p:2x2x2",
        "--mesh.data",
        "1",
        "--mesh.fsdp",
        "8",
        "--mesh.tensor",
        "1",
        "--compile",
    ]
    assert run_plan(command) == 0
    *_, computed, predicted, took = capsys.readouterr().out.splitlines()
    assert computed == cycles.text(1.75e9)
    assert predicted.startswith("step on v5p:2x2x2: ")
    assert took == "compiled in 1 s (2 s of processor time)"
    assert run_plan([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["compute"] == cycles.to_json(1.75e9)
    assert record["time"]["seconds"] > record["compute"]["seconds"]
    assert record["compilation"] == {"seconds": 1, "processor_seconds": 2}


def test_collectives_in_branches_run_as_the_schedule_says() -> None:
    """The walk is shared: a collective of the branch runs twice in five turns, and is not marked as conditional."""
    mesh = abstract_mesh(MeshShape(fsdp=2))
    known = audit_collectives(
        text(), mesh, backend="tpu", taken={"pipeline_forward": Fraction(2, 5)}
    )
    assert [(r.executions, r.is_conditional) for r in known.records] == [(1, False), (2, False)]
    unknown = audit_collectives(text(), mesh, backend="tpu")
    assert [(r.executions, r.is_conditional) for r in unknown.records] == [(1, False), (5, True)]


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("pipedream", 1)]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_a_schedule_says_how_often_branches_are_taken(name, chunks) -> None:
    """Each microbatch once in each chunk; the loss and both ends of the embedding once; a last layer in each task.

    First layers of another kind run for four microbatches at once, one on each stage.
    """
    table = tabulate(make_schedule(name, 4, 8, chunks))
    tasks = {branch: share * table.ticks for branch, share in table.taken.items()}
    assert tasks.pop("pipeline_more_layers") == table.ticks
    assert tasks.pop("pipeline_from_loss") * tasks["pipeline_backward"] / table.ticks == 8
    assert tasks == {
        "pipeline_forward": 8 * chunks,
        "pipeline_backward": 8 * chunks,
        "pipeline_embedding": 8,
        "pipeline_embedding_backward": 8,
        "pipeline_first_layers": 2,
        "pipeline_first_layers_backward": 2,
        "pipeline_head": 8,
        "pipeline_last_stage_head": 8,
    }


MULTIPLIERS = {
    "v2": 128**2,
    "v3": 2 * 128**2,
    "v4": 8 * 128**2,
    "v5e": 4 * 128**2,
    "v5p": 8 * 128**2,
    "v6e": 4 * 256**2,
    "tpu7x": 4 * 256**2,
}


@pytest.mark.parametrize("kind", MULTIPLIERS)
def test_clocks(kind) -> None:
    """A clock times the multiply-adds of all matrix units is the published peak, which has three digits."""
    peak = peak_flops(CHIPS[kind].device_kind)
    assert CHIPS[kind].clock == pytest.approx(peak / 2 / MULTIPLIERS[kind], rel=0.005)


def test_no_other_chip_has_a_clock() -> None:
    """GPUs' compilers estimate no cycles."""
    assert {kind for kind, chip in CHIPS.items() if chip.clock} == set(MULTIPLIERS)
