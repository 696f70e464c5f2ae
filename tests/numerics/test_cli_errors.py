"""Errors of the command line name the field and the flag, and nothing of the system's is a traceback."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from spmd import cli
from spmd.commands.plan import PlanCommand
from tests.command_line import run
from tests.tiers import soak_but

FULL = "A file cannot be read or written:\n  the system: No space left on device"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["trian", "demo"], 'did you mean "train"'),
        (["train"], "needs a config"),
        (["train", "demo", "--resume", "always", "--out", "/no/such/run"], "contains no run"),
        (["train", "--steps", "5", "demo"], "comes first"),
        (["plan", "demo", "--data.sequence", "16"], "16 prompt tokens >= data.sequence = 16"),
        (["launch", "--processes", "2", "--", "train", "demo", "--data.batch", "6"], "6 / (data=2"),
        (["launch", "--processes", "9999999", "--", "train", "demo"], "at most 256"),
        (["check", "demo", "--check-steps", "0"], "at least 1"),
        (["check", "demo", "--products", "2", "--leaves"], "shows one mesh"),
        (["check", "demo", "--products", "4"], "2 × 2 × 2 × 2 = 16 > 8"),
        (["train", "dmo"], 'did you mean "demo"'),
        (["train", "/no/such/config.py"], "is neither a file"),
        (["generate", "/no/such/run", "--prompt", "x"], "Run not found"),
    ],
)
def test_what_is_not_there_is_named(arguments, complaint, capsys, tmp_path, monkeypatch):
    """Verbs, configs and runs."""
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "where", "flag"),
    [
        (
            ["train", "demo", "--steps", "10", "--optimizer.warmup-steps", "30"],
            "steps",
            "--optimizer.warmup-steps 1",
        ),
        (["train", "demo", "--data.sequence", "9"], "sample.prompt", "--data.sequence 17"),
        (["train", "demo", "--data.batch", "6"], "batch", "(--data.batch)"),
        (["train", "demo", "--optimizer.b1", "7"], "b1", "(--optimizer.b1)"),
        (["train", "demo", "--steps", "0"], "steps", "(--steps)"),
        (["train", "demo", "--model.heads", "5"], "model.heads", "(--model.heads)"),
        (["train", "demo", "--remat", "ful"], "remat", '"full"? (--remat)'),
        (
            ["train", "demo", "--pipeline.schedule", "x"],
            "pipeline.schedule",
            "(--pipeline.schedule)",
        ),
        (["train", "demo", "--data.batch", "99999999999999999999"], "data.batch", "(--data.batch)"),
        (["train", "demo", "--steps", "99999999999999999999"], "steps", "(--steps)"),
        (["train", "demo", "--data.sequence", "99999999999"], "data.sequence", "(--data.sequence)"),
        (["plan", "demo", "--topology", "v5e:4x4"], "mesh", "another --topology"),
        (["check", "demo", "--check-steps", "0"], "check-steps", "(--check-steps)"),
        (["script", "slurm", "demo", "--nodes", "0"], "nodes", "(--nodes)"),
        (["launch", "--processes", "3", "--", "train", "demo"], "devices", "--devices-per-process"),
    ],
)
def test_errors_name_the_field_and_the_flag(arguments, where, flag, capsys, tmp_path, monkeypatch):
    """Where is the field, and the fix has its flag; nothing is started, and nothing is a traceback or a usage box."""
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("spmd: ")
    assert f"\n  {where}: " in error
    assert flag in error
    assert ("simulated" in error) == ("--topology" not in arguments and where == "mesh")


def test_too_little_memory_is_no_traceback(monkeypatch, capsys):
    """Other errors of the runtime keep theirs."""

    def fail(arguments):
        raise jax.errors.JaxRuntimeError(f"{arguments[0]}: 274877905920 bytes\nand a stack")

    monkeypatch.setitem(cli.COMMANDS, "plan", (fail, (PlanCommand,)))
    assert run("plan", "RESOURCE_EXHAUSTED") == 2
    assert "274877905920 bytes\n      fix: spmd plan" in capsys.readouterr().err
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        cli.main(["plan", "INTERNAL"])


@pytest.mark.parametrize("stream", soak_but(("stdout", "stderr"), "stdout"))
def test_a_full_disk_is_no_traceback(stream, tmp_path):
    """Neither where the output goes, nor where the error is written."""
    arguments = ["--version"] if stream == "stdout" else ["plan", "no-such-config"]
    with Path("/dev/full").open("w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        command = [sys.executable, "-m", "spmd_command", *arguments]
        done = subprocess.run(command, text=True, timeout=120, **streams)
    assert done.returncode == 2
    assert (done.stderr or "") == ("" if stream == "stderr" else f"spmd: {FULL}\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "offers no step"),
        ("config = 1", "defines config = 1"),
        ("config = (", "is not Python"),
        ("import nothing_of_this_name", "No module named"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(text, complaint, tmp_path, capsys):
    """The file and the line are in the message."""
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert run("plan", path) == 2
    assert complaint in capsys.readouterr().err
