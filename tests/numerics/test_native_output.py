"""What C++ writes to the process's output is collected, and libtpu's lines are told from others."""

import os

import jax
import pytest

from spmd.analysis.collective_audit import audit_collectives
from spmd.distributed.initialize import initialize
from spmd.distributed.native_output import compiler_log
from tests.hlo_texts import CUBE, text

pytestmark = pytest.mark.compat


def test_lines_of_libtpu_are_for_the_log(capfd, monkeypatch) -> None:
    """At the start of a backend, what libtpu writes is returned and not shown; what others write is shown."""
    ours = "WARNING:2026-01-01 jax.xla_bridge:794: A Google TPU may be present on this machine"
    theirs = [
        "WARNING: Logging before InitGoogle() is written to STDERR",
        "E0000 common_lib.cc] from TPU_WORKER_HOSTNAMES",
    ]

    def start() -> None:
        os.write(2, "\n".join([*theirs, ours, "Fatal: anything else", ""]).encode())

    monkeypatch.setattr(jax, "devices", start)
    assert initialize() == theirs
    assert capfd.readouterr().err == f"{ours}\nFatal: anything else\n"


def test_compiler_log(capfd) -> None:
    """What the compiler writes to standard error is kept and still written; its last resort becomes a warning."""
    line = "W0000 partitioner.cc:1] [SPMD] Involuntary full rematerialization. It cannot go from {a} to {b}.\n"
    with compiler_log() as log:
        os.write(2, line.encode())
        os.write(2, b"something else\n")
    assert log == [line.rstrip("\n"), "something else"]
    assert capfd.readouterr().err == line + "something else\n"
    audited = audit_collectives(text("ROOT x = f32[] parameter(0)"), CUBE, log=log)
    assert [(w.what, w.detail) for w in audited.warnings] == [
        ("copies an array whole to every device", "It cannot go from {a} to {b}")
    ]
