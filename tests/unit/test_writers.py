"""Writers are chosen by name; one whose package is missing is an error before anything starts."""

import sys

import pytest

from spmd.errors import ConfigError
from spmd.observe.tensorboard import TensorBoard
from spmd.observe.writers import EXTRAS, check_packages, open_writers
from spmd.run.run_config import RunConfig


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_missing_package_names_its_extra(is_folder, tmp_path, monkeypatch):
    """All of them at once; a folder of the same name, as a package makes where it runs, is no package."""
    if is_folder:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        for name in EXTRAS:
            (tmp_path / name).mkdir()
            monkeypatch.delitem(sys.modules, name, raising=False)
    else:
        for name in EXTRAS:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        check_packages(("tensorboard", "mlflow", "wandb", "wandb"))
    assert [problem.fix for problem in caught.value.problems] == [
        "pip install 'spmd[mlflow]'",
        "pip install 'spmd[wandb]'",
    ]
    check_packages(("tensorboard",))


def test_names_are_checked_and_each_is_opened_once(tmp_path):
    """With the nearest name; a text in place of a tuple is no name."""
    with pytest.raises(ConfigError, match=r'metrics_to: names .wandbb.\n.*did you mean "wandb"'):
        RunConfig(metrics_to=("tensorboard", "wandbb"))
    with pytest.raises(ConfigError, match=r'\("wandb",\)'):
        RunConfig(metrics_to="wandb")
    (writer,) = open_writers(("tensorboard", "tensorboard"), tmp_path, tmp_path / "none", 0, {})
    assert isinstance(writer, TensorBoard)
    writer.close()
    assert open_writers((), tmp_path, tmp_path / "none", 0, {}) == []
