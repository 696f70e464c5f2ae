"""The compiled step of a run in new processes: two of four devices load the bytes that process 0 wrote."""

import shutil

import pytest

from tests.train_runs import assert_same, losses, state, train, write_tiny

ALWAYS = """
from spmd.run import compiled_step

compiled_step.MIN_SECONDS = 0.0
"""
"""Lines of a config whose step is written however soon it is compiled."""
FLAGS = ("--steps", 6, "--optimizer.warmup-steps", 2, "--checkpoint-every", 3)
FRESH = ("--compilation-cache-dir", "none")
"""A program of the cache is not written."""


def said(out, process):
    """The log of a process."""
    return (out / "logs" / f"process-{process}.log").read_text()


@pytest.mark.soak
def test_two_processes_load_the_step_of_one(tmp_path):
    """Both with the bits of the run that compiled it; the control has another learning rate, and compiles."""
    config = write_tiny(tmp_path, ALWAYS)
    two = {"processes": 2, "devices": 4}
    compiled, loaded = tmp_path / "compiled", tmp_path / "loaded"
    train(config, compiled, *FLAGS, *FRESH, **two)
    assert "wrote the compiled step" in said(compiled, 0)
    assert "wrote" not in said(compiled, 1)
    loaded.mkdir()
    shutil.copyfile(compiled / "compiled_step", loaded / "compiled_step")
    train(config, loaded, *FLAGS, *FRESH, **two)
    for process in range(2):
        assert f"loaded the compiled step from {loaded}/compiled_step" in said(loaded, process)
        assert "the loaded step is as it is traced here" in said(loaded, process)
        assert "compiled the step in" not in said(loaded, process)
    assert losses(loaded) == losses(compiled)
    assert_same(*(state(config, run, 6, fsdp=4) for run in (loaded, compiled)))


@pytest.mark.soak
def test_one_process_does_not_load_the_step_of_two(tmp_path):
    """Nor do two in which one has another learning rate than the file: both compile."""
    config = write_tiny(tmp_path, ALWAYS)
    two = {"processes": 2, "devices": 4}
    train(config, tmp_path / "two", *FLAGS, *FRESH, **two)
    for name, flags, where, why in (
        ("one", (), {"devices": 8}, "topology.processes was 2 and is 1"),
        ("rate", ("--optimizer.learning-rate", "0.5"), two, "optimizer.learning_rate was 0.01"),
    ):
        out = tmp_path / name
        out.mkdir()
        shutil.copyfile(tmp_path / "two" / "compiled_step", out / "compiled_step")
        train(config, out, *FLAGS, *FRESH, *flags, **where)
        assert why in said(out, 0)
        assert "compiled the step in" in said(out, 0)
