"""A loop of one's own with a table takes the steps of one device, sends what our own step sends, and is saved alone."""

import difflib
import math
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.analysis.collective_audit import audit_collectives
from spmd.errors import CheckpointError, RuleError
from spmd.sharding.mesh import entry_axes
from tests.loops import llama_script, llama_with_spmd

RULES = spmd.Rules(
    [
        ("up/kernel", P(None, "mp")),
        ("up/bias", P("mp")),
        ("down/kernel", P("mp", None)),
        ("down/bias", spmd.replicate("tiny")),
    ],
    activations=[("hidden", P("dp", "mp"))],
)
GATHERED = spmd.Rules(
    [("up/kernel", P(None, "mp")), ("down/kernel|(up|down)/bias", spmd.replicate("tiny"))],
    activations=[("hidden", P("dp"))],
)
"""Along Explicit axes JAX refuses a product of two split dimensions, unless its call says more."""
STEPS = 4


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, name="up")(x))
        return nn.Dense(1, name="down")(spmd.annotate(x, "hidden"))


MODEL, OPTIMIZER = MLP(), optax.adafactor(1e-2, min_dim_size_to_factor=8)


def init(key):
    params = MODEL.init(key, jnp.ones((1, 8)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def step(state, x, y):
    def loss(params):
        return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def batch():
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def losses(step, state, x, y):
    found = []
    for _ in range(STEPS):
        state, value = step(state, x, y)
        found.append(float(value))
    return state, found


def make_mesh(kind):
    return jax.make_mesh((2, 4), ("dp", "mp"), axis_types=(kind,) * 2)


@pytest.mark.parametrize(("kind", "rules"), [(AxisType.Auto, RULES), (AxisType.Explicit, GATHERED)])
def test_a_flax_loop_equals_one_device(kind, rules):
    """Losses to 1e-6, on axes of both kinds, with state that is split as its parameters are."""
    state = jax.jit(init)(jax.random.key(0))
    _, expected = losses(jax.jit(step), state, *batch())
    mesh = make_mesh(kind)
    shardings = rules.shardings(mesh, jax.eval_shape(init, jax.random.key(0)))
    state = jax.device_put(state, shardings)
    x, y = (jax.device_put(array, NamedSharding(mesh, P("dp"))) for array in batch())
    with jax.set_mesh(mesh), spmd.use_rules(rules, mesh):
        state, found = losses(jax.jit(step), state, x, y)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert state.params["up"]["kernel"].sharding.spec == P(None, "mp")


@pytest.mark.parametrize(
    ("kind", "operation"),
    [(AxisType.Auto, "sharding_constraint"), (AxisType.Explicit, "reshard")],
)
def test_an_annotation_acts_in_the_scope_of_a_table(kind, operation):
    """As a constraint, or along Explicit axes a reshard; the control, without the scope, has neither."""
    mesh = make_mesh(kind)
    x = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(mesh, P()))

    def annotated(x):
        return spmd.annotate(x, "hidden")

    with jax.set_mesh(mesh):
        assert operation not in str(jax.make_jaxpr(annotated)(x))
        with spmd.use_rules(RULES, mesh):
            assert operation in str(jax.make_jaxpr(annotated)(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 64, rngs=rngs)
        self.down = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(spmd.annotate(nnx.relu(self.up(x)), "hidden"))


@nnx.jit
def nnx_step(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return value


def nnx_modules(mesh=None):
    """A module and its optimizer, sharded if there is a mesh."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if mesh is not None:
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.device_put(state, RULES.shardings(mesh, state)))
    return model, optimizer


def nnx_losses(mesh=None):
    """Losses of a loop of NNX."""
    model, optimizer = nnx_modules(mesh)
    found = [float(nnx_step(model, optimizer, *batch())) for _ in range(STEPS)]
    return found, model.up.kernel.get_value().sharding


def test_an_nnx_loop_equals_one_device():
    """With the states of the module and of its optimizer on the mesh."""
    expected, _ = nnx_losses()
    mesh = make_mesh(AxisType.Auto)
    with spmd.use_rules(RULES, mesh):
        found, sharding = nnx_losses(mesh)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sharding.spec == P(None, "mp")


def test_a_scope_on_another_mesh_is_refused():
    """Before anything is traced, with the axis."""
    mesh = jax.make_mesh((8,), ("dp",))
    with pytest.raises(RuleError, match="'mp'"), spmd.use_rules(RULES, mesh):
        pass
    with (
        pytest.raises(RuleError, match=r"mesh: is .*\n +fix: a mesh of JAX"),
        spmd.use_rules(RULES, 8),
    ):
        pass


SIX_AXES = {"dp": "data", "fsdp": "fsdp", "mp": "tensor"}
LEAST = 64
"""Bytes of the smallest array that is compared: our step also sums the norm of the gradients."""


def renamed(spec):
    """A spec with the axes of a plan's mesh."""
    entries = []
    for entry in spec:
        axes = tuple(SIX_AXES[axis] for axis in entry_axes(entry))
        entries.append(axes or None)
    return P(*entries)


def in_six_axes(rules):
    """A table with the axes of a plan's mesh."""
    params = []
    for pattern, value in rules.params:
        params.append((pattern, renamed(value) if isinstance(value, P) else value))
    activations = [(name, renamed(spec)) for name, spec in rules.activations]
    return spmd.Rules(params, activations)


def sent(audit, without=None):
    """Kind and axes → bytes, without those of a layer."""
    found = Counter()
    for record in audit.records:
        names = record.op_name
        if record.kind == "all-gather":
            names += record.array
        if record.payload < LEAST or (without and without in names):
            continue
        axes = [SIX_AXES.get(axis, axis) for axis in record.over.split("+")]
        found[record.kind, "+".join(axes)] += record.bytes
    return found


def audit_of_our_step(rules, model, optimizer, losses_of, example, zero, **sizes):
    """The collectives of the step of `make_train_step` for the same model, table and optimizer."""
    plan = spmd.make_plan(spmd.make_mesh(**sizes), in_six_axes(rules), model, optimizer, zero=zero)

    def loss(params, variables, batch, key):
        inputs, targets = batch["inputs"], batch["targets"]
        outputs, variables = model.forward(params, variables, key, inputs, train=True)
        losses = losses_of(outputs, targets)
        return {"loss": losses.sum(), "weight": jnp.float32(losses.size)}, variables

    compiled = spmd.make_train_step(plan, loss).compile(example)
    return audit_collectives(compiled, plan.mesh)


def test_loops_of_flax_send_what_our_own_step_sends():
    """Kinds, axes and bytes are equal; the control, with another table, differs."""
    mesh = make_mesh(AxisType.Auto)
    inputs, targets = batch()

    def audit_of_loop(rules):
        shardings = rules.shardings(mesh, jax.eval_shape(init, jax.random.key(0)))
        state = jax.jit(init, out_shardings=shardings).eval_shape(jax.random.key(0))
        split = NamedSharding(mesh, P("dp"))
        x, y = (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split) for a in batch())
        with jax.set_mesh(mesh), spmd.use_rules(rules, mesh):
            train = jax.jit(step, out_shardings=(shardings, None))
            return spmd.audit_function(train, state, x, y).collectives

    def ours(model, optimizer):
        example = {"inputs": inputs, "targets": targets}
        squares = lambda outputs, targets: (outputs - targets) ** 2  # noqa: E731
        sizes = {"data": 2, "tensor": 4}
        return sent(audit_of_our_step(RULES, model, optimizer, squares, example, 0, **sizes))

    linen = spmd.from_linen(MODEL, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype))
    expected = ours(linen, OPTIMIZER)
    assert {kind for kind, _ in expected} == {"all-reduce"}
    assert sent(audit_of_loop(RULES)) == expected
    assert sent(audit_of_loop(GATHERED)) != expected
    with spmd.use_rules(RULES, mesh):
        found = spmd.audit_function(nnx_step, *nnx_modules(mesh), inputs, targets).collectives
    assert sent(found) == ours(spmd.from_nnx(Net), optax.adam(1e-2))


def test_a_script_with_a_search_table_changes_in_few_lines(monkeypatch):
    """At most 15, and the losses are the script's; the control, with other batches, has others."""
    plain, ours = (
        Path(module.__file__).read_text(encoding="utf-8").splitlines()
        for module in (llama_script, llama_with_spmd)
    )
    changed = 0
    for kind, start, end, own_start, own_end in difflib.SequenceMatcher(
        None, plain, ours, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            changed += max(end - start, own_end - own_start)
    assert 0 < changed <= 15, changed
    expected, _ = llama_script.main()
    found, _ = llama_with_spmd.main()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    batches = list(llama_with_spmd.make_batches())
    monkeypatch.setattr(llama_with_spmd, "make_batches", lambda: batches[::-1])
    wrong, _ = llama_with_spmd.main()
    assert np.abs(np.subtract(wrong, expected)).max() > 1e-3


@pytest.mark.parametrize(
    ("dims", "zero", "times"),
    [
        ((2, 2, 2), 3, 2),
        ((2, 4, 1), 3, 1),
        ((2, 1, 4), 0, 0),
    ],
)
def test_a_script_with_a_search_table_sends_what_our_own_step_sends(dims, zero, times):
    """Gradients and activations are equal.

    Our step gathers a kernel once, and the looked up rows of an embedding before the lookup. XLA
    gathers a kernel for the forward and the backward pass where a third axis splits it, and moves the
    rows that it has found.
    """
    script, axes = llama_with_spmd, ("dp", "fsdp", "mp")
    mesh = jax.make_mesh(dims, axes, axis_types=(AxisType.Auto,) * 3)
    shapes = jax.eval_shape(script.create_train_state, jax.random.key(0))
    rules = spmd.rules_from_search(
        script.RULES, shapes.params, mesh=mesh, activations=script.ACTIVATIONS
    )
    shardings = rules.shardings(mesh, shapes)
    example = next(script.make_batches())
    with jax.set_mesh(mesh), spmd.use_rules(rules, mesh):
        train = jax.jit(
            script.train_step, in_shardings=(shardings, None), out_shardings=(shardings, None)
        )
        own = spmd.audit_function(train, shapes, example).collectives
    sizes = {SIX_AXES[axis]: size for axis, size in zip(axes, dims, strict=True)}
    tokens = jax.ShapeDtypeStruct(example["tokens"].shape, "int32")
    ours = audit_of_our_step(
        rules,
        spmd.from_linen(script.MODEL, tokens),
        script.OPTIMIZER,
        optax.softmax_cross_entropy_with_integer_labels,
        {"inputs": example["tokens"], "targets": example["targets"]},
        zero,
        **sizes,
    )
    found, expected = sent(own, without="tokens"), sent(ours, without="tokens")
    gathered = ("all-gather", "fsdp")
    assert found.pop(gathered, 0) == times * expected.pop(gathered, 0)
    assert found == expected
    assert ("all-reduce", "data") in found
    if zero == 0:
        assert sent(own) == sent(ours)


class LoopState(TrainState):
    """The state of a loop, with a field of its own."""

    key: jax.Array


def init_with_key(key):
    state = init(key)
    return LoopState(**vars(state), key=jax.random.fold_in(key, 1))


def test_the_state_of_a_loop_is_restored_on_other_meshes(tmp_path):
    """Bitwise, in the shardings asked for; damage and another structure are errors that list all of it."""

    def abstract(init, *dims):
        mesh = jax.make_mesh(dims, ("dp", "fsdp", "mp"), devices=jax.devices()[: math.prod(dims)])
        shapes = jax.eval_shape(init, jax.random.key(0))
        rules = spmd.Rules(
            [
                ("up/kernel", P("fsdp", "mp")),
                ("up/bias", P("mp")),
                ("down/kernel", P(("mp", "fsdp"))),
                ("down/bias", spmd.replicate("tiny")),
            ]
        )
        shardings = rules.shardings(mesh, shapes)
        return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)

    def values(state):
        leaves = tree.flatten(state)
        leaves["key"] = jax.random.key_data(leaves["key"])
        return jax.device_get(leaves)

    target = abstract(init_with_key, 2, 2, 2)
    shardings = jax.tree.map(lambda x: x.sharding, target)
    state = jax.device_put(init_with_key(jax.random.key(0)), shardings)
    state = state.replace(step=jax.device_put(np.int32(3), shardings.step))
    with spmd.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        for dims in ((4, 1, 2), (1, 1, 1)):
            target = abstract(init_with_key, *dims)
            restored, _ = checkpoints.restore(None, target)
            jax.tree.map(np.testing.assert_array_equal, values(restored), values(state))
            assert (
                restored.params["up"]["kernel"].sharding == target.params["up"]["kernel"].sharding
            )
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(3, {"params": abstract(init, 4, 1, 2).params, "extra": target.step})
        found = {problem.where for problem in error.value.problems}
        assert found == ({"extra"} | set(values(state))) - set(
            tree.flatten({"params": state.params})
        )
        damaged = max((tmp_path / "3").rglob("*"), key=lambda path: path.stat().st_size)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        with pytest.raises(CheckpointError, match=damaged.name):
            checkpoints.restore(3, target)
