"""The time of a step follows by hand from its numbers: by closed forms, and from the schedule of a TPU program."""

import dataclasses
import functools
import json
import math
from fractions import Fraction

import pytest

from spmd.analysis.topology import parse_topology
from spmd.chips import KINDS, ClosedRates, Hardware
from spmd.commands.plan import run_plan
from spmd.errors import ConfigError, SpmdError
from spmd.models import gemma, gpt2, lfm, llama, mixtral, transformer
from spmd.models.decoder import decoder_rules
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.run.build import count_flops, make_setup, planned_mesh
from spmd.run.load_config import load_config
from spmd.run.step_time import count_model, estimate_time, workload
from spmd.sharding.mesh import AXES, GATHERED_AXES, MeshShape
from spmd.step_time.closed_form import Workload, closed_form, collective_seconds
from spmd.step_time.network import Network, make_network
from spmd.step_time.report import StepTime
from spmd.step_time.roofline import roofline

ROUND = Hardware(
    peak=1e12, memory_bandwidth=1e9, link=1e9, network=1e8, host=1e9, latency=0, network_latency=0
)
RATES = ClosedRates(
    matmul=0.5, half=0.0, attention=0.25, passes=1.0, exposed=0.5, hop=0.0, straggling=0.1
)


def network(topology: str = "v5e:1x1", **sizes: int) -> Network:
    slices = {"data": sizes["data"]} if topology.startswith("2x") else {}
    return make_network(parse_topology(topology), MeshShape(**sizes), slices, ROUND, efficiency=1.0)


def work(sizes: dict[str, int] | None = None, **fields) -> Workload:
    """4 layers of width 64, a batch of 32 × 128 tokens."""
    numbers = {
        "layers": 4,
        "width": 64,
        "hidden": 256,
        "attention_width": 64,
        "kv_width": 32,
    }
    numbers |= {
        "vocab": 512,
        "layer_params": 2e5,
        "head_params": 3e4,
        "params": 3e5,
        "sequence": 128,
        "batch": 32,
    }
    return Workload(mesh={axis: 1 for axis in AXES} | (sizes or {}), **numbers | fields)


def spent(
    sizes: dict[str, int] | None = None, topology: str = "v5e:1x1", **fields
) -> dict[str, float]:
    return closed_form(work(sizes, **fields), network(topology, **sizes or {}), RATES)


TOKENS = 32 * 128


def test_matmuls_attention_and_memory_by_hand() -> None:
    """One device, no recomputation, nothing moved: four parts."""
    parts = spent()
    assert parts["matmuls"] == pytest.approx(TOKENS * 6 * 2.3e5 / 0.5e12)
    # one block of 512 covers all 128 tokens: nothing is skipped
    assert parts["attention"] == pytest.approx(TOKENS * 4 * 4 * 64 * 128 * 3.5 / 0.25e12)
    passes = 4 * (16 * 64 + 4 * 256) * 2 + 8 * 512 * 2
    assert parts["memory-bound work"] == pytest.approx(TOKENS * passes * 0.4 / 1e9)
    assert parts["optimizer"] == pytest.approx(3e5 * 28 / 1e9)
    assert {name for name, seconds in parts.items() if seconds} == {*list(parts)[:3], "optimizer"}
    assert spent(is_fused=False)["memory-bound work"] == pytest.approx(TOKENS * passes / 1e9)


def test_chunks_of_plain_xla_are_slower_than_a_kernel_on_tpus() -> None:
    """By the ring's compiled programs; nothing is known of GPUs."""
    ratio = spent(in_chunks=True)["attention"] / spent()["attention"]
    assert ratio == pytest.approx(10)
    numbers = work(in_chunks=True), work()
    on_gpu = network("h100:1x1")
    chunks, kernel = (closed_form(each, on_gpu, RATES)["attention"] for each in numbers)
    assert chunks == kernel


def test_a_ring_runs_in_chunks() -> None:
    """But not where no sequence is split; `chunked` does everywhere."""
    built = setup("llama3-8b")
    numbers = count_model(built)

    def in_chunks(shape: MeshShape, **fields: str) -> bool:
        config = dataclasses.replace(built.config, **fields)
        return workload(config, numbers, shape, "tpu").in_chunks

    split, whole = MeshShape(fsdp=8, sequence=8), MeshShape(fsdp=64)
    assert in_chunks(split, context="ring")
    assert not in_chunks(whole, context="ring")
    assert not in_chunks(split)
    assert not in_chunks(split, context="all-to-all")
    assert in_chunks(split, attention="chunked")
    assert in_chunks(whole, attention="chunked")


def test_narrow_matrices_are_slower() -> None:
    """By the width at which efficiency halves: of the stream, of hidden units on a device, and of its tokens."""
    rates = dataclasses.replace(RATES, half=64.0)
    slow = closed_form(work({"tensor": 2}), network("v5e:1x2", tensor=2), rates)
    fast = spent({"tensor": 2}, "v5e:1x2")
    assert slow["matmuls"] / fast["matmuls"] == pytest.approx(
        1 + 64 * (1 / 64 + 2 / 256 + 1 / TOKENS)
    )


def test_full_remat_costs_a_third_of_the_layers() -> None:
    """A forward pass is a third of the rest; attention's is 1 of 3.5."""
    parts, again = spent(), spent(recomputed=1.0, recomputes_attention=True)
    assert again["matmuls"] - parts["matmuls"] == pytest.approx(TOKENS * 2 * 2e5 / 0.5e12)
    assert again["attention"] / parts["attention"] == pytest.approx(4.5 / 3.5)
    assert again["memory-bound work"] > parts["memory-bound work"]
    both = work(), work(recomputed=1.0, recomputes_attention=True)
    assert both[0].model_flops == both[1].model_flops == TOKENS * (6 * 2.3e5 + 12 * 4 * 64 * 64)
    assert both[1].hardware_flops - both[0].hardware_flops == TOKENS * (2 * 2e5 + 4 * 4 * 64 * 64)


def test_parts_of_two_slices_add_up() -> None:
    """Waiting for the slower of two slices, which vary by a tenth: the mean of the larger of two normal variables."""
    sizes = {"data": 2, "fsdp": 256}
    parts = spent(sizes, "2xv5e:16x16", batch=512)
    waiting = parts.pop("waiting for the slowest slice")
    assert waiting == pytest.approx(0.1 * math.pi**-0.5 * sum(parts.values()), rel=0.05)
    assert parts["exposed collectives over data"] == pytest.approx(0.5 * 3e5 * 2 / 256 / 1e8)
    assert parts["optimizer"] == pytest.approx(3e5 / 256 * 28 / 1e9)


def test_gradients_between_slices_are_hidden_behind_the_backward_pass_alone() -> None:
    """In it a token takes 4 of the 6 FLOPs of a parameter; half of the gradients cross, twice."""
    sizes = {"data": 2, "fsdp": 256}
    numbers = work(sizes, batch=512)
    found = roofline(numbers, network("2xv5e:16x16", **sizes), RATES, 1)
    crossing = 2 * (3e5 / 256 * 2) / 2 / 1e8
    backward_of_example = 128 * 4 * 2.3e5 / 256 / 0.5e12
    assert found.slice_batch == pytest.approx(crossing / backward_of_example)


def test_parameters_are_gathered_over_the_sequence_too() -> None:
    """Two axes of two chips send what one of four does; a table without `sequence` keeps them whole over it."""
    whole = spent({"fsdp": 4}, "v5e:2x2")
    both = spent({"fsdp": 2, "sequence": 2}, "v5e:2x2", kv_width=0)
    name = "exposed collectives over fsdp"
    assert both[f"{name}+sequence"] == pytest.approx(whole[name])
    assert both["optimizer"] == pytest.approx(whole["optimizer"])
    alone = spent({"fsdp": 2, "sequence": 2}, "v5e:2x2", gathered_axes=("fsdp",))
    assert name in alone
    assert alone["optimizer"] == pytest.approx(2 * whole["optimizer"])


def test_stages_of_zero_by_hand() -> None:
    """Stage 3 gathers twice and reduces once; 2 gathers once a step, and 1 reduces to all devices."""
    sizes, once = {"fsdp": 4}, 3e5 * 2 * 3 / 4 / 2e9  # two lines of two chips

    def over(zero: int, microbatches: int = 1) -> float:
        numbers = work(sizes, zero=zero, microbatches=microbatches)
        return collective_seconds(numbers, network("v5e:2x2", **sizes))[GATHERED_AXES] / once

    assert over(3) == pytest.approx(3)
    assert over(2, microbatches=4) == pytest.approx(1 / 4 + 1)
    assert over(1) == pytest.approx(1 + 2)
    parts = spent(sizes, "v5e:2x2", microbatches=4)
    assert parts["exposed collectives over fsdp"] == pytest.approx(4 * 0.5 * 3 * once)
    assert spent(sizes, "v5e:2x2")["matmuls"] == pytest.approx(parts["matmuls"])


def test_collectives_of_activations_by_hand() -> None:
    """Each axis alone on a line of two chips: a tensor axis gathers and scatters the residual stream four times.

    Stages send it to the next, and to all for the logits, each way, if no stage runs its forward pass again.
    """

    def over(axis: str, **fields) -> float:
        found = collective_seconds(work({axis: 2}, **fields), network("v5e:1x2", **{axis: 2}))
        return found[axis,]

    stream = TOKENS * 64 * 2
    assert over("tensor") == pytest.approx(4 * 8 * stream / 2 / 1e9)
    assert over("tensor", recomputed=1.0) == pytest.approx(4 * 10 * stream / 2 / 1e9)
    assert over("expert", routed=2) == pytest.approx(4 * 4 * (stream / 2 * 2) * 2 / 4 / 1e9)
    assert over("sequence") == pytest.approx(4 * 3 * 2 * (TOKENS / 2) * 32 * 2 / 1e9)
    sent = 2 * stream / 4 / 1e9
    assert over("pipe", microbatches=4, stages_again=True) == pytest.approx(sent)
    assert over("pipe", microbatches=4) == pytest.approx(2 * sent)
    assert collective_seconds(work(), network()) == {}


def test_a_pipeline_has_a_bubble() -> None:
    """Relative to all that is done for microbatches; the optimizer comes after it."""
    parts = spent({"pipe": 2}, "v5e:1x2", microbatches=4, bubble=0.25)
    bubble, optimizer = parts.pop("pipeline bubble"), parts.pop("optimizer")
    assert bubble == pytest.approx(sum(parts.values()) / 4)
    assert optimizer == pytest.approx(3e5 / 2 * 28 / 1e9)
    assert parts["matmuls"] == pytest.approx(spent()["matmuls"] / 2)


def test_transfers_to_the_host_hide_behind_matmuls() -> None:
    """A third of the matmuls' time hides them; more is exposed."""
    matmuls = spent()["matmuls"]
    assert spent(offloaded=1024)["host transfers"] == pytest.approx(
        TOKENS * 4 * 1024 / 1e9 - matmuls / 3
    )
    assert spent(offloaded=64)["host transfers"] == 0


@functools.cache
def setup(name: str):
    config = dataclasses.replace(load_config(name), devices=64)
    return make_setup(config, planned_mesh(config))


def numbers(name: str, **fields) -> Workload:
    built = setup(name)
    return workload(
        dataclasses.replace(built.config, **fields),
        count_model(built),
        MeshShape(**built.mesh.shape),
    )


@pytest.mark.parametrize(
    ("name", "total"), [("llama3-8b", 8_030_261_248), ("mixtral-8x7b", 46_702_792_704)]
)
def test_numbers_of_shipped_configs(name, total) -> None:
    """Parameters in matmuls are those of the model: of Mixtral, two experts of eight."""
    found, model = numbers(name), setup(name).config.model
    assert found.layer_params + found.head_params == model.matmul_params
    assert found.head_params == model.vocab * model.d_model
    assert (found.params, found.layers, found.width) == (total, 32, 4096)
    assert (found.attention_width, found.kv_width, found.keys) == (4096, 1024, found.sequence / 2)
    assert found.routed == (2 if name == "mixtral-8x7b" else 0)
    # read and written: parameter and two moments; a gradient
    assert found.state_bytes == pytest.approx(2 * 12 + 4)


def test_remat_policies_as_numbers() -> None:
    """The last product of a layer is never repeated, nor one whose output is saved."""
    layer = {"q": 4096**2, "k": 4096 * 1024, "v": 4096 * 1024, "o": 4096**2, "mlp": 4096 * 14336}
    rest = sum(layer.values()) - layer["mlp"]
    total = rest + 3 * layer["mlp"]
    full = numbers("llama3-8b")
    assert full.recomputed == pytest.approx((rest + 2 * layer["mlp"]) / total)
    assert full.recomputes_attention
    saved = numbers("llama3-8b", remat="save:attention_query,attention_out,mlp_up")
    assert saved.recomputed == pytest.approx((rest - layer["q"] + layer["mlp"]) / total)
    assert not saved.recomputes_attention
    none = numbers("llama3-8b", remat="none")
    assert (none.recomputed, none.recomputes_attention) == (0, False)


def test_precision_and_microbatches_as_numbers() -> None:
    """float32 gathers and reduces 4 bytes a parameter; microbatches multiply; a pipeline has a bubble."""
    assert (numbers("llama3-8b").gathered_bytes, numbers("llama3-8b").reduced_bytes) == (2, 2)
    wide = numbers("llama3-8b", precision="float32")
    assert (wide.gathered_bytes, wide.reduced_bytes) == (4, 4)
    assert numbers("llama3-8b", accumulate=4).microbatches == 4
    built = setup("llama3-8b")
    piped = workload(built.config, count_model(built), MeshShape(pipe=4, fsdp=16))
    # as many as 64 examples on 16 devices allow
    assert (piped.microbatches, piped.bubble) == (4, 3 / 4)


def test_blocks_are_skipped_whole() -> None:
    """A causal kernel multiplies half a block more than half of the keys; a window, a whole block more."""
    long = {"sequence": 8192, "batch": 0.5}  # as many tokens
    causal = spent(**long)["attention"]
    assert causal == pytest.approx(TOKENS * 4 * 4 * 64 * (4096 + 256) * 3.5 / 0.25e12)
    local = spent(**long, windows=(1024,))["attention"]
    seen = 1024 - 1024**2 / (2 * 8192)
    assert local == pytest.approx(TOKENS * 4 * 4 * 64 * (seen + 512) * 3.5 / 0.25e12)
    assert spent(**long, windows=(8192,))["attention"] == pytest.approx(causal)


def test_narrow_heads_leave_a_part_of_the_matrix_unit_idle() -> None:
    """Heads of 64 take twice the time where the unit is 128 wide; on GPUs the same."""
    for topology, ratio in (("v5e:1x1", 2), ("a100:1x1", 1)):
        machine = dataclasses.replace(
            network(topology), hardware=dataclasses.replace(ROUND, matrix_unit=128 * (ratio - 1))
        )
        wide, narrow = (
            closed_form(work(head_width=width), machine, RATES)["attention"] for width in (128, 64)
        )
        assert narrow == pytest.approx(ratio * wide)


def test_experts_by_hand() -> None:
    """Their matmuls are slower by a rate, and each copy of a token is read or written twelve times."""
    fields = {"experts": 8, "routed": 2, "hidden": 512}
    rates = dataclasses.replace(RATES, experts=0.5)
    parts = closed_form(work(expert_params=1e5, **fields), network(), rates)
    assert parts["matmuls"] == pytest.approx(TOKENS * 6 * (2.3e5 + 1e5) / 0.5e12)
    dense = closed_form(work(hidden=512), network(), rates)
    copies = TOKENS * 4 * 12 * 2 * 64 * 2 / 1e9
    assert parts["memory-bound work"] - dense["memory-bound work"] == pytest.approx(copies)
    # Over expert=2, a device has half of the tokens and 4 experts, with a quarter of all copies each.
    sizes, half = {"expert": 2}, 64.0
    on, rates = network("v5e:1x2", **sizes), dataclasses.replace(rates, half=half)
    split = closed_form(work(sizes, expert_params=1e5, **fields), on, rates)["matmuls"]
    tokens = TOKENS / 2
    narrow = half * (1 / 64 + 1 / 512 + 1 / tokens)
    own = half * (1 / 64 + 1 / 256 + 1 / (TOKENS * 2 / 8))
    flops = 1.3e5 * (1 + narrow) + 1e5 * (1 + own) / 0.5
    assert split == pytest.approx(tokens * 6 * flops / 0.5e12)


def test_what_tensor_hides() -> None:
    """A share of its collectives, by a rate of its own; pipelines have none."""
    sizes, rates = {"tensor": 4}, dataclasses.replace(RATES, exposed_tensor=0.25)
    on = network("v5e:2x2", **sizes)
    whole, hidden = (closed_form(work(sizes), on, each) for each in (RATES, rates))
    name = "exposed collectives over tensor"
    assert hidden[name] == pytest.approx(0.25 * whole[name])
    assert hidden["matmuls"] == whole["matmuls"]


def test_kinds_of_steps_have_their_ranges() -> None:
    """Experts before pipelines before 8 bits; a range that is not known is said, and null in JSON."""
    piped = {"pipe": 2}
    narrow = {"quantized": {"float8": 1.0}}
    assert work().kind == "dense"
    assert work(**narrow).kind == "8 bits"
    assert work(piped, **narrow).kind == "pipelines"
    assert work(piped, **narrow, experts=8).kind == "experts"
    rates = dataclasses.replace(RATES, spread=0.1, spreads={"8 bits": 0.3})
    assert [rates.spread_of(kind) for kind in KINDS] == [0.1, 0.3, None, None]
    found = StepTime(
        parse_topology("v5e:2x4"), "closed forms", work(experts=8), ROUND, {"matmuls": 1.0}, None
    )
    assert found.summary == (
        "step on v5e:2x4: 1 s, range not known: no steps with experts are published for v5e (closed forms)"
    )
    assert found.to_json()["range"] is None
    known = dataclasses.replace(found, spread=0.25)
    assert known.range == (0.8, 1.25)


def test_the_width_of_heads_is_that_of_layers_with_attention() -> None:
    """Not of the mean over all layers, most of which have a state-space mixer or a convolution."""
    built = setup("llama3-8b")
    for model, width in ((lfm.PRESETS["lfm2-1.2b"], 64), (llama.PRESETS["llama3-8b"], 128)):
        config = dataclasses.replace(built.config, model=model, rules=decoder_rules(model))
        assert workload(config, count_model(built), MeshShape(fsdp=64)).head_width == width


def test_windows_as_keys() -> None:
    """A window of w tokens sees w − w²/2s keys, one of all tokens s/2; layers alternate."""
    model = transformer.transformer(64, 32, 4, 4, 2, 64, windows=(16, 0))
    built = setup("llama3-8b")
    data = dataclasses.replace(built.config.data, sequence=128)
    config = dataclasses.replace(built.config, model=model, rules=decoder_rules(model), data=data)
    found = workload(config, count_model(built), MeshShape(fsdp=64))
    assert found.keys == ((16 - 16**2 / 256) + 64) / 2


FAMILIES = {
    "llama": (llama.PRESETS["test"], LLAMA),
    "windows": (
        transformer.PRESETS["test-windows"],
        decoder_rules(transformer.PRESETS["test-windows"]),
    ),
    "gemma": (gemma.PRESETS["test-gemma2"], decoder_rules(gemma.PRESETS["test-gemma2"])),
    "mixtral": (mixtral.PRESETS["test"], MIXTRAL),
    "gpt2": (gpt2.PRESETS["test"], decoder_rules(gpt2.PRESETS["test"])),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_and_a_prediction_have_one_mfu(name) -> None:
    """Model FLOPs of a token are the same, with windows and experts too; control: another window."""
    model, rules = FAMILIES[name]
    demo = load_config("demo")
    data = dataclasses.replace(demo.data, sequence=32)
    config = dataclasses.replace(
        demo, model=model, rules=rules, data=data, devices=1, mesh=MeshShape()
    )
    found = workload(config, count_model(make_setup(config, planned_mesh(config))), MeshShape())
    of_run = count_flops(config)
    assert found.model_flops / found.tokens == pytest.approx(of_run.per_token, rel=1e-12)
    if name == "windows":
        shape = (64, 32, 4, 4, 2, 64)
        other = transformer.transformer(*shape, mlp="geglu", windows=(9, 0))
        wider = dataclasses.replace(config, model=other)
        assert count_flops(wider).per_token > 1.005 * of_run.per_token


def test_an_estimate_refuses_what_a_plan_refuses() -> None:
    """A batch that does not divide over the mesh, in the same words; control: one that does."""
    flags = ["llama3-8b", "--topology", "v5p:4x8x8", "--mesh.fsdp", "256", "--data.batch"]
    said = []
    for view in ([], ["--estimate"]):
        with pytest.raises(SpmdError, match="64 / ") as caught:
            run_plan([*flags, "64", *view])
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert run_plan([*flags, "256", "--estimate"]) == 0


def test_mfu_is_the_formula() -> None:
    """Model FLOPs of the peak of all devices; HFU with what is recomputed; a chip of TPU7x is two devices."""
    topology = parse_topology("tpu7x:2x2x1")
    numbers = work({"fsdp": 8}, recomputed=1.0, recomputes_attention=True)
    found = StepTime(
        topology, "closed forms", numbers, ROUND, {"matmuls": 0.5, "optimizer": 1.5}, 0.25
    )
    assert found.seconds == 2
    assert found.mfu == pytest.approx(TOKENS * (6 * 2.3e5 + 12 * 4 * 64 * 64) / (2 * 1e12 * 8))
    assert found.hfu / found.mfu == pytest.approx(numbers.hardware_flops / numbers.model_flops)
    assert found.speed[0] == TOKENS / 2 / 4
    assert found.range == (1.6, 2.5)
    assert (found.fits, dataclasses.replace(found, memory=2**40).fits) == (None, False)
    assert "DOES NOT FIT: 1 TiB of 94.8 GiB" in str(dataclasses.replace(found, memory=2**40))
    lines = str(found).splitlines()
    assert lines[0] == "step on tpu7x:2x2x1: 2 s, from 1.6 s to 2.5 s (closed forms)"
    assert lines[3].strip() == "N=0.00023B matmul parameters, L=4, A=64, K=64 keys on average"
    assert [line.split() for line in lines[4:]] == [
        ["1.5", "s", "75.0%", "optimizer"],
        ["500", "ms", "25.0%", "matmuls"],
    ]


def test_times_without_published_steps_are_marked() -> None:
    """By the kin whose rates they have; control: those of a calibrated chip are not."""

    def shown(machine: str) -> tuple[str, bool]:
        topology = parse_topology(machine)
        found = StepTime(topology, "closed forms", None, ROUND, {"matmuls": 1.0}, 0.3, examples=1)
        return str(found), found.to_json()["calibrated"]

    text, calibrated = shown("l40s:1x8")
    assert "not calibrated: rates of a100, as for l40s no step is published" in text
    assert not calibrated
    text, calibrated = shown("h100:1x8")
    assert "not calibrated" not in text
    assert calibrated
    assert "v100 has no bfloat16" in shown("v100:1x8")[0]


def test_the_command_estimates(capsys) -> None:
    """As a table and as JSON, which is the estimate of the setup."""
    expected = estimate_time(setup("llama3-8b"), parse_topology("v5e:8x8"))
    assert run_plan(["llama3-8b", "--topology", "v5e:8x8", "--estimate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(expected.to_json()))
    assert found["seconds"] == pytest.approx(sum(found["spent"].values()))
    assert found["range"][0] < found["seconds"] < found["range"][1]
    assert 0.3 < found["mfu"] < found["hfu"] < 0.8
    assert math.prod(found["range"]) == pytest.approx(found["seconds"] ** 2)
    assert run_plan(["llama3-8b", "--topology", "v5e:8x8", "--estimate"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


MISTAKES = [
    (["--estimate"], r"--estimate: needs a machine"),
    (["--time"], r"--time: needs a machine"),
    (
        ["--topology", "v5e:8x8", "--trace", "step.json"],
        r"--trace: is the schedule of a compiled program",
    ),
    (["--topology", "v5e:8x8", "--estimate", "--trace", "step.json"], r"--trace: is the schedule"),
    (
        ["--topology", "v5e:8x8", "--estimate", "--time"],
        r"(?s)--estimate: is one of several views.*--time",
    ),
    (["--topology", "cpu:64", "--estimate"], r"topology: is cpu:64: no speeds are known of cpu"),
]


@pytest.mark.parametrize(
    ("flags", "message"), MISTAKES, ids=[" ".join(flags) for flags, _ in MISTAKES]
)
def test_mistakes_on_the_command_line(flags, message) -> None:
    """Are errors by the flag's name."""
    with pytest.raises(ConfigError, match=message):
        run_plan(["llama3-8b", *flags])


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_all_stages_wait_for_a_task_of_any(name, chunks) -> None:
    """The share of ticks in which any stage has a task is at least that of the busiest, and smaller than 1."""
    table = tabulate(make_schedule(name, 4, 8, chunks))
    ticks = sum(any(task >= 0 for task in row) for row in table.forward.tolist())
    assert table.waited["pipeline_forward"] == Fraction(ticks, table.ticks)
    assert all(table.taken[branch] <= share <= 1 for branch, share in table.waited.items())
    assert table.taken["pipeline_forward"] < table.waited["pipeline_forward"]
    assert table.waited["pipeline_embedding"] == Fraction(8, table.ticks)
