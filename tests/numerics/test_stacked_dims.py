"""Layers stacked along dimension 1, as T5X and MaxText scan them, are sharded and trained as separate layers are."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import partitioning
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.errors import ConfigError, RuleError
from spmd.lora.adapters import with_lora
from spmd.lora.config import LoRAConfig
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import token_batches
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

pytestmark = pytest.mark.compat

VOCAB, WIDTH, LAYERS = 32, 16, 4
LOGICAL = [("vocab", "tensor"), ("embed", "fsdp"), ("mlp", "tensor"), ("layers", None)]
INIT = nn.initializers.lecun_normal()


def param(module, kind, name, shape, axes):
    """A parameter with names: in a box (MaxText), in the collection `params_axes` (T5X), or none."""
    if kind == "params_axes":
        return partitioning.param_with_axes(name, INIT, shape, jnp.float32, axes=axes)
    return module.param(
        name, nn.with_logical_partitioning(INIT, axes) if kind == "boxes" else INIT, shape
    )


class Layer(nn.Module):
    """Two matrices."""

    kind: str

    @nn.compact
    def __call__(self, x, _):
        up = param(self, self.kind, "up", (WIDTH, 2 * WIDTH), ("embed", "mlp"))
        down = param(self, self.kind, "down", (2 * WIDTH, WIDTH), ("mlp", "embed"))
        return x + jax.nn.gelu(x @ up) @ down, None


class Scanned(nn.Module):
    """Layers scanned along a dimension of choice, under a name of choice."""

    kind: str = "boxes"
    dim: int = 1
    name_of_stack: str = "layers"

    @nn.compact
    def __call__(self, tokens):
        embedding = param(self, self.kind, "embedding", (VOCAB, WIDTH), ("vocab", "embed"))
        options = {
            "variable_axes": {"params": self.dim},
            "split_rngs": {"params": True},
            "length": LAYERS,
        }
        if self.kind == "params_axes":
            scanned = partitioning.scan_with_axes(
                Layer, in_axes=nn.broadcast, axis_name="layers", **options
            )
        else:
            metadata = {nn.PARTITION_NAME: "layers"}
            scanned = nn.scan(Layer, in_axes=nn.broadcast, metadata_params=metadata, **options)
        x, _ = scanned(self.kind, name=self.name_of_stack)(embedding[tokens], None)
        return x @ embedding.T


@functools.cache
def model(**fields):
    return spmd.from_linen(Scanned(**fields), jax.ShapeDtypeStruct((8, 8), "int32"))


def rules_of(known, **options):
    return spmd.rules_from_annotations(known.info().annotations, logical=LOGICAL, **options)


def optimizers(stacked):
    lamb = spmd.per_layer(optax.scale_by_trust_ratio(), stacked)
    muon = spmd.make_optimizer(
        spmd.OptimizerConfig(name="muon", weight_decay=0.0),
        3,
        stacked,
        matrices={"embedding": None},
    )
    return optax.chain(muon, lamb)


def problems(rules, optimizer=None, mesh=None, model=model, **options):
    optimizer = optax.adamw(0.1) if optimizer is None else optimizer
    with pytest.raises((RuleError, ConfigError)) as caught:
        make_plan(
            mesh or abstract_mesh(MeshShape(fsdp=2, tensor=2)), rules, model(), optimizer, **options
        )
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("kind", "stack"),
    [
        pytest.param("boxes", "layers", id="boxes"),
        pytest.param("params_axes", "encoder", id="params_axes", marks=pytest.mark.soak),
    ],
)
def test_both_dimensions_train_alike(kind, stack):
    """Three steps of Muon and trust ratios, from the same parameters, on a mesh; names give the dimension."""
    options = {} if stack == "layers" else {"stacked": {stack: None}}
    batches = token_batches((8, 8), VOCAB, steps=3)
    key, moved = jax.random.key(0), {}
    start = jax.tree.map(
        np.asarray, jax.jit(model(kind=kind, dim=0, name_of_stack=stack).init)(key)
    )
    for dim in (0, 1):
        known = model(kind=kind, dim=dim, name_of_stack=stack)
        rules = rules_of(known, **options)
        assert rules.stacks[stack].dim == dim
        plan = make_plan(tiny.mesh(fsdp=2, tensor=2), rules, known, optimizers(rules.stacked))
        spec = {entry.path: entry.spec for entry in plan.params}[f"{stack}/up"]
        axis = rules.stacks[stack].axis
        assert spec == (P(axis, "fsdp", "tensor") if dim == 0 else P("fsdp", axis, "tensor"))
        params = {
            **start,
            stack: jax.tree.map(lambda x, dim=dim: np.moveaxis(x, 0, dim), start[stack]),
        }
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), params, plan.abstract_params
        )
        state = init_state(plan, params=placed)
        step = make_train_step(plan, spmd.next_token_loss(known))
        for batch in batches:
            state, _ = step(state, spmd.place_batch(plan, batch))
        layers = jax.tree.map(
            lambda x, dim=dim: np.moveaxis(np.asarray(x), dim, 0), state.params[stack]
        )
        moved[dim] = {**layers, "embedding": np.asarray(state.params["embedding"])}
    for name, before in {**start[stack], "embedding": start["embedding"]}.items():
        # orthogonalizing amplifies rounding; a wrong dimension is 65 % off
        change = moved[0][name] - before
        assert np.linalg.norm(moved[1][name] - moved[0][name]) < 5e-3 * np.linalg.norm(change)


def table(stacked):
    """A table by hand, for the model without names."""
    params = [
        ("embedding", P("tensor", "fsdp")),
        ("up", P("fsdp", "tensor")),
        ("down", P("tensor", "fsdp")),
    ]
    return spmd.Rules(params, stacked=stacked)


def test_a_table_by_hand_names_the_dimension_or_is_refused():
    """Sizes tell where no names do; a fix followed literally is right, and an optimizer must agree with it."""
    unnamed = functools.partial(model, kind="none")
    (problem,) = problems(table({"layers": "pipe"}), model=unnamed)
    assert (
        "32 in layers/down (32, 4, 16), 16 in layers/up (16, 4, 32); along dimension 1 all have 4"
        in problem
    )
    assert """stacked={"layers": spmd.Stack(axis, dim=1)}""" in problem
    right = table({"layers": spmd.Stack("pipe", dim=1)})
    make_plan(abstract_mesh(MeshShape(fsdp=2)), right, unnamed(), optimizers(right.stacked))
    found = problems(right, optax.lamb(0.1), model=unnamed)
    assert [problem.split(":")[0] for problem in found] == ["layers/down", "layers/up"]
    assert """stacked={"layers": spmd.Stack("pipe", dim=1)}""" in found[0]
    assert "Stack(axis, dim=1)" in problems(right, optimizers(("layers",)), model=unnamed)[0]


def test_names_that_contradict_a_table_are_told():
    """Where all sizes agree, names still tell; a stack under a name that the table does not have is asked for."""
    found = problems(table({"layers": "pipe"}))
    assert any(
        "is along dimension 0, and the names of its parameters say 1" in problem
        for problem in found
    )
    (problem,) = problems(table({}), model=functools.partial(model, name_of_stack="encoder"))
    assert (
        "its dimension 1 is named 'layers', and no component of its path is in stacked=" in problem
    )
    assert """stacked={"encoder": spmd.Stack(axis, dim=1)}""" in problem


def test_what_needs_dimension_0_is_refused_by_name():
    """A pipeline, offload in chunks, and adapters."""
    rules = rules_of(model())
    (problem,) = problems(rules, mesh=abstract_mesh(MeshShape(pipe=2, tensor=2)))
    assert "stacked['layers']: is along dimension 1, and a pipeline divides dimension 0" in problem
    found = problems(rules, mesh=tiny.mesh(fsdp=2), remat="full", offload=("optimizer_state",))
    assert all(
        "is stacked along dimension 1, and chunks are of dimension 0" in problem
        for problem in found
    )
    with pytest.raises(ConfigError, match="layers/up, which is stacked along dimension 1"):
        with_lora(model(), LoRAConfig(targets=("up",)), rules)


def test_collections_of_names_are_no_variables():
    """The names of T5X are read, and are not part of the state."""
    known = model(kind="params_axes", name_of_stack="encoder")
    assert known.info().annotations["encoder/up"].names == ("embed", "layers", "mlp")
    assert tree.flatten(jax.eval_shape(known.init_variables, jax.random.key(0))) == {}
    assert jax.eval_shape(known.init_variables, jax.random.key(0)) == {}
