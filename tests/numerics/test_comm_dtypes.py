"""Promises of dtypes hold in compiled programs, and are broken where a partitioner or a layer sends more bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.analysis.causes import USED_WHOLE
from spmd.analysis.collective_audit import audit_collectives
from spmd.analysis.comm_dtypes import CommDtypeCheck, wider_transfers
from spmd.layers.kernel_gradient import kernel_gradient
from spmd.partition_rules.llama import LLAMA
from spmd.plan.context import use_plan
from spmd.plan.fsdp import placement_of
from spmd.plan.plan import make_plan
from spmd.plan.scopes import in_scope, param_scope
from spmd.precision import make_precision
from tests import tiny

PATH = "layers/mlp/up_proj/kernel"


@functools.cache
def plan(exchange: str):
    policy = dataclasses.replace(make_precision("bf16"), exchange=exchange)
    return make_plan(
        tiny.mesh(data=2, fsdp=4), LLAMA, tiny.model(), optax.sgd(0.1), precision=policy
    )


def audit(f, exchange: str, *arrays):
    """Audit a function of global arrays, split over all devices along the first dimension, against the bf16 plan."""
    shardings = [NamedSharding(plan(exchange).mesh, spec) for _, spec in arrays]
    with use_plan(plan(exchange)):
        compiled = jax.jit(f, in_shardings=shardings).lower(*(x for x, _ in arrays)).compile()
    return audit_collectives(compiled, plan(exchange).mesh, plan=plan("bfloat16"))


@pytest.mark.parametrize(
    ("exchange", "dtype", "broken"), [("bfloat16", "bf16", 0), ("float32", "f32", 2)]
)
def test_a_layer_sends_gradients_as_promised(exchange, dtype, broken) -> None:
    """In bfloat16 over both axes; in float32, the control, both are named."""

    def gradient(x, dy):
        product = functools.partial(jnp.einsum, "...i,...o->io", preferred_element_type=jnp.float32)
        return kernel_gradient(product, x, dy, placement_of(PATH), "io")

    x, dy = (jax.ShapeDtypeStruct((8, 4, width), jnp.bfloat16) for width in (64, 128))
    spec = P(("data", "fsdp"))
    audited = audit(gradient, exchange, (x, spec), (dy, spec))
    assert {(r.over, r.dtype) for r in audited.records} == {("fsdp", dtype), ("data", dtype)}
    assert [problem.where for problem in audited.broken] == [PATH] * broken


def quantize(kernel):
    scale = jnp.max(jnp.abs(kernel), axis=0, keepdims=True) / 127
    return jnp.round(kernel / scale).astype(jnp.int8), scale


def gathered_by_hand(kernel):
    """Codes and scales are gathered in a manual region, where no conversion can be moved."""

    def local(shard):
        codes, scale = (jax.lax.all_gather(x, "fsdp", tiled=True) for x in quantize(shard))
        return codes.astype(jnp.float32) * jnp.repeat(scale, shard.shape[0], axis=0)

    mesh = plan("bfloat16").mesh
    return jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)(
        kernel
    )


def gathered_by_the_partitioner(kernel):
    """Codes are constrained to be whole, which says nothing about what is sent."""
    whole = NamedSharding(plan("bfloat16").mesh, P())
    codes, scale = (jax.lax.with_sharding_constraint(x, whole) for x in quantize(kernel))
    return codes.astype(jnp.float32) * scale


@pytest.mark.parametrize(
    ("gather", "dtype", "broken"),
    [(gathered_by_hand, "s8", []), (gathered_by_the_partitioner, "f32", [PATH])],
)
def test_a_promised_int8_gather(gather, dtype, broken) -> None:
    """A manual region keeps the promise; a quantised array with a constraint, the control, is gathered in float32."""

    def product(x, kernel):
        with in_scope(param_scope(PATH)):
            return x @ gather(kernel)

    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 1024), (1024, 128)))
    records = audit(product, "bfloat16", (x, P(("data", "fsdp"))), (kernel, P("fsdp"))).records
    large = max(records, key=lambda record: record.bytes)
    assert (large.kind, large.over, large.dtype) == ("all-gather", "fsdp", dtype)
    promise = CommDtypeCheck(PATH, USED_WHOLE, {"fsdp": "s8"}, overhead=0.05)
    assert [problem.where for problem in wider_transfers(records, [promise])] == broken
