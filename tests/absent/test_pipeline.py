"""Pipelines as the compilers of a TPU slice and of GPUs see them: memory by microbatches, and what goes over `pipe`."""

import functools

import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from tests.programs import run_script
from tests.published.closed_forms import pipeline_traffic

# no array is as large as the stream
LAYERS, D, D_FF, VOCAB, SEQ, EXAMPLES = 4, 512, 1024, 512, 320, 4
COMPILE = f"""
    import json, sys
    import jax, optax, spmd
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA
    from spmd.distributed.initialize import initialize
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.cycles import count_cycles
    from spmd.analysis.hlo import parse
    from spmd.analysis.memory import estimate_memory, read_memory
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.pipeline.tick_table import tabulate
    from spmd.pipeline.grad_fn import pipeline
    from spmd.pipeline.schedules import make_schedule

    topology = parse_topology(sys.argv[1])
    initialize(target_platform=topology.platform)
    devices = topology_devices(topology)
    model = spmd.from_nnx(DecoderConfig({VOCAB}, {D}, {LAYERS}, 8, 8, {D_FF}).build)
    found = {{}}
    for case in sys.argv[2:]:
        name, *sizes, kept = case.split()
        stages, microbatches, chunks = map(int, sizes)
        mesh = spmd.make_mesh(devices=devices, pipe=stages, fsdp=2, tensor=2)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        plan = spmd.make_plan(mesh, LLAMA, model, optimizer, attention="xla")
        schedule = make_schedule(name, stages, microbatches, chunks)
        table = tabulate(schedule, recompute=kept == "inputs")
        dtypes = {{"tokens": "int32", "targets": "int32", "weights": "float32"}}
        shape = ({EXAMPLES} * microbatches, {SEQ})
        batch = {{name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}}
        step = spmd.make_train_step(plan, grad_fn=pipeline(spmd.next_token_loss(model), table))
        estimate, compiled = estimate_memory(step, batch, topology.platform), step.compile(batch)
        memory, program = read_memory(compiled), parse(compiled.as_text())
        records, counted = (audit_collectives(program, mesh, taken=taken).records for taken in ({{}}, table.taken))
        branches = [(known.executions, r.executions) for known, r in zip(counted, records) if r.is_conditional]
        cycles = [count_cycles(program, taken) for taken in (table.taken, {{}})]
        over_pipe = [
            (r.kind, r.over, r.payload, known.executions, r.is_conditional)
            for r, known in zip(records, counted)
            if "pipe" in r.over
        ]
        found[case] = {{
            "ticks": table.ticks,
            "temporaries": memory.temporaries,
            "total": memory.total,
            "estimate": estimate.total,
            "stages": estimate.held["stages"],
            "over pipe": over_pipe,
            "runs": branches,
            "unknown": [r.instruction for r in counted if r.is_conditional],
            "cycles": [c and [sum(c.cycles.values()), c.is_bound] for c in cycles],
            "irregular": [r.kind for r in records if r.axes is None],
        }}
    print(json.dumps(found))
"""
FEW, MANY = 4, 32
FLAT = {"1f1b": "1f1b 2 {} 1 saved", "interleaved": "interleaved 2 {} 2 saved"}
GROWS = {"gpipe": "gpipe 2 {} 1 inputs", "gpipe that saves": "gpipe 2 {} 1 saved"}
CASES = [case.format(m) for case in (FLAT | GROWS).values() for m in (FEW, MANY)]

pytestmark = pytest.mark.soak


@functools.cache
def compiled(topology, *cases):
    """What each pipeline holds and sends, compiled in one process for all."""
    return run_script(COMPILE, topology, *cases)


def growth(schedule, figure):
    """How many bytes a figure of the compiler or of the ledger gains from few microbatches to many."""
    found = compiled("v5e:2x4", *CASES)
    few, many = (found[(FLAT | GROWS)[schedule].format(m)][figure] for m in (FEW, MANY))
    return many - few, (many - few) / few


@pytest.mark.parametrize("schedule", FLAT)
def test_memory_does_not_grow_with_microbatches(schedule):
    """A stage keeps what is on its way, and nothing of microbatches that are through: 2.5 % are for the batch."""
    assert growth(schedule, "temporaries")[1] < 0.025


@pytest.mark.parametrize("figure", ["temporaries", "total", "estimate"])
def test_control_gpipe_grows(figure):
    """All microbatches are kept until the last went forward: by the compiler, and by the ledger."""
    assert growth("gpipe", figure)[1] > 0.3


def test_the_ledger_knows_how_much_gpipe_grows():
    """What it says is what the compiler allocates, within 15 %: a stage input for each further microbatch."""
    (predicted, _), (allocated, _) = growth("gpipe", "estimate"), growth("gpipe", "total")
    assert predicted == pytest.approx(allocated, rel=0.15)
    assert growth("gpipe", "stages")[0] == (MANY - FEW) * STREAM
    # Of what remat saves, here everything, the ledger counts a third more than a TPU keeps.
    (predicted, _), (allocated, _) = (
        growth("gpipe that saves", figure) for figure in ("estimate", "total")
    )
    assert allocated < predicted < 1.45 * allocated
    assert allocated > 10 * (MANY - FEW) * STREAM
    # control: the other schedule's growth is none
    assert growth("1f1b", "estimate")[0] < 0.02 * predicted


# Each device has a quarter of a stage's layers, of the embedding and of the head, in float32, and
# all norms.
STREAM = 4 * EXAMPLES // 2 * SEQ * D // 2  # split over fsdp and, by width, over tensor
KERNELS = 4 * D**2 + 3 * D * D_FF
NORMS = 4 * 2 * D
STORED = 2 * VOCAB * D  # embedding and head as stages use them: each stores a part
SHARED = 4 * D
SUMS = 256
STATISTICS = 2 * 4 * EXAMPLES // 2 * SEQ  # two numbers of each token, of the words of all stages


def over_pipe(found):
    """(Kind, bytes of one execution, whether in a branch) → how many there are in a step, but for single numbers."""
    counts = {}
    for kind, axes, payload, times, conditional in found["over pipe"]:
        if axes != "pipe":
            assert payload <= STATISTICS, f"{kind} over {axes}: {payload} bytes"
        elif payload > SUMS:
            counts[kind, payload, conditional] = counts.get((kind, payload, conditional), 0) + times
    return counts


def moved(counts, kind):
    """Bytes of one kind."""
    return sum(payload * times for (found, payload, _), times in counts.items() if found == kind)


def assert_shared(counts, traffic):
    """What stages share is gathered and summed once; a TPU may round it to bfloat16 before it gathers it.

    Of each microbatch the stream goes to the logits of all stages, and its gradient back, in a branch that all take.
    """
    assert moved(counts, "all-reduce") == traffic.shared + traffic.head
    for kind, payload, in_branch in counts:
        assert in_branch == (kind == "all-reduce" and payload == STREAM)
    assert moved(counts, "reduce-scatter") == traffic.scattered
    assert traffic.gathered / 2 <= moved(counts, "all-gather") <= traffic.gathered


def assert_streams_and_shared_gradients(found, microbatches, *, heads):
    """One stream on and one gradient back in each tick, in no branch; what stages share is gathered and summed once."""
    ticks, counts = found["ticks"], over_pipe(found)
    traffic = pipeline_traffic(
        ticks, STREAM, shared=SHARED, stored=STORED, heads=heads * microbatches
    )
    assert {key for key in counts if key[0] == "collective-permute"} == {
        ("collective-permute", STREAM, False)
    }
    assert moved(counts, "collective-permute") == traffic.permuted
    assert_shared(counts, traffic)
    assert moved(counts, "collective-permute") != pipeline_traffic(ticks + 1, STREAM).permuted


def assert_branches_are_known(found, microbatches):
    """Each branch has its share of the ticks, by the schedule: what it runs, it runs once for each microbatch."""
    (cycles, is_bound), (most, control) = found["cycles"]
    assert not is_bound
    assert not found["unknown"]
    assert found["runs"]
    assert all(runs * found["ticks"] == always * microbatches for runs, always in found["runs"])
    assert control, "without the schedule, the cycles are a bound"
    assert microbatches / found["ticks"] * most < cycles < most


def test_cycles_are_those_of_the_microbatches():
    """Each has the same; the update takes less than one has. Counting all ticks would leave two microbatches more."""
    few, many = (compiled("v5e:2x4", *CASES)[FLAT["1f1b"].format(m)]["cycles"] for m in (FEW, MANY))
    rest = []
    for (first, _), (last, _) in zip(few, many, strict=True):
        each = (last - first) / (MANY - FEW)
        rest.append(first / each - FEW)
    assert 0 < rest[0] < 1
    assert 2 < rest[1] < 3


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("interleaved")])
def test_over_pipe_go_streams_and_shared_gradients(case):
    """Whatever the schedule, and however many microbatches there are; a stage that keeps inputs has the head alone."""
    _, _, microbatches, _, kept = case.split()
    found = compiled("v5e:2x4", *CASES)[case]
    assert_streams_and_shared_gradients(found, int(microbatches), heads=kept == "saved")


@pytest.mark.parametrize("microbatches", [FEW, MANY])
def test_interleaved_layers_travel_once(microbatches):
    """To the stage that computes them and back as gradients, in as many permutes as a leaf has chunks that move.

    Of two stages' two groups each, one stays. On the way there, a TPU rounds some kernels to
    bfloat16 first.
    """
    found = compiled("v5e:2x4", *CASES)[FLAT["interleaved"].format(microbatches)]
    ticks, counts = found["ticks"], over_pipe(found)
    streams = ("collective-permute", STREAM, False)
    assert counts[streams] == 2 * ticks
    layers = moved(counts, "collective-permute") - STREAM * counts[streams]
    group = LAYERS // 4 * (KERNELS + NORMS)
    traffic = pipeline_traffic(
        ticks,
        STREAM,
        layers=group,
        gradients=group,
        shared=SHARED,
        stored=STORED,
        heads=microbatches,
        chunks=2,
    )
    assert traffic.layers - LAYERS // 4 * KERNELS / 2 <= layers <= traffic.layers
    permutes = sum(times for (kind, *_), times in counts.items() if kind == "collective-permute")
    assert permutes == 2 * ticks + 2 * 9  # leaves
    assert_shared(counts, traffic)


def test_the_ticks_are_as_published():
    """1F1B fills and drains the pipeline once: m + 2 (p − 1)."""
    assert compiled("v5e:2x4", *CASES)["1f1b 2 4 1 saved"]["ticks"] == 4 + 2 * (2 - 1)
    assert compiled("v5e:2x4", *CASES)["1f1b 2 32 1 saved"]["ticks"] == 32 + 2 * (2 - 1)


LARGER = [
    t
    for t in ("v5e:4x4", "h100:2x8")
    if t.startswith("v5e") or missing_extra(parse_topology(t)) is None
]


@pytest.mark.parametrize("topology", LARGER)
def test_it_compiles_for_larger_machines(topology):
    """Four stages on sixteen chips; what goes between neighbours is in no branch, which other stages do not enter."""
    (found,) = compiled(topology, "1f1b 4 8 1 saved").values()
    assert found["ticks"] == 8 + 2 * 3
    permutes = [record for record in found["over pipe"] if record[0] == "collective-permute"]
    assert (
        sum(payload * times for _, _, payload, times, _ in permutes)
        == pipeline_traffic(14, STREAM).permuted
    )
    assert not any(conditional for *_, conditional in permutes)
    assert not found["irregular"]
