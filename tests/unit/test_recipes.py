"""Recipes in a config: the table, everything that is wrong with it at once, and what a chip gains."""

import dataclasses
import json

import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.analysis.topology import parse_topology
from spmd.chips import CHIPS
from spmd.cli import main
from spmd.commands.plan import run_plan
from spmd.errors import ConfigError, RuleError
from spmd.lora.config import LoRAConfig
from spmd.models.decoder import DecoderConfig
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.plan import make_plan
from spmd.run import build
from spmd.run.build import config_mesh, make_setup, planned_mesh
from spmd.run.config import TrainConfig, config_values, with_values
from spmd.run.recipes import (
    precision_problems,
    recipe_lines,
    recipe_problems,
    untuned_problems,
)
from spmd.run.record import MAY_CHANGE
from spmd.run.step_time import estimate_time
from spmd.settings.quantize import RECIPES
from spmd.sharding.mesh import abstract_mesh

SMALL = DecoderConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64)
DATA = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=32, batch=8)
LINEAR = {
    *(f"attention/{name}_proj" for name in "qkvo"),
    *(f"mlp/{name}_proj" for name in ("gate", "up", "down")),
}


def setup(quantize, rules=LLAMA, model=SMALL, **fields):
    fields = {"mesh": spmd.MeshShape(fsdp=2), "data": DATA, **fields}
    config = TrainConfig(model=model, rules=rules, quantize=quantize, **fields)
    return make_setup(config, planned_mesh(config))


def recipes(plan):
    return {path: placed.recipe.name for path, placed in plan.placements.items() if placed.recipe}


def problems(quantize, **fields):
    with pytest.raises((ConfigError, RuleError)) as caught:
        setup(quantize, **fields)
    return list(map(str, caught.value.problems))


def test_a_recipe_is_of_all_linear_layers_and_nothing_else():
    """Never of the embedding, the head, a router or a norm."""
    assert recipes(setup("fp8").plan) == {f"layers/{name}/kernel": "fp8" for name in LINEAR}
    found = recipes(setup("int8", MIXTRAL, PRESETS["test"]).plan)
    assert {path for path in found if "experts/" in path}
    assert not {path for path in found if "router" in path}
    assert recipes(setup("").plan) == {}


def test_the_first_row_that_matches_decides():
    """And bf16 exempts."""
    found = recipes(
        setup("mlp/down_proj/kernel=bf16,mlp/.*=int8,attention/[qk]_proj/kernel=mxfp8").plan
    )
    assert found == {
        **dict.fromkeys(("layers/mlp/gate_proj/kernel", "layers/mlp/up_proj/kernel"), "int8"),
        **dict.fromkeys(
            ("layers/attention/q_proj/kernel", "layers/attention/k_proj/kernel"), "mxfp8"
        ),
    }


def test_unknown_recipes_are_refused_with_other_fields():
    """All rows at once, before anything is built."""
    text = "\n".join(problems("mlp/.*=fpp8,(=fp8,=int8", steps=0))
    parts = (
        "names the recipe 'fpp8'",
        'did you mean "fp8"?',
        "is no regular expression",
        "has no pattern",
        "steps",
    )
    assert [part for part in parts if part not in text] == []


def test_rows_without_a_matmul_are_refused_at_once():
    """With the kernels that there are; what is never quantized is named."""
    found = problems(
        "mlp/dwn_proj/kernel=fp8,lm_head/.*=fp8,.*norm/scale=fp8,mlp/.*=int8,mlp/up_proj/.*=fp8"
    )
    text = "\n".join(found)
    assert len(found) == 4
    assert 'did you mean "layers/mlp/down_proj/kernel"?' in text
    assert "lm_head/kernel is never quantized" in text
    assert "rows before it match the same matmuls" in text


def test_a_model_of_another_library_has_no_recipes():
    """Which is said, instead of a plan that looks quantized."""
    model = spmd.from_nnx(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
    mesh = abstract_mesh(spmd.MeshShape())
    rules = spmd.Rules(params=[("kernel|bias", spmd.replicate("small"))])
    with pytest.raises(RuleError, match=r"matches no matmul(.|\n)*only layers of spmd.models"):
        spmd.make_plan(mesh, rules, model, optax.sgd(0.1), quantize="fp8")


def test_delayed_scales_need_trained_kernels_outside_a_pipeline():
    """Both reasons at once."""
    found = problems(
        "fp8-delayed", mesh=spmd.MeshShape(pipe=2), lora=LoRAConfig(targets=("q_proj/kernel",))
    )
    text = "\n".join(found)
    assert "stages of a pipeline remember none" in text
    assert "frozen kernels remember none" in text


def test_magnitudes_are_the_state_of_a_transform():
    """Replicated, a history for each kernel and layer; other recipes have none."""
    plan = setup("fp8-delayed").plan
    entries = {entry.path: entry for entry in plan.transform_states}
    assert set(entries) == {
        f"magnitudes/layers/{n}/kernel/{x}" for n in LINEAR for x in ("history", "now")
    }
    assert entries["magnitudes/layers/mlp/up_proj/kernel/history"].shape == (2, 3, 16)
    assert all(entry.spec == P() for entry in entries.values())
    assert setup("fp8").plan.transform_states == ()
    experts = {
        entry.path for entry in setup("fp8-delayed", MIXTRAL, PRESETS["test"]).plan.transform_states
    }
    assert experts
    assert not [path for path in experts if "experts/" in path]


def test_a_config_keeps_its_table():
    """In the JSON of a checkpoint, and may change it later."""
    config = TrainConfig(model=SMALL, rules=LLAMA, quantize="mlp/.*=fp8")
    assert with_values(TrainConfig(model=SMALL, rules=LLAMA), config_values(config)) == config
    assert "quantize" in MAY_CHANGE


@pytest.mark.parametrize(
    ("recipe", "chip", "expected"),
    [
        ("fp8", "tpu7x", "takes 0.46 of its time"),
        ("fp8", "v5e", "WARNING: no faster: on v5e a product takes 1.01"),
        ("int8", "v5e", "takes 0.50 of its time"),
        ("int8", "tpu7x", "WARNING: no faster"),
        (
            "fp8-block",
            "h100",
            "WARNING: no faster: blocks of 128 are multiplied in the compute dtype",
        ),
    ],
)
def test_a_plan_says_what_a_chip_gains(recipe, chip, expected):
    """With a warning where that is nothing."""
    (what, gain) = recipe_lines(setup(recipe).plan, CHIPS[chip].device_kind)
    assert what.startswith(f"matmuls in {recipe}: 7 kernels, ")
    assert expected in gain


def test_chips_refuse_what_they_have_not():
    """GPUs without float8, and without blocks of 32; TPUs and simulated devices compute all."""
    recipes = [RECIPES["fp8"], RECIPES["mxfp8"]]
    assert len(recipe_problems(recipes, CHIPS["a100"].device_kind)) == 2
    (found,) = recipe_problems(recipes, CHIPS["h100"].device_kind)
    assert "mxfp8: requires Blackwell: h100 does not support it\n    fix: int8, fp8" in str(found)
    for chip in ("b200", "v5e", "cpu"):
        assert not recipe_problems(recipes, CHIPS[chip].device_kind)


def test_int8_on_a_gpu_without_autotuning_is_refused():
    """Its products are zero there; other recipes, machines and levels are right."""
    recipes, untuned = [RECIPES["int8"], RECIPES["fp8"]], "--xla_gpu_autotune_level=0"
    (found,) = untuned_problems(recipes, "gpu", ["preset", untuned])
    assert "quantize int8: is all zeros on a GPU with xla_gpu_autotune_level=0" in str(found)
    assert not untuned_problems(recipes, "cpu", [untuned])
    assert not untuned_problems(recipes, "gpu", ["--xla_gpu_autotune_level=1"])
    assert not untuned_problems(recipes, "gpu", [untuned, "xla_gpu_autotune_level=4"]), (
        "the last one counts"
    )


def test_a_setup_asks_for_autotuning(monkeypatch):
    """Of the devices that are there; a plan for others, as a plan without devices, is made."""
    monkeypatch.setattr(
        build, "compiler_environment", lambda: {"XLA_FLAGS": "--a --xla_gpu_autotune_level=0"}
    )
    monkeypatch.setattr(build.jax, "default_backend", lambda: "gpu")
    config = TrainConfig(
        model=SMALL, rules=LLAMA, quantize="int8", mesh=spmd.MeshShape(fsdp=8), data=DATA
    )
    with pytest.raises(ConfigError, match="quantize int8: is all zeros on a GPU"):
        make_setup(config, config_mesh(config))
    make_setup(config, planned_mesh(config))


def test_everything_that_is_wrong_with_fewer_bits_is_said_at_once(capsys, monkeypatch):
    """What is sent, multiplied and stored, PowerSGD, and what the chip has: none hides another, in one plan."""
    made = []
    monkeypatch.setattr(
        build, "make_plan", lambda *args, **options: made.append(1) or make_plan(*args, **options)
    )
    sizes = ("--mesh.data", "1", "--mesh.fsdp", "1", "--mesh.tensor", "8", "--topology", "a100:1x8")
    bits = (
        "--quantize",
        "nothing/kernel=fp8",
        "--compress.gather",
        "int8",
        "--compress.gradients",
        "powersgd:400",
    )
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "demo", "--precision", "bf16", *sizes, *bits, "--remat", "store:int8=nope"])
    said = capsys.readouterr().err
    for each in (
        "compress.gather: is int8, and no parameter is split over fsdp",
        "compress.gradients: is powersgd:400 over data, an axis of size 1",
        "compress.gradients, lm_head/kernel: is powersgd:400, a rank above the matrix",
        "quantize fp8: requires float8: a100 does not support it",
        "quantize, row 'nothing/kernel=fp8': matches no matmul",
        "remat store:int8=nope: is no activation of the rule table",
    ):
        assert said.count(each) == 1, said
    assert "Traceback" not in said
    assert len(made) == 1


def test_every_recipe_is_in_the_table_of_the_command_line(capsys):
    """`spmd plan --json` names the kernels."""
    command = [
        "demo",
        "--mesh.data",
        "2",
        "--mesh.fsdp",
        "2",
        "--mesh.tensor",
        "2",
        "--quantize",
        "fp8",
        "--json",
    ]
    assert run_plan(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["quantize"] == "fp8"
    assert printed["quantization"][0].startswith("matmuls in fp8: 7 kernels")
    assert set(RECIPES) == {"fp8", "fp8-delayed", "fp8-block", "mxfp8", "int8"}


def test_closed_forms_know_of_faster_products():
    """Only where the chip has them; a row-scaled kernel's gradient is not quantized."""

    def matmuls(recipe, topology):
        config = dataclasses.replace(setup(recipe).config, mesh=spmd.MeshShape(fsdp=4))
        found = estimate_time(make_setup(config, planned_mesh(config)), parse_topology(topology))
        return found.spent["matmuls"]

    assert matmuls("fp8", "tpu7x:2x1x1") < 0.7 * matmuls("", "tpu7x:2x1x1")
    # two of three products: they multiply in half of the time, and move 4 bytes instead of 6
    multiplying = 2 / 3 * (1 - 0.5 / CHIPS["v5e"].closed.eight_bits)
    moving = 2 / 3 * (1 - 4 / 6)
    ratio = matmuls("int8", "v5e:2x2") / matmuls("", "v5e:2x2")
    assert 1 - share() * multiplying < ratio < 1 - share() * moving
    assert matmuls("mxfp8", "v5e:2x2") == matmuls("", "v5e:2x2")


def share():
    """Layers' part of the FLOPs in matmuls."""
    layers = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    return layers / (layers + 32 * 64)


def test_bfloat16_needs_a_chip_with_it() -> None:
    """XLA refuses it on the others; control: float16 there, and bfloat16 elsewhere."""
    (problem,) = precision_problems("bfloat16", "Tesla V100-SXM2-32GB")
    assert problem.what == "is bfloat16, which v100 does not support"
    assert precision_problems("float16", "Tesla V100-SXM2-32GB") == []
    assert (
        precision_problems("bfloat16", "NVIDIA L4") == precision_problems("bfloat16", "cpu") == []
    )
