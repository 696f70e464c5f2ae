"""What C++ writes to the process's output is collected, and libtpu's lines are told from others."""

import os

import jax
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import spmd
from spmd.analysis.collective_audit import audit_collectives
from spmd.distributed.initialize import initialize
from spmd.distributed.native_output import REMATERIALIZATION, compiler_log
from spmd.sharding.mesh import MeshShape, abstract_mesh
from tests.hlo_texts import CUBE, text

pytestmark = pytest.mark.compat


def test_lines_of_libtpu_are_for_the_log(capfd, monkeypatch) -> None:
    """At the start of a backend, what libtpu writes is returned and not shown; what others write is shown."""
    ours = "WARNING:2026-01-01 jax.xla_bridge:794: A Google TPU may be present on this machine"
    theirs = [
        "WARNING: Logging before InitGoogle() is written to STDERR",
        "E0000 common_lib.cc] from TPU_WORKER_HOSTNAMES",
    ]

    devices = jax.devices()
    lines = [*theirs, ours, "Fatal: anything else"]

    def start() -> list[jax.Device]:
        while lines:
            os.write(2, f"{lines.pop(0)}\n".encode())
        return devices

    monkeypatch.setattr(jax, "devices", start)
    assert initialize() == theirs
    assert capfd.readouterr().err == f"{ours}\nFatal: anything else\n"


def test_compiler_log(capfd) -> None:
    """What the compiler writes to standard error is kept and still written; its last resort becomes a warning."""
    line = "W0000 partitioner.cc:1] [SPMD] Involuntary full rematerialization. It cannot go from {a} to {b}.\n"
    for without, written in (("", line), (REMATERIALIZATION, "")):
        with compiler_log(without=without) as log:
            os.write(2, line.encode())
            os.write(2, b"something else\n")
        assert log == [line.rstrip("\n"), "something else"]
        assert capfd.readouterr().err == written + "something else\n"
    audited = audit_collectives(text("ROOT x = f32[] parameter(0)"), CUBE, log=log)
    assert [(w.what, w.detail) for w in audited.warnings] == [
        (
            "copies an array whole to every device, to change its sharding",
            "an array: It cannot go from {a} to {b}",
        )
    ]


XLA_LINE = (
    "W0000 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
    "sharding {devices=[4,1,1,2]<=[8]} to {devices=[1,1,2,4]<=[8]} efficiently for HLO operation "
    "%fake_parameter.2 = f32[2,16,64]{2,1,0} parameter(2). As the last resort, SPMD will replicate"
)
"""What JAX 0.10 prints of the model below."""


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (P("tensor", "fsdp"), "rows of the lookup Embed_0/embedding, whose features"),
        (P("fsdp"), "f32[2,16,64]: from {devices=[4,1,1,2]<=[8]} to {devices=[1,1,2,4]<=[8]}"),
    ],
    ids=["features", "control"],
)
def test_a_copy_names_the_lookup_that_causes_it(spec, says) -> None:
    """A model of plain Flax whose table is split over its features; the control has one split over rows."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(32, use_bias=False)(nn.Embed(256, 64)(tokens))

    model = spmd.from_linen(Net(), jax.ShapeDtypeStruct((8, 16), "int32"))
    rules = spmd.Rules([("embedding", spec), ("kernel", P("fsdp", "tensor"))])
    mesh = abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    plan = spmd.make_plan(mesh, rules, model, optax.sgd(1.0))
    program = text("ROOT x = f32[] parameter(0)")
    (warning,) = audit_collectives(program, CUBE, log=[XLA_LINE, XLA_LINE], plan=plan).warnings
    assert says in warning.detail
    assert ("split the rows of Embed_0/embedding" in warning.fix) == (spec != P("fsdp"))
