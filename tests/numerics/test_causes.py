"""Each collective of a step has a cause, a rule, an annotation or a source line; the compiler's own choice has none."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import annotate
from spmd.analysis.annotated import find_annotated
from spmd.analysis.collective_audit import audit_collectives, expect_collectives
from spmd.examples import demo, mixtral_tiny
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.plan.scopes import annotate_scope
from spmd.run.build import make_setup
from spmd.run.planned_step import compile_step
from spmd.sharding.mesh import BATCH_AXES, MeshShape
from spmd.sharding.rules import Rules, replicate
from spmd.training.step import make_train_step
from tests import tiny
from tests.tiers import soak_but

HERE = "tests/numerics/test_causes.py"

GRADIENT = "rule 'mlp/(gate|up)_proj/kernel' → P(fsdp+sequence, tensor): gradient, ZeRO 3"
USED = "rule 'mlp/(gate|up)_proj/kernel' → P(fsdp+sequence, tensor): used whole, ZeRO 3"
PRODUCT = "rule 'mlp/down_proj/kernel' → P(tensor, fsdp+sequence): sum of products"
NORM = "rule '(attention_norm|mlp_norm|norm)/scale' → replicate('norm scales are a few KiB'): gradient, ZeRO 3"
EMBEDDING = "rule 'embed/embedding' → P(pipe, fsdp+sequence+tensor): used whole, ZeRO 3"
NEW = "rule 'mlp/down_proj/kernel' → P(tensor, fsdp+sequence): new value, ZeRO 1"
EXPERTS = "rule 'experts/down_proj/kernel' → P(expert, tensor+fsdp+sequence): used whole, ZeRO 3"

CASES = {  # a config, its mesh, its ZeRO stage → causes that it has, by kind of collective and axes
    (demo, MeshShape(data=2, fsdp=2, tensor=2), 3): [
        ("all-gather", "fsdp", USED),
        ("reduce-scatter", "fsdp", GRADIENT),
        ("all-reduce", "data", GRADIENT),
        ("reduce-scatter", "tensor", PRODUCT),
        ("all-reduce", "data+fsdp", NORM),
        ("all-gather", "tensor", "annotate 'mlp_input' at spmd/models/decoder/linear.py:"),
        (
            "reduce-scatter",
            "tensor",
            "vocabulary-parallel head (reduce_scatter) at spmd/layers/lm_head.py:",
        ),
        ("all-reduce", "tensor", "sum over tensor at spmd/models/decoder/norms.py:"),
        ("all-reduce", "data+fsdp", "sum over the batch at spmd/gradients/losses.py:"),
        ("all-reduce", "fsdp", "optimizer, ZeRO 3 at spmd/optim/config.py:"),
        ("all-reduce", "fsdp", "metrics at spmd/training/step.py:"),
    ],
    (demo, MeshShape(sequence=2, fsdp=2), 1): [
        ("all-gather", "fsdp+sequence", NEW),
        (
            "collective-permute",
            "sequence",
            "context-parallel attention (ppermute) at spmd/layers/ring_attention.py:",
        ),
        (
            "collective-permute",
            "sequence",
            "zigzag order of tokens (ppermute) at spmd/layers/zigzag.py:",
        ),
    ],
    (demo, MeshShape(pipe=2, fsdp=2), 3): [
        (
            "collective-permute",
            "pipe",
            "pipeline, from stage to stage (ppermute) at spmd/pipeline/executor.py:",
        ),
        ("all-gather", "pipe", EMBEDDING),
        ("all-reduce", "pipe", "pipeline, sums of all stages (psum) at spmd/pipeline/grad_fn.py:"),
    ],
    (mixtral_tiny, MeshShape(fsdp=2, expert=2, tensor=2), 3): [
        ("all-to-all", "expert", "experts, exchange of tokens (all_to_all) at spmd/layers/moe.py:"),
        ("all-gather", "fsdp", EXPERTS),
        ("all-reduce", "fsdp+expert", "sum over the batch at spmd/layers/router.py:"),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def whole_tracebacks():
    """Audits read whole stacks."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


def name_of(case) -> str:
    """The config and the axes of its mesh."""
    shipped, shape, zero = case
    axes = "-".join(axis for axis, size in shape.sizes.items() if size > 1)
    return f"{shipped.__name__.rpartition('.')[2]}-{axes}-zero{zero}"


THREE_AXES = MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=2, expert=2, tensor=2)
IN_CI = [case for case in CASES if case[1] in THREE_AXES]


@pytest.mark.parametrize("case", soak_but(CASES, *IN_CI), ids=name_of)
def test_every_collective_of_a_shipped_config_has_a_cause(case) -> None:
    """None is the compiler's choice, and each feature of the config is found by its name."""
    shipped, shape, zero = case
    config = dataclasses.replace(
        shipped.config,
        model=dataclasses.replace(
            shipped.config.model, layers=shape.pipe, d_model=64, heads=4, d_ff=128
        ),
        data=dataclasses.replace(shipped.config.data, sequence=64),
        mesh=shape,
        zero=zero,
    )
    sizes = {axis: size for axis, size in shape.sizes.items() if size > 1}
    audited = compile_step(make_setup(config, tiny.mesh(**sizes))).audit
    causes = {(r.kind, r.over, str(r.cause)) for r in audited.records}
    assert [r for r in audited.records if r.cause is None or r.cause.kind == "none"] == []
    missing = [
        (kind, over, text)
        for kind, over, text in CASES[case]
        if not any(found[:2] == (kind, over) and found[2].startswith(text) for found in causes)
    ]
    assert not missing, sorted(causes)
    assert "no rule" not in str(audited)


class Sorter(nnx.Module):
    """A layer whose hidden units are split over tensor, and then sorted, which needs all of them on each device."""

    def __init__(self, marks: tuple[str, ...], rngs: nnx.Rngs) -> None:
        self.up, self.marks = nnx.Linear(32, 64, use_bias=False, rngs=rngs), marks

    def mark(self, x: jax.Array, name: str) -> jax.Array:
        """The activation of that name, unless its annotation was removed."""
        return annotate(x, name) if name in self.marks else x

    def __call__(self, x: jax.Array) -> jax.Array:
        """Sorted hidden units, doubled before if they are annotated only then."""
        hidden = self.mark(self.up(x), "hidden")
        hidden = self.mark(hidden, "whole")
        hidden = self.mark(2 * hidden, "doubled")
        return jnp.sort(hidden, axis=-1)


@functools.cache
def compiled(*marks: str):
    """The step of the model with some of its annotations."""
    specs = {"hidden": P(BATCH_AXES, "tensor"), "whole": P(BATCH_AXES), "doubled": P(BATCH_AXES)}
    rules = Rules([("up/kernel", P("fsdp", "tensor"))], [(name, specs[name]) for name in marks])
    model = from_nnx(lambda rngs: Sorter(marks, rngs))
    plan = make_plan(tiny.mesh(fsdp=2, tensor=2), rules, model, optax.sgd(0.1))

    def loss_fn(params, variables, batch, key):
        y, variables = model.forward(params, variables, key, batch["x"], train=True)
        return {"loss": (y * jnp.arange(64.0)[None]).sum(), "weight": jnp.float32(8)}, variables

    step = make_train_step(plan, loss_fn)
    batch = {"x": jax.ShapeDtypeStruct((8, 32), jnp.float32)}
    return step, step.compile(batch), step.trace(batch).jaxpr


def audit(*marks: str, **options):
    """Audit with the plan, by default with the trace, too."""
    step, program, jaxpr = compiled(*marks)
    return audit_collectives(
        program, step.plan.mesh, **{"plan": step.plan, "jaxpr": jaxpr} | options
    )


def moves(audited):
    """Causes of what the forward pass gathers or exchanges over tensor."""
    moved = (
        r for r in audited.records if r.kind in ("all-gather", "all-to-all") and r.over == "tensor"
    )
    return {r.cause for r in moved if "transpose(" not in r.op_name}


def line_of(text: str) -> str:
    """The only line of this file with a text, as `file:line`."""
    (number,) = [
        i
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.strip() == text
    ]
    return f"{HERE}:{number}"


def test_control_a_removed_annotation_is_named_by_its_source_line() -> None:
    """With the annotation it is the cause; without it, the line that needs the activation whole has no rule."""
    (cause,) = moves(audit("hidden", "whole"))
    assert cause.kind == "annotate"
    assert cause.text.startswith("annotate 'whole' at tests/numerics/test_causes.py:")
    removed = audit("hidden")
    (cause,) = moves(removed)
    where = line_of("return jnp.sort(hidden, axis=-1)")
    assert (cause.kind, cause.text) == (
        "none",
        f"no rule: {where} (sort); name the activation with annotate",
    )
    assert f"no rule: {where}" in str(removed)
    assert "the compiler chose" in str(removed)


def test_an_operation_before_an_annotation_has_it_as_its_cause() -> None:
    """The partitioner gathers what is doubled and annotated right after; without the trace that is not known."""
    (cause,) = moves(audit("hidden", "doubled"))
    where = line_of('hidden = self.mark(2 * hidden, "doubled")')
    assert (cause.kind, cause.text) == (
        "annotate",
        f"annotate 'doubled' at {where} → P(data+fsdp+expert)",
    )
    (cause,) = moves(audit("hidden", "doubled", jaxpr=None))
    assert cause.kind == "none"


def test_without_a_plan_there_are_no_causes() -> None:
    """Records have none, and there is no table of them; with a plan, table and JSON have them, in 120 columns."""
    without, audited = audit("hidden", plan=None), audit("hidden")
    assert {r.cause for r in without.records} == {None}
    assert not any(line.endswith("runs  cause") for line in str(without).splitlines())
    assert max(map(len, str(audited).splitlines())) <= 120
    assert any(line.endswith("runs  cause") for line in str(audited).splitlines())
    records = json.loads(json.dumps(audited.to_json()))["collectives"]
    assert [r["cause"]["text"] for r in records] == [str(r.cause) for r in audited.records]


def test_a_train_step_is_audited_with_its_plan() -> None:
    """`expect_collectives` of a step names the causes in its message."""
    step, *_ = compiled("hidden")
    with pytest.raises(
        AssertionError, match=r"rule 'up/kernel' → P\(fsdp, tensor\): used whole, ZeRO 3"
    ):
        expect_collectives(step, all_gather=0, ignore_below=0)


def test_replication_has_its_reason() -> None:
    """A replicated parameter's gradient is reduced because of its rule, with the rule's reason."""
    rules = Rules([("scale", replicate("one vector"))])
    model = from_nnx(lambda rngs: Scale(rngs))
    plan = make_plan(tiny.mesh(fsdp=2), rules, model, optax.sgd(0.1))

    def loss_fn(params, variables, batch, key):
        y, variables = model.forward(params, variables, key, batch["x"], train=True)
        return {"loss": (y * y).sum(), "weight": jnp.float32(8)}, variables

    step = make_train_step(plan, loss_fn)
    program = step.compile({"x": jax.ShapeDtypeStruct((8, 32), jnp.float32)})
    audited = audit_collectives(program, plan.mesh, plan=plan)
    assert "rule 'scale' → replicate('one vector'): gradient, ZeRO 3" in {
        str(r.cause) for r in audited.records
    }


def test_a_layer_of_ones_own_says_why_it_sends() -> None:
    """A collective in a `comm` scope has that purpose as its cause; without the scope it has its line alone."""
    mesh = tiny.mesh(fsdp=2)

    def halo(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])

    def exchange(x: jax.Array) -> jax.Array:
        move = jax.shard_map(halo, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
        with jax.named_scope("comm(halo exchange)"):
            named = move(x)
        return named + move(x * 2)

    plan = make_plan(
        mesh, Rules([("scale", replicate("one vector"))]), from_nnx(Scale), optax.sgd(0.1)
    )
    program = jax.jit(exchange).lower(jax.ShapeDtypeStruct((8, 32), jnp.float32)).compile()
    audited = audit_collectives(program, mesh, plan=plan)
    where = line_of('return jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])')
    expected = {f"halo exchange (ppermute) at {where}", f"ppermute at {where}"}
    assert {str(r.cause) for r in audited.records if r.kind == "collective-permute"} == expected


class Scale(nnx.Module):
    """A vector that scales its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The product with each row."""
        return x * self.scale[None]


def test_a_kernel_before_an_annotation_is_no_elementwise_operation() -> None:
    """A kernel writes into references and has no results of its own; what is before it is not looked at."""

    def double(x: jax.Array) -> jax.Array:
        def kernel(x_ref, y_ref) -> None:
            y_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x)

    def marked(x: jax.Array) -> jax.Array:
        with jax.named_scope(annotate_scope("doubled")):
            return jax.lax.with_sharding_constraint(x, sharding)

    sharding = NamedSharding(tiny.mesh(fsdp=2), P("fsdp"))
    x = jnp.ones((8, 8))
    assert find_annotated(jax.make_jaxpr(lambda x: marked(double(x + 1)))(x)) == {}
    found = find_annotated(jax.make_jaxpr(lambda x: marked(x + 1))(x))
    assert [(operation, name) for (operation, _), name in found.items()] == [("add", "doubled")]
