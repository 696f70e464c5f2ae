"""Writers are chosen by name; one whose package is missing is an error before anything starts."""

import json
import sys
import types

import pytest

from spmd.errors import ConfigError
from spmd.observe.mlflow_writer import MLflowConfig
from spmd.observe.tensorboard import TensorBoard
from spmd.observe.wandb_writer import WandB, WandBConfig
from spmd.observe.writers import EXTRAS, WriterConfig, check_packages, open_writers
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
    (writer,) = open_writers(
        WriterConfig(("tensorboard", "tensorboard")), tmp_path, tmp_path / "none", 0, {}
    )
    assert isinstance(writer, TensorBoard)
    writer.close()
    assert open_writers(WriterConfig(()), tmp_path, tmp_path / "none", 0, {}) == []


def test_settings_of_a_writer_that_is_not_named_are_refused():
    """They would act on nothing; of a named one they are kept."""
    with pytest.raises(ConfigError, match="acts on nothing: metrics_to does not name wandb"):
        RunConfig(wandb=WandBConfig(project="llama"))
    with pytest.raises(ConfigError, match="acts on nothing: metrics_to does not name mlflow"):
        RunConfig(mlflow=MLflowConfig(experiment="llama"), metrics_to=("wandb",))
    config = RunConfig(metrics_to=("wandb",), wandb=WandBConfig(project="llama"))
    assert config.writers.wandb.project == "llama"


class Refused(Exception):
    """As `wandb.errors.Error`."""


class StubRun:
    """As a run of W&B."""

    def __init__(self, folder):
        self.dir = str(folder / "files")
        self.rows = []

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        pass


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A stub in place of the package: the keywords of each `init` and its run, and what `login` says."""
    opened = []

    def init(**keywords):
        run = StubRun(tmp_path / "wandb" / f"run-{len(opened)}")
        opened.append((keywords, run))
        return run

    def login():
        if package.key:
            return True
        raise Refused("no key")

    package = types.SimpleNamespace(
        init=init,
        login=login,
        key="",
        opened=opened,
        Settings=dict,
        Histogram=list,
        errors=types.SimpleNamespace(Error=Refused),
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_each_attempt_is_a_run_of_one_group(stub, tmp_path):
    """Online: with project, entity and tags, an id for each attempt, and no step twice. The attempt after one that
    was killed begins after the checkpoint, since the server has the steps before."""
    config = WandBConfig(online=True, project="p", entity="team", tags=("a",))
    first = WandB(tmp_path, 0, {"steps": 9}, config)
    first.write(1, {"loss": 1.0})
    first.close()
    killed = WandB(tmp_path, 1, {"steps": 9}, config)
    killed.write(2, {"loss": 0.9})
    third = WandB(tmp_path, 4, {"steps": 9}, config)
    third.write(4, {"loss": 0.8})
    third.write(5, {"loss": 0.7})
    keywords = [keywords for keywords, _ in stub.opened]
    assert [each["settings"]["mode"] for each in keywords] == ["online"] * 3
    assert {(each["project"], each["entity"], each["tags"]) for each in keywords} == {
        ("p", "team", ("a",))
    }
    [group] = {each["group"] for each in keywords}
    base = group.removeprefix(f"{tmp_path.name}-")
    assert [each["id"] for each in keywords] == [f"{base}-1", f"{base}-2", f"{base}-3"]
    assert [[step for step, _ in run.rows] for _, run in stub.opened] == [[1], [2], [5]]
    assert json.loads((tmp_path / "wandb/spmd.json").read_text())["attempt"] == 3


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", '{"attempt": "3"}', '{"id": 7}', "{", "\0"])
def test_a_damaged_record_of_attempts_is_one_error(text, stub, tmp_path):
    """With its path and what to do; control: the record of the attempt before is read."""
    WandB(tmp_path, 0, {}, WandBConfig()).close()
    WandB(tmp_path, 0, {}, WandBConfig()).close()
    record = tmp_path / "wandb" / "spmd.json"
    record.write_text(text)
    with pytest.raises(ConfigError, match=r"wandb/spmd\.json: is not a record"):
        WandB(tmp_path, 0, {}, WandBConfig())


def test_offline_is_the_default(stub, tmp_path):
    WandB(tmp_path, 0, {}, WandBConfig(group="mine"))
    [(keywords, _)] = stub.opened
    assert (keywords["settings"]["mode"], keywords["group"]) == ("offline", "mine")


def test_a_missing_key_is_one_sentence_before_the_run(stub):
    """Offline needs none, and with a key there is no problem."""
    online = WriterConfig(("wandb",), WandBConfig(online=True))
    [problem] = online.login_problems()
    assert (problem.where, problem.what) == ("wandb.online", "needs an API key, and there is none")
    assert WriterConfig(("wandb",)).login_problems() == []
    stub.key = "key"
    assert online.login_problems() == []


def test_a_server_that_refuses_is_named(stub, tmp_path):
    def refuse(**keywords):
        raise Refused("project not found")

    stub.init = refuse
    with pytest.raises(ConfigError, match=r"cannot be opened\n.*project not found"):
        WandB(tmp_path, 0, {}, WandBConfig(online=True))
