"""The work of a traced step is counted on one device, and its time is within bounds."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks.one_gpu import STEPS
from spmd.analysis.topology import parse_topology
from spmd.chips import ClosedRates
from spmd.commands.parsing import parse_command
from spmd.commands.train import TrainCommand
from spmd.model_interface.model import Model
from spmd.run.build import make_setup
from spmd.run.step_time import estimate_traced_time
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.step_time.network import make_network
from spmd.step_time.traced_form import count_work, traced_bounds, traced_form

ROWS, WIDTH, HIDDEN = 32, 16, 64


def planned(apply, shapes, sizes, specs, x=(ROWS, WIDTH), remat="none"):
    """A step of a model made of one function of parameters and inputs, and a batch."""

    def init(key):
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    model = Model(init, apply)
    mesh = abstract_mesh(MeshShape(**sizes))
    plan = spmd.make_plan(mesh, spmd.Rules(specs), model, optax.sgd(0.1), remat=remat)

    def loss_fn(params, variables, batch, key):
        y = model.apply(params, batch)
        return {"loss": (y**2).sum(), "weight": jnp.float32(len(batch))}, variables

    return spmd.make_train_step(plan, loss_fn), jax.ShapeDtypeStruct(x, "float32")


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


SHAPES = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
SPECS = [("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp"))]


def test_matmuls_are_counted_on_one_device():
    """Three products of each kernel but the first, whose input needs no gradient; eight devices share them."""
    one = count_work(*planned(mlp, SHAPES, {}, SPECS), "tpu")
    assert one.flops == 5 * 2 * ROWS * WIDTH * HIDDEN
    assert not one.sent
    eight = count_work(*planned(mlp, SHAPES, {"data": 2, "fsdp": 2, "tensor": 2}, SPECS), "tpu")
    assert eight.flops == one.flops / 8
    kinds = {(kind, axes) for kind, axes, _ in eight.sent}
    assert ("all-gather", ("fsdp",)) in kinds
    assert ("reduce-scatter", ("data",)) in kinds
    # The second product is a partial sum over tensor.
    assert ("all-reduce", ("tensor",)) in kinds


def test_loops_and_convolutions_are_counted():
    """A body once for each iteration; a convolution by its kernel."""

    def looped(params, x):
        return jax.lax.scan(lambda x, _: (x @ params["w"], None), x, length=7)[0]

    found = count_work(
        *planned(looped, {"w": (WIDTH, WIDTH)}, {}, [("w", spmd.replicate("small"))]), "tpu"
    )
    assert found.flops == 3 * 7 * 2 * ROWS * WIDTH**2

    def convolved(params, x):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, params["w"], (1,), "SAME", dimension_numbers=numbers)

    step = planned(convolved, {"w": (3, 4, 8)}, {}, [("w", spmd.replicate("small"))], x=(8, 10, 4))
    forward = 2 * 8 * 10 * 8 * 3 * 4
    assert count_work(*step, "tpu").flops == pytest.approx(2 * forward, rel=0.3)


def test_a_step_is_within_its_bounds():
    """The parts add up to a time between the bounds; the control: without exposure it is shorter."""
    step, batch = planned(mlp, SHAPES, {"data": 2, "fsdp": 4}, SPECS)
    topology = parse_topology("v5e:2x4")
    hardware = topology.chip.speeds
    network = make_network(topology, MeshShape(data=2, fsdp=4), {"data": 1}, hardware)
    work = count_work(step, batch, "tpu")
    rates = ClosedRates()
    seconds = sum(traced_form(work, network, rates).values())
    low, high = traced_bounds(work, network, rates)
    assert low < seconds < high
    hidden = dataclasses.replace(rates, exposed=0.0)
    assert sum(traced_form(work, network, hidden).values()) < seconds


def test_collectives_over_tensor_have_a_rate_of_their_own():
    """As in closed forms; without it the step waits for all of them."""
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    step, batch = planned(mlp, SHAPES, sizes, SPECS)
    topology = parse_topology("v5e:2x4")
    network = make_network(topology, MeshShape(**sizes), {"data": 1}, topology.chip.speeds)
    work = count_work(step, batch, "tpu")
    name = "exposed collectives over tensor"
    whole = traced_form(work, network, ClosedRates(exposed_tensor=1.0))
    part = traced_form(work, network, ClosedRates(exposed_tensor=0.25))
    assert part[name] == pytest.approx(0.25 * whole[name])
    assert {**part, name: whole[name]} == whole


MEASURED = Path("benchmarks/results/2026-11-26-h100-steps.jsonl")
"""Steps on one NVIDIA H100 80GB HBM3, JAX 0.11.2."""


@pytest.mark.parametrize("line", MEASURED.read_text(encoding="utf-8").splitlines())
def test_measured_steps_are_within_their_bounds(line):
    """Two steps of one H100; the estimate is 15 % off at most."""
    measured = json.loads(line)
    mesh = ("--mesh.data", "1", "--mesh.fsdp", "1", "--mesh.tensor", "1", "--devices", "1")
    flags = (*STEPS[measured["name"]], *mesh)
    config = parse_command(TrainCommand, list(flags), "train")[0].config
    setup = make_setup(config, abstract_mesh(MeshShape()))
    found = estimate_traced_time(setup, parse_topology("h100:1x1"))
    seconds = measured["seconds"]["measured"]
    assert found.range[0] < seconds < found.range[1]
    np.testing.assert_allclose(found.seconds, seconds, rtol=0.15)
