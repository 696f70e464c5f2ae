"""`spmd check` compares layouts, and finds each bug that is put in."""

import json

import pytest

from spmd import testing
from spmd.parity import reference
from spmd.run import check
from tests.command_line import run, write_config


@pytest.fixture
def config(tmp_path):
    """A config file of a tiny model on a small text."""
    return write_config(tmp_path)


def test_check_compares_with_one_device(config, capsys):
    """The layouts agree, and the command says so with the errors and what is allowed; nothing is compressed."""
    assert run("check", config, "--check-steps", "2", "--compress.gather", "int8") == 0
    printed = capsys.readouterr().out
    assert "fewer bits change numbers by design: compression and recipes are off" in printed
    assert "the layouts agree" in printed
    assert "gradients" in printed
    assert "allowed" in printed


@pytest.mark.soak
def test_check_exits_with_1_when_layouts_differ(config, capsys, monkeypatch):
    """The control: where no rounding is allowed, the same command fails."""
    strict = testing.Tolerance(loss=0.0, gradients=0.0, updates=0.0)
    monkeypatch.setitem(testing.TOLERANCES, "float32", strict)
    monkeypatch.setattr(reference, "FACTOR", 0.0)
    monkeypatch.setattr(reference, "FLOOR", 0.0)
    assert run("check", config, "--check-steps", "2") == 1
    assert "THE LAYOUTS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bug",
    [
        "reduction",
        *(pytest.param(bug, marks=pytest.mark.soak) for bug in testing.BUGS if bug != "reduction"),
    ],
)
def test_check_finds_an_injected_bug(config, capsys, bug):
    """Each control makes the same command fail."""
    assert run("check", config, "--check-steps", "1", "--inject", bug) == 1
    assert f"{bug}: the layouts differ: the injected bug was found" in capsys.readouterr().out


@pytest.mark.soak
def test_check_speaks_json_and_shows_every_leaf(config, capsys):
    """Each leaf has its error, what is allowed, and the verdict; the reason stands beside."""
    assert run("check", config, "--check-steps", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["injected"] is None
    assert report["mesh"]["tensor"] == 2
    assert "float32 rounding" in report["tolerance"]["why"]
    paths = {row["path"] for row in report["rows"] if row["what"] == "gradients"}
    assert "layers/mlp/up_proj/kernel" in paths
    assert run("check", config, "--check-steps", "1", "--leaves") == 0
    printed = capsys.readouterr().out
    assert all(f"gradients          {path} " in printed for path in paths)


@pytest.fixture
def two_axes(monkeypatch):
    """A sweep over `data` and `expert` alone, which the model has no use for."""
    monkeypatch.setattr(check, "AXES", ("data", "expert"))


@pytest.mark.soak
def test_check_sweeps_over_products_of_axes(config, two_axes, capsys):
    """A line for each; what is refused is given a reason and stops nothing, and no product with it is tried."""
    assert run("check", config, "--check-steps", "1", "--products", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("ok")] == ["data=2"]
    assert (
        "expert=2         refused: mesh.expert splits no parameter: this model has no experts"
        in lines
    )
    assert lines[-1] == "1 of 1 layouts agree, 1 refused"


@pytest.mark.soak
def test_check_finds_an_injected_bug_on_every_mesh(config, two_axes, capsys):
    """The control: the same sweep with a bug fails, and says so in JSON."""
    arguments = ("--check-steps", "1", "--products", "1", "--inject", "gradient-scale", "--json")
    assert run("check", config, *arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(record["mesh"]["data"], record["ok"]) for record in report["compared"]] == [(2, False)]
    assert [record["mesh"]["expert"] for record in report["refused"]] == [2]


def test_a_sweep_that_compares_nothing_is_an_error(config, two_axes, capsys):
    """Where every mesh is refused, nothing agrees: the reasons, and exit code 2."""
    assert run("check", config, "--check-steps", "1", "--products", "1", "--data.batch", "3") == 2
    assert "No product of axes fits" in capsys.readouterr().err


@pytest.mark.soak
def test_check_says_where_both_sides_are_nan(config, capsys):
    """With a learning rate that no float32 survives the steps before are compared, and it is said."""
    flags = ("--optimizer.learning-rate", "1e30", "--optimizer.name", "sgd")
    assert run("check", config, "--check-steps", "4", *flags) == 0
    assert "the layouts agree; step " in capsys.readouterr().out
