"""Constraints that a model of Flax writes by logical names act under a plan, or are an error."""

import flax.linen as nn
import jax
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import AnnotationError, RuleError
from spmd.gradients.accumulate import accumulate
from spmd.jaxpr.equations import equations
from spmd.testing import token_batches
from tests import tiny

VOCAB, WIDTH = 32, 16
BATCH = token_batches((8, 8), VOCAB, steps=1)[0]
PARAMS = [
    (".*kernel", P(None, "tensor")),
    (".*embedding", P("fsdp")),
    (".*bias", spmd.replicate("small")),
]
LOGICAL = [("batch", ("data", "fsdp")), ("length", None), ("mlp", "tensor")]
SPEC = P(("data", "fsdp"), None, "tensor")


class LinenNet(nn.Module):
    """Names its hidden units in Linen's way."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Dense(2 * WIDTH)(nn.Embed(VOCAB, WIDTH)(tokens))
        return nn.Dense(VOCAB)(nn.with_logical_constraint(x, ("batch", "length", "mlp")))


class Net(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up, self.head = (
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs),
            nnx.Linear(2 * WIDTH, VOCAB, rngs=rngs),
        )

    def __call__(self, tokens):
        return self.head(
            nn.with_logical_constraint(self.up(self.embed(tokens)), ("batch", "length", "mlp"))
        )


MODELS = {
    "linen": spmd.from_linen(LinenNet(), jax.ShapeDtypeStruct((8, 8), "int32")),
    "nnx": spmd.from_nnx(Net),
}


def specs(name, logical, microbatches=1):
    """The specs of the constraints of a traced step."""
    model, mesh = MODELS[name], tiny.mesh(data=2, fsdp=2, tensor=2)
    plan = spmd.make_plan(mesh, spmd.Rules(PARAMS, logical=logical), model, optax.sgd(0.1))
    grad_fn = accumulate(spmd.value_and_grad(spmd.next_token_loss(model)), microbatches)
    jaxpr = spmd.make_train_step(plan, grad_fn=grad_fn).trace(BATCH).jaxpr
    return [
        e.params["sharding"].spec
        for e in equations(jaxpr)
        if e.primitive.name == "sharding_constraint"
    ]


@pytest.mark.compat
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logical_names_are_read_with_the_rows_of_the_table(name, microbatches):
    """The activation and its gradient are constrained as the rows say; with other rows, otherwise."""
    assert specs(name, LOGICAL, microbatches).count(SPEC) == 2
    if microbatches == 1:
        whole = [("batch", ("data", "fsdp")), ("length", None), ("mlp", None)]
        assert SPEC not in specs(name, whole)


@pytest.mark.compat
@pytest.mark.parametrize("name", MODELS)
def test_a_name_without_a_row_is_refused(name):
    """A constraint that Flax would skip is an error with its name and the row to add."""
    with pytest.raises(
        AnnotationError, match=r"'batch': has no row\n.*no logical rows\n.*Rules\(logical="
    ):
        specs(name, ())
    with pytest.raises(
        AnnotationError, match=r"'mlp': has no row\n.*the rows are for batch, length"
    ):
        specs(name, LOGICAL[:2])


def test_a_row_names_axes_of_the_mesh():
    """A row with an axis that the mesh does not have is an error of the plan."""
    with pytest.raises(RuleError, match=r"logical 'mlp': P.tensr. names the unknown axis 'tensr'"):
        specs("nnx", [*LOGICAL[:2], ("mlp", "tensr")])
