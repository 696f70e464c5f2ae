"""What a pipeline asks for, and says where it does not get it; how layers travel to their stages."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.cli import main
from spmd.errors import SpmdError
from spmd.gradients.losses import next_token_loss
from spmd.model_interface.model import Outputs
from spmd.models.decoder import decoder_rules
from spmd.models.llama import PRESETS
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.models.mixtral import mixtral
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.interleave import interleave
from spmd.pipeline.partition import _setting_problems
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.context import use_plan
from spmd.plan.manual import shard_map_over
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.build import TrainSetup, count_microbatches, make_setup, planned_mesh
from spmd.run.check import Check
from spmd.run.preflight import preflight
from spmd.sharding.rules import Rules, replicate
from spmd.training.compilation_cache import compilation_cache
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny

SHAPES = {
    name: jax.ShapeDtypeStruct((16, 16), dtype)
    for name, dtype in (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
}


def setup(model=PRESETS["demo"], rules=LLAMA, batch=16, **fields) -> TrainSetup:
    fields = {"mesh": spmd.MeshShape(pipe=2), **fields}
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=64, batch=batch)
    config = spmd.TrainConfig(model=model, rules=rules, data=data, **fields)
    return make_setup(config, planned_mesh(config))


def microbatches(**fields) -> int:
    made = setup(**fields)
    return count_microbatches(made.config, made.schedule)


def refused(*arguments, **fields) -> str:
    """What a config is refused with, before anything compiles."""
    with pytest.raises(SpmdError) as caught:
        preflight(setup(*arguments, **fields))
    return str(caught.value)


@pytest.mark.parametrize(
    ("axis", "cached"), [("pipe", set()), ("fsdp", {"jit__step", "jit_evaluate"})]
)
def test_steps_of_a_pipeline_are_not_cached(axis, cached, tmp_path):
    """XLA:CPU loses the order of collectives in programs that it reads back; steps without stages are cached."""

    def loss_fn(params, variables, batch, key):
        return {
            "loss": jnp.square(batch["weights"] @ params["w"]).sum(),
            "weight": jnp.ones(()),
        }, variables

    model = spmd.Model(lambda key: {"w": jnp.ones((16, 16))}, lambda params, x: x @ params["w"])
    plan = make_plan(
        tiny.mesh(**{axis: 2}), Rules(params=[("w", replicate("small"))]), model, optax.sgd(0.1)
    )
    with compilation_cache(tmp_path):
        state = init_state(plan)
        make_train_step(plan, loss_fn).compile(SHAPES)
        make_eval_step(plan, loss_fn)(
            state.params, state.variables, {"weights": jnp.ones((16, 16))}
        )
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    found = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert found & {"jit__step", "jit_evaluate"} == cached


@pytest.mark.parametrize(
    ("stages", "chunks"), [(2, 2), (4, 2), (2, 4), (4, 4), (8, 3), (8, 6), (4, 6)]
)
def test_layers_travel_to_their_stage_and_back(stages, chunks):
    """Group j of all layers comes to stage j mod stages, in order, and back to where it was."""
    mesh = tiny.mesh(pipe=stages)
    groups = np.arange(stages * chunks * 3).reshape(stages * chunks, 3).astype(np.float32)
    stack = groups.reshape(-1)

    def there(x):
        return interleave(x, stages, chunks)

    def and_back(x):
        return interleave(interleave(x, stages, chunks), stages, chunks, back=True)

    moved, same = (
        np.asarray(jax.jit(shard_map_over(mesh, ("pipe",), f, P("pipe"), P("pipe")))(stack))
        for f in (there, and_back)
    )
    of_stage = moved.reshape(stages, chunks, 3)
    for stage in range(stages):
        np.testing.assert_array_equal(of_stage[stage], groups[stage::stages])
    np.testing.assert_array_equal(same, stack)
    assert not np.array_equal(moved.reshape(-1), stack), "the control: something moved"


def test_the_number_of_microbatches_follows_the_batch():
    """By default up to four for each stage, fewer where the batch does not give them; the plan's mesh counts."""
    assert microbatches(batch=16) == 8
    assert microbatches(batch=4) == 4
    assert microbatches(batch=16, mesh=spmd.MeshShape(pipe=2, data=4)) == 4
    assert microbatches(batch=12, pipeline=spmd.PipelineConfig("interleaved")) == 6
    assert microbatches(mesh=spmd.MeshShape()) == 1
    assert microbatches(mesh=spmd.MeshShape(), pipeline=spmd.PipelineConfig(microbatches=4)) == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch": 15, "pipeline": spmd.PipelineConfig(microbatches=4)}, "15 / (microbatches=4 ×"),
        (
            {"mesh": spmd.MeshShape(pipe=8), "pipeline": spmd.PipelineConfig(microbatches=8)},
            "4 layers / (pipe=8) = 0.5",
        ),
        (
            {"pipeline": spmd.PipelineConfig("interleaved", 8, 4)},
            "4 layers / (pipe=2 × 4 chunks) = 0.5",
        ),
        ({"pipeline": spmd.PipelineConfig("interleaved", 5)}, "5 / (stages=2) = 2.5"),
        ({"pipeline": spmd.PipelineConfig("1f1b", 8, 2)}, "chunks = 2"),
        (
            {"pipeline": spmd.PipelineConfig("zero-bubble", 8)},
            "is 'zero-bubble'",
        ),
        ({"pipeline": spmd.PipelineConfig("nowhere.csv")}, "nowhere.csv"),
    ],
    ids=str,
)
def test_bad_input(fields, said):
    """What cannot be is refused before anything compiles, with the arithmetic."""
    assert said in refused(**fields)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("F0,F1,BW0,BW1\n", "rows = 1, mesh.pipe = 2"),
        ("F0,F1,BW0,BW1\n,F0,BW0,F1\n", "stage 1: tasks are missing: BW1"),
        ("F0,F1,BW0,BW1\n,BW0,F0,F1,BW1\n", "stage 1, tick 1: deadlock: BW0 waits for F0"),
        ("F0,F1,BW0,X1\n,F0,BW0,F1,BW1\n", "stage 0, tick 3"),
    ],
    ids=str,
)
def test_bad_files(tmp_path, rows, said):
    """A schedule from a file is refused with its stage and tick."""
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    assert said in refused(pipeline=spmd.PipelineConfig(str(path)))


def test_models_that_cannot_be_cut():
    """Layers in a list, and two stacks: each is named."""
    unstacked = dataclasses.replace(PRESETS["demo"], stacked=False)
    assert "mesh.pipe: splits no parameter" in refused(unstacked)
    base = MIXTRALS["test"]
    two = mixtral(*(64, 32, 6, 4, 2, 16), dense_layers=2, dense_d_ff=64, router=base.router)
    stacks = {"layers": "pipe", "dense_layers": "pipe"}
    split = dataclasses.replace(decoder_rules(two), stacked=stacks)
    assert "stacks of 2 and 4 layers" in refused(two, split)


class Whole(nnx.Module):
    """A model of stacked layers in one part."""

    def __init__(self, rngs: nnx.Rngs, *, penalty: bool = False, dtype=jnp.float32) -> None:
        self.penalty, self.dtype = penalty, dtype
        self.embed = nnx.Embed(64, 8, rngs=rngs)
        self.layers = nnx.Dict(kernel=nnx.Param(jax.random.normal(rngs.params(), (4, 8, 8)) * 0.1))

    def run(self, x):
        def layer(x, kernel):
            return x + jnp.tanh(x @ kernel), x.sum().astype(self.dtype)

        return jax.lax.scan(layer, x, self.layers["kernel"][...])

    def outputs(self, x):
        penalty = (self.layers["kernel"][...] ** 2).sum() if self.penalty else jnp.float32(0)
        return Outputs(x @ self.embed.embedding[...].T, {"penalty": penalty})

    def __call__(self, tokens):
        return self.outputs(self.run(self.embed(tokens))[0])


class InParts(Whole):
    """The same with the methods that a pipeline needs."""

    def embed_inputs(self, tokens):
        return self.embed(tokens), None

    def apply_layers(self, x, context):
        return self.run(x)

    def compute_outputs(self, x, values):
        return self.outputs(x)


def test_a_model_of_ones_own():
    """A model that knows nothing of this framework but its three methods is pipelined; without them, the error names
    them."""
    small = [
        ("embed/embedding", replicate("small")),
        ("layers/kernel", replicate("small, but for its stages")),
    ]
    rules = Rules(small, stacked={"layers": "pipe"})  # a stack that is made by hand is named
    table = tabulate(make_schedule("1f1b", 2, 4))

    def trace(make, own_loss=False, **does):
        model = from_nnx(lambda rngs: make(rngs, **does))
        plan = make_plan(tiny.mesh(pipe=2), rules, model, tiny.OPTIMIZER)
        loss_fn = next_token_loss(model)
        grad_fn = pipeline((lambda *arguments: loss_fn(*arguments)) if own_loss else loss_fn, table)
        return make_train_step(plan, grad_fn=grad_fn).trace(SHAPES)

    with pytest.raises(SpmdError, match="methods embed_inputs, apply_layers and compute_outputs"):
        trace(Whole)
    with pytest.raises(
        SpmdError, match=r"loss: is a function, and a pipeline needs its parts\n.*ModelLoss"
    ):
        trace(InParts, own_loss=True)
    with pytest.raises(SpmdError, match="layers/kernel: is used outside of apply_layers"):
        trace(InParts, penalty=True)
    with pytest.raises(SpmdError, match="layers: return int32, which has no gradient"):
        trace(InParts, dtype=jnp.int32)
    assert "ppermute" in str(trace(InParts).jaxpr)


def test_permutes_in_a_stage_are_refused_on_simulated_devices():
    """They would hang. A table with the other order of axes needs none."""

    def compile_with(*axes):
        rows = [
            ("embed/embedding", P(None, axes)),
            ("layers/kernel", replicate("small, but for its stages")),
        ]
        model = from_nnx(InParts)
        rules = Rules(rows, stacked={"layers": "pipe"})
        mesh = tiny.mesh(pipe=2, fsdp=2, tensor=2)
        plan = make_plan(mesh, rules, model, optax.sgd(0.1))
        table = tabulate(make_schedule("1f1b", 2, 4))
        step = make_train_step(plan, grad_fn=pipeline(next_token_loss(model), table))
        return step.compile(SHAPES)

    with pytest.raises(SpmdError, match=r"f32\[64,2\]: is moved between devices inside"):
        compile_with("fsdp", "tensor")
    compile_with("tensor", "fsdp")


def test_the_plan_says_how_many_microbatches(capsys):
    """The number that was chosen, and how the schedule is executed, follow the plan; nothing without a pipeline."""
    with pytest.raises(SystemExit):
        main(["plan", "demo", "--mesh.pipe", "2", "--mesh.data", "1"])
    assert (
        "pipeline 1f1b, 4 microbatches; executed in lock step: 6 ticks" in capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        main(["plan", "demo"])
    assert "pipeline" not in capsys.readouterr().out


def test_one_stage_is_no_pipeline():
    """A schedule of one stage is refused: its only task is the first and the last."""
    with pytest.raises(SpmdError, match="has one stage"):
        tabulate(make_schedule("1f1b", 1, 4))


@pytest.mark.soak
def test_a_check_takes_the_same_microbatches():
    """Routers' losses are of a microbatch: one device has those that the mesh has, also where no number is given."""
    config = dataclasses.replace(MIXTRALS["test"], layers=2, stacked=True)
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=16, batch=8)
    config = spmd.TrainConfig(
        model=dataclasses.replace(config, vocab=256), rules=MIXTRAL, data=data
    )
    check = Check(config, 1)
    assert check.compare(tiny.mesh(pipe=2)).ok
    found = check.reference(4).compare(check.one_device.plan, check.one_device.grad_fn)
    assert not found.ok, "the control: one microbatch has other losses"


def test_the_picture(tmp_path, capsys):
    """`spmd plan --schedule` draws the schedule, says how it is executed, and writes an SVG."""
    path = tmp_path / "picture.svg"
    flags = [
        "--mesh.pipe",
        "4",
        "--mesh.data",
        "1",
        "--mesh.tensor",
        "1",
        "--pipeline.microbatches",
        "8",
        "--schedule",
        "--svg",
        str(path),
    ]
    with pytest.raises(SystemExit) as done:
        main(["plan", "demo", *flags])
    assert not done.value.code
    out = capsys.readouterr().out
    assert "makespan 33, bubble 37.5 %" in out
    assert "peak activations per stage 4 3 2 1" in out
    assert re.search(r"^stage 3 .*F0BW0 F1BW1", out, re.MULTILINE)
    assert "executed in lock step: 14 ticks" in out
    assert path.read_text().count('class="task"') == 4 * 8 * 2
    with pytest.raises(SystemExit) as done:
        main(["plan", "demo", *flags[:-1], str(tmp_path / "no folder" / "picture.svg")])
    assert done.value.code == 2
    assert "picture.svg is in no folder that exists" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["plan", "demo", *flags, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert (record["makespan"], record["svg"], len(record["orders"])) == (33, str(path), 4)
    with pytest.raises(SystemExit) as done:
        main(["plan", "demo", *flags, "--pipeline.keep", "inputs"])
    assert not done.value.code
    assert "the inputs of at most 7 tasks, and runs forward again" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["plan", "demo", "--schedule"])
    assert done.value.code == 2
    assert "--mesh.pipe 4" in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "count"), [("cuda", 1), ("rocm", 1), ("cpu", 0), ("tpu", 0)])
def test_a_ring_in_stages_is_refused_on_gpus(platform, count, monkeypatch):
    """There a permute might wait for stages without one, and hang."""
    plan = tiny.plan(tiny.replaced(layers=4), pipe=2, sequence=2)
    monkeypatch.setattr(type(plan.attention), "platform", platform)
    monkeypatch.setattr(type(plan.attention), "_kernel", "chunked")
    with use_plan(plan):
        problems = list(_setting_problems(2))
    assert [problem.fix for problem in problems] == ['context="all-to-all"'] * count
