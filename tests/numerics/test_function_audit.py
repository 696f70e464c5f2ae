"""The audit of a function without a plan: its collectives with their lines, and what XLA may compute wrongly."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError, MeshError
from spmd.testing import expect_collectives

KINDS = [AxisType.Auto, AxisType.Explicit]


def make_mesh(kind, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def floats(mesh, *spec):
    return jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gather_is_reported_with_its_line(kind):
    """Over the function's own axes, of either type; the control, a function of each element, sends nothing."""
    mesh = make_mesh(kind, dp=2, mp=4)
    x = floats(mesh, "dp", "mp")

    def whole(x):
        sharding = NamedSharding(mesh, P("dp"))
        if kind == AxisType.Explicit:
            return jax.sharding.reshard(jnp.tanh(x), sharding)
        return jax.lax.with_sharding_constraint(jnp.tanh(x), sharding)

    audit = spmd.audit_function(jax.jit(whole), x).collectives
    (record,) = audit.records
    assert (record.kind, record.axes, record.bytes) == ("all-gather", ("mp",), 32 * 64 * 4)
    assert record.source.startswith("tests/numerics/test_function_audit.py:")
    with pytest.raises(AssertionError, match="all-gather over all axes: 8,192 bytes"):
        expect_collectives(audit, all_gather=0)
    assert spmd.audit_function(jnp.tanh, x).collectives.records == ()


def test_a_gather_that_nobody_asked_for_is_a_warning():
    """Its line is in it; the control, a function of NNX that sums over an axis, has none."""
    mesh = make_mesh(AxisType.Auto, dp=2, mp=4)

    def cumulative(x):
        return jnp.linalg.cholesky(jnp.tanh(x) + 100 * jnp.eye(64))

    (warning, *_) = spmd.audit_function(cumulative, floats(mesh, "dp", "mp")).collectives.warnings
    assert "is made whole on every device" in warning.what
    assert "test_function_audit.py:" in warning.where
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    forward = nnx.jit(lambda model, x: model(x))
    audit = spmd.audit_function(forward, model, floats(mesh, "dp", "mp"))
    assert not audit.collectives.warnings
    assert set(audit.collectives.by_axes()) == {("all-reduce", "mp")}
    assert not audit.faults.operations


def test_operations_that_xla_computes_wrongly_are_named():
    """Convolutions and products on three axes, with their lines; the control, on two axes, has no product."""

    def convolve(x, kernel):
        y = jax.lax.conv_general_dilated(x[:, None, :], kernel[:1, None, :3], (1,), "SAME")
        return y[:, 0] @ kernel

    for sizes, primitives in (
        ({"dp": 2, "fsdp": 2, "mp": 2}, ["conv_general_dilated", "dot_general"]),
        ({"dp": 2, "fsdp": 4}, ["conv_general_dilated"]),
    ):
        mesh = make_mesh(AxisType.Auto, **sizes)
        faults = spmd.audit_function(convolve, floats(mesh, "dp"), floats(mesh, "fsdp")).faults
        assert [operation.primitive for operation in faults.operations] == primitives
        for operation in faults.operations:
            assert operation.source.startswith("tests/numerics/test_function_audit.py:")
            assert "right if" in operation.answer


def test_what_cannot_be_audited_is_refused():
    """With a fix; no mesh is guessed."""
    compiled = jax.jit(jnp.tanh).lower(jnp.ones(8)).compile()
    for wrong, fix in ((compiled, "audit_collectives"), (8, "a function, such as of jax.jit")):
        with pytest.raises(ConfigError, match=fix):
            spmd.audit_function(wrong, jnp.ones(8))
    two = [floats(make_mesh(AxisType.Auto, **{axis: 8}), axis) for axis in ("dp", "mp")]
    with pytest.raises(MeshError, match=r"over several\n +dp=8 and mp=8"):
        spmd.audit_function(lambda x, y: (x, y), *two)
    with pytest.raises(MeshError, match=r"no argument or result is split.*\n +fix: mesh="):
        spmd.audit_function(jnp.tanh, jnp.ones(8))
    with pytest.raises(MeshError, match="is 8"):
        spmd.audit_function(jnp.tanh, jnp.ones(8), mesh=8)
