"""Every layout of shipped models is decided, and an operation whose layout is not is listed with its line."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.analysis.explicit_axes import ExplicitCheck, check_explicit
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.annotate import annotate
from spmd.plan.context import current
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh
from tests import tiny
from tests.command_line import run, write_config

pytestmark = pytest.mark.compat

FSDP, SGD = P("fsdp"), optax.sgd(1e-2)
SHARDED = {"up": P(None, "tensor"), "down": P("tensor", None)}
TOKENS = {
    "tokens": jax.ShapeDtypeStruct((8, 16), jnp.int32),
    "targets": jax.ShapeDtypeStruct((8, 16), jnp.int32),
    "weights": jax.ShapeDtypeStruct((8, 16), jnp.float32),
}


def marked(x: jax.Array) -> jax.Array:
    return spmd.annotate(x, "marked")


def check(apply, *, spec=FSDP, table=SHARDED, optimizer=SGD, zero=3, **axes: int) -> ExplicitCheck:
    """The check of a model `apply(params, x)` of two kernels, `up` [16, 32] and `down` [32, 16]."""
    model = spmd.Model(lambda _: {"up": jnp.zeros((16, 32)), "down": jnp.zeros((32, 16))}, apply)
    rules = spmd.Rules(list(table.items()), activations=[("marked", spec)])
    plan = spmd.make_plan(abstract_mesh(MeshShape(**axes)), rules, model, optimizer, zero=zero)

    def loss_fn(params, variables, batch, key):
        loss = jnp.square(apply(params, batch["x"])).sum()
        return {"loss": loss, "weight": jnp.float32(8)}, variables

    return check_explicit(
        spmd.make_train_step(plan, loss_fn), {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    )


def is_refused(function) -> bool:
    """Whether JAX refuses to trace `function(x, up, down)` under Explicit axes."""
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [((8, 16), FSDP), ((16, 32), SHARDED["up"]), ((32, 16), SHARDED["down"])]
    shapes = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    ]
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(function, *shapes)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":
            raise
        return True
    return False


def line_of(mark: str) -> str:
    """The line of this file that ends with a mark, as `file:line`."""
    return line_with(f"# {mark}\n", "tests/unit/test_explicit_axes.py")


def line_with(code: str, file: str) -> str:
    """The only line of a file with this code, as `file:line`."""
    lines = (Path(__file__).parents[2] / file).read_text(encoding="utf-8").splitlines(keepends=True)
    (number,) = (n for n, line in enumerate(lines, 1) if code in line)
    return f"{file}:{number}"


@pytest.mark.upgrades
@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2, "tensor": 2}, {"data": 2, "sequence": 2, "tensor": 2}],
    ids=["fsdp-tensor", "sequence-tensor"],
)
def test_llama_is_decided(axes):
    """Each layout of a tiny Llama's step, whose layers are scanned."""
    model = tiny.model()
    plan = spmd.make_plan(abstract_mesh(MeshShape(**axes)), LLAMA, model, tiny.OPTIMIZER)
    found = check_explicit(spmd.make_train_step(plan, tiny.loss_fn()), TOKENS)
    assert str(found).endswith("operations on sharded arrays are decided")
    assert found.axes == axes  # and no axis of size 1
    assert found.operations > 300


def test_llama_without_a_mark_is_not_decided(monkeypatch):
    """The control: without the mark on the residual stream, both row-parallel products are listed, and their sums."""
    monkeypatch.setattr("spmd.models.decoder.linear.constrain_like", lambda x, name: x)
    for module in ("layer", "decoder"):
        monkeypatch.setattr(
            f"spmd.models.decoder.{module}.annotate",
            lambda x, name: x if name == "residual" else annotate(x, name),
        )
    monkeypatch.setattr("spmd.training.step.check_annotations", lambda plan, jaxpr: None)
    plan = spmd.make_plan(
        abstract_mesh(MeshShape(fsdp=2, tensor=2)), LLAMA, tiny.model(), tiny.OPTIMIZER
    )
    found = check_explicit(spmd.make_train_step(plan, tiny.loss_fn()), TOKENS).undecided
    listed = [
        (record.source, record.primitive, record.operands)
        for record in found
        if record.phase == "forward"
    ]
    product, total = (
        line_with("in _products(", "spmd/models/decoder/linear.py"),
        line_with("annotate(x + y, ", "spmd/models/decoder/layer.py"),
    )
    assert (
        product,
        "dot_general",
        "f32[8,16,32] P(fsdp, ., tensor), f32[32,32] P(tensor, .)",
    ) in listed
    assert (
        product,
        "dot_general",
        "f32[8,16,64] P(fsdp, ., tensor), f32[64,32] P(tensor, .)",
    ) in listed
    assert (total, "add", "f32[8,16,32] P(., ., fsdp), f32[8,16,32] P(fsdp, ., .)") in listed


@pytest.mark.upgrades
def test_mixtral_is_decided():
    """Each layout outside and inside of expert layers, over three axes."""
    model = spmd.from_nnx(PRESETS["test"].build)
    plan = spmd.make_plan(
        abstract_mesh(MeshShape(fsdp=2, expert=2, tensor=2)), MIXTRAL, model, tiny.OPTIMIZER
    )
    found = check_explicit(spmd.make_train_step(plan, spmd.next_token_loss(model)), TOKENS)
    assert found.ok, str(found)
    assert found.operations > 300


def test_a_missing_annotation_is_listed_with_its_line():
    """The control: a row-parallel product without its mark is the only operation listed, and with it there is none."""

    def apply(params, x):
        hidden = marked(x)[:, :, None].sum(axis=2) @ params["up"]
        return jax.nn.silu(hidden) @ params["down"]  # row-parallel

    (found,) = check(apply, fsdp=2, tensor=2).undecided
    assert (found.source, found.primitive, found.count) == (
        line_of("row-parallel"),
        "dot_general",
        1,
    )
    assert found.operands == "f32[8,32] P(fsdp, tensor), f32[32,16] P(tensor, .)"
    assert "Contracting dimensions are sharded" in found.reason
    assert found.phase == "forward"
    assert check(lambda params, x: marked(apply(params, x)), fsdp=2, tensor=2).ok


def test_all_operations_are_listed():
    """The check continues after the first one, with what XLA would propagate; equal ones of a line are counted."""

    def apply(params, x):
        x = marked(x)
        rows = [x * n @ params["up"] @ params["down"] for n in (1, 2, 3)]  # three
        return jnp.sort(rows[0] + rows[1] * rows[2], axis=0)  # sorted

    found = check(apply, fsdp=2, tensor=2).undecided
    forward = [
        (record.source, record.primitive, record.count)
        for record in found
        if record.phase == "forward"
    ]
    assert forward == [(line_of("three"), "dot_general", 3), (line_of("sorted"), "sort", 1)]


def test_operations_of_the_backward_pass_are_marked():
    """The gradient of an array without a mark is a sum over `tensor`; a mark on the array decides its gradient."""

    def apply(params, x, mark=lambda x: x):
        x = mark(marked(x) * params["down"].sum())
        return x @ params["up"]  # column-parallel

    (found,) = check(apply, fsdp=2, tensor=2).undecided
    assert (found.source, found.primitive) == (line_of("column-parallel"), "dot_general")
    assert found.phase == "backward"
    assert check(lambda params, x: apply(params, x, marked), fsdp=2, tensor=2).ok


def test_operations_of_the_optimizer_are_marked():
    """Under ZeRO stage 1, a moment whose axes differ from those of the gradient in one dimension; not under stage 3.

    optax is a library: the line is that of its call.
    """

    def apply(params, x):
        return marked(marked(x) @ params["up"] @ params["down"])

    table = {"up": P(None, ("fsdp", "tensor")), "down": P(("fsdp", "tensor"))}
    options = {
        "table": table,
        "optimizer": optax.adam(1e-2),
        "spec": P("data"),
        "data": 2,
        "fsdp": 2,
        "tensor": 2,
    }
    rest = [
        record
        for record in check(apply, zero=1, **options).undecided
        if record.phase == "rest of the step"
    ]
    assert {record.source for record in rest} == {
        line_with("params, **taken)", "spmd/optim/extra_args.py")
    }
    assert "add got incompatible shardings" in rest[0].reason
    assert not any(r.phase == "rest of the step" for r in check(apply, zero=3, **options).undecided)


def test_the_check_is_that_of_jax():
    """Without marks, an operation of the forward pass is listed where JAX refuses to trace under Explicit axes."""
    functions = {
        "column-parallel": lambda params, x: x @ params["up"],
        "row-parallel": lambda params, x: x @ params["up"] @ params["down"],
        "element-wise": lambda params, x: jnp.tanh(x) * params["up"].sum(),
        "conflict": lambda params, x: x + params["down"][:8] * params["up"].T[:8],
        "sorted": lambda params, x: jnp.sort(x, axis=0),
        "not-sorted": lambda params, x: jnp.sort(x, axis=1),
        "cumulated": lambda params, x: jnp.cumsum(x @ params["up"], axis=1),
        "rows": lambda params, x: params["down"][jnp.arange(8)],
        "flat": lambda params, x: (x @ params["up"]).reshape(-1),
        "split": lambda params, x: x.reshape(2, 4, 16),
        "uneven": lambda params, x: x[:3],
    }
    refused, listed = [], []
    for name, function in functions.items():
        if is_refused(
            lambda x, *kernels, function=function: function(
                dict(zip(SHARDED, kernels, strict=True)), x
            )
        ):
            refused.append(name)
        found = check(
            lambda params, x, function=function: function(params, x) * marked(x).sum(),
            fsdp=2,
            tensor=2,
        )
        listed += [name] if any(record.phase == "forward" for record in found.undecided) else []
    assert listed == refused
    assert 0 < len(refused) < len(functions)


def test_loops_and_branches_are_checked():
    """Operations of bodies are listed, and a value that a loop carries in one sharding and returns in another."""

    def apply(params, x):
        def body(carry, _):
            carry = carry @ params["up"] @ params["down"]  # body
            return jax.lax.cond(carry.sum() > 0, lambda: carry, lambda: -carry), None

        return jax.lax.scan(body, marked(x), None, length=3)[0]  # loop

    sources = {
        record.source
        for record in check(apply, fsdp=2, tensor=2).undecided
        if record.phase == "forward"
    }
    assert sources == {line_of("body")}
    found = check(
        lambda params, x: apply(params, marked(x)), spec=P("fsdp", "tensor"), fsdp=2, tensor=2
    ).undecided
    carried = [
        record for record in found if record.primitive == "scan" and record.phase == "forward"
    ]
    assert [record.source for record in carried] == [line_of("loop")]
    assert (
        "is carried P(fsdp, tensor) into an iteration and P(fsdp, .) out of it" in carried[0].reason
    )


def test_branches_agree():
    """A condition whose branches return different shardings is listed with both."""

    def apply(params, x):
        x = marked(x)
        return jax.lax.cond(x.sum() > 0, lambda: x, lambda: (x @ params["up"])[:, :16])  # condition

    found = [
        record for record in check(apply, fsdp=2, tensor=2).undecided if record.phase == "forward"
    ]
    assert [(record.source, record.primitive) for record in found] == [
        (line_of("condition"), "cond")
    ]
    assert "P(fsdp, .)" in found[0].reason
    assert "P(fsdp, tensor)" in found[0].reason


def test_later_constraints_decide():
    """A mark after element-wise operations decides, whatever their derivative keeps, and beside a sum of all elements;
    so does the new state. A mark after any other operation does not."""

    def update(gradients, _):
        wide = jnp.concatenate([gradients["down"], gradients["down"]], axis=1)
        return {"up": gradients["up"] @ wide, "down": gradients["down"]}

    def product(params, x):
        return marked(x) @ params["up"] @ params["down"]

    def listed(apply, optimizer=SGD):
        records = check(apply, optimizer=optimizer, fsdp=2, tensor=2).undecided
        return {record.phase for record in records}

    assert "forward" not in listed(lambda params, x: marked(jax.nn.silu(product(params, x))))
    assert "forward" not in listed(lambda params, x: marked(y := product(params, x)) + y.sum())
    assert "forward" in listed(lambda params, x: marked(jnp.sort(product(params, x), axis=1)))

    def decided(params, x):
        return marked(product(params, x))

    assert "rest of the step" not in listed(decided, optax.stateless(update))
    twice = optax.chain(
        optax.stateless(update), optax.stateless(lambda g, _: jax.tree.map(jnp.flip, g))
    )
    assert "rest of the step" in listed(decided, twice)


def test_dimensions_that_a_reshape_keeps_stay_sharded():
    """JAX has no rule for a reshape of several dimensions; one that keeps each sharded dimension is decided."""
    shapes = (8, 2, 2, 2, 2), (4, 2, 4, 2, 2)
    kept, split = (
        lambda params, x, to=to: marked(x).reshape(8, 4, 4).reshape(to) + params["up"].sum()
        for to in shapes
    )
    assert check(kept, fsdp=2, tensor=2).ok
    assert [record.primitive for record in check(split, fsdp=2, tensor=2).undecided] == ["reshape"]


def test_manual_regions_are_decided_by_their_author():
    """Nothing inside of a region that is manual over all axes is listed; of one axis, what involves the others is."""

    def apply(params, x, names):
        mesh = current().mesh

        def product(x, up, down):
            y = x @ up @ down  # manual
            return jax.lax.psum(y, "tensor") if "tensor" in names else y

        specs = (P("fsdp"), P(None, "tensor"), P("tensor"))
        if "tensor" not in names:
            specs = (P("fsdp"), P(), P())
        region = jax.shard_map(
            product,
            mesh=mesh,
            in_specs=specs,
            out_specs=P("fsdp"),
            axis_names=set(names),
            check_vma=False,
        )
        return marked(region(marked(x), params["up"], params["down"]))

    axes = {"fsdp": 2, "tensor": 2}
    assert check(lambda params, x: apply(params, x, AXES), **axes).ok
    found = check(lambda params, x: apply(params, x, ("fsdp",)), **axes).undecided
    assert line_of("manual") in {record.source for record in found if record.phase == "forward"}


def test_constants_take_any_layout():
    """Zeros that a sharded array is written into, or that a loop starts with, decide nothing and are not listed."""

    def apply(params, x):
        x = marked(x)
        total, _ = jax.lax.scan(
            lambda total, n: (total + x * n, None), jnp.zeros_like(x), jnp.arange(3.0)
        )
        wide = jax.lax.dynamic_update_slice(jnp.zeros((8, 32)), total, (0, 4))
        return jnp.where(wide > 0, wide, -jnp.inf).max(axis=1, keepdims=True) + params["down"].sum()

    assert check(apply, fsdp=2, tensor=2).ok


def test_one_device_has_nothing_to_decide():
    """Axes of size 1 are not named, and the result says that there are no others."""
    found = check(lambda params, x: x @ params["up"] @ params["down"] + marked(x))
    assert found.ok
    assert str(found) == "nothing to decide: every axis of the mesh has size 1"


def test_the_command_prints_records_and_exits_with_0_or_1(tmp_path, capsys, monkeypatch):
    """The records are those of the check, as lines and as JSON."""
    config = write_config(tmp_path)
    assert run("check", config, "--explicit") == 0
    assert capsys.readouterr().out.startswith("data=2 fsdp=2 tensor=2: all ")
    # a batch of 8 does not divide
    assert run("check", config, "--explicit", "--mesh.data", 512) == 2
    capsys.readouterr()

    found = check(lambda params, x: marked(x) @ params["up"] @ params["down"], fsdp=2, tensor=2)
    monkeypatch.setattr("spmd.commands.check.check_explicit", lambda step, batch: found)
    assert run("check", config, "--explicit", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["mesh"] == {"fsdp": 2, "tensor": 2}
    assert "annotate" in report["undecided"][0].pop("fix")
    assert report["undecided"] == [dataclasses.asdict(record) for record in found.undecided]
    assert run("check", config, "--explicit") == 1
    printed = capsys.readouterr().out
    assert str(found.undecided[0]) in printed
    assert f"{len(found.undecided)} of {found.operations} operations" in printed


@pytest.mark.parametrize("flags", [("--products", "1"), ("--leaves",), ("--inject", "reduction")])
def test_the_command_compares_or_checks(tmp_path, capsys, flags):
    """A flag of the comparison is refused, not ignored."""
    assert run("check", write_config(tmp_path), "--explicit", *flags) == 2
    assert flags[0].removeprefix("--") in capsys.readouterr().err
