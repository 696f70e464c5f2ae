"""Metadata that a checkpoint contains, and the values in it that a resumed run must keep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.checkpoint.versions import library_versions
from spmd.data.corpus import Corpus
from spmd.errors import CheckpointError, Problem
from spmd.run.build import TrainSetup
from spmd.run.config import config_values
from spmd.run.run_dir import IMPORTED


def _data_identity(setup: TrainSetup, corpus: Corpus) -> dict[str, Any]:
    """Return the values that determine the order of the data."""
    data = setup.config.data
    return {"data": corpus.fingerprint, "seed": setup.config.seed, "batch": data.batch, "sequence": data.sequence}


def checkpoint_record(setup: TrainSetup, corpus: Corpus) -> dict[str, Any]:
    """Return the metadata of a run that its checkpoints contain."""
    return _data_identity(setup, corpus) | {
        "config": config_values(setup.config),
        "plan": str(setup.plan),
        "mesh": dict(setup.plan.mesh.shape),
        "versions": library_versions(),
    }


def check_resumable(record: Mapping[str, Any], setup: TrainSetup, corpus: Corpus, path: Path) -> None:
    """Raise `CheckpointError` if a checkpoint is not of this run, or of other data."""
    if IMPORTED in record:
        fix = f"--init {path}, and another --out"
        problem = Problem(str(path), "contains imported parameters, not a run that can be resumed", fix=fix)
        raise CheckpointError("Nothing was resumed:", [problem])
    kinds = {"step": int, "position": int, "config": dict}
    if unknown := [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]:
        problems = [Problem(name, "is missing from the checkpoint's record, or has another type") for name in unknown]
        raise CheckpointError(f"{path} contains checkpoints of another tool:", problems)
    problems = [
        Problem(name, f"was {record.get(name)} and is {value}", fix="give the value that the run was started with")
        for name, value in _data_identity(setup, corpus).items()
        if record.get(name) != value
    ]
    if setup.config.steps < record["step"]:
        detail = f"the checkpoint is of step {record['step']}"
        problems.append(Problem("steps", f"is {setup.config.steps}", detail, "ask for more steps"))
    if problems:
        raise CheckpointError(f"{path} cannot be resumed with this config:", problems)
