"""Initial state of a run: random parameters, or those of another run or a Hugging Face folder.

The folder is that of `--init`. Loaded parameters are placed directly into the plan's shards,
whatever mesh they were saved on; with LoRA they are the frozen base parameters. The optimizer state
and the data order start from the beginning.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd import tree
from spmd.data.tokenizer import TOKENIZER
from spmd.errors import CheckpointError, Problem
from spmd.hf.folder import CONFIG, HFFolder, open_folder
from spmd.hf.load import check_published, load_model
from spmd.hf.sidecar_files import ORIGINAL, copy_origin
from spmd.lora.adapters import BASE
from spmd.lora.quantized_base import store_base
from spmd.model_interface.wrapped_param import abstract_params
from spmd.run.build import TrainSetup
from spmd.run.config import EXECUTION_FIELDS, TrainConfig, config_difference, config_values
from spmd.run.load_config import other_config
from spmd.run.load_params import read_params, read_variables
from spmd.run.run_dir import RunDir, is_run
from spmd.storage.address import Location, locate
from spmd.storage.download import is_side_file, local_path
from spmd.training.state import TrainState, init_state


def check_init(setup: TrainSetup) -> str:
    """Check `init` for the run, from configs and headers alone.

    Return a line about the initial parameters; empty if all parameters are random and trained.
    """
    config = setup.config
    if not config.init:
        return _line_of_random_base(config)
    location = locate(config.init)
    if is_run(location):
        with other_config():
            _check_model(location, RunDir(location).config().model, config.model)
    else:
        with _open_hf(setup, location):
            pass
    tokenizer = local_path(config.init, is_side_file) / TOKENIZER
    if tokenizer.exists() and config.data.tokenizer == "bytes":
        return f"starts with {location}; its tokenizer is not used: --data.tokenizer {tokenizer}"
    return f"starts with {location}"


def _line_of_random_base(config: TrainConfig) -> str:
    """Return a warning about adapters of random parameters; empty without adapters."""
    if not config.lora.targets:
        return ""
    return (
        "LoRA adapters are trained on base parameters that are drawn at random: give "
        "--init to load them"
    )


def copy_source_files(setup: TrainSetup, run: Path) -> None:
    """Copy the files for an export from the `init` folder into the run folder."""
    if setup.config.init:
        location = locate(setup.config.init)
        source = local_path(setup.config.init, is_side_file)
        config_file = ORIGINAL if is_run(location) else CONFIG
        copy_origin(source, source / config_file, run)


def initial_state(setup: TrainSetup) -> TrainState:
    """Return the state before the first step, on the setup's mesh."""
    config = setup.config
    plan = setup.plan
    if not config.init:
        return init_state(plan, config.seed)
    location = locate(config.init)
    if is_run(location):
        stored = _model_params(setup)
        params = store_base(read_params(location, abstract_params(stored), trained=True), stored)
        variables = read_variables(location, _model_variables(setup))
    else:
        with _open_hf(setup, location) as found:
            params, variables = load_model(found, _model_params(setup), _model_variables(setup))
    if config.lora.targets:
        return init_state(plan, config.seed, variables={BASE: params, **variables})
    return init_state(plan, config.seed, params=params, variables=variables)


def _model_params(setup: TrainSetup) -> Any:
    """Return the plan's abstract model parameters: the trained ones, or the frozen base of LoRA."""
    if setup.config.lora.targets:
        return setup.plan.abstract_variables[BASE]
    return setup.plan.abstract_params


def _model_variables(setup: TrainSetup) -> dict[str, Any]:
    """Return the plan's abstract variables of the model, without random state and LoRA's base."""
    random = setup.plan.model.info().random_state

    def is_own(path: str) -> bool:
        return path not in random and not path.startswith(f"{BASE}/")

    return tree.select(setup.plan.abstract_variables, is_own)


@contextlib.contextmanager
def _open_hf(setup: TrainSetup, location: Location) -> Iterator[HFFolder]:
    """Open a Hugging Face folder with the parameters of the setup's model."""
    with open_folder(location) as found:
        _check_model(location, found.config, setup.config.model)
        check_published(found, _model_params(setup), _model_variables(setup))
        yield found


def _check_model(path: Location, theirs: Any, ours: Any) -> None:
    """Raise if two model configs differ: shapes may agree with another frequency or window."""
    before = {"class": type(theirs).__name__, **config_values(theirs)}
    after = {"class": type(ours).__name__, **config_values(ours)}
    problems = list[Problem]()
    for name, (old, new) in config_difference(before, after).items():
        if name not in EXECUTION_FIELDS:
            what = f"is {new}, and {path} has {old}"
            problems.append(Problem(f"model.{name}", what, fix=f"--model.{name} {old}"))
    if problems and problems[0].where == "model.class":
        fix = f"model={before['class']}(…), or the config that `spmd import` writes"
        problems = [dataclasses.replace(problems[0], fix=fix)]
    if problems:
        raise CheckpointError("Training cannot start with another model's parameters:", problems)
