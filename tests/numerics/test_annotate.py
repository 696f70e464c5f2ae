"""One mark is a constraint and a name; nothing about it is silent."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import AnnotationError
from spmd.model_interface.model import Model
from spmd.plan.annotate import annotate, cast_to_compute, remat_layer
from spmd.plan.context import use_plan
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import make_mesh
from spmd.sharding.rules import Rules
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

pytestmark = pytest.mark.compat

RULES = Rules(
    [("w", P("fsdp"))], activations=[("hidden", P(("data", "fsdp"), "sequence", "tensor"))]
)

EIGHT = Model(lambda key: {"w": jnp.zeros(8)}, lambda params, x: params["w"] * x)


def plan(**sizes):
    return make_plan(make_mesh(**sizes), RULES, EIGHT, optax.sgd(1.0))


def test_outside_a_plan_it_is_the_identity():
    """A model with marks runs by itself, whatever the names."""
    x = jnp.ones((3, 5))
    assert annotate(x, "no such name") is x
    assert cast_to_compute(x) is x
    layer = remat_layer(jnp.abs, scanned=True)
    assert str(jax.make_jaxpr(layer)(x)) == str(jax.make_jaxpr(jnp.abs)(x))


def test_inside_a_plan_it_constrains_and_names():
    """The traced program holds the sharding and the name."""
    with use_plan(plan(data=2, fsdp=2, tensor=2)):
        text = str(jax.make_jaxpr(lambda x: annotate(x, "hidden"))(jnp.ones((8, 4, 4))))
    assert "sharding_constraint" in text
    assert "name=hidden" in text


def test_an_unknown_name_is_an_error_with_a_suggestion():
    """A typo in the model is found at the first trace."""
    with use_plan(plan(fsdp=8)), pytest.raises(AnnotationError, match='did you mean "hidden"'):
        annotate(jnp.ones((8, 4, 4)), "hiden")


def test_an_indivisible_activation_is_an_error():
    """`with_sharding_constraint` alone would drop the spec."""
    with (
        use_plan(plan(data=2, fsdp=2, tensor=2)),
        pytest.raises(AnnotationError, match=r"6 / \(tensor=2\)|7 / "),
    ):
        annotate(jnp.ones((8, 4, 7)), "hidden")


def test_inside_shard_map_the_manual_axes_are_left_out():
    """A region that is manual over `data` splits what it holds over the other axes only."""
    mesh = make_mesh(data=2, fsdp=2, tensor=2)

    def local(x):
        return annotate(x * 2, "hidden")

    with use_plan(plan(data=2, fsdp=2, tensor=2)):
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        out = jax.jit(mapped)(jnp.ones((8, 4, 4)))
    assert (out == 2).all()


def test_two_plans_do_not_share_a_traced_function():
    """An inner jitted function traced under one plan is traced again under another."""
    traces = []

    @jax.jit
    def inner(x):
        traces.append(1)
        return annotate(x, "hidden")

    x = jnp.ones((8, 4, 4))
    for p in (plan(fsdp=8), plan(data=8), plan(fsdp=8)):
        with use_plan(p):
            inner(x)
    assert len(traces) == 2


def test_compute_dtype_is_the_plans():
    """bf16 plans compute in bfloat16."""
    with use_plan(tiny.plan(options=(("precision", "bf16"),))):
        assert cast_to_compute(jnp.ones(2)).dtype == jnp.bfloat16


def test_an_activation_that_is_marked_nowhere_is_an_error():
    """A name in the table that the model lost would otherwise split nothing without a word."""
    mesh = make_mesh(fsdp=8)
    activations = [("hidden", P("fsdp")), ("lost", P("fsdp"))]
    plan = make_plan(mesh, Rules([("w", P("fsdp"))], activations), EIGHT, optax.sgd(1.0))

    def loss_fn(params, variables, batch, key):
        layer = jax.checkpoint(lambda x: annotate(x * params["w"], "hidden"))
        loss, _ = jax.lax.scan(lambda c, x: (c + layer(x).sum(), None), 0.0, batch)
        return {"loss": loss, "weight": 1.0}, variables

    with pytest.raises(AnnotationError, match="'lost': is marked nowhere"):
        make_train_step(plan, loss_fn).lower(jnp.ones((8, 8)))


def test_batches_of_any_rank_are_split_along_their_first_dimensions():
    """Labels `[batch]` and images `[batch, height, width, channels]` go with tokens `[batch, sequence]`."""
    plan = make_plan(make_mesh(fsdp=8), Rules([("w", P("fsdp"))]), EIGHT, optax.sgd(1.0))

    def loss_fn(params, variables, batch, key):
        error = batch["images"].mean(axis=(1, 2, 3)) * params["w"].sum() - batch["labels"]
        return {"loss": (error**2).sum(), "weight": jnp.float32(8)}, variables

    batch = {"images": jnp.ones((8, 4, 4, 3)), "labels": jnp.ones(8)}
    placed = place_batch(plan, batch)
    _, metrics = make_train_step(plan, loss_fn)(init_state(plan), placed)
    assert metrics["loss"] == 1.0
