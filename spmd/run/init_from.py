"""Where training starts: from parameters that are drawn, or from those of a run or of a Hugging Face folder.

`--init` puts them straight into the plan's shards, whatever mesh they were on, and with adapters they become what is
frozen. The optimizer's state and the data begin anew.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd.checkpoint.manifest import read_object
from spmd.data.tokenizer import TOKENIZER
from spmd.errors import CheckpointError, Problem
from spmd.hf.folder import CONFIG, HFFolder, open_folder
from spmd.hf.load import check_published, load_published
from spmd.hf.sidecar_files import ORIGINAL, copy_origin
from spmd.plan.lora import BASE
from spmd.run.build import TrainSetup
from spmd.run.config import config_difference, config_values
from spmd.run.load_params import read_params
from spmd.run.run_dir import RunDir
from spmd.train.state import TrainState, init_state

_HOW = ("stacked", "unroll")
"""Fields of a model that say how it is computed, not what."""

_AT_MOST = 16 << 20


def check_start(setup: TrainSetup) -> str:
    """Finds what keeps a run from starting with `init`, from configs and headers alone.

    Returns:
        What the run starts with, for a person; empty where parameters are drawn, and all of them are trained.

    Raises:
        CheckpointError: There is no such folder, or it holds another model.
    """
    path = Path(setup.config.init)
    if not setup.config.init:
        drawn = "adapters are trained beside parameters that are drawn at random: --init says whose they should be"
        return drawn if setup.config.lora.targets else ""
    if not _is_run(path):
        with _opened(setup, path) as found:
            model = found.config
    else:
        model = RunDir(path).config().model
    _check_model(path, model, setup.config.model)
    tokenizer = path / TOKENIZER
    if tokenizer.exists() and setup.config.data.tokenizer == "bytes":
        return f"starts with {path}, which has a tokenizer that is not used here: --data.tokenizer {tokenizer}"
    return f"starts with {path}"


def copy_source_files(setup: TrainSetup, run: Path) -> None:
    """Puts what an export gives back of the model that a run starts from into the run's folder.

    Args:
        setup: The run.
        run: Its folder.
    """
    if setup.config.init:
        start = Path(setup.config.init)
        copy_origin(start, start / (ORIGINAL if _is_run(start) else CONFIG), run)


def initial_state(setup: TrainSetup) -> TrainState:
    """The state before the first step, on the setup's mesh.

    Raises:
        CheckpointError: The parameters of `init` cannot be read, or are those of another model.
    """
    config, plan = setup.config, setup.plan
    if not config.init:
        return init_state(plan, config.seed)
    if config.lora.targets:
        return init_state(plan, config.seed, variables={BASE: _read(setup)})
    return init_state(plan, config.seed, params=_read(setup))


def _read(setup: TrainSetup) -> Any:
    path = Path(setup.config.init)
    if _is_run(path):
        return read_params(path, _wanted(setup))
    with _opened(setup, path) as found:
        return load_published(found, _wanted(setup))


def _wanted(setup: TrainSetup) -> Any:
    """The model's own parameters as the plan has them: what is trained, or what is frozen."""
    plan = setup.plan
    return plan.abstract_variables[BASE] if setup.config.lora.targets else plan.abstract_params


def _is_run(path: Path) -> bool:
    """Whether a folder is a run's, whose config.py is executed: one that could be Hugging Face's never is."""
    if not RunDir(path).checkpoints.is_dir() or any(path.glob("*.safetensors*")):
        return False
    try:
        return "architectures" not in read_object(path / CONFIG, _AT_MOST)
    except (OSError, ValueError):
        return True  # which says that there is no run


@contextlib.contextmanager
def _opened(setup: TrainSetup, path: Path) -> Iterator[HFFolder]:
    with open_folder(path) as found:
        _check_model(path, found.config, setup.config.model)
        check_published(found, _wanted(setup))
        yield found


def _check_model(path: Path, theirs: Any, ours: Any) -> None:
    """Whether two shapes are one: a parameter fits where a frequency or a window does not."""
    before, after = ({"class": type(x).__name__, **config_values(x)} for x in (theirs, ours))
    problems = [
        Problem(f"model.{name}", f"is {new}, and {path} has {old}", fix=f"--model.{name} {old}")
        for name, (old, new) in config_difference(before, after).items()
        if name not in _HOW
    ]
    if problems and problems[0].where == "model.class":
        fix = f"model={before['class']}(…), or the config that `spmd import` writes"
        problems = [dataclasses.replace(problems[0], fix=fix)]
    if problems:
        raise CheckpointError("Training cannot start with another model's parameters:", problems)
