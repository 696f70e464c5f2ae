"""Config files, flags and run folders with earlier names get an error with the current name, or still work."""

import dataclasses
import importlib.util
import json

import pytest

import spmd
from spmd.errors import ConfigError
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.run.config import config_difference, config_values
from spmd.run.load_config import load_config
from spmd.run.renamed import CLASSES, FIELDS, MODULES, current_fields, renamed_flags
from spmd.run.run_dir import RunDir
from tests.command_line import run

CONFIG = spmd.TrainConfig(model=PRESETS["test"], rules=LLAMA, max_to_keep=7, sdc_checks=spmd.SDCConfig(repeat_every=4))
IMPORTS = "import spmd\nfrom spmd.models.llama import PRESETS\nfrom spmd.partition_rules.llama import LLAMA\n"
MAKE = "config = spmd.TrainConfig(model=PRESETS['test'], rules=LLAMA, {})"


def old_values():
    """JSON values of `CONFIG` as an earlier version wrote them."""
    old = {new: name for name, new in FIELDS.items()}
    return {old.get(name, name): value for name, value in config_values(CONFIG).items()}


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("from partition_rules.nothing_of_this_name import LLAMA", "partition_rules is now spmd.partition_rules"),
        ("import name_maps.nothing_of_this_name", "name_maps is now spmd.name_maps"),
        ("import spmd.rules", "spmd.rules is now spmd.sharding.rules"),
        ("from spmd.mesh import MeshShape", "spmd.mesh is now spmd.sharding.mesh"),
        ("from spmd.optim import OptimizerConfig", "spmd.optim is now spmd.optim.config"),
        ("from spmd.data import DataConfig", "spmd.data is now spmd.data.loader"),
        ("from spmd.parallel.router import RouterConfig", "spmd.parallel is now spmd.layers"),
        ("from spmd.lora import LoraConfig", "spmd.lora is now spmd.plan.lora"),
        ("from spmd.plan.lora import LoraConfig", "LoraConfig is now LoRAConfig"),
        ("import spmd\nspmd.config.TrainConfig", "spmd.config is now spmd.run.config"),
        ("import spmd\nspmd.FaultsConfig()", "FaultsConfig is now SDCConfig"),
        (IMPORTS + MAKE.format("keep=3"), "keep is now max_to_keep"),
        (IMPORTS + MAKE.format("programs=''"), "programs is now compilation_cache_dir"),
        (IMPORTS + MAKE.format("loss_chunk=8"), "loss_chunk is now logits_chunk"),
        (IMPORTS + MAKE.format("faults=spmd.SDCConfig()"), "faults is now sdc_checks"),
    ],
)
def test_a_config_with_an_earlier_name_gets_the_current_one(text, fix, tmp_path):
    """As the fix of the error that the file caused."""
    path = tmp_path / "old.py"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_config(str(path))
    assert [problem.fix for problem in caught.value.problems] == [fix]


@pytest.mark.parametrize("text", ["import kept", "import spmd.nothing", "{}['keep']", "int(keep=3)"])
def test_control_other_errors_have_no_hint(text, tmp_path):
    """A word that is an earlier name elsewhere is none."""
    path = tmp_path / "broken.py"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match="fails") as caught:
        load_config(str(path))
    assert [problem.fix for problem in caught.value.problems] == [""]


def test_current_names_exist():
    """Every name that a fix gives, and no module that is imported by its earlier name."""
    assert all(importlib.util.find_spec(new) for new in MODULES.values())
    fields = {field.name for field in dataclasses.fields(spmd.TrainConfig)}
    assert set(FIELDS.values()) <= fields
    assert not set(FIELDS) & fields
    assert CLASSES["FaultsConfig"] == spmd.SDCConfig.__name__


def test_an_earlier_flag_gets_the_current_one(capsys):
    """For the flag of a field, and of a field inside of it; in either spelling."""
    assert run("train", "demo", "--keep", "3", "--faults.repeat-every=2", "--loss_chunk", "5") == 2
    error = capsys.readouterr().err
    assert "fix: --keep is now --max-to-keep" in error
    assert "fix: --faults.repeat-every is now --sdc-checks.repeat-every" in error
    assert "fix: --loss_chunk is now --logits-chunk" in error
    assert not renamed_flags(["train", "keep", "--keep-best", "2", "--max-to-keep", "1"])


def test_values_under_earlier_names_are_those_of_the_config():
    """So the record of a checkpoint by an earlier version differs in nothing; without the mapping, it would."""
    after = config_values(CONFIG)
    assert config_difference(current_fields(old_values()), after) == {}
    assert len(config_difference(old_values(), after)) > len(FIELDS)


def test_a_run_folder_with_earlier_names_is_read(tmp_path):
    """Its config.json holds the values; its config.py was edited as the error says."""
    (tmp_path / "config.py").write_text(IMPORTS + MAKE.format("") + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"config": old_values(), "changed": {}}))
    assert RunDir(tmp_path).config() == CONFIG
