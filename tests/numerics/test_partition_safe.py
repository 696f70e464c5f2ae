"""Parameters and variables are gathered on the way into a loss, whoever wrote the model and however it uses them.

Each kind of model has the value and the gradients of one device on a mesh that splits examples and
kernels.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.gradients.base import value_and_grad
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import Model
from spmd.plan import partition_safe
from spmd.plan.context import current, use_plan
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.batch import place_batch
from spmd.training.step import make_eval_step
from tests import tiny

TOLERANCE = 1e-5
"""Largest difference of an array, relative to its largest number."""
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
WIDTH, VOCAB = 16, 32
BOTH = P("fsdp", "tensor")
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": X, "tokens": np.random.default_rng(1).integers(0, VOCAB, 16)}


@functools.cache
def make_inputs(model):
    """Parameters and variables of a model, and a key, on the host."""
    key = jax.random.key(0)
    made = jax.jit(lambda: (model.init(key), model.init_variables(key)))()
    return *jax.device_get(made), key


def on_mesh(model, rules, loss_fn, batch, options=(), **sizes):
    """Value and gradients of a loss under a plan."""
    plan = make_plan(tiny.mesh(**sizes), rules, model, optax.sgd(0.1), **dict(options))
    params, variables, key = make_inputs(model)
    grad_fn = value_and_grad(loss_fn)

    def run(params, variables, batch, key):
        with use_plan(plan):
            gradients, sums, _ = grad_fn(params, Carry(variables), batch, key)
        return sums["loss"], gradients

    shardings = jax.tree.map(lambda x: x.sharding, (plan.abstract_params, plan.abstract_variables))
    state = jax.device_put((params, variables), shardings)
    compiled = jax.jit(run, out_shardings=(None, plan.gradient_shardings))
    return jax.device_get(compiled(*state, place_batch(plan, batch), key))


def on_one_device(model, loss_fn, batch):
    """The same in plain JAX."""
    params, variables, key = make_inputs(model)
    return jax.device_get(
        jax.jit(jax.value_and_grad(lambda p: loss_fn(p, variables, batch, key)[0]["loss"]))(params)
    )


def errors(found, wanted):
    """Path → largest difference of an array from another, relative to the largest number of that, if it is not zero."""
    found, wanted = (
        {"loss": loss, **tree.flatten(gradients)} for loss, gradients in (found, wanted)
    )
    assert found.keys() == wanted.keys()
    return {
        path: float(np.abs(found[path] - x).max() / (np.abs(x).max() or 1))
        for path, x in wanted.items()
    }


# Models.


def kernels(key, names, shape=(WIDTH, WIDTH)):
    """Random kernels by name."""
    keys = jax.random.split(key, len(names))
    return {
        name: {"kernel": jax.random.normal(key, shape) / 4}
        for name, key in zip(names, keys, strict=True)
    }


def written(apply, names="abc", shape=(WIDTH, WIDTH)):
    """A hand-written model with a kernel for each name."""
    return Model(lambda key: kernels(key, names, shape), apply)


def three(p, x):
    x = jnp.tanh(x @ p["a"]["kernel"])
    return jnp.tanh(x @ p["b"]["kernel"]) @ p["c"]["kernel"]


class Net(nnx.Module):
    """Two linear layers."""

    def __init__(self, rngs):
        self.a = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


class Frozen(nnx.Variable):
    """A variable that nothing trains."""


class WithFrozen(Net):
    """Gradients go through a frozen decoder."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.c = Frozen(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 4)
        self.d = Frozen(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 4)

    def __call__(self, x):
        return jnp.tanh(super().__call__(x) @ self.c[...]) @ self.d[...]


class LinenNet(nn.Module):
    """Two linear layers in Linen."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(WIDTH, use_bias=False, name="a")(x))
        return nn.Dense(WIDTH, use_bias=False, name="b")(x)


class LinenFrozen(nn.Module):
    """Linear layers around kernels in a collection of their own."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.25)
        frozen = [
            self.variable(
                "frozen", name, lambda: normal(self.make_rng("params"), (WIDTH, WIDTH))
            ).value
            for name in ("c", "d")
        ]
        x = LinenNet(name="net")(x)
        return jnp.tanh(x @ frozen[0]) @ frozen[1]


def pair(one):
    """Two models whose parameters and variables are in one dictionary each."""
    names = ("encoder", "decoder")

    def both(make):
        return lambda key: {
            name: make(jax.random.fold_in(key, number)) for number, name in enumerate(names)
        }

    def forward(params, variables, key, x, train):
        after = dict(variables)
        for name in names:
            x, after[name] = one.forward(
                params[name], variables[name], key, jnp.tanh(x), train=train
            )
        return x, after

    return Model(both(one.init), None, both(one.init_variables), forward)


def scanned(p, x):
    """Layers are stacked along the first dimension of one kernel."""
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, p["a"]["kernel"])[0]


def ensemble(p, x):
    """Models that `jax.vmap` maps over the first dimension of a kernel."""
    return jax.vmap(lambda kernel: jnp.tanh(x @ kernel), out_axes=1)(p["a"]["kernel"])


def hypernetwork(p, x):
    """A kernel that parameters make."""
    kernel = jnp.tanh(p["a"]["kernel"] @ p["b"]["kernel"])
    return jnp.tanh(x @ kernel) @ p["c"]["kernel"]


def normed(p, x):
    """Kernels are standardized by columns before they are used."""
    for name in "abc":
        kernel = p[name]["kernel"]
        x = jnp.tanh(
            x @ ((kernel - kernel.mean(0, keepdims=True)) / (kernel.std(0, keepdims=True) + 0.1))
        )
    return x


def custom(p, x):
    """A matmul with a derivative of its own."""

    @jax.custom_vjp
    def matmul(x, kernel):
        return x @ kernel

    matmul.defvjp(lambda x, k: (x @ k, (x, k)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    return matmul(jnp.tanh(matmul(x, p["a"]["kernel"])), p["b"]["kernel"])


def tied(p, tokens):
    """An embedding that is the head, too."""
    table = p["a"]["kernel"]
    return jnp.tanh(table[tokens]) @ table.T


def branches(p, x):
    """Conditions with a kernel in each branch."""
    for condition in (x.sum() > 0, x.sum() <= 0):
        x = jax.lax.cond(
            condition, lambda x: x @ p["a"]["kernel"], lambda x: jnp.tanh(x @ p["b"]["kernel"]), x
        )
    return x


def mixed(p, x):
    """Kernels that meet examples element by element, as positions do."""
    return jnp.tanh(x * p["a"]["kernel"] + p["b"]["kernel"]) @ p["c"]["kernel"]


# Losses.


def plain(model, params, variables, batch, key, name="x"):
    outputs, after = model.forward(params, variables, key, batch[name], train=True)
    return (outputs**2).mean(), after


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def with_trace(model, params, variables, batch, key):
    """Hutchinson's estimate of the trace of the Hessian is a penalty."""
    signs = jax.tree.map(
        lambda w: jax.random.rademacher(jax.random.key(1), w.shape, jnp.float32), params
    )

    def value(params):
        return plain(model, params, variables, batch, key)

    along = jax.grad(lambda params: dot(jax.grad(value, has_aux=True)(params)[0], signs))(params)
    loss, after = value(params)
    return loss + 0.1 * dot(along, signs), after


def with_norm(model, params, variables, batch, key):
    """The squared norm of the gradient is a penalty."""
    (loss, after), gradients = jax.value_and_grad(
        lambda p: plain(model, p, variables, batch, key), has_aux=True
    )(params)
    return loss + dot(gradients, gradients), after


def with_slopes(model, params, variables, batch, key):
    """The derivatives by inputs are a penalty, as of a physics-informed network."""

    def outputs(x):
        return plain(model, params, variables, {"x": x}, key)[0]

    loss, after = plain(model, params, variables, batch, key)
    return loss + 100 * (jax.grad(outputs)(batch["x"]) ** 2).sum(), after


def with_decay(model, params, variables, batch, key):
    """The size of the parameters is a penalty."""
    loss, after = plain(model, params, variables, batch, key)
    return loss + 0.1 * dot(params, params), after


LINEN = from_linen(LinenNet(), jax.ShapeDtypeStruct(X.shape, "float32"))
LINEN_FROZEN = from_linen(LinenFrozen(), jax.ShapeDtypeStruct(X.shape, "float32"))
NNX, NNX_FROZEN = from_nnx(Net), from_nnx(WithFrozen)
STACK = P(None, *BOTH)
KINDS = {
    "written": (written(three), plain, BOTH),
    "nnx-pair": (pair(NNX), plain, BOTH),
    "linen-pair": (pair(LINEN), plain, BOTH),
    "nnx-frozen": (NNX_FROZEN, plain, BOTH),
    "linen-collection": (LINEN_FROZEN, plain, BOTH),
    "linen-pair-collection": (pair(LINEN_FROZEN), plain, BOTH),
    "written-trace": (written(three), with_trace, BOTH),
    "nnx-trace": (NNX, with_trace, BOTH),
    "frozen-trace": (NNX_FROZEN, with_trace, BOTH),
    "written-norm": (written(three), with_norm, BOTH),
    "nnx-slopes": (NNX, with_slopes, BOTH),
    "decay": (written(three), with_decay, BOTH),
    "scan": (written(scanned, "a", (2, WIDTH, WIDTH)), plain, STACK),
    "vmap": (written(ensemble, "a", (2, WIDTH, WIDTH)), plain, STACK),
    "checkpoint": (written(jax.checkpoint(three)), plain, BOTH),
    "custom": (written(custom, "ab"), plain, BOTH),
    "hypernetwork": (written(hypernetwork), plain, BOTH),
    "normed": (written(normed), plain, BOTH),
    "tied": (written(tied, "a", (VOCAB, WIDTH)), functools.partial(plain, name="tokens"), BOTH),
    "branches": (written(branches, "ab"), plain, BOTH),
    "mixed": (written(mixed), plain, BOTH),
}
"""Kind → a model, a loss, and the spec of each kernel."""
GATHERED = ("written", "linen-pair", "nnx-frozen", "linen-collection", "nnx-trace")
"""Kinds that are wrong by more than a tenth where nothing is gathered."""
LAYOUTS = {
    "rows": (BOTH, SIZES),
    "columns": (P("tensor", "fsdp"), SIZES),
    "one-dimension": (P(("fsdp", "tensor")), SIZES),
    "other-order": (P(None, ("tensor", "fsdp")), SIZES),
    "fsdp-alone": (P("fsdp"), SIZES),
    "over-data": (P("data", "fsdp"), SIZES),
    "wide": (BOTH, {"fsdp": 4, "tensor": 2}),
    "narrow": (BOTH, {"fsdp": 2, "tensor": 4}),
    "sequence": (P(("fsdp", "sequence"), "tensor"), {"fsdp": 2, "sequence": 2, "tensor": 2}),
    "expert": (P("expert", "tensor"), {"data": 2, "expert": 2, "tensor": 2}),
}
"""Name → the spec of the kernels of the written model, and the axes of the mesh."""


def rules_of(spec):
    return Rules([("kernel|c|d", spec)], stacked={})


def loss_of(kind):
    """The loss function of a kind."""
    model, loss, _ = KINDS[kind]

    def loss_fn(params, variables, batch, key):
        value, after = loss(model, params, variables, batch, key)
        return {"loss": value, "weight": jnp.float32(1)}, after

    return loss_fn


@functools.cache
def wanted(kind):
    return on_one_device(KINDS[kind][0], loss_of(kind), BATCH)


def errors_of(kind, spec=None, sizes=SIZES, options=()):
    """The differences of a kind from one device."""
    model, _, own = KINDS[kind]
    return errors(
        on_mesh(model, rules_of(spec or own), loss_of(kind), BATCH, options, **sizes), wanted(kind)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_has_the_gradients_of_one_device(kind):
    """Value and gradients agree to 1e-5, with each kernel split over fsdp and tensor."""
    found = errors_of(kind)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("kind", GATHERED)
def test_control_without_the_gather(kind, monkeypatch):
    """Where the inputs of a loss stay as they are stored, gradients are wrong by more than a tenth."""
    monkeypatch.setattr(partition_safe, "gathered", lambda x, *_, **options: x)
    assert max(errors_of(kind).values()) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_has_the_gradients_of_one_device(layout):
    """Value and gradients agree to 1e-5, whichever axes split which dimension."""
    found = errors_of("written", *LAYOUTS[layout])
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_any_zero_stage_has_the_gradients_of_one_device(zero):
    """Value and gradients agree to 1e-5, whatever keeps the axis fsdp; the third stage is that of the other tests."""
    found = errors_of("written-trace", options=(("zero", zero),))
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("kind", ["written", "linen-pair-collection", "nnx-frozen"])
def test_evaluation_has_the_loss_of_one_device(kind):
    """The loss of an evaluation agrees to 1e-5, as that of a step does."""
    model, _, spec = KINDS[kind]
    plan = make_plan(tiny.mesh(**SIZES), rules_of(spec), model, optax.sgd(0.1))
    params, variables, _ = make_inputs(model)
    shardings = jax.tree.map(lambda x: x.sharding, (plan.abstract_params, plan.abstract_variables))
    state = jax.device_put((params, variables), shardings)

    loss = float(make_eval_step(plan, loss_of(kind))(*state, place_batch(plan, BATCH))["loss"])
    assert abs(loss / float(wanted(kind)[0]) - 1) <= TOLERANCE


# What is gathered, and what is not.


def gathered_by(monkeypatch, use, spec=BOTH, shape=(WIDTH, WIDTH), sizes=SIZES):
    """Return how many parameters are gathered before a function of a kernel and a batch."""
    seen = []

    def record(x, *_, **options):
        seen.append(x.shape)
        return x

    monkeypatch.setattr(partition_safe, "gathered", record)
    model = written(None, "a", shape)
    plan = make_plan(tiny.mesh(**sizes), rules_of(spec), model, optax.sgd(0.1))

    def evaluate(params, batch):
        with use_plan(plan):
            return partition_safe.partition_safe(lambda p, v, b: use(p["a"]["kernel"], b))(
                params, {}, batch
            )

    jax.eval_shape(evaluate, plan.abstract_params, BATCH)
    return len(seen)


def placed(x, *entries):
    """Constrain an array on the mesh of the plan in scope."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(current().mesh, P(*entries)))


ROWS = ("data", "fsdp")
USES = {
    "matmul": (lambda w, b: b["x"] @ w, 1),
    "a view and a matmul": (
        lambda w, b: b["x"] @ w.T.reshape(WIDTH, WIDTH)[:, :8].astype(jnp.float32),
        1,
    ),
    "a matmul of parameters": (lambda w, b: w @ w, 1),
    "decay": (lambda w, b: (w**2).sum() + jnp.abs(w).max(), 0),
    "decay times a mean of the batch": (lambda w, b: (w**2).sum() * b["x"].mean(), 0),
    "element by element": (lambda w, b: w * b["x"], 1),
    "a loop": (lambda w, b: jax.lax.scan(lambda x, _: (x @ w, None), b["x"], length=2)[0], 1),
    "a carry": (lambda w, b: jax.lax.scan(lambda c, _: (c[::-1], b["x"] @ c), w, length=2)[1], 1),
    "a checkpoint": (jax.checkpoint(lambda w, b: b["x"] @ w), 1),
    "a constraint that gathers": (lambda w, b: b["x"] @ placed(w, None, "tensor"), 0),
    "a constraint that does not": (lambda w, b: b["x"] @ placed(w, "fsdp", None), 1),
    "nothing": (lambda w, b: b["x"].sum(), 0),
}
"""Use of a kernel → the number of gathers before it."""


@pytest.mark.parametrize("use", USES)
def test_what_is_gathered(use, monkeypatch):
    """A kernel with a use that is not proven right is gathered once; others stay as they are stored."""
    function, count = USES[use]
    assert gathered_by(monkeypatch, function) == count


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (P(None, "tensor"), 0),
        (P(None, ("fsdp", "tensor")), 1),
        (P("tensor"), 1),
        (P("fsdp", "tensor"), 1),
    ],
    ids=["columns over tensor", "columns over fsdp", "rows over tensor", "rows over fsdp"],
)
def test_which_lookups_are_gathered(spec, count, monkeypatch):
    """A lookup needs no gather where columns alone are split, over no axis of the indices."""
    lookup = lambda w, b: w[placed(b["tokens"], ROWS)]  # noqa: E731
    assert gathered_by(monkeypatch, lookup, spec, (VOCAB, WIDTH)) == count


def test_outside_of_a_plan_nothing_changes():
    """A function is the same outside of a plan, and on one device under one."""
    model = written(three)
    params, _, _ = make_inputs(model)
    safe = partition_safe.partition_safe(lambda p, v, x: model.apply(p, x))
    direct = str(jax.make_jaxpr(model.apply)(params, X))
    assert str(jax.make_jaxpr(safe)(params, {}, X)) == direct
    with use_plan(make_plan(tiny.mesh(data=1), rules_of(BOTH), model, optax.sgd(0.1))):
        assert str(jax.make_jaxpr(safe)(params, {}, X)) == direct


def test_a_kernel_that_is_replicated_is_not_gathered(monkeypatch):
    """A parameter that no axis splits needs no gather before an element-wise use."""
    assert (
        gathered_by(monkeypatch, lambda w, b: w * b["x"], replicate("small"), sizes={"data": 8})
        == 0
    )
