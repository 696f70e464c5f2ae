"""Gradients that are exchanged once a step: over which axes, what is refused, and what the plan says of it."""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.gradients.deferred_reduction import DeferredReduction
from spmd.gradients.losses import next_token_sums
from spmd.jaxpr.equations import equations, name_of, params_of
from spmd.model_interface.model import Outputs
from spmd.models.decoder import DecoderConfig
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.communication import deferred_reduction_bytes
from spmd.run.build import abstract_batch, make_setup, planned_mesh
from spmd.run.describe import exchange_line, microbatch_line
from spmd.run.preflight import preflight
from spmd.sharding.mesh import abstract_mesh

SMALL = DecoderConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64)
DEEPER = dataclasses.replace(SMALL, layers=3)
"""With as many layers as no batch here has parts."""
EXAMPLES = {
    "x": jax.ShapeDtypeStruct((8, 4), jnp.float32),
    "y": jax.ShapeDtypeStruct((8,), jnp.float32),
}


@functools.cache
def setup(model=SMALL, rules=LLAMA, mesh=(("data", 2), ("fsdp", 2)), accumulate=4, **fields):
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=32, batch=64)
    shape = spmd.MeshShape(**dict(mesh))
    config = spmd.TrainConfig(
        model=model, rules=rules, mesh=shape, data=data, accumulate=accumulate, **fields
    )
    return make_setup(config, planned_mesh(config))


@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({}, ("data",)),
        ({"zero": 2}, ("data",)),
        ({"zero": 1}, ("data", "fsdp")),
        ({"mesh": (("fsdp", 4),)}, ()),
        ({"accumulate": 1}, ()),
        ({"accumulate": 1, "mesh": (("pipe", 2), ("data", 2))}, ("data",)),
        ({"defer_grad_reduction": "none"}, ()),
        ({"defer_grad_reduction": "data+fsdp"}, ("data", "fsdp")),
    ],
)
def test_by_default_it_is_over_the_axes_that_take_no_memory(fields, axes):
    """The plan splits no gradient and no parameter over them; a choice is taken as it is."""
    made = setup(**fields)
    assert made.exchange.axes == axes
    if "defer_grad_reduction" not in fields:
        assert deferred_reduction_bytes(made.plan, axes)[1:] == (0, 0)


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({}, {64: 4, 32: 2}),
        ({"defer_grad_reduction": "none"}, {64: 4, 32: 2}),
        ({"defer_grad_reduction": "data+fsdp"}, {64: 4, 32: 2}),
        ({"accumulate": 1, "pipeline": spmd.PipelineConfig(microbatches=4)}, {64: 4, 32: 2}),
        ({"compress": spmd.CompressConfig(gradients="powersgd:2")}, {64: 4, 32: 2}),
    ],
)
def test_a_device_takes_as_many_microbatches_as_the_batch_has(fields, lengths):
    """Where a region holds a part of the batch, too; a smaller batch has fewer. The control has none."""
    made = setup(model=DEEPER, **fields)
    for rows, length in lengths.items():
        batch = abstract_batch(made.config, (rows, 32))
        assert scan_lengths(made.step.trace(batch).jaxpr, length)
    alone = setup(model=DEEPER, accumulate=1)
    for length in (2, 4):
        assert not scan_lengths(alone.step.trace(alone.batch).jaxpr, length)


def scan_lengths(jaxpr, length):
    """The scans of a length over tokens of several parts of a batch."""
    found = []
    for equation in equations(jaxpr):
        if name_of(equation) == "scan" and params_of(equation)["length"] == length:
            shapes = [x.aval.shape for x in equation.invars]
            found += [shape for shape in shapes if len(shape) == 3 and shape[2] == 32]
    return found


def test_the_plan_says_what_is_sent_and_held():
    """Over fsdp a reduce-scatter of whole gradients, over data an all-reduce of the shard; all float32, 4 bytes."""
    made = setup()
    sizes = [(math.prod(entry.shape), "fsdp" in str(entry.spec)) for entry in made.plan.params]
    split, whole = (
        4 * sum(size for size, is_split in sizes if is_split == kind) for kind in (True, False)
    )
    assert deferred_reduction_bytes(made.plan, ("data",)) == (2 * (split // 2 + whole), 0, 0)
    both = split + 2 * (split // 2 + whole)
    assert deferred_reduction_bytes(made.plan, ("data", "fsdp")) == (
        both,
        split,
        split // 2 + split,
    )
    text = exchange_line(made)
    once = (split + 2 * whole) / 1024
    assert f"over data once a step: {once:.1f} KiB on the wire, not {4 * once:.0f} KiB" in text
    assert "0 B more memory" in text
    assert "with --defer-grad-reduction data+fsdp over data+fsdp once a step" in text
    assert exchange_line(setup(accumulate=1)) == ""


def test_experts_are_exchanged_once_too():
    """Their routers' losses are averaged over devices, so nothing keeps the default from it."""
    made = setup(model=MIXTRALS["test"], rules=MIXTRAL)
    assert made.exchange == DeferredReduction(("data",))
    assert "of each microbatch, not of the batch: balance_loss, z_loss" in microbatch_line(made)
    assert microbatch_line(setup()) == ""
    router = dataclasses.replace(MIXTRALS["test"].router, bias_rate=1e-3)
    biased = dataclasses.replace(MIXTRALS["test"], router=router)
    assert setup(model=biased, rules=MIXTRAL).exchange == DeferredReduction(("data",)), (
        "biases change after a step"
    )


@pytest.mark.parametrize("of_all_devices", [False, True])
def test_auxiliary_losses_of_a_devices_own_examples_are_refused(of_all_devices):
    """A loss of a whole microbatch needs a model that says that it is; the control is one that does."""
    model = spmd.from_linen(Dropped(0.0), EXAMPLES["x"], train={"train": True})

    def loss_fn(params, variables, batch, key):
        logits = batch["x"][:, None] * model.apply(params, batch["x"])[:, :, None]
        targets, weights = jnp.zeros(logits.shape[:2], jnp.int32), jnp.ones(logits.shape[:2])
        outputs = Outputs(logits, {"balance_loss": logits.mean()}, of_all_devices=of_all_devices)
        return next_token_sums(
            outputs, {"targets": targets, "weights": weights}, train=True
        ), variables

    refused = pytest.raises(
        ConfigError,
        match=r"balance_loss.*are of all examples(.|\n)*fix: defer_grad_reduction=.none.",
    )
    with contextlib.nullcontext() if of_all_devices else refused:
        trace(model, loss_fn)


def test_parameters_in_host_memory_keep_it_too():
    """A layer fetches them to where they are stored."""
    made = setup(offload=("params",), remat="full")
    assert "in host memory" in made.exchange.reason
    with pytest.raises(ConfigError, match="is in host memory"):
        preflight(setup(offload=("params",), remat="full", defer_grad_reduction="data"))


def test_a_pipeline_without_a_flush_has_no_end_of_a_batch():
    """Its microbatches are of two steps."""
    pipedream = {
        "mesh": (("pipe", 2), ("data", 2)),
        "accumulate": 1,
        "pipeline": spmd.PipelineConfig("pipedream"),
    }
    assert "has no flush" in exchange_line(setup(**pipedream))
    with pytest.raises(ConfigError, match="defer_grad_reduction: is data: a batch does not end"):
        setup(**pipedream, defer_grad_reduction="data")


def trace(model: spmd.Model, loss_fn, axes=("data",), rules=None, **sizes):
    mesh = abstract_mesh(spmd.MeshShape(**(sizes or {"data": 2})))
    rules = rules or spmd.Rules(params=[("kernel", P("fsdp"))])
    plan = spmd.make_plan(mesh, rules, model, optax.sgd(0.1))
    grad_fn = spmd.defer_grad_reduction(spmd.accumulate(spmd.value_and_grad(loss_fn), 2), axes)
    spmd.make_train_step(plan, grad_fn=grad_fn).trace(EXAMPLES)


def squares(model, *, key_is_used=False):
    def loss_fn(params, variables, batch, key):
        noise = jax.random.normal(key, batch["y"].shape) if key_is_used else 0.0
        y, variables = model.forward(params, variables, key, batch["x"], train=True)
        return {
            "loss": ((y[:, 0] + noise - batch["y"]) ** 2).sum(),
            "weight": jnp.float32(batch["y"].size),
        }, variables

    return loss_fn


class Normalised(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = (
            nnx.BatchNorm(4, rngs=rngs),
            nnx.Linear(4, 1, use_bias=False, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(self.norm(x))


def test_batch_statistics_are_refused():
    """They are of the whole batch, and each device would have its own."""
    model = spmd.from_nnx(lambda rngs: Normalised(rngs))
    rules = spmd.Rules(
        params=[("kernel", P("fsdp")), ("(scale|bias|mean|var)", spmd.replicate("four numbers"))]
    )
    with pytest.raises(ConfigError, match="norm/mean: is a variable that the examples change"):
        trace(model, squares(model), rules=rules)


class Scaled(nnx.Module):
    """A layer with a table beside its variables."""

    def __init__(self, rngs):
        self.table = jnp.arange(4, dtype=jnp.float32)
        self.out = nnx.Linear(4, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.out(x * self.table[None])


def test_tables_are_no_matter():
    """They are variables that no forward pass changes."""
    model = spmd.from_nnx(lambda rngs: Scaled(rngs))
    trace(model, squares(model))


class Noisy(Scaled):
    """Noise from a key that stays as it is."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.key = rngs.noise()

    def __call__(self, x):
        return super().__call__(x + jax.random.normal(self.key, x.shape))


class Rematerialized(Scaled):
    def __call__(self, x):
        return nnx.remat(Scaled.__call__)(self, x)


def test_a_table_passes_through_transforms():
    """Of Flax, which return it as another array."""
    model = spmd.from_nnx(lambda rngs: Rematerialized(rngs))
    trace(model, squares(model))


def test_draws_from_a_key_of_the_model_are_refused():
    """No forward pass changes it."""
    model = spmd.from_nnx(lambda rngs: Noisy(rngs))
    with pytest.raises(ConfigError, match="key: is used, and every device would draw the same"):
        trace(model, squares(model))


class Dropped(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x, *, train=False):
        return nn.Dense(1, use_bias=False)(nn.Dropout(self.rate, deterministic=not train)(x))


@pytest.mark.parametrize(("rate", "draws"), [(0.5, False), (0.0, True)])
def test_draws_are_refused(rate, draws):
    """Devices would draw the same numbers for different examples, so another layout would have other numbers."""
    model = spmd.from_linen(Dropped(rate), EXAMPLES["x"], train={"train": True})
    with pytest.raises(
        ConfigError, match="key: is used, and every device would draw the same numbers"
    ):
        trace(model, squares(model, key_is_used=draws))


def test_a_key_that_is_not_used_is_no_matter():
    """The control: keys reach each microbatch, and a model without dropout draws nothing."""
    model = spmd.from_linen(Dropped(0.0), EXAMPLES["x"], train={"train": True})
    trace(model, squares(model))


def test_other_axes_and_layers_of_stages_are_refused():
    """Over other axes layers exchange in each microbatch; over pipe a device has some of the layers."""
    model = spmd.from_linen(Dropped(0.0), EXAMPLES["x"], train={"train": True})
    with pytest.raises(ConfigError, match=r"axes: are \('tensor',\)"):
        trace(model, squares(model), ("tensor",))
    with pytest.raises(ConfigError, match=r"mesh.pipe: splits the layers"):
        trace(model, squares(model), data=2, pipe=2)
