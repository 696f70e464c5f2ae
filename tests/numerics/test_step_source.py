"""`spmd plan`, `report`, `check`, `search` and `eval` take a file that makes a step, or has one."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import spmd
from spmd.errors import ConfigError
from spmd.run import search
from spmd.run.load_config import load_function
from spmd.run.step_source import ConfigSource, ReadyStep, StepFile, load_source
from spmd.sharding.mesh import MeshShape
from tests import tiny
from tests.command_line import run
from tests.own_step import write_step

MESH = ("--mesh.data", "2", "--mesh.tensor", "2")
CPU = ("--devices", "8")


def said(capsys):
    """What was printed, on both streams."""
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_a_plan_of_a_file(tmp_path, capsys):
    """Shapes are enough; settings of the function are flags; a machine fills the mesh."""
    file = write_step(tmp_path)
    shapes = ("--no-arrays", "--json")
    assert run("plan", file, "--topology", "v5e:2x4", *MESH, "--zero", "1", *shapes) == 0
    plan = json.loads(capsys.readouterr().out)
    sizes = {axis: size for axis, size in plan["mesh"].items() if size > 1}
    assert sizes == {"data": 2, "fsdp": 2, "tensor": 2}
    assert (plan["zero"], plan["fits"]) == (1, True)
    assert plan["memory"]["estimated"]["batch"] == (16 * 16 * 4 + 16 * 4) // 4
    assert run("plan", file, "--topology", "v5e:2x4", "--batch", "1000000000", *shapes) == 3
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"]["largest"]
    assert plan["memory"]["would_fit"] == []


def test_the_time_of_any_step_has_a_range(tmp_path, capsys):
    """A TPU's and a GPU's: the parts add up, and larger batches take longer."""
    file = write_step(tmp_path)
    for topology in ("v5e:2x4", "h100:1x8"):
        seconds = []
        for batch in ("4096", "8388608"):
            flags = ("--no-arrays", "--estimate", "--json", "--batch", batch)
            assert run("plan", file, "--topology", topology, *MESH, *flags) == 0
            time = json.loads(capsys.readouterr().out)
            assert time["method"] == "roofline of the trace"
            assert sum(time["spent"].values()) == pytest.approx(time["seconds"])
            assert time["range"][0] < time["seconds"] < time["range"][1]
            assert (time["mfu"], "tokens_per_second_per_chip" in time) == (None, False)
            seconds.append(time["seconds"])
        assert seconds[1] > 10 * seconds[0]


def test_the_step_of_a_file_is_compiled_and_compared(tmp_path, capsys):
    """Its collectives have their causes, and every layout gives the numbers of one device."""
    file = write_step(tmp_path)
    assert run("plan", file, *CPU, *MESH, "--compile") == 0
    printed = said(capsys)
    assert "rule 'up/kernel'" in printed
    assert "compiled: " in printed
    assert run("check", file, *CPU, *MESH) == 0
    assert "the layouts agree" in said(capsys)
    assert run("check", file, *CPU, *MESH, "--inject", "half-examples") in (0, 2)


def test_a_report_of_a_step(tmp_path, capsys):
    """From the command line and from Python, with charts; a page of another step differs."""
    file = write_step(tmp_path)
    page = tmp_path / "page.html"
    flags = ("--no-compile", "--out", page)
    assert run("report", file, "--topology", "v5e:2x4", *flags) == 0
    assert "examples/s on a chip" in page.read_text(encoding="utf-8")
    make = load_function(f"{file}:make")
    step, batch = make(tiny.mesh(data=2, fsdp=4))
    report = spmd.plan_report(step, batch, compile=False, out=str(tmp_path / "own.html"))
    assert "up/kernel" in str(report)
    assert (tmp_path / "own.html").stat().st_size > 100_000
    with pytest.raises(ConfigError, match="v5e:2x2 has 4 devices, and the mesh 8"):
        spmd.plan_report(step, batch, topology="v5e:2x2")


def test_the_settings_of_a_file_are_searched(tmp_path, capsys):
    """Meshes have the axes of its table; ZeRO is tried if it is a setting; GPUs are not compiled."""
    file = write_step(tmp_path)
    state = tmp_path / "state.json"
    flags = ("--no-arrays", "--batch", "4096", "--confirm", "0", "--state", state, "--json")
    assert run("search", file, "--topology", "h100:1x4", *flags) == 0
    found = json.loads(capsys.readouterr().out)
    # data × fsdp × tensor = 4 in 6 ways, three of them with fsdp, for which ZeRO 1 is tried.
    assert found["settings"] == 9
    assert found["best"]["memory"]
    own = ["--zero 3" in each["flags"] or "--zero 1" in each["flags"] for each in found["examined"]]
    assert all(own)


def test_a_ready_step_has_one_mesh(tmp_path, capsys):
    """It is planned for a machine of as many devices, and compared with one device."""
    ready = """
        step, batch = make(spmd.make_mesh(data=2, fsdp=2, tensor=2))
        del make
    """
    file = write_step(tmp_path, ready)
    assert isinstance(load_source(str(file)), ReadyStep)
    assert run("plan", file, "--topology", "v5e:2x4") == 0
    assert "data=2 fsdp=2 tensor=2" in said(capsys)
    assert run("plan", file, "--topology", "v5e:2x2") == 2
    assert "data 2 × fsdp 2 × tensor 2 = 8, not 4" in said(capsys)
    assert run("search", file, "--topology", "v5e:2x4", "--confirm", "0") == 2
    assert "is made for one mesh" in said(capsys)
    assert run("check", file) == 0


def test_a_run_is_evaluated_with_its_file(tmp_path, capsys):
    """On another mesh, with the loss that the run ended with; a config is refused."""
    file = write_step(tmp_path)
    step, batch = load_function(f"{file}:make")(tiny.mesh(data=2, fsdp=2))
    folder = tmp_path / "run"
    batches = lambda start, steps: (batch for _ in range(start, steps))  # noqa: E731
    config = spmd.RunConfig(steps=2, log_every=1)
    result = spmd.Run(folder, step, batches, config=config).train()
    _, metrics = step(result.state, batch)
    capsys.readouterr()
    assert run("eval", folder, file, *CPU, *MESH, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found["loss"], float(metrics["loss"]), rtol=1e-6)
    assert (found["step"], found["weight"]) == (2, 16)
    assert run("eval", folder, file, *CPU, "--no-arrays") == 2
    assert "are shapes" in said(capsys)
    assert run("eval", folder, "demo") == 2
    assert "has a config, and a run its own" in said(capsys)


TRAINS = """
    step, batch = make(spmd.make_mesh(data=8))
    spmd.fit(spmd.init_state(step.plan), step, [batch], steps=1)
"""
RUNS = """
    step, batch = make(spmd.make_mesh(data=8))
    spmd.Run("run", step, lambda start, steps: [batch], config=spmd.RunConfig(steps=1)).train()
"""


@pytest.mark.parametrize(
    ("more", "target", "words"),
    [
        (TRAINS, "", "trains when it is imported"),
        (RUNS, "", "trains when it is imported"),
        ("make = 3", "", "make: is 3"),
        ("def other(): pass", ":other", "other: takes no mesh"),
        ("def other(mesh): return 3", ":other", "other: returns 3"),
        ("def other(mesh): return 1 / 0", ":other", "fails: ZeroDivisionError"),
        ("def other(mesh): return make(mesh)[0], ()", ":other", "batch 0: is"),
        ("def other(mesh): return make(mesh)[0], {'x': 'text'}", ":other", "has 'text'"),
        ("def other(mesh, json=1): pass", ":other", "json: is the name of a flag"),
        ("def other(mesh): return make(spmd.make_mesh(data=8))", ":other", "is on another mesh"),
        ("del make", "", "offers no step"),
        ("step = 3\ndel make", "", "step: is 3"),
        ("", ":missing", "defines no function 'missing'"),
    ],
)
def test_what_is_no_step_is_said(tmp_path, capsys, monkeypatch, more, target, words):
    """Before anything is compiled, with the line where there is one."""
    monkeypatch.chdir(tmp_path)
    file = write_step(tmp_path, more)
    assert run("plan", f"{file}{target}", *CPU) == 2
    assert words in said(capsys)
    assert not (tmp_path / "run").exists()


def test_sources_are_told_apart(tmp_path, capsys):
    """A config comes before a function; without a number of devices, the error says what to give."""
    assert isinstance(load_source("demo"), ConfigSource)
    file = write_step(tmp_path)
    assert isinstance(load_source(str(file)), StepFile)
    assert run("plan", file) == 2
    assert "takes all devices of a machine, and none is named" in said(capsys)
    assert run("train", file) == 2
    assert "has a step of its own, and no config" in said(capsys)
    assert len(jax.devices()) == 8


OWN = """
    import functools

    config = {"width": 8}


    def build(mesh, size, names: list = ["a"], remat: bool = False, zero: int = 3):
        return make(mesh, zero=zero)


    other = functools.partial(build, size=3)


    def fails(mesh):
        step, batch = make(mesh)
        return step, {"x": batch["x"]}
"""


def test_settings_of_any_type_and_losses_that_fail(tmp_path, capsys):
    """A list, a partial function and a variable named config work; a loss that fails has its line."""
    file = write_step(tmp_path, OWN)
    assert run("plan", f"{file}:other", "--topology", "v5e:2x4", "--zero", "1") == 0
    assert "zero 1" in said(capsys)
    assert isinstance(load_source(str(file)), StepFile)
    assert run("plan", f"{file}:fails", *CPU) == 2
    printed = said(capsys)
    assert "The step of fails(mesh) fails:" in printed
    assert "KeyError: 'y'" in printed


def test_no_setting_of_another_type_is_tried(tmp_path):
    """Only values like the file's own; nothing returns from host memory."""
    file = write_step(tmp_path)
    source = load_source(str(file))
    own = {"zero": 3, "remat": False, "offload": ("optimizer_state",)}
    source = dataclasses.replace(source, settings=own)
    settings = list(search._variants({"mesh": MeshShape(fsdp=4)}, source))
    assert {each["remat"] for each in settings} == {False}
    assert {each["offload"] for each in settings} == {
        ("optimizer_state",),
        ("optimizer_state", "params"),
    }
    assert {each["zero"] for each in settings} == {3, 1}
