"""The bytes that a plan gives each device are those of the ZeRO paper, for every stage."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from spmd.model_interface.model import Model
from spmd.plan.plan import make_plan
from spmd.precision import Precision
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.sharding.rules import Rules

GB = 1e9
HALF = Precision(
    "half, and a float32 master of its own",
    params="bfloat16",
    compute="bfloat16",
    gradients="bfloat16",
)


class MasterAdam(NamedTuple):
    """Adam for half-precision parameters: 12 bytes for each parameter, the paper's K."""

    master: Any
    mu: Any
    nu: Any


def master_adam_init(params):
    return MasterAdam(*(jax.tree.map(lambda p: p.astype(jnp.float32), params) for _ in range(3)))


ADAM = optax.GradientTransformation(master_adam_init, lambda g, s, p=None: (g, s))


@functools.cache
def gigabytes(params, devices, stage, tensor=1):
    """What each device holds of a model of `params` parameters: parameters, gradients and optimizer state."""
    columns = max(devices * tensor, 1024)
    rows = round(params / columns)
    model = Model(lambda key: {"kernel": jnp.zeros((columns, rows))}, lambda params: params)
    mesh = abstract_mesh(MeshShape(fsdp=devices, tensor=tensor))
    plan = make_plan(
        mesh, Rules([("kernel", P(("fsdp", "tensor")))]), model, ADAM, zero=stage, precision=HALF
    )
    return sum(plan.bytes_per_device().values()) / GB


# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
# arXiv:1910.02054v3: (parameters, data-parallel degree, stage, GB on each device, how far the paper
# rounds), Figure 1 and Table 1.
PUBLISHED = [
    (7.5e9, 64, 2, 16.6, 0.05),
    (7.5e9, 1, 2, 120, 1.0),
    (7.5e9, 1, 3, 120, 1.0),
    (7.5e9, 4, 2, 41.3, 0.055),
    (7.5e9, 4, 3, 30, 0.055),
    (7.5e9, 16, 1, 35.6, 0.055),
    (7.5e9, 16, 2, 21.6, 0.055),
    (7.5e9, 256, 2, 15.4, 0.055),
    (7.5e9, 1024, 1, 30.1, 0.055),
    (7.5e9, 1024, 2, 15.1, 0.055),
    (128e9, 1, 1, 2048, 1.0),
    (128e9, 1, 2, 2048, 1.0),
    (128e9, 4, 2, 704, 1.0),
    (128e9, 256, 1, 518, 1.0),
    (128e9, 256, 2, 263, 1.0),
    (128e9, 1024, 3, 2, 0.055),
    (1000e9, 1, 1, 16000, 1.0),
    (1000e9, 1, 3, 16000, 1.0),
    (1000e9, 4, 1, 7000, 1.0),
    (1000e9, 4, 3, 4000, 1.0),
    (1000e9, 16, 1, 4750, 1.0),
    (1000e9, 16, 3, 1000, 1.0),
    (1000e9, 64, 3, 250, 1.0),
    (1000e9, 1024, 3, 15.6, 0.055),
]


@pytest.mark.parametrize(("params", "devices", "stage", "expected", "rounding"), PUBLISHED)
def test_model_states_are_as_published(params, devices, stage, expected, rounding):
    """Figure 1 and Table 1: half-precision parameters and gradients, and 12 bytes of Adam for each parameter."""
    assert gigabytes(params, devices, stage) == pytest.approx(expected, abs=rounding)


# Table 2: (model-parallel degree, GPUs, stage, largest model in billions of parameters on GPUs of
# 32 GB).
LARGEST = [
    (1, 64, 0, 2),
    (1, 64, 1, 7.6),
    (1, 64, 3, 128),
    (2, 128, 0, 4),
    (2, 128, 1, 15.2),
    (4, 256, 0, 8),
    (4, 256, 2, 57.6),
    (8, 512, 2, 115.2),
    (8, 512, 3, 1024),
    (16, 1024, 0, 32),
    (16, 1024, 1, 121.6),
    (16, 1024, 3, 2048),
]


@pytest.mark.parametrize(("model_parallel", "gpus", "stage", "billions"), LARGEST)
def test_the_largest_model_is_as_published(model_parallel, gpus, stage, billions):
    """Table 2: what fills 32 GB, with `tensor` as the model-parallel axis."""
    params = 2**40
    each = gigabytes(params, gpus // model_parallel, stage, model_parallel) * GB / params
    assert 32 / each == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("stage", "factor"), [(0, 1), (1, 4), (2, 8)])
def test_the_largest_reduction_is_as_published(stage, factor):
    """With ever more devices, stages 1 and 2 approach a 4-fold and an 8-fold reduction."""
    params, many = 2**40, 2**20
    assert gigabytes(params, 1, 0) / gigabytes(params, many, stage) == pytest.approx(
        factor, rel=1e-4
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), (2, 4), (4, 2)])
def test_hybrid_sharding_divides_by_the_group(stage, data, fsdp):
    """Under data × fsdp only the group divides, exactly: 2P + 2P + 12P bytes, each part whole or divided by fsdp."""
    model = Model(lambda key: {"kernel": jnp.zeros((64, 32))}, lambda params: params)
    mesh = abstract_mesh(MeshShape(data=data, fsdp=fsdp))
    plan = make_plan(mesh, Rules([("kernel", P("fsdp"))]), model, ADAM, zero=stage, precision=HALF)
    parts = [fsdp if stage >= part else 1 for part in (3, 2, 1)]
    each = [2 * 2048 // parts[0], 2 * 2048 // parts[1], 12 * 2048 // parts[2]]
    assert list(plan.bytes_per_device().values()) == each
