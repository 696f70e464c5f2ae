"""A run folder holds one run, and nothing in it leads elsewhere."""

import os
import socket

import pytest

from spmd.errors import CheckpointError
from spmd.run.run_dir import RunDir


@pytest.fixture
def folder(tmp_path):
    """A folder that holds a run."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    return RunDir(tmp_path / "run")


def test_a_run_is_there_or_is_not(folder, tmp_path):
    """Never refuses a run, always refuses none, auto takes both."""
    empty = RunDir(tmp_path / "empty")
    assert [folder.check_use(resume) for resume in ("auto", "always")] == [True, True]
    assert [empty.check_use(resume) for resume in ("auto", "never")] == [False, False]
    with pytest.raises(CheckpointError, match="already contains a run"):
        folder.check_use("never")
    with pytest.raises(CheckpointError, match="contains no run"):
        empty.check_use("always")
    (folder.path / "checkpoints" / "5").rename(folder.path / "checkpoints" / "5.saving")
    assert folder.check_use("auto")
    with pytest.raises(CheckpointError, match="contains a run without a checkpoint"):
        folder.check_use("always")


def test_hidden_names_among_checkpoints_are_no_run(tmp_path):
    """Such as one left by a check of the folder that was killed."""
    (tmp_path / "checkpoints" / ".shared-0123").mkdir(parents=True)
    assert not RunDir(tmp_path).check_use("never")
    (tmp_path / "checkpoints" / "5.saving").mkdir()
    assert RunDir(tmp_path).has_run


def test_links_out_of_the_folder_are_refused(folder, tmp_path):
    """Each is named with where it leads; one that stays inside is fine, and so is a folder that is itself a link."""
    (folder.path / "config.json").symlink_to(folder.path / "metrics.jsonl")
    (tmp_path / "link").symlink_to(folder.path)
    assert RunDir(tmp_path / "link").check_use("auto")
    (folder.path / "plan.txt").symlink_to("../elsewhere.txt")
    (folder.path / "logs" / "process-0.log").symlink_to(tmp_path / "elsewhere.log")
    with pytest.raises(CheckpointError, match="leads out of the run folder") as caught:
        folder.check_use("auto")
    assert [problem.where.rpartition("/")[2] for problem in caught.value.problems] == [
        "process-0.log",
        "plan.txt",
    ]


@pytest.mark.parametrize(
    "name", ["logs/process-0.log", "metrics.jsonl", "goodput.jsonl", "config.json", "plan.txt"]
)
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_pipe_in_the_folder_is_refused(kind, name, folder):
    """At once, and by its path: opening it would wait; control: a file and a folder are fine."""
    assert folder.check_use("auto")
    path = folder.path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        where = os.getcwd()
        os.chdir(path.parent)  # a socket's path has 107 characters at most
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path.name)
        finally:
            os.chdir(where)
    with pytest.raises(CheckpointError, match="neither a file nor a folder") as caught:
        folder.check_use("auto")
    assert [problem.where for problem in caught.value.problems] == [str(path)]


def test_a_config_that_is_a_pipe_is_not_waited_for(folder):
    """An error of the folder, as of any other file that is none."""
    os.mkfifo(folder.path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        folder.config()


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, '{"changed": {}}'])
def test_a_config_that_is_none_is_an_error_with_the_fix(folder, text):
    """Whatever JSON it is."""
    (folder.path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="give the folder that `spmd train` wrote"):
        folder.config()
